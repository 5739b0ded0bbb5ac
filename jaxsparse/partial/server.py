"""The controller over TCP: a small server that accepts signals of a few bytes and never receives a model.

worker 3 ── READY 17 ──────────> ROUTER ──> GroupServer or ──> Controller or Quorum.ready(3, 17)
workers 0, 3, 5 <── GROUP … ──── ROUTER <── RoundServer    <── WorkerGroup((0, 3, 5), …)
"""

import secrets
import threading
import time
from typing import Literal, Self

from jaxsparse.launch.rank import START_TIMEOUT
from jaxsparse.partial.groups.controller import Controller
from jaxsparse.partial.groups.server import GroupMember, GroupServer
from jaxsparse.partial.net import messages, sockets
from jaxsparse.partial.net.membership import Members
from jaxsparse.partial.net.sockets import Keys
from jaxsparse.partial.rounds.quorum import Quorum
from jaxsparse.partial.rounds.server import RoundMember, RoundServer

# seconds without a heartbeat after which the server drops a worker, or a worker misses
# the controller
LIMIT = 5.0


class Server:
  """Serves a controller until every worker has left.

  Args:
    controller: the state machine, a `Controller` or a `Quorum`; used by nothing else
      while it is served.
    address: where to listen, `tcp://HOST:PORT`; by default this machine's loopback, on
      any free port.
    keys: CURVE keys of the run, required for any address but loopback.
    limit: seconds without a heartbeat of a worker's thread after which the worker is
      dropped; "auto": 5, or three times as long as the worker has been silent lately, at
      most 20.
    start_timeout: seconds after which workers that have never joined are dropped.

  Attributes:
    address: where it listens, with the port.

  Raises:
    ValueError: for an address that requires keys without them, or times that are not
      above 0.
    ModuleNotFoundError: without pyzmq.
    zmq.ZMQError: if it cannot listen at the address.

  Example:
    >>> import jaxsparse as js
    >>> with js.partial.Server(js.partial.Controller(2, 2)) as server:  # serves in a thread
    ...   server.address.startswith("tcp://127.0.0.1:")
    True
  """

  def __init__(
    self,
    controller: Controller | Quorum,
    address: str = sockets.LOOPBACK,
    *,
    keys: Keys | None = None,
    limit: float | Literal["auto"] = "auto",
    start_timeout: float = START_TIMEOUT,
  ):
    sockets.check_address(address, keys)
    # The limit of a worker that was silent for long before is at most `most * limit`:
    # 20 s for "auto"; seconds that the caller gives are never extended.
    most = 1.0
    if limit == "auto":
      limit = LIMIT
      most = 4.0
    for name, value in (("limit", limit), ("start_timeout", start_timeout)):
      if not value > 0:
        raise ValueError(f"{name}={value!r}, choose more than 0 seconds")
    self._controller = controller
    self._limit = limit
    self._network = sockets.Network(keys)
    now = time.monotonic()
    # limit, now, and by worker the time at which it is dropped unless it has joined: a
    # `Controller` expects all workers, a `Quorum` has none alive at the start.
    times = limit, now, dict.fromkeys(controller.alive, now + start_timeout)
    self._protocol: GroupServer | RoundServer
    if isinstance(controller, Quorum):
      self._protocol = RoundServer(
        controller, Members(RoundMember, self._send, *times, most=most)
      )
    else:
      members = Members(GroupMember, self._send, *times, most=most)
      # Groups are numbered from a random number: late pieces for a group of an earlier
      # server at this address match no group of this one.
      self._protocol = GroupServer(controller, members, first=secrets.randbits(62))
    # The first frame is the connection, an identity that ZeroMQ's ROUTER prepends.
    receive = lambda frames: self._protocol.receive(
      frames[0], frames[1:], time.monotonic()
    )
    self._socket, self.address = self._network.bind(address, messages.LONGEST, receive)
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self.serve, daemon=True)

  @property
  def rejected(self) -> int:
    """How many messages were rejected."""
    return self._protocol.members.rejected

  def __enter__(self) -> Self:
    """Serves in a thread."""
    self._thread.start()
    return self

  def __exit__(self, *_: object) -> None:
    """Stops serving."""
    self._stop.set()
    self._thread.join()

  def serve(self) -> None:
    """Serves in this thread until every worker has left or was dropped."""
    try:
      while not self._controller.over and not self._stop.is_set():
        # handles messages; ticks come often enough for 10 heartbeats in `limit` seconds
        self._network.wait(min(0.1, self._limit / 10))
        self._protocol.tick(time.monotonic())
    finally:
      self._network.close(linger=0)

  def _send(self, connection: bytes, frame: bytes) -> bool:
    """Sends a frame to a connection without waiting; False if the connection is gone, or its queue is full."""
    return sockets.tell(self._socket, connection, frame)
