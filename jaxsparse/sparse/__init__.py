"""Sparse vectors: entries and sets of indices, how they are written in messages, and how large messages are.

`entries` is arithmetic on rows of entries, `bitset` on sets of indices; `codec` writes entries as messages, whose
static sizes are `capacities`; `sums` are reproducible bit for bit, and `saturating` counts words without wrapping.
"""

from jaxsparse.sparse.entries import (
  add_rows,
  at,
  by_index,
  count,
  largest,
  merge,
  narrowed,
  put,
  split,
  undelivered,
  where,
  widened,
)

__all__ = [
  "add_rows",
  "at",
  "by_index",
  "count",
  "largest",
  "merge",
  "narrowed",
  "put",
  "split",
  "undelivered",
  "where",
  "widened",
]
