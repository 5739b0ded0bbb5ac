"""The controller over TCP: a small server that accepts signals of a few bytes and never receives a model.

    worker 3 ── READY 17 ──────────> ROUTER ──> ServerProtocol ──> Controller.ready(3, 17)
    workers 0, 3, 5 <── GROUP … ──── ROUTER <── ServerProtocol <── Group((0, 3, 5), …)

`jaxsparse.partial.server_protocol` decides how messages are answered and when a worker is dropped.
"""

import secrets
import threading
import time
from typing import Self

import zmq

from jaxsparse.launch.rank import START_TIMEOUT
from jaxsparse.partial import messages
from jaxsparse.partial.controller import Controller
from jaxsparse.partial.messages import Keys
from jaxsparse.partial.server_protocol import ServerProtocol

LIMIT = 5.0  # seconds without a heartbeat after which the server drops a worker, or a worker misses the controller
_MOST_AT_ONCE = 1000  # messages that are handled between two heartbeats


class Server:
  """Serves a controller until every worker has left.

  Args:
    controller: the state machine; used by nothing else while it is served.
    address: where to listen, `tcp://HOST:PORT`; by default this machine's loopback, on any free port.
    keys: CURVE keys of the run, required for any address but loopback.
    limit: seconds without a heartbeat of a worker's thread after which the worker is dropped.
    start_timeout: seconds after which workers that have never joined are dropped.

  Attributes:
    address: where it listens, with the port.
    taken: how many messages were accepted.
    rejected: how many messages were rejected.

  Raises:
    ValueError: for an address that requires keys without them, or times that are not above 0.
    zmq.ZMQError: if it cannot listen at the address.

  Example:
    >>> import jaxsparse as js
    >>> with js.partial.Server(js.partial.Controller(2, 2)) as server:  # serves in a thread
    ...   server.address.startswith("tcp://127.0.0.1:")
    True
  """

  def __init__(
    self,
    controller: Controller,
    address: str = messages.LOOPBACK,
    *,
    keys: Keys | None = None,
    limit: float = LIMIT,
    start_timeout: float = START_TIMEOUT,
  ):
    messages.check_address(address, keys)
    for name, value in (("limit", limit), ("start_timeout", start_timeout)):
      if not value > 0:
        raise ValueError(f"{name}={value!r}, choose more than 0 seconds")
    self._controller, self._limit = controller, limit
    self._context = zmq.Context()
    self._guard = messages.Guard(self._context, keys)
    self._socket = messages.secure(self._context.socket(zmq.ROUTER), keys, serves=True)
    self._socket.linger, self._socket.maxmsgsize = 0, messages.LONGEST
    self._socket.router_mandatory = True  # a message to a connection that is gone raises an error
    try:
      self._socket.bind(address)
    except zmq.ZMQError:
      self._close()
      raise
    self.address = messages.endpoint(self._socket)
    times = {"limit": limit, "start_timeout": start_timeout, "now": time.monotonic()}
    self._protocol = ServerProtocol(controller, self._send, **times, first=secrets.randbits(62))
    self._stop, self._thread = threading.Event(), threading.Thread(target=self.serve, daemon=True)

  @property
  def taken(self) -> int:
    """How many messages were accepted."""
    return self._protocol.taken

  @property
  def rejected(self) -> int:
    """How many messages were rejected."""
    return self._protocol.rejected

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
      while self._controller.alive and not self._stop.is_set():
        if self._socket.poll(round(1000 * min(0.1, self._limit / 10))):
          self._receive()
        self._protocol.tick(time.monotonic())
    finally:
      self._close()

  def _receive(self) -> None:
    for _ in range(_MOST_AT_ONCE):
      try:
        connection, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
      except zmq.Again:
        return
      self._protocol.receive(connection, frames, time.monotonic())

  def _send(self, connection: bytes, frame: bytes) -> bool:
    """Sends without waiting; whether the connection is there. A worker that does not read is dropped soon."""
    try:
      self._socket.send_multipart([connection, frame], zmq.NOBLOCK)
    except zmq.Again:
      return True
    except zmq.ZMQError as error:
      if error.errno != zmq.EHOSTUNREACH:
        raise
      return False
    return True

  def _close(self) -> None:
    self._guard.stop()
    self._socket.close()
    self._context.term()
