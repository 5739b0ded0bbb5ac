"""Rows of matrices: an all-gather of those rows of each worker that are not zero, as of embeddings (Parallax, 2019)."""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse.collectives._base import ByLeaf
from jaxsparse.comm import all_gather, in_rank_order, schedules, varying
from jaxsparse.types import Comm, Cost, Reduced, State


class _Leaf(NamedTuple):
  """A leaf of `rows` rows of `width` entries: its first flat index, and how many rows a message has of it."""

  start: int
  rows: int
  width: int
  sent: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows(ByLeaf):
  """Sends whole rows of each leaf, one index for a row: for gradients of embeddings, most rows of which are zero.

  A leaf of shape (a, ...) has a rows; of a vector each entry is one. With `acc_w = gradient_w + residual_w`, each
  worker sends the `capacity` rows of each leaf with the largest mean magnitude:

      total = Σ_w rows(acc_w), added in rank order,    next residual_w = acc_w − rows(acc_w)

  So where no worker has more than `capacity` rows that are not zero, the total is exact and the residual zero. A row
  that no worker has sent is zero in the total: `optax.sgd` leaves it as it is; Adam goes on moving it by the momentum
  that it has, and lets its moments decay.

  A step sends ⌈log₂P⌉ messages with (P − 1) (width + 1) words for each row. As the words depend on the shapes of
  leaves, `js.costs.count`, `js.costs.predict` and `js.costs.fit` need the parameters.

  Args:
    capacity: rows of each leaf that a worker sends, 1 or more; at most all.
    decay: as of `js.SparseCollective`.

  Example:
    Two workers with one row each, of the same embedding:

    >>> import jax.numpy as jnp, jaxsparse as js
    >>> grads = jnp.zeros((2, 5, 3)).at[0, 1].set(1.0).at[1, 4].set(2.0)
    >>> out = js.simulate("rows", {"embedding": grads}, capacity=1)
    >>> out.total["embedding"][:, 0], int(out.metrics.words_sent)
    (Array([0., 1., 0., 0., 2.], dtype=float32), 4)
  """

  capacity: int = 4096
  decay: float = 1.0
  ranges = (("capacity", 1, None),)

  def is_partial(self, n: int, state: State) -> bool:
    return any(leaf.sent < leaf.rows for leaf in self._leaves(n))

  def cost(self, n: int, size: int) -> Cost:
    words = sum(leaf.sent * (leaf.width + 1) for leaf in self._leaves(n))
    return Cost(len(schedules.strides(size)), (size - 1) * words)

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    acc = grads + state.residual
    leaves = list(self._leaves(acc.size))
    matrices = [acc[leaf.start :][: leaf.rows * leaf.width].reshape(leaf.rows, leaf.width) for leaf in leaves]
    chosen = [_largest(matrix, leaf.sent) for matrix, leaf in zip(matrices, leaves, strict=True)]
    values = [matrix[rows] for matrix, rows in zip(matrices, chosen, strict=True)]
    received = in_rank_order(comm, all_gather(comm, list(zip(chosen, values, strict=True))))

    def add(worker: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
      pairs = zip(totals, received, strict=True)  # the rows of one worker differ, so the order of their sums does not
      return [total.at[rows[worker]].add(values[worker], unique_indices=True) for total, (rows, values) in pairs]

    totals = varying.fori_loop(0, comm.size, add, [jnp.zeros_like(matrix) for matrix in matrices])
    left = [matrix.at[rows].set(0.0) for matrix, rows in zip(matrices, chosen, strict=True)]
    total, residual = (jnp.concatenate([x.reshape(-1) for x in parts]) for parts in (totals, left))
    count = lambda parts: sum(jnp.any(rows != 0, 1).sum() * rows.shape[1] for rows in parts)
    counters = self.count(comm, acc.size, selected=count(values), delivered=count(totals))
    return Reduced(total, state._replace(residual=residual), counters)

  def _leaves(self, n: int) -> Iterator[_Leaf]:
    """The leaves that have entries."""
    start = 0
    for shape in self.shapes(n):
      count = (shape or (1,))[0]
      width = math.prod(shape[1:])
      if count * width:
        yield _Leaf(start, count, width, min(self.capacity, count))
      start += count * width


def _largest(matrix: jax.Array, count: int) -> jax.Array:
  """The numbers of the rows of largest mean magnitude, i32[count], NaN first: all workers see it then."""
  means = (jnp.abs(matrix) / matrix.shape[1]).sum(1)
  return jax.lax.top_k(jnp.where(jnp.isnan(means), jnp.inf, means), count)[1]
