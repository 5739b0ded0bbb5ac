"""Times one update of an algorithm with all workers in step, checks what it computed, and tells where the time went."""

import functools
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import PartitionSpec

import jaxsparse as js
from benchmarks.specs import Spec
from benchmarks.workers import Workers
from jaxsparse.comm import is_message
from jaxsparse.train import timing
from jaxsparse.train.engine import Engine, engine_of, here, rows_of

ENOUGH = 20.0  # seconds of measuring after which fewer repetitions have to do
_BUCKETS = 4096


class Row(NamedTuple):
  """One measured algorithm.

  Attributes:
    algorithm: as it was asked for.
    engine: where the workers ran.
    workers: P.
    n: gradient entries.
    density: share of them that a sparse one delivers.
    rate: of the links of the lab, or "".
    seconds: median of one update; of the slowest worker in each repetition.
    repetitions: how many were timed.
    arithmetic: seconds of an update whose messages cost nothing, all workers at work at once.
    selection: seconds of that until the first message.
    words: 4-byte words that the worker sent that sent most, mean over repetitions.
    messages: of one worker, one after the other, counted from the schedule.
    checked: the laws that were checked after every repetition: "C" nothing is lost, "R" the same bits everywhere.
  """

  algorithm: str
  engine: str
  workers: int
  n: int
  density: float
  rate: str
  seconds: float
  repetitions: int
  arithmetic: float
  selection: float
  words: float
  messages: int
  checked: str

  @property
  def wire(self) -> float:
    """Seconds that the messages add."""
    return max(0.0, self.seconds - self.arithmetic)

  @property
  def merge(self) -> float:
    """Seconds of arithmetic after the first message."""
    return max(0.0, self.arithmetic - self.selection)

  @property
  def bus_bandwidth(self) -> float:
    """GB/s as nccl-tests defines it for an all-reduce of n float32, whatever was really sent."""
    return 2 * (self.workers - 1) / self.workers * 4 * self.n / self.seconds / 1e9


class Bench:
  """The workers, and what measures them.

  Args:
    workers: of this run.
    engine: its name.
    n: gradient entries.
    repetitions: of each update.
  """

  def __init__(self, workers: Workers, engine: str, n: int, repetitions: int):
    self._workers, self._name, self._n, self._repetitions = workers, engine, n, repetitions
    self._engine = engine_of(workers.where, "workers")
    self._watch = timing.Stopwatch(self._engine)
    self._gradients = timing.gradients(self._engine, n)

  def row(self, spec: Spec, density: float, rate: str) -> Row:
    """Times and checks one algorithm.

    Raises:
      RuntimeError: if a result breaks a law.
    """
    times, words, laws = self._real(spec)
    arithmetic, selection = self._alone(spec.collective)
    workers, n = self._workers.size, self._n
    messages = js.costs.count(spec.name, n=n, workers=workers, **spec.config).messages
    measured = (statistics.median(times), len(times), arithmetic, selection, statistics.mean(words), messages, laws)
    return Row(spec.label, self._name, workers, n, density, rate, *measured)

  def _real(self, spec: Spec) -> tuple[list[float], list[float], str]:
    """Seconds and words of each repetition, and the laws that were checked."""
    update = timing.Update(self._engine, spec.collective, self._engine.comm, self._n)
    read = jax.jit(self._workers.metrics)
    laws = _Laws(self._engine, spec, update.specs)
    state, times, words = update.state, [], []
    for step in range(self._repetitions + 1):
      grads = self._gradients(step)
      before = laws.before(grads, state)
      seconds, (mean, state) = self._watch.time(update.program, grads, state)
      laws.check(spec.label, mean, state, before)
      times.append(seconds)
      words.append(float(here(read(state).words_sent)))
      if sum(times[1:]) > ENOUGH:  # the first compiles, and meets an empty residual
        break
    return times[1:], words[1:], laws.names

  def _alone(self, collective: js.Collective) -> tuple[float, float]:
    """(arithmetic, selection): seconds without any message, and until the first one."""
    grads = self._gradients(0)
    arithmetic, update = timing.alone(self._engine, self._watch, collective, grads, self._n, self._repetitions)
    first = self._engine.jit(until_first_message(update.function), update.specs, PartitionSpec("workers"))
    starts = [self._watch.time(first, grads, update.state)[0] for _ in range(self._repetitions + 1)]
    return arithmetic, min(arithmetic, statistics.median(starts[1:]))


class _Laws:
  """Laws C and R of one algorithm: sums over buckets of entries, and a checksum of every worker's bits."""

  def __init__(self, engine: Engine, spec: Spec, specs: Any):
    collective = spec.collective
    self._tolerance = 2**-8 if spec.config.get("dtype") == "bfloat16" else 2**-18  # shares of the magnitudes
    self._conserves, self._replicates, self._size = collective.conserves, collective.replicates, engine.workers
    rows = functools.partial(rows_of, engine)
    self._held, self._kept = rows(_held, specs), rows(functools.partial(_held, None), specs[1:])
    self._delivered, self._bits = rows(_bucket_sums, specs[:1]), rows(_checksum, specs[:1])

  @property
  def names(self) -> str:
    """Which laws are checked."""
    return " ".join(name for name, holds in (("C", self._conserves), ("R", self._replicates)) if holds)

  def before(self, grads: jax.Array, state: Any) -> np.ndarray | None:
    """What all workers hold together before the update."""
    return self._held(grads, state).sum(0, dtype=np.float64) if self._conserves else None

  def check(self, label: str, mean: jax.Array, state: Any, before: np.ndarray | None) -> None:
    """Raises RuntimeError where a law does not hold."""
    if self._replicates and len(set(self._bits(mean).tolist())) > 1:
      raise RuntimeError(f"{label}: the workers received different totals (Law R)")
    if before is None:
      return
    after = self._size * self._delivered(mean)[0].astype(np.float64) + self._kept(state).sum(0, dtype=np.float64)
    lost = (np.abs(before[0] - after[0]) / np.maximum(before[1], 1e-30)).max()
    if not lost < self._tolerance:
      raise RuntimeError(f"{label}: {lost:.1e} of the gradient was lost or made up (Law C)")


def _held(grads: jax.Array | None, state: js.ReduceState) -> jax.Array:
  """Bucket sums of what a worker holds: gradients that are not yet reduced, and its residual."""
  parts = [_bucket_sums(part) for part in (grads, state.carried.residual) if part is not None]
  return sum(parts, jnp.zeros((2, _BUCKETS)))


def _bucket_sums(x: jax.Array) -> jax.Array:
  """f32[2, buckets]: sums of the entries of each bucket, and of their magnitudes."""
  columns = jnp.pad(x, (0, -x.size % _BUCKETS)).reshape(_BUCKETS, -1)
  return jnp.stack([columns.sum(1), jnp.abs(columns).sum(1)])


def _checksum(x: jax.Array) -> jax.Array:
  """u32[]: Σ (2i + 1) · bits of entry i."""
  words = jax.lax.bitcast_convert_type(x, jnp.uint32)
  return jnp.sum(words * (2 * jnp.arange(x.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)


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
  return is_message(equation) or any(
    _sends(inner) for jaxpr in js.costs.counting.inner_jaxprs(equation.params) for inner in jaxpr.eqns
  )
