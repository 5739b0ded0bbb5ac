"""Measures what a runtime overlaps, by programs of its own."""

import statistics
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import jaxsparse as js
from benchmarks.workers import AXIS
from jaxsparse.train import timing
from jaxsparse.train.engine import engine_of

# short all-reduces one after the other, which makes the overhead of the clock and of
# the call small
_CHAIN = 8
# side of square matrices, and number of their products: some milliseconds
_SIDE, _PRODUCTS = (
  256,
  16,
)
_LONGEST = 2**20  # words of the longest all-reduce


class Runtime(NamedTuple):
  """What a runtime overlaps."""

  # seconds of two independent short all-reduces over the seconds of one: 1 if they
  # start at the same time; 2 if one waits for the other, so that plans should have
  # `ways=1`
  start_ups: float
  # fraction of an all-reduce that overlaps with independent arithmetic of the same
  # duration, 0 to 1. Near 0, plan with `Layers.at_the_end`
  hidden: float


def measure_runtime(mesh: Mesh | js.Comm, repetitions: int = 5) -> Runtime:
  """Measures whether all-reduces overlap with each other and with arithmetic; every process calls, with one result."""
  engine, split = engine_of(mesh, AXIS), PartitionSpec(AXIS)
  watch, comm, options = (
    timing.Stopwatch(engine),
    engine.comm,
    js.overlap.compiler_options(engine.platform),
  )

  def seconds(function: Callable, words: int) -> float:
    program = engine.jit(
      lambda x: function(x[0])[None], (split,), split, options=options
    )
    rows = engine.spread(np.ones(words, np.float32))
    return statistics.median(
      [watch.time(program, rows)[0] for _ in range(repetitions + 1)][1:]
    )

  def chain(x: jax.Array) -> jax.Array:
    # of equal values XLA would make a multiplication
    own = x + comm.rank.astype(jnp.float32)
    for _ in range(_CHAIN):
      x = comm.all_reduce(own + 0.5 * x)
    return x

  start_ups = seconds(lambda x: chain(x) + chain(2 * x), 2 * engine.workers) / seconds(
    chain, 2 * engine.workers
  )
  words, arithmetic = _SIDE**2, seconds(lambda x: _multiply(x, _PRODUCTS), _SIDE**2)
  while (sending := seconds(comm.all_reduce, words)) < arithmetic and words < _LONGEST:
    words = min(_LONGEST, max(2 * words, round(words * arithmetic / sending)))
  # An all-reduce that can start after one matrix product, and a chain of products
  # independent of it.
  both = seconds(
    lambda x: comm.all_reduce(x + _multiply(x, 1)[0]) + _multiply(x, _PRODUCTS), words
  )
  return Runtime(
    start_ups,
    min(1.0, max(0.0, (arithmetic + sending - both) / min(arithmetic, sending))),
  )


def _multiply(x: jax.Array, products: int) -> jax.Array:
  square = x[: _SIDE**2].reshape(_SIDE, _SIDE)
  for _ in range(products):
    square = jnp.tanh(square @ square)
  return jnp.pad(square.reshape(-1), (0, x.size - _SIDE**2))
