"""Updates of the thresholds of Ok-Topk between exact ones."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.sparse import bitset
from jaxsparse.types import Comm, Sparse

_STEP = 1.012
_INT32 = jnp.iinfo(jnp.int32).max


def search_near(
  comm: Comm, entries: Sparse, threshold: jax.Array, k: int, end: int
) -> jax.Array:
  """A threshold near the last one that about k entries of all workers reach, f32[]: two all-reduces of 33 counts.

  The first compares 33 candidates from 1/4 to 4 times the last threshold, the second 33
  candidates around the best one, 0.3 % apart. Steps this small are needed because error
  feedback makes magnitudes similar: all k entries can lie within 9 % of the threshold.
  """
  magnitude = jnp.where(entries.indices < end, jnp.abs(entries.values), -1.0)
  for octave in (8, 256):
    factors = np.exp2(np.arange(-16, 17) / octave).astype(np.float32)
    candidates = threshold * factors
    counts = jax.vmap(
      lambda candidate: bitset.count(bitset.pack(magnitude >= candidate))
    )(candidates)
    reached = comm.all_reduce(counts)
    threshold = candidates[jnp.argmin(jnp.abs(reached - k))]
  return threshold


def nudge_by_factor(threshold: jax.Array, selected: jax.Array, k: int) -> jax.Array:
  """The threshold of the next step: times 1.012 after more than 5k/4 entries, over 1.012 after fewer than 2k/3.

  This is the rule of the authors' code.

  Example:
    >>> [round(float(nudge_by_factor(jnp.float32(1), jnp.int32(selected), k=100)), 4) for selected in (100, 130, 60)]
    [1.0, 1.012, 0.9881]
  """
  many = min(5 * k // 4, _INT32)
  few = -(-2 * k // 3)
  factor = jnp.where(selected > many, _STEP, jnp.where(selected < few, 1 / _STEP, 1.0))
  return threshold * factor


def nudge_in_proportion(threshold: jax.Array, selected: jax.Array, k: int) -> jax.Array:
  """The threshold of the next step: times 1 + x/10 with `x = selected / k − 1`, at most 2.

  Example:
    >>> [round(float(nudge_in_proportion(jnp.float32(1), jnp.int32(selected), k=100)), 4) for selected in (100, 130, 0)]
    [1.0, 1.03, 0.9]
  """
  return threshold * jnp.minimum(0.9 + selected.astype(jnp.float32) / (10.0 * k), 2.0)
