"""Artificial data dependencies that order operations which are otherwise independent.

Such an order is needed twice: in-place writes must follow all reads of the buffer, or
XLA copies the buffer; and the messages of a group must follow those of earlier groups,
or XLA sends them in any order.

`jax.lax.optimization_barrier` states such an order, but XLA for CPU removes the
barriers before it schedules operations and assigns buffers. Measured with JAX 0.10.2 on
SparDL's update of n donated entries: with barriers instead of `depend_on`, or one
around all reads, the compiled program has 2 copies of f32[n] (3 with the "chunked"
selector), as without any order, and none with `depend_on`. With barriers around
messages, no group of a plan follows another.

So `depend_on` adds a 0 to a value that is computed from the values read, and that no
compiler knows to be 0.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxsparse.types import Comm, Reduction, Tree


def depend_on(read: jax.Array, x: jax.Array) -> jax.Array:
  """`x`, a number, available only after all of `read` is computed: `x + min(Σ [read ≠ 0], 0)`.

  Example:
    >>> depend_on(jnp.array([1.0, 2.0]), jnp.array([7]))
    Array([7], dtype=int32)
  """
  # The count is at least 0, so the minimum is 0; compilers do not know that.
  count = jnp.sum(read.astype(jnp.bool_), dtype=x.dtype)
  return x + jnp.minimum(count, 0)


def following(comm: Comm, totals: Sequence[jax.Array]) -> Comm:
  """`comm`, whose messages start only after all of `totals`, at least one, are computed."""
  zeros = [depend_on(total, jnp.int32(0)) for total in totals]
  return _Following(comm, jnp.array(zeros).min())


@dataclasses.dataclass(frozen=True)
class _Following:
  """A comm whose messages depend on `sent`.

  Attributes:
    comm: the comm that sends the messages.
    sent: i32[], 0, computed from the totals that must be complete before.
  """

  comm: Comm
  sent: jax.Array

  @property
  def size(self) -> int:
    return self.comm.size

  @property
  def rank(self) -> jax.Array:
    return self.comm.rank

  @property
  def divisor(self) -> int:
    return self.comm.divisor

  def shift(self, tree: Tree, by: int) -> Tree:
    return self.comm.shift(self._dependent(tree), by) if by % self.size else tree

  def all_to_all(self, rows: Tree) -> Tree:
    return self.comm.all_to_all(self._dependent(rows))

  def permute(self, tree: Tree, pairs: Sequence[tuple[int, int]]) -> Tree:
    return self.comm.permute(self._dependent(tree), pairs)

  def all_reduce(self, x: jax.Array, op: Reduction = "sum") -> jax.Array:
    return self.comm.all_reduce(self._dependent(x), op)

  def split(self, teams: int) -> "tuple[_Following, _Following]":
    # Messages of teams wait for the same totals.
    team, member = self.comm.split(teams)
    return _Following(team, self.sent), _Following(member, self.sent)

  def _dependent(self, tree: Tree) -> Tree:
    """The same bits, which depend on `sent`."""
    # always true, which no compiler knows
    is_sent = self.sent >= 0
    return jax.tree.map(lambda x: jnp.where(is_sent, x, jnp.zeros_like(x)), tree)
