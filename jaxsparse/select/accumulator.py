"""Selection and residual: the accumulator gradient + residual of a worker, of which entries are sent in rounds.

Three things are done late, which saves passes over n entries:

- sum: gradient and residual are added only where they are read (`LazySum`);
- sent and received entries: received values are added in the buffer of the gradient, in
  place if it is donated; sent entries stay where they are;
- residual: `Pending` until the end of the step, when one pass materializes it in the
  old one's buffer.

Sending changes nothing by itself. At an index that is not delivered, every worker keeps
gradient + old residual, even if it sent the entry. At a delivered index a worker keeps
what it did not send, or dropped.

docs/understand/selection.md explains the three, and shows the same algorithm in plain
numpy.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse._compat import varying
from jaxsparse.arrays import iota
from jaxsparse.arrays.flatten import all_finite
from jaxsparse.comm import ordering
from jaxsparse.select import exact
from jaxsparse.select.blocks import Blocks, LazySum, keys_of, search_keys
from jaxsparse.sparse import bitset
from jaxsparse.types import Commit, Reduced, Residual, Rounding, Sparse


class Pending(NamedTuple):
  """A residual that is not materialized yet: gradient + old residual, except at some entries.

  Attributes:
    grads: f32[n], the gradient; where values were received, gradient + residual +
      received values; `entries` contains all these indices.
    residual: f32[n], the old residual.
    entries: entries of the new residual that replace the sum. Each index below n occurs
      once; others are empty slots.

  Example:
    >>> pending = Pending(jnp.ones(2), jnp.zeros(2), Sparse(jnp.array([1]), jnp.array([0.0])))
    >>> materialize(pending, jnp.bool_(True), 1.0)
    Array([1., 0.], dtype=float32)
  """

  grads: jax.Array
  residual: jax.Array
  entries: Sparse


@dataclasses.dataclass(frozen=True)
class TopKAccumulator:
  """Blocks of which the k largest entries of a row are sent, or those of them that reach a known threshold.

  Rows are those of `Blocks`. Each row is selected once. Entries are added to a row
  before its selection, to row 0 after it, too. Indices of entries are block-relative;
  index `length` and value 0 are an empty slot. `ChunkAccumulator` has the same methods.

  Attributes:
    blocks: the layout, and the vector at the start of the step: `x` is
      LazySum((gradient, old residual)).
    grads: f32[n]; gradient + residual + received values where `touched`, elsewhere the
      gradient alone.
    touched: the bitset of flat indices to which received values were added.
    candidates: the candidates of the initial vector; None for short blocks, which are
      searched whole.
    least: i32[rows], at least 1: the key (`keys_of`) that a selected entry must reach;
      None for the k largest.
    new: i32[rows, c] of each addition to the first rows: block-relative indices that
      are neither candidates nor were added to before; the block's length elsewhere.
    before: [c] entries of each addition, with flat indices and the initial values;
      empty where something was added earlier.

  Example:
    >>> from jaxsparse.comm import SoloComm
    >>> x = LazySum((jnp.array([1.0, 2.0, 4.0, 3.0]), jnp.array([0.5, 0.0, 0.0, 0.0])))
    >>> acc = TopKAccumulator.start(Blocks.for_workers(SoloComm(2), x, k=1))
    >>> bag = acc.largest(1, 2)
    >>> bag.indices, bag.values
    (Array([[0]], dtype=int32), Array([[4.]], dtype=float32))
    >>> acc = acc.add(Sparse(jnp.array([[1]]), jnp.array([[10.0]])))
    >>> sent = Sparse(jnp.array([[2], [0]]), jnp.zeros((2, 1)))  # nothing of block 0, all of entry 0 of block 1
    >>> acc.pending(jnp.array([[1], [0]]), sent).entries
    Sparse(indices=Array([4, 2, 1], dtype=int32), values=Array([ 0.,  0., 12.], dtype=float32))
  """

  blocks: Blocks
  grads: jax.Array
  touched: jax.Array
  candidates: exact.Candidates | None
  least: jax.Array | None
  new: tuple[jax.Array, ...] = ()
  before: tuple[Sparse, ...] = ()

  @classmethod
  def start(cls, blocks: Blocks, least: jax.Array | None = None) -> Self:
    """Blocks to which nothing has been added.

    Args:
      blocks: the blocks.
      least: i32[rows], at least 1: the key that a selected entry of a row must reach.
    """
    candidates = exact.find_candidates(blocks, least)
    if candidates is not None and least is not None:
      reaching = candidates
      # Where too many entries reach a threshold of the last step, the threshold of the
      # candidates comes from a sample.
      candidates = varying.cond(
        reaching.fits.all(), lambda: reaching, lambda: exact.find_candidates(blocks)
      )
    return cls(
      blocks, blocks.x.parts[0], bitset.empty(blocks.x.size), candidates, least
    )

  def largest(self, first: int, last: int) -> Sparse:
    """The entries to send of rows first … last − 1, [last − first, k], indices ascending."""
    blocks = self.blocks
    least = None if self.least is None else self.least[first:last]
    read = lambda indices: self._read_at(blocks.flat_indices(indices, first))

    # Rows too short to have candidates are sorted whole.
    if self.candidates is None:
      columns = iota(blocks.length)
      every = jnp.broadcast_to(columns, (last - first, blocks.length))
      indices = exact.top_k(read(every), blocks.k).indices
    else:
      known = self._known(self.candidates, first, last)
      order = blocks.order[first:last]
      search_all = functools.partial(search_keys, self._keys_from, blocks, order)
      indices = exact.search_among(known, read, blocks, search_all, least)
    # The sort and `search_all` do not know `least`.
    if least is not None:
      reaches = keys_of(read(indices)) >= least[:, None]
      indices = jnp.where(reaches, indices, blocks.length)
    has_received = any(first < len(new) for new in self.new)
    if least is not None or has_received:
      # A threshold leaves empty slots between entries, and received entries are behind
      # the candidates of this worker.
      indices = jnp.sort(indices, axis=1)
    return Sparse(indices, read(indices))

  def _known(
    self, candidates: exact.Candidates, first: int, last: int
  ) -> exact.Candidates:
    """The candidates of rows first … last − 1, with the entries received there appended."""
    known = [candidates.indices[first:last]]
    for new in (new[first:last] for new in self.new if first < len(new)):
      # Padded to all rows, and to a multiple of 256 slots: the search packs flags of
      # slots in bitsets (`bitset.align`).
      missing_rows = last - first - len(new)
      missing_slots = bitset.align(new.shape[1]) - new.shape[1]
      more = ((0, missing_rows), (0, missing_slots))
      known.append(jnp.pad(new, more, constant_values=self.blocks.length))
    # `low` and `fits` still hold: nothing was added to entries that are not in `known`.
    return candidates._replace(
      indices=jnp.concatenate(known, axis=1),
      low=candidates.low[first:last],
      fits=candidates.fits[first:last],
    )

  def add(self, entries: Sparse) -> Self:
    """Adds received [r, c] entries, with block-relative indices, to the first r rows."""
    n = self.blocks.x.size
    flat = self.blocks.flat_indices(entries.indices)
    before = self._read_at(flat)
    untouched = ~bitset.contains(self.touched, flat)
    # Entries that are neither candidates nor in an earlier `new`: `_known` appends them
    # to the candidates.
    new = (
      untouched & ~bitset.contains(self.candidates.members, flat)
      if self.candidates
      else untouched
    )
    indices = jnp.where(untouched, flat, n)
    # Where nothing was added before, the value before is the initial one.
    initial = Sparse(indices.reshape(-1), before.reshape(-1))
    new_indices = jnp.where(new, entries.indices, self.blocks.length)
    return dataclasses.replace(
      self,
      grads=sparse.put(self.grads, flat, before + entries.values),
      touched=bitset.insert(self.touched, indices, n),
      new=(*self.new, new_indices),
      before=(*self.before, initial),
    )

  def pending(self, delivered: jax.Array, sent: Sparse) -> Pending:
    """The next residual, after at least one addition.

    Args:
      delivered: i32[rows, c], where the total delivers entries: the residual there is
        the current value without what was sent, elsewhere it is the initial value. All
        that was received is undone where it is not delivered.
      sent: [rows, k] entries that were sent, with the rounding error of each value;
        empty in rows not sent.
    """
    n = self.blocks.x.size
    none = jnp.zeros_like(self.touched)
    # the flat indices where the residual is the current value, not the initial one
    current = bitset.insert(none, self.blocks.flat_indices(delivered), n)
    flat = self.blocks.flat_indices(sent.indices).reshape(-1)
    flat = jnp.where(bitset.contains(current, flat), flat, n)
    errors = Sparse(flat, sent.values.reshape(-1))
    # every entry that was added to, once: with its first addition
    added = sparse.concatenate(self.before)
    # `grads` has the current value of each of these; of the others, the initial and the
    # current value are gradient + residual, so they need no entry. `added` has the
    # initial values.
    values = jnp.where(
      bitset.contains(current, added.indices),
      sparse.read_at(self.grads, added.indices),
      added.values,
    )
    # an index that was sent and added to has the value of `errors`
    is_sent = bitset.contains(bitset.insert(none, flat, n), added.indices)
    others = Sparse(jnp.where(is_sent, n, added.indices), values)
    _, residual = self.blocks.x.parts
    return Pending(self.grads, residual, sparse.concatenate([errors, others]))

  def _keys_from(self, start: jax.Array) -> jax.Array:
    """The keys of the current values of the block that starts at flat index `start`; those beyond the end are 0."""
    n = self.blocks.x.size
    flat = jnp.minimum(start + iota(self.blocks.length), n)  # n reads 0
    return keys_of(self._read_at(flat))

  def _read_at(self, flat: jax.Array) -> jax.Array:
    """The values of entries at flat indices, with what was received; sent entries are not subtracted. 0 at n."""
    _, residual = self.blocks.x.parts
    grads = sparse.read_at(self.grads, flat)
    sums = grads + sparse.read_at(residual, flat)
    # Not a sum with 0 in place of the residual where touched: −0 + 0 would be 0.
    return jnp.where(bitset.contains(self.touched, flat), grads, sums)


def pending_zeros(x: LazySum, indices: jax.Array) -> Pending:
  """The residual with zeros where entries were delivered, at `indices` of any shape, and the values of x elsewhere."""
  grads, residual = x.parts
  zeros = jnp.zeros(indices.shape, jnp.float32)
  return Pending(grads, residual, Sparse(indices, zeros))


def pending_returned(
  x: LazySum, indices: jax.Array, sent: jax.Array, returned: Sequence[Sparse]
) -> Pending:
  """The residual after a reduction that drops or rounds entries on their way.

  At an index of the total the residual is x, or 0 if this worker sent the entry, plus
  what was returned to this worker. Elsewhere it is x, even where this worker sent the
  entry: an entry that every worker dropped stays with its senders.

  Args:
    x: f32[n], gradient + old residual.
    indices: i32[c], of the total, ascending; empty slots (n) last.
    sent: i32 of any shape, the indices that this worker sent.
    returned: entries that this worker dropped or rounded off, added in their order;
      each index once.
  """
  # The indices of the total ascend, so the slot of an index is its rank among them.
  members = bitset.insert(bitset.empty(x.size), indices, x.size)

  def slots_of(flat: jax.Array) -> jax.Array:
    # `indices.size`, a slot that is dropped, where the total has no such index
    return jnp.where(
      bitset.contains(members, flat), bitset.rank(members, flat), indices.size
    )

  sent_slots = slots_of(sent.reshape(-1))
  values = sparse.put(x.read_at(indices), sent_slots, 0.0)
  for entries in returned:
    slots = slots_of(entries.indices.reshape(-1))
    values = sparse.add(values, slots, entries.values.reshape(-1))
  grads, residual = x.parts
  return Pending(grads, residual, Sparse(indices, values))


def pending_nonzero(
  x: LazySum, sent: jax.Array, total: Sparse, returned: Sequence[Sparse]
) -> Pending:
  """The residual if entries of the total that are 0 are not delivered: senders keep entries that add up to 0.

  Args:
    x: f32[n], gradient + old residual.
    sent: i32 of any shape, the indices that this worker sent, each once.
    total: [c] entries, the sum over workers.
    returned: the rounding errors of the messages of this worker; none where values are
      not rounded.
  """
  n = x.size
  members = bitset.insert(
    bitset.empty(n), jnp.where(total.values != 0, total.indices, n), n
  )
  # Without rounding, each sent entry is either delivered whole or kept whole: the
  # residual is 0 or x.
  if not returned:
    return pending_zeros(x, jnp.where(bitset.contains(members, sent), sent, n))
  # The delivered indices, ascending, as `pending_returned` needs them; `nonzero` has n
  # or more in empty slots.
  ascending = jnp.minimum(bitset.nonzero(members, total.indices.size), n)
  return pending_returned(x, ascending, sent, returned)


def materialize(pending: Pending, finite: jax.Array, decay: float) -> jax.Array:
  """β times the new residual, f32[n], or the old one if not `finite`: one pass over n entries, and a few in place.

  Args:
    pending: the new residual.
    finite: bool[], false in a step that all workers skip because of NaN or Inf.
    decay: β.
  """
  # All reads precede the writes in place, so that XLA can alias the buffers.
  finite = ordering.depend_on(pending.entries.values, finite.astype(jnp.int32)) > 0
  # The `where` makes this another expression than selection's gradient + residual: XLA
  # would compute that sum once and store its n entries.
  grads = jnp.where(finite, pending.grads, pending.residual)
  total = grads + pending.residual
  values = pending.entries.values
  if decay != 1:  # in the same pass
    total = decay * total
    values = decay * values
  residual = jnp.where(finite, total, pending.residual)
  indices = jnp.where(finite, pending.entries.indices, residual.size)
  return sparse.put(residual, indices, values)


class SparseReduced(Reduced):
  """The result of a collective that delivers entries of n.

  Attributes:
    total: `Sparse` entries in any order, each index once; empty slots have index n or
      more.
    state: the next `State`; its residual is `Pending`.
  """

  def mean(self, divisor: int, rounding: Rounding | None) -> tuple[jax.Array, Commit]:
    """Divides and rounds the values of entries; `commit` materializes the residual and the mean, f32[n]."""
    indices = self.total.indices
    exact = self.total.values / divisor
    mean = rounding(exact, indices) if rounding else exact

    def commit(
      finite: jax.Array, _: Residual, decay: float
    ) -> tuple[jax.Array, jax.Array]:
      # `Pending` has the residual before the step, so `_` is not read.
      pending = self.state.residual
      residual = materialize(pending, finite, decay)
      # A 0 that depends on the new residual, so that all reads of `grads` precede the
      # update, which reuses its buffer.
      zero = ordering.depend_on(residual[:1], jnp.float32(0))
      if rounding:
        error = decay * jnp.where(finite, exact - mean, 0.0)
        residual = sparse.add(residual, indices, error)
      # n zeros, in the buffer of the gradient
      update = jnp.full_like(pending.grads, zero)
      return sparse.put(update, indices, jnp.where(finite, mean, 0.0)), residual

    return mean, commit

  def add_to(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum f32[n] of x and the total, in place, and the next residual before its decay."""
    indices, values = self.total
    total = sparse.add(x, indices, values)
    # A NaN may be in an empty slot, which `add` drops, and must not go unnoticed.
    total = jnp.where(all_finite(values), total, jnp.nan)
    return total, materialize(self.state.residual, jnp.bool_(True), 1.0)

  def mask(
    self, momentum: jax.Array, grads: jax.Array, residual: jax.Array
  ) -> jax.Array:
    """The momentum with zeros where the next residual is not `grads + residual`.

    Only the entries of `Pending` can differ from the sum, so only they are compared.
    """
    indices, values = self.state.residual.entries
    before = sparse.read_at(grads, indices) + sparse.read_at(residual, indices)
    changed = jnp.where(values != before, indices, momentum.size)
    return sparse.put(momentum, changed, 0.0)
