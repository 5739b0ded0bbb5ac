"""Counts the parts of one update that are wrong: that break conservation (Law C) or replication (Law R)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.specs import Spec
from jaxsparse.train.engine import Engine, rows_of
from jaxsparse.train.replicas import hashed
from jaxsparse.transform.state import ReduceState

_PARTS = (
  4096  # of the vector, that are compared; a part is one entry where n is at most this
)


class Laws:
  """The laws that one algorithm promises, checked after an update by sums and hashes of parts of the vectors.

  Law C: `P · mean + Σ_w residual_w` after the update is `Σ_w (gradient_w + residual_w)`
  before it. Law R: all workers receive the same bits.
  """

  def __init__(self, engine: Engine, spec: Spec, specs: Any):
    collective = spec.collective
    # Relative to the magnitudes. In bfloat16 the gradients and each of P − 1 additions
    # are rounded by at most 2⁻⁸, in all P · 2⁻⁸; another 2⁻⁸ covers the products of
    # rounding errors.
    self._tolerance = (
      (engine.workers + 1) * 2**-8 if spec.config.get("dtype") == "bfloat16" else 2**-18
    )
    # What a matrix delivers of an entry is rounded by as much as other entries of the
    # matrix are large.
    self._shared = collective.traits.needs_shapes
    self._conserves, self._replicates, self._size = (
      collective.traits.conserves,
      collective.traits.replicates,
      engine.workers,
    )
    rows, of_mean = functools.partial(rows_of, engine), specs[:1]
    self._held, self._kept = (
      rows(_held, specs),
      rows(functools.partial(_held, None), specs[1:]),
    )
    self._delivered = rows(_sum_parts, of_mean)
    # u32[parts, 2]: hashes of the entries of each part
    self._hashes = rows(
      lambda x: hashed(jax.lax.bitcast_convert_type(_split(x), jnp.uint32)), of_mean
    )

  @property
  def names(self) -> str:
    """The laws that are checked: "C R", "C", "R" or ""."""
    return " ".join(
      name for name, holds in (("C", self._conserves), ("R", self._replicates)) if holds
    )

  def before(self, grads: jax.Array, state: ReduceState) -> np.ndarray:
    """f64[2, parts]: sums over all workers of gradient + residual, which the update donates, and of magnitudes."""
    return self._held(grads, state).sum(0, dtype=np.float64)

  def wrong(self, mean: jax.Array, state: ReduceState, before: np.ndarray) -> int:
    """The number of parts of the result that break a law."""
    broken = np.zeros(_PARTS, bool)
    if self._replicates:
      hashes = self._hashes(mean)
      broken |= (hashes != hashes[0]).any((0, 2))
    if self._conserves:
      after = self._size * self._delivered(mean)[0].astype(np.float64) + self._kept(
        state
      ).sum(0, dtype=np.float64)
      magnitudes = (
        np.maximum(before[1], before[1].mean()) if self._shared else before[1]
      )
      broken |= ~(np.abs(before[0] - after[0]) <= self._tolerance * magnitudes)
    return int(broken.sum())


def _held(grads: jax.Array | None, state: ReduceState) -> jax.Array:
  """Sums of one worker's gradient + residual, or of its residual alone."""
  sums = [_sum_parts(x) for x in (grads, state.carried.residual[0]) if x is not None]
  return sum(sums, jnp.zeros((2, _PARTS)))


def _split(x: jax.Array) -> jax.Array:
  """f32[parts, entries of each]: the vector, with zeros at its end."""
  return jnp.pad(x, (0, -x.size % _PARTS)).reshape(_PARTS, -1)


def _sum_parts(x: jax.Array) -> jax.Array:
  """f32[2, parts]: sums of the entries of each part, and of their magnitudes."""
  parts = _split(x)
  return jnp.stack([parts.sum(1), jnp.abs(parts).sum(1)])
