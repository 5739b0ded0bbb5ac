"""Collectives that deliver something of every entry, in numpy: A2SGD, QSGD, the 1-bit all-reduce."""

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


def onebit(accumulators):
  """Total f[n] and the next residuals f[P, n] of gradients + residuals f[P, n]."""
  workers, n = accumulators.shape
  owned = regions(n, workers)
  sent = np.stack([with_signs(row, np.concatenate(owned)) for row in accumulators])
  kept, sums = accumulators - sent, np.empty(n)
  for owner, blocks in enumerate(owned):  # the owner of a region does not round its own entries
    inside = slice(blocks[0][0], blocks[-1][1])
    sums[inside] = sent[:, inside].sum(0) - sent[owner, inside] + accumulators[owner, inside]
  total = with_signs(sums, np.concatenate(owned))
  for owner, blocks in enumerate(owned):
    inside = slice(blocks[0][0], blocks[-1][1])
    kept[owner, inside] = (sums - total)[inside]
  return total, kept


def with_signs(x, blocks):
  """Q: of each block, sgn(x) times the root of the mean square."""
  result = np.empty_like(x)
  for start, end in blocks:
    part = x[start:end]
    result[start:end] = np.where(part < 0, -1.0, 1.0) * np.sqrt((part**2).mean()) if part.size else 0.0
  return result


def regions(n, workers):
  """The blocks of each worker's region, at most 1,024 entries each, equal, and whole words of signs."""
  length = -(-n // workers)
  count = -(-length // 1024)
  block = 32 * -(-length // (32 * count))
  ends = np.minimum(block * np.arange(workers * count + 1), n)
  return np.stack([ends[:-1], ends[1:]], axis=1).reshape(workers, count, 2)
