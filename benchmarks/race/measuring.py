"""Measures a method: its loss over steps, its seconds a step and their parts, and a whole training on the clock."""

import itertools
import math
import operator
import pathlib
import shutil
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import PartitionSpec

import jaxsparse as js
from benchmarks import report
from benchmarks.methods import Method
from benchmarks.netlab import sent_bytes
from benchmarks.one_training import Trainer
from benchmarks.race.results import Curve, Pace, Whole
from benchmarks.recipes import Recipe
from benchmarks.tasks.base import Task, model_of
from benchmarks.workers import AXIS
from jaxsparse.comm import SoloComm
from jaxsparse.racing import training as racing
from jaxsparse.racing.training import Training
from jaxsparse.train import timing
from jaxsparse.train.engine import engine_of
from jaxsparse.train.starting import start_workers
from jaxsparse.train.worker import WorkerStep

_REPETITIONS = 9  # of the parts of a step


class Runner(NamedTuple):
  """A method, and the recipe of its optimizer."""

  method: Method
  recipe: Recipe

  def __str__(self) -> str:
    return f"{self.method.label}, {self.recipe.optimizer}"

  @property
  def key(self) -> dict[str, str]:
    """The fields by which the results know it."""
    return {"method": self.method.label, "optimizer": str(self.recipe.optimizer)}

  def at(self, rate: Any) -> "Runner":
    """The same at another rate."""
    optimizer = self.recipe.optimizer._replace(rate=rate)
    return self._replace(recipe=self.recipe._replace(optimizer=optimizer))

  def curve(self, seed: int) -> Curve:
    """Its curve before the first step."""
    optimizer = str(self.recipe.optimizer)
    return Curve(self.method.label, optimizer, seed, [], [], [], 0.0)


class Length(NamedTuple):
  """How long a training takes."""

  steps: int  # at least so many
  most: int  # and at most so many, until the target is reached
  every: int  # steps from one evaluation to the next
  target: float | None = None  # the loss to reach, None for none

  def is_done(self, steps: int, losses: list[float]) -> bool:
    """Whether these steps and losses are enough; those of a training that has diverged are."""
    if losses and math.isinf(losses[-1]):
      return True
    reached = self.target is None or min(losses, default=math.inf) <= self.target
    return steps >= self.most or (steps >= self.steps and reached)

  def is_evaluated(self, steps: int) -> bool:
    """Whether the model is evaluated after so many steps."""
    return steps % self.every == 0 or steps in (self.steps, self.most)

  def next_evaluation(self, steps: int) -> int:
    """The steps of the first evaluation after so many."""
    return next(filter(self.is_evaluated, itertools.count(steps + 1)))


class Program(racing.Program):
  """The steps of a method on simulated workers, at any rate and from any seed, as `js.race` takes them."""

  def __init__(self, task: Task, runner: Runner, workers: int):
    self.task = task
    comm = js.SimComm(AXIS, members=workers)
    model = model_of(task, seed=0)

    def make(_: Any, rate: Any) -> optax.GradientTransformation:
      return runner.method.make(comm, runner.at(rate).recipe.make())

    def evaluate(params: Any, statistics: Any) -> tuple[float, float]:
      return model.evaluate(params, jax.tree.map(lambda x: x[0], statistics))

    def read(state: Any) -> tuple[jax.Array, jax.Array]:
      metrics = js.metrics(state)
      return metrics.words_sent, metrics.drift

    setting = racing.Setting(
      loss_fn=model.loss,
      evaluate=evaluate,
      where=comm,
      axis=AXIS,
      engine=engine_of(comm, AXIS),
      # Each worker normalizes by its own batches.
      options={"model_state": "worker"},
      named={},
      rng=None,
      model_state=None,
      read=read,
      loss_of=operator.itemgetter(0),
    )
    super().__init__(setting, make)

  def begin(self, rate: float, seed: int, batch_size: int) -> Training:
    """A training before its first step."""
    model = model_of(self.task, seed)
    workers = self.setting.engine.workers
    params, state, _ = self.start(rate, model.params)
    each = lambda leaf: jnp.broadcast_to(leaf, (workers, *leaf.shape))
    trained = params, state, jax.tree.map(each, model.statistics)
    batches = self.task.stream(seed, workers, batch_size)
    return Training(self, jnp.float32(rate), None, batches, trained)


def go_on(training: Training, length: Length, so_far: Curve) -> Iterator[Curve]:
  """The curve of a training after each evaluation; `words` are those of all steps."""
  while not length.is_done(max(so_far.steps, default=0), so_far.loss):
    until = length.next_evaluation(max(so_far.steps, default=0))
    training.go_on(until, length.every)
    words, drift = training.read
    so_far = so_far._replace(
      steps=[*so_far.steps, until],
      loss=[*so_far.loss, _round_loss(training.losses[-1])],
      accuracy=[*so_far.accuracy, training.evaluated[1]],
      words=so_far.words + float(np.sum(words, dtype=float)),
      drift=max(so_far.drift, float(np.max(drift))),
    )
    yield so_far


def curve(
  training: Training,
  start: Curve,
  length: Length,
  keep: Callable[[Curve], object],
  folder: pathlib.Path,
) -> None:
  """Trains one method; `keep` gets the curve so far at each evaluation.

  A training that was interrupted goes on behind its last evaluation, from `folder`,
  which is removed at the end.
  """
  leaves, structure = jax.tree.flatten(training.trained)
  options = ocp.CheckpointManagerOptions(
    max_to_keep=1, enable_async_checkpointing=False
  )
  checkpoints = {"options": options, "item_handlers": ocp.StandardCheckpointHandler()}
  with ocp.CheckpointManager(folder.resolve(), **checkpoints) as saver:
    if begin := saver.latest_step():
      leaves = saver.restore(begin, args=ocp.args.StandardRestore(leaves))
      training.trained = jax.tree.unflatten(structure, leaves)
      training.batches = itertools.islice(training.batches, begin, None)
      training.steps = [begin]
      start = Curve(**saver.metadata(begin).custom_metadata)
    for so_far in go_on(training, length, start):
      steps = so_far.steps[-1]
      keep(so_far._replace(words=so_far.words / steps))
      trained = ocp.args.StandardSave(jax.tree.leaves(training.trained))
      saver.save(steps, args=trained, custom_metadata=so_far._asdict())
  shutil.rmtree(folder)


def whole(
  trainer: Trainer, rate: str, length: Length, keep: Callable[[Whole], None]
) -> None:
  """Trains one method on a clock that stands still while the model is evaluated."""
  watch = timing.Stopwatch(trainer.engine)
  so_far = Whole(
    trainer.method.label, str(trainer.recipe.optimizer), trainer.seed, rate, [], [], []
  )
  while not length.is_done(trainer.steps, so_far.loss):
    trainer.step()
    if length.is_evaluated(trainer.steps):
      so_far.steps.append(trainer.steps)
      so_far.seconds.append(float(watch.gather(sum(trainer.times[1:])).max()))
      # a barrier too: no host goes on while another one evaluates
      losses = watch.gather(trainer.evaluate()[0])
      so_far.loss.append(_round_loss(float(losses[0])))
      keep(so_far)


def _round_loss(loss: float) -> float:
  """A loss as the results keep it, so that a target is reached here and there; infinite where a training diverges."""
  return float(report.rounded(loss)) if math.isfinite(loss) else math.inf


def pace(trainer: Trainer, rate: str, steps: int) -> Pace:
  """Times at least so many steps, in whole periods from one exchange to the next, behind a first untimed period."""
  watch, every = timing.Stopwatch(trainer.engine), trainer.method.every
  untimed, timed = (math.ceil(count / every) * every for count in (3, steps))
  for _ in range(untimed):
    trainer.step()
  watch.gather(0.0)
  sent = sent_bytes()
  for _ in range(timed):
    trainer.step()
  own = _of_periods(trainer.times[untimed:], every), (sent_bytes() - sent) / timed
  compute, alone = _parts(trainer, watch)
  seconds, most = (float(watch.gather(value).max()) for value in own)
  parts = compute, max(0.0, alone - compute)
  return Pace(
    trainer.method.label,
    rate,
    timed,
    seconds,
    *parts,
    most,
    str(trainer.recipe.optimizer),
  )


def _of_periods(times: list[float], every: int) -> float:
  """Seconds a step: the median over the periods of `every` steps."""
  return statistics.median(
    sum(times[start : start + every]) / every for start in range(0, len(times), every)
  )


def _parts(trainer: Trainer, watch: timing.Stopwatch) -> tuple[float, float]:
  """Seconds of forward and backward, and of a step whose messages take no time, all workers at once; ends `trainer`."""
  engine, every, comm = (
    trainer.engine,
    trainer.method.every,
    SoloComm(trainer.place.size),
  )
  worker = WorkerStep(
    trainer.model.loss,
    trainer.method.make(comm, trainer.recipe.make()),
    False,
    "mean",
    "worker",
    1,
  )
  same, split = PartitionSpec(), PartitionSpec(AXIS)

  def gradients(params: Any, batch: Any, running: Any) -> Any:
    own = jax.tree.map(lambda x: x[0], running)
    grads, _ = jax.grad(trainer.model.loss, has_aux=True)(params, batch, own)
    return jax.tree.map(lambda x: x[None], grads)

  backward = engine.jit(gradients, (same, split, split), split)
  given = engine.place((next(trainer.batches), trainer.statistics), (split, split))
  compute = statistics.median(
    watch.time(backward, trainer.params, *given)[0] for _ in range(_REPETITIONS + 1)
  )
  state, own = start_workers(engine, worker.tx.init, trainer.params)

  def alone(params: Any, state: Any, batch: Any, running: Any) -> tuple[Any, Any]:
    return worker.step(comm, params, state, batch, {"model_state": running})[:2]

  step = engine.jit(alone, (same, own, split, split), (same, own), donate=(0, 1))
  params, times = trainer.params, []
  for _ in range((math.ceil(_REPETITIONS / every) + 1) * every):
    seconds, (params, state) = watch.time(step, params, state, *given)
    times.append(seconds)
  return compute, _of_periods(times[every:], every)
