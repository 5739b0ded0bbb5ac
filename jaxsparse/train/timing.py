"""Seconds that a program of all workers takes, measured with the workers in step."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxsparse._compat import AxisName
from jaxsparse.collectives import Collective
from jaxsparse.comm import SoloComm
from jaxsparse.train.engine import Engine, rows_of
from jaxsparse.train.step import started
from jaxsparse.transform.update import transform_of
from jaxsparse.types import Comm

_AXIS = "workers"


class Stopwatch:
  """Times programs of an engine: all workers start together, and the slowest one counts.

  Args:
    engine: where the workers are.
    axis: of the mesh, where it is one.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from jaxsparse.comm import SimComm
    >>> from jaxsparse.train.engine import engine_of
    >>> watch = Stopwatch(engine_of(SimComm("workers", members=4), "workers"))
    >>> seconds, result = watch.time(jnp.square, jnp.arange(3))
    >>> seconds > 0, result
    (True, Array([0, 1, 4], dtype=int32))
  """

  def __init__(self, engine: Engine, axis: AxisName = _AXIS):
    self._engine = engine
    self._rows = rows_of(engine, lambda x: x[0], (PartitionSpec(axis),))

  def gather(self, value: float) -> np.ndarray:
    """f32[P] of `value` in every worker's process."""
    return self._rows(self._engine.spread(np.array(value, np.float32)))

  def time(self, program: Callable, *arguments: Any) -> tuple[float, Any]:
    """Seconds of one call, and what it returned."""
    jax.block_until_ready(arguments)
    self.gather(0.0)  # nobody starts before everybody is here
    start = time.perf_counter()
    result = jax.block_until_ready(program(*arguments))
    return float(self.gather(time.perf_counter() - start).max()), result


class Update:
  """One update of n entries by a collective over a comm, compiled for the workers of an engine.

  Attributes:
    function: gradients and state of one worker to the mean and the next state.
    program: the same for all workers, each with its own mean to look at; it donates both, as a training step
      does, which has no use for its gradients afterwards.
    state: before the first update.
    specs: of (gradients, state).

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> from jaxsparse.train.engine import engine_of
    >>> comm = js.SimComm("workers", members=2)
    >>> update = Update(engine_of(comm, "workers"), js.make_collective("dense"), comm, n=3)
    >>> update.program(jnp.arange(6.0), update.state)[0]
    Array([1.5, 2.5, 3.5, 1.5, 2.5, 3.5], dtype=float32)
  """

  def __init__(self, engine: Engine, collective: Collective, comm: Comm, n: int, axis: AxisName = _AXIS):
    tx = transform_of(collective, comm)
    split = PartitionSpec(axis)
    self.function = tx.update
    self.state, own = started(engine, tx.init, jnp.zeros(n), axis)
    self.specs = (split, own)
    self.program = engine.jit(tx.update, self.specs, (split, own), donate=(0, 1))


def alone(
  engine: Engine,
  watch: Stopwatch,
  collective: Collective,
  grads: jax.Array,
  n: int,
  repetitions: int,
  axis: AxisName = _AXIS,
) -> tuple[float, Update]:
  """Seconds of an update whose messages cost nothing, all workers at work at once; and the update."""
  update = Update(engine, collective, SoloComm(engine.workers), n, axis)
  split = PartitionSpec(axis)
  copied = engine.jit(jnp.copy, (split,), split)  # an update takes its gradients away
  times = []
  for _ in range(repetitions + 2):  # the first compiles, the second has an empty residual no longer
    seconds, (_, update.state) = watch.time(update.program, copied(grads), update.state)
    times.append(seconds)
  return statistics.median(times[2:]), update


def gradients(engine: Engine, n: int, axis: AxisName = _AXIS) -> Callable[[int], jax.Array]:
  """Makes the gradients of all workers from a seed: n independent normals at each."""

  def make(seed: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed), engine.comm.rank)
    return jax.random.normal(key, (n,), jnp.float32)

  program = engine.jit(make, (PartitionSpec(),), PartitionSpec(axis))
  return lambda seed: program(np.int32(seed))
