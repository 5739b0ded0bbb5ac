"""b-bit all-reduce: the all-reduce of signs with codes of 2, 4 or 8 bits (LoCo, Xie et al., 2024, in blocks)."""

import dataclasses
from typing import Literal

from jaxsparse.collectives.onebit.algorithm import OneBit


@dataclasses.dataclass(frozen=True, kw_only=True)
class NBit(OneBit):
  """Sends b bits for every entry and a step for each block, and keeps the rounding errors in residuals.

  Between signs (`js.onebit_transform`, which is `bits=1`) and bfloat16. As there, regions of workers are divided into
  blocks of at most 4,096 entries, all messages and sums are rounded by Q, and `total + Σ_w residual_w` is what entered,
  to rounding. Over a block with a step of 2h:

      Q(x) = sgn(x) · h · (2 · min(⌊|x| / 2h⌋, 2ᵇ⁻¹ − 1) + 1),    h = c · √(mean x²)

  h has 24 − b significant bits, and c is 1, 0.498, 0.168 and 0.0154 for 1, 2, 4 and 8 bits. Normal entries lose 40, 12,
  1.2 and 0.01 % of their energy, with 2 bits and more the least that they can. An entry of more than 2ᵇ − 1 times h
  arrives in several steps.

  A step sends P − 1 + ⌈log₂P⌉ messages of b bits for each entry and a word for each block, both `2 (P − 1)/P` times.

  Args:
    bits: b, of an entry.
    decay: as of `js.SparseCollective`.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> out = js.simulate("nbit", jnp.array([[1.0, -7.0], [0.0, 0.0]]), bits=4)
    >>> out.total.round(1), out.residuals[0].round(1)
    (Array([ 0.8, -7.5], dtype=float32), Array([0.2, 0.5], dtype=float32))
  """

  bits: Literal[1, 2, 4, 8] = 4  # type: ignore[misc]
