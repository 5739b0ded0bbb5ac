r"""Trains one model with several all-reduces, data-parallel, and compares accuracy, loss and words sent.

Every algorithm starts from the same parameters and sees the same batches in the same order. Each run is printed and
kept in train.json in --report_dir as soon as it ends. At the end follow a table, and a figure, demo.png: accuracy over
steps, and over words sent. With --trace also trace.png: what `js.metrics` said in every step.

Examples:
  python -m benchmarks.train
  python -m benchmarks.train --algorithm=all
  python -m benchmarks.train --algorithm=spardl,spardl:residual=partial,spardl:residual=local --seed=0,1,2
  python -m benchmarks.train --algorithm=oktopk,gaussiank,oktopk:regions=even --trace=selected,delivered,imbalance
  python -m benchmarks.train --engine=sim --workers=5 --folds=5
  python -m benchmarks.train --task=lm --engine=sim --workers=4 --batch_size=4 --optimizer=adamw:0.001,sgd:0.3
  python -m benchmarks.train --data_dir=$HOME/cifar --steps=5000
  python -m benchmarks.train --engine=processes --algorithm=spardl,dense
"""

import itertools
import json
import pathlib

import rich.console
from absl import flags

import jaxsparse as js
from benchmarks import entry, methods, recipes, report, workers
from benchmarks.tasks import data, lm, small
from benchmarks.tasks.base import Task
from benchmarks.train import runs as tables
from benchmarks.train.runs import Run, train

_ALGORITHM = flags.DEFINE_multi_string(
  "algorithm", ["spardl", "dense"], f"All-reduces to compare, in this order, or 'all', {methods.HELP}"
)
_ENGINE = flags.DEFINE_enum("engine", "devices", list(workers.ENGINES), workers.ENGINE_HELP)
_WORKERS = flags.DEFINE_integer("workers", 6, "Number of workers.", lower_bound=1)
_DENSITY = flags.DEFINE_float("density", 0.01, "Fraction of the entries that a sparse all-reduce delivers in a step.")
_TASK = flags.DEFINE_enum("task", "images", ["images", "lm"], "lm: a byte-level language model, see tasks/lm.py.")
_MODEL = flags.DEFINE_enum("model", "cnn", list(small.MODELS), "The model to train on images.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Train on CIFAR-10: the folder that holds cifar-10-batches-py.")
_STEPS = flags.DEFINE_integer("steps", 1500, "Training steps of each algorithm.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Images, or windows of text, of each worker.", lower_bound=1)
_OPTIMIZER = flags.DEFINE_multi_string(
  "optimizer", ["sgd"], f"What follows the all-reduce. {recipes.HELP} Repeat it, or separate by commas."
)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 0.1, "Peak rate of optimizers that name none; cosine decay.")
_SEED = entry.define_seeds([0])
_FOLDS = flags.DEFINE_integer(
  "folds", 1, "Folds of cross-validation on the digits, each from each seed; 1: the first of five.", lower_bound=1
)
_TRACE = flags.DEFINE_list("trace", [], "Metrics of js.metrics to draw over the steps, for example selected,delivered.")
_REPORT_DIR = entry.define_report_dir("train.json and the figures demo.png and trace.png")
_JSON = entry.define_json()

entry.require(_TRACE, lambda names: set(names) <= set(js.Metrics.names()), f"from {', '.join(js.Metrics.names())}")


def _make_tasks() -> list[Task]:
  """The task on each fold."""
  if _TASK.value == "lm":
    if idle := [flag.name for flag in (_MODEL, _DATA_DIR) if flag.present]:
      raise ValueError(f"--{idle[0]} is for --task=images: --task=lm has a model and a text of its own")
    return [lm.small()]
  name, folds = "cifar10" if _DATA_DIR.value else "digits", _FOLDS.value if _FOLDS.value > 1 else data.FOLDS
  return [small.make(_MODEL.value, data.load(name, _DATA_DIR.value, fold, folds)) for fold in range(_FOLDS.value)]


def _compare(
  algorithms: list[methods.Method], optimizers: list[recipes.Optimizer], console: rich.console.Console
) -> tuple[list[Run], str]:
  """Trains with every algorithm and optimizer, from every seed, on every fold; the runs, and their title."""
  place, tasks = workers.here(_ENGINE.value, _WORKERS.value), _make_tasks()
  title = f"{tasks[0]}, {place}, density {_DENSITY.value:g}"
  if _OPTIMIZER.value != ["sgd"]:
    title += f", {', '.join(map(str, optimizers))}"
  console.quiet = not place.reports
  console.print(title, soft_wrap=True)
  runs: list[Run] = []
  for optimizer, method, (fold, task), seed in itertools.product(optimizers, algorithms, enumerate(tasks), _SEED.value):
    recipe = recipes.Recipe(optimizer, "cosine", steps=_STEPS.value)
    with report.progress(console, f"{method.label}, {optimizer}, seed {seed}", _STEPS.value) as show:
      run = train(task, method, recipe, place, _BATCH_SIZE.value, seed, show)
    runs.append(run._replace(fold=fold))
    if place.reports:
      tables.keep(runs, title, pathlib.Path(_REPORT_DIR.value) / "train.json")
      console.print(tables.line(runs[-1]), highlight=False, soft_wrap=True)
  return runs if place.reports else [], title


def main() -> None:
  """Trains all that the flags name and reports."""
  if _FOLDS.value > 1 and (_TASK.value == "lm" or _DATA_DIR.value):
    raise ValueError(f"--folds={_FOLDS.value} is for the digits: other data come with a test set of their own")
  algorithms = methods.parse("algorithm", _ALGORITHM.value, _WORKERS.value, density=_DENSITY.value)
  optimizers = recipes.parse_optimizers(_OPTIMIZER.value, _LEARNING_RATE.value)
  if workers.launched(_ENGINE.value, _WORKERS.value):
    return
  console = workers.make_console(stderr=_JSON.value)
  runs, title = _compare(algorithms, optimizers, console)
  if runs:
    _report(runs, title, console)


def _report(runs: list[Run], title: str, console: rich.console.Console) -> None:
  path = pathlib.Path(_REPORT_DIR.value) / "demo.png"
  tables.figure(runs, title, path)
  console.print(tables.table(runs, f"after {_STEPS.value} steps"))
  console.print(f"figure: {path}")
  if _TRACE.value:
    path = path.with_name("trace.png")
    tables.trace(runs, _TRACE.value, title, path)
    console.print(f"figure: {path}")
  if _JSON.value:
    print(json.dumps({"title": title, "runs": [run._asdict() for run in runs]}))


if __name__ == "__main__":
  entry.run(main)
