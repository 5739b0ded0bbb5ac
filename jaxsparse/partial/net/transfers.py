"""Models on their way from a donor to a worker that asks: in chunks, so that the progress of a transfer is seen.

    FETCH ──> WAITS, once a second while others get the model first ──> MODEL, chunk by chunk

In rounds a worker says which anchor it has and asks a donor for the links since then;
where it has none, or they are as large, several donors for a slice of their anchor each.
The values of FETCH are integers, i64, and so are the first ones of each slice:

    FETCH   its round, -1 for an anchor | id of that round   | which slice | of how many
    MODEL   digest                      | words of the whole | which slice | of how many | words

A worker whose donor sends nothing for `STALLED` seconds closes the connection and asks
again: packets may be lost for a while, or the donor has closed a connection whose end
does not reach the worker.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxsparse.partial.net.messages import Piece, PieceKind

MOST_DONORS = 4  # donors of one worker at a time
PREFIX = 8  # words of the integers
STALLED = 10.0  # seconds without a byte of a donor after which a worker asks again
# seconds that a request waits for the anchor of a round that this worker may hear of
# soon
_PATIENCE = 5.0
_PULSE = 1.0  # seconds between two WAITS to a worker
_CHUNK = 1 << 14  # words of a chunk at least: 6.5 kB/s are progress
_MOST_CHUNKS = 1 << 12


def split(model: Piece) -> Iterator[Piece]:
  """The chunks of a MODEL, without copies; the tag of each says how many follow."""
  size = max(_CHUNK, -(-model.values.size // _MOST_CHUNKS))
  count = max(1, -(-model.values.size // size))
  for index in range(count):
    values = model.values[index * size : (index + 1) * size]
    yield model._replace(values=values, tag=count - 1 - index)


def choose(donors: Sequence[str], in_vain: int) -> Sequence[str]:
  """The donors to ask after so many fetches in vain.

  First one, for links. Then all, for slices of the anchor. Then one, for the anchor: of
  several slices nothing tells which is wrong.
  """
  return donors if in_vain == 1 else donors[:1]


def requests(
  donors: Sequence[str],
  in_vain: int,
  round_: int,
  worker: int,
  has: int,
  id_: int,
) -> Iterator[tuple[str, Piece]]:
  """FETCH of a worker to each donor, for links, or after fetches in vain for a slice each of the anchor.

  Args:
    donors: their addresses, as `choose` has them.
    in_vain: how many fetches were in vain: a donor may have no links.
    round_: a donor answers once it has been through so many rounds.
    worker: that asks.
    has: the rounds of its own anchor, from which links lead on.
    id_: that anchor's id in the lineage.
  """
  start = -1 if in_vain else has
  for index, donor in enumerate(donors):
    integers = np.array([start, id_, index, len(donors)], np.int64)
    values = integers.view(np.float32)  # whose bits a piece carries
    yield donor, Piece(PieceKind.FETCH, round_, worker, values)


class Assembly:
  """The model that comes in chunks from one donor, or in slices from several.

  Args:
    longest: words of a model; of more, as only a forged one has, nothing is kept.

  Example:
    >>> from jaxsparse.partial.net.messages import PieceKind
    >>> model = Piece(PieceKind.MODEL, 7, 3, np.arange(40_000, dtype=np.float32))
    >>> assembly = Assembly(longest=50_000)
    >>> add = lambda chunk: assembly.add("tcp://a:1", chunk, ["tcp://a:1"])
    >>> [whole and whole.values.size for whole in map(add, split(model))]
    [None, None, 40000]
  """

  def __init__(self, longest: int):
    self._longest = longest
    self._chunks = dict[str, list[Piece]]()  # chunks of the last model or slice

  def add(self, donor: str, chunk: Piece, donors: Sequence[str]) -> Piece | None:
    """The model, if this is the last chunk; one that follows no other begins a model, or a slice.

    Args:
      donor: that has sent the chunk.
      chunk: of its model, or slice.
      donors: all, in the order of their slices.
    """
    kept = self._chunks.items()
    self._chunks = {address: chunks for address, chunks in kept if address in donors}
    chunks = self._chunks.setdefault(donor, [])
    last = chunks[-1] if chunks else chunk
    if (last.number, last.tag) != (chunk.number, chunk.tag + 1):
      chunks.clear()
    chunks.append(chunk)
    size = sum(piece.values.size for piece in chunks)
    if size > self._longest or chunk.tag >= _MOST_CHUNKS:
      chunks.clear()
    if chunk.tag or not chunks:
      return None
    count = len(donors)
    if count > 1 and not _is_slice(chunks[0], donors.index(donor), count):
      chunks.clear()  # the answer to an earlier request
    slices = [self._chunks.get(address, []) for address in donors]
    if not all(pieces and pieces[-1].tag == 0 for pieces in slices):
      return None
    self._chunks.clear()
    first, *others = [
      np.concatenate([piece.values for piece in pieces]) for pieces in slices
    ]
    # The prefix of the first slice describes the whole; the others are dropped.
    return chunk._replace(
      values=np.concatenate([first, *(words[PREFIX:] for words in others)])
    )


def _is_slice(first: Piece, index: int, count: int) -> bool:
  """Whether a chunk begins slice `index` of so many."""
  fields = first.values[PREFIX // 2 : PREFIX]
  return fields.tobytes() == np.array([index, count], np.int64).tobytes()


class Transfers:
  """Requests of other workers for the model of this one: one is answered at a time, so that they share its uplink.

  At most one of each peer waits. A server that tells a worker that it is behind tells
  the donors at the same time that the round counts: a request that arrives before the
  donor knows it waits a little for the anchor of that round.
  """

  def __init__(self) -> None:
    # by peer: its request, and until when that waits for its round
    self._waiting: dict[Any, tuple[Piece, float]] = {}
    self._told = 0.0  # when peers were told that they wait

  def ask(self, peer: Any, request: Piece, now: float) -> None:
    """A peer asks for a model that has been through as many rounds as the number of its request says, or more."""
    self._waiting[peer] = request, now + _PATIENCE

  def next(self, round_: int, now: float) -> tuple[Any, Piece] | None:
    """The peer to send the model to, which has been through so many rounds, and its request.

    None for none; to be called once the last one has the model.
    """
    for peer, (request, until) in self._waiting.items():
      # after `_PATIENCE` the peer gets the anchor that there is
      if request.number <= round_ or now > until:
        del self._waiting[peer]
        return peer, request
    return None

  def waiting(self, now: float) -> list[Any]:
    """The peers to tell that they wait: all, once a second."""
    if now < self._told + _PULSE:
      return []
    self._told = now
    return [*self._waiting]
