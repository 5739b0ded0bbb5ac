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
  blocks, columns, per_region = blocks_of(n, workers, bits)
  sent = np.stack([rounded(row, blocks, columns, bits) for row in accumulators])
  kept, sums = accumulators - sent, np.empty(n)
  regions = [slice(w * per_region, (w + 1) * per_region) for w in range(workers)]
  # the owner of a region does not round its own entries
  for owner, region in enumerate(regions):
    sums[region] = (
      sent[:, region].sum(0) - sent[owner, region] + accumulators[owner, region]
    )
  total = rounded(sums, blocks, columns, bits)
  for owner, region in enumerate(regions):
    kept[owner, region] = (sums - total)[region]
  return total, kept


def rounded(x, blocks, columns, bits):
  """Q: ± the root of the mean square of a block's entries to 12 significant bits; else each column has its step."""
  result = np.empty_like(x)
  for block in blocks:
    entries, of_block = x[block], result[block]
    if bits == 1:
      short = (
        (entries.astype(np.float32).view(np.uint32) & 0xFFFFF000)
        .view(np.float32)
        .astype(np.float64)
      )
      of_block[:] = np.where(entries < 0, -1.0, 1.0) * (
        np.sqrt((short**2).mean()) if short.size else 0.0
      )
    elif entries.size:
      each = [
        slice(first, None, columns) for first in range(min(columns, entries.size))
      ]
      mean = np.mean([np.abs(entries[column]).max() for column in each])
      for column in each:
        of_block[column] = in_steps(entries[column], mean, bits)
  return result


def in_steps(x, mean, bits):
  """A column to b bits an entry: the largest of so many ratios to the mean that its maximum reaches has the step."""
  exponents = np.array([-2, -1, 0, 1, 2, 4, 6, 8] if bits == 2 else range(-4, 12))
  ratios = 0.84 * 2 ** (exponents / 2)
  reached = ratios[ratios * mean <= np.abs(x).max()]
  step = {2: 0.19, 4: 0.175, 8: 1 / 90}[bits] * mean * max(reached, default=ratios[0])
  fraction, exponent = np.frexp(step)  # to 24 − b significant bits
  step = np.ldexp(np.round(np.ldexp(fraction, 24 - bits)), exponent - 24 + bits)
  if bits == 2:
    return np.where(x < 0, -1, 1) * step * np.where(np.abs(x) >= 2.5 * step, 4, 1)
  return (
    np.sign(x)
    * step
    * np.minimum(np.floor(np.abs(x) / (step or 1) + 0.5), 2 ** (bits - 1) - 1)
  )


def blocks_of(n, workers, bits):
  """The blocks of all regions, 32 rows of at most 128 entries each, the entries of a row, and those of a region.

  Rows of signs have 128 entries if there are as many; others as few as the same number
  of blocks needs.
  """
  needed = -(-n // (32 * workers))
  blocks = -(-needed // 128)
  columns = min(128, needed) if bits == 1 else -(-needed // blocks)
  size = 32 * columns
  return (
    [slice(start, min(n, start + size)) for start in range(0, n, size)],
    columns,
    blocks * size,
  )
