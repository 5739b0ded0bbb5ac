"""Training in phases between which the number of workers changes; what `benchmarks.elastic` runs and measures."""

import itertools
import json
import os
import pathlib
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxsparse as js
from benchmarks.netlab.namespaces import started
from benchmarks.tasks import data, images
from benchmarks.tasks.base import model_of
from benchmarks.workers import Workers, here
from jaxsparse import launch
from jaxsparse.arrays import flatten
from jaxsparse.launch import guard
from jaxsparse.train.engine import local_shard as of_this_process

DYING = 1  # the rank that is killed
# what a phase records of its start, in this order
_MARKS = (
  "began",
  "joined",
  "restored",
  "stepped",
)


class Phase(NamedTuple):
  """A part of a run with one number of workers."""

  seed: int  # of the parameters and of the order of the batches
  steps: int  # of the whole run
  batch: int  # examples of all workers together in a step, for any number of workers
  density: float  # of SparDL
  save_every: int  # steps between two checkpoints
  folder: str = ""  # of the run, for checkpoints, marks and the outcome
  until: int = 0  # the step that ends the phase
  kill_at: int = (
    0  # the step after which rank `DYING` kills itself in the first attempt; 0 for none
  )


class Recovery(NamedTuple):
  """The seconds between the end of a phase and the first step of the next one."""

  change: str  # the number of workers before and after
  seed: int  # of the run
  # until the new processes start, they have joined, the state is that of the new
  # workers, a step is done
  parts: list[float]
  again: int  # steps since the checkpoint, which are done again


class Training:
  """The training of the digits CNN by SparDL and SGD on so many workers."""

  def __init__(self, place: Workers, settings: Phase):
    self.place, self.settings = place, settings
    self._task = images.make_small("cnn", data.load("digits"))
    self._model = model_of(self._task, settings.seed)
    schedule = optax.cosine_decay_schedule(0.1, settings.steps)
    sparse = js.spardl_transform(place.axis, density=settings.density)
    self.tx = optax.chain(sparse, _summed(), optax.sgd(schedule))
    self._step = js.make_train_step(self._model.plain_loss, self.tx, place.where)
    self._gradient = jax.jit(
      lambda params, batch: flatten.flatten(
        jax.grad(self._model.plain_loss)(params, batch)
      )[0]
    )

  def first(self) -> tuple[Any, Any]:
    """(params, state) before the first step."""
    params = self.untrained()
    return params, js.init(self.tx, params, self.place.where)

  def train(
    self,
    params: Any,
    state: Any,
    gradients: np.ndarray,
    steps: range,
    then: Callable[..., None] = lambda *_: None,
  ) -> tuple[Any, Any, np.ndarray]:
    """Trains for some steps, calls `then` after each with its number and the present values, and returns these."""
    batches = self._task.batches(
      self.settings.seed, self.place, self.settings.batch // self.place.size
    )
    for number, batch in zip(
      steps, itertools.islice(batches, steps.start, None), strict=False
    ):
      if self.place.reports:
        local = jax.device_put(
          jax.tree.map(of_this_process, params), jax.local_devices()[0]
        )
        gradients = gradients + np.asarray(self._gradient(local, batch))
      params, state, metrics = self._step(params, state, batch)
      jax.block_until_ready(metrics)
      then(number + 1, params, state, gradients)
    return params, state, gradients

  def outcome(
    self, params: Any, state: Any, gradients: np.ndarray
  ) -> tuple[float, float, float]:
    """(test accuracy, delivered, lost) of a run; every process calls.

    With G the sum over steps of the mean gradient of all workers, D that of the updates
    that SparDL delivered and O what the workers owe at the end, delivered is 1 − ‖G −
    D‖₁ / ‖G‖₁, and lost ‖G − D − O‖₁ / ‖G‖₁.
    """
    owed, _ = js.flush(state, params, self.place.where)
    left = gradients - delivered(state)
    size = np.abs(gradients).sum() or 1.0
    lost = np.abs(left - _flat(owed)).sum() / size
    return (
      self._model.accuracy(params),
      float(1 - np.abs(left).sum() / size),
      float(lost),
    )

  def untrained(self) -> Any:
    """Copies of the untrained parameters, which a step may take."""
    if not isinstance(self.place.where, Mesh):
      return jax.tree.map(jnp.copy, self._model.params)
    sharding = NamedSharding(self.place.where, PartitionSpec())
    return jax.device_put(jax.tree.map(np.asarray, self._model.params), sharding)


def delivered(state: Any) -> np.ndarray:
  """f64[n]: the sum of the updates that SparDL has delivered, in the state of `Training`."""
  return _flat(state[1])


def run(phase: Phase) -> None:
  """Trains as a rank of a phase, from the last checkpoint of the run, and leaves one at the end of the phase."""
  folder = pathlib.Path(phase.folder)
  marks = {"began": int(started(os.getpid()) or 0) / os.sysconf("SC_CLK_TCK")}
  place = here("processes", int(os.environ.get(guard.RANKS, 1)))
  marks["joined"] = _now()
  own = Training(place, phase)
  with ocp.CheckpointManager(
    folder / "checkpoints", item_handlers=ocp.StandardCheckpointHandler()
  ) as saver:
    begin = saver.latest_step() or 0
    params, state, gradients = _restored(own, saver, begin, folder)
    jax.block_until_ready(state)
    marks["restored"] = _now()

    def then(number: int, params: Any, state: Any, gradients: np.ndarray) -> None:
      if number == begin + 1 and place.reports:
        _mark(folder, "phase", workers=place.size, begin=begin, **marks, stepped=_now())
      if number == phase.kill_at and launch.attempt() == 0 and place.number == DYING:
        _mark(folder, "gone", at=number, time=_now())
        os.kill(os.getpid(), signal.SIGKILL)
      if number == phase.until and place.reports:
        _mark(folder, "gone", at=number, time=_now())
      if number % phase.save_every == 0 or number == phase.until:
        if place.reports:
          np.save(folder / f"gradients{number}.npy", gradients)
        saved = ocp.args.StandardSave((params, state))
        saver.save(number, args=saved, custom_metadata={"workers": place.size})

    params, state, gradients = own.train(
      params, state, gradients, range(begin, phase.until), then
    )
  if phase.until == phase.steps:
    outcome = own.outcome(params, state, gradients)
    if place.reports:
      (folder / "outcome").write_text(json.dumps(outcome))


def recoveries(folder: pathlib.Path, seed: int) -> list[Recovery]:
  """How long each change of the number of workers took in a run."""
  found = []
  before, *marks = (
    json.loads(line) for line in (folder / "marks").read_text().splitlines()
  )
  for gone, after in zip(marks[::2], marks[1::2], strict=False):
    times = [gone["time"], *(after[mark] for mark in _MARKS)]
    parts = [float(part) for part in np.diff(times)]
    found.append(
      Recovery(
        f"{before['workers']} -> {after['workers']}",
        seed,
        parts,
        gone["at"] - after["begin"],
      )
    )
    before = after
  return found


def _restored(
  own: Training, saver: ocp.CheckpointManager, begin: int, folder: pathlib.Path
) -> tuple[Any, Any, Any]:
  """(params, state, gradients) of the checkpoint of a step, for the workers that there are now."""
  if not begin:
    params, state = own.first()
    return params, state, np.zeros(sum(leaf.size for leaf in jax.tree.leaves(params)))
  params, workers = own.untrained(), saver.metadata(begin).custom_metadata["workers"]
  like = params, js.abstract_state(own.tx, params, own.place.where, workers=workers)
  params, state = saver.restore(begin, args=ocp.args.StandardRestore(like))
  return (
    params,
    js.resize(state, params, own.place.where),
    np.load(folder / f"gradients{begin}.npy"),
  )


def _summed() -> optax.GradientTransformation:
  """Passes updates on, and keeps their sum."""

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    del params
    return updates, jax.tree.map(jnp.add, state, updates)

  return optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params), update
  )


def _flat(tree: Any) -> np.ndarray:
  leaves = [np.asarray(of_this_process(leaf)).ravel() for leaf in jax.tree.leaves(tree)]
  return np.concatenate(leaves).astype(np.float64)


def _mark(folder: pathlib.Path, event: str, **facts: Any) -> None:
  with (folder / "marks").open("a") as file:
    file.write(json.dumps({"event": event, **facts}) + "\n")


def _now() -> float:
  """Seconds since this machine was started."""
  return time.clock_gettime(time.CLOCK_BOOTTIME)
