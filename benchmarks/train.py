r"""Trains one model with several all-reduces, data-parallel, and compares what each reached and what it sent.

Every algorithm starts from the same parameters and sees the same batches in the same order. The run ends with a table
and with a figure, demo.png in --report_dir: accuracy over steps, and over words sent. With --trace also trace.png: what
`js.metrics` said in every step.

Examples:
  python -m benchmarks.train
  python -m benchmarks.train --algorithm=all
  python -m benchmarks.train --algorithm=spardl,dense --workers=4 --density=0.001 --steps=1000
  python -m benchmarks.train --algorithm=spardl,spardl:residual=partial,spardl:residual=local --seed=0 --seed=1 --seed=2
  python -m benchmarks.train --algorithm=oktopk,gaussiank,oktopk:regions=even --trace=selected,delivered,imbalance
  python -m benchmarks.train --algorithm=a2sgd,dense --optimizer=adam --learning_rate=0.003
  python -m benchmarks.train --dataset=cifar10 --data_dir=$HOME/data --model=cnn --steps=5000
  python -m benchmarks.train --engine=processes --algorithm=spardl,dense
  python -m benchmarks.train --json | jq '.runs[].test_accuracy'
"""

import json
import pathlib
from typing import Any

import rich.console
import rich.progress
from absl import flags

import jaxsparse as js
from benchmarks import data, entry, models, report, specs, training, workers

_ALGORITHM = flags.DEFINE_multi_string("algorithm", ["spardl", "dense"], specs.HELP)
_ENGINE = flags.DEFINE_enum("engine", "devices", list(workers.ENGINES), workers.ENGINE_HELP)
_WORKERS = flags.DEFINE_integer("workers", 6, "Number of workers.")
_DENSITY = flags.DEFINE_float(
  "density", 0.01, "Share of the gradient entries that a sparse all-reduce delivers a step."
)
_TEAMS = flags.DEFINE_integer("teams", 1, "Teams of workers for SparDL; a divisor of --workers.")
_MODEL = flags.DEFINE_enum("model", "cnn", models.MODELS, "The model to train.")
_DATASET = flags.DEFINE_enum("dataset", "digits", ["digits", "cifar10"], "digits ships inside scikit-learn.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "For cifar10: the folder that holds cifar-10-batches-py.")
_STEPS = flags.DEFINE_integer("steps", 1500, "Training steps of each algorithm.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Images of each worker in each step.")
_OPTIMIZER = flags.DEFINE_enum("optimizer", "sgd", list(training.OPTIMIZERS), "What follows the all-reduce.")
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 0.1, "Peak learning rate, with cosine decay.")
_SEED = flags.DEFINE_multi_integer(
  "seed", [0], "Seed of the parameters and of the order of the batches. Repeat it for several runs of each algorithm."
)
_TRACE = flags.DEFINE_list("trace", [], "Metrics of js.metrics to draw over the steps, for example selected,delivered.")
_REPORT_DIR = flags.DEFINE_string("report_dir", "out", "Folder for the figures demo.png and trace.png.")
_JSON = flags.DEFINE_bool(
  "json", False, "Print the result as JSON on standard output, everything else on standard error."
)


def _check_flags() -> list[specs.Spec]:
  """The algorithms to run; raises ValueError before anything is trained."""
  for flag in (_STEPS, _BATCH_SIZE, _WORKERS):
    if flag.value < 1:
      raise ValueError(f"--{flag.name}={flag.value}, choose at least 1")
  unknown = sorted(set(_TRACE.value) - set(js.Metrics._fields))
  if unknown:
    raise ValueError(f"--trace={unknown[0]}, choose from {', '.join(js.Metrics._fields)}")
  return specs.parse(_ALGORITHM.value, _WORKERS.value, density=_DENSITY.value, teams=_TEAMS.value)


def _compare(
  chosen: list[specs.Spec], place: workers.Workers, console: rich.console.Console
) -> tuple[list[training.Run], str]:
  """Trains with every chosen algorithm behind a progress bar; the runs, and a title that says what was run."""
  dataset = data.load(_DATASET.value, _DATA_DIR.value)
  tasks = {
    seed: training.make_task(_MODEL.value, dataset, place, _BATCH_SIZE.value, seed)
    for seed in dict.fromkeys(_SEED.value)
  }
  n = next(iter(tasks.values())).entries
  title = f"{_MODEL.value} ({n:,} parameters) on {_DATASET.value}, {place}, density {_DENSITY.value:g}"
  if _OPTIMIZER.value != "sgd":
    title += f", {_OPTIMIZER.value}"
  columns = [
    rich.progress.TextColumn("{task.description:>10}"),
    rich.progress.BarColumn(),
    rich.progress.MofNCompleteColumn(),
    rich.progress.TextColumn("accuracy {task.fields[accuracy]:.3f}"),
    rich.progress.TimeRemainingColumn(),
  ]
  runs = []
  console.print(title)
  with rich.progress.Progress(*columns, console=console) as progress:
    for spec in chosen:
      for seed, task in tasks.items():
        name = spec.label if len(tasks) == 1 else f"{spec.label} {seed}"
        bar = progress.add_task(name, total=_STEPS.value, accuracy=0.0)

        def on_step(number: int, accuracy: float, bar: Any = bar) -> None:
          progress.update(bar, completed=number, accuracy=accuracy)

        settings = (_STEPS.value, _OPTIMIZER.value, _LEARNING_RATE.value, seed)
        runs.append(training.train(task, spec, place, *settings, on_step))
  return runs, title


def main() -> None:
  """Trains with every chosen algorithm and reports."""
  chosen = _check_flags()
  if workers.launched(_ENGINE.value, _WORKERS.value):
    return
  place = workers.here(_ENGINE.value, _WORKERS.value)
  console = workers.make_console(stderr=_JSON.value, quiet=not place.reports)
  runs, title = _compare(chosen, place, console)
  if place.reports:
    _report(runs, title, console)


def _report(runs: list[training.Run], title: str, console: rich.console.Console) -> None:
  path = pathlib.Path(_REPORT_DIR.value) / "demo.png"
  report.figure(runs, title, path)
  console.print(report.table(runs, f"after {_STEPS.value} steps"))
  console.print(f"figure: {path}")
  if _TRACE.value:
    path = path.with_name("trace.png")
    report.trace(runs, _TRACE.value, title, path)
    console.print(f"figure: {path}")
  if _JSON.value:
    print(json.dumps({"title": title, "runs": [run._asdict() for run in runs]}))


if __name__ == "__main__":
  entry.run(main)
