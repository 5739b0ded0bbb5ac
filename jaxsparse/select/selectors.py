"""How a collective that sends entries in rounds chooses them: a `Selector` makes the accumulator that a step works on.

A new selector is a class here, and its name in `SelectorName` and `SELECTORS`.
"""

import dataclasses
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxsparse.select.accumulator import Accumulator, TopKAccumulator
from jaxsparse.select.blocks import Blocks
from jaxsparse.select.kth_largest import keys_of
from jaxsparse.select.per_chunk import ChunkAccumulator
from jaxsparse.types import Sparse

_LONGEST_CHUNK = 1 << 22  # entries: a magnitude keeps its exponent beside the number of a row


class Selector(Protocol):
  """Chooses k entries of each block.

  Attributes:
    one_per_chunk: whether slot j of the k slots of a block is empty or one of the entries j, j + k, j + 2k, … of it.
    fills_slots: whether all k slots are filled.
  """

  one_per_chunk: bool
  fills_slots: bool

  def check(self, length: int, k: int) -> None:
    """Raises ValueError for blocks that it cannot choose from."""
    ...

  def init(self, rows: int) -> Any:
    """What it remembers before the first step: a pytree of arrays with a leading axis, () for nothing."""
    ...

  def start(self, blocks: Blocks, memory: Any) -> Accumulator:
    """The accumulator of a step."""
    ...

  def next(self, memory: Any, chosen: Sparse, length: int) -> Any:
    """What it remembers for the next step, from the entries [rows, k] chosen in this one."""
    ...


@dataclasses.dataclass(frozen=True)
class Exact:
  """The k entries of largest magnitude of each row, ties to the lowest index."""

  one_per_chunk = False
  fills_slots = True

  def check(self, length: int, k: int) -> None:
    """Any block will do."""

  def init(self, rows: int) -> tuple[()]:
    """Nothing is remembered."""
    del rows
    return ()

  def start(self, blocks: Blocks, memory: Any) -> Accumulator:
    """The accumulator of a step."""
    del memory
    return TopKAccumulator.of(blocks)

  def next(self, memory: Any, chosen: Sparse, length: int) -> Any:
    """Nothing is remembered."""
    del chosen, length
    return memory


@dataclasses.dataclass(frozen=True)
class PerChunk(Exact):
  """The largest entry of each of k chunks of a row."""

  one_per_chunk = True

  def check(self, length: int, k: int) -> None:
    """Raises ValueError if chunks are too long for the number of a row beside the exponent of a magnitude."""
    if length > k * _LONGEST_CHUNK:
      raise ValueError(
        f"selector='chunked' with {k} chunks in blocks of {length} entries, choose at least "
        f"{-(-length // _LONGEST_CHUNK)} chunks by a larger k or density, or another selector"
      )

  def start(self, blocks: Blocks, memory: Any) -> Accumulator:
    """The accumulator of a step."""
    del memory
    return ChunkAccumulator.of(blocks)


class Reused(NamedTuple):
  """The thresholds that are known from the last step.

  Attributes:
    bounds: f32[rows], the magnitude that chosen entries of each row reach; 0 before the first step.
    levels: f32[rows], the k-th magnitude that was chosen of each row; 0 where fewer were chosen.
  """

  bounds: jax.Array
  levels: jax.Array


@dataclasses.dataclass(frozen=True)
class Reuse:
  """Those of the k largest entries of each row that reach the threshold of the last step: no threshold is searched.

  A row whose threshold is 0 gets all k, of entries that are not 0. Where more entries reach a threshold than candidates
  have slots, they are found as by `Exact`.
  """

  one_per_chunk = False
  fills_slots = False

  def check(self, length: int, k: int) -> None:
    """Any block will do."""

  def init(self, rows: int) -> Reused:
    """No threshold is known; two arrays, since one that is twice in a state cannot be donated."""
    return Reused(jnp.zeros(rows, jnp.float32), jnp.zeros(rows, jnp.float32))

  def start(self, blocks: Blocks, memory: Reused) -> Accumulator:
    """The accumulator of a step."""
    return TopKAccumulator.of(blocks, least=jnp.maximum(keys_of(memory.bounds), 1))

  def next(self, memory: Reused, chosen: Sparse, length: int) -> Reused:
    """The thresholds of the next step."""
    return following(memory, chosen, length)


def following(reused: Reused, chosen: Sparse, length: int) -> Reused:
  """The thresholds of the next step: the k-th magnitude chosen, raised as it grows; lower where fewer were chosen.

  Where all k slots of a row are filled, the threshold is the smallest chosen magnitude times the root of its growth
  since the last step, 1 … 2. Magnitudes grow while residuals fill up, by √(t + 1)/√t in step t if gradients are noise,
  and too many entries reach a threshold that does not follow. Where c of k slots are filled, the threshold falls by the
  factor 3/4 + c/(4 k). Where fewer than half are, it says nothing of the entries below it, as after a spike: it is 0,
  and the next step selects as `Exact` does.

  Args:
    reused: the thresholds of this step.
    chosen: [rows, k] entries, chosen in this step.
    length: length of a block.

  Example:
    >>> chosen = Sparse(jnp.array([[0, 1], [3, 9]]), jnp.array([[5.0, -4.0], [6.0, 0.0]]))
    >>> following(Reused(jnp.array([1.0, 6.0]), jnp.array([3.24, 6.0])), chosen, length=9)
    Reused(bounds=Array([4.444..., 5.25     ], dtype=float32), levels=Array([4., 0.], dtype=float32))
  """
  valid = chosen.indices < length
  count, share = jnp.sum(valid, axis=1, dtype=jnp.int32), valid.shape[1]
  least = jnp.min(jnp.where(valid, jnp.abs(chosen.values), jnp.inf), axis=1)
  full = count == share
  growth = jnp.where(reused.levels > 0, jnp.clip(least / reused.levels, 1.0, 2.0), 1.0)
  lower = jnp.where(2 * count < share, 0.0, reused.bounds * (0.75 + count.astype(jnp.float32) / (4 * share)))
  # At most the largest finite number: no entry would reach infinity.
  raised = jnp.minimum(least * jnp.sqrt(growth), jnp.finfo(jnp.float32).max)
  return Reused(jnp.where(full, raised, lower), jnp.where(full, least, 0.0))


SelectorName = Literal["exact", "chunked", "reuse"]
SELECTORS: dict[str, Selector] = {"exact": Exact(), "chunked": PerChunk(), "reuse": Reuse()}
