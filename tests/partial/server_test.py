"""The server and workers over real sockets: TCP, CURVE keys, and connections that break."""

import contextlib
import importlib
import resource
import subprocess
import sys
import time
from concurrent import futures
from unittest import mock

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import zmq

import jaxsparse as js
from jaxsparse.partial.__main__ import main
from jaxsparse.partial.groups.controller import Controller
from jaxsparse.partial.net import messages, sockets
from jaxsparse.partial.net.alike import Alike
from jaxsparse.partial.net.messages import (
  Piece,
  PieceKind,
  ServerMessage,
  Signal,
  WorkerMessage,
)
from jaxsparse.partial.rounds import status
from jaxsparse.partial.rounds.quorum import Quorum
from tests.launch_test import soon

ADDRESS = "tcp://127.0.0.1:9"


ALIKE = Alike()


class Client:
  """A connection to the server that can send anything."""

  def __init__(self, socket, address, keys=None, known=None):
    self.socket = socket(zmq.DEALER)
    if keys:
      self.socket.curve_publickey, self.socket.curve_secretkey = keys[:2]
      self.socket.curve_serverkey = known or keys.public
    self.socket.connect(address)

  def ask(self, kind, worker, value=0, address="", alike=ALIKE):
    """The next answer that is not a heartbeat."""
    self.socket.send(Signal(kind, worker, value, address, alike=alike).pack())
    while self.socket.poll(5000):
      answer = messages.parse_answer(self.socket.recv())
      if answer.kind != ServerMessage.BEAT:
        return answer
    raise TimeoutError

  def join(self, worker, entries=0, address=ADDRESS):
    assert (
      self.ask(
        WorkerMessage.HELLO, worker, 0, address, Alike.of(jnp.zeros(entries))
      ).kind
      == ServerMessage.WELCOME
    )


@pytest.fixture
def socket():
  """Makes sockets, which are closed at the end."""
  context, made = zmq.Context(), []
  yield lambda kind: made.append(context.socket(kind)) or made[-1]
  context.destroy(linger=0)


def serve(workers=2, **options):
  return js.partial.Server(js.partial.Controller(workers, 2), **options)


def test_an_oversized_message_ends_its_connection_only(socket):
  """To the server, and to a worker."""
  with serve() as server, js.partial.Worker(server.address, 0, jnp.zeros(3)) as worker:
    for to, size in ((server.address, 1), (worker._endpoint.address, 12 + 1)):
      stranger = socket(zmq.DEALER)
      monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
      stranger.connect(to)
      stranger.send(bytes(messages.LONGEST + size))
      assert monitor.poll(5000)
    Client(socket, server.address).join(1, 3)


def test_a_worker_whose_connection_is_gone_is_dropped_long_before_the_limit(socket):
  """And its number is free again."""
  with serve(4, limit=5) as server:
    clients = [Client(socket, server.address) for _ in range(4)]
    for worker, client in enumerate(clients):
      client.join(worker)
    clients[2].socket.close()
    begin = time.monotonic()
    assert soon(lambda: server._controller.alive == (0, 1, 3))
    assert time.monotonic() - begin < 3
    Client(socket, server.address).join(2)


def test_the_number_of_a_living_worker_is_refused_at_once():
  """Long before the limit; the living worker continues."""
  with (
    serve(limit=30) as server,
    js.partial.Worker(server.address, 0, jnp.zeros(3)) as worker,
  ):
    begin = time.monotonic()
    with pytest.raises(
      ValueError,
      match="worker 0: taken: a living worker has the number 0, choose another one",
    ):
      js.partial.Worker(server.address, 0, jnp.zeros(3), timeout=10)
    assert time.monotonic() - begin < 5
    with (
      js.partial.Worker(server.address, 1, jnp.zeros(3)) as other,
      futures.ThreadPoolExecutor() as threads,
    ):
      threads.submit(other.reduce, jnp.zeros(3), 1)
      assert worker.reduce(jnp.ones(3), 1)[0].tolist() == [0.5] * 3


def test_only_workers_with_the_keys_can_join(socket):
  keys, other = js.partial.Keys.make(), js.partial.Keys.make()
  with serve(keys=keys) as server:
    Client(socket, server.address, keys).join(0)
    # Without keys; with the server's public key, and none that the server knows.
    for client in (
      Client(socket, server.address),
      Client(socket, server.address, other, known=keys.public),
    ):
      # the connection may have been refused by then
      with contextlib.suppress(zmq.Again):
        client.socket.send(
          Signal(WorkerMessage.HELLO, 1, 0, ADDRESS).pack(), zmq.NOBLOCK
        )
      assert not client.socket.poll(200)
    for wrong in (None, other):
      with pytest.raises(
        js.partial.ControllerLost,
        match=r"no WELCOME from the controller at .* for 0.3 s",
      ):
        js.partial.Worker(server.address, 1, jnp.zeros(1), keys=wrong, timeout=0.3)


@pytest.mark.parametrize(
  ("address", "message"),
  [
    ("tcp://*:2900", r"tcp://\*:2900 can be reached from other machines: give keys"),
    ("tcp://10.0.0.1:*", "can be reached from other machines"),
    ("tcp://node7:2900", "can be reached from other machines"),
    ("ipc://here", "choose tcp://HOST:PORT"),
    ("tcp://127.0.0.1:x", "choose tcp://HOST:PORT"),
    ("tcp://127.0.0.1:65536", "choose tcp://HOST:PORT"),
    ("tcp://[::1]:2900", "is one of IPv6"),
  ],
)
def test_bad_addresses(address, message):
  with pytest.raises(ValueError, match=message):
    serve(address=address)
  # others have to reach a worker
  keys = js.partial.Keys.make() if "*:" in address else None
  with pytest.raises(ValueError, match="name the host by which" if keys else message):
    js.partial.Worker(ADDRESS, 0, jnp.zeros(1), bind=address, keys=keys)


@pytest.mark.parametrize(
  ("address", "message"),
  [
    ("tcp://127.0.0.1:*", "with a PORT of 1 … 65535$"),
    ("tcp://*:2900", "name the host"),
    ("here:1", "choose tcp"),
  ],
)
def test_the_address_of_a_server_names_its_host_and_port(address, message):
  with pytest.raises(ValueError, match=message):
    js.partial.Worker(address, 0, jnp.zeros(1))


def test_training_goes_on_with_a_controller_that_is_restarted():
  """Worker 0 waits in `reduce` meanwhile, worker 1 computes for longer than the limit."""
  server = serve(limit=0.3).__enter__()
  again = []

  def train(number):
    with js.partial.Worker(
      server.address, number, jnp.zeros(3), timeout=10, reconnect=20
    ) as worker:
      params, iteration = worker.reduce(worker.params + 1, 1)
      if number:
        server.__exit__()
        time.sleep(0.6)
        again.append(serve(address=server.address, limit=0.3).__enter__())
        time.sleep(0.6)
      for _ in range(3):
        params, iteration = worker.reduce(params + 1, iteration + 1)
      return iteration

  with futures.ThreadPoolExecutor() as threads:
    assert min(threads.map(train, range(2))) >= 4
  again[0].__exit__()


@pytest.mark.parametrize("takes", [True, False])
def test_leaving_waits_only_for_a_worker_that_takes_its_pieces(
  monkeypatch, socket, takes
):
  """A worker that takes no byte may be dead, on a machine that is gone; the time to take one is 0.5 s here, not 5."""
  monkeypatch.setattr(sockets, "_STALLED", 10000 if takes else 500)
  monkeypatch.setattr("jaxsparse.partial.net.endpoint._LAST_WORDS", 100)
  entries, slow, pieces = 10_000_000, socket(zmq.ROUTER), socket(zmq.DEALER)
  # the first message fills the queue; of the second, TCP takes no more than its buffers
  slow.rcvhwm = 1
  slow.rcvbuf = 100_000
  slow.bind("tcp://127.0.0.1:*")
  with serve() as server, futures.ThreadPoolExecutor() as threads:
    worker = js.partial.Worker(server.address, 0, jnp.zeros(entries))
    averaged = threads.submit(worker.reduce, jnp.zeros(entries), 1)
    client = Client(socket, server.address)
    client.join(1, entries, slow.get_string(zmq.LAST_ENDPOINT))
    group = client.ask(WorkerMessage.READY, 1, 1).content
    pieces.connect(group["addresses"][0])
    for kind in (PieceKind.PART, PieceKind.MEAN):
      pieces.send_multipart(
        Piece(kind, group["number"], 1, np.ones(entries // 2, np.float32)).pack()
      )
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
  monkeypatch.setattr("jaxsparse.partial.net.endpoint._LAST_WORDS", 300)
  with serve() as server:
    worker = js.partial.Worker(server.address, 0, jnp.zeros(3))
  begin = time.monotonic()
  worker.leave()
  assert time.monotonic() - begin < 10  # not the 120 s of `timeout`
  with pytest.raises(RuntimeError, match="has left"):
    worker.reduce(jnp.zeros(3), 1)


def test_the_command_line(tmp_path, monkeypatch):
  """A controller as a program, with keys that it makes; it ends with its last worker."""
  command = [
    sys.executable,
    "-m",
    "jaxsparse.partial",
    "--workers=2",
    "--group_size=2",
    f"--keys={tmp_path / 'keys'}",
  ]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    address = process.stdout.readline().strip()
    keys = js.partial.Keys.read(tmp_path / "keys")
    assert (tmp_path / "keys").stat().st_mode & 0o077 == 0
    workers = [
      js.partial.Worker(address, number, jnp.zeros(2), keys=keys, timeout=30)
      for number in range(2)
    ]
    for worker in workers:
      worker.leave()
    assert process.wait(30) == 0
  monkeypatch.setattr(
    sys, "argv", ["jaxsparse.partial", "--workers=2", "--group_size=3"]
  )
  with pytest.raises(
    SystemExit,
    match="^error: controller: group_size=3, choose a whole number from 2 to 2$",
  ):
    main()
  sys.argv += ["--keys=file", "--own_keys=folder"]
  with pytest.raises(SystemExit, match="2"):  # argparse: not both
    main()


@pytest.mark.parametrize(
  ("controller", "options"),
  [
    (
      Controller,
      {
        "group_size": 2,
        "weights": "dynamic",
        "decay": 0.25,
        "missing": "initial",
        "history": 3,
      },
    ),
    (Quorum, {"quorum": 2, "grace": 3.5}),
  ],
)
def test_the_command_takes_the_options_of_both_controllers(
  controller, options, monkeypatch
):
  command = importlib.import_module("jaxsparse.partial.__main__")
  made = mock.create_autospec(controller)
  monkeypatch.setattr(command, controller.__name__, made)
  monkeypatch.setattr(command, "Server", mock.Mock())
  words = [f"--{name}={value}" for name, value in options.items()]
  monkeypatch.setattr(sys, "argv", ["jaxsparse.partial", "--workers=4", *words])
  command.main()
  made.assert_called_once_with(workers=4, **options)


def test_a_connection_that_takes_no_message_is_forgotten_with_its_monitor():
  network, lost = mock.Mock(), mock.Mock()
  socket = network.client.return_value
  socket.send_multipart.side_effect = zmq.Again
  peers = sockets.Peers(network, 100, mock.Mock(), lost)
  piece = Piece(PieceKind.MESSAGE, 1, 0, np.zeros(2, np.float32))
  peers.send(ADDRESS, piece)
  monitor = socket.get_monitor_socket.return_value
  assert network.forget.mock_calls == [mock.call(socket), mock.call(monitor)]
  lost.assert_called_once_with(ADDRESS)


def test_a_worker_with_keys_of_its_own_cannot_speak_for_another_one(socket):
  """Neither to the server nor to a worker; the keys of the run do not let anybody in."""
  *own, at_server = js.partial.Keys.make_own(3)
  with serve(3, keys=at_server) as server:
    Client(socket, server.address, own[0].own, known=at_server.public).join(0, 3)
    for liar, number in ((own[0].own, 1), (own[0][:2], 0)):
      client = Client(socket, server.address, liar, known=at_server.public)
      with contextlib.suppress(zmq.Again):  # one that is refused has no connection
        client.socket.send(
          Signal(WorkerMessage.HELLO, number, 1, "tcp://127.0.0.1:9").pack(),
          zmq.NOBLOCK,
        )
      assert not client.socket.poll(300)
    with js.partial.Worker(server.address, 1, jnp.zeros(3), keys=own[1]) as worker:
      address = worker._endpoint.address
      # A process of the same worker, its lead or another part of it, may be any sender.
      for key, sender, answers in ((2, 0, False), (2, 2, True), (1, 0, True)):
        client = socket(zmq.DEALER)
        client.curve_publickey, client.curve_secretkey = own[key].own
        client.curve_serverkey = at_server.public
        client.connect(address)
        client.send_multipart(Piece(PieceKind.FETCH, 0, sender).pack())
        assert bool(client.poll(5000 if answers else 300)) == answers


def test_keys_of_each_worker_are_read_as_they_were_written(tmp_path):
  for number, keys in enumerate(js.partial.Keys.make_own(2)):
    keys.write(tmp_path / str(number))
    assert js.partial.Keys.read(tmp_path / str(number)) == keys
  (tmp_path / "0").chmod(0o640)
  with pytest.warns(
    UserWarning, match="other users can read the keys of the run: chmod 600"
  ):
    js.partial.Keys.read(tmp_path / "0")
  (tmp_path / "1").write_bytes(b"\n".join([b"x" * 40] * 3))
  with pytest.raises(ValueError, match="holds no keys"):
    js.partial.Keys.read(tmp_path / "1")


def test_keys_of_another_worker_or_of_the_server_are_refused_by_name():
  """The server would drop all messages, and the worker wait for its timeout."""
  own, _, at_server = js.partial.Keys.make_own(2)
  average = lambda comm: optax.chain(js.dense_transform(comm), optax.sgd(1.0))
  start = "tcp://127.0.0.1:9", 1, jnp.zeros(3)
  for keys, message in (
    (own, "number=1, but keys are those of worker 0"),
    (at_server, "keys are the server's own, choose those of a worker"),
  ):
    with pytest.raises(ValueError, match=message):
      js.partial.Worker(*start, keys=keys, timeout=0.5)
    with pytest.raises(ValueError, match=message):
      js.partial.Rounds(*start, average, every=1, keys=keys, timeout=0.5)
  for read in (
    lambda: js.partial.Follower(start[0], start[2], average, keys=at_server),
    lambda: status.ask(start[0], at_server),
  ):
    with pytest.raises(ValueError, match=message):
      read()


@pytest.mark.parametrize(
  ("params", "message"),
  [
    (
      {"v": jnp.zeros(3)},
      r"params\['v'\] of float32\[3\], the others have params\['w'\] of float32\[3\]",
    ),
    (
      {"w": jnp.ones(3)},
      r"params\['w'\] with the checksum \w+, the others have params\['w'\] with the checksum",
    ),
  ],
)
def test_a_worker_that_is_not_alike_is_refused(params, message):
  with serve() as server, js.partial.Worker(server.address, 0, {"w": jnp.zeros(3)}):
    with pytest.raises(ValueError, match=f"unlike: worker 1 has {message}"):
      js.partial.Worker(server.address, 1, params)
    js.partial.Worker(server.address, 1, {"w": jnp.zeros(3)}).leave()


def test_a_worker_may_send_to_more_others_than_a_context_of_zeromq_has_sockets_by_default():
  """It uses three descriptors for each of them."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
  network, lost = sockets.Network(None), []
  try:
    peers = sockets.Peers(network, 1000, print, lost.append)
    for port in range(20_000, 20_400):
      peers.send(f"tcp://127.0.0.1:{port}", Piece(PieceKind.FETCH, 0, 0))
    assert lost == []
  finally:
    network.close(linger=0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
