r"""Trains one model with several all-reduces, data-parallel, and compares accuracy, loss and words sent.

Every algorithm starts from the same parameters and sees the same batches in the same order. Each run is printed and
kept in train.json in --report_dir as soon as it ends. At the end follow a table, and a figure, demo.png: accuracy over
steps, and over words sent. With --trace also trace.png: what `js.metrics` said in every step.

Examples:
  python -m benchmarks.train
  python -m benchmarks.train --algorithm=all
  python -m benchmarks.train --algorithm=spardl,dense --workers=4 --density=0.001 --steps=1000
  python -m benchmarks.train --algorithm=spardl,spardl:residual=partial,spardl:residual=local --seed=0 --seed=1 --seed=2
  python -m benchmarks.train --algorithm=oktopk,gaussiank,oktopk:regions=even --trace=selected,delivered,imbalance
  python -m benchmarks.train --algorithm=a2sgd,dense --optimizer=adam --learning_rate=0.003
  python -m benchmarks.train --engine=sim --workers=5 --folds=5
  python -m benchmarks.train --task=lm --engine=sim --workers=4 --batch_size=4 --optimizer=adamw:0.001,sgd:0.3
  python -m benchmarks.train --dataset=cifar10 --data_dir=$HOME/data --model=cnn --steps=5000
  python -m benchmarks.train --engine=processes --algorithm=spardl,dense
  python -m benchmarks.train --json | jq '.runs[].test_accuracy'
"""

import itertools
import json
import pathlib
from typing import Any, NamedTuple

import rich.console
import rich.progress
from absl import flags

import jaxsparse as js
from benchmarks import entry, methods, papers, recipes, workers
from benchmarks.tasks import data, lm, small
from benchmarks.tasks.base import Task
from benchmarks.train import report as tables
from benchmarks.train.run import Run, train

_ALGORITHM = flags.DEFINE_multi_string(
  "algorithm", ["spardl", "dense"], f"All-reduces to compare, in this order, or 'all', {methods.HELP}"
)
_ENGINE = flags.DEFINE_enum("engine", "devices", list(workers.ENGINES), workers.ENGINE_HELP)
_WORKERS = flags.DEFINE_integer("workers", 6, "Number of workers.")
_DENSITY = flags.DEFINE_float(
  "density", 0.01, "Fraction of the gradient entries that a sparse all-reduce delivers in a step."
)
_TEAMS = flags.DEFINE_integer("teams", 1, "Teams of workers for SparDL; a divisor of --workers.")
_TASK = flags.DEFINE_enum(
  "task", "images", ["images", "lm"], "images: --model on --dataset; lm: a byte-level language model, see tasks/lm.py."
)
_MODEL = flags.DEFINE_enum("model", "cnn", list(small.MODELS), "The model to train on images.")
_DATASET = flags.DEFINE_enum("dataset", "digits", ["digits", "cifar10"], "digits ships inside scikit-learn.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "For cifar10: the folder that holds cifar-10-batches-py.")
_STEPS = flags.DEFINE_integer("steps", 1500, "Training steps of each algorithm.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Images, or windows of text, of each worker in each step.")
_OPTIMIZER = flags.DEFINE_multi_string(
  "optimizer",
  ["sgd"],
  f"What follows the all-reduce, any of {', '.join(recipes.OPTIMIZERS)}; each may name its rate, as in adamw:0.001, "
  "and window_adam its window, as in window_adam:0.001:window=4. Repeat it, or separate by commas.",
)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 0.1, "Peak rate of optimizers that name none; cosine decay.")
_SEED = flags.DEFINE_multi_integer(
  "seed", [0], "Seed of the parameters and of the order of the batches. Repeat it for several runs of each algorithm."
)
_FOLDS = flags.DEFINE_integer(
  "folds", 1, "Folds of cross-validation on the digits, each tested from each seed; 1 for the first of five."
)
_TRACE = flags.DEFINE_list("trace", [], "Metrics of js.metrics to draw over the steps, for example selected,delivered.")
_REPORT_DIR = flags.DEFINE_string("report_dir", "out", "Folder for train.json and the figures demo.png and trace.png.")
_PAPERS = flags.DEFINE_bool("papers", False, papers.HELP)
_JSON = flags.DEFINE_bool(
  "json", False, "Print the result as JSON on standard output, everything else on standard error."
)


class Plan(NamedTuple):
  """The runs to do: every algorithm with every optimizer, from every seed, on every fold of the data."""

  algorithms: list[methods.Method]
  optimizers: list[recipes.Optimizer]
  seeds: list[int]
  folds: int


def _check_flags() -> Plan:
  """The runs that the flags name; raises ValueError before anything is trained."""
  for flag in (_STEPS, _BATCH_SIZE, _WORKERS, _FOLDS):
    if flag.value < 1:
      raise ValueError(f"--{flag.name}={flag.value}, choose at least 1")
  idle = [flag.name for flag in (_MODEL, _DATASET, _DATA_DIR) if flag.present]
  if _TASK.value == "lm" and idle:
    raise ValueError(f"--{idle[0]} is for --task=images: --task=lm has a model and a text of its own")
  if _FOLDS.value > 1 and (_TASK.value, _DATASET.value) != ("images", "digits"):
    raise ValueError(f"--folds={_FOLDS.value} is for the digits: other data come with a test set of their own")
  unknown = sorted(set(_TRACE.value) - set(js.Metrics.names()))
  if unknown:
    raise ValueError(f"--trace={unknown[0]}, choose from {', '.join(js.Metrics.names())}")
  return Plan(
    methods.parse("algorithm", _ALGORITHM.value, _WORKERS.value, density=_DENSITY.value, teams=_TEAMS.value),
    recipes.parse_optimizers(_OPTIMIZER.value, _LEARNING_RATE.value),
    list(dict.fromkeys(_SEED.value)),
    _FOLDS.value,
  )


def _make_tasks(plan: Plan) -> list[Task]:
  """The task on each fold."""
  if _TASK.value == "lm":
    return [lm.small()]
  folds = plan.folds if plan.folds > 1 else data.FOLDS
  load = lambda fold: data.load(_DATASET.value, _DATA_DIR.value, fold, folds)
  return [small.make(_MODEL.value, load(fold)) for fold in range(plan.folds)]


def _compare(plan: Plan, place: workers.Workers, console: rich.console.Console) -> tuple[list[Run], str]:
  """Trains every run of the plan behind a progress bar, and keeps each; the runs, and the title of their table."""
  tasks = _make_tasks(plan)
  title = f"{tasks[0]}, {place}, density {_DENSITY.value:g}"
  if _OPTIMIZER.value != ["sgd"]:
    title += f", {', '.join(map(str, plan.optimizers))}"
  columns = [
    rich.progress.TextColumn("{task.description:>10}"),
    rich.progress.BarColumn(),
    rich.progress.MofNCompleteColumn(),
    rich.progress.TextColumn("accuracy {task.fields[accuracy]:.3f}"),
    rich.progress.TimeRemainingColumn(),
  ]
  runs: list[Run] = []
  console.print(title, soft_wrap=True)
  with rich.progress.Progress(*columns, console=console) as progress:
    runs_of = itertools.product(plan.optimizers, plan.algorithms, enumerate(tasks), plan.seeds)
    for optimizer, method, (fold, task), seed in runs_of:
      several = len(tasks) * len(plan.seeds) > 1
      name = [str(optimizer)] * (len(plan.optimizers) > 1) + [method.label] + [f"{seed} {fold}"] * several
      bar = progress.add_task(" ".join(name), total=_STEPS.value, accuracy=0.0)

      def on_step(number: int, accuracy: float, bar: Any = bar) -> None:
        progress.update(bar, completed=number, accuracy=accuracy)

      recipe = recipes.Recipe(optimizer, "cosine", steps=_STEPS.value)
      run = train(task, method, recipe, place, _BATCH_SIZE.value, seed, on_step)
      runs.append(run._replace(fold=fold))
      progress.remove_task(bar)
      if place.reports:
        tables.keep(runs, title, pathlib.Path(_REPORT_DIR.value) / "train.json")
        console.print(tables.line(runs[-1]), highlight=False, soft_wrap=True)
  return runs, title


def main() -> None:
  """Trains all that the flags name and reports."""
  plan = _check_flags()
  if workers.launched(_ENGINE.value, _WORKERS.value):
    return
  place = workers.here(_ENGINE.value, _WORKERS.value)
  console = workers.make_console(stderr=_JSON.value, quiet=not place.reports)
  runs, title = _compare(plan, place, console)
  if place.reports:
    _report(runs, title, console)


def _report(runs: list[Run], title: str, console: rich.console.Console) -> None:
  path = pathlib.Path(_REPORT_DIR.value) / "demo.png"
  tables.figure(runs, title, path)
  if _PAPERS.value:
    console.print(papers.beside(papers.of("train")))
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
