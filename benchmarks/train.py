r"""Trains one model with several all-reduces, data-parallel, and compares accuracy, loss and words sent.

Every algorithm starts from the same parameters and sees the same batches in the same
order. Each run is kept in train.json in --report_dir as soon as it ends; demo.png shows
accuracy over steps, and over words sent. --json prints a `trace` of each run too: what
`js.metrics` said in every step.

Examples:
  python -m benchmarks.train
  --algorithm=spardl,spardl:residual=partial,spardl:residual=local --seed=0,1,2 python
  -m benchmarks.train --task=lm --engine=sim --workers=4 --batch_size=4
  --optimizer=adamw:0.001,sgd:0.3 python -m benchmarks.train --data_dir=$HOME/cifar
  --steps=5000
"""

import itertools
import math
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import rich.table
from absl import flags

import jaxsparse as js
from benchmarks import entry, methods, recipes, report, workers
from benchmarks.one_training import Trainer
from benchmarks.tasks import data, images, lm
from benchmarks.tasks.base import Task

_ALGORITHM = flags.DEFINE_multi_string(
  "algorithm", ["spardl", "dense"], f"What to compare, or 'all', {methods.HELP}"
)
_ENGINE = flags.DEFINE_enum(
  "engine", "devices", list(workers.ENGINES), workers.ENGINE_HELP
)
_WORKERS = flags.DEFINE_integer("workers", 6, "Number of workers.", lower_bound=1)
_DENSITY = flags.DEFINE_float(
  "density",
  0.01,
  "Fraction of the entries that a sparse all-reduce delivers in a step.",
)
_TASK = flags.DEFINE_enum(
  "task",
  "images",
  ["images", "lm", "sources"],
  "lm: a byte-level language model, sources: of four texts; tasks/lm.py.",
)
_ALPHA = flags.DEFINE_float(
  "alpha",
  None,
  "Data of each worker's own: images of classes from Dirichlet(α), inf: of all; of --task=sources one text, if finite.",
  lower_bound=0.001,
)
_DATA_DIR = flags.DEFINE_string(
  "data_dir", None, "Train on CIFAR-10: the folder that holds cifar-10-batches-bin."
)
_STEPS = flags.DEFINE_integer(
  "steps", 1500, "Training steps of each algorithm.", lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer(
  "batch_size", 16, "Images, or windows of text, of each worker.", lower_bound=1
)
_OPTIMIZER = flags.DEFINE_multi_string(
  "optimizer", ["sgd"], f"What follows the all-reduce. {recipes.HELP}"
)
_LEARNING_RATE = flags.DEFINE_float(
  "learning_rate", 0.1, "Peak rate of optimizers that name none; cosine decay."
)
_SEED = entry.define_seeds([0])
_FOLDS = flags.DEFINE_integer(
  "folds", 1, "Folds of cross-validation on the digits; 1: the first of five.", 1
)
_REPORT_DIR = entry.define_report_dir("train.json and the figure demo.png")
_JSON = entry.define_json()

_CURVE_POINTS = 40  # evaluations during a run


class Run(NamedTuple):
  """The measurements of one algorithm from one seed."""

  algorithm: str  # as it was asked for
  optimizer: str  # with its peak rate, as the flag names it
  seed: int  # of the parameters and the order of the batches
  test_accuracy: (
    float  # fraction of the test set classified correctly after the last step
  )
  test_loss: float  # mean loss over the test set after the last step
  train_loss: float  # mean loss over the training set after the last step
  words_per_step: (
    float  # 4-byte words that a worker sent in one step, mean over the steps
  )
  # messages that one worker sends in one step, one after the other, counted from the
  # schedule
  messages_per_step: int
  seconds_per_step: float  # median, evaluation and compilation left out
  residual_norm: float  # ℓ₂ norm of all residuals after the last step
  steps: list[int]  # the steps at which the accuracy was measured
  accuracy: list[float]  # test accuracy at those steps
  trace: dict[str, list[float]]  # metrics of `js.metrics` by name, in every step
  fold: int = 0  # of cross-validation, that was left out for the test


def train(trainer: Trainer, on_step: Callable) -> Run:
  """Trains for the steps of the recipe; calls `on_step` with each step and its loss."""
  method, recipe = trainer.method, trainer.recipe
  # closer together where accuracy changes most, at the start
  few = min(recipe.steps, _CURVE_POINTS // 2)
  # Steps of evaluations: evenly spaced ones, and as many by equal factors.
  spreads = (np.linspace, np.geomspace)
  points = {
    round(point) for spread in spreads for point in spread(1, recipe.steps, few)
  } | {recipe.steps}
  trace: dict[str, list[float]] = {name: [] for name in js.Metrics.names()}
  steps, accuracies = [], []
  while trainer.steps < recipe.steps:
    loss, found = trainer.step(), trainer.metrics()
    for name, values in trace.items():
      values.append(found[name])
    if trainer.steps in points:
      steps.append(trainer.steps)
      accuracies.append(trainer.evaluate(trainer.synchronized())[1])
    on_step(trainer.steps, loss)
  params = trainer.synchronized()
  name, config = method.spec.name, method.spec.config
  return Run(
    algorithm=method.label,
    optimizer=str(recipe.optimizer),
    seed=trainer.seed,
    test_accuracy=accuracies[-1],
    test_loss=trainer.evaluate(params)[0],
    train_loss=trainer.evaluate(params, trainer.task.train)[0],
    words_per_step=statistics.mean(trace["words_sent"]),
    messages_per_step=js.costs.count(
      name, n=trainer.params, workers=trainer.place.size, **config
    ).messages,
    seconds_per_step=statistics.median(
      trainer.times[1:] or trainer.times
    ),  # the first step compiles
    residual_norm=trace["residual_norm"][-1],
    steps=steps,
    accuracy=accuracies,
    trace=trace,
  )


def table(runs: Sequence[Run], title: str) -> rich.table.Table:
  """The algorithms side by side: means over seeds and folds."""
  # NaN without dense, so that its column has no numbers
  dense = next(
    (run.words_per_step for run in runs if run.algorithm == "dense"), math.nan
  )
  rows = [
    run._asdict()
    | {
      "vs dense": run.words_per_step / (dense or math.nan),
      "ms": 1e3 * run.seconds_per_step,
    }
    for run in runs
  ]
  forms = dict.fromkeys(("test_accuracy", "test_loss", "train_loss"), ".4f") | {
    "words_per_step": ",.0f"
  }
  forms |= {
    "vs dense": ",.3f",
    "messages_per_step": "g",
    "ms": ".1f",
    "residual_norm": ".3f",
  }
  heads = [
    "optimizer",
    "algorithm",
    "test accuracy",
    "test loss",
    "train loss",
    "words / step",
    "vs dense",
  ]
  heads += ["messages", "ms / step", "residual norm"]
  caption = "± is the standard deviation over seeds and folds"
  return report.table(
    title,
    heads,
    report.means(rows, heads[:2], forms),
    text=2,
    caption=caption,
    wraps=heads[:2],
  )


def figure(runs: Sequence[Run], title: str, path: pathlib.Path) -> None:
  """Test accuracy over steps, and over words sent by each worker; a band from the worst to the best run."""
  groups: dict[str, list[Run]] = {}
  for run in runs:
    groups.setdefault(f"{run.optimizer}, {run.algorithm}", []).append(run)
  plot, (over_steps, over_words) = report.pyplot.subplots(
    1, 2, figsize=(9, 4.5), sharey=True, layout="constrained"
  )
  for label, group in groups.items():
    words = statistics.mean(run.words_per_step for run in group)
    report.band(over_steps, group[0].steps, [run.accuracy for run in group], label)
    report.band(
      over_words,
      # a logarithmic axis, on which 0 words have no place
      [max(1, step * words) for step in group[0].steps],
      [run.accuracy for run in group],
      label,
    )
  over_steps.set(xlabel="step", ylabel="test accuracy")
  over_words.set(xlabel="words sent by each worker (4 bytes each)", xscale="log")
  plot.legend(
    *over_words.get_legend_handles_labels(),
    loc="outside lower center",
    ncols=2,
    fontsize="small",
  )
  report.save(plot, title, path)


def _make_tasks() -> list[Task]:
  """The task on each fold."""
  if _TASK.value == "sources":
    return [lm.several(_ALPHA.value is not None and math.isfinite(_ALPHA.value))]
  if _TASK.value == "lm":
    if _DATA_DIR.value or _ALPHA.value is not None:
      raise ValueError(
        "--data_dir and --alpha are for --task=images: --task=lm has a text of its own"
      )
    return [lm.small()]
  name, folds = (
    "cifar10" if _DATA_DIR.value else "digits",
    _FOLDS.value if _FOLDS.value > 1 else data.FOLDS,
  )
  sets = [data.load(name, _DATA_DIR.value, fold, folds) for fold in range(_FOLDS.value)]
  return [images.make_small("cnn", one, _ALPHA.value) for one in sets]


def main() -> None:
  """Trains with every algorithm and optimizer that the flags name, from every seed, on every fold, and reports."""
  if _FOLDS.value > 1 and (_TASK.value == "lm" or _DATA_DIR.value):
    raise ValueError(
      f"--folds={_FOLDS.value} is for the digits: other data come with a test set of their own"
    )
  algorithms = methods.parse(
    "algorithm", _ALGORITHM.value, _WORKERS.value, density=_DENSITY.value
  )
  optimizers = recipes.parse_optimizers(_OPTIMIZER.value, _LEARNING_RATE.value)
  # Ranks run this command again; the process that started them has nothing more to do.
  if workers.launched(_ENGINE.value, _WORKERS.value):
    return
  place, tasks = workers.here(_ENGINE.value, _WORKERS.value), _make_tasks()
  folder, runs = pathlib.Path(_REPORT_DIR.value), []
  title = ", ".join(
    [f"{tasks[0]}, {place}, density {_DENSITY.value:g}", *map(str, optimizers)]
  )
  console = workers.make_console(stderr=_JSON.value)
  console.quiet = not place.reports
  console.print(title, soft_wrap=True)
  for optimizer, method, (fold, task), seed in itertools.product(
    optimizers, algorithms, enumerate(tasks), _SEED.value
  ):
    recipe = recipes.Recipe(optimizer, "cosine", steps=_STEPS.value)
    name = f"{optimizer}, {method.label}, seed {seed}" + f", fold {fold}" * (fold > 0)
    with report.progress(console, name, _STEPS.value) as show:
      run = train(Trainer(task, method, recipe, place, _BATCH_SIZE.value, seed), show)
    runs.append(run._replace(fold=fold))
    if place.reports:
      kept = [report.rounded(one._replace(trace={})) for one in runs]
      report.keep(folder / "train.json", {"title": title}, {"runs": kept})
    reached = f"test accuracy {run.test_accuracy:.4f}, test loss {run.test_loss:.4f}"
    console.print(
      f"{name}: {reached}, {1e3 * run.seconds_per_step:.1f} ms a step",
      highlight=False,
      soft_wrap=True,
    )
  if not place.reports:
    return
  figure(runs, title, folder / "demo.png")
  console.print(table(runs, f"after {_STEPS.value} steps"))
  console.print(f"figure: {folder / 'demo.png'}")
  if _JSON.value:
    report.print_json({"title": title, "runs": runs})


if __name__ == "__main__":
  entry.run(main)
