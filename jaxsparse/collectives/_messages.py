"""Options of collectives that select entries and send them: the selector, and the wire format of messages."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.collectives._base import SparseCollective
from jaxsparse.comm import all_gather, schedules
from jaxsparse.select.selectors import SELECTORS, Selector, SelectorName
from jaxsparse.sparse import bitset, saturating
from jaxsparse.sparse.codec import Codec, codec_of
from jaxsparse.sparse.lazy import LazySum
from jaxsparse.sparse.values import FORMATS, Wire
from jaxsparse.types import Comm, Pending, Sparse, State


@dataclasses.dataclass(frozen=True)
class Writer:
  """Encodes and decodes the messages of a step: a codec, and the noise of its random rounding.

  Attributes:
    codec: the codec of rows of entries.
    key: the key of the noise; None for a codec without random rounding.
  """

  codec: Codec
  key: jax.Array | None

  @property
  def length(self) -> int:
    """Number of entries of a block."""
    return self.codec.length

  @property
  def rounds(self) -> bool:
    """Whether values are rounded."""
    return self.codec.rounds

  def encode(self, entries: Sparse, number: int) -> tuple[Any, Sparse]:
    """Rows of entries as message `number` of this step, and their rounding errors, in the slots of the entries."""
    noise = None
    if self.key is not None:
      noise = jax.random.uniform(jax.random.fold_in(self.key, number), entries.values.shape, jnp.float32)
    message, rounded = self.codec.encode(entries, noise)
    lost = entries.values - rounded if self.rounds else jnp.zeros_like(rounded)
    return message, entries._replace(values=lost)

  def lost(self, errors: Sparse, slots: int) -> list[Sparse]:
    """The rounding errors in rows of `slots` slots; [] if values are not rounded."""
    return [sparse.widened(errors, slots, self.length)] if self.rounds else []

  def decode(self, message: Any) -> Sparse:
    """The rows of entries of a message, bitwise the same on every worker."""
    return self.codec.decode(message)

  def gather(self, comm: Comm, message: Any) -> Sparse:
    """All-gathers messages: the rows of all workers, first those of worker `rank`, then those of rank + 1, …."""
    return self.decode(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), all_gather(comm, message)))

  def words(self, size: int, capacity: int) -> int:
    """Words that a worker sends in a reduce-scatter, or in an all-gather, over `size` workers."""
    return words_of(self.codec, size, capacity)

  def words_used(self, entries: jax.Array, capacity: int) -> jax.Array:
    """Words of `entries` i32[] entries, u32[]: their share of a message of `capacity` slots."""
    words = self.codec.words(1, capacity)
    if words == 2 * capacity:
      return saturating.times(entries, 2)
    return saturating.cast(entries.astype(jnp.float32) * (words / capacity), jnp.uint32)


def residual_of(acc: LazySum, sent: jax.Array, total: Sparse, returned: Sequence[Sparse]) -> Pending:
  """The residual of a reduction whose total is 0 where it delivers nothing, not materialized yet.

  Args:
    acc: the accumulator, f32[n].
    sent: i32 of any shape, the indices of the entries that this worker sent, each once.
    total: [c] entries; where their sum is 0, senders keep theirs.
    returned: the rounding errors of the messages of this worker; none where values are not rounded.
  """
  if not returned:
    return acc.without(sparse.delivered(sent, total, acc.size))
  n, slots = acc.size, total.indices.size
  members = bitset.insert(bitset.empty(n), jnp.where(total.values != 0, total.indices, n), n)
  ascending = jnp.minimum(bitset.nonzero(members, slots), n)
  return acc.undelivered(ascending, Sparse(sent, jnp.zeros(sent.shape, jnp.float32)), *returned)


def words_of(codec: Codec, size: int, capacity: int, rows: int = 1) -> int:
  """Words that a worker sends in a reduce-scatter, or in an all-gather, over `size` workers with so many rows each."""
  return sum(codec.words(rows * min(stride, size - stride), capacity) for stride in schedules.strides(size))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodingCollective(SparseCollective):
  """A sparse collective whose messages have a wire format.

  Attributes:
    wire: the format of values, one of `sparse.values.FORMATS`.
  """

  wire: Wire = "f32"

  @property
  def draws(self) -> bool:
    """Whether rounding is random, so that the state counts steps."""
    return FORMATS[self.wire].draws

  def init(self, n: int, size: int) -> State:
    return super().init(n, size)._replace(shared=self.first_step())

  def first_step(self) -> Any:
    """The number of the first step, i32[]; () where nothing is drawn from it."""
    return jnp.int32(0) if self.draws else ()

  def following_step(self, step: Any) -> Any:
    """The number of the next step."""
    return step + 1 if self.draws else step

  def writer(self, codec: Codec, step: Any, place: jax.Array) -> Writer:
    """The writer of a step.

    Args:
      codec: the codec of messages.
      step: the number of the step, as `first_step`.
      place: i32[], workers of the same place round alike.
    """
    if not self.draws:
      return Writer(codec, None)
    return Writer(codec, jax.random.fold_in(jax.random.fold_in(jax.random.key(0), step), place))

  def codec(self, n: int) -> Codec:
    """The codec of entries of the whole vector."""
    return codec_of(self.wire, n)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectingCollective(EncodingCollective):
  """A sparse collective whose workers select entries before they send them.

  Attributes:
    selector: the name of the method of selection, one of `select.selectors.SELECTORS`.
  """

  selector: SelectorName = "exact"

  @property
  def method(self) -> Selector:
    """The method of selection."""
    return SELECTORS[self.selector]

  def chosen_codec(self, length: int) -> Codec:
    """The codec of selected entries, to which nothing has been added."""
    return codec_of(self.wire, length, by_chunk=self.method.one_per_chunk)

  def slots(self, n: int, size: int) -> int:
    return max(super().slots(n, size), self.method.slots(n, self.entries(n)))

  def init(self, n: int, size: int) -> State:
    self.check_selector(n, self.entries(n))
    return super().init(n, size)._replace(worker=self.method.init(1))

  def check_selector(self, length: int, k: int) -> None:
    """Raises ValueError if k entries of a block of `length` can't be selected."""
    try:
      self.method.check(length, k)
    except ValueError as error:
      raise ValueError(f"{self.name}: {error}") from None

  def choose(self, acc: LazySum, memory: Any) -> tuple[Sparse, jax.Array, Any]:
    """Selects k entries of a whole vector.

    Args:
      acc: f32[n].
      memory: of the selector.

    Returns:
      (chosen, count, memory): [1, k] entries, how many they are i32[], and the memory for the next step.
    """
    k = self.entries(acc.size)
    chosen = self.method.choose(acc, k, memory)
    count = jnp.int32(k) if self.method.fills_slots else jnp.sum(chosen.indices < acc.size, dtype=jnp.int32)
    return chosen, count, self.method.next(memory, chosen, acc.size)
