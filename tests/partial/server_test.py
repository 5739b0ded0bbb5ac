"""The server and workers over real sockets: TCP, CURVE keys, and connections that break."""

import contextlib
import subprocess
import sys
import time
import types
from concurrent import futures

import jax.numpy as jnp
import numpy as np
import pytest
import zmq

import jaxsparse as js
from jaxsparse.partial import messages, sockets
from jaxsparse.partial.__main__ import main
from jaxsparse.partial.messages import Answer, Kind, Piece, Says, Signal

ADDRESS = "tcp://127.0.0.1:9"


class Client:
  """A connection to the server that can send anything."""

  def __init__(self, context, address, keys=None, server=None):
    self.socket = context.socket(zmq.DEALER)
    if keys:
      self.socket.curve_publickey, self.socket.curve_secretkey = keys
      self.socket.curve_serverkey = server or keys.public
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

  def join(self, worker, entries=0, address=ADDRESS):
    assert self.ask(Signal(Says.HELLO, worker, entries, address))[0] == Answer.WELCOME


@pytest.fixture
def context():
  """Makes sockets, which are closed at the end."""
  found, kept = zmq.Context(), []

  def make(kind):
    kept.append(found.socket(kind))
    return kept[-1]

  yield types.SimpleNamespace(socket=make)
  found.destroy(linger=0)


@contextlib.contextmanager
def served(workers=2, size=2, **options):
  """The address of a server, and its controller."""
  controller = js.partial.Controller(workers, size)
  with js.partial.Server(controller, **options) as server:
    yield server.address, controller


def at_once(workers, train, address):
  """Runs `train(number, address)` of each worker in a thread of its own."""
  with futures.ThreadPoolExecutor(workers) as threads:
    return list(threads.map(lambda number: train(number, address), range(workers)))


def test_an_oversized_message_ends_its_connection_only(context):
  """To the server, and to a worker."""
  with served() as (address, _), js.partial.Worker(address, 0, jnp.zeros(3)) as worker:
    for to, size in ((address, 1), (worker._data.get_string(zmq.LAST_ENDPOINT), 12 + 1)):
      stranger = context.socket(zmq.DEALER)
      monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
      stranger.connect(to)
      stranger.send(bytes(messages.LONGEST + size))
      assert monitor.poll(5000)
    Client(context, address).join(1, 3)


def test_a_worker_whose_connection_is_gone_is_dropped_long_before_the_limit(context):
  """And its number is free again."""
  with served(4, limit=5) as (address, controller):
    clients = [Client(context, address) for _ in range(4)]
    for worker, client in enumerate(clients):
      client.join(worker)
    clients[2].socket.close()
    begin = time.monotonic()
    while 2 in controller.alive:
      time.sleep(0.01)
      assert time.monotonic() - begin < 3
    assert controller.alive == (0, 1, 3)
    Client(context, address).join(2)


def test_the_number_of_a_living_worker_is_refused_at_once():
  """Long before the limit; the living worker continues."""
  with served(3, limit=30) as (address, _):
    with js.partial.Worker(address, 0, jnp.zeros(3)) as worker:
      begin = time.monotonic()
      message = "worker 0: taken: a living worker has the number 0, choose another one or end that worker first"
      with pytest.raises(ValueError, match=message):
        js.partial.Worker(address, 0, jnp.zeros(3), timeout=10)
      assert time.monotonic() - begin < 5
      with js.partial.Worker(address, 1, jnp.zeros(3)) as other, futures.ThreadPoolExecutor() as threads:
        threads.submit(other.reduce, jnp.zeros(3), 1)
        assert worker.reduce(jnp.ones(3), 1)[0].tolist() == [0.5] * 3
    js.partial.Worker(address, 0, jnp.zeros(3), timeout=10).leave()


def test_only_workers_with_the_keys_can_join(context):
  keys, other = js.partial.Keys.make(), js.partial.Keys.make()
  with served(keys=keys) as (address, _):
    Client(context, address, keys).join(0)
    # Without keys; with the server's public key, and none that the server knows.
    for client in (Client(context, address), Client(context, address, other, server=keys.public)):
      with contextlib.suppress(zmq.Again):  # the connection may have been refused by then
        client.socket.send(Signal(Says.HELLO, 1, 0, ADDRESS).pack(), zmq.NOBLOCK)
      assert not client.socket.poll(200)
    for wrong in (None, other):
      with pytest.raises(js.partial.ControllerLost, match=r"no WELCOME from the controller at .* for 0.3 s"):
        js.partial.Worker(address, 1, jnp.zeros(1), keys=wrong, timeout=0.3)


@pytest.mark.parametrize(
  ("address", "message"),
  [
    ("tcp://*:2900", r"tcp://\*:2900 can be reached from other machines: give keys"),
    ("tcp://10.0.0.1:*", "can be reached from other machines"),
    ("tcp://node7:2900", "can be reached from other machines"),
    ("ipc://here", "choose tcp://HOST:PORT"),
    ("tcp://127.0.0.1:x", "choose tcp://HOST:PORT"),
  ],
)
def test_bad_addresses(address, message):
  with pytest.raises(ValueError, match=message):
    js.partial.Server(js.partial.Controller(2, 2), address)
  keys = js.partial.Keys.make() if "*:" in address else None  # others have to reach a worker
  with pytest.raises(ValueError, match="name the address of this machine" if keys else message):
    js.partial.Worker(ADDRESS, 0, jnp.zeros(1), bind=address, keys=keys)


def test_a_worker_that_leaves_right_after_an_average_spoils_it_for_no_other():
  """Its last pieces may be in transit when it closes its connections."""
  entries = 300_000

  def train(number, address):
    with js.partial.Worker(address, number, jnp.zeros(entries)) as worker:
      return worker.reduce(jnp.full(entries, number, jnp.float32), 1)[0]

  for _ in range(5):
    with served(3, 3) as (address, _):
      for model in at_once(3, train, address):
        np.testing.assert_allclose(model, 1, rtol=1e-6)


def test_training_goes_on_with_a_controller_that_is_restarted():
  """Worker 0 waits in `reduce` meanwhile, worker 1 computes for longer than the limit."""
  server = js.partial.Server(js.partial.Controller(2, 2), limit=0.3).__enter__()
  again = []

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
      return iteration

  assert min(at_once(2, train, server.address)) >= 4
  again[0].__exit__()


@pytest.mark.parametrize("takes", [True, False])
def test_leaving_waits_only_for_a_worker_that_takes_its_pieces(monkeypatch, context, takes):
  """A worker that takes no byte may be dead, on a machine that is gone; the time to take one is 0.5 s here, not 5."""
  monkeypatch.setattr(sockets, "_STALLED", 10000 if takes else 500)
  monkeypatch.setattr("jaxsparse.partial.worker._LAST_WORDS", 100)
  entries, slow, pieces = 10_000_000, context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
  slow.rcvhwm = 1  # the first message fills the queue; of the second, TCP takes no more than its buffers
  slow.rcvbuf = 100_000
  slow.bind("tcp://127.0.0.1:*")
  with served() as (address, _), futures.ThreadPoolExecutor() as threads:
    worker = js.partial.Worker(address, 0, jnp.zeros(entries))
    averaged = threads.submit(worker.reduce, jnp.zeros(entries), 1)
    client = Client(context, address)
    client.join(1, entries, slow.get_string(zmq.LAST_ENDPOINT))
    _, group = client.ask(Signal(Says.READY, 1, 1))
    pieces.connect(group["addresses"][0])
    for kind in (Kind.PART, Kind.MEAN):
      pieces.send_multipart(Piece(kind, group["number"], 1, np.ones(entries // 2, np.float32)).pack())
    assert float(averaged.result(60)[0].max()) == 1.0
    begin, leaving = time.monotonic(), threads.submit(worker.leave)
    if takes:
      with pytest.raises(TimeoutError):
        leaving.result(0.5)
      slow.recv_multipart()  # the part
      assert slow.poll(20000)
      assert len(slow.recv_multipart()[-1]) == 2 * entries
    leaving.result(60)
    assert time.monotonic() - begin < 8


def test_leaving_does_not_wait_for_a_server_that_is_gone(monkeypatch):
  monkeypatch.setattr("jaxsparse.partial.worker._LAST_WORDS", 300)
  with served() as (address, _):
    worker = js.partial.Worker(address, 0, jnp.zeros(3))
  begin = time.monotonic()
  worker.leave()
  assert time.monotonic() - begin < 10  # not the 120 s of `timeout`


def test_a_worker_of_another_size_is_told_and_one_that_has_left():
  with served() as (address, _):
    message = "worker 1: unlike: worker 1 has a model of 4 entries, the others of 3"
    with js.partial.Worker(address, 0, jnp.zeros(3)) as worker, pytest.raises(ValueError, match=message):
      js.partial.Worker(address, 1, jnp.zeros(4))
    with pytest.raises(RuntimeError, match="has left"):
      worker.reduce(jnp.zeros(3), 1)


def test_the_command_line(tmp_path, monkeypatch):
  """A controller as a program, with keys that it makes; it ends with its last worker."""
  command = [sys.executable, "-m", "jaxsparse.partial", "--workers=2", "--group_size=2", f"--keys={tmp_path / 'keys'}"]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    address = process.stdout.readline().strip()
    keys = js.partial.Keys.read(tmp_path / "keys")
    assert (tmp_path / "keys").stat().st_mode & 0o077 == 0
    workers = [js.partial.Worker(address, number, jnp.zeros(2), keys=keys, timeout=30) for number in range(2)]
    for worker in workers:
      worker.leave()
    assert process.wait(30) == 0
  monkeypatch.setattr(sys, "argv", ["jaxsparse.partial", "--workers=2", "--group_size=3"])
  with pytest.raises(SystemExit, match="^error: controller: group_size=3, choose a whole number from 2 to 2$"):
    main()
