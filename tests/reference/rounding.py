"""Collectives that deliver something of every entry, in numpy: A2SGD, QSGD, the all-reduce in a few bits an entry."""

import numpy as np


def a2sgd(gradients):
  """The update of each worker, f[P, n]: lines 3-7 of Algorithm 1, two means are exchanged."""
  positive = np.array([g[g >= 0].mean() if np.any(g >= 0) else 0 for g in gradients])
  negative = np.array([-g[g < 0].mean() if np.any(g < 0) else 0 for g in gradients])
  updates = []
  for g, plus, minus in zip(gradients, positive, negative, strict=True):
    pos, neg = g >= plus, (g <= -minus) & (g < 0)
    error = g - (pos * plus - neg * minus)
    updates.append(error + pos * positive.mean() - neg * negative.mean())
  return np.array(updates)


def qsgd(gradients, noise, levels):
  """What each worker sends, f[P, n], which the total adds up (§3.1); noise is uniform in [0, 1), one for each entry."""
  norm = np.linalg.norm(gradients, axis=1, keepdims=True)
  level = np.floor(np.abs(gradients) / norm * levels + noise)
  return norm * np.sign(gradients) * np.minimum(level, levels) / levels


def nbit(accumulators, bits=1):
  """Total f[n] and the next residuals f[P, n] of gradients + residuals f[P, n]."""
  workers, n = accumulators.shape
  blocks, per_region = blocks_of(n, workers)
  sent = np.stack([rounded(row, blocks, bits) for row in accumulators])
  kept, sums = accumulators - sent, np.empty(n)
  regions = [slice(w * per_region, (w + 1) * per_region) for w in range(workers)]
  for owner, region in enumerate(regions):  # the owner of a region does not round its own entries
    sums[region] = sent[:, region].sum(0) - sent[owner, region] + accumulators[owner, region]
  total = rounded(sums, blocks, bits)
  for owner, region in enumerate(regions):
    kept[owner, region] = (sums - total)[region]
  return total, kept


def rounded(x, blocks, bits):
  """Q: of each block, odd multiples of a share of the root of the mean square of its entries to 12 significant bits."""
  result = np.empty_like(x)
  for block in blocks:
    short = (x[block].astype(np.float32).view(np.uint32) & 0xFFFFF000).view(np.float32).astype(np.float64)
    half = {1: 1.0, 2: 0.49785, 4: 0.1676, 8: 0.0154}[bits] * np.sqrt((short**2).mean()) if short.size else 0.0
    fraction, exponent = np.frexp(half)  # to 24 − b significant bits
    half = half if bits == 1 else np.ldexp(np.round(np.ldexp(fraction, 24 - bits)), exponent - 24 + bits)
    steps = np.minimum(np.floor(np.abs(x[block]) / (2 * half or 1)), 2 ** (bits - 1) - 1)
    result[block] = np.where(x[block] < 0, -1.0, 1.0) * half * (2 * steps + 1)
  return result


def blocks_of(n, workers):
  """The blocks of all regions, 32 equal rows of at most 128 entries each, and the entries of a region."""
  columns = min(128, -(-n // (32 * workers)))
  per_region = -(-n // (32 * columns * workers)) * 32 * columns
  return [slice(start, min(n, start + 32 * columns)) for start in range(0, n, 32 * columns)], per_region
