"""DctTopk: an all-gather of the largest DCT coefficients of each tile of the gradient (the exchange of DeMo).

Gradients of neighbouring weights are alike, so that few coefficients of their cosine transform hold most of them. The
transform is orthonormal and linear: to send coefficients, and to keep as a residual what they do not deliver, is the
same in both bases.
"""

import dataclasses
import math
from typing import Self

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.collectives._base import replace_fields
from jaxsparse.collectives._dct import Tiling
from jaxsparse.collectives.chunktopk import ChunkTopk
from jaxsparse.types import Comm, Reduced, State


@dataclasses.dataclass(frozen=True, kw_only=True)
class DctTopk(ChunkTopk):
  """Sends the largest DCT coefficients of each tile of each worker to all others (the exchange of DeMo).

  A leaf of the gradient is a matrix, leading axes merged into one, and a vector is one row. It is cut into tiles of
  64 × 64 entries, the last ones along an axis shorter, and C is the orthonormal DCT-II of each tile. With
  `acc_w = gradient_w + residual_w` and q the rounding of `wire`,

      sent_w = q(top_k of each chunk of C acc_w)    total = Cᵀ Σ_w sent_w    next residual = acc_w − Cᵀ sent_w

  A full tile is a chunk of its own; the coefficients of shorter ones are put together in chunks as large. The
  residual is in the basis of the gradient. Of each chunk ⌈ρ · chunk⌉ coefficients are sent, by DeMo 32 of 4,096
  (density 1/128). Ablation: `combine="contributors"`. Entries of the total are rounded, as all sums over 64
  cosines are. Where a worker has several devices, each of them transforms its own pieces of the leaves.

  The published code gives tiles the largest divisor of an axis that is at most 64 as their side, which is 1 for a prime
  axis, and sends half of each vector.

  Args:
    chunk: entries of a full tile, a square number 1 … 16384: 4096 makes tiles of 64 × 64.
    wire: the format of a coefficient, "f32" or "2bit", as of `js.chunktopk_transform`.
    combine: "workers" is the sum over workers. "contributors", of the authors' code, is P times the mean over the
      workers that sent a coefficient: it does **not** conserve (Law C), and even the signs of entries may differ.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> grads = {"w": jnp.array([[[5.0, 1.0], [1.0, 1.0]]])}  # of one worker
    >>> js.simulate("dcttopk", grads, k=1, chunk=4).total["w"].round(3).tolist()
    [[2.0, 2.0], [2.0, 2.0]]
  """

  leaves: tuple[tuple[int, ...], ...] = dataclasses.field(default=(), init=False)

  @property
  def mixes_entries(self) -> bool:
    return True

  def __post_init__(self) -> None:
    super().__post_init__()
    if math.isqrt(self.chunk) ** 2 != self.chunk:
      raise ValueError(f"{self.name}: chunk={self.chunk!r}, choose a square number, 4096 for tiles of 64 × 64")

  def for_leaves(self, shapes: tuple[tuple[int, ...], ...]) -> Self:
    return replace_fields(self, leaves=shapes)

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n, acc = grads.size, grads + state.residual
    tiling = Tiling(self.leaves or ((n,),), math.isqrt(self.chunk))
    total, sent, _, counters = self.exchange(comm, tiling.coefficients(acc))
    inverse = lambda entries: tiling.entries(sparse.put(jnp.zeros_like(acc), entries.indices, entries.values))
    return Reduced(inverse(total), state._replace(residual=acc - inverse(sent)), counters)
