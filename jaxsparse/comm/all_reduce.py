"""All-gather, personalized exchange and all-reduce over the verb `shift` alone, and the cost of an all-reduce."""

import math

import jax
import jax.numpy as jnp

from jaxsparse.comm import topology
from jaxsparse.types import Comm, Cost, Reduction, Tree

_WORD = 4  # bytes


def all_reduce_cost(n: int, workers: int, itemsize: int = 4) -> Cost:
  """Cost of Rabenseifner's all-reduce, a reduce-scatter and an all-gather: 2⌈log₂P⌉ messages, 2 n (P − 1)/P words.

  Args:
    n: number of entries. One entry counts as an agreement; fewer than P cannot be scattered and count as n words.
    workers: number of workers P.
    itemsize: bytes of an entry.

  Example:
    >>> all_reduce_cost(1000, workers=8)
    Cost(messages=6, words=1750, agreements=0)
  """
  if n == 1:
    return Cost(0, 0, agreements=int(workers > 1))
  if n < workers:
    return Cost(2 * len(topology.strides(workers)), math.ceil(n * itemsize / 4))
  sent = 2 * math.ceil(n / workers) * (workers - 1) * itemsize
  return Cost(2 * len(topology.strides(workers)), math.ceil(sent / 4))


def combined(rows: jax.Array, op: Reduction) -> jax.Array:
  """Combines rows [P, …] in rank order, 16-bit floats in float32: the bits do not depend on the engine."""
  combine = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}[op]
  dtype = rows.dtype
  if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < _WORD:
    rows = rows.astype(jnp.float32)
  result, _ = jax.lax.scan(lambda total, row: (combine(total, row), None), rows[0], rows[1:])
  return result.astype(dtype)


def all_reduce_in_order(comm: Comm, x: jax.Array, op: Reduction = "sum") -> jax.Array:
  """An all-reduce over `shift` alone that adds in rank order, for engines without an all-reduce.

  With fewer than P entries, every worker gathers and combines all of them: ⌈log₂ P⌉ messages. Otherwise each worker
  combines one of P blocks, after P − 1 messages, and gathers the results: 2n(P − 1)/P words in all, the optimum.
  """
  if x.size < comm.size:
    return combined(in_rank_order(comm, all_gather(comm, x)), op)
  blocks = jnp.pad(x.reshape(-1), (0, -x.size % comm.size)).reshape(comm.size, -1)
  mine = combined(exchange(comm, blocks), op)
  return in_rank_order(comm, all_gather(comm, mine)).reshape(-1)[: x.size].reshape(x.shape)


def all_gather(comm: Comm, tree: Tree) -> Tree:
  """Bruck's all-gather over `shift` alone: ⌈log₂ P⌉ messages and P − 1 times the words of `tree`, for any P.

  Every leaf gains a leading axis of P rows in the home frame: row b is that of worker (rank + b) mod P. For six
  workers, the rows of worker 0 after each round (the last round sends only the two missing rows):

      own            0
      from 1         0 1
      from 2         0 1 2 3
      from 4         0 1 2 3 4 5
  """
  rows = jax.tree.map(lambda x: x[None], tree)
  for stride in reversed(topology.strides(comm.size)):
    missing = min(stride, comm.size - stride)
    got = comm.shift(jax.tree.map(lambda x, m=missing: x[:m], rows), -stride)
    rows = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), rows, got)
  return rows


def in_rank_order(comm: Comm, rows: Tree) -> Tree:
  """Reorders rows of the home frame, row b of worker (rank + b) mod P, by worker: row w of worker w."""
  order = (jnp.arange(comm.size, dtype=jnp.int32) - comm.rank) % comm.size
  return jax.tree.map(lambda x: x[order], rows)


def exchange(comm: Comm, rows: Tree) -> Tree:
  """Sends row r to worker r, as MPI_Alltoall: P − 1 messages, in each of which every worker receives one.

  The messages do not depend on each other, so a runtime may send several at once. Worker 2 of six sends:

      row 3 -> worker 3, row 4 -> worker 4, row 5 -> worker 5, row 0 -> worker 0, row 1 -> worker 1;   it keeps row 2

  Returns:
    Row w is the one that worker w sent to this worker.
  """
  away = (comm.rank + jnp.arange(comm.size, dtype=jnp.int32)) % comm.size
  home_frame = jax.tree.map(lambda x: x[away], rows)
  own = jax.tree.map(lambda x: x[:1], home_frame)
  sent = [comm.shift(jax.tree.map(lambda x, b=b: x[b : b + 1], home_frame), b) for b in range(1, comm.size)]
  # The row of worker rank − b is row P − b of the home frame.
  return in_rank_order(comm, jax.tree.map(lambda *parts: jnp.concatenate(parts), own, *reversed(sent)))
