"""The methods of the paper's Table 1: partial reduce, and those that it is compared with.

Each method reacts to one event: the gradient of a worker is computed. Whatever the
method, every gradient moves the model by the same amount, 1/N of a step of `tx`:

    allreduce, bsp       wait for all N gradients; one step with their mean
    backup               the first N − b gradients; later ones are dropped
    eager                the first ⌊N/2⌋ + 1; later ones are added to the next sum, which is divided by N
    asp                  each gradient at once, divided by N
    hete                 each gradient at once, divided by its staleness: 1 + the steps since its model was read
    adpsgd               average the worker's model with that of a random other worker; then one step with its gradient
    constant, dynamic    one step on the worker's own model, then partial reduce: P models are averaged
    alone                one step on the worker's own model, and no exchange: the control
"""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp

import jaxsparse as js
from benchmarks.heterogeneous.lab import Lab, Method
from jaxsparse.partial.net.messages import WorkerGroup

NAMES = ("alone", "allreduce", "eager", "adpsgd", "bsp", "asp", "hete", "backup")


def make_method(name: str, lab: Lab, backups: int = 0, **options: Any) -> Method:
  """The method of a name: one of `NAMES`, or partial reduce, whose options are those of `js.partial.Controller`."""
  match name:
    case "allreduce":
      return Synchronous(lab, lab.workers)
    case "bsp":
      return Synchronous(lab, lab.workers, server=True)
    case "backup":
      return Synchronous(lab, lab.workers - backups, server=True)
    case "eager":
      return Synchronous(lab, lab.workers // 2 + 1, keeps_late=True)
    case "asp" | "hete":
      return Asynchronous(lab, by_staleness=name == "hete")
    case "adpsgd":
      return Gossip(lab)
    case "alone":
      return Alone(lab)
  return Partial(
    lab, js.partial.Controller(lab.workers, weights=cast(Any, name), **options)
  )


class _SharedModel(Method):
  """One model, at all workers or at a server."""

  def __init__(self, lab: Lab):
    super().__init__(lab)
    self._model, self._state = lab.initial, lab.start()

  def model(self) -> jax.Array:
    return self._model

  def _step(self, gradient: jax.Array) -> None:
    self._model, self._state = self._lab.step(self._model, self._state, gradient)
    self._lab.updates += 1


class Synchronous(_SharedModel):
  """In each round, one step with the gradients of the first `need` workers."""

  def __init__(
    self, lab: Lab, need: int, keeps_late: bool = False, server: bool = False
  ):
    super().__init__(lab)
    self._need, self._keeps_late, self._server = need, keeps_late, server
    self._round = 0
    self._began = [
      0
    ] * lab.workers  # the round in which each worker was given its model
    self._fresh: dict[int, jax.Array] = {}
    self._late: list[jax.Array] = []

  def arrive(self, worker: int, gradient: jax.Array) -> None:
    # a straggler's gradient: its round is over, it begins anew
    if self._began[worker] < self._round:
      if self._keeps_late:
        self._late.append(gradient)
      self._work(worker)
      return
    self._fresh[worker] = gradient
    if len(self._fresh) == self._need:
      self._reduce()

  def _work(self, worker: int) -> None:
    self._began[worker] = self._round
    self._lab.work(worker, self._model)

  def _reduce(self) -> None:
    members, gradients = list(self._fresh), [*self._fresh.values(), *self._late]
    self._fresh, self._late = {}, []
    self._round += 1
    mean = sum(gradients[1:], gradients[0]) / (
      self._lab.workers if self._keeps_late else self._need
    )

    def done() -> None:
      self._step(mean)
      for worker in members:
        self._work(worker)

    # sharded over many servers: all workers push at once, and pull at once
    if self._server:
      self._lab.exchange(members, 2, done)
    else:
      self._lab.average(members, self._lab.workers, done)


class Asynchronous(_SharedModel):
  """The server takes a step with each gradient as soon as it arrives."""

  def __init__(self, lab: Lab, by_staleness: bool):
    super().__init__(lab)
    self._by_staleness = by_staleness
    self._read = [0] * lab.workers  # the step after which each worker read the model

  def arrive(self, worker: int, gradient: jax.Array) -> None:
    def pushed() -> None:
      divisor = (
        self._lab.updates - self._read[worker] + 1
        if self._by_staleness
        else self._lab.workers
      )
      self._step(gradient / divisor)
      self._read[worker] = self._lab.updates
      self._lab.exchange(
        [worker], 1, functools.partial(self._lab.work, worker, self._model)
      )

    self._lab.exchange([worker], 1, pushed)

  def _work(self, worker: int) -> None:
    self._lab.work(worker, self._model)


class _ModelEach(Method):
  """One model for each worker."""

  def __init__(self, lab: Lab):
    super().__init__(lab)
    self._models = [lab.initial] * lab.workers
    self._states = [lab.start() for _ in range(lab.workers)]

  def model(self) -> jax.Array:
    return jnp.mean(jnp.stack(self._models), 0)

  def _work(self, worker: int) -> None:
    self._lab.work(worker, self._models[worker])


class Alone(_ModelEach):
  """Exchanges nothing; the mean of the models is evaluated as with other methods."""

  def arrive(self, worker: int, gradient: jax.Array) -> None:
    self._models[worker], self._states[worker] = self._lab.step(
      self._models[worker], self._states[worker], gradient
    )
    self._lab.updates += 1
    self._work(worker)


class Gossip(_ModelEach):
  """Averages a worker's model with that of a random other worker, even while that one computes (AD-PSGD)."""

  def arrive(self, worker: int, gradient: jax.Array) -> None:
    other = (
      worker + int(self._lab.random.integers(1, self._lab.workers))
    ) % self._lab.workers

    def done() -> None:
      mean = (self._models[worker] + self._models[other]) / 2
      self._models[other] = mean
      self._models[worker], self._states[worker] = self._lab.step(
        mean, self._states[worker], gradient
      )
      self._lab.updates += 1
      self._work(worker)

    self._lab.exchange([worker], 1, done, peer=other)


class Partial(_ModelEach):
  """A local step, then the average of a group."""

  def __init__(self, lab: Lab, controller: js.partial.Controller):
    super().__init__(lab)
    self._controller = controller
    self._iterations = [0] * lab.workers
    self._began = [0.0] * lab.workers  # when each worker began its step

  def arrive(self, worker: int, gradient: jax.Array) -> None:
    self._models[worker], self._states[worker] = self._lab.step(
      self._models[worker], self._states[worker], gradient
    )
    self._iterations[worker] += 1
    self._average(self._controller.ready(worker, self._iterations[worker]))
    # the group filter lets a worker wait for as long as its step took
    took = self._lab.now - self._began[worker]
    self._lab.after(took, lambda: self._average(self._controller.release()))

  def _work(self, worker: int) -> None:
    self._began[worker] = self._lab.now
    super()._work(worker)

  def _average(self, groups: list[WorkerGroup]) -> None:
    for group in groups:
      self._lab.groups.append(group)
      # each sends a signal to the controller, and gets an answer
      members = list(group.members)
      self._lab.average(
        members, len(members), functools.partial(self._averaged, group), signals=2
      )

  def _averaged(self, group: WorkerGroup) -> None:
    models = jnp.stack(
      [*(self._models[member] for member in group.members), self._lab.initial]
    )
    mean = jnp.array([*group.weights, group.initial], jnp.float32) @ models
    self._lab.updates += 1
    for member in group.members:
      self._models[member], self._iterations[member] = mean, group.iteration
      self._work(member)
