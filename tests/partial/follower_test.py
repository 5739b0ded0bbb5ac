"""Readers of rounds: the parameters of the workers bit for bit, and no voice in their rounds."""

import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from jaxsparse.partial.net import transfers
from jaxsparse.partial.rounds import follower, status
from jaxsparse.partial.rounds.anchor import OwnAnchor
from tests.partial.rounds_test import in_threads, join, serve

START = {"a": jnp.zeros(5000), "b": jnp.ones((50, 100))}


def outer(comm):
  return optax.chain(js.onebit_transform(comm), optax.sgd(0.7, momentum=0.9))


def noise(number, step):
  rows = np.random.default_rng((number, step)).standard_normal((2, 5000), np.float32)
  return {"a": rows[0], "b": rows[1].reshape(50, 100)}


def train(server, reads, rounds=4, workers=2):
  """Workers train; after each round worker 0 calls `reads(its anchor, the round)` before the next one begins."""

  def work(number):
    with join(server, number, START, outer, every=1, wait=60.0) as worker:
      params = worker.params
      for step in range(rounds):
        params = worker.step(jax.tree.map(jnp.add, params, noise(number, step)))
        if number == 0:
          reads(worker._exchanger.anchor.params, worker.round)

  in_threads(workers, work)


def read_from(server, **options):
  device = jax.devices()[5]
  return js.partial.Follower(server.address, START, outer, device=device, **options)


@pytest.fixture
def sent(monkeypatch):
  """Bytes of each slice that donors send."""
  sizes = []
  model = OwnAnchor.model

  def counted(self, request):
    piece = model(self, request)
    sizes.append(piece.values.nbytes)
    return piece

  monkeypatch.setattr(OwnAnchor, "model", counted)
  return sizes


def test_a_follower_has_the_parameters_of_each_round_by_links_and_is_no_worker(sent):
  with serve(2, grace=60.0) as server:
    exact = read_from(server, rate=1e9)
    half = read_from(server, rate=1e9, dtype="bfloat16")
    assert exact.latest().version == 0
    seen = []

    def reads(anchor, round_):
      time.sleep(0.3)  # the other worker knows that the round counts, links are packed
      version, params = exact.latest()
      assert exact.refused == []
      assert version == round_
      jax.tree.map(np.testing.assert_array_equal, params, anchor)
      halved = half.latest()
      assert halved.version == round_
      cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), anchor)
      jax.tree.map(np.testing.assert_array_equal, halved.params, cast)
      assert exact.latest() is exact.latest()
      asked = status.ask(server.address)
      assert {worker["worker"] for worker in asked["workers"]} <= {0, 1}
      seen.append(version)

    train(server, reads)
  assert seen == [1, 2, 3, 4]
  assert exact._replica._links
  whole = 2 * 4 * 10_000
  # of each later version two readers got a link
  assert sum(sent) < 2 * (whole + 4 * whole / 8)


def test_a_donor_sends_a_follower_at_most_the_rate_that_it_has_set(sent):
  """Meanwhile it has the version of before."""
  with serve(1, quorum=1) as server:
    reader = read_from(server, rate=1.0)
    found = []

    def reads(*_):
      time.sleep(0.3)  # links are packed
      found.append(reader.latest())

    train(server, reads, workers=1)
  assert [version for version, _ in found] == [1] * 4
  assert len(sent) == 1
  assert reader._next > time.monotonic() + sent[0] - 60


def test_what_a_donor_sends_wrongly_is_refused_and_then_asked_for_whole(monkeypatch):
  """The reader keeps what it has; whoever is not there ends nothing."""
  model = OwnAnchor.model

  def wrong(self, request):
    piece = model(self, request)
    is_long = piece.values.size > transfers.PREFIX + 40
    if is_long and request.values.view(np.int64)[0] > 0:  # links
      values = piece.values.copy()
      values.view(np.uint32)[transfers.PREFIX + 40] ^= 1
      piece = piece._replace(values=values)
    return piece

  monkeypatch.setattr(OwnAnchor, "model", wrong)
  with serve(1, quorum=1) as server:
    reader = read_from(server, rate=1e9)
    found = []

    def reads(_, round_):
      time.sleep(0.3)
      found.append((round_, reader.latest().version, len(reader.refused)))

    train(server, reads, workers=1)
  assert found == [(1, 1, 0), (2, 1, 1), (3, 3, 0), (4, 3, 1)]
  kept = reader.latest()
  assert kept.version == 3
  assert reader.refused


def test_a_follower_asks_the_next_server_where_one_is_lost_or_has_no_workers(
  monkeypatch,
):
  monkeypatch.setattr(status, "_TIMEOUT", 0.3)
  with (
    js.partial.Server(js.partial.Quorum(1, quorum=1)) as first,
    serve(1, quorum=1) as second,
  ):
    addresses = ["tcp://127.0.0.1:1", first.address, second.address]
    reader = js.partial.Follower(addresses, START, outer, rate=1e9)
    found = []

    def reads(*_):
      time.sleep(0.3)
      found.append((reader.latest().version, len(reader.refused)))

    train(second, reads, workers=1)
  # from then on at the same server
  assert found == [(0, 1), (0, 0), (3, 0), (4, 0)]


def test_only_workers_of_the_last_round_are_asked_for_its_anchor():
  """There may be workers that have been through as many other rounds."""
  reader = js.partial.Follower("tcp://127.0.0.1:1", START, outer)
  found = []

  def exchange(donors, _):
    found.extend(donors)
    raise TimeoutError

  reader._exchange = exchange
  has = lambda address, base: {"address": address, "round": 3, "base": base}
  workers = [has("tcp://a:1", 8), has("tcp://b:1", 7), has("tcp://c:1", 8)]
  reader._in_vain = 1  # of all donors a slice
  with pytest.raises(TimeoutError):
    reader._catch_up({"round": 3, "base": 7, "digest": 1, "workers": workers})
  assert found == ["tcp://b:1"]


@pytest.mark.parametrize(
  ("gap", "chunks_sent", "is_there"),
  [(0.9, 30, True), (1.1, 0, False), (0.9, 9, False)],
)
def test_a_fetch_may_take_as_long_as_it_takes_while_bytes_come(
  monkeypatch, gap, chunks_sent, is_there
):
  """Of 15.5 M entries at 10 Mbit/s for example 50 s: it is silence that ends a fetch.

  What a donor has sent in vain counts for the rate, too.
  """
  clock = [0.0]
  sent = []
  words = np.arange(30 << 14, dtype=np.float32)
  chunks = transfers.split(transfers.Piece(transfers.PieceKind.MODEL, 1, 0, words))

  class Network:
    def __init__(self, *_):
      pass

    due = gap

    def wait(self, seconds):
      clock[0] += seconds
      if clock[0] > self.due and len(sent) < chunks_sent:
        self.due += gap
        frames = [bytes(frame) for frame in next(chunks).pack()]
        sent.append(sum(map(len, frames)))
        self.answered("tcp://a:1", frames)

    def close(self, linger):
      pass

  class Peers:
    def __init__(self, network, longest, answered, lost):
      network.answered = answered

    def send(self, *_):
      pass

  reader = js.partial.Follower("tcp://127.0.0.1:1", START, outer, timeout=1.0)
  times = types.SimpleNamespace(monotonic=lambda: clock[0])
  monkeypatch.setattr(follower, "time", times)
  monkeypatch.setattr(follower.sockets, "Network", Network)
  monkeypatch.setattr(follower.sockets, "Peers", Peers)
  if is_there:
    np.testing.assert_array_equal(reader._fetch(["tcp://a:1"], 1).values, words)
    assert clock[0] > 20 * reader._timeout
  else:
    with pytest.raises(TimeoutError, match="no anchor of tcp://a:1"):
      reader._fetch(["tcp://a:1"], 1)
  assert len(sent) == chunks_sent
  assert reader._next == pytest.approx(sum(sent) / 1e6)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"rate": 0}, "rate=0, choose more than 0"),
    ({"address": "tcp://10.0.0.1:5"}, "give keys"),
    ({"address": "10.0.0.1"}, "choose tcp://HOST:PORT"),
    ({"address": ["tcp://127.0.0.1:1", "10.0.0.1"]}, "choose tcp://HOST:PORT"),
    ({"address": []}, "choose tcp://HOST:PORT"),
  ],
)
def test_bad_arguments_of_a_follower(options, message):
  arguments = {"address": "tcp://127.0.0.1:1"} | options
  with pytest.raises(ValueError, match=message):
    js.partial.Follower(params=START, outer=outer, **arguments)
