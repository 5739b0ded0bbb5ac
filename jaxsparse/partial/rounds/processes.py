"""The processes of a worker, its parts: they meet when it starts, and their training loops go on together.

Part 0, the lead, speaks to the server of rounds, and is the server of the other parts.
"""

import atexit
import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxsparse.launch import rank
from jaxsparse.partial.net import messages, sockets
from jaxsparse.partial.net.endpoint import Endpoint
from jaxsparse.partial.net.membership import Member, Members, Membership
from jaxsparse.partial.net.messages import Next
from jaxsparse.partial.rounds.exchanger import Exchanger
from jaxsparse.partial.rounds.parts import (
  Decision,
  LeadProtocol,
  PartLost,
  PartProtocol,
)
from jaxsparse.partial.rounds.protocol import RoundProtocol
from jaxsparse.partial.rounds.slices import Whole

_LONGEST = 1 << 10  # bytes of an address, or of an error
# seconds in which the training loop may end its step, and raise that a part is lost
_LAST_STEP = 3.0
# seconds in which the other parts raise an error and end: once the process of part 0,
# with JAX's coordinator, has ended, JAX aborts them
_LAST_WORDS = 1.0
_FAILED = "!"  # begins an error


class PartEndpoint(Endpoint):
  """The endpoint of a worker, or of one part of it; the server of all parts but the lead is the lead.

  Attributes:
    hear_part: at the lead, takes a message of another part; None elsewhere.
    _last_answer: an exception, which every request raises once the thread has ended.
    _end: a timer that ends the process, once a part is lost.
  """

  # takes signals of the other parts, at the lead
  hear_part: Callable[[bytes, list[bytes], float], None] | None = None
  _end: threading.Timer  # ends the process, once a part is lost

  def follow(self, lead: str) -> None:
    """From now on the server is the first part of this worker, at this address."""
    self._servers = itertools.cycle([lead])
    self.switch()

  def tell_part(self, connection: bytes, frame: bytes) -> bool:
    """Sends an answer to a part of this worker; whether the connection is there."""
    return sockets.tell(self._data, connection, frame)

  def check_parts(self) -> None:
    """Raises PartLost if the thread has ended since a part of this worker is lost."""
    if isinstance(self._last_answer, PartLost):
      self._end.cancel()
      raise self._last_answer

  def take(self, seconds: float | None = None) -> Any:
    """The next answer, as `Endpoint.take` returns it; who raises `PartLost` ends the process itself."""
    try:
      return super().take(seconds)
    except PartLost:
      self._end.cancel()
      raise

  def _end_by(self, error: Exception) -> None:
    """Every request raises `error` from now on; a lost part also ends this process soon, as JAX would wait for it."""
    super()._end_by(error)
    if isinstance(error, PartLost):
      # JAX waits for the lost part in a step, which the timer ends, or in its own exit
      # handlers, before which this handler runs.
      atexit.register(rank.fail, error)
      self._end = threading.Timer(_LAST_STEP, rank.fail, [error])
      self._end.daemon = True
      self._end.start()

  def _from_worker(self, frames: list[bytes]) -> None:
    """Handles a message to the address of this process: a signal of another part, or a piece of another worker."""
    connection, *content = frames
    if self.hear_part and not messages.parse_piece(content):
      self.hear_part(connection, content, time.monotonic())
    else:
      super()._from_worker(frames)


@contextlib.contextmanager
def errors_told(place: Whole) -> Iterator[None]:
  """An error of one part in a `with` block is raised by all, which would wait for it in `make_protocol`."""
  if place.parts > 1:
    # An uncaught exception ends this process at once: an exit would wait for the
    # others.
    rank.fail_on_exceptions()
  try:
    yield
  except Exception as error:
    # The other parts meet in `make_protocol`, and get this text in place of an address.
    if place.parts > 1:
      _meet(f"{_FAILED}{error}")
    raise


def _meet(text: str) -> list[str]:
  """The texts of all parts, in their order; each part calls it with its own, and waits for the others.

  Raises:
    ValueError: for the error of another part.
  """
  # An all-gather takes arrays of one shape: a long text is cut, maybe in a character.
  encoded = np.frombuffer(text.encode()[:_LONGEST].ljust(_LONGEST), np.uint8)
  texts = [
    bytes(row).decode(errors="replace").strip()
    for row in multihost_utils.process_allgather(encoded)
  ]
  # Part 0 ends last: with it JAX's coordinator ends, and aborts the others.
  if jax.process_index() == 0 and any(other.startswith(_FAILED) for other in texts):
    time.sleep(_LAST_WORDS)
  for part, other in enumerate(texts):
    if other.startswith(_FAILED) and not text.startswith(_FAILED):
      raise ValueError(f"part {part} of this worker: {other.removeprefix(_FAILED)}")
  return texts


def make_protocol(
  place: Whole,
  endpoint: PartEndpoint,
  membership: Membership,
  exchange: Exchanger,
  entries: int,
  servers: int,
) -> RoundProtocol:
  """The protocol of a worker of one process, or of a part of one of several, which meet here.

  Args:
    place: the part, and how many there are.
    endpoint: of this process.
    membership: the place of the worker at its server.
    exchange: runs the exchanges.
    entries: of the parameters that this process exchanges.
    servers: how many addresses of servers there are.
  """
  if place.parts == 1:
    return RoundProtocol(membership, exchange, entries, endpoint.switch, servers)
  # This is also a barrier: all parts listen before the first signal is sent.
  addresses = _meet(endpoint.address)
  if place.part:  # not part 0, the lead

    def miss_lead() -> None:
      raise PartLost(
        f"part 0 of worker {membership.worker} has been silent for {membership.limit:g} s"
      )

    endpoint.follow(addresses[0])
    return PartProtocol(membership, exchange, entries, miss_lead)
  members = Members(Member, endpoint.tell_part, membership.limit, membership.now)
  lead = LeadProtocol(
    membership,
    exchange,
    entries,
    endpoint.switch,
    servers,
    others=members,
    addresses=addresses,
  )
  endpoint.hear_part = lead.hear_part
  return lead


def take(place: Whole, endpoint: Endpoint, wait: float | None = None) -> Any:
  """The answer to the open request, or `Next.LATER` after `wait` seconds (None: never); at all parts the lead's."""
  if place.part:
    # The lead sends its decision also when there is no answer, so the wait ends.
    return endpoint.take()
  try:
    answer = endpoint.take(wait)
  except queue.Empty:
    answer = Next.LATER
  # Tells the other parts, which wait above.
  if place.parts > 1:
    endpoint.post(Decision(answer))
  return answer
