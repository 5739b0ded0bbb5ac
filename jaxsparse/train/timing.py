"""Measures the seconds that a program of all workers takes, from a common start to the end of the slowest worker."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.collectives import Collective
from jaxsparse.comm import SoloComm
from jaxsparse.train.engine import Engine, rows_of
from jaxsparse.train.starting import start_workers
from jaxsparse.transform.update import init_state, reduce_step
from jaxsparse.types import ArrayTree, Comm

# Seconds that the calls of a measurement take together at least, longer than a moment
# of other load.
_LEAST = 0.1


class Stopwatch:
  """Times programs of an engine: all workers start together, and the time of the slowest is the result.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from jaxsparse.comm import SimComm
    >>> from jaxsparse.train.engine import engine_of
    >>> watch = Stopwatch(engine_of(SimComm("workers", members=4), "workers"))
    >>> seconds, result = watch.time(jnp.square, jnp.arange(3))
    >>> seconds > 0, result
    (True, Array([0, 1, 4], dtype=int32))
  """

  def __init__(self, engine: Engine):
    self._engine = engine
    # Gathers one row of each worker, on every process.
    self._rows = rows_of(engine, lambda x: x[0], (engine.split,))

  def gather(self, value: float) -> np.ndarray:
    """The `value` of each worker's process, f32[P], on every process."""
    return self._rows(self._engine.spread(np.array(value, np.float32)))

  def time(self, program: Callable, *arguments: ArrayTree) -> tuple[float, Any]:
    """Seconds of one call at the slowest worker, the same on every process, and the result of the call."""
    # Arguments are complete before the start: their transfers are not timed.
    jax.block_until_ready(arguments)
    self.gather(0.0)  # a barrier: the values do not matter
    start = time.perf_counter()
    result = jax.block_until_ready(program(*arguments))
    return float(self.gather(time.perf_counter() - start).max()), result


class Update:
  """One update of n entries by a collective over a comm, compiled for the workers of an engine.

  Attributes:
    function: (gradients, state) of one worker -> (mean, next state).
    program: the same for all workers; the result has the mean of each worker. It
      donates both arguments, as a training step does.
    state: the state of all workers before the first update.
    specs: the specs of (gradients, state).

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> from jaxsparse.train.engine import engine_of
    >>> comm = js.SimComm("workers", members=2)
    >>> update = Update(engine_of(comm, "workers"), js.make_collective("dense"), comm, n=3)
    >>> update.program(jnp.arange(6.0), update.state)[0]
    Array([1.5, 2.5, 3.5, 1.5, 2.5, 3.5], dtype=float32)
  """

  def __init__(self, engine: Engine, collective: Collective, comm: Comm, n: int):
    # The last argument is the divisor of the total, which makes it a mean.
    self.function = lambda grads, state: reduce_step(
      collective, comm, grads, state, comm.size
    )
    self.state, state_specs = start_workers(
      engine, lambda flat: init_state(collective, flat.size, comm.size), jnp.zeros(n)
    )
    # The results, (mean, next state), have the specs of (gradients, state).
    specs = self.specs = (engine.split, state_specs)
    self.program = engine.jit(self.function, specs, specs, donate=(0, 1))


@dataclasses.dataclass(frozen=True)
class _AloneComm(SoloComm):
  """`SoloComm` at each worker's own rank, which XLA cannot fold into the program like rank 0."""

  all_workers: Comm

  def _engine_rank(self) -> jax.Array:
    return self.all_workers.rank


def repeat(
  time_once: Callable[[], float], repetitions: int, budget: float = math.inf
) -> list[float]:
  """Seconds of repeated calls, of one at least.

  There are `repetitions` calls; more where these take less than 0.1 s together, which
  may be one moment of other load on the cores; fewer once they have taken `budget`
  seconds.

  Args:
    time_once: makes one call and returns its seconds.
    repetitions: the usual number of calls.
    budget: seconds of all calls together.
  """
  times = [time_once()]
  is_short = lambda: len(times) < repetitions or sum(times) < _LEAST
  while is_short() and sum(times) < budget:
    times.append(time_once())
  return times


def alone(
  engine: Engine,
  watch: Stopwatch,
  collective: Collective,
  grads: jax.Array,
  repetitions: int,
  budget: float = math.inf,
) -> tuple[list[float], Update]:
  """Seconds of the arithmetic of an update, as `repeat` returns them, and the update.

  No messages are sent, and all workers compute at once.

  Args:
    engine: the workers.
    watch: a stopwatch of the engine.
    collective: the collective that updates.
    grads: of all workers, f32[P · n], as `gradients` makes them.
    repetitions: as in `repeat`.
    budget: as in `repeat`, in seconds.
  """
  # A message of this comm returns what the worker sends, without a transfer.
  comm = _AloneComm(engine.workers, engine.comm)
  update = Update(engine, collective, comm, grads.size // engine.held)

  def time_once() -> float:
    # The program donates gradients and state: it gets a copy of the gradients, and the
    # state that the last call returned.
    seconds, (_, update.state) = watch.time(
      update.program, jnp.copy(grads), update.state
    )
    return seconds

  # The first call compiles, the second is the first with a residual.
  time_once()
  time_once()
  return repeat(time_once, repetitions, budget), update


def gradients(engine: Engine, n: int) -> Callable[[int], jax.Array]:
  """A function from a seed to gradients of all workers, n independent standard normal numbers at each.

  The function returns f32[P · n], sharded along the workers: first the n entries of
  worker 0, then those of worker 1, and so on. Under MPI it returns the f32[n] of this
  rank.
  """

  def make(seed: jax.Array) -> jax.Array:
    # Each worker has its own gradients, as in training: what is sent depends on that.
    key = jax.random.fold_in(jax.random.key(seed), engine.comm.rank)
    return jax.random.normal(key, (n,), jnp.float32)

  program = engine.jit(make, (engine.same,), engine.split)
  return lambda seed: program(np.int32(seed))
