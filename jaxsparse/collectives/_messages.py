"""Options of collectives that select entries and send them: the selector, and the wire format and size of messages.

XLA needs every array size at compile time. Where a size changes at run time, a
collective compiles its exchange for a few capacities, the workers agree on the number
of entries that they need, and the step runs the smallest sufficient one (`switch`).
Entries beyond the largest capacity overflow: they stay in the residual.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse._compat import varying
from jaxsparse.collectives._base import SparseCollective, Traits
from jaxsparse.comm import all_gather, schedules
from jaxsparse.select.blocks import LazySum
from jaxsparse.select.selectors import SELECTORS, Selector, SelectorName
from jaxsparse.sparse.codec import Codec, codec_of
from jaxsparse.sparse.values import FORMATS, Wire
from jaxsparse.types import Comm, Count, Sparse, State, saturated, saturated_product

_NOT_FINITE = jnp.iinfo(jnp.int32).max  # more slots than any message has


class Writer(NamedTuple):
  """Encodes the messages of a step.

  Attributes:
    codec: the wire format of rows of entries.
    key: the key of random rounding; None where the format does not draw.
    next_step: the number of the next step, i32[]; () without random rounding.
  """

  codec: Codec
  key: jax.Array | None = None
  next_step: Any = ()

  def encode(self, entries: Sparse, message_index: int) -> tuple[Any, Sparse]:
    """Encodes rows of entries as a message of this step.

    `message_index` is folded into the key: each message of a step has other noise.

    Returns:
      (message, errors): arrays to send; and the rounding error of each entry as its
      value, in the same slots, zeros if values are not rounded.
    """
    noise = None
    if self.key is not None:
      noise = jax.random.uniform(
        jax.random.fold_in(self.key, message_index), entries.values.shape, jnp.float32
      )
    if self.codec.rounds:
      # The barrier stores the values. Else XLA for GPUs reads them from their vector
      # again for the errors, and copies that vector before it is updated in place.
      entries = jax.lax.optimization_barrier(entries)
    message, rounded = self.codec.encode(entries, noise)
    errors = entries.values - rounded if self.codec.rounds else jnp.zeros_like(rounded)
    return message, entries._replace(values=errors)

  def gather(self, comm: Comm, message: Any) -> Sparse:
    """All-gathers messages: the rows of all workers, first those of worker `rank`, then those of rank + 1, …."""
    return self.codec.decode(jax.tree.map(_join_rows, all_gather(comm, message)))

  def gather_rows(
    self, comm: Comm, row: Sparse, message_index: int, slots: int
  ) -> tuple[Sparse, list[Sparse], jax.Array]:
    """Gathers a row of entries, [1, c], of each worker as message `message_index` of this step.

    Returns:
      (rows, lost, words): the rows of all workers, [P, c] entries, first that of worker
      `rank`, then that of rank + 1, …; the rounding errors of the own row as a list of
      one `Sparse` [1, slots], [] if values are not rounded; the words sent, u32[].
    """
    return self.gather_rows_with((), comm, row, message_index, slots)[1:]

  def gather_rows_with(
    self, numbers: Any, comm: Comm, row: Sparse, message_index: int, slots: int
  ) -> tuple[Any, Sparse, list[Sparse], jax.Array]:
    """As `gather_rows`, and the same messages carry `numbers`, a pytree of i32[] of each worker.

    Returns:
      (numbers, rows, lost, words): i32[P] for each i32[], in the order of the rows,
      first that of worker `rank`; None or () as they are. The others as `gather_rows`
      returns them.
    """
    message, errors = self.encode(row, message_index)
    numbers, messages = all_gather(comm, (numbers, message))
    # [P, 1, …] of each array of a message to [P, …], as rows of one message
    rows = self.codec.decode(jax.tree.map(_join_rows, messages))
    words = words_of(self.codec, comm.size, row.indices.size)
    # each of the numbers is a word of each message
    words += len(jax.tree.leaves(numbers)) * (comm.size - 1)
    return numbers, rows, self._lost(errors, slots), saturated(words, jnp.uint32)

  def exchange_rows(
    self, comm: Comm, rows: Sparse, message_index: int, slots: int
  ) -> tuple[Sparse, list[Sparse], jax.Array]:
    """Sends row w of entries, [P, c], to worker w as message `message_index` of this step.

    Returns:
      (received, lost, words): a row of each sender; the rounding errors of the rows
      sent, in rows of `slots` slots, [] if values are not rounded; the words sent.
    """
    message, errors = self.encode(rows, message_index)
    received = self.codec.decode(comm.all_to_all(message))
    words_of_row = self.codec.words(1, rows.indices.shape[1])
    words = saturated_product(words_of_row, comm.size - 1)
    return received, self._lost(errors, slots), words

  def _lost(self, errors: Sparse, slots: int) -> list[Sparse]:
    """Rounding errors in rows of `slots` slots whatever the capacity; [] if values are not rounded.

    So branches of `switch` for different capacities have the same shapes.
    """
    if not self.codec.rounds:
      return []
    return [sparse.resize(errors, slots, self.codec.length)]

  def words_used(
    self, entries: jax.Array | int, capacity: int, size: int = 2
  ) -> jax.Array:
    """The words u32[] of i32[] entries in messages of `capacity` slots, to one worker or all-gathered over `size`."""
    words = words_of(self.codec, size, capacity)
    # An entry of "coo" takes two words, which integers count exactly.
    if words == 2 * capacity * (size - 1):
      return saturated_product(entries, 2 * (size - 1))
    # in float32, since the product of u32 may overflow before the division
    return saturated(jnp.float32(entries) * (words / capacity), jnp.uint32)


_join_rows = functools.partial(jax.lax.collapse, start_dimension=0, stop_dimension=2)


def words_of(codec: Codec, size: int, capacity: int, rows: int = 1) -> int:
  """Words that a worker sends in a reduce-scatter, or in an all-gather, over `size` workers with so many rows each.

  In the round of stride s it sends the rows of min(s, P − s) workers (`all_gather`).
  """
  return sum(
    codec.words(rows * min(stride, size - stride), capacity)
    for stride in schedules.strides(size)
  )


def count_real(n: int, length: int, k: int) -> int:
  """The number of entries of n among k of each block of `length`: padding, behind n, is selected last.

  Example:
    >>> count_real(5, 4, 2), count_real(7, 4, 2), count_real(5, 1, 1)
    (3, 4, 5)
  """
  return n // length * k + min(k, n % length)


def geometric(low: int, high: int, count: int = 5) -> tuple[int, ...]:
  """At most `count` capacities from `low` to `high` in geometric progression, rounded up.

  Example:
    >>> geometric(10, 160), geometric(3, 4), geometric(7, 7)
    ((10, 20, 40, 80, 160), (3, 4), (7,))
  """
  ratio = (high / low) ** (1 / (count - 1))
  # `round` first: 80.0000001 is 80 with a rounding error, and must not become 81.
  capacities = [math.ceil(round(low * ratio**power, 6)) for power in range(count)]
  return tuple(sorted({min(high, capacity) for capacity in capacities}))


def agree(
  comm: Comm, needed: jax.Array, finite: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Whether the entries of all workers are finite, bool[], and the most slots that one of them needs, i32[].

  Selection by a threshold may miss a NaN or Inf, which top-k always selects. So workers
  exchange here whether there is one.

  Args:
    comm: the workers.
    needed: i32[], the slots that this worker needs.
    finite: bool[], whether the entries of this worker are finite.
  """
  # A worker with NaN or Inf says that it needs 2³¹ − 1 slots, so that one all-reduce
  # tells both. `switch` then takes its last branch.
  most = comm.all_reduce(jnp.where(finite, needed, _NOT_FINITE), "max")
  return most != _NOT_FINITE, most


def switch(
  capacities: Sequence[int],
  needed: jax.Array,
  branch: Callable[[int], Any],
  otherwise: Callable[[], Any] | None = None,
) -> Any:
  """`branch(capacity)` for the smallest of `capacities` that is at least `needed`.

  Args:
    capacities: in increasing order.
    needed: i32[], the same on every worker, since `branch` may communicate.
    branch: returns a pytree of the same shapes for every capacity; compiled once for
      each.
    otherwise: what is returned if no capacity is sufficient; by default `branch` of the
      largest.

  Example:
    >>> switch((2, 4, 8), jnp.int32(3), lambda capacity: jnp.int32(capacity))
    Array(4, dtype=int32)
  """
  branches: list[Callable[[], Any]] = [
    functools.partial(branch, capacity) for capacity in capacities
  ]
  branches += [otherwise] if otherwise else []
  # The last branch runs where `needed` exceeds all limits, so its capacity is no limit.
  limits = jnp.array(capacities[: len(branches) - 1], jnp.int32)
  branch_index = jnp.sum(needed > limits, dtype=jnp.int32)
  return varying.switch(branch_index, branches)


Sent = tuple[Sparse, list[Sparse], jax.Array]
"""Received rows, rounding errors of the rows sent, words sent."""


def send_up_to(
  send: Callable[[Comm, Sparse, int, int], Sent],
  comm: Comm,
  entries: Sparse,
  message_index: int,
  capacities: Sequence[int],
  needed: jax.Array,
  end: int,
) -> tuple[Sparse, list[Sparse], jax.Array]:
  """Sends the first slots of rows of entries: the smallest of `capacities` that is at least `needed`.

  Args:
    send: `Writer.gather_rows` or `Writer.exchange_rows`.
    comm: the workers.
    entries: rows [r, c], entries before empty slots, with c at least the largest
      capacity.
    message_index: the number of the message in the step, as in `Writer.encode`.
    capacities: in increasing order.
    needed: i32[], the same on every worker; entries beyond the largest capacity are
      not sent.
    end: length of the vector, the index of empty slots.

  Returns:
    What `send` returns; received rows have as many slots as the largest capacity.
  """

  def sized(capacity: int) -> tuple[Sparse, list[Sparse], jax.Array]:
    rows, lost, words = send(
      comm, sparse.resize(entries, capacity, end), message_index, capacities[-1]
    )
    # All branches have the shapes of the largest capacity.
    return sparse.resize(rows, capacities[-1], end), lost, words

  return switch(capacities, needed, sized)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodingCollective(SparseCollective):
  """A sparse collective whose messages have a wire format, one of `sparse.values.FORMATS`."""

  wire: Wire = "coo"

  @property
  def traits(self) -> Traits:
    # Formats with words beside the values send multiples of a scale.
    has_scale = FORMATS[self.wire].row_words > 0
    return dataclasses.replace(super().traits, scaled=has_scale)

  @property
  def first_step(self) -> Any:
    """The number of the first step, i32[], where rounding is random; () where nothing is drawn from it."""
    return jnp.int32(0) if FORMATS[self.wire].draws else ()

  def init(self, n: int, size: int) -> State:
    return super().init(n, size)._replace(shared=self.first_step)

  def writer(self, codec: Codec, step: Any, block: jax.Array) -> Writer:
    """The writer of a step.

    Args:
      codec: the wire format.
      step: the number of the step, i32[]. `first_step` and `Writer.next_step` return
        () where rounding is not random: `step` is then not read.
      block: i32[]; workers with the same number draw the same noise. It is the rank, or
        in SparDL the block, since several workers must round its sum alike.
    """
    # Without random rounding there is no key, and no step to count.
    if not FORMATS[self.wire].draws:
      return Writer(codec)
    # The key is the same in every run: a run from a checkpoint rounds as the first one
    # did.
    key_of_step = jax.random.fold_in(jax.random.key(0), step)
    return Writer(codec, jax.random.fold_in(key_of_step, block), step + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectingCollective(EncodingCollective):
  """A sparse collective whose workers select entries before they send them, by one of `select.selectors.SELECTORS`."""

  selector: SelectorName = "exact"

  @property
  def selection(self) -> Selector:
    """The method of selection that `selector` names."""
    return SELECTORS[self.selector]

  def is_partial(self, n: int, state: State) -> bool | jax.Array:
    # A reused threshold may select fewer entries than `entries(n)`.
    return not self.selection.fills_slots or super().is_partial(n, state)

  def chosen_codec(self, length: int) -> Codec:
    """The codec of selected entries, to which nothing has been added."""
    return codec_of(self.wire, length, by_chunk=self.selection.one_per_chunk)

  def init(self, n: int, size: int) -> State:
    self.selection.check(self.name, n, self.entries(n))
    return super().init(n, size)._replace(worker=self.selection.init(1))

  def choose(self, acc: LazySum, memory: Any) -> tuple[Sparse, Count, Any]:
    """The entries of f32[n] to send at once, in [1, k] slots; the number of filled slots i32[]; the next memory.

    `memory` is what the selector carries from step to step, or (): `State.worker`.
    """
    chosen = self.selection.choose(acc, self.entries(acc.size), memory)
    return (
      chosen,
      self.count_chosen(chosen, acc.size),
      self.selection.next(memory, chosen, acc.size),
    )

  def count_chosen(self, chosen: Sparse, n: int) -> Count:
    """The number of entries selected of n, i32[], in rows of one of the equal blocks each; padding does not count."""
    rows, k = chosen.indices.shape
    length = -(-n // rows)
    if self.selection.fills_slots:
      return count_real(n, length, k)
    # index `length` is an empty slot
    return sparse.count(chosen, length)
