"""Counts the wrong entries of one update: those that break conservation (Law C) or replication (Law R)."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.specs import Spec
from jaxsparse.train.engine import Engine, rows_of
from jaxsparse.train.replicas import hashed
from jaxsparse.transform.state import ReduceState

_BUCKETS = 4096


# Before an update, which donates its arguments: f64[2, buckets], sums over all workers of gradient + residual and of
# their magnitudes, and a copy of the residual, split along the workers; None where there is none.
Before: TypeAlias = tuple[np.ndarray, jax.Array | None]


class Laws:
  """The laws that one algorithm promises, checked after an update.

  Law C: `P · mean + Σ_w residual_w` after the update is `Σ_w (gradient_w + residual_w)` before it, entry by entry.
  Law R: all workers receive the same bits. Checked are sums and checksums of 4096 buckets; only where they differ are
  all entries gathered and those that differ counted.
  """

  def __init__(self, engine: Engine, spec: Spec, specs: Any):
    collective = spec.collective
    # Relative to the magnitudes. In bfloat16 the gradients and each of P − 1 additions are rounded by at most 2⁻⁸, in
    # all P · 2⁻⁸; another 2⁻⁸ covers the products of rounding errors.
    self._tolerance = (engine.workers + 1) * 2**-8 if spec.config.get("dtype") == "bfloat16" else 2**-18
    self._conserves, self._replicates, self._size = collective.conserves, collective.replicates, engine.workers
    rows, of_mean = functools.partial(rows_of, engine), specs[:1]
    self._held, self._kept = rows(_held, specs), rows(functools.partial(_held, None), specs[1:])
    self._delivered, self._entries = rows(_bucket_sums, of_mean), rows(lambda x: x, of_mean)
    # u32[buckets, 2]: hashes of the entries of each bucket
    self._hashes = rows(lambda x: hashed(jax.lax.bitcast_convert_type(_columns(x), jnp.uint32)), of_mean)
    self._copy = engine.jit(jnp.copy, of_mean, specs[0])

  @property
  def names(self) -> str:
    """The laws that are checked: "C R", "C", "R" or ""."""
    return " ".join(name for name, holds in (("C", self._conserves), ("R", self._replicates)) if holds)

  def before(self, grads: jax.Array, state: ReduceState) -> Before | None:
    """Sums of the arguments of an update; None where the algorithm does not promise Law C."""
    if not self._conserves:
      return None
    residual = state.carried.residual
    return self._held(grads, state).sum(0, dtype=np.float64), None if residual is None else self._copy(residual)

  def wrong(self, mean: jax.Array, state: ReduceState, before: Before | None, grads: Callable[[], jax.Array]) -> int:
    """The number of entries of the result that break a law."""
    return self._differing(mean) + (self._lost(mean, state, before, grads) if before else 0)

  def _differing(self, mean: jax.Array) -> int:
    """Entries whose bits differ between workers."""
    if not self._replicates:
      return 0
    hashes = self._hashes(mean)
    if (hashes == hashes[0]).all():
      return 0
    bits = self._entries(mean).view(np.uint32)
    return int((bits != bits[0]).any(0).sum())

  def _lost(self, mean: jax.Array, state: ReduceState, before: Before, grads: Callable[[], jax.Array]) -> int:
    """Entries of which something was lost or made up."""
    sums, residual = before
    after = self._size * self._delivered(mean)[0].astype(np.float64) + self._kept(state).sum(0, dtype=np.float64)
    if (np.abs(sums[0] - after[0]) <= self._tolerance * sums[1]).all():
      return 0
    rows = lambda x: self._entries(x).astype(np.float64)
    made, received = rows(grads()), self._size * rows(mean)[0]
    old, new = (0.0 if part is None else rows(part) for part in (residual, state.carried.residual))
    error = np.abs((made + old - new).sum(0) - received)
    return int((~(error <= self._tolerance * (np.abs(made) + np.abs(old)).sum(0))).sum())


def _held(grads: jax.Array | None, state: ReduceState) -> jax.Array:
  """Bucket sums of one worker's gradient + residual, or of its residual alone."""
  parts = [_bucket_sums(part) for part in (grads, state.carried.residual) if part is not None]
  return sum(parts, jnp.zeros((2, _BUCKETS)))


def _columns(x: jax.Array) -> jax.Array:
  """f32[buckets, entries of each]: the vector, with zeros at its end."""
  return jnp.pad(x, (0, -x.size % _BUCKETS)).reshape(_BUCKETS, -1)


def _bucket_sums(x: jax.Array) -> jax.Array:
  """f32[2, buckets]: sums of the entries of each bucket, and of their magnitudes."""
  columns = _columns(x)
  return jnp.stack([columns.sum(1), jnp.abs(columns).sum(1)])
