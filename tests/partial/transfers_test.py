"""Models in chunks: a transfer goes on while bytes come, and is asked for again a few seconds after the last one."""

import contextlib
import socket
import threading
import time
from unittest import mock

import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxsparse as js
from jaxsparse.partial.net import sockets, transfers
from jaxsparse.partial.net.endpoint import Endpoint
from jaxsparse.partial.net.membership import Membership
from jaxsparse.partial.net.messages import Piece, PieceKind
from jaxsparse.partial.net.transfers import Assembly, Transfers, split

DONOR = "tcp://127.0.0.1:7"


def model(size, number=7):
  return Piece(PieceKind.MODEL, number, 3, np.arange(size, dtype=np.float32))


@given(st.integers(0, 10**6), st.integers(0, 100), st.booleans())
def test_chunks_are_joined_also_after_a_transfer_that_has_not_ended(
  size, before, others
):
  """From another donor, or the same one, which has been asked again."""
  assembly = Assembly(longest=3 * 10**6)
  add = lambda donor, chunk: assembly.add(donor, chunk, [donor])
  for chunk in list(split(model(2 * 10**6)))[:before]:
    assert add("tcp://h:1" if others else DONOR, chunk) is None
  *chunks, last = split(model(size, number=8))
  assert all(add(DONOR, chunk) is None for chunk in chunks)
  whole = add(DONOR, last)
  assert whole.tag == 0
  np.testing.assert_array_equal(whole.values, model(size).values)


def test_a_forged_model_does_not_fill_the_memory():
  assembly = Assembly(longest=1000)
  for tag in range(4000, -1, -1):
    chunk = Piece(PieceKind.MODEL, 7, 3, np.zeros(100, np.float32), tag)
    assembly.add(DONOR, chunk, [DONOR])
    kept = assembly._chunks.get(DONOR, [])
    assert sum(chunk.values.size for chunk in kept) <= 1000
  assert assembly.add(DONOR, chunk._replace(tag=10**9), [DONOR]) is None
  assert assembly._chunks == {DONOR: []}


def sliced(content, donors, number=7):
  """The slices of a model, as several donors send them."""
  cuts = [content.size * cut // donors for cut in range(donors + 1)]
  for index in range(donors):
    prefix = np.array([5, content.size, index, donors], np.int64).view(np.float32)
    values = np.concatenate([prefix, content[cuts[index] : cuts[index + 1]]])
    yield Piece(PieceKind.MODEL, number, index, values)


@settings(max_examples=50)
@given(st.integers(0, 10**5), st.integers(1, 4), st.randoms(), st.booleans())
def test_slices_are_joined_in_whatever_order_their_chunks_come(
  size, count, random, is_late
):
  """Also if a slice for an earlier request, of fewer donors, comes first."""
  content = np.arange(size, dtype=np.float32)
  donors = [f"tcp://h:{number + 1}" for number in range(count)]
  assembly = Assembly(longest=10**6)
  if is_late and count > 1:
    old, *_ = sliced(content, count + 1)
    for chunk in split(old):
      assert assembly.add(donors[-1], chunk, donors) is None
  queues = [list(split(piece)) for piece in sliced(content, count)]
  found = []
  while any(queues):
    number = random.choice([index for index, queue in enumerate(queues) if queue])
    found.append(assembly.add(donors[number], queues[number].pop(0), donors))
  *before, whole = found
  assert not any(before)
  np.testing.assert_array_equal(whole.values[transfers.PREFIX :], content)
  assert whole.values[:4].view(np.int64).tolist() == [5, size]


def test_a_transfer_goes_on_while_bytes_come_and_is_asked_for_again_soon_after_the_last_one():
  asked, closed = [], []
  quiet = lambda *_: None
  send = lambda *request: asked.append(request)
  place = Membership(
    1, "tcp://a:1", 60.0, 0.0, quiet, send, quiet, 60.0, disconnect=closed.append
  )
  place.enter(1000.0, DONOR)
  place.fetch()
  now = 0.0
  while now < 500:
    now += 1.0
    place.tick(now)
    if now % 9 == 0:
      place.hear_donor()
    assert place.state == "fetching"
  while place.state == "fetching":
    now += 1.0
    place.tick(now)
  assert 500 < now < 512
  assert closed == [DONOR]


def test_what_others_send_is_no_sign_of_the_donor():
  endpoint = Endpoint.__new__(Endpoint)
  membership = mock.Mock(donors=[DONOR])
  endpoint._protocol = mock.Mock(membership=membership)
  waits = [bytes(frame) for frame in Piece(PieceKind.WAITS, 0, 1).pack()]
  endpoint._from_peer("tcp://another:1", waits)
  assert not membership.hear_donor.called
  endpoint._from_peer(DONOR, waits)
  assert membership.hear_donor.called


def test_who_waits_is_told_so_once_a_second():
  waiting = Transfers()
  for peer in ("a", "b"):
    waiting.ask(peer, Piece(PieceKind.FETCH, 0, 1), now=10.0)
  told = [waiting.waiting(10.0 + tenth / 10) for tenth in range(30)]
  assert [peers for peers in told if peers] == [["a", "b"]] * 3


class Proxy:
  """Before an address: a connection on which a frame of more than 700 bytes comes while there is a `hole` is dead.

  Nothing more passes, and its ends do not reach each other. This is what a smaller MTU
  on the way does, and a middlebox that forgets connections.
  """

  def __init__(self, address):
    host, port = address.removeprefix("tcp://").split(":")
    self.target = host, int(port)
    self.hole = False
    self.dead = 0
    self.listener = socket.create_server(("127.0.0.1", 0))
    self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
    self.sockets = [self.listener]
    self.start(self.accept)

  def start(self, work, *content):
    threading.Thread(target=work, args=content, daemon=True).start()

  def close(self):
    for end in self.sockets:
      with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
      end.close()

  def accept(self):
    while True:
      try:
        client, _ = self.listener.accept()
      except OSError:  # it is closed
        return
      server = socket.create_connection(self.target)
      self.sockets += client, server
      alive = threading.Event()
      alive.set()
      for ends in ((client, server), (server, client)):
        self.start(self.pump, *ends, alive)

  def pump(self, source, sink, alive):
    while True:
      try:
        content = source.recv(1 << 16)
      except OSError:
        content = b""
      if self.hole and len(content) > 700:
        self.dead += alive.is_set()
        alive.clear()
      if not alive.is_set():
        return
      with contextlib.suppress(OSError):
        sink.sendall(content) if content else sink.shutdown(socket.SHUT_RDWR)
      if not content:
        return


def test_a_newcomer_whose_fetch_falls_into_a_hole_has_the_anchor_soon_after_it(
  monkeypatch,
):
  """Its connections stay open, and nothing comes: it does not wait for the timeout of 200 s."""
  monkeypatch.setattr(transfers, "STALLED", 1.0)
  proxies = []
  bind = sockets.Network.bind

  def bind_behind_a_proxy(network, *facts, **options):
    bound, address = bind(network, *facts, **options)
    if "closes_stalled" in options:
      proxies.append(Proxy(address))
      address = proxies[-1].address
    return bound, address

  monkeypatch.setattr(sockets.Network, "bind", bind_behind_a_proxy)
  outer = lambda comm: optax.chain(js.dense_transform(comm), optax.sgd(1.0))
  start = jnp.zeros(2000)
  options = {"every": 2, "timeout": 200.0, "wait": 0.0}
  ends = threading.Event()

  def train():
    with js.partial.Rounds(server.address, 0, start, outer, **options) as worker:
      params = worker.params
      while not ends.is_set():
        params = worker.step(params + 1)
        time.sleep(0.05)

  with js.partial.Server(js.partial.Quorum(2, quorum=1, grace=0.1)) as server:
    trains = threading.Thread(target=train)
    trains.start()
    try:
      while server._controller.position.round < 2:
        time.sleep(0.05)
      proxies[0].hole = True
      heal = threading.Timer(3.0, setattr, (proxies[0], "hole", False))
      heal.start()
      began = time.monotonic()
      with js.partial.Rounds(server.address, 1, start, outer, **options) as worker:
        assert worker.round >= 2
        assert proxies[0].dead >= 1
        assert time.monotonic() - began < 100
    finally:
      ends.set()
      trains.join()
      for proxy in proxies:
        proxy.close()
