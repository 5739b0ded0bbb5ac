"""Training in virtual time: gradients are real and step times are random, so one machine can compare many workers."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxsparse.collectives import make_collective
from jaxsparse.flatten import flatten
from jaxsparse.partial.clock import Clock, Pace, Span
from jaxsparse.partial.controller import Controller, Group
from jaxsparse.partial.finite import Refusals, check_start
from jaxsparse.partial.methods import Asynchronous, Gossip, Method, Partial, Synchronous
from jaxsparse.types import Cost

METHODS = ("allreduce", "eager", "adpsgd", "bsp", "asp", "hete", "backup", "constant", "dynamic")
_PARTIAL = ("constant", "dynamic")
_OF_PAIRS = (*_PARTIAL, "adpsgd")  # methods in which workers average with each other: one alone cannot
_OPTIONS = tuple(inspect.signature(Controller).parameters)[3:]  # of the controller, after those set by the method


class Simulation(NamedTuple):
  """The result of one method.

  Attributes:
    method: its name.
    seconds: of virtual time until the target was reached, or until the end.
    reached: whether the target was reached.
    updates: averages, or steps of the one model, until then.
    gradients: of all workers, until then.
    curve: (seconds, updates, value of `evaluate`) of each evaluation.
    params: at the end; the mean over the workers if they have models of their own.
    groups: of partial reduce, in the order in which they were formed; empty for other methods.
    timeline: intervals of work, waiting and averaging of all workers.

  Example:
    >>> Simulation("asp", 12.0, True, 30, 32, [], {}, [], []).seconds_per_update
    0.4
  """

  method: str
  seconds: float
  reached: bool
  updates: int
  gradients: int
  curve: list[tuple[float, int, float]]
  params: Any
  groups: list[Group]
  timeline: list[Span]

  @property
  def seconds_per_update(self) -> float:
    """Virtual time for each update."""
    return self.seconds / max(1, self.updates)


def simulate(
  method: str,
  loss: Callable[[Any, Any], jax.Array],
  params: Any,
  batches: Callable[[int], Iterator[Any]],
  paces: Sequence[Pace],
  *,
  tx: optax.GradientTransformation,
  seconds: float,
  group_size: int = 3,
  backups: int | None = None,
  alpha: float = 0.0,
  beta: float = 0.0,
  links: Sequence[float] | None = None,
  evaluate: Callable[[Any], float] | None = None,
  every: float = 1.0,
  target: float | None = None,
  seed: int = 0,
  **controller: Any,
) -> Simulation:
  """Trains with N workers in virtual time, by a method of the paper's Table 1; deterministic, given its arguments.

  Args:
    method: "allreduce", "eager", "adpsgd", "bsp", "asp", "hete", "backup", or partial reduce with "constant" or
      "dynamic" weights; `jaxsparse.partial.methods` describes each.
    loss: of parameters and a batch, as for `js.make_train_step`.
    params: to start from.
    batches: of a worker's number; returns an endless iterator of that worker's batches.
    paces: one function for each of N workers, which draws the seconds of a step; see `js.partial.sharing`.
    tx: an optax optimizer, with a state for each model. Methods are comparable if it is linear (SGD, momentum): where a
      step takes the gradient of one worker, the gradient is divided by N.
    seconds: of virtual time until the end.
    group_size: P of partial reduce.
    backups: the number of workers that "backup" does not wait for; by default ⌊3N/8⌋ (the paper's 3 of 8).
    alpha: seconds for each message: of an all-reduce, to and from a server, another worker, or the controller.
    beta: seconds for each byte of a model.
    links: for each worker, how many times as long its messages take; an average takes as long as its slowest member's.
      By default 1 for all.
    evaluate: of parameters, for example the test accuracy; called every `every` seconds of virtual time.
    every: see `evaluate`.
    target: the simulation ends when `evaluate` reaches it.
    seed: of step times and random choices.
    **controller: `decay`, `missing` and `history` of `js.partial.Controller`.

  Raises:
    ValueError: for an unknown method, arguments outside their choices, or parameters that are not finite.
    FloatingPointError: if ten models in succession of a worker of partial reduce are not finite.

  Example:
    >>> import itertools, jax.numpy as jnp, optax, jaxsparse as js
    >>> loss = lambda params, batch: jnp.mean((params["w"] - batch) ** 2)
    >>> paces, batches = js.partial.sharing(4, level=2), lambda worker: itertools.repeat(jnp.ones(3))
    >>> setting = {"tx": optax.sgd(0.5), "seconds": 30, "evaluate": lambda params: params["w"][0], "target": 0.9}
    >>> run = lambda method: simulate(method, loss, {"w": jnp.zeros(3)}, batches, paces, group_size=2, **setting)
    >>> run("allreduce").seconds, run("constant").seconds
    (13.0, 9.0)
  """
  links = [1.0] * len(paces) if links is None else links
  _check(method, len(paces), links, seconds, every, target, evaluate, controller)
  lab = _Lab(loss, params, batches, paces, tx, (alpha, beta), links, seed)
  chosen = _method(method, lab, group_size, backups, **controller)
  lab.run(chosen, seconds, evaluate, every, target)
  return lab.result(method)


def _check(
  method: str,
  workers: int,
  links: Sequence[float],
  seconds: float,
  every: float,
  target: float | None,
  evaluate: Callable | None,
  controller: dict[str, Any],
) -> None:
  if method not in METHODS:
    raise ValueError(f"method={method!r}, choose one of {', '.join(METHODS)}")
  if workers < (least := 2 if method in _OF_PAIRS else 1):
    raise ValueError(f"paces of {workers} workers, give at least {least}")
  if len(links) != workers or not all(0 < link < math.inf for link in links):
    raise ValueError(f"links={links!r}, give a positive number for each of the {workers} workers")
  for name, value in (("seconds", seconds), ("every", every)):
    if not value > 0:
      raise ValueError(f"{name}={value!r}, choose more than 0")
  if target is not None and evaluate is None:
    raise ValueError(f"target={target!r} without evaluate, give both")
  if unknown := sorted(set(controller) - set(_OPTIONS)):
    raise ValueError(f"unknown option {unknown[0]!r}, choose from {', '.join(_OPTIONS)}")


def _method(name: str, lab: "_Lab", group_size: int, backups: int | None, **controller: Any) -> Method:
  workers = lab.workers
  if name in _PARTIAL:
    weights: Any = name
    return Partial(lab, Controller(workers, group_size, weights, **controller))
  backups = 3 * workers // 8 if backups is None else backups
  if not 0 <= backups < workers:
    raise ValueError(f"backups={backups!r}, choose 0 … {workers - 1}, fewer than the workers")
  made: dict[str, Callable[[], Method]] = {
    "allreduce": lambda: Synchronous(lab, workers, "drop", server=False),
    "bsp": lambda: Synchronous(lab, workers, "drop", server=True),
    "backup": lambda: Synchronous(lab, workers - backups, "drop", server=True),
    "eager": lambda: Synchronous(lab, workers // 2 + 1, "keep", server=False),
    "asp": lambda: Asynchronous(lab, by_staleness=False),
    "hete": lambda: Asynchronous(lab, by_staleness=True),
    "adpsgd": lambda: Gossip(lab),
  }
  return made[name]()


class _Lab:
  """Real gradients in virtual time; `jaxsparse.partial.methods.Lab` documents the part that methods use."""

  def __init__(
    self,
    loss: Callable[[Any, Any], jax.Array],
    params: Any,
    batches: Callable[[int], Iterator[Any]],
    paces: Sequence[Pace],
    tx: optax.GradientTransformation,
    wire: tuple[float, float],
    links: Sequence[float],
    seed: int,
  ):
    self.workers = len(paces)
    check_start(params)
    self.initial, self.unflatten = flatten(params)
    self._refusals = [Refusals(worker) for worker in range(self.workers)]
    self.random = np.random.default_rng([seed, self.workers])
    self.clock, self.timeline, self.curve = Clock(), list[Span](), list[tuple[float, int, float]]()
    self.updates = self.gradients = 0
    self.reached = False
    self._batches = [batches(worker) for worker in range(self.workers)]
    self._paces, self._draws = paces, [np.random.default_rng([seed, worker]) for worker in range(self.workers)]
    self._tx, self._wire, self._links = tx, wire, links
    self._ready = [0.0] * self.workers  # when each worker ended its last activity
    self._gradient = jax.jit(jax.grad(lambda model, batch: loss(self.unflatten(model), batch)))
    self.step = jax.jit(self._step)

  def run(self, method: Method, seconds: float, evaluate: Callable | None, every: float, target: float | None) -> None:
    self._method = method
    if evaluate:
      self.clock.after(every, functools.partial(self._evaluate, evaluate, every, target))
    over = False

    def end() -> None:
      nonlocal over
      over = True

    self.clock.after(seconds, end)
    method.begin()
    while not over and not self.reached:
      self.clock.tick()

  def result(self, name: str) -> Simulation:
    groups = self._method.groups if isinstance(self._method, Partial) else []
    counts = (self.clock.now, self.reached, self.updates, self.gradients)
    return Simulation(name, *counts, self.curve, self.unflatten(self._method.model()), groups, self.timeline)

  def work(self, worker: int, model: jax.Array) -> None:
    took = self._paces[worker](self._draws[worker])
    self._record([worker], "work", took)

    def arrive() -> None:
      self._ready[worker] = self.clock.now
      self.gradients += 1
      self._method.arrive(worker, self._gradient(model, next(self._batches[worker])))

    self.clock.after(took, arrive)

  def average(self, workers: list[int], members: int, done: Callable[[], object]) -> None:
    alpha, beta = self._wire
    took = make_collective("dense").cost(self.initial.size, members).seconds(alpha, beta)
    if isinstance(self._method, Partial):
      took += 2 * alpha  # the signal to the controller, and its answer
    took *= self._slowest(workers if len(workers) == members else range(self.workers))
    self._end_wait(workers)
    self._record(workers, "average", took)
    self.clock.after(took, done)

  def exchange(self, workers: list[int], models: int, done: Callable[[], object], peer: int | None = None) -> None:
    took = Cost(models, models * self.initial.size).seconds(*self._wire)
    took *= self._slowest(workers if peer is None else [*workers, peer])
    self._end_wait(workers)
    self._record(workers, "average", took)
    self.clock.after(took, done)

  def update(self) -> None:
    self.updates += 1

  def start(self) -> Any:
    return self._tx.init(self.initial)

  def refuse(self, worker: int, model: jax.Array, iteration: int) -> bool:
    return self._refusals[worker].refuse(model, iteration, self.unflatten)

  def _step(self, model: jax.Array, state: Any, gradient: jax.Array) -> tuple[jax.Array, Any]:
    change, state = self._tx.update(gradient, state, model)
    return model + change, state

  def _slowest(self, workers: Iterable[int]) -> float:
    """How many times as long the messages of these workers take."""
    return max(self._links[worker] for worker in workers)

  def _end_wait(self, workers: Iterable[int]) -> None:
    for worker in workers:
      if self._ready[worker] < self.clock.now:
        self.timeline.append(Span(worker, "wait", self._ready[worker], self.clock.now))
      self._ready[worker] = self.clock.now

  def _record(self, workers: Iterable[int], activity: Any, took: float) -> None:
    now = self.clock.now
    self.timeline.extend(Span(worker, activity, now, now + took) for worker in workers)

  def _evaluate(self, evaluate: Callable[[Any], float], every: float, target: float | None) -> None:
    value = float(evaluate(self.unflatten(self._method.model())))
    self.curve.append((self.clock.now, self.updates, value))
    self.reached = target is not None and value >= target
    self.clock.after(every, functools.partial(self._evaluate, evaluate, every, target))
