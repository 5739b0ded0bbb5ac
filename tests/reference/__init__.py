"""The algorithms in numpy, written from the papers: entries are dictionaries from place to value."""

import numpy as np


def largest(entries, count):
  """The `count` entries of largest magnitude, largest first: NaN before all, ties to the lowest place."""
  magnitude = lambda i: np.inf if np.isnan(entries[i]) else abs(entries[i])
  order = sorted(entries, key=lambda i: (not np.isnan(entries[i]), -magnitude(i), i))
  return {i: entries[i] for i in order[:count]}


def added(*parts):
  """The sum of entries in float32, from the first part to the last."""
  total = {}
  for part in parts:
    for i, value in part.items():
      total[i] = total[i] + value if i in total else value
  return total


def dense(entries, n):
  """Entries as f32[n]."""
  vector = np.zeros(n, np.float32)
  for i, value in entries.items():
    vector[i] = value
  return vector
