"""What selection reads: gradient + residual as a lazy sum in blocks, and the k-th largest magnitude of a row.

The sum is never stored, which saves one pass over n entries: entries are added where
they are read. Magnitudes are compared as integer keys. Ties go to the lowest index, so
a selection ends at a pair, a key and an index.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import _compat, sparse
from jaxsparse._compat import varying
from jaxsparse.arrays import iota
from jaxsparse.sparse import bitset
from jaxsparse.types import Comm

# one above the bits of infinity: the key of every NaN
_NAN = 0x7F80_0001
TOP = _NAN + 1
"""Every key of `keys_of` is smaller."""

_LAST = jnp.iinfo(jnp.int32).max - 2  # above every index; high − low stays within i32


@dataclasses.dataclass(frozen=True)
class LazySum:
  """The sum of f32[n] vectors, added in their order where they are read.

  Example:
    >>> acc = LazySum((jnp.array([1.0, 2.0]), jnp.array([0.5, 0.0])))
    >>> acc.read_at(jnp.array([0, 7]))
    Array([1.5, 0. ], dtype=float32)
  """

  parts: tuple[jax.Array, ...]

  @property
  def size(self) -> int:
    """Number of entries n."""
    return self.parts[0].size

  @property
  def values(self) -> jax.Array:
    """All entries, f32[n], as an expression that XLA fuses into the operation that reads it."""
    return functools.reduce(jnp.add, self.parts)

  def read_at(self, indices: jax.Array) -> jax.Array:
    """The entries at `indices`, f32 of their shape; 0 for an index beyond the end."""
    return functools.reduce(
      jnp.add, [sparse.read_at(term, indices) for term in self.parts]
    )

  def slice(self, start: jax.Array, length: int) -> jax.Array:
    """The entries start … start + length − 1, f32[length]; all of them must exist."""
    cut = lambda term: jax.lax.dynamic_slice(term, (start,), (length,))
    return functools.reduce(jnp.add, map(cut, self.parts))

  def window(self, start: jax.Array, length: int) -> "LazySum":
    """The entries start … start + length − 1 as a vector, f32[length ≤ n]; zeros beyond the end.

    Example:
      >>> LazySum((jnp.array([1.0, 2.0, 3.0]),)).window(jnp.int32(2), 2).values
      Array([3., 0.], dtype=float32)
    """
    # A slice that would reach beyond the end starts earlier, at `inside`. A second one,
    # of its entries and zeros behind them, drops the first `beyond` entries.
    inside = jnp.minimum(start, self.size - length)
    cut = lambda x, start: jax.lax.dynamic_slice(x, (start,), (length,))
    beyond = jnp.minimum(start - inside, length)
    ends_late = lambda term: cut(jnp.pad(cut(term, inside), (0, length)), beyond)
    # Behind a barrier the windows are stored: later reads do not slice twice again.
    windows = jax.lax.optimization_barrier(list(map(ends_late, self.parts)))
    return LazySum(tuple(windows))


@dataclasses.dataclass(frozen=True)
class Blocks:
  """A lazily summed f32[n] in blocks of equal length, of which the last ones may reach beyond n.

  Attributes:
    x: the vector.
    order: i32[rows], the block of each row; each block once.
    length: entries of a block.
    k: entries to choose of each block.

  Example:
    >>> from jaxsparse.comm import SoloComm
    >>> x = LazySum((jnp.array([1.0, 2.0, 3.0]), jnp.array([0.5, 0.0, 0.0])))
    >>> blocks = Blocks.for_workers(SoloComm(2), x, k=1)
    >>> flat = blocks.flat_indices(jnp.array([[0, 2], [0, 1]]))
    >>> flat, blocks.x.read_at(flat)
    (Array([[0, 3],
           [2, 3]], dtype=int32), Array([[1.5, 0. ],
           [3. , 0. ]], dtype=float32))
  """

  x: LazySum
  order: jax.Array
  length: int
  k: int

  @classmethod
  def for_workers(cls, comm: Comm, x: LazySum, k: int) -> Self:
    """One block for each worker of `comm`, in the home frame: row b is block (rank + b) mod P, row 0 the own one."""
    order = (comm.rank + iota(comm.size)) % comm.size
    return cls(x, order, length=-(-x.size // comm.size), k=k)

  def flat_indices(
    self,
    indices: jax.Array,
    first: jax.Array | int = 0,
  ) -> jax.Array:
    """Flat indices of block-relative ones, i32[r, c] of the rows from `first` on; n for empty slots and padding.

    Empty slots have an index of at least `length`; padding is what the last blocks have
    beyond n.
    """
    n = self.x.size
    order = jax.lax.dynamic_slice_in_dim(self.order, first, len(indices))
    # at most n, for the padding of the last block
    flat = jnp.minimum(indices + self.length * order[:, None], n)
    return jnp.where(indices < self.length, flat, n)


def check_float32(x: jax.Array) -> None:
  """Raises TypeError for numbers that are not float32, whose bits do not order as magnitudes do."""
  if x.dtype != jnp.float32:
    raise TypeError(
      f"top_k: entries are {x.dtype}, choose float32: x.astype(jnp.float32) is exact for bfloat16 and float16, of "
      "complex numbers take jnp.abs(x)"
    )


def keys_of(x: jax.Array) -> jax.Array:
  """Integers that order as magnitudes do, i32 like x: the bits of |x|. Every NaN has one key, above that of infinity.

  Raises:
    TypeError: for numbers that are not float32.

  Example:
    >>> keys_of(jnp.array([-1.0, 1.0, 0.0]))
    Array([1065353216, 1065353216,          0], dtype=int32)
  """
  check_float32(x)
  # without the sign bit; every NaN becomes one key
  return jnp.minimum(jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFF_FFFF, _NAN)


class Cut(NamedTuple):
  """The end of a selection: of larger keys than `key`, and of equal ones with indices up to `last`.

  Attributes:
    key: i32[rows, 1]; i32[] for a single row, or i32[c], one for each key.
    last: of the shape of `key`; the last index that is selected at `key`.
  """

  key: jax.Array
  last: jax.Array

  def selects(self, keys: jax.Array, indices: jax.Array) -> jax.Array:
    """Whether each of the i32[rows, c] or i32[c] keys is in the selection, bool like them."""
    # Up to index `last`, integers > key − 1, that is ≥ key; behind it, integers > key.
    # The keys are used once, as XLA for TPUs would store them for two uses.
    return keys > self.key - (indices <= self.last).astype(jnp.int32)


def kth_largest(
  keys: jax.Array,
  indices: jax.Array,
  k: jax.Array | int,
  low: jax.Array | int = 0,
) -> Cut:
  """The cut that selects the k largest keys of each row, ties to the lowest index.

  By counting: on CPU by halves, elsewhere digit by digit, which never waits for the
  host.

  Args:
    keys: i32[rows, c], c a multiple of 256; −1 in empty slots.
    indices: i32[rows, c], at least 0, in any order; those of equal keys differ.
    k: i32[rows], or one number for all rows; at most as many keys as reach `low`.
    low: i32[rows], or one number for all rows: the search by halves begins there.

  Example:
    >>> keys, indices = jnp.zeros((1, 256), jnp.int32).at[0, :3].set(jnp.array([7, 8, 7])), 255 - jnp.arange(256)[None]
    >>> cut = kth_largest(keys, indices, 2)
    >>> jnp.flatnonzero(cut.selects(keys, indices)[0])
    Array([1, 2], dtype=int32)
  """
  k = jnp.broadcast_to(jnp.int32(k), keys.shape[:1])[:, None]
  low = jnp.broadcast_to(jnp.int32(low), keys.shape[:1])[:, None]

  def by_halves() -> Cut:
    high = jnp.maximum(jnp.max(keys, axis=1, keepdims=True), low) + 1
    selects = functools.partial(Cut.selects, keys=keys, indices=indices)
    return search_by_halves(selects, k, low, high)

  def by_digits() -> Cut:
    # Axis 1 is for the cuts: a round tries several at once.
    selects = functools.partial(
      Cut.selects, keys=keys[:, None], indices=indices[:, None]
    )
    return search_by_digits(selects, k)

  # Digits take 1.5 to 1.9 times the CPU time of an update of SparDL; by halves a GPU
  # waits for the host in each round.
  return _compat.by_platform(cpu=by_halves, default=by_digits)()


def search_keys(
  read: Callable[[jax.Array], jax.Array], blocks: Blocks, order: jax.Array
) -> jax.Array:
  """The k largest keys of each of several long blocks, by counting: their indices, ascending, i32[rows, k].

  Args:
    read: returns the keys of the block that starts at a flat index i32[], i32[length].
    blocks: says the length of a block, and k.
    order: i32[rows], the numbers of the blocks.
  """
  by_halves = functools.partial(search_by_halves, low=jnp.int32(0), high=jnp.int32(TOP))
  # One bit, so one cut a round: each cut stores a row of flags.
  by_digits = functools.partial(search_by_digits, bits=1)
  # By digits `top_k` of 2 M entries takes 2 to 3.7 times the CPU time; by halves a GPU
  # waits for the host in each round.
  search = _compat.by_platform(cpu=by_halves, default=by_digits)

  def search_row(start: jax.Array) -> jax.Array:
    def selects(cut: Cut) -> jax.Array:
      # The barrier keeps XLA from computing the keys before the loop, which would store
      # them. XLA for TPUs removes barriers first, so a 0 that depends on the round is
      # added to `here`: XLA does not know that the key is at least 0.
      cut, here = jax.lax.optimization_barrier((cut, start))
      # One cut, to which `search_by_digits` gives axes of length 1.
      key, last = (end.reshape(()) for end in cut)
      keys = read(here + jnp.minimum(key, 0))
      chosen = Cut(key, last).selects(keys, iota(blocks.length))
      return chosen.reshape(*cut.key.shape[:-1], blocks.length)

    cut = search(selects, jnp.int32(blocks.k))
    return bitset.nonzero(bitset.pack(selects(cut).reshape(-1)), blocks.k)

  # One by one: a batch takes memory, and XLA on CPU compiles it to slower code.
  return jax.lax.map(search_row, order * blocks.length)


def search_by_digits(
  selects: Callable[[Cut], jax.Array], k: jax.Array, bits: int = 4
) -> Cut:
  """The cut that selects the k largest, by counting in a fixed number of rounds: no round waits for the host.

  A round finds one digit: first those of the key, from the highest to the lowest, then
  those of the difference of the largest i32 and the last index.

  Args:
    selects: takes d cuts for each row, a `Cut` of i32[rows, d, 1], and returns which of
      the c keys of the row each selects, bool[rows, d, c].
    k: i32[rows, 1], or i32[] for one row; all keys of at least 0 are selected where
      they are fewer.
    bits: bits of a digit; more are fewer rounds, of more cuts.

  Returns:
    A `Cut` of arrays like k.
  """
  shape = k.shape
  k = k.reshape(-1, 1)
  # the digits to try, by numpy: a constant takes no kernel
  digits = np.arange(1, 1 << bits, dtype=np.int32)[None, None]
  # Keys and indices have 31 bits.
  rounds = -(-31 // bits)
  rows = len(k)
  # Padding to a multiple of 8 rows: the zeros of several searches are then one kernel.
  more = -len(k) % 8
  largest = jnp.iinfo(jnp.int32).max
  # A state, i32[2, rows, 1]: the key, and how far the last index is below the largest
  # i32. The larger a number, the fewer keys its cut selects.
  cut_at = lambda state: Cut(state[0], largest - state[1])

  def refine(step: jax.Array, state: jax.Array) -> jax.Array:
    shift = (rounds - 1 - step % rounds) * bits
    # 1 for the half of the state that this round refines, the key or the index; else 0
    refined = (iota(2) == step // rounds).astype(jnp.int32)[:, None, None]
    shifted = digits << shift
    # the state with each digit in place of the 0, i32[2, rows, digits]
    candidates = state[:, :rows] + refined * shifted
    counts = jnp.sum(selects(cut_at(candidates[..., None])), axis=2, dtype=jnp.int32)
    # In the first round of each half large digits exceed 31 bits, and do not count.
    enough = (counts >= k) & (shifted >> shift == digits)[0]
    # True up to the digit that is sought, so the number of true ones is this digit.
    digit = jnp.sum(enough, axis=1, keepdims=True, dtype=jnp.int32) << shift
    return state + refined * jnp.pad(digit, ((0, more), (0, 0)))[None]

  start = jnp.zeros((2, rows + more, 1), jnp.int32)
  cut = cut_at(varying.fori_loop(0, 2 * rounds, refine, start)[:, :rows])
  return jax.tree.map(lambda end: end.reshape(shape), cut)


def search_by_halves(
  selects: Callable[[Cut], jax.Array],
  k: jax.Array,
  low: jax.Array,
  high: jax.Array,
) -> Cut:
  """The cut at which k keys are selected; k, low and high are i32 of one shape.

  Args:
    selects: which keys a `Cut` of arrays like k selects, bool[…, c].
    k: how many keys of each row shall be selected.
    low: a key that at least k keys reach.
    high: a key that fewer than k keys reach.
  """

  def halve(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Halves the range low … high: of the key of the cut first; then, with `ties`, of minus its last index."""
    # A row searches for the key, then, with `ties`, for the last index at that key.
    # `_LAST` is above every index.
    low, high, key, ties = state
    middle = low + (high - low) // 2  # not (low + high) // 2, which may overflow
    last = jnp.where(ties, -middle, _LAST)
    selected = selects(Cut(jnp.where(ties, key, middle), last))
    count = bitset.count(bitset.pack(selected)).reshape(k.shape)
    low = jnp.where(count >= k, middle, low)
    high = jnp.where(count >= k, high, middle)
    # At −_LAST all indices of `key` are selected, at 1 none.
    to_ties = ~ties & ((count == k) | (high - low <= 1))
    key = jnp.where(to_ties, low, key)
    low = jnp.where(to_ties, -_LAST, low)
    high = jnp.where(to_ties, 1, high)
    # exactly k are selected: nothing is left to halve
    return low, jnp.where(count == k, low, high), key, ties | to_ties

  def is_open(state: tuple[jax.Array, ...]) -> jax.Array:
    low, high, _, ties = state
    return (~ties | (high - low > 1)).any()

  start: tuple[jax.Array, ...] = (
    low,
    high,
    jnp.zeros_like(low),
    jnp.zeros(low.shape, jnp.bool_),
  )
  low, _, key, _ = varying.while_loop(is_open, halve, start)
  return Cut(key, -low)
