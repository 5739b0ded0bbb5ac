"""One SparDL update of one worker alone, whose messages are copies: its time and memory."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import rich.table
from jax.extend import core

import jaxsparse as js
from benchmarks import report
from jaxsparse.comm import SoloComm

READ = jax.jit(lambda x: jnp.abs(x).sum())


class Update(NamedTuple):
  """One update of one worker alone."""

  workers: int  # P
  seconds: float  # median of one update
  read: float  # of one read of the gradient in the same run
  buffers: float  # memory it takes at its peak beyond gradient and state, its own mean included, in arrays of n float32
  fallbacks: int  # how many of its `lax.cond`s took the exact fallback over whole blocks, in one more update
  choices: int  # how many such `lax.cond`s it has


def seconds_of(program: Callable[[], Any]) -> float:
  """Seconds until the result of one call is there."""
  start = time.perf_counter()
  jax.block_until_ready(program())
  return time.perf_counter() - start


def count_fallbacks(function: Callable, *arguments: Any) -> tuple[int, int]:
  """(taken, choices): how many of the outermost `lax.cond` of a function take their branch for False.

  In selection the False branch is the exact fallback, taken where the threshold of a sample gave too few candidates.
  Only the predicates are computed.
  """
  closed = jax.make_jaxpr(function)(*arguments)
  chosen = [equation.invars[0] for equation in closed.jaxpr.eqns if equation.primitive.name == "cond"]
  names = closed.jaxpr.debug_info._replace(result_paths=None)
  head = closed.jaxpr.replace(outvars=chosen, debug_info=names)
  branches = jax.jit(core.jaxpr_as_fun(core.ClosedJaxpr(head, closed.consts)))(*jax.tree.leaves(arguments))
  return sum(int(branch) == 0 for branch in branches), len(branches)


def update_alone(size: int, n: int, density: float, repetitions: int) -> Update:
  """One SparDL update of one of `size` workers, whose messages are copies."""
  tx = js.make_transform("spardl", SoloComm(size), density=density)
  several = [jax.random.normal(jax.random.key(seed), (n,), jnp.float32) for seed in range(3)]
  state = tx.init(several[0])
  # A training step has no use for its gradients afterwards: they give their buffer to the mean.
  compiled: Any = jax.jit(tx.update, donate_argnums=(0, 1)).lower(several[0], state).compile()
  times: dict[str, list[float]] = {"seconds": [], "read": []}
  for step in range(3 + repetitions):  # the first of them have an empty residual
    grads = jax.block_until_ready(jnp.copy(several[step % 3]))
    times["read"].append(seconds_of(functools.partial(READ, grads)))
    start = time.perf_counter()
    mean, state = jax.block_until_ready(compiled(grads, state))
    times["seconds"].append(time.perf_counter() - start)
  medians = {name: statistics.median(seconds[3:]) for name, seconds in times.items()}
  residual = state.carried.residual
  if not mean.shape == residual.shape == (n,) or not bool(jnp.isfinite(mean).all() & jnp.isfinite(residual).all()):
    raise RuntimeError(f"the update of one of {size} workers is not finite, or not of {n} entries")
  memory = compiled.memory_analysis()
  beyond = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
  taken, choices = count_fallbacks(tx.update, several[0], state)
  return Update(size, **medians, buffers=beyond / (4 * n), fallbacks=taken, choices=choices)


def update_table(update: Update) -> rich.table.Table:
  """Time and memory of the update."""
  times = report.milliseconds(update.seconds), report.milliseconds(update.read), f"{update.seconds / update.read:.1f}"
  title = "one SparDL update of one worker, alone; memory beyond gradient and state in arrays of n float32"
  row = [str(update.workers), *times, f"{update.buffers:.2f}", f"{update.fallbacks} of {update.choices}"]
  return report.table(title, ("P", "ms", "read", "× read", "memory", "fallbacks"), [row])
