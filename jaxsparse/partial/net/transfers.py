"""Requests of other workers for the model of this one: one is answered at a time, so that they share its uplink."""

from typing import Any

from jaxsparse.partial.net.messages import Piece

_PATIENCE = 5.0  # seconds that a request waits for the anchor of a round that this worker may hear of soon


class Transfers:
  """The requests that wait, at most one of each peer, the longest-waiting first.

  A server that tells a worker that it is behind tells the donors at the same time that the round counts: a request that
  arrives before the donor knows it waits a little, since the anchor before that round would be useless.

  Example:
    >>> from jaxsparse.partial.net.messages import PieceKind
    >>> transfers = Transfers()
    >>> transfers.ask("peer", Piece(PieceKind.FETCH, 3, 0), now=0.0)
    >>> transfers.next(round_=2, now=1.0), transfers.next(round_=3, now=2.0), transfers.next(round_=3, now=3.0)
    (None, 'peer', None)
  """

  def __init__(self) -> None:
    self._waiting: dict[Any, tuple[int, float]] = {}  # by peer: the round, and until when the request waits for it

  def ask(self, peer: Any, request: Piece, now: float) -> None:
    """A peer asks for a model that has been through as many rounds as the number of its request kind, or more."""
    self._waiting[peer] = request.number, now + _PATIENCE

  def next(self, round_: int, now: float) -> Any:
    """The peer to send the model to, which has been through so many rounds, once the last one has it; None for none."""
    for peer, (wanted, until) in self._waiting.items():
      if wanted <= round_ or now > until:
        del self._waiting[peer]
        return peer
    return None
