"""Sparse vectors: entries and sets of indices, how they are written in messages, and how large messages are.

`entries` is arithmetic on rows of entries, `bitset` on sets of indices, `lazy` on gradient + residual; `codec` writes
entries as messages, whose static sizes are `capacities`; `sums` are reproducible bit for bit, and `saturating` counts
words without wrapping.
"""

from jaxsparse.sparse.entries import (
  add_rows,
  at,
  compressed,
  count,
  merge,
  narrowed,
  put,
  split,
  where,
  widened,
)

__all__ = [
  "add_rows",
  "at",
  "compressed",
  "count",
  "merge",
  "narrowed",
  "put",
  "split",
  "where",
  "widened",
]
