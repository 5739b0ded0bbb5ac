"""Training in virtual time: gradients are real and step times are random, so one machine can compare many workers."""

import abc
import functools
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxsparse.arrays.flatten import flatten
from jaxsparse.collectives import make_collective
from jaxsparse.partial.net.messages import WorkerGroup
from jaxsparse.types import Cost

Pace = Callable[[np.random.Generator], float]


class Simulation(NamedTuple):
  """The result of one method."""

  seconds: float  # of virtual time until the target was `reached`, or until the end
  reached: bool
  # averages, or steps of the one model, until then; `gradients` those of all workers
  updates: int
  gradients: int
  # (seconds, updates, value of `evaluate`) of each evaluation
  curve: list[tuple[float, int, float]]
  params: Any  # at the end; the mean over the workers if they have models of their own
  groups: list[WorkerGroup]  # of partial reduce, in the order in which they were formed


def shared_paces(
  workers: int,
  level: int,
  *,
  seconds: float = 1.0,
  jitter: float = 0.1,
  occupancy: float = 1.0,
) -> list[Pace]:
  """Step times of the paper's synthetic heterogeneity (§5.2): the last `level` workers share one accelerator.

  A step on an accelerator of one's own takes seconds · exp(jitter · ξ), ξ ~ N(0, 1);
  one on a shared accelerator takes 1 + occupancy · (level − 1) times as long: it does
  its part of a step for each worker in turn. From a jitter of about 1 on the
  distribution has a heavy tail, as on machines that other jobs share (§5.3).

  Each is a function that draws a step time in seconds from a random generator.
  """
  medians = [1.0] * (workers - level) + [1 + occupancy * (level - 1)] * level
  return [
    functools.partial(_draw_lognormal, median=seconds * median, jitter=jitter)
    for median in medians
  ]


def _draw_lognormal(random: np.random.Generator, median: float, jitter: float) -> float:
  return median * math.exp(jitter * random.standard_normal())


class Method(abc.ABC):
  """A method of training with N workers."""

  def __init__(self, lab: "Lab"):
    self._lab = lab

  def begin(self) -> None:
    """Starts the first computation of every worker."""
    for worker in range(self._lab.workers):
      self._work(worker)

  @abc.abstractmethod
  def arrive(self, worker: int, gradient: jax.Array) -> None:
    """A worker has computed the gradient of the model that it was given."""

  @abc.abstractmethod
  def model(self) -> jax.Array:
    """F32[n] to evaluate: the mean of all models, if workers have models of their own."""

  @abc.abstractmethod
  def _work(self, worker: int) -> None:
    """Starts a worker's next computation."""


class Lab:
  """N workers in virtual time, and the network between them.

  Methods are comparable if `tx` is linear (SGD, momentum): where a step takes the
  gradient of one worker, the gradient is divided by N.
  """

  def __init__(
    self,
    loss: Callable[[Any, Any], jax.Array],  # of parameters and a batch
    params: Any,  # to start from
    batches: Callable[
      [int], Iterator[Any]
    ],  # of a worker's number: its batches, without an end
    paces: Sequence[Pace],  # draw the seconds of a step of each worker
    tx: optax.GradientTransformation,  # has a state for each model
    *,
    # seconds a message: of an all-reduce, to and from a server, a worker, or the
    # controller
    alpha: float = 0.0,
    beta: float = 0.0,  # seconds a byte of a model
    links: Sequence[float]
    | None = None,  # how many times as long each worker's messages take
    seed: int = 0,  # of step times and random choices
  ):
    self.workers = len(paces)
    self.initial, self._unflatten = flatten(params)
    self.random = np.random.default_rng([seed, self.workers])
    self.now, self.updates, self.groups = 0.0, 0, list[WorkerGroup]()
    self._scheduled: list[tuple[float, int, Callable[[], object]]] = []
    self._count = self._gradients = 0
    self._curve = list[tuple[float, int, float]]()
    self._batches = [batches(worker) for worker in range(self.workers)]
    self._paces, self._draws = (
      paces,
      [np.random.default_rng([seed, worker]) for worker in range(self.workers)],
    )
    self._tx, self._alpha, self._beta, self._links = (
      tx,
      alpha,
      beta,
      links or [1.0] * self.workers,
    )
    self._gradient = jax.jit(
      jax.grad(lambda model, batch: loss(self._unflatten(model), batch))
    )
    self.step = jax.jit(self._step)

  def run(
    self,
    method: Method,
    seconds: float,
    evaluate: Callable | None = None,
    every: float = 1.0,
    target: float = math.inf,
  ) -> Simulation:
    """Trains for so many seconds, or until `evaluate`, called every `every` seconds, gives the target."""
    self._method = method

    def look() -> None:
      assert evaluate
      self._curve.append(
        (self.now, self.updates, float(evaluate(self._unflatten(method.model()))))
      )
      self.after(every, look)

    if evaluate:
      self.after(every, look)
    method.begin()
    while (
      not (reached := bool(self._curve) and self._curve[-1][2] >= target)
      and self._scheduled[0][0] < seconds
    ):
      self.now, _, action = heapq.heappop(self._scheduled)
      action()
    end, params = self.now if reached else seconds, self._unflatten(method.model())
    return Simulation(
      end, reached, self.updates, self._gradients, self._curve, params, self.groups
    )

  def after(self, seconds: float, action: Callable[[], object]) -> None:
    """Schedules an action; those of one time run in the order in which they were scheduled."""
    self._count += 1
    heapq.heappush(self._scheduled, (self.now + seconds, self._count, action))

  def work(self, worker: int, model: jax.Array) -> None:
    """Starts a worker's computation of the gradient of `model`; the method's `arrive` is called at its end."""

    def arrive() -> None:
      self._gradients += 1
      self._method.arrive(worker, self._gradient(model, next(self._batches[worker])))

    self.after(self._paces[worker](self._draws[worker]), arrive)

  def average(
    self, workers: list[int], members: int, done: Callable[[], object], signals: int = 0
  ) -> None:
    """Starts an all-reduce of `members` workers after so many signals; `workers` wait for it. Calls `done` then."""
    took = (
      make_collective("dense")
      .cost(self.initial.size, members)
      .seconds(self._alpha, self._beta)
    )
    ends = workers if len(workers) == members else range(self.workers)
    self._communicate(ends, took + signals * self._alpha, done)

  def exchange(
    self,
    workers: list[int],
    models: int,
    done: Callable[[], object],
    peer: int | None = None,
  ) -> None:
    """Each worker sends or receives so many models, to and from `peer`, by default a server. Calls `done` then."""
    took = Cost(models, models * self.initial.size).seconds(self._alpha, self._beta)
    self._communicate(workers if peer is None else [*workers, peer], took, done)

  def start(self) -> Any:
    """The optimizer's state before the first step."""
    return self._tx.init(self.initial)

  def _step(
    self, model: jax.Array, state: Any, gradient: jax.Array
  ) -> tuple[jax.Array, Any]:
    change, state = self._tx.update(gradient, state, model)
    return model + change, state

  def _communicate(
    self, ends: Iterable[int], took: float, done: Callable[[], object]
  ) -> None:
    """Messages between `ends`, as slow as the slowest link of these."""
    self.after(took * max(self._links[end] for end in ends), done)
