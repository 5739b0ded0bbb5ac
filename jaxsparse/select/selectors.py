"""Selection methods of collectives: a `Selector` chooses entries at once, or makes an accumulator for rounds.

A new selector is a class here, and its name in `SelectorName` and `SELECTORS`.
"""

import abc
import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.select.accumulator import TopKAccumulator
from jaxsparse.select.blocks import Blocks, LazySum, keys_of
from jaxsparse.select.exact import top_k
from jaxsparse.select.per_chunk import ChunkAccumulator
from jaxsparse.types import Sparse

Accumulator = TopKAccumulator | ChunkAccumulator
# entries: a magnitude keeps its exponent beside the number of a row
_LONGEST_CHUNK = 1 << 22
_LARGEST = float(jnp.finfo(jnp.float32).max)


class Selector(abc.ABC):
  """Chooses k entries of each block. A selector must define `start`; with a memory, `init` and `next` too.

  Attributes:
    one_per_chunk: whether slot j of the k slots of a block is empty or one of the
      entries j, j + k, j + 2k, … of it.
    fills_slots: whether all k slots are filled.
  """

  one_per_chunk = False
  fills_slots = True

  def check(self, name: str, length: int, k: int) -> None:
    """Raises ValueError if it cannot choose k entries of a block of `length`; `name` is that of the collective."""
    del name, length, k

  def init(self, rows: int) -> Any:
    """The memory before the first step: a pytree of arrays with a leading axis, () for none."""
    return ()

  @abc.abstractmethod
  def start(self, blocks: Blocks, memory: Any) -> Accumulator:
    """The accumulator of a step, for blocks that are sent in rounds."""

  def choose(self, x: LazySum, k: int, memory: Any) -> Sparse:
    """The k entries of a whole vector, [1, k], which are sent at once."""
    blocks = Blocks(x, jnp.zeros(1, jnp.int32), x.size, k)
    return self.start(blocks, memory).largest(0, 1)

  def next(self, memory: Any, chosen: Sparse, length: int) -> Any:
    """The memory for the next step, from the entries [rows, k] selected in this step."""
    return memory


@dataclasses.dataclass(frozen=True)
class Exact(Selector):
  """The k entries of largest magnitude of each row, ties to the lowest index."""

  def start(self, blocks: Blocks, memory: Any) -> Accumulator:
    return TopKAccumulator.start(blocks)

  def choose(self, x: LazySum, k: int, memory: Any) -> Sparse:
    return sparse.as_row(top_k(x, k))  # without the bookkeeping of an accumulator


@dataclasses.dataclass(frozen=True)
class PerChunk(Selector):
  """The largest entry of each of k chunks of a row."""

  one_per_chunk = True

  def check(self, name: str, length: int, k: int) -> None:
    # Low bits of a magnitude hold the row of an entry in its chunk: 2²² rows at most
    # leave the exponent whole.
    if length > k * _LONGEST_CHUNK:
      raise ValueError(
        f"{name}: selector='chunked' with {k} chunks in blocks of {length} entries, choose at least "
        f"{-(-length // _LONGEST_CHUNK)} chunks by a larger k or density, or another selector"
      )

  def start(self, blocks: Blocks, memory: Any) -> Accumulator:
    return ChunkAccumulator.start(blocks)


class Reused(NamedTuple):
  """The thresholds of the last step.

  Attributes:
    bounds: f32[rows], the threshold of each row for the next step; 0 before the first
      step.
    levels: f32[rows], the smallest magnitude selected of each row; 0 where fewer than k
      entries were selected.
  """

  bounds: jax.Array
  levels: jax.Array


@dataclasses.dataclass(frozen=True)
class Reuse(Selector):
  """Top-k of each row, restricted to entries that reach the threshold reused from the last step.

  That skips the search for a threshold. A row with threshold 0 selects its k largest
  non-zero entries. If more entries reach a threshold than candidates have slots,
  candidates are found as by `Exact`.
  """

  fills_slots = False

  def init(self, rows: int) -> Reused:
    """No thresholds; two different arrays, since an array that occurs twice in a state cannot be donated."""
    return Reused(jnp.zeros(rows, jnp.float32), jnp.zeros(rows, jnp.float32))

  def start(self, blocks: Blocks, memory: Reused) -> Accumulator:
    return TopKAccumulator.start(blocks, least=jnp.maximum(keys_of(memory.bounds), 1))

  def next(self, memory: Reused, chosen: Sparse, length: int) -> Reused:
    """The thresholds of the next step: raised as magnitudes grow, lowered if fewer than k entries reached them.

    If all k slots of a row are filled, the threshold is the smallest selected
    magnitude, times the square root of its growth since the last step, a growth of 1 …
    2. Magnitudes grow while residuals accumulate, by √(t + 1)/√t in step t if gradients
    are noise, so that too many entries would reach a constant threshold. If c < k slots
    are filled, the threshold is multiplied by 3/4 + c/(4 k). If fewer than half of them
    are, for example after a spike, the threshold is far too high: it becomes 0, and the
    next step selects as `Exact` does.

    Args:
      memory: f32[rows] each: `bounds`, the thresholds of this step, and `levels`, the
        smallest magnitudes selected in the last step, 0 after fewer than k entries.
      chosen: [rows, k] entries of this step.
      length: of a block; an empty slot has this index or a larger one.

    Example:
      >>> chosen = Sparse(jnp.array([[0, 1], [3, 9]]), jnp.array([[5.0, -4.0], [6.0, 0.0]]))
      >>> Reuse().next(Reused(jnp.array([1.0, 6.0]), jnp.array([3.24, 6.0])), chosen, length=9)
      Reused(bounds=Array([4.444..., 5.25     ], dtype=float32), levels=Array([4., 0.], dtype=float32))
    """
    valid = chosen.indices < length
    count = jnp.sum(valid, axis=1, dtype=jnp.int32)
    k = valid.shape[1]
    magnitudes = jnp.where(valid, jnp.abs(chosen.values), jnp.inf)
    least = jnp.min(magnitudes, axis=1)
    full = count == k
    # At most 2: a spike would raise the threshold far beyond usual magnitudes.
    growth = jnp.where(
      memory.levels > 0, jnp.clip(least / memory.levels, 1.0, 2.0), 1.0
    )
    factor = 0.75 + count.astype(jnp.float32) / (4 * k)
    lower = jnp.where(2 * count < k, 0.0, memory.bounds * factor)
    # At most the largest finite number: no entry would reach infinity.
    raised = jnp.minimum(least * jnp.sqrt(growth), _LARGEST)
    return Reused(jnp.where(full, raised, lower), jnp.where(full, least, 0.0))


SelectorName = Literal[
  "exact",
  "chunked",
  "reuse",
]
SELECTORS: dict[str, Selector] = {
  "exact": Exact(),
  "chunked": PerChunk(),
  "reuse": Reuse(),
}
