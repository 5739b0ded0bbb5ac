"""A reader of rounds, which is no member: it follows links, for evaluation and inference while training goes on.

Between two calls of `latest` a reader has:

    _replica    the `OwnAnchor` that it has read: outer parameters and state, without a residual
    _published  the version to return, these parameters in the dtypes to return
    _servers    the addresses of servers; the first one is asked
    _in_vain    how many fetches there were since an anchor was taken
    _next       when donors, the workers that send their anchor, may be asked again
    _worker     the number by which it names itself to servers and donors
"""

import collections
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxsparse.partial.net import messages, sockets, transfers
from jaxsparse.partial.net.messages import Piece, PieceKind
from jaxsparse.partial.net.sockets import Keys
from jaxsparse.partial.rounds import status
from jaxsparse.partial.rounds.anchor import OwnAnchor
from jaxsparse.partial.rounds.outer_step import OuterStep
from jaxsparse.types import Comm
from jaxsparse.weights.subscriber import Published

# bound of a message, in sizes of this reader's anchor, at first of parameters alone
_MOST_ARRAYS = 64


class Follower:
  """Reads the outer parameters of `js.partial.Rounds`, bit for bit as all workers have them after a round.

  The server says which workers have the last anchor. One of these sends the links since
  the version that is here; where the anchor is smaller, a few send a slice of it each.
  A digest proves the result. What is refused changes nothing.

  Args:
    address: of the server, or a list, as of `Rounds`; where a server does not answer,
      or has no workers, the next call of `latest` asks the next one.
    params: as of `Rounds`, or another pytree with these shapes.
    outer: the outer chain of the workers.
    fragments: as of the workers.
    dtype: of the leaves to return; by default those of `params`.
    rate: bytes a second, on average, that a worker sends to this reader at most.
    keys: as of `Rounds`.
    timeout: seconds without a byte of a worker after which others are asked.
    device: as of `Rounds`.

  Attributes:
    refused: why the last call of `latest` has no newer version, if one is there.

  Raises:
    ValueError: for an address that requires keys without them, the server's own keys,
      or a rate that is not above 0.

  Example:
    >>> import jax.numpy as jnp, optax, jaxsparse as js
    >>> outer = lambda comm: optax.chain(js.onebit_transform(comm), optax.sgd(1.0))
    >>> with js.partial.Server(js.partial.Quorum(1, quorum=1)) as server:
    ...   with js.partial.Rounds(server.address, 0, jnp.zeros(3), outer, every=1) as worker:
    ...     params = worker.step(worker.params + 0.5)
    ...     reader = js.partial.Follower(server.address, jnp.zeros(3), outer, dtype="bfloat16")
    ...     reader.latest()
    Published(version=1, params=Array([0.5, 0.5, 0.5], dtype=bfloat16))
  """

  def __init__(
    self,
    address: str | Sequence[str],
    params: optax.Params,
    outer: Callable[[Comm], optax.GradientTransformation],
    *,
    fragments: int = 1,
    dtype: Any = None,
    rate: float = 1e6,
    keys: Keys | None = None,
    timeout: float = 60.0,
    device: jax.Device | None = None,
  ):
    # The first one is asked; `_ask` moves it to the end if it is of no use.
    self._servers = collections.deque(sockets.servers(address, keys))
    if not rate > 0:
      raise ValueError(f"Follower: rate={rate!r}, choose more than 0 bytes a second")
    step = OuterStep(outer, fragments, device)
    self._worker = sockets.number_of(keys)
    # number of no member: a reader has no residual
    self._replica = OwnAnchor(step, step.start(params), worker=-1)
    self._dtypes = jax.tree.map(lambda leaf: dtype or jnp.result_type(leaf), params)
    self._keys = keys
    self._rate = rate
    self._timeout = timeout
    self._next = 0.0  # when donors may be asked again, so that they send at most `rate`
    self._in_vain = 0  # fetches since the last one that was taken
    # why the last call of `latest` has no newer version
    self.refused = list[str]()
    self._publish()

  def latest(self) -> Published:
    """The newest version that can be read, by the number of its round; the same object if there is no newer one.

    Before a version is read it returns the given parameters, as version 0.
    """
    self.refused = []
    if time.monotonic() < self._next:
      return self._published
    before = self._replica.anchor.position
    try:
      self._catch_up(self._ask())
    except (OSError, ValueError) as error:
      self.refused.append(str(error))
    if self._replica.anchor.position != before:
      self._in_vain = 0
      self._publish()
    return self._published

  def _ask(self) -> dict[str, Any]:
    """The status of a server; if it does not answer, or has no workers, the next call asks the next server."""
    # Moves this server to the end before it is asked, and back if it has workers: also
    # after an error the next call asks the next one.
    self._servers.rotate(-1)
    server = status.ask(self._servers[-1], self._keys)
    if server["workers"]:
      self._servers.rotate(1)
    return server

  def _publish(self) -> None:
    """Makes the anchor that is here the newest version, in the dtypes to return."""
    anchor = self._replica.anchor
    params = jax.tree.map(jnp.asarray, anchor.params, self._dtypes)
    self._published = Published(anchor.position.round, params)

  def _catch_up(self, server: dict[str, Any]) -> None:
    """Replaces the anchor here by that of the last round, from workers that have it, if it is another one.

    Args:
      server: the status of a server, as `status.ask` returns it.

    Raises:
      ValueError: for an anchor that is refused, or workers of several processes.
      TimeoutError: if a donor does not answer in time.
    """
    position = self._replica.anchor.position
    last = server["round"]
    base = server["base"]  # number of the group of the last round: tells branches apart
    donors = [
      worker["address"] for worker in server["workers"] if worker["base"] == base
    ]
    # `[:2]`: round and base
    if (last, base) == position[:2] or not donors:
      return
    if "," in donors[0]:
      raise ValueError("Follower: workers of several processes have a part each")
    donors = random.sample(donors, min(transfers.MOST_DONORS, len(donors)))
    model = self._fetch(donors, last)
    # A prefix alone: the donor has no links. The second fetch asks for slices.
    if model.values.size == transfers.PREFIX:
      model = self._fetch(donors, last)
    self._replica.adopt(model, base, server["digest"])

  def _fetch(self, donors: Sequence[str], round_: int) -> Piece:
    """What donors send, joined: links of one donor, or after a fetch in vain slices of the anchor, one of each donor.

    Args:
      donors: addresses of workers with the anchor.
      round_: number of the last round, whose anchor is asked for.

    Returns:
      MODEL, for `OwnAnchor.adopt`; a prefix alone if the donor has no links.

    Raises:
      TimeoutError: if one of them does not answer.
    """
    # The first donor, after one fetch in vain all of them, then the first one again.
    asked = transfers.choose(donors, self._in_vain)
    lineage = self._replica.anchor.lineage  # Links lead on from its last round.
    requests = transfers.requests(
      asked, self._in_vain, round_, self._worker, lineage.round, lineage.id or 0
    )
    # In vain until `latest` has taken the anchor, which sets it to 0.
    self._in_vain += 1
    return self._exchange(asked, requests)

  def _exchange(
    self, donors: Sequence[str], requests: Iterable[tuple[str, Piece]]
  ) -> Piece:
    """Sends a request to each donor; returns their answers, joined, as MODEL.

    Args:
      donors: their addresses, in the order of their slices.
      requests: the address of each, and FETCH.

    Raises:
      TimeoutError: if one donor is lost, or all are silent for `timeout` seconds.
    """
    replica = self._replica
    # bytes of a message that are accepted; the assembly counts words of 4 bytes
    longest = _MOST_ARRAYS * replica.outer.size(replica.anchor) + messages.LONGEST
    assembly = transfers.Assembly(longest // 4)
    models = list[Piece]()
    lost = list[str]()
    self._next = time.monotonic()
    until = self._next + self._timeout

    def answered(address: str, frames: list[bytes]) -> None:
      # Any message of a donor, WAITS too, begins the timeout anew.
      nonlocal until
      until = time.monotonic() + self._timeout
      # The next fetch waits until no donor has sent more than `rate` on average.
      self._next += sum(map(len, frames)) / len(donors) / self._rate
      piece = messages.parse_piece(frames)
      if (
        piece
        and piece.kind == PieceKind.MODEL
        and (model := assembly.add(address, piece, donors))
      ):
        models.append(model)

    network = sockets.Network(self._keys)
    peers = sockets.Peers(network, longest, answered, lost.append)
    try:
      for donor, request in requests:
        peers.send(donor, request)
      # One lost donor is the end: its slice would be missing.
      while not models and not lost and time.monotonic() < until:
        network.wait(0.1)
    finally:
      network.close(linger=0)
    if not models:
      raise TimeoutError(f"no anchor of {', '.join(lost or donors)}")
    return models[0]
