"""Schedules of messages: who sends to whom in each round, and the exchanges that are built from the verbs.

Pairs are (source, destination) workers of one round, static Python data that is equal
on all workers.
"""

import collections
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from jaxsparse._compat import varying
from jaxsparse.arrays import iota
from jaxsparse.types import Comm, Cost, Reduction, Tree

Pairs = tuple[tuple[int, int], ...]


def strides(size: int) -> tuple[int, ...]:
  """The ⌈log₂ size⌉ strides of a recursive-halving schedule for any number of workers, largest first.

  Example:
    >>> strides(6), strides(8), strides(1)
    ((4, 2, 1), (4, 2, 1), ())
  """
  return tuple(1 << bit for bit in reversed(range((size - 1).bit_length())))


def team_size(size: int, teams: int) -> int:
  """Number of workers in each of `teams` equal teams; a ValueError names the divisors of `size` if it is not divisible.

  Example:
    >>> team_size(6, teams=2)
    3
  """
  if teams < 1 or size % teams:
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    raise ValueError(
      f"teams={teams} does not divide the {size} workers, choose one of {divisors}"
    )
  return size // teams


def ring(size: int, by: int) -> Pairs:
  """Each worker sends to the one `by` after it.

  Example:
    >>> ring(3, 1)
    ((0, 1), (1, 2), (2, 0))
  """
  return tuple((source, (source + by) % size) for source in range(size))


def checked_pairs(pairs: Iterable[tuple[int, int]], size: int) -> Pairs:
  """`pairs` if each worker sends at most once and receives at most once, else a ValueError that names the worker.

  Example:
    >>> checked_pairs([(0, 1), (2, 1)], size=3)
    Traceback (most recent call last):
    ValueError: route: worker 1 receives more than once in one round of ((0, 1), (2, 1))
  """
  # numpy's integers become Python's, which compare and print as users expect
  pairs = tuple((int(source), int(destination)) for source, destination in pairs)
  if outside := [pair for pair in pairs if min(pair) < 0 or max(pair) >= size]:
    raise ValueError(f"route {outside[0]}: workers are numbered 0 … {size - 1}")
  # Two rows, sources and destinations; no row if there are no pairs, so the `zip` with
  # the verbs is not strict.
  ends_of_pairs = zip(*pairs, strict=True)
  for verb, ends in zip(("sends", "receives"), ends_of_pairs, strict=False):
    worker, times = collections.Counter(ends).most_common(1)[0]
    if times > 1:
      raise ValueError(
        f"route: worker {worker} {verb} more than once in one round of {pairs}"
      )
  return pairs


def tree_rounds(size: int) -> tuple[Pairs, ...]:
  """The rounds of a binomial tree that reduces to worker 0, as (child, parent) pairs, for any number of workers.

  In the rounds of strides 1, 2, 4, … worker parent + stride sends to its parent.

  Example:
    >>> tree_rounds(6)
    (((1, 0), (3, 2), (5, 4)), ((2, 0),), ((4, 0),))
  """
  return tuple(
    # the range ends at size − stride: a parent has no pair if its child does not exist
    tuple((parent + stride, parent) for parent in range(0, size - stride, 2 * stride))
    for stride in reversed(strides(size))
  )


def agreement_messages(workers: int) -> int:
  """Messages of an all-reduce of a few numbers, `Cost.agreements` of one: 2⌈log₂P⌉, as of any all-reduce.

  Example:
    >>> agreement_messages(6), agreement_messages(1)
    (6, 0)
  """
  return 2 * len(strides(workers))


def all_reduce_cost(n: int, workers: int, itemsize: int = 4) -> Cost:
  """Cost of Rabenseifner's all-reduce, a reduce-scatter and an all-gather: 2⌈log₂P⌉ messages, 2 n (P − 1)/P words.

  Args:
    n: number of entries. Messages of one entry count as `Cost.agreements`, without
      words. Fewer entries than P cannot be scattered: their words count once, as in
      A2SGD's paper.
    workers: number of workers P.
    itemsize: bytes of an entry.

  Example:
    >>> all_reduce_cost(1000, workers=8)
    Cost(messages=6, words=1750, agreements=0)
  """
  messages = agreement_messages(workers)
  if n == 1:
    return Cost(0, 0, agreements=messages)
  # The reduce-scatter and the all-gather send (P − 1)/P of the entries each.
  entries = n if n < workers else 2 * math.ceil(n / workers) * (workers - 1)
  return Cost(messages, math.ceil(entries * itemsize / 4))


def combine_rows(rows: jax.Array, op: Reduction) -> jax.Array:
  """Combines rows [P, …] in rank order, 16-bit floats in float32: the bits do not depend on the engine."""
  combine = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}[op]
  dtype = rows.dtype
  # XLA's all-reduce on CPU sums in float32, too: it and this function round once, at
  # the end.
  if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
    rows = rows.astype(jnp.float32)
  add_row = lambda total, row: (combine(total, row), None)
  result, _ = varying.scan(add_row, rows[0], rows[1:])
  return result.astype(dtype)


def all_reduce_in_order(comm: Comm, x: jax.Array, op: Reduction = "sum") -> jax.Array:
  """An all-reduce by the other verbs of a comm, in rank order, for engines without an all-reduce of their own.

  With fewer than P entries, every worker gathers and combines all of them: ⌈log₂ P⌉
  messages. Otherwise each worker combines one of P blocks, after P − 1 messages, and
  gathers the results: 2n(P − 1)/P words in all, the optimum.
  """
  if x.size < comm.size:
    return combine_rows(in_rank_order(comm, all_gather(comm, x)), op)
  padded = jnp.pad(x.reshape(-1), (0, -x.size % comm.size))
  blocks = padded.reshape(comm.size, -1)
  # Row w that this worker receives is worker w's part of block `comm.rank`.
  block_sum = combine_rows(comm.all_to_all(blocks), op)
  total = in_rank_order(comm, all_gather(comm, block_sum))
  return total.reshape(-1)[: x.size].reshape(x.shape)


def rounded_all_reduce(comm: Comm, x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The sum of f32[n] over workers, in bfloat16 on the wire, the same bits everywhere, and this worker's share of it.

  Vectors are rounded before they are sent, and each of P blocks of the sum by the
  worker that adds it up:

      total = bf16(Σ_w bf16(x_w)),   share_w = bf16(x_w) + (total − Σ_w bf16(x_w)) of the block of worker w

  So the shares add up to the total, and `x_w − share_w` is what worker w still has to
  deliver.

  Example:
    >>> from jaxsparse.comm import SimComm
    >>> sums = lambda x: rounded_all_reduce(SimComm("w"), x)
    >>> total, share = jax.vmap(sums, axis_name="w")(jnp.array([[1.0], [1 / 512]]))
    >>> total.ravel(), 512 * share.ravel()
    (Array([1., 1.], dtype=float32), Array([511.,   1.], dtype=float32))
  """
  # blocks of whole words, of two bfloat16 each
  padded = jnp.pad(x, (0, -x.size % (2 * comm.size)))
  blocks = padded.reshape(comm.size, -1).astype(jnp.bfloat16)
  exact = combine_rows(comm.all_to_all(blocks).astype(jnp.float32), "sum")
  rounded = exact.astype(jnp.bfloat16)
  total = in_rank_order(comm, all_gather(comm, rounded)).astype(jnp.float32)
  # The worker that sums a block keeps its rounding error, in the same block of `share`.
  error = rounded.astype(jnp.float32) - exact
  share = blocks.astype(jnp.float32).at[comm.rank].add(error)
  return total.reshape(-1)[: x.size], share.reshape(-1)[: x.size]


def rounded_all_reduce_cost(n: int, workers: int) -> Cost:
  """Cost of `rounded_all_reduce` of n entries: P − 1 + ⌈log₂P⌉ messages, n (P − 1)/P words.

  Example:
    >>> rounded_all_reduce_cost(1000, workers=8)
    Cost(messages=10, words=882, agreements=0)
  """
  return Cost(
    workers - 1 + len(strides(workers)),
    # two entries a word, in a reduce-scatter and in an all-gather
    2 * math.ceil(n / (2 * workers)) * (workers - 1),
  )


def all_gather(comm: Comm, tree: Tree) -> Tree:
  """Bruck's all-gather over `shift` alone: ⌈log₂ P⌉ messages and P − 1 times the words of `tree`, for any P.

  Every leaf gains a leading axis of P rows in the home frame: row b is that of worker
  (rank + b) mod P. For six workers, the rows of worker 0 after each round (the last
  round sends only the two missing rows):

      own            0
      from 1         0 1
      from 2         0 1 2 3
      from 4         0 1 2 3 4 5
  """
  # The stride doubles: a worker that has s rows gets those of worker rank + s.
  leaves, structure = jax.tree.flatten(tree)
  rows = [leaf[None] for leaf in leaves]
  for stride in reversed(strides(comm.size)):
    # The last round sends only the rows that the receiver does not have.
    missing = min(stride, comm.size - stride)
    received = comm.shift([x[:missing] for x in rows], -stride)
    rows = [jnp.concatenate(pair) for pair in zip(rows, received, strict=True)]
  return jax.tree.unflatten(structure, rows)


def in_rank_order(comm: Comm, rows: Tree) -> Tree:
  """Reorders rows of the home frame, row b of worker (rank + b) mod P, by worker: row w of worker w."""
  # worker w is row (w − rank) mod P of the home frame
  order = (iota(comm.size) - comm.rank) % comm.size
  return jax.tree.map(lambda x: x[order], rows)
