"""The controller over TCP: what it takes, what it rejects, whom it drops, and who may come in."""

import contextlib
import struct
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

import jaxsparse as js
from jaxsparse.partial import messages
from jaxsparse.partial.early import Early
from jaxsparse.partial.events import Model
from jaxsparse.partial.exchange import Average
from jaxsparse.partial.messages import Answer, Says, Signal

ADDRESS = "tcp://127.0.0.1:9"


class Client:
  """A connection that says what it likes."""

  def __init__(self, context, address, keys=None):
    self.socket = messages.secure(context.socket(zmq.DEALER), keys, serves=False)
    self.socket.linger = 0
    self.socket.connect(address)

  def say(self, *frames):
    self.socket.send_multipart([frame.packed() if isinstance(frame, Signal) else frame for frame in frames])

  def hear(self, wanted=tuple(set(Answer) - {Answer.BEAT})):
    """The next answer that is not one of the beats that come from time to time."""
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


def test_groups_go_to_their_members_and_nobody_else():
  with served() as (server, clients):
    for worker, client in enumerate(clients):
      hello(client, worker)
    clients[3].say(Signal(Says.READY, 3, 5))
    clients[1].say(Signal(Says.READY, 1, 7))
    for client in (clients[1], clients[3]):
      kind, content = client.hear()
      assert (kind, content["members"], content["iteration"]) == (Answer.GROUP, [1, 3], 7)
      assert content["weights"] == [0.5, 0.5]
      assert content["addresses"] == [ADDRESS, ADDRESS]
    clients[0].say(Signal(Says.BEAT, 0))
    assert clients[0].hear(set(Answer))[0] == Answer.BEAT  # and no group before it
  assert (server.taken, server.rejected) == (7, 0)
  assert len(Signal(Says.READY, 3, 5).packed()) == 11


@pytest.mark.parametrize(
  ("frames", "reason"),
  [
    ((b"",), "malformed: 0 bytes, a signal has 11"),
    ((b"\x02\x00",), "malformed: 2 bytes"),
    ((b"x" * 11, b""), "malformed: a message of 2 parts, send one"),
    ((struct.pack("!BHq", 9, 0, 0),), "malformed: a signal of kind 9, choose from 1 (HELLO), 2 (READY)"),
    ((Signal(Says.READY, 1, 3).packed() + b"x",), "malformed: 12 bytes, READY has 11"),
    ((Signal(Says.BEAT, 1, 3),), "malformed: BEAT with value 3, send 0"),
    ((Signal(Says.NOT_FINITE, 1, 3),), "malformed: NOT_FINITE with value 3, send 0"),
    ((Signal(Says.NOT_FINITE, 1),), "duplicate: worker 1 is ready already, with iteration 4"),
    ((Signal(Says.HELLO, 0, 0, "ipc://x"),), "malformed: HELLO with address 'ipc://x', send tcp://HOST:PORT"),
    ((Signal(Says.HELLO, 0, 0).packed() + b"\xff",), "malformed: HELLO with an address that is not ASCII"),
    ((Signal(Says.HELLO, 4, 0, ADDRESS),), "unknown: worker 4, there are 0 … 3"),
    ((Signal(Says.HELLO, 0, 0, "tcp://"),), "malformed: HELLO with address 'tcp://'"),
    ((Signal(Says.HELLO, 0, 0, "tcp://127.0.0.1:*"),), "malformed: HELLO with address 'tcp://127.0.0.1:*'"),
    ((Signal(Says.HELLO, 0, 0, "tcp://127.0.0.1:0"),), "malformed: HELLO with address"),
    ((Signal(Says.HELLO, 0, 0, "tcp://127.0.0.1:65536"),), "malformed: HELLO with address"),
    ((Signal(Says.HELLO, 0, 0, "tcp://a b:1"),), "malformed: HELLO with address"),
    ((Signal(Says.HELLO, 0, 9, ADDRESS),), "unlike: worker 0 has a model of 9 entries, the others of 0"),
    ((Signal(Says.HELLO, 2, 0, ADDRESS),), "duplicate: worker 2 is here already; if it died, it is dropped after 5 s"),
    ((Signal(Says.READY, 1, -1),), "iteration -1 of worker 1 is malformed"),
    ((Signal(Says.READY, 1, 4),), "duplicate: worker 1 is ready already, with iteration 4"),
    ((Signal(Says.READY, 0, 4),), "absent: worker 0 is not here, it has to say HELLO"),
    ((Signal(Says.READY, 2, 4),), "absent: worker 2 has come by another connection"),
    ((Signal(Says.FAILED, 1, 1),), "stale: worker 1 is not in group 1"),
  ],
)
def test_what_is_rejected_changes_nothing(frames, reason):
  with served(clients=2) as (server, (client, other)):
    hello(client, 1)
    hello(other, 2)
    client.say(Signal(Says.READY, 1, 4))
    kind, content = client.ask(*frames)
    assert kind == Answer.REJECTED
    assert content["reason"].startswith(reason)
    assert server.rejected == 1
    other.say(Signal(Says.READY, 2, 6))  # and it goes on as if nothing had been said
    assert client.hear()[1]["members"] == [1, 2]


@given(st.lists(st.binary(max_size=20), max_size=3))
def test_any_bytes_are_taken_apart_or_rejected(frames):
  try:
    signal = messages.parse(frames)
  except js.partial.Rejected:
    return
  assert [signal.packed()] == frames


def test_a_worker_without_a_sign_of_life_is_dropped_and_its_group_told():
  with served(workers=3, clients=3, limit=1) as (_, clients):
    for worker, client in enumerate(clients):
      hello(client, worker)
    clients[0].say(Signal(Says.READY, 0, 1))
    clients[1].say(Signal(Says.READY, 1, 1))
    number = clients[0].hear()[1]["number"]
    clients[1].hear()
    end, heard = time.monotonic() + 5, []
    while (Answer.ABORT, {"number": number, "worker": 1}) not in heard and time.monotonic() < end:
      for worker in (0, 2):
        clients[worker].say(Signal(Says.BEAT, worker))
        heard.append(clients[worker].hear(set(Answer)))
      time.sleep(0.05)
    assert (Answer.ABORT, {"number": number, "worker": 1}) in heard
    assert clients[1].ask(Signal(Says.READY, 1, 2))[1]["reason"].startswith("absent: worker 1")
    kind, welcome = clients[1].ask(Signal(Says.HELLO, 1, 0, ADDRESS))  # it comes back, and is told who has a model
    assert (kind, welcome["donor"]) == (Answer.WELCOME, ADDRESS)


def test_who_leaves_owing_nothing_aborts_nobody_and_who_owes_does():
  """The pieces of a worker that has said BYE may still be on their way to slower members of its last group."""
  with served(workers=4, clients=4) as (_, clients):
    for worker, client in enumerate(clients):
      hello(client, worker)
    numbers = []
    for pair in ((0, 1), (2, 3)):
      for worker in pair:
        clients[worker].say(Signal(Says.READY, worker, 1))
      numbers += [clients[worker].hear()[1]["number"] for worker in pair]
    first, second = numbers[0], numbers[2]
    clients[0].say(Signal(Says.BYE, 0, first))
    clients[2].say(Signal(Says.BYE, 2, first))  # not the group that it was in
    assert clients[3].hear() == (Answer.ABORT, {"number": second, "worker": 2})
    clients[1].say(Signal(Says.BEAT, 1))
    while (heard := clients[1].hear(set(Answer)))[0] != Answer.BEAT:
      assert heard[0] != Answer.ABORT
    clients[0].socket.close()
    clients[1].say(Signal(Says.READY, 1, 2))
    clients[3].say(Signal(Says.READY, 3, 2))
    kind, content = clients[1].hear()
    assert (kind, content["members"]) == (Answer.GROUP, [1, 3])


def test_hello_again_is_welcome_and_never_told_to_fetch_from_itself():
  with served(workers=2, clients=2) as (_, clients):
    hello(clients[0], 0)
    clients[0].say(Signal(Says.READY, 0, 7))
    assert clients[0].ask(Signal(Says.HELLO, 0, 0, ADDRESS)) == (Answer.WELCOME, {"limit": 5.0})
    assert clients[1].ask(Signal(Says.HELLO, 1, 0, ADDRESS)) == (Answer.WELCOME, {"limit": 5.0, "donor": ADDRESS})


def test_hello_again_names_another_donor():
  addresses = [f"tcp://127.0.0.1:{port}" for port in (7, 8)]
  with served(workers=3, size=3, clients=3) as (_, clients):
    for worker in (0, 1):
      come = Signal(Says.HELLO, worker, 0, addresses[worker])
      clients[worker].ask(come)
      clients[worker].say(Signal(Says.READY, worker, 7 + worker))
      clients[worker].ask(come)  # READY is taken by now: each connection has an order of its own
    told = [clients[2].ask(Signal(Says.HELLO, 2, 0, ADDRESS))[1]["donor"] for _ in range(3)]
  assert told == [addresses[1], addresses[0], addresses[1]]


def test_a_worker_without_a_finite_model_is_no_donor_until_it_is_ready_again():
  """It asks until another one is ready, and is told if all others ask too."""
  addresses = [f"tcp://127.0.0.1:{port}" for port in (7, 8)]
  with served(workers=2, clients=2) as (_, clients):
    for worker in (0, 1):
      clients[worker].ask(Signal(Says.HELLO, worker, 0, addresses[worker]))
    clients[0].say(Signal(Says.NOT_FINITE, 0))  # worker 1 has not been ready yet
    clients[0].say(Signal(Says.BEAT, 0))
    assert clients[0].hear(set(Answer))[0] == Answer.BEAT
    assert clients[1].ask(Signal(Says.NOT_FINITE, 1)) == (
      Answer.REJECTED,
      {"reason": "nobody: no worker has a finite model"},
    )
    clients[1].say(Signal(Says.READY, 1, 7))
    clients[1].say(Signal(Says.BEAT, 1))
    clients[1].hear((Answer.BEAT,))
    kind, welcome = clients[0].ask(Signal(Says.NOT_FINITE, 0))
    assert (kind, welcome["donor"]) == (Answer.WELCOME, addresses[1])
    clients[0].say(Signal(Says.READY, 0, 8))
    assert clients[0].hear()[1]["members"] == [0, 1]


def test_a_donor_that_cannot_be_reached_does_not_hold_a_worker_for_ever():
  context = zmq.Context()
  with js.partial.Server(js.partial.Controller(2, 2)) as server:
    silent = Client(context, server.address)
    come = Signal(Says.HELLO, 1, 3, "tcp://127.0.0.1:1")
    silent.ask(come)
    silent.say(Signal(Says.READY, 1, 5))
    silent.ask(come)  # READY is taken by now
    with pytest.raises(RuntimeError, match="worker 0: no model from tcp://127.0.0.1:1 for 1 s|no WELCOME .* for 1 s"):
      js.partial.Worker(server.address, 0, jnp.zeros(3), timeout=1)
    context.destroy(linger=0)


def test_a_model_that_comes_while_a_worker_computes_is_what_its_next_average_is():
  """It was taken for dead meanwhile; what it computed is of a model that nobody has any more."""
  controller = js.partial.Controller(2, 2)
  with js.partial.Server(controller) as server, js.partial.Worker(server.address, 0, jnp.zeros(3)) as worker:
    worker._runtime._protocol._replacement = Model(np.full(3, 7, np.float32), 40)
    params, iteration = worker.reduce(jnp.ones(3), 2)
    assert (params.tolist(), iteration) == ([7, 7, 7], 40)
    controller.leave(1)
    assert worker.reduce(jnp.ones(3), 41)[0].tolist() == [1, 1, 1]  # once


def test_who_sends_too_much_is_cut_off_and_nobody_else():
  with served(workers=2, clients=2) as (_, clients):
    hello(clients[0], 0)
    clients[1].say(b"x" * (messages.LONGEST + 1))
    assert not clients[1].socket.poll(200)
    clients[0].say(Signal(Says.BEAT, 0))
    assert clients[0].hear(set(Answer))[0] == Answer.BEAT


def test_who_sends_a_worker_too_much_is_cut_off():
  context, controller = zmq.Context(), js.partial.Controller(2, 2)
  with js.partial.Server(controller) as server, js.partial.Worker(server.address, 0, jnp.zeros(3)) as worker:
    stranger = context.socket(zmq.DEALER)
    monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    stranger.connect(messages.endpoint(worker._runtime._data))
    stranger.send(bytes(12 + messages.LONGEST + 1))
    assert monitor.poll(5000)
  context.destroy(linger=0)


@pytest.mark.parametrize("waits", [True, False])
def test_pieces_of_groups_that_nobody_knows_do_not_pile_up(waits, caplog):
  """Forged ones, of a model's size each, to a worker that waits for its group, and to one that computes.

  What the worker keeps is counted, not the process's memory, which holds the forger's messages as well.
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
    stranger.connect(messages.endpoint(worker._runtime._data))
    for sender in range(forged):
      stranger.send_multipart([struct.pack("!BqH", 3, 10**6, 100 + sender), bytes(4 * entries)])
    stranger.send(struct.pack("!BqH", 1, 0, 9))  # asks for the model, once all the others are taken
    assert stranger.poll(30000)
    early = worker._runtime._protocol._early._parts.values()
    assert sum(values.size for _, values in early) == (entries if waits else 0)
    stranger.close(linger=0)
    if not waits:
      thread.start()
    with js.partial.Worker(server.address, 1, jnp.zeros(entries)) as other:
      assert float(other.reduce(jnp.zeros(entries), 2)[0].max()) == 0.5  # and it goes on as if nothing had come
    thread.join(60)
  context.destroy(linger=0)
  assert float(found[0].min()) == 0.5
  said = "worker 0: 1000000 entries for group 1000000 from worker 101 are dropped"
  assert [said in record.getMessage() for record in caplog.records] == [True] * waits


@given(st.integers(1, 40), st.integers(2, 9))
def test_what_a_group_sends_early_is_kept(entries, members):
  """All parts of a group of any size; what a forger sends that is larger than them all takes the place of none."""
  group = js.partial.Group(tuple(range(members)), (1 / members,) * members, 1, 0.0, 5)
  early = Early(0, entries)
  parts = {}
  for member in range(1, members):
    model = np.full(entries, member, np.float32)
    parts[member] = next(p.values for p in Average(group, member, model, model).begin() if p.to == 0)
    early.keep(5, member, parts[member])
    early.keep(5, members + member, np.zeros(entries + 2**16 + 1, np.float32))
    early.keep(5, member, parts[member])
  taken = dict(early.take(5))
  assert {member: part.tolist() for member, part in taken.items()} == {m: part.tolist() for m, part in parts.items()}


def test_a_server_that_was_held_up_itself_drops_nobody():
  server = js.partial.Server(js.partial.Controller(2, 2), limit=0.2, start_timeout=0.2)
  time.sleep(0.5)  # as if the machine had been asleep
  server._drop_the_dead()
  assert server._controller.alive == (0, 1)
  server._looked = time.monotonic()
  server._dead_at = dict.fromkeys((0, 1), server._looked - 1)
  server.serve()
  assert server._controller.alive == ()


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
  """Long before the limit; the worker that has the number goes on."""
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


def test_two_that_ask_in_turns_for_the_number_of_a_living_worker_are_both_refused():
  with served(clients=3) as (_, (first, *rivals)):
    hello(first, 0)
    for reason in ("duplicate: worker 0", "taken: a living worker has the number 0"):
      for rival in rivals:
        assert rival.ask(Signal(Says.HELLO, 0, 0, ADDRESS))[1]["reason"].startswith(reason)
        assert first.hear()[0] == Answer.PROBE
      first.say(Signal(Says.BEAT, 0))
      assert first.hear((Answer.BEAT,))[0] == Answer.BEAT
      time.sleep(0.1)


@pytest.mark.parametrize("end", ["disconnected", "silent"])
def test_the_number_of_a_dead_worker_is_free_again(end):
  """Its successor waits until the server knows; that an earlier second worker was refused makes no difference."""
  with served(clients=2, limit=5) as (server, (first, second)):
    hello(first, 0)
    for reason in ("duplicate: worker 0", "taken: a living worker has the number 0"):
      assert second.ask(Signal(Says.HELLO, 0, 0, ADDRESS))[1]["reason"].startswith(reason)
      assert first.hear()[0] == Answer.PROBE
      first.say(Signal(Says.BEAT, 0))
      time.sleep(0.1)
    if end == "disconnected":
      first.socket.close()
    js.partial.Worker(server.address, 0, jnp.zeros(3), timeout=20).leave()


def test_it_ends_when_nobody_comes():
  server = js.partial.Server(js.partial.Controller(2, 2), start_timeout=0.2)
  begin = time.monotonic()
  server.serve()
  assert time.monotonic() - begin < 3


def test_only_who_has_the_keys_comes_in():
  keys, context = js.partial.make_keys(), zmq.Context()
  with js.partial.Server(js.partial.Controller(2, 2), keys=keys) as server:
    friend, stranger, plain = (Client(context, server.address, k) for k in (keys, js.partial.make_keys(), None))
    other = js.partial.make_keys()  # knows whom to ask, and is nobody
    stranger.socket.close()
    stranger = Client(context, server.address, messages.Keys(*other))
    stranger.socket.curve_serverkey = keys.public
    hello(friend, 0)
    for client in (stranger, plain):
      with contextlib.suppress(zmq.Again):  # it may be known by then that there is no way in
        client.socket.send(Signal(Says.HELLO, 1, 0, ADDRESS).packed(), zmq.NOBLOCK)
      assert not client.socket.poll(300)
    for wrong in (None, js.partial.make_keys()):
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


def test_workers_are_bound_to_an_address_that_is_theirs():
  with pytest.raises(ValueError, match="can be reached from other machines"):
    js.partial.Worker(ADDRESS, 0, jnp.zeros(1), bind="tcp://10.0.0.1:*")
  with pytest.raises(ValueError, match="name the address of this machine that the other workers reach"):
    js.partial.Worker(ADDRESS, 0, jnp.zeros(1), bind="tcp://*:2900", keys=js.partial.make_keys())


@pytest.mark.parametrize("keys", [None, js.partial.make_keys()], ids=["plain", "curve"])
def test_workers_average_and_keep_the_sum(keys):
  """Constant groups keep the sum of all models (W is doubly stochastic): here the workers' numbers are never lost."""
  controller, found, together = js.partial.Controller(4, 2), {}, {}

  def train(number, address):
    with js.partial.Worker(address, number, jnp.zeros(7), keys=keys) as worker:
      params, iteration = jnp.full(7, float(number)), 0  # not the model of another, that who comes last would get
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


def test_who_leaves_right_after_an_average_takes_it_from_nobody():
  """Its last pieces may be on their way when its connections close."""
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


def test_who_must_not_be_waited_for_is_not():
  """A member that the server says is alive, but from which nothing comes: the average is given up, and tried again."""
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
def test_leaving_after_the_controllers_death_is_no_death(tmp_path, place):
  """The parameters are saved, whatever their dtype, or it is said why not; nobody is left to take the error."""
  params = {"w": jnp.full((2, 3), 1.5, jnp.bfloat16), "b": jnp.zeros(4)}
  path = tmp_path / ("saved.npz" if place == "file" else "missing/saved.npz")
  server = js.partial.Server(js.partial.Controller(2, 2), limit=0.5).__enter__()
  with js.partial.Worker(server.address, 0, params, save=path, grace=60) as worker:
    server._controller.leave(1)
    held = worker.reduce(params, 3)
    server.__exit__()
    while worker._runtime.answers.empty():
      time.sleep(0.01)
  answer = worker._runtime.answers.get()
  assert isinstance(answer, js.partial.ControllerLost)
  if place == "file":
    found, iteration = js.partial.restore(path, params)
    assert iteration == 3
    assert jax.tree.map(lambda leaf: (leaf.dtype, leaf.tolist()), found) == jax.tree.map(
      lambda leaf: (leaf.dtype, leaf.tolist()), held[0]
    )
    with pytest.raises(ValueError, match=r"holds \['b'\] of shape \(4,\), the model's has \(5,\)"):
      js.partial.restore(path, {**params, "b": jnp.zeros(5)})
  else:
    assert "the parameters could not be saved: " in str(answer)


def test_leaving_does_not_wait_for_a_server_that_is_gone():
  server = js.partial.Server(js.partial.Controller(2, 2)).__enter__()
  worker = js.partial.Worker(server.address, 0, jnp.zeros(3))
  server.__exit__()
  begin = time.monotonic()
  worker.leave()
  assert time.monotonic() - begin < 30  # and not the 120 s that others may wait for a piece


def test_a_worker_with_a_wrong_number_or_size_is_told():
  with js.partial.Server(js.partial.Controller(2, 2)) as server:
    with pytest.raises(ValueError, match="worker 5: unknown: worker 5, there are 0 … 1"):
      js.partial.Worker(server.address, 5, jnp.zeros(3))
    with js.partial.Worker(server.address, 0, jnp.zeros(3)) as worker:
      with pytest.raises(ValueError, match="params have 4 entries, those to begin with 3"):
        worker.reduce(jnp.zeros(4), 1)
      with pytest.raises(ValueError, match="worker 0: iteration -1 of worker 0 is malformed"):
        worker.reduce(jnp.zeros(3), -1)
      with pytest.raises(ValueError, match="worker 1: unlike: worker 1 has a model of 4 entries, the others of 3"):
        js.partial.Worker(server.address, 1, jnp.zeros(4))
    with pytest.raises(RuntimeError, match="has left"):
      worker.reduce(jnp.zeros(3), 1)


@given(st.integers(1, 5), st.integers(0, 12), st.integers(0, 999))
def test_the_average_is_the_same_at_every_member_in_any_order_of_messages(members, entries, seed):
  random = np.random.default_rng(seed)
  numbers = tuple(sorted(random.choice(9, members, replace=False).tolist()))
  weights = random.random(members) + 0.1
  initial_weight = float(random.choice([0.0, 0.25]))
  weights *= (1 - initial_weight) / weights.sum()
  group = js.partial.Group(numbers, tuple(weights.tolist()), 1, initial_weight, 1)
  values = {number: random.standard_normal(entries).astype(np.float32) for number in numbers}
  start = np.full(entries, 5, np.float32)
  averages = {number: Average(group, number, values[number], start) for number in numbers}
  under_way = [(number, piece) for number in numbers for piece in averages[number].begin()]
  while under_way:
    sender, piece = under_way.pop(int(random.integers(len(under_way))))
    assert averages[piece.to].needs(sender)
    answers = list(averages[piece.to].receive(sender, piece.kind, piece.values))
    with pytest.raises(ValueError, match="does not belong to the average"):
      list(averages[piece.to].receive(sender, piece.kind, piece.values))
    under_way += [(piece.to, answer) for answer in answers]
  expected = sum(w * values[n].astype(float) for w, n in zip(weights, numbers, strict=True)) + initial_weight * start
  for average in averages.values():
    assert average.done
    assert average.result.tobytes() == averages[numbers[0]].result.tobytes()
    np.testing.assert_allclose(average.result, expected, atol=1e-5)


def test_the_command_line(tmp_path):
  """A controller as a program, with keys that it makes; it ends with its last worker."""
  command = [sys.executable, "-m", "jaxsparse.partial", "--workers=2", "--group_size=2", f"--keys={tmp_path / 'keys'}"]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    address = process.stdout.readline().strip()
    keys = js.partial.read_keys(tmp_path / "keys")
    assert (tmp_path / "keys").stat().st_mode & 0o077 == 0
    workers = [js.partial.Worker(address, number, jnp.zeros(2), keys=keys, timeout=30) for number in range(2)]
    for worker in workers:
      worker.leave()
    assert process.wait(30) == 0
  bad = subprocess.run([*command[:4], "--group_size=3"], capture_output=True, text=True, timeout=60, check=False)
  assert (bad.returncode, bad.stderr) == (
    1,
    "error: group_size=3, choose a whole number in 2 … 2, the number of workers\n",
  )
