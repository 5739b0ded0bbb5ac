"""Models on their way from a donor to a worker that asks: in chunks, so that the progress of a transfer is seen.

    FETCH ──> WAITS, once a second while others get the model first ──> MODEL, chunk by chunk

A worker whose donor sends nothing for `STALLED` seconds closes the connection and asks
again: packets may be lost for a while, or the donor has closed a connection whose end
does not reach the worker.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxsparse.partial.net.messages import Piece

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


class Assembly:
  """The model that comes in chunks from one donor.

  Args:
    longest: words of a model; of more, as only a forged one has, nothing is kept.

  Example:
    >>> from jaxsparse.partial.net.messages import PieceKind
    >>> model = Piece(PieceKind.MODEL, 7, 3, np.arange(40_000, dtype=np.float32))
    >>> assembly = Assembly(longest=50_000)
    >>> [whole and whole.values.size for whole in (assembly.add("tcp://a:1", chunk) for chunk in split(model))]
    [None, None, 40000]
  """

  def __init__(self, longest: int):
    self._longest = longest
    self._clear()

  def _clear(self) -> None:
    self._last: tuple[str, int, int] | None = None  # donor, number and tag of the last
    self._chunks = list[np.ndarray]()
    self._size = 0  # words of these

  def add(self, donor: str, chunk: Piece) -> Piece | None:
    """The model, if this is the last chunk; one that follows no other begins a model."""
    if self._last != (donor, chunk.number, chunk.tag + 1):
      self._clear()
    self._size += chunk.values.size
    if self._size > self._longest or chunk.tag >= _MOST_CHUNKS:
      self._clear()
      return None
    self._last = donor, chunk.number, chunk.tag
    self._chunks.append(chunk.values)
    if chunk.tag:
      return None
    values = self._chunks[0] if len(self._chunks) == 1 else np.concatenate(self._chunks)
    self._clear()
    return chunk._replace(values=values)


class Transfers:
  """Requests of other workers for the model of this one: one is answered at a time, so that they share its uplink.

  At most one of each peer waits. A server that tells a worker that it is behind tells
  the donors at the same time that the round counts: a request that arrives before the
  donor knows it waits a little for the anchor of that round.
  """

  def __init__(self) -> None:
    self._waiting: dict[
      Any, tuple[int, float]
    ] = {}  # by peer: the round, and until when the request waits for it
    self._told = 0.0  # when peers were told that they wait

  def ask(self, peer: Any, request: Piece, now: float) -> None:
    """A peer asks for a model that has been through as many rounds as the number of its request says, or more."""
    self._waiting[peer] = request.number, now + _PATIENCE

  def next(self, round_: int, now: float) -> Any:
    """The peer to send the model to, which has been through so many rounds, once the last one has it; None for none."""
    for peer, (wanted, until) in self._waiting.items():
      if wanted <= round_ or now > until:
        del self._waiting[peer]
        return peer
    return None

  def waiting(self, now: float) -> list[Any]:
    """The peers to tell that they wait: all, once a second."""
    if now < self._told + _PULSE:
      return []
    self._told = now
    return [*self._waiting]
