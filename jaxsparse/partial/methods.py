"""The methods of `simulate`: partial reduce, and those that it is compared with.

Each method reacts to one event: the gradient of a worker is computed. Whatever the method, every gradient moves the
model by the same amount, 1/N of a step of `tx`:

    allreduce, bsp       wait for all N gradients; one step with their mean
    backup               the first N − b gradients; later ones are dropped
    eager                the first ⌊N/2⌋ + 1; later ones are added to the next sum, which is divided by N
    asp                  each gradient at once, divided by N
    hete                 each gradient at once, divided by its staleness: 1 + the steps since its model was read
    adpsgd               average the worker's model with that of a random other worker; then one step with its gradient
    constant, dynamic    one step on the worker's own model, then partial reduce: P models are averaged. A worker whose
                         model is not finite after its step fetches the model of another worker instead.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.partial.clock import Clock
from jaxsparse.partial.controller import Controller, Group


class Lab(Protocol):
  """The part of the simulation that methods use.

  Attributes:
    workers: N.
    initial: f32[n], the model that training starts from.
    random: the generator for random choices of the method.
    clock: virtual time.
  """

  workers: int
  initial: jax.Array
  random: np.random.Generator
  clock: Clock

  def work(self, worker: int, model: jax.Array) -> None:
    """Starts a worker's computation of the gradient of `model`; the method's `arrive` is called at its end."""
    ...

  def average(self, workers: list[int], members: int, done: Callable[[], object]) -> None:
    """Starts an all-reduce of `members` workers, in which `workers` take part; calls `done` at its end."""
    ...

  def exchange(self, workers: list[int], models: int, done: Callable[[], object], peer: int | None = None) -> None:
    """Lets each worker send or receive so many models, one after the other; calls `done` at the end.

    `peer` is the worker at the other end; None for a server.
    """
    ...

  def update(self) -> None:
    """Counts one update of a model."""
    ...

  def start(self) -> Any:
    """The optimizer's state before the first step."""
    ...

  def step(self, model: jax.Array, state: Any, gradient: jax.Array) -> tuple[jax.Array, Any]:
    """One step of the optimizer."""
    ...

  def refuse(self, worker: int, model: jax.Array, iteration: int) -> bool:
    """Whether a worker's model is not finite; the tenth such model in succession raises FloatingPointError."""
    ...


class Method(Protocol):
  """A method of training with N workers."""

  def begin(self) -> None:
    """Starts the first computation of every worker."""
    ...

  def arrive(self, worker: int, gradient: jax.Array) -> None:
    """A worker has computed the gradient of the model that it was given."""
    ...

  def model(self) -> jax.Array:
    """F32[n] to evaluate: the mean of all models, if workers have models of their own."""
    ...


class Synchronous:
  """One model: in each round, one step with the gradients of the first `need` workers."""

  def __init__(self, lab: Lab, need: int, late: Literal["drop", "keep"], server: bool):
    self._lab, self._need, self._late, self._server = lab, need, late, server
    self._model, self._state = lab.initial, lab.start()
    self._round = 0
    self._began = [0] * lab.workers  # the round in which each worker was given its model
    self._fresh: dict[int, jax.Array] = {}
    self._kept: list[jax.Array] = []

  def begin(self) -> None:
    for worker in range(self._lab.workers):
      self._work(worker)

  def arrive(self, worker: int, gradient: jax.Array) -> None:
    if self._began[worker] < self._round:  # a straggler's gradient: its round is over, it begins anew
      if self._late == "keep":
        self._kept.append(gradient)
      self._work(worker)
      return
    self._fresh[worker] = gradient
    if len(self._fresh) == self._need:
      self._reduce()

  def model(self) -> jax.Array:
    return self._model

  def _work(self, worker: int) -> None:
    self._began[worker] = self._round
    self._lab.work(worker, self._model)

  def _reduce(self) -> None:
    members, gradients = list(self._fresh), [*self._fresh.values(), *self._kept]
    self._fresh, self._kept = {}, []
    self._round += 1
    divisor = self._lab.workers if self._late == "keep" else self._need
    mean = sum(gradients[1:], gradients[0]) / divisor

    def done() -> None:
      self._model, self._state = self._lab.step(self._model, self._state, mean)
      self._lab.update()
      for worker in members:
        self._work(worker)

    if self._server:  # sharded over many servers: all workers push at once, and pull at once
      self._lab.exchange(members, 2, done)
    else:
      self._lab.average(members, self._lab.workers, done)


class Asynchronous:
  """One model at a server, which takes a step with each gradient as soon as it arrives."""

  def __init__(self, lab: Lab, by_staleness: bool):
    self._lab, self._by_staleness = lab, by_staleness
    self._model, self._state = lab.initial, lab.start()
    self._steps = 0
    self._read = [0] * lab.workers  # the step after which each worker read the model

  def begin(self) -> None:
    for worker in range(self._lab.workers):
      self._lab.work(worker, self._model)

  def arrive(self, worker: int, gradient: jax.Array) -> None:
    def pushed() -> None:
      divisor = self._steps - self._read[worker] + 1 if self._by_staleness else self._lab.workers
      self._model, self._state = self._lab.step(self._model, self._state, gradient / divisor)
      self._steps += 1
      self._lab.update()
      self._read[worker] = self._steps
      self._lab.exchange([worker], 1, functools.partial(self._lab.work, worker, self._model))

    self._lab.exchange([worker], 1, pushed)

  def model(self) -> jax.Array:
    return self._model


class Gossip:
  """One model for each worker, averaged with that of a random other worker, even while that one computes (AD-PSGD)."""

  def __init__(self, lab: Lab):
    self._lab = lab
    self._models = [lab.initial] * lab.workers
    self._states = [lab.start() for _ in range(lab.workers)]

  def begin(self) -> None:
    for worker, model in enumerate(self._models):
      self._lab.work(worker, model)

  def arrive(self, worker: int, gradient: jax.Array) -> None:
    other = (worker + int(self._lab.random.integers(1, self._lab.workers))) % self._lab.workers

    def done() -> None:
      mean = (self._models[worker] + self._models[other]) / 2
      self._models[other] = mean
      self._models[worker], self._states[worker] = self._lab.step(mean, self._states[worker], gradient)
      self._lab.update()
      self._lab.work(worker, self._models[worker])

    self._lab.exchange([worker], 1, done, peer=other)

  def model(self) -> jax.Array:
    return jnp.mean(jnp.stack(self._models), 0)


class Partial:
  """One model for each worker: a local step, then the average of a group."""

  def __init__(self, lab: Lab, controller: Controller):
    self._lab, self._controller = lab, controller
    self._models = [lab.initial] * lab.workers
    self._states = [lab.start() for _ in range(lab.workers)]
    self._iterations = [0] * lab.workers
    self._began = [0.0] * lab.workers  # when each worker began its step
    self.groups: list[Group] = []

  def begin(self) -> None:
    for worker, model in enumerate(self._models):
      self._work(worker, model)

  def arrive(self, worker: int, gradient: jax.Array) -> None:
    model, state = self._lab.step(self._models[worker], self._states[worker], gradient)
    if self._lab.refuse(worker, model, self._iterations[worker] + 1):
      self._replace(worker)
      return
    self._models[worker], self._states[worker] = model, state
    self._iterations[worker] += 1
    self._average(self._controller.ready(worker, self._iterations[worker]))
    clock = self._lab.clock  # the group filter lets a worker wait for as long as its step took
    clock.after(clock.now - self._began[worker], lambda: self._average(self._controller.release()))

  def model(self) -> jax.Array:
    return jnp.mean(jnp.stack(self._models), 0)

  def _work(self, worker: int, model: jax.Array) -> None:
    self._began[worker] = self._lab.clock.now
    self._lab.work(worker, model)

  def _average(self, groups: list[Group]) -> None:
    for group in groups:
      self.groups.append(group)
      members = list(group.members)
      self._lab.average(members, len(members), functools.partial(self._averaged, group))

  def _replace(self, worker: int) -> None:
    """Replaces a worker's model by the most trained one of the others, and resets its optimizer's state."""
    donor = max((other for other in range(self._lab.workers) if other != worker), key=self._iterations.__getitem__)
    model = self._models[donor]
    self._models[worker], self._iterations[worker] = model, self._iterations[donor]
    self._states[worker] = self._lab.start()
    self._controller.replaced(worker)
    self._lab.exchange([worker], 1, functools.partial(self._work, worker, model), peer=donor)

  def _averaged(self, group: Group) -> None:
    models = jnp.stack([*(self._models[member] for member in group.members), self._lab.initial])
    mean = jnp.array([*group.weights, group.initial], jnp.float32) @ models
    self._lab.update()
    for member in group.members:
      self._models[member], self._iterations[member] = mean, group.iteration
      self._work(member, mean)
