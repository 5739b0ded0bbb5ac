"""The server and workers over real sockets: TCP, CURVE keys, and connections that break."""

import contextlib
import struct
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zmq

import jaxsparse as js
from jaxsparse.partial import messages, sockets
from jaxsparse.partial.messages import Answer, Kind, Piece, Says, Signal

ADDRESS = "tcp://127.0.0.1:9"


class Client:
  """A connection to the server that can send anything."""

  def __init__(self, context, address, keys=None):
    self.socket = context.socket(zmq.DEALER)
    if keys:
      self.socket.curve_publickey, self.socket.curve_secretkey, self.socket.curve_serverkey = *keys, keys.public
    self.socket.linger = 0
    self.socket.connect(address)

  def say(self, *frames):
    self.socket.send_multipart([frame.pack() if isinstance(frame, Signal) else frame for frame in frames])

  def hear(self, wanted=tuple(set(Answer) - {Answer.BEAT})):
    """The next answer that is not a periodic heartbeat."""
    while True:
      assert self.socket.poll(5000), "no answer"
      kind, content = messages.parse_answer(self.socket.recv())
      if kind in wanted:
        return kind, content

  def ask(self, *frames):
    self.say(*frames)
    return self.hear()


@contextlib.contextmanager
def served(workers=4, size=2, clients=4, **options):
  context = zmq.Context()
  controller = js.partial.Controller(workers, size)
  with js.partial.Server(controller, **options) as server:
    try:
      yield server, [Client(context, server.address) for _ in range(clients)]
    finally:
      context.destroy(linger=0)


def at_once(workers, train, address):
  """Runs `train(number, address)` of each worker in a thread of its own."""
  threads = [threading.Thread(target=train, args=(number, address)) for number in range(workers)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)


def hello(client, worker):
  kind, _ = client.ask(Signal(Says.HELLO, worker, 0, ADDRESS))
  assert kind == Answer.WELCOME


def test_a_donor_that_cannot_be_reached_holds_a_worker_up_only_until_the_timeout():
  context = zmq.Context()
  with js.partial.Server(js.partial.Controller(2, 2)) as server:
    silent = Client(context, server.address)
    come = Signal(Says.HELLO, 1, 3, "tcp://127.0.0.1:1")
    silent.ask(come)
    silent.say(Signal(Says.READY, 1, 5))
    silent.ask(come)  # READY has been received by now
    with pytest.raises(RuntimeError, match="worker 0: no model from tcp://127.0.0.1:1 for 1 s|no WELCOME .* for 1 s"):
      js.partial.Worker(server.address, 0, jnp.zeros(3), timeout=1)
    context.destroy(linger=0)


def test_an_oversized_message_to_the_server_ends_its_connection_only():
  with served(workers=2, clients=2) as (_, clients):
    hello(clients[0], 0)
    clients[1].say(b"x" * (messages.LONGEST + 1))
    assert not clients[1].socket.poll(200)
    clients[0].say(Signal(Says.BEAT, 0))
    assert clients[0].hear(set(Answer))[0] == Answer.BEAT


def test_an_oversized_message_to_a_worker_ends_its_connection():
  context, controller = zmq.Context(), js.partial.Controller(2, 2)
  with js.partial.Server(controller) as server, js.partial.Worker(server.address, 0, jnp.zeros(3)) as worker:
    stranger = context.socket(zmq.DEALER)
    monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    stranger.connect(sockets.endpoint(worker._runtime._data))
    stranger.send(bytes(12 + messages.LONGEST + 1))
    assert monitor.poll(5000)
  context.destroy(linger=0)


@pytest.mark.parametrize("waits", [True, False])
def test_forged_pieces_do_not_pile_up(waits, caplog):
  """Each has the size of the model; the worker waits for its group, or computes.

  The test counts the entries that the worker keeps. The memory of the process holds the forger's messages as well.
  """
  entries, forged = 1_000_000, 60
  controller, context, found = js.partial.Controller(3, 2), zmq.Context(), []
  with js.partial.Server(controller) as server, js.partial.Worker(server.address, 0, jnp.zeros(entries)) as worker:
    body = lambda: found.append(worker.reduce(jnp.ones(entries), 1)[0])
    thread = threading.Thread(target=body, daemon=True)
    if waits:
      thread.start()
      while not controller.waiting:
        time.sleep(0.01)
    stranger = context.socket(zmq.DEALER)
    stranger.connect(sockets.endpoint(worker._runtime._data))
    for sender in range(forged):
      stranger.send_multipart([struct.pack("!BqH", 3, 10**6, 100 + sender), bytes(4 * entries)])
    stranger.send_multipart([struct.pack("!BqH", 1, 0, 9), b""])  # FETCH, answered after all pieces have been received
    assert stranger.poll(30000)
    early = worker._runtime._protocol._early._parts.values()
    assert sum(part.values.size for part in early) == (entries if waits else 0)
    stranger.close(linger=0)
    if not waits:
      thread.start()
    with js.partial.Worker(server.address, 1, jnp.zeros(entries)) as other:
      assert float(other.reduce(jnp.zeros(entries), 2)[0].max()) == 0.5  # the pieces had no effect
    thread.join(60)
  context.destroy(linger=0)
  assert float(found[0].min()) == 0.5
  said = "worker 0: 1000000 entries for group 1000000 from worker 101 are dropped"
  assert [said in record.getMessage() for record in caplog.records] == [True] * waits


def test_a_worker_whose_connection_is_gone_is_dropped_long_before_the_limit():
  with served(limit=5) as (server, clients):
    for worker, client in enumerate(clients):
      hello(client, worker)
    clients[2].socket.close()
    begin = time.monotonic()
    clients[0].say(Signal(Says.READY, 0, 1))
    while 2 in server._controller.alive:
      time.sleep(0.01)
      assert time.monotonic() - begin < 3
    assert server._controller.alive == (0, 1, 3)


def test_the_number_of_a_living_worker_is_refused_at_once():
  """Long before the limit; the living worker continues."""
  with js.partial.Server(js.partial.Controller(3, 2), limit=30) as server:
    with js.partial.Worker(server.address, 0, jnp.zeros(3)) as worker:
      begin = time.monotonic()
      message = "worker 0: taken: a living worker has the number 0, choose another number of 0 … 2"
      with pytest.raises(ValueError, match=message):
        js.partial.Worker(server.address, 0, jnp.zeros(3), timeout=10)
      assert time.monotonic() - begin < 5
      with js.partial.Worker(server.address, 1, jnp.zeros(3)) as other:
        thread = threading.Thread(target=other.reduce, args=(jnp.zeros(3), 1))
        thread.start()
        assert worker.reduce(jnp.ones(3), 1)[0].tolist() == [0.5] * 3
        thread.join(60)
    js.partial.Worker(server.address, 0, jnp.zeros(3), timeout=10).leave()


def test_the_number_of_a_dead_worker_is_free_again():
  """Its successor waits until the server notices the death; a rival that was rejected before has no effect."""
  with served(clients=2, limit=5) as (server, (first, second)):
    hello(first, 0)
    for reason in ("duplicate: worker 0", "taken: a living worker has the number 0"):
      assert second.ask(Signal(Says.HELLO, 0, 0, ADDRESS))[1]["reason"].startswith(reason)
      assert first.hear()[0] == Answer.PROBE
      first.say(Signal(Says.BEAT, 0))
      time.sleep(0.1)
    first.socket.close()
    js.partial.Worker(server.address, 0, jnp.zeros(3), timeout=20).leave()


def test_the_server_ends_if_no_worker_comes():
  server = js.partial.Server(js.partial.Controller(2, 2), start_timeout=0.2)
  begin = time.monotonic()
  server.serve()
  assert time.monotonic() - begin < 3


def test_only_workers_with_the_keys_can_join():
  keys, context = js.partial.Keys.make(), zmq.Context()
  with js.partial.Server(js.partial.Controller(2, 2), keys=keys) as server:
    friend, stranger, plain = (Client(context, server.address, k) for k in (keys, js.partial.Keys.make(), None))
    other = js.partial.Keys.make()  # knows the server's public key, has none that the server knows
    stranger.socket.close()
    stranger = Client(context, server.address, js.partial.Keys(*other))
    stranger.socket.curve_serverkey = keys.public
    hello(friend, 0)
    for client in (stranger, plain):
      with contextlib.suppress(zmq.Again):  # the connection may have been refused by then
        client.socket.send(Signal(Says.HELLO, 1, 0, ADDRESS).pack(), zmq.NOBLOCK)
      assert not client.socket.poll(300)
    for wrong in (None, js.partial.Keys.make()):
      with pytest.raises(js.partial.ControllerLost, match=r"no WELCOME from the controller at .* for 0.5 s"):
        js.partial.Worker(server.address, 1, jnp.zeros(1), keys=wrong, timeout=0.5)
    context.destroy(linger=0)


@pytest.mark.parametrize(
  ("address", "message"),
  [
    ("tcp://*:2900", r"tcp://\*:2900 can be reached from other machines: give keys"),
    ("tcp://10.0.0.1:*", r"can be reached from other machines"),
    ("tcp://node7:2900", r"can be reached from other machines"),
    ("ipc://here", r"choose tcp://HOST:PORT"),
    ("tcp://127.0.0.1:x", r"choose tcp://HOST:PORT"),
  ],
)
def test_bad_addresses(address, message):
  with pytest.raises(ValueError, match=message):
    js.partial.Server(js.partial.Controller(2, 2), address)


def test_a_worker_has_to_bind_to_an_address_that_others_reach():
  with pytest.raises(ValueError, match="can be reached from other machines"):
    js.partial.Worker(ADDRESS, 0, jnp.zeros(1), bind="tcp://10.0.0.1:*")
  with pytest.raises(ValueError, match="name the address of this machine that the other workers reach"):
    js.partial.Worker(ADDRESS, 0, jnp.zeros(1), bind="tcp://*:2900", keys=js.partial.Keys.make())


@pytest.mark.parametrize("keys", [None, js.partial.Keys.make()], ids=["plain", "curve"])
def test_workers_average_and_keep_the_sum(keys):
  """Groups with constant weights keep the sum of all models, since W is doubly stochastic."""
  controller, found, together = js.partial.Controller(4, 2), {}, {}

  def train(number, address):
    with js.partial.Worker(address, number, jnp.zeros(7), keys=keys) as worker:
      params, iteration = (
        jnp.full(7, float(number)),
        0,
      )  # not `worker.params`, which may be another worker's
      for _ in range(6):
        params, iteration = worker.reduce(params, iteration + 1)
      found[number] = np.asarray(params)
      params, _ = worker.synchronize(params, iteration)
      together[number] = np.asarray(params)

  with js.partial.Server(controller, keys=keys) as server:
    at_once(4, train, server.address)
  assert len(found) == 4
  np.testing.assert_allclose(sum(found.values()), 6.0, rtol=1e-5)
  assert np.ptp([model[0] for model in found.values()]) < 3
  np.testing.assert_allclose(together[0], 1.5, rtol=1e-5)
  assert len({model.tobytes() for model in together.values()}) == 1


def test_a_worker_that_leaves_right_after_an_average_spoils_it_for_no_other():
  """Its last pieces may be in transit when it closes its connections."""
  entries, found = 300_000, []

  def train(number, address):
    with js.partial.Worker(address, number, jnp.zeros(entries)) as worker:
      found.append(np.asarray(worker.reduce(jnp.full(entries, number, jnp.float32), 1)[0]))

  for _ in range(5):
    with js.partial.Server(js.partial.Controller(3, 3)) as server:
      at_once(3, train, server.address)
  assert len(found) == 15
  for model in found:
    np.testing.assert_allclose(model, 1, rtol=1e-6)


def test_a_member_that_sends_nothing_is_not_waited_for():
  """The server takes it for alive, but no piece arrives: the worker gives the average up and is ready again."""
  context = zmq.Context()
  with js.partial.Server(js.partial.Controller(2, 2)) as server:
    silent = Client(context, server.address)
    assert silent.ask(Signal(Says.HELLO, 1, 3, ADDRESS))[0] == Answer.WELCOME
    with js.partial.Worker(server.address, 0, jnp.zeros(3), timeout=1) as worker:
      thread = threading.Thread(target=worker.reduce, args=(jnp.ones(3), 1))
      thread.start()
      silent.say(Signal(Says.READY, 1, 1))
      number = silent.hear()[1]["number"]
      assert silent.hear() == (Answer.ABORT, {"number": number, "worker": 0})
      silent.say(Signal(Says.BYE, 1, number))
      thread.join(60)
      assert not thread.is_alive()  # alone, in a group of one
    context.destroy(linger=0)


@pytest.mark.parametrize("place", ["file", "no folder"])
def test_every_call_after_the_controller_is_lost_raises_it_and_leaving_ends_normally(tmp_path, place):
  """The parameters are saved, whatever their dtype, or the error says why not; the training loop made no call."""
  params = {"w": jnp.full((2, 3), 1.5, jnp.bfloat16), "b": jnp.zeros(4)}
  path = tmp_path / ("saved.npz" if place == "file" else "missing/saved.npz")
  server = js.partial.Server(js.partial.Controller(2, 2), limit=0.5).__enter__()
  with js.partial.Worker(server.address, 0, params, save=path, reconnect=0.3) as worker:
    server._controller.leave(1)
    held = worker.reduce(params, 3)
    server.__exit__()
    worker._runtime.join(60)
    for call in (worker.reduce, worker.reduce, worker.synchronize):
      with pytest.raises(
        js.partial.ControllerLost, match=r"no sign of life from the controller at .* for 0.8 s"
      ) as found:
        call(params, 4)
  if place == "file":
    found, iteration = js.partial.restore(path, params)
    assert iteration == 3
    assert jax.tree.map(lambda leaf: (leaf.dtype, leaf.tolist()), found) == jax.tree.map(
      lambda leaf: (leaf.dtype, leaf.tolist()), held[0]
    )
    with pytest.raises(ValueError, match=r"holds \['b'\] of shape \(4,\), the model's has \(5,\)"):
      js.partial.restore(path, {**params, "b": jnp.zeros(5)})
  else:
    assert "the parameters could not be saved: " in str(found.value)


def test_training_goes_on_with_a_controller_that_is_restarted():
  """Worker 0 waits in `reduce` meanwhile, worker 1 computes for longer than the limit."""
  server = js.partial.Server(js.partial.Controller(2, 2), limit=0.3).__enter__()
  address, counts = server.address, {}

  def train(number, address):
    with js.partial.Worker(address, number, jnp.zeros(3), timeout=10, reconnect=20) as worker:
      params, iteration = worker.reduce(worker.params + 1, 1)
      if number:
        server.__exit__()
        time.sleep(0.6)
        again.append(js.partial.Server(js.partial.Controller(2, 2), address, limit=0.3).__enter__())
        time.sleep(0.6)
      for _ in range(3):
        params, iteration = worker.reduce(params + 1, iteration + 1)
      counts[number] = iteration

  again = []
  at_once(2, train, address)
  again[0].__exit__()
  assert sorted(counts) == [0, 1]
  assert min(counts.values()) >= 4


def test_a_worker_that_pauses_holds_the_others_up_for_one_step():
  """Its thread is alive, its training loop calls nothing for 3 s; T = 2 makes the group filter wait soon."""
  waits, back = {number: [] for number in range(3)}, threading.Event()

  def train(number, address):
    with js.partial.Worker(address, number, jnp.zeros(3)) as worker:
      params, iteration = worker.params, worker.iteration
      while not back.is_set():
        if number == 2 and len(waits[2]) == 5:
          time.sleep(3)
          back.set()
        began = time.monotonic()
        params, iteration = worker.reduce(params, iteration + 1)
        waits[number].append(time.monotonic() - began)
        time.sleep(0.01)

  with js.partial.Server(js.partial.Controller(3, 2, history=2)) as server:
    at_once(3, train, server.address)
  assert all(len(found) > 5 for found in waits.values())
  assert max(map(max, waits.values())) < 1.5


class Slow:
  """Worker 1 of two, which takes no byte of the other's mean until `wait` seconds after it has sent its own pieces."""

  ENTRIES = 10_000_000

  def __init__(self, context, server):
    self.data = context.socket(zmq.ROUTER)
    self.data.rcvhwm = 1  # the first message fills the queue; of the second, TCP takes some
    self.data.bind("tcp://127.0.0.1:*")
    self.client = Client(context, server)
    self.client.ask(Signal(Says.HELLO, 1, self.ENTRIES, sockets.endpoint(self.data)))

  def average(self):
    _, group = self.client.ask(Signal(Says.READY, 1, 1))
    self.other = self.client.socket.context.socket(zmq.DEALER)
    self.other.connect(group["addresses"][0])
    for kind in (Kind.PART, Kind.MEAN):
      self.other.send_multipart(Piece(kind, group["number"], 1, np.ones(self.ENTRIES // 2, np.float32)).pack())


@pytest.mark.parametrize("takes", [True, False])
def test_leaving_waits_only_for_a_worker_that_takes_its_pieces(monkeypatch, takes):
  """A worker that takes no byte may be dead, on a machine that is gone; the time to take one is 1 s here, not 5."""
  monkeypatch.setattr(sockets, "_STALLED", 10000 if takes else 1000)
  monkeypatch.setattr("jaxsparse.partial.worker._LAST_WORDS", 100)
  context = zmq.Context()
  with js.partial.Server(js.partial.Controller(2, 2)) as server:
    worker = js.partial.Worker(server.address, 0, jnp.zeros(Slow.ENTRIES))
    slow = Slow(context, server.address)
    thread = threading.Thread(target=slow.average)
    thread.start()
    assert float(worker.reduce(jnp.zeros(Slow.ENTRIES), 1)[0].max()) == 1.0
    thread.join(60)
    begin = time.monotonic()
    leaving = threading.Thread(target=worker.leave)
    leaving.start()
    if takes:
      leaving.join(0.5)
      assert leaving.is_alive()
      slow.data.recv_multipart()  # the part
      assert slow.data.poll(20000)
      assert len(slow.data.recv_multipart()[-1]) == 2 * Slow.ENTRIES
    leaving.join(60)
    assert time.monotonic() - begin < 8
  context.destroy(linger=0)


def test_leaving_does_not_wait_for_a_server_that_is_gone(monkeypatch):
  monkeypatch.setattr("jaxsparse.partial.worker._LAST_WORDS", 300)
  server = js.partial.Server(js.partial.Controller(2, 2)).__enter__()
  worker = js.partial.Worker(server.address, 0, jnp.zeros(3))
  server.__exit__()
  begin = time.monotonic()
  worker.leave()
  assert time.monotonic() - begin < 10  # not the 120 s of `timeout`


def test_a_worker_with_a_wrong_number_or_size_is_told():
  with js.partial.Server(js.partial.Controller(2, 2)) as server:
    with pytest.raises(ValueError, match="worker 5: unknown: worker 5, there are 0 … 1"):
      js.partial.Worker(server.address, 5, jnp.zeros(3))
    with js.partial.Worker(server.address, 0, jnp.zeros(3)) as worker:
      with pytest.raises(ValueError, match="params have 4 entries, the initial ones have 3"):
        worker.reduce(jnp.zeros(4), 1)
      with pytest.raises(ValueError, match="worker 0: iteration -1 of worker 0 is malformed"):
        worker.reduce(jnp.zeros(3), -1)
      with pytest.raises(ValueError, match="worker 1: unlike: worker 1 has a model of 4 entries, the others of 3"):
        js.partial.Worker(server.address, 1, jnp.zeros(4))
    with pytest.raises(RuntimeError, match="has left"):
      worker.reduce(jnp.zeros(3), 1)
