"""DctTopk: the largest coefficients of each worker, sent to all others."""

import dataclasses
import math
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from jaxsparse import _compat, sparse
from jaxsparse.arrays.sums import largest_magnitude
from jaxsparse.collectives._base import Traits, check_shapes, replace_fields
from jaxsparse.collectives.baselines.dcttopk.tiling import Tiling
from jaxsparse.collectives.chunktopk import ChunkTopk
from jaxsparse.types import Comm, Deferred, Reduced, Sparse, State


@dataclasses.dataclass(frozen=True, kw_only=True)
class DctTopk(ChunkTopk):
  """Sends the largest DCT coefficients of each tile of each worker to all others (the exchange of DeMo).

  A leaf of the gradient is a matrix, leading axes merged into one, and a vector is one
  row. It is cut into tiles of 64 × 64 entries, the last ones along an axis shorter, and
  C is the orthonormal DCT-II of each tile. With `acc_w = gradient_w + residual_w` and q
  the rounding of `wire`,

      sent_w = q(top_k of each chunk of C acc_w)    total = Cᵀ Σ_w sent_w    next residual = acc_w − Cᵀ sent_w

  A full tile is a chunk of its own; the coefficients of shorter ones are put together
  in chunks as large. The residual is in the basis of the gradient. Of each chunk ⌈ρ ·
  chunk⌉ coefficients are sent, by DeMo 32 of 4,096 (density 1/128). Ablation:
  `combine="contributors"`. Entries of the total are rounded, as all sums over 64
  cosines are. Where a worker has several devices, each of them transforms its own
  pieces of the leaves.

  The published code gives tiles the largest divisor of an axis that is at most 64 as
  their side, which is 1 for a prime axis, and sends half of each vector.

  Args:
    chunk: entries of a full tile, a square number 1 … 16384: 4096 makes tiles of 64 ×
      64.
    wire: the format of a coefficient, "f32", "int4" or "2bit", as in `js.chunktopk_transform`.
    combine: "workers" is the sum over workers. "contributors", of the authors' code, is
      P times the mean over the workers that sent a coefficient: it does **not**
      conserve (Law C), and even the signs of entries may differ.

  Attributes:
    leaves: the shapes of the leaves of the gradient; () before `for_leaves` gives them:
      the gradient is then one vector.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> grads = {"w": jnp.array([[[5.0, 1.0], [1.0, 1.0]]])}  # of one worker
    >>> js.simulate("dcttopk", grads, k=1, chunk=4).total["w"].round(3).tolist()
    [[2.0, 2.0], [2.0, 2.0]]
  """

  leaves: tuple[tuple[int, ...], ...] = dataclasses.field(default=(), init=False)

  @property
  def traits(self) -> Traits:
    return dataclasses.replace(super().traits, mixes_entries=True, scaled=True)

  def __post_init__(self) -> None:
    super().__post_init__()
    if math.isqrt(self.chunk) ** 2 != self.chunk:
      raise ValueError(
        f"{self.name}: chunk={self.chunk!r}, choose a square number, 4096 for tiles of 64 × 64"
      )

  def for_leaves(self, shapes: tuple[tuple[int, ...], ...]) -> Self:
    return replace_fields(self, leaves=shapes)

  def init(self, n: int, size: int) -> State:
    check_shapes(self.name, self.leaves or ((n,),), n)
    return super().init(n, size)

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n = grads.size
    tiling = Tiling(self.leaves or ((n,),), math.isqrt(self.chunk))
    _, length, k_chunk = self.chunks(n)
    # the largest coefficients of each chunk of C acc_w, [chunks, k_chunk]
    chosen = tiling.largest(grads, state.residual, length, k_chunk)
    # coefficients as entries of f32[n]: Σ_w sent_w, and sent_w of this worker
    total, sent, _, counters = self.exchange(comm, chosen, n)
    # An entry of the total is a sum of at most `chunk` coefficients, each times two
    # scaled cosines below 2. So no magnitude exceeds `bound`, which is Inf or NaN if an
    # entry is.
    bound = largest_magnitude(total.values) * (4.0 * self.chunk)
    # total = Cᵀ Σ_w sent_w, computed where the step ends
    coefficients = Coefficients(tiling, grads, total, sent, bound)
    return Deferred(coefficients, state, counters)


class Coefficients(NamedTuple):
  """The total and what this worker sent as coefficients of tiles: a `Formula`.

  Attributes:
    tiling: the tiles of the leaves.
    grads: f32[n], of this worker.
    total: entries of the total.
    sent: entries that this worker sent.
    bound: f32[], Inf or NaN where an entry of the total may be.
  """

  tiling: Tiling
  grads: jax.Array
  total: Sparse
  sent: Sparse
  bound: jax.Array

  @property
  def values(self) -> tuple[jax.Array, jax.Array]:
    """The bound, and a factor 1, f32[], of the entries: for the mean the caller divides both by P.

    Coefficients are not divided, so that they have the same bits for any P.
    """
    return self.bound, jnp.float32(1)

  def finish(
    self,
    values: tuple[jax.Array, jax.Array],
    finite: jax.Array,
    residual: jax.Array,
    decay: float,
  ) -> tuple[jax.Array, jax.Array]:
    """The total and the residual, as `Formula.finish` returns them.

    Args:
      values: (bound, factor) of the property `values`; both divided by P for the mean.
        The total is multiplied by the factor.
      finite: bool[], false in a step that all workers skip.
      residual: f32[n], before the step.
      decay: the factor of the next residual.
    """
    # 1, or 1/P for the mean
    _, factor = values
    tiling = self.tiling

    def at_once() -> tuple[jax.Array, jax.Array]:
      inverse = lambda entries: tiling.entries(
        sparse.put(jnp.zeros_like(residual), entries.indices, entries.values)
      )
      # The transform is linear: subtract Cᵀ sent_w in the basis of the gradient.
      rest = decay * (self.grads + residual - inverse(self.sent))
      update = jnp.where(finite, factor * inverse(self.total), 0.0)
      return update, jnp.where(finite, rest, residual)

    def keep(
      old: jax.Array,
      entries: jax.Array,
      at: jax.Array,
    ) -> jax.Array:
      """The next residual at flat indices `at`; `entries` are Cᵀ sent_w there, `old` has the residual there."""
      before = old[at]
      return jnp.where(finite, decay * (self.grads[at] + before - entries), before)

    def in_place() -> tuple[jax.Array, jax.Array]:
      after = tiling.put_entries(residual, self.sent, keep)
      # The barrier lets the update reuse the gradient's buffer once `keep` has read it.
      grads, after = jax.lax.optimization_barrier((self.grads, after))
      # (x, entries, at): the update is made of `entries` alone
      new = lambda _, entries, __: jnp.where(finite, factor * entries, 0.0)
      return tiling.put_entries(grads, self.total, new), after

    # An update by `in_place` takes 4.3 times the CPU time. Compiled for an H100, one
    # by `at_once` moves 1.2 times the bytes, and stores 5.3 arrays f32[n], not 0.4.
    return _compat.by_platform(gpu=in_place, default=at_once)()
