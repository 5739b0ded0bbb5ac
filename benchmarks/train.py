r"""Trains one model with several all-reduces, data-parallel, and compares what each reached and what it sent.

Every algorithm starts from the same parameters and sees the same batches in the same order. The run ends with a table
and with a figure, demo.png in --report_dir: accuracy over steps, and over words sent.

Examples:
  python -m benchmarks.train
  python -m benchmarks.train --algorithm=spardl,dense --workers=4 --density=0.001 --steps=1000
  python -m benchmarks.train --dataset=cifar10 --data_dir=$HOME/data --model=cnn --steps=5000
  python -m benchmarks.train --json | jq '.runs[].test_accuracy'
"""

import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.console
import rich.progress
import rich.table
from absl import app, flags, logging
from flax import nnx
from jax.sharding import Mesh

import jaxsparse as js
from benchmarks import data, models, workers

_ALGORITHM = flags.DEFINE_multi_string(
  "algorithm", ["spardl", "dense"], "All-reduces to compare, in this order, or 'all'. Repeat it, or separate by commas."
)
_WORKERS = flags.DEFINE_integer("workers", 6, "Number of workers: accelerators if there are as many, else CPU devices.")
_DENSITY = flags.DEFINE_float(
  "density", 0.01, "Share of the gradient entries that a sparse all-reduce delivers a step."
)
_TEAMS = flags.DEFINE_integer("teams", 1, "Teams of workers for SparDL (one team so far).")
_MODEL = flags.DEFINE_enum("model", "cnn", models.MODELS, "The model to train.")
_DATASET = flags.DEFINE_enum("dataset", "digits", ["digits", "cifar10"], "digits ships inside scikit-learn.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "For cifar10: the folder that holds cifar-10-batches-py.")
_STEPS = flags.DEFINE_integer("steps", 1500, "Training steps of each algorithm.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Images of each worker in each step.")
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 0.1, "Peak learning rate of plain SGD, with cosine decay.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the parameters and of the order of the batches.")
_REPORT_DIR = flags.DEFINE_string("report_dir", "out", "Folder for the figure demo.png.")
_JSON = flags.DEFINE_bool(
  "json", False, "Print the result as JSON on standard output, everything else on standard error."
)

_CLASSES = 10
_CURVE_POINTS = 40  # evaluations on the test set during a run


class Run(NamedTuple):
  """What one algorithm reached.

  Attributes:
    algorithm: its name.
    test_accuracy: share of the test set classified correctly after the last step.
    words_per_step: 4-byte words that one worker sent in one step, counted from the schedule.
    messages_per_step: messages that one worker sent in one step, one after the other.
    seconds_per_step: median, evaluation and compilation left out.
    residual_norm: ℓ₂ norm of all residuals after the last step.
    steps: the steps at which `accuracy` was measured.
    accuracy: test accuracy at those steps.
    loss: training loss at those steps.
  """

  algorithm: str
  test_accuracy: float
  words_per_step: int
  messages_per_step: int
  seconds_per_step: float
  residual_norm: float
  steps: list[int]
  accuracy: list[float]
  loss: list[float]


class Task(NamedTuple):
  """A model and its data, as functions of a parameter pytree."""

  params: Any
  loss: Callable[[Any, Any], jax.Array]
  accuracy: Callable[[Any], float]
  batches: Callable[[], Iterator[Any]]


def make_task(model: str, dataset: data.Dataset, mesh: Mesh, batch_size: int, seed: int) -> Task:
  """The classification task of a model on a data set, `batch_size` images a worker."""
  module = models.make(model, dataset.train_images.shape[1:], _CLASSES, seed)
  structure, params = nnx.split(module)

  def logits(params: Any, images: jax.Array) -> jax.Array:
    return nnx.merge(structure, params)(images)

  def loss(params: Any, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, batch["image"]), batch["label"]).mean()

  correct = jax.jit(lambda params, images, labels: jnp.sum(jnp.argmax(logits(params, images), -1) == labels))
  home = mesh.devices.flat[0]

  def accuracy(params: Any) -> float:
    params, hits = jax.device_put(params, home), 0
    for start in range(0, len(dataset.test_images), 1000):
      part = slice(start, start + 1000)
      hits += int(correct(params, *jax.device_put((dataset.test_images[part], dataset.test_labels[part]), home)))
    return hits / len(dataset.test_images)

  size = batch_size * mesh.size
  return Task(params, loss, accuracy, lambda: data.batches(dataset.train_images, dataset.train_labels, size, seed))


def train(
  task: Task,
  algorithm: str,
  config: dict[str, Any],
  mesh: Mesh,
  steps: int,
  learning_rate: float,
  on_step: Callable[[int, float], None],
) -> Run:
  """Trains `task` with one all-reduce; calls `on_step` with the step and the last measured accuracy."""
  schedule = optax.cosine_decay_schedule(learning_rate, steps)
  tx = optax.chain(js.make_transform(algorithm, workers.AXIS, **config), optax.sgd(schedule))
  params = jax.tree.map(jnp.copy, task.params)  # the step donates them
  state = js.init(tx, params, mesh, axis=workers.AXIS)
  step = js.make_train_step(task.loss, tx, mesh, axis=workers.AXIS)
  few = min(steps, _CURVE_POINTS // 2)  # closer together where accuracy changes most, at the start
  points = {round(point) for spread in (np.linspace, np.geomspace) for point in spread(1, steps, few)} | {steps}
  run = Run(algorithm, 0.0, 0, 0, 0.0, 0.0, [], [], [])
  times, batches = [], task.batches()
  for number in range(1, steps + 1):
    batch = next(batches)
    start = time.perf_counter()
    params, state, metrics = step(params, state, batch)
    jax.block_until_ready(metrics)
    times.append(time.perf_counter() - start)
    if number in points:
      run.steps.append(number)
      run.accuracy.append(task.accuracy(params))
      run.loss.append(float(metrics.loss))
    on_step(number, run.accuracy[-1] if run.accuracy else 0.0)
  n = sum(leaf.size for leaf in jax.tree.leaves(task.params))
  cost = js.costs.count(algorithm, n=n, workers=mesh.size, **config)
  return run._replace(
    test_accuracy=run.accuracy[-1],
    words_per_step=cost.words,
    messages_per_step=cost.messages,
    seconds_per_step=statistics.median(times[1:] or times),  # the first step compiles
    residual_norm=float(js.metrics(state).residual_norm),
  )


def table(runs: list[Run], title: str) -> rich.table.Table:
  """The runs side by side; words as a ratio to dense float32 where that was run."""
  dense = next((run.words_per_step for run in runs if run.algorithm == "dense"), None)
  result = rich.table.Table(title=title)
  result.add_column("algorithm", no_wrap=True)
  for head in ("test accuracy", "words / step", "vs dense", "messages / step", "ms / step", "residual norm"):
    result.add_column(head, justify="right")
  for run in runs:
    ratio = f"{run.words_per_step / dense:.3f}" if dense else "–"
    result.add_row(
      run.algorithm,
      f"{run.test_accuracy:.4f}",
      f"{run.words_per_step:,}",
      ratio,
      str(run.messages_per_step),
      f"{1e3 * run.seconds_per_step:.1f}",
      f"{run.residual_norm:.3f}",
    )
  return result


def figure(runs: list[Run], title: str, path: pathlib.Path) -> None:
  """Test accuracy over steps, and over words sent by each worker."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  plot, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
  for run in runs:
    axes[0].plot(run.steps, run.accuracy, label=run.algorithm)
    axes[1].plot([max(1, step * run.words_per_step) for step in run.steps], run.accuracy, label=run.algorithm)
  axes[0].set(xlabel="step", ylabel="test accuracy")
  axes[1].set(xlabel="words sent by each worker (4 bytes each)", xscale="log")
  for axis in axes:
    axis.grid(alpha=0.3)
  axes[0].legend()
  plot.suptitle(title)
  path.parent.mkdir(parents=True, exist_ok=True)
  plot.savefig(path, dpi=150)
  plt.close(plot)


def _configs() -> dict[str, dict[str, Any]]:
  """The configuration of every chosen algorithm, checked before anything is trained."""
  names = [name for value in _ALGORITHM.value for name in value.split(",")]
  if names == ["all"]:
    names = list(js.collective_names())
  chosen = {"density": _DENSITY.value, "teams": _TEAMS.value}
  configs = {}
  for name in dict.fromkeys(names):
    options = js.collective_options(name)
    configs[name] = {option: value for option, value in chosen.items() if option in options}
    js.make_collective(name, **configs[name])
  return configs


def _compare(console: rich.console.Console) -> tuple[list[Run], str]:
  """Trains with every chosen algorithm behind a progress bar; the runs, and a title that says what was run."""
  for flag in (_STEPS, _BATCH_SIZE):
    if flag.value < 1:
      raise ValueError(f"--{flag.name}={flag.value}, choose at least 1")
  configs = _configs()
  mesh = workers.mesh_of(_WORKERS.value)
  dataset = data.load(_DATASET.value, _DATA_DIR.value)
  task = make_task(_MODEL.value, dataset, mesh, _BATCH_SIZE.value, _SEED.value)
  n = sum(leaf.size for leaf in jax.tree.leaves(task.params))
  title = f"{_MODEL.value} ({n:,} parameters) on {_DATASET.value}, {workers.describe(mesh)}, density {_DENSITY.value:g}"
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
    for name, config in configs.items():
      bar = progress.add_task(name, total=_STEPS.value, accuracy=0.0)

      def on_step(number: int, accuracy: float, bar: Any = bar) -> None:
        progress.update(bar, completed=number, accuracy=accuracy)

      runs.append(train(task, name, config, mesh, _STEPS.value, _LEARNING_RATE.value, on_step))
  return runs, title


def main(argv: list[str]) -> None:
  """Trains with every chosen algorithm and reports."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments {argv[1:]}: options are --name=value")
  logging.set_verbosity(logging.WARNING)  # JAX tells at INFO which backends it does not find
  console = rich.console.Console(stderr=_JSON.value)
  try:
    runs, title = _compare(console)
  except (ValueError, OSError) as error:
    sys.exit(f"error: {error}")
  path = pathlib.Path(_REPORT_DIR.value) / "demo.png"
  figure(runs, title, path)
  console.print(table(runs, f"after {_STEPS.value} steps"))
  console.print(f"figure: {path}")
  if _JSON.value:
    print(json.dumps({"title": title, "runs": [run._asdict() for run in runs]}))


if __name__ == "__main__":
  app.run(main)
