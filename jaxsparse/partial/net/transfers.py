"""Models on their way from a donor to a worker that asks: in chunks, so that the progress of a transfer is seen.

    FETCH ──> WAITS, once a second while others get the model first ──> MODEL, chunk by chunk

In rounds a worker says which anchor it has, and asks a donor for the links since then.
If the donor has no links, or they are as large as an anchor, the worker asks several
donors, each for a slice of its anchor. The values of FETCH are integers, i64, and so
are the first ones of each slice:

    FETCH   rounds of its anchor, -1 to get an anchor | id of the last round | slice index | number of slices
    MODEL   digest                                    | words of the whole   | slice index | number of slices | words

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
# words of each chunk but the last at least: 64 KiB in `STALLED` seconds, 6.5 kB/s, are
# progress
_CHUNK = 1 << 14
_MOST_CHUNKS = 1 << 12  # chunks of a model or slice


def split(model: Piece) -> Iterator[Piece]:
  """The chunks of a MODEL, without copies; the tag of each says how many follow."""
  # words of a chunk: `_CHUNK`, or more so that there are at most `_MOST_CHUNKS`
  size = max(_CHUNK, -(-model.values.size // _MOST_CHUNKS))
  # An empty model is one empty chunk.
  count = max(1, -(-model.values.size // size))
  for index in range(count):
    values = model.values[index * size : (index + 1) * size]
    yield model._replace(values=values, tag=count - 1 - index)


def choose(donors: Sequence[str], in_vain: int) -> Sequence[str]:
  """The donors to ask, of all that the server has named, after `in_vain` fetches in vain.

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
  """Yields the address of each donor and a FETCH: for links, or after a fetch in vain for a slice of its anchor.

  Args:
    donors: addresses of the donors to ask.
    in_vain: how many fetches were in vain: a donor may have no links.
    round_: a donor answers once its anchor has been through so many rounds, or after
      `_PATIENCE` seconds.
    worker: the number of the worker that asks.
    has: how many rounds its own anchor has been through; links lead on from there.
    id_: the id of the last of these rounds; 0 for none.
  """
  start = -1 if in_vain else has  # -1 asks for the anchor itself
  for index, donor in enumerate(donors):
    integers = np.array([start, id_, index, len(donors)], np.int64)
    values = integers.view(np.float32)  # the same bytes: a piece has float32 values
    yield donor, Piece(PieceKind.FETCH, round_, worker, values)


class Assembly:
  """The model that comes in chunks from one donor, or in slices from several.

  Args:
    longest: words of the longest model; a longer one is forged, and is dropped.

  Attributes:
    _chunks: by address of a donor, the chunks of its last model or slice, in order.

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
    self._chunks = dict[str, list[Piece]]()

  def add(self, donor: str, chunk: Piece, donors: Sequence[str]) -> Piece | None:
    """Adds a chunk; a chunk that does not continue the one before begins a new model or slice.

    Args:
      donor: the address of the donor that has sent the chunk.
      chunk: of its model, or slice; its tag is the number of chunks that follow.
      donors: the addresses of all donors that are asked, in the order of their slices.

    Returns:
      The whole model once its last chunk has come; None before.
    """
    # Chunks of donors that are no longer asked are dropped.
    kept = self._chunks.items()
    self._chunks = {address: chunks for address, chunks in kept if address in donors}
    chunks = self._chunks.setdefault(donor, [])
    # Without a chunk before, `last` is the new one: there is nothing to clear.
    last = chunks[-1] if chunks else chunk
    if (last.number, last.tag) != (chunk.number, chunk.tag + 1):
      chunks.clear()
    chunks.append(chunk)
    size = sum(piece.values.size for piece in chunks)
    if size > self._longest or chunk.tag >= _MOST_CHUNKS:
      chunks.clear()
    # More chunks follow, or the model is forged and was dropped.
    if chunk.tag or not chunks:
      return None
    count = len(donors)
    if count > 1 and not _is_slice(chunks[0], donors.index(donor), count):
      chunks.clear()  # the answer to an earlier request, for another slice
    # A slice is complete when its last chunk has the tag 0.
    slices = [self._chunks.get(address, []) for address in donors]
    if not all(pieces and pieces[-1].tag == 0 for pieces in slices):
      return None
    self._chunks.clear()
    first, *others = [
      np.concatenate([piece.values for piece in pieces]) for pieces in slices
    ]
    # Each slice begins with `PREFIX` words of integers: those of the first slice
    # describe the whole model, those of the other slices are dropped.
    return chunk._replace(
      values=np.concatenate([first, *(words[PREFIX:] for words in others)])
    )


def _is_slice(first: Piece, index: int, count: int) -> bool:
  """Whether a chunk begins slice `index` of `count`, as the last two i64 of its prefix say."""
  # an i64 is two words
  fields = first.values[PREFIX // 2 : PREFIX]
  return fields.tobytes() == np.array([index, count], np.int64).tobytes()


class Transfers:
  """Requests of other workers for the model of this one, answered in the order in which they came.

  Each peer has at most one waiting request. A server that tells a worker that it is
  behind tells the donors at the same time that the round counts: if a request arrives
  at a donor before that message, it waits a little for the anchor of that round.

  Attributes:
    _waiting: by peer, its request, and the time until which the request waits for the
      anchor of a round; in the order in which the peers began to ask.
  """

  def __init__(self) -> None:
    self._waiting: dict[Any, tuple[Piece, float]] = {}
    self._told = 0.0  # when peers were told that they wait

  def ask(self, peer: Any, request: Piece, now: float) -> None:
    """A peer asks for a model that has been through `request.number` rounds or more; replaces its earlier request."""
    self._waiting[peer] = request, now + _PATIENCE

  def next(self, round_: int, now: float) -> tuple[Any, Piece] | None:
    """The peer to send the model to next, and its request, which is removed; None if nobody can be answered.

    To be called once the model has been sent to the previous peer.

    Args:
      round_: the number of rounds that the model has been through; 0 in partial reduce.
      now: the time in seconds.
    """
    for peer, (request, until) in self._waiting.items():
      # The model is new enough; or the peer gets the model as it is after `_PATIENCE`.
      if request.number <= round_ or now > until:
        del self._waiting[peer]
        return peer, request
    return None

  def waiting(self, now: float) -> list[Any]:
    """The peers to tell that they wait: all that wait, once a second; [] in between."""
    if now < self._told + _PULSE:
      return []
    self._told = now
    return [*self._waiting]
