"""Rows of an embedding as Horovod exchanges `tf.IndexedSlices`: an all-gather of their numbers, and one of the rows."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

import jaxsparse as js
from jaxsparse import sparse
from jaxsparse.collectives._base import Traits
from jaxsparse.collectives.rows import Rows, _sum_rows, _touch
from jaxsparse.comm import all_gather, in_rank_order
from jaxsparse.sparse import bitset


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatheredRows(Rows):
  """The sum of the rows of one leaf that are not zero; no worker may have more than `capacity`, others are lost.

  Nothing is selected, and there is no residual.
  """

  @property
  def traits(self) -> Traits:
    """No size of a message varies."""
    return dataclasses.replace(super().traits, sizes_vary=False)

  def for_leaves(self, shapes: tuple[tuple[int, ...], ...]) -> Self:
    """The collective of the only leaf."""
    if len(shapes) != 1:
      raise ValueError(
        f"gathered_rows: {len(shapes)} leaves, choose --gradients=zipf, whose gradients have one"
      )
    return super().for_leaves(shapes)

  def init(self, n: int, size: int) -> js.State:
    """No residual."""
    return js.State()

  def reduce(self, comm: js.Comm, grads: jax.Array, state: js.State) -> js.Reduced:
    """Adds the rows of all workers in rank order."""
    (leaf,) = self._leaves(grads.size)
    matrix = grads.reshape(leaf.rows, leaf.width)
    own = bitset.nonzero(bitset.pack(jnp.any(matrix != 0, 1)), leaf.sent)
    numbers, values = (
      in_rank_order(comm, all_gather(comm, x))
      for x in (own, sparse.read_at(matrix, own))
    )
    members, ordinals = _touch(numbers, leaf.rows)
    (sums,) = _sum_rows([ordinals], [values], [numbers.size])
    indices = leaf.entries(bitset.nonzero(members, len(sums)), grads.size)
    counters = self.count(
      comm, grads.size, selected=own.size * leaf.width, delivered=sums.size
    )
    total = sparse.put(jnp.zeros_like(grads), indices.reshape(-1), sums.reshape(-1))
    return js.Reduced(total, state, counters)

  def _capacities(self, n: int, size: int) -> list:
    """Never those of owners."""
    return []
