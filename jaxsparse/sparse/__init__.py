"""Sparse vectors: entries, sets of indices, wire formats and message sizes.

entries      arithmetic on rows of entries in coordinate form
bitset       sets of indices, one bit per index
lazy         gradient + residual, added where it is read
codec        wire formats of entries; `values` has those of their values
capacities   messages whose size is chosen at run time from a few static capacities
sums         floating-point sums with reproducible bits
two_bit      entries in 16 bits: positions, and values as numbers of four bins
saturating   u32 counters that do not wrap
"""

from jaxsparse.sparse.entries import (
  add,
  add_rows,
  as_row,
  at,
  compressed,
  count,
  delivered,
  merge,
  narrowed,
  only_row,
  put,
  split,
  where,
  widened,
)

__all__ = [
  "add",
  "add_rows",
  "as_row",
  "at",
  "compressed",
  "count",
  "delivered",
  "merge",
  "narrowed",
  "only_row",
  "put",
  "split",
  "where",
  "widened",
]
