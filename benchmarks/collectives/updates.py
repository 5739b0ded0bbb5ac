"""Times updates of an algorithm with all workers in step, checks each result, and splits the time into its parts."""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import PartitionSpec

import jaxsparse as js
from benchmarks.collectives.laws import Laws
from benchmarks.specs import Spec
from benchmarks.workers import Workers
from jaxsparse.comm import message_p
from jaxsparse.train import timing
from jaxsparse.train.engine import engine_of, local_shard

ENOUGH = 20.0  # seconds of warm-up, and of timed steps, after which fewer have to do; a whole period is never cut
LEAST_STEPS = 70  # of an algorithm with a period, warm-up included


class Row(NamedTuple):
  """One measured algorithm."""

  algorithm: str  # as it was asked for
  engine: str  # where the workers ran
  workers: int  # P
  n: int  # gradient entries
  density: float  # of the entries that a sparse algorithm delivers
  rate: str  # of the links of the lab, or ""
  gradients: str  # "recorded" or "normal"
  pinned: bool  # whether each rank had a core of its own
  seconds: float  # median of one update; of the slowest worker in each step
  mean: float  # likewise
  p90: float  # 90th percentile, likewise
  steps: int  # how many were timed: those of whole periods where the algorithm has one
  warm_up: int  # untimed steps before them
  arithmetic: float  # seconds of an update whose messages cost nothing, all workers at work at once
  selection: float  # seconds of that until the first message
  words: float  # 4-byte words that the worker sent that sent most, mean over the timed steps
  messages: int  # of one worker, one after the other, counted from the schedule
  checked: str  # the laws that were checked after every timed step: "C" nothing is lost, "R" the same bits everywhere
  wrong: int  # entries that broke one of them, summed over the steps
  predicted: float | None = None  # seconds by the cost model

  def as_dict(self) -> dict[str, Any]:
    """The fields, and both bandwidths."""
    return self._asdict() | dict(zip(("algbw", "busbw"), self.bandwidths, strict=True))

  @property
  def wire(self) -> float:
    """Seconds that the messages add."""
    return max(0.0, self.seconds - self.arithmetic)

  @property
  def merge(self) -> float:
    """Seconds of arithmetic after the first message."""
    return max(0.0, self.arithmetic - self.selection)

  @property
  def bandwidths(self) -> tuple[float, float]:
    """(algbw, busbw) in GB/s as nccl-tests defines them: 4n bytes / seconds, and that times 2(P − 1)/P."""
    algorithm = 4 * self.n / self.seconds / 1e9
    return algorithm, 2 * (self.workers - 1) / self.workers * algorithm


def plan(collective: js.Collective, warm_up: int, repetitions: int) -> tuple[int, int, int]:
  """(untimed steps, timed steps, period): whole periods, where the mean counts each kind of step as often as training.

  A period is the least common multiple of the options `*_period`: Ok-Topk takes exact thresholds every 32 steps and
  draws regions every 64.
  """
  options = dataclasses.asdict(collective) if dataclasses.is_dataclass(collective) else {}
  period = math.lcm(*(value for name, value in options.items() if name.endswith("_period")))
  timed = math.ceil(repetitions / period) * period
  return warm_up if period == 1 else max(warm_up, LEAST_STEPS - timed), timed, period


class Bench:
  """The workers, and what measures them."""

  def __init__(self, workers: Workers, engine: str, n: int, warm_up: int, repetitions: int, gradients: Any = None):
    self._workers, self._name, self._n, self._warm_up, self._repetitions = workers, engine, n, warm_up, repetitions
    self._engine = engine_of(workers.where, "workers")
    self._watch = timing.Stopwatch(self._engine)
    self._kind = "normal" if gradients is None else "recorded"
    self._gradients = gradients or timing.gradients(self._engine, n)

  def row(self, spec: Spec, density: float, rate: str = "", pinned: bool = False) -> Row:
    """Times and checks one algorithm."""
    arithmetic, selection = self._alone(spec.collective)
    messages = js.costs.count(spec.name, n=self._n, workers=self._workers.size, **spec.config).messages
    setting = (spec.label, self._name, self._workers.size, self._n, density, rate, self._kind, pinned)
    return Row(*setting, arithmetic=arithmetic, selection=selection, messages=messages, **self._updates(spec))

  def _updates(self, spec: Spec) -> dict[str, Any]:
    """What the warm-up and the timed steps say of a row."""
    update = timing.Update(self._engine, spec.collective, self._engine.comm, self._n)
    untimed, timed, period = plan(spec.collective, self._warm_up, self._repetitions)
    warm_up = 1 if update.state.carried.residual is None else untimed  # nothing grows
    read, laws = jax.jit(self._workers.metrics), Laws(self._engine, spec, update.specs)
    state, number, wrong, warming = update.state, 0, 0, 0.0
    times: list[float] = []
    words: list[float] = []
    while number < warm_up and warming < ENOUGH:
      seconds, (_, state) = self._watch.time(update.program, self._gradients(number), state)
      warming, number = warming + (seconds if number else 0.0), number + 1  # the first compiles
    while len(times) < timed and (period > 1 or sum(times) < ENOUGH):
      again = functools.partial(self._gradients, number + len(times))
      grads = again()
      before = laws.before(grads, state)
      seconds, (mean, state) = self._watch.time(update.program, grads, state)
      wrong += laws.wrong(mean, state, before, again)
      times.append(seconds)
      words.append(float(local_shard(read(state).words_sent)))
    return {
      "seconds": statistics.median(times),
      "mean": statistics.mean(times),
      "p90": float(np.quantile(times, 0.9)),
      "steps": len(times),
      "warm_up": number,
      "words": statistics.mean(words),
      "checked": laws.names,
      "wrong": wrong,
    }

  def _alone(self, collective: js.Collective) -> tuple[float, float]:
    """(arithmetic, selection): seconds without any message, and until the first one."""
    grads = self._gradients(0)
    arithmetic, update = timing.alone(self._engine, self._watch, collective, grads, self._n, self._repetitions)
    first = self._engine.jit(until_first_message(update.function), update.specs, PartitionSpec("workers"))
    starts = [self._watch.time(first, grads, update.state)[0] for _ in range(self._repetitions + 1)]
    return arithmetic, min(arithmetic, statistics.median(starts[1:]))


def until_first_message(function: Callable) -> Callable:
  """The part of a worker's program that must be done before its first message: what that message is made of."""

  def start(*arguments: Any) -> Any:
    closed = jax.make_jaxpr(function)(*arguments)
    equations = closed.jaxpr.eqns
    sends = [number for number, equation in enumerate(equations) if _sends(equation)]
    if not sends:
      return ()
    made = {id(var) for equation in equations[: sends[0]] for var in equation.outvars}
    wanted = [var for var in equations[sends[0]].invars if id(var) in made]
    names = closed.jaxpr.debug_info._replace(result_paths=None)
    head = closed.jaxpr.replace(eqns=equations[: sends[0]], outvars=wanted, debug_info=names)
    made_of = core.jaxpr_as_fun(core.ClosedJaxpr(head, closed.consts))(*jax.tree.leaves(arguments))
    return [jnp.atleast_1d(part) for part in made_of]  # so that those of all workers can lie side by side

  return start


def _sends(equation: core.JaxprEqn) -> bool:
  return equation.primitive is message_p or any(
    _sends(inner) for jaxpr in js.costs.counting.inner_jaxprs(equation.params) for inner in jaxpr.eqns
  )
