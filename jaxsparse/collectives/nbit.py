"""b-bit all-reduce: the all-reduce of signs with codes of 2, 4 or 8 bits (LoCo, Xie et al., 2024, in blocks)."""

import dataclasses
from typing import Literal

from jaxsparse.collectives.onebit import OneBit


@dataclasses.dataclass(frozen=True, kw_only=True)
class NBit(OneBit):
  """Sends b bits for every entry and a step for every 32, and keeps the rounding errors in residuals.

  Between signs (`js.onebit_transform`, which is `bits=1`) and bfloat16. As there,
  regions of workers are divided into blocks of at most 4,096 entries, all messages and
  sums are rounded by Q, and `total + Σ_w residual_w` is what entered, to rounding. A
  block is 32 rows; its columns, of 32 entries each, have steps that follow their
  largest magnitudes. Let m be the largest magnitude of a column, H the mean of m over
  the columns of its block, and r the largest of a few ratios with `r · H ≤ m`, or the
  smallest one:

      ratios  0.84 · √2ʲ,   j = −4 … 11;   of 2 bits  j = −2, −1, 0, 1, 2, 4, 6, 8
      Δ       c · r · H,    c = 0.19, 0.175 and 1/90 for 2, 4 and 8 bits;  24 − b significant bits
      Q(x)    sgn(x) · Δ · min(⌊|x|/Δ + 1/2⌋, 2ᵇ⁻¹ − 1);   of 2 bits  ±Δ where |x| < 2.5 Δ, else ±4 Δ

  With 4 and 8 bits zeros stay zeros. What exceeds the largest magnitude arrives in
  several steps. The energy lost:

      bits   normal   Student's t, 3 degrees   gradients of a CNN and a transformer
      2      12 %     24 to 26 %               17 to 35 %
      4      1.1 %    2.5 %                    0.6 to 1.6 %
      8      0.004 %  0.01 %                   0.005 %

  A step sends P − 1 + ⌈log₂P⌉ messages of b bits for each entry, 4 bits (of 2 bits 3)
  for each column and a word for each block, all `2 (P − 1)/P` times: 1.06, 1.03 and
  1.02 times b bits an entry for large n.

  Args:
    bits: b, of an entry.
    decay: as in `js.SparseCollective`.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> out = js.simulate("nbit", jnp.array([[2.0, 0.0, -5.0]]), bits=4)
    >>> jnp.allclose(out.total + out.residuals[0], jnp.array([2.0, 0.0, -5.0])), out.total[1]
    (Array(True, dtype=bool), Array(0., dtype=float32))
  """

  bits: Literal[1, 2, 4, 8] = 4  # type: ignore[misc]
