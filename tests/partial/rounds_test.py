"""Workers of rounds in threads, with real sockets: the result of `js.local_steps`, and workers that come and go."""

import decimal
import fractions
import math
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
import zmq

import jaxsparse as js
from jaxsparse.partial.net import messages, sockets
from jaxsparse.partial.net.messages import Piece, PieceKind
from jaxsparse.partial.rounds import checks, exchanger
from jaxsparse.partial.rounds import worker as rounds
from jaxsparse.partial.rounds.outer_step import OuterStep
from tests.cases import averaged, quick_of, row
from tests.launch_test import soon

START = {"b": jnp.zeros(4), "w": jnp.ones((2, 4))}
pytestmark = pytest.mark.filterwarnings("ignore:.*is lost")


def averaging(comm):
  return averaged(comm)


def in_threads(count, work):
  """What `work(number)` returns for each worker; raises what one of them raises."""
  found, errors = [None] * count, []

  def run(number):
    try:
      found[number] = work(number)
    except BaseException as error:
      errors.append(error)

  threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(120)
  if errors:
    raise errors[0]
  assert not any(thread.is_alive() for thread in threads)
  return found


def serve(workers, quorum=None, grace=60.0, **options):
  return js.partial.Server(
    js.partial.Quorum(workers, workers if quorum is None else quorum, grace=grace),
    **options,
  )


def join(server, number, params=START, outer=averaging, **options):
  options = {"every": 4, "device": jax.devices()[1 + number]} | options
  return js.partial.Rounds(server.address, number, params, outer, **options)


def gradient(number, step, params):
  """Multiples of 1/8, so that no sum rounds."""
  return jax.tree.map(
    lambda leaf: jnp.full(leaf.shape, (number + 1) * (1 + step % 3) / 8, leaf.dtype),
    params,
  )


def choosing(comm):
  """Half of the entries stay in the residual."""
  return optax.chain(js.make_transform("topka", comm, density=0.5), optax.sgd(1.0))


def correcting(comm):
  """Likewise, with the momentum of each worker before the exchange."""
  return optax.chain(
    js.momentum_corrected(js.make_transform("topka", comm, density=0.5), 0.5),
    optax.sgd(1.0),
  )


LIKE_LOCAL_STEPS = [
  (averaging, {}),
  (averaging, {"fragments": 2}),
  (averaging, {"delay": 1, "mixing": 0.5}),
  (averaging, {"fragments": 2, "delay": 1, "mixing": 0.0}),
  (choosing, {"apply_residual": True}),
  (choosing, {"apply_residual": True, "fragments": 2}),
  (correcting, {"apply_residual": True}),
  (correcting, {"fragments": 2, "delay": 1, "mixing": 0.0}),
]


@pytest.mark.parametrize(
  ("outer", "options"),
  [
    row(*LIKE_LOCAL_STEPS[number], quick=number in (2, 7))
    for number in range(len(LIKE_LOCAL_STEPS))
  ],
  ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_rounds_are_local_steps_bit_for_bit(outer, options):
  """When nothing fails: with fragments, a delay, mixing and residuals as `js.local_steps` defines them."""
  steps, workers = 16, 2
  comm = js.SimComm("workers", members=workers)
  tx = js.local_steps(optax.sgd(0.5), outer(comm), every=4, **options)
  update = jax.jit(jax.vmap(tx.update, in_axes=(0, 0, None), axis_name="workers"))
  params, state = (
    START,
    jax.vmap(lambda _: tx.init(START), axis_name="workers")(jnp.arange(workers)),
  )
  for number in range(steps):
    grads = [gradient(worker, number, START) for worker in range(workers)]
    updates, state = update(
      jax.tree.map(lambda *rows: jnp.stack(rows), *grads), state, params
    )
    params = jax.tree.map(lambda p, u: p + u[0], params, updates)

  def train(number):
    with join(server, number, outer=outer, **options) as worker:
      own = worker.params
      for step in range(steps):
        own = worker.step(
          jax.tree.map(lambda p, g: p - 0.5 * g, own, gradient(number, step, own))
        )
      return worker._exchanger.anchor.params, own

  with serve(workers) as server:
    found = in_threads(workers, train)
  own = jax.vmap(lambda state: js.own_params(params, state))(state)
  for number, (anchor, theirs) in enumerate(found):
    jax.tree.map(np.testing.assert_array_equal, anchor, params)
    jax.tree.map(
      lambda x, y, number=number: np.testing.assert_array_equal(x, y[number]),
      theirs,
      own,
    )


def test_what_is_moved_while_an_exchange_is_under_way_goes_into_the_next_round():
  """Without mixing nothing is dropped: after a last round the anchor has moved by the mean of all steps."""

  def train(number):
    with join(server, number, delay=3) as worker:
      own = worker.params
      for _ in range(9):
        own = worker.step(jax.tree.map(lambda leaf: leaf + (1.0 + number), own))
      # weights and steps: three during the second exchange, one since
      assert worker._undelivered.tolist() == [[4, 4]]
      return worker.leave(own)

  with serve(2) as server:
    for found in in_threads(2, train):
      jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(x, y + 9 * 1.5), found, START
      )


def test_bfloat16_parameters_lose_nothing_but_their_own_roundings():
  """The anchor is float32: steps that are too small for bfloat16 at the anchor add up over rounds."""
  params = jnp.full(4, 256, jnp.bfloat16)

  def train(number):
    with join(server, number, params, every=1) as worker:
      own = worker.params
      for _ in range(8):
        # the mean of 0 and 2, where bfloat16 has steps of 2
        own = worker.step(own + jnp.bfloat16(2 * number))
      return worker.leave(), worker.round

  with serve(2) as server:
    for found, rounds in in_threads(2, train):
      assert (found.dtype, rounds) == (jnp.bfloat16, 8)
      np.testing.assert_array_equal(np.asarray(found, np.float32), 264)


@pytest.mark.long
def test_a_late_worker_keeps_what_it_moved_and_a_new_one_gets_the_anchor():
  """Worker 1 sleeps through rounds of 0 and 2; then 3 joins. Weights are those of the steps."""
  asleep, awake = threading.Event(), threading.Event()

  def train(number):
    if number == 3:
      assert awake.wait(60)
    with join(server, number, every=2) as worker:
      own, rounds = worker.params, []
      if number == 3:
        assert worker.round > 2
        assert float(own["b"][0]) > 0
      while not rounds or rounds[-1].members != (0, 1, 2, 3):
        own = worker.step(jax.tree.map(lambda leaf: leaf + 1.0, own))
        if worker.group.members and worker.group not in rounds:
          rounds.append(worker.group)
        if number == 1 and rounds:
          asleep.set()
          assert awake.wait(60)
        if number == 0 and asleep.is_set() and worker.round > 3:
          awake.set()
        time.sleep(0.02)
      return own, worker.leave(), rounds

  with serve(4, quorum=2, grace=0.2) as server:
    found = in_threads(4, train)
  _, anchor, rounds = found[0]
  assert {group.members for group in rounds} >= {(0, 2), (0, 1, 2, 3)}
  for _, other, _ in found[1:]:
    jax.tree.map(np.testing.assert_array_equal, other, anchor)
  moved = np.concatenate([np.ravel(anchor["b"]), np.ravel(anchor["w"]) - 1])
  np.testing.assert_allclose(moved, moved[0], rtol=1e-6)  # all entries alike


def test_a_worker_that_nobody_reaches_is_left_out_and_named(monkeypatch, caplog):
  """It gives the others an address at which nobody listens."""
  endpoint = rounds.processes.PartEndpoint

  def unreached(addresses, bind, *options):
    made = endpoint(addresses, bind, *options)
    made.address = "tcp://127.0.0.1:9" if bind == "tcp://127.0.0.2:*" else made.address
    return made

  def train(number):
    with join(
      server,
      number,
      every=1,
      bind="tcp://127.0.0.2:*" if number == 2 else "tcp://127.0.0.1:*",
    ) as worker:
      assert soon(lambda: server._controller.alive == (0, 1, 2) or ended.is_set())
      own, end = worker.params, time.monotonic() + 60
      while time.monotonic() < end and (
        worker.round < 5 if number < 2 else not ended.is_set()
      ):
        own = worker.step(plus(own, 1.0))
      ended.set()
      return worker.round

  monkeypatch.setattr(rounds.processes, "PartEndpoint", unreached)
  ended = threading.Event()
  with serve(3, quorum=2, grace=1.0) as server:
    assert min(in_threads(3, train)[:2]) >= 5
  assert "leaves out worker 2: it and worker 0" in caplog.text
  assert "cannot be reached at tcp://127.0.0.1:9" in caplog.text


def test_a_worker_answers_one_request_of_a_peer_for_its_anchor_at_a_time():
  """400 of 17 bytes were answered by 400 copies of the model, which stayed in memory."""
  with (
    serve(1) as server,
    join(server, 0, jnp.zeros(10**6)) as worker,
    zmq.Context() as context,
  ):
    peer = context.socket(zmq.DEALER)
    peer.linger = 0
    peer.connect(worker._endpoint.address)
    for _ in range(400):
      peer.send_multipart(Piece(PieceKind.FETCH, 0, 1).pack())
    answers = 0
    while peer.poll(2000):
      piece = messages.parse_piece(peer.recv_multipart())
      answers += piece.kind == PieceKind.MODEL and piece.tag == 0  # the last chunk
    peer.close()
  assert 1 <= answers < 40


def test_parameters_that_are_not_finite_enter_no_round(caplog):
  """The worker goes on from the anchor; the others do without it."""

  def train(number):
    with join(server, number, every=1) as worker:
      own = worker.params
      for step in range(6):
        change = jnp.nan if number == step == 1 else 1.0
        own = worker.step(jax.tree.map(lambda leaf, change=change: leaf + change, own))
      return worker.leave(own)

  with serve(2, quorum=1, grace=0.1) as server:
    found = in_threads(2, train)
  assert "not finite" in caplog.text
  assert all(
    np.isfinite(np.asarray(leaf)).all()
    for params in found
    for leaf in jax.tree.leaves(params)
  )


@pytest.fixture
def poisoned(monkeypatch):
  """In round 1 worker 1 gives NaN past its own check, so that it is skipped."""
  on_cpu = OuterStep.run

  def poisoned(self, anchor, given, *options):
    rank, number = options[2], anchor.position.round
    if (rank, number) == (1, 1):
      given = jax.tree.map(lambda leaf: leaf * jnp.nan, given)
    return on_cpu(self, anchor, given, *options)

  monkeypatch.setattr(OuterStep, "run", poisoned)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
  "dtype", quick_of([jnp.float16, jnp.bfloat16], quick=[jnp.float16])
)
def test_a_round_that_is_skipped_leaves_momentum_and_what_was_moved_to_the_next_one(
  dtype, caplog
):
  """With outer momentum and parameters of 16 bits: what SGD in numpy gives."""
  outer = lambda comm: optax.chain(
    js.dense_transform(comm), optax.sgd(1.0, momentum=0.5)
  )

  def train(number):
    with join(server, number, jnp.zeros(4, dtype), outer, every=2) as worker:
      own = worker.params
      for _ in range(6):
        own = worker.step(
          own + jnp.ones((), dtype) * jnp.asarray(1 + 2 * number, dtype)
        )
      return own, worker.round

  with serve(2) as server:
    for found, rounds in in_threads(2, train):
      assert (found.dtype, rounds) == (dtype, 3)
      # 2 steps of 1 and of 3 a round: 4, nothing, and 8 of two rounds with the momentum
      # of the first
      np.testing.assert_array_equal(np.asarray(found, np.float32), 4 + (8 + 0.5 * 4))
  assert all(
    f"worker {number}: round 2 of workers 0, 1 is skipped" in caplog.text
    for number in range(2)
  )


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
  "dtype", quick_of([jnp.float16, jnp.bfloat16], quick=[jnp.bfloat16])
)
def test_a_skipped_round_keeps_residuals_that_workers_have_in_their_parameters(dtype):
  """Σ updates + Σ residuals = Σ weight_w (θ − θ_w) of 6 steps, and workers end at the anchor less their residual."""
  moves = lambda number: (1 + jnp.arange(4, dtype=dtype) * (1 + number)) / 8

  def train(number):
    with join(
      server, number, jnp.zeros(4, dtype), choosing, every=2, apply_residual=True
    ) as worker:
      own = worker.params
      for _ in range(6):
        own = worker.step(own - moves(number))
      return worker.leave(), own, worker.state["residual"]

  with serve(2) as server:
    anchors, own, residuals = zip(*in_threads(2, train), strict=True)
  given = 6 * (np.asarray(moves(0), np.float32) + np.asarray(moves(1), np.float32)) / 2
  assert all(residual.any() for residual in residuals)
  for anchor, params, residual in zip(anchors, own, residuals, strict=True):
    assert anchor.dtype == params.dtype == dtype
    np.testing.assert_array_equal(
      np.asarray(anchor, np.float32), sum(residuals) - given
    )
    np.testing.assert_array_equal(
      np.asarray(params, np.float32), np.asarray(anchor, np.float32) - 2 * residual
    )


def ramp(number):
  """What worker `number` moves in a step."""
  return jax.tree.map(
    lambda leaf: (
      1.0 + number + jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape)
    ),
    START,
  )


def flat(tree):
  return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@pytest.mark.long
def test_a_worker_that_leaves_hands_its_residual_over_to_another_one():
  """Σ updates + Σ residuals = Σ weight_w (θ − θ_w), over five rounds, of which worker 0 leaves after three."""
  outer = lambda comm: optax.chain(
    js.make_transform("topka", comm, k=1), optax.sgd(1.0)
  )

  def train(number):
    with join(server, number, every=1, outer=outer) as worker:
      assert soon(lambda: server._controller.alive == (0, 1, 2))
      own = worker.params
      for _ in range(5 if number else 3):
        own = worker.step(jax.tree.map(jnp.subtract, own, ramp(number)))
      if number == 0:
        assert worker.state["residual"].any()
        worker.leave(own)
        return gone.set()
      assert gone.wait(60)
      return worker.leave(), worker.state["residual"]

  gone = threading.Event()
  with serve(3, quorum=2) as server:
    _, (anchor, first), (_, second) = in_threads(3, train)
  own = [flat(ramp(number)) for number in range(3)]
  np.testing.assert_allclose(
    flat(START) - flat(anchor) + first + second, sum(own) + own[1] + own[2], rtol=1e-5
  )


def test_a_worker_that_leaves_with_nan_hands_its_residual_over():
  """What it has moved since the anchor is dropped, and it takes part in a last round from there."""

  def train(number):
    with join(server, number, every=1, outer=choosing, wait=10.0) as worker:
      own = worker.params
      for _ in range(2):
        own = worker.step(jax.tree.map(jnp.subtract, own, ramp(number)))
      before = worker.state["residual"]
      if number:
        worker.leave(plus(own, np.nan))
      else:
        worker.step(own)
      return worker.round, before.any(), worker.state["residual"].any()

  with serve(2) as server:
    assert in_threads(2, train)[1] == (3, True, False)


def test_training_goes_on_from_a_saved_state_as_if_it_had_not_ended(tmp_path):
  """Residuals, outer momentum, and what is moved while an exchange is under way; stored by orbax."""
  outer = lambda comm: optax.chain(
    js.make_transform("topka", comm, k=2), optax.sgd(1.0, momentum=0.5)
  )
  store = orbax.checkpoint.PyTreeCheckpointer()

  def run(rounds, restore=False):
    def train(number):
      state = store.restore(tmp_path / f"{number}") if restore else None
      with join(server, number, outer=outer, delay=1, state=state) as worker:
        own, before = worker.params, worker.round
        while worker.round < before + rounds:
          own = worker.step(jax.tree.map(jnp.subtract, own, ramp(number)))
        return worker.state, own

    with serve(2) as server:
      return in_threads(2, train)

  expected = run(4)
  for number, (state, _) in enumerate(run(2)):
    store.save(tmp_path / f"{number}", state)
  for (state, params), (other, others) in zip(
    run(2, restore=True), expected, strict=True
  ):
    np.testing.assert_array_equal(flat(params), flat(others))
    np.testing.assert_array_equal(state["residual"], other["residual"])
    np.testing.assert_array_equal(state["moved"], other["moved"])
  assert state["residual"].any()
  assert state["moved"].any()


def test_a_loop_may_set_a_mesh_and_donate_what_it_has_given():
  """The mesh is without the device of the exchanges. The first parameters are donated, too, and those of each step."""
  mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[8:10])
  move = jax.jit(
    lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0
  )
  first = jax.jit(lambda: START, out_shardings=jax.NamedSharding(mesh, jax.P()))
  with serve(1) as server, jax.set_mesh(mesh):
    given = first()
    worker = join(server, 0, given, choosing, every=2, apply_residual=True)
    move(given)
    own = worker.params
    for _ in range(4):
      before = own
      own = worker.step(move(before))
      assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
      assert jax.sharding.get_abstract_mesh().axis_names == ("data",)
    assert own["w"].sharding.mesh == mesh
    state = worker.state
    worker.leave(own)
  with (
    serve(1) as server,
    jax.set_mesh(mesh),
    join(server, 0, first(), choosing, every=2, state=state) as worker,
  ):
    assert worker.round == 2
    np.testing.assert_array_equal(
      flat(worker.params) - state["residual"], flat(START) + 4
    )


def test_uncommitted_parameters_go_with_a_batch_on_several_devices():
  """As in a plain loop: JAX moves them to the devices of the batch."""
  mesh = jax.make_mesh((2,), ("data",))
  batch = jax.device_put(jnp.ones((4, 4)), jax.NamedSharding(mesh, jax.P("data", None)))
  train = jax.jit(lambda params, batch: plus(params, batch.mean()))
  with serve(1) as server, join(server, 0, every=1) as worker:
    own = worker.params
    assert not any(leaf.committed for leaf in jax.tree.leaves(own))
    for _ in range(3):
      own = worker.step(train(own, batch))
    assert worker.round == 3
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y + 3.0), own, START)


def test_what_was_given_in_a_round_that_another_server_undid_is_given_once_more():
  """The next round delivers it, once."""

  def train(number):
    with join(server, number, every=2) as worker:
      own = worker.params
      for step in range(6):
        if step == 1:
          worker._exchanger.returned = jax.tree.map(
            lambda leaf: 8.0 * jnp.ones_like(leaf), START
          )
        own = worker.step(jax.tree.map(lambda leaf: leaf - 1.0, own))
      return own

  with serve(2) as server:
    for found in in_threads(2, train):
      jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(x, y - 6 - 8), found, START
      )


def test_the_server_is_replaced_by_another_one():
  """No worker ends, none has to be told; the second address is that of a server that was there all the time."""

  def train(number):
    addresses = [first.address, second.address]
    options = {"every": 2, "device": jax.devices()[1 + number], "wait": 0.1}
    with js.partial.Rounds(addresses, number, START, averaging, **options) as worker:
      own, deadline = worker.params, time.monotonic() + 60
      while worker.round < 20:
        assert time.monotonic() < deadline
        own = worker.step(jax.tree.map(lambda leaf: leaf + 1.0, own))
        time.sleep(0.01)
        if number == 0 and worker.round == 5:
          first._stop.set()
      return worker._exchanger.anchor

  with (
    serve(2, grace=0.2, limit=0.5) as first,
    serve(2, grace=0.2, limit=0.5) as second,
  ):
    found = in_threads(2, train)
  assert {anchor.position for anchor in found if anchor.position.round == 20} == {
    max(anchor.position for anchor in found)
  }


def test_workers_at_two_servers_find_each_other():
  """As after a link of one of them was cut: neither server has enough workers for a round."""

  def train(number):
    addresses = [first.address, second.address][:: 1 - 2 * number]
    options = {"every": 2, "device": jax.devices()[1 + number], "wait": 0.1}
    with js.partial.Rounds(addresses, number, START, averaging, **options) as worker:
      own, deadline = worker.params, time.monotonic() + 60
      while worker.round < 3:
        assert time.monotonic() < deadline
        own = worker.step(own)
        time.sleep(0.01)
    return worker.round

  with (
    serve(2, grace=0.2, limit=0.5) as first,
    serve(2, grace=0.2, limit=0.5) as second,
  ):
    assert in_threads(2, train) == [3, 3]


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"every": 0}, "Rounds: every=0"),
    ({"every": 4, "fragments": 5}, "Rounds: fragments=5"),
    ({"every": 4, "delay": 4}, "Rounds: delay=4"),
    ({"every": 4, "mixing": 1.0}, "Rounds: mixing=1.0"),
    (
      {"every": 4, "mixing": 0.5, "apply_residual": True},
      "apply_residual=True with mixing=0.5",
    ),
  ],
)
def test_bad_arguments(options, message):
  with pytest.raises(ValueError, match=message):
    js.partial.Rounds("tcp://127.0.0.1:9", 0, START, averaging, **options)


@pytest.mark.timeout(60)
def test_a_server_that_is_not_there():
  with serve(1) as server, join(server, 0, every=1) as worker:
    worker.step(worker.params)
  for state in None, worker.state:
    with pytest.raises(js.partial.ControllerLost, match="no WELCOME"):
      js.partial.Rounds(
        "tcp://127.0.0.1:9", 0, START, averaging, every=1, timeout=0.5, state=state
      )


# layer_10 is before layer_2
LAYERS = {f"layer_{number}": jnp.full(3, float(number)) for number in range(12)}
SECOND = LAYERS["layer_2"]


UNLIKE = [
  (
    jnp.zeros(36),
    {},
    r"params of float32\[36\], the others have params\['layer_0'\] of float32\[3\]",
  ),
  (
    list(LAYERS.values()),
    {},
    r"params\[0\] of .*, the others have params\['layer_0'\] of float32\[3\]",
  ),
  (
    LAYERS | {"layer_2": SECOND[None]},
    {},
    r"params\['layer_2'\] of float32\[1, 3\], the others have .*\[3\]",
  ),
  (
    LAYERS | {"layer_2": SECOND.astype("bfloat16")},
    {},
    r"params\['layer_2'\] of bfloat16\[3\], the others",
  ),
  (
    dict([*LAYERS.items()][:11]),
    {},
    r"params\['layer_2'\] of .*, the others have .*\['layer_11'\]",
  ),
  (
    LAYERS | {"more": SECOND},
    {},
    r"params\['more'\] of float32\[3\], the others have fragments=1",
  ),
  (LAYERS, {"fragments": 2}, "fragments=2, the others have fragments=1"),
  (
    LAYERS,
    {"outer": lambda comm: optax.chain(js.dense_transform(comm), optax.sgd(0.9))},
    "outer=.*, the others have",
  ),
  (
    LAYERS | {"layer_2": SECOND + 1},
    {},
    r"params\['layer_2'\] with the checksum \w+, the others have params",
  ),
]


def test_what_is_not_alike_is_refused():
  with serve(2, quorum=1, grace=0.1) as server, join(server, 0, LAYERS):
    assert soon(lambda: server._controller.alive == (0,))
    for params, options, message in UNLIKE:
      with pytest.raises(ValueError, match=f"unlike: worker 1 has {message}"):
        join(server, 1, params, **options)
    join(server, 1, LAYERS, every=2).leave()  # a slow worker


def test_a_state_of_another_run_does_not_take_over_the_one_under_way():
  """It has been through more rounds; at a server that knows of none its run goes on."""

  def train(worker, rounds):
    own = worker.params
    while worker.round < rounds:
      own = worker.step(plus(own, 1.0))
    return worker.state

  with serve(2, quorum=1, grace=0.1) as server, join(server, 1, every=2) as worker:
    other = train(worker, 3)
  with serve(2, quorum=1, grace=0.1) as server, join(server, 0, every=2) as worker:
    state = train(worker, 1)
    with pytest.raises(
      ValueError,
      match="unlike: worker 1 has been in the run [0-9a-f]+, the others are in [0-9a-f]+",
    ):
      join(server, 1, every=2, state=other)
    assert train(worker, 2)["run"] == state["run"] != other["run"]
  with (
    serve(2, quorum=1, grace=0.1) as server,
    join(server, 1, every=2, state=other) as worker,
  ):
    assert worker.state["run"] == other["run"]


def plus(tree, more):
  return jax.tree.map(lambda leaf: leaf + more, tree)


def test_a_worker_that_leaves_delivers_every_fragment():
  with serve(1) as server, join(server, 0, every=2, fragments=2) as worker:
    own = worker.params
    for _ in range(2):
      own = worker.step(plus(own, 1.0))
    left = worker.leave(plus(own, 1.0))
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y + 3), left, START)


def test_a_worker_that_leaves_waits_for_its_last_round_as_long_as_its_messages_take(
  monkeypatch,
):
  """Longer than `timeout`, once messages have taken longer at 5 Mbit/s; not again for each fragment."""
  waits = []
  with (
    serve(2, grace=0.5) as server,
    join(server, 0, every=2, fragments=2, timeout=1.0) as worker,
  ):
    late = lambda *facts: waits.append(facts[-1]) or messages.Next.LATER
    monkeypatch.setattr(rounds.processes, "take", late)
    worker._membership.timeout = 300.0
    worker.leave(worker.params)
  assert waits == [300.5]


def test_a_worker_that_leaves_sends_its_last_messages_as_long_as_they_take(monkeypatch):
  states = []
  until = None

  def sending(_):
    nonlocal until
    until = until or time.monotonic() + 1.0
    states.append(time.monotonic() < until)
    return states[-1]

  with serve(1) as server, join(server, 0, every=2, timeout=0.2) as worker:
    worker._membership.timeout = 300.0
    monkeypatch.setattr(sockets.Peers, "sending", property(sending))
    worker.leave()
  assert states[0]
  assert not states[-1]


@pytest.mark.parametrize("for_good", [True, False])
def test_a_worker_that_leaves_without_a_quorum_keeps_what_it_has_moved_in_its_state(
  for_good, caplog
):
  with serve(2, grace=0.1) as server, join(server, 0, every=2, timeout=1.0) as worker:
    own = worker.params
    for _ in range(3):
      own = worker.step(plus(own, 1.0))
    anchor = worker.leave(own if for_good else None)
  jax.tree.map(np.testing.assert_array_equal, anchor, START)
  assert ("its last round has not taken place" in caplog.text) == for_good
  moved = 3 if for_good else 2  # what it had moved when the exchange began
  assert worker.state["trained"].tolist() == [[moved, moved]]
  with serve(1) as server, join(server, 0, every=2, state=worker.state) as worker:
    jax.tree.map(
      lambda x, y: np.testing.assert_array_equal(x, y + moved), worker.params, START
    )
    left = worker.leave(worker.params)
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y + moved), left, START)


@pytest.mark.parametrize(
  ("where", "name"),
  [
    (exchanger, "_all_finite"),
    (rounds.moving, "keep"),
    (rounds.Rounds, "_make_params"),
  ],
  ids=str,
)
def test_a_step_that_is_interrupted_loses_no_round(where, name, monkeypatch):
  """As Ctrl-C in a notebook: when the exchange begins, and while the round is applied. The next step goes on."""
  with serve(1) as server, join(server, 0, every=2) as worker:
    own = worker.step(worker.step(worker.params))

    def interrupt(*_):
      monkeypatch.undo()
      raise KeyboardInterrupt

    monkeypatch.setattr(where, name, interrupt)
    interrupted = 0
    for _ in range(8):
      own = plus(own, 1.0)
      try:
        own = worker.step(own)
      except KeyboardInterrupt:
        interrupted += 1
    assert interrupted == 1
    assert worker.round >= 4
    own = worker.leave(own)
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y + 8.0), own, START)


@pytest.mark.parametrize("where", ["on_cpu", "run"])
def test_an_error_in_the_background_reaches_the_training_loop(where, monkeypatch):
  """As memory that is full: while the movement is copied to the CPU, and in the outer step."""

  def fail(*_):
    raise MemoryError("RESOURCE_EXHAUSTED")

  with serve(1) as server, join(server, 0, every=1, wait=10.0) as worker:
    own = worker.step(worker.params)
    monkeypatch.setattr(OuterStep, where, fail)
    with pytest.raises(MemoryError, match="RESOURCE_EXHAUSTED"):
      worker.step(own)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
  ("change", "message"),
  [
    (
      lambda own: own | {"b": jnp.zeros((1, 4))},
      r"params\['b'\] of \[1, 4\], where training started from .*\[4\]",
    ),
    (
      lambda own: own | {"more": jnp.zeros(2)},
      r"params\['more'\] of \[2\], where training started from params\['w'\]",
    ),
    (
      lambda own: own["b"],
      r"params of \[4\], where training started from params\['b'\] of \[4\]",
    ),
  ],
)
def test_parameters_with_other_leaves_are_refused_and_training_goes_on(
  change, message, delay
):
  """Also while an exchange is under way, whose round is applied by the next step."""
  with serve(1) as server, join(server, 0, every=2, delay=delay) as worker:
    own = worker.step(worker.params)
    assert not delay or soon(lambda: worker._exchanger.delivered)
    with pytest.raises(ValueError, match=message):
      worker.step(change(own))
    for _ in range(4):
      own = worker.step(plus(own, 1.0))
    assert worker.round >= 2
    own = worker.leave(own)
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y + 4.0), own, START)


def test_nan_is_not_kept_by_a_worker_that_leaves_in_the_middle_of_an_exchange():
  with serve(2, grace=60.0) as server, join(server, 0, every=2, delay=1) as worker:
    worker.step(plus(worker.params, np.nan))
    worker.leave()
    worker.leave()  # nothing happens any more
  assert not worker.state["moved"].any()
  assert not worker.state["trained"].any()
  with pytest.raises(RuntimeError, match="worker 0 has left: go on with another"):
    worker.step(worker.params)


def test_round_changes_when_it_is_applied_and_the_state_can_be_saved_then():
  with serve(1) as server, join(server, 0, every=4, delay=3) as worker:
    own, rounds = worker.params, []
    for step in range(16):
      before = worker.round
      time.sleep(0.02)  # the round counts in the background meanwhile
      assert worker.round == before
      own = worker.step(plus(own, 1.0))
      if worker.round > before:
        rounds.append(step)
        assert worker.state["moved"].size == 12
        assert worker.group.members == (0,)
  assert len(rounds) >= 3


def test_a_state_counts_the_steps_whose_movement_it_has():
  with serve(1) as server, join(server, 0, every=4) as worker:
    own = worker.params
    for _ in range(6):
      own = worker.step(plus(own, 1.0), 8)
    assert worker.round == 1  # two steps before
    worker.leave()
  assert not worker.state["moved"].any()
  assert not worker.state["trained"].any()


def test_each_address_is_tried_at_the_start():
  with serve(1) as server:
    addresses = ["tcp://127.0.0.1:9", server.address]
    js.partial.Rounds(addresses, 0, START, averaging, every=1, timeout=4.0).leave()


def test_each_fragment_is_weighted_by_the_steps_since_it_was_delivered():
  """Worker 1 moves in steps of weight 1, then stands still in steps of weight 0; worker 0 never moves."""

  def train(number):
    with join(server, number, every=4, fragments=2) as worker:
      own = worker.params
      for step in range(4):
        own = worker.step(
          plus(own, float(number and step < 2)),
          weight=1 if number == 0 or step < 2 else 0,
        )
      return worker._exchanger.anchor.params

  with serve(2) as server:
    for anchor in in_threads(2, train):
      moved = {
        name: np.ptp(np.asarray(leaf) - START[name])
        or (np.asarray(leaf) - START[name]).max()
        for name, leaf in anchor.items()
      }
      # The first fragment after two steps of weight 1 each; the second after weights 4
      # and 2 over four steps.
      assert sorted(moved.values()) == pytest.approx([2 / 3, 1.0], rel=1e-4)


@pytest.mark.parametrize(
  "which", quick_of(["left", "saved before", "old"], quick=["saved before"])
)
def test_what_a_state_had_not_delivered_counts_once_when_its_worker_comes_back(
  which, caplog
):
  """It was handed over since, or delivered in later rounds; the others train on meanwhile."""
  outer = lambda comm: optax.chain(
    js.make_transform("topka", comm, k=1), optax.sgd(1.0)
  )
  is_back = threading.Event()

  def train(number):
    with join(server, number, every=1, outer=outer) as worker:
      assert soon(lambda: server._controller.alive == (0, 1))
      own = worker.params
      while worker.round < 3:
        own = worker.step(jax.tree.map(jnp.subtract, own, ramp(number)))
      if number == 0:
        while not is_back.is_set():
          own = worker.step(own)
        return worker.state
      state = worker.state
      assert state["residual"].any()
      if which == "old":
        while worker.round < 5:
          own = worker.step(jax.tree.map(jnp.subtract, own, ramp(number)))
      worker.leave(None if which == "old" else own)
      state = worker.state if which == "left" else state
    try:
      with join(server, number, every=1, outer=outer, state=state) as worker:
        return worker.state
    finally:
      is_back.set()

  with serve(2, quorum=1, grace=2.0) as server:
    _, again = in_threads(2, train)
  assert not again["residual"].any()
  assert not again["moved"].any()
  assert ("its state is of an older round than" in caplog.text) == (which != "left")


def test_a_worker_of_rounds_that_the_others_have_undone_is_refused():
  """Its state is of round 4; the other one went on from round 2, with other rounds."""
  states = {}

  def train(number):
    with join(server, number, every=1) as worker:
      own = worker.params
      for round_ in range(1, 5):
        own = worker.step(plus(own, 1.0))
        states[number, round_] = worker.state

  with serve(2) as server:
    in_threads(2, train)
  with (
    serve(2, quorum=1, grace=0.1, limit=0.5) as server,
    join(server, 0, every=1, wait=20, state=states[0, 2]) as worker,
  ):
    own = worker.params
    for _ in range(3):
      own = worker.step(plus(own, -1.0))
    with pytest.raises(ValueError, match=r"round 4 of another branch of this run"):
      join(server, 1, every=1, state=states[1, 4])
    assert worker.round == 5
    with join(server, 1, every=1) as other:
      assert other.round == 5


@pytest.mark.parametrize(("light", "steps"), [(1, [5]), (0, [4, 5, 6, 7])])
def test_steps_of_little_weight_do_not_throw_a_worker_off(light, steps):
  """Its residual is of steps of much weight: divided by the little one it would be 64 times as large."""
  outer = lambda comm: optax.chain(
    js.make_transform("topka", comm, k=1), optax.sgd(1.0)
  )

  def train(number):
    with join(server, number, every=1, outer=outer, apply_residual=True) as worker:
      own, far = worker.params, []
      for step in range(8):
        weight = light if number == 0 and step in steps else 64
        own = worker.step(plus(own, 0.1), weight=weight)
        far.append(max(float(abs(leaf).max()) for leaf in jax.tree.leaves(own)))
      return far

  with serve(2) as server:
    far, _ = in_threads(2, train)
  assert max(far) < 2 * max(far[:4])


def make_state(params):
  step = OuterStep(averaging)
  content = np.frombuffer(step.pack(step.start(params)), np.uint8)
  arrays = {
    "anchor": content,
    "residual": np.zeros(12, np.float32),
    "moved": np.zeros(12, np.float32),
  }
  numbers = {"share": 0.0, "fragments": 1, "latest": 0, "part": np.array((0, 1))}
  numbers["names"] = checks.hash_names(params)
  return checks.seal(
    arrays | numbers | {"trained": np.zeros((1, 2), int)}, worker=0, run=1
  )


STATE = make_state(START)
NOT_FINITE = make_state(START | {"b": jnp.full(4, jnp.inf)})
WRONG = [
  ({"outer": lambda _: optax.sgd(1.0)}, ValueError, "outer has no jaxsparse transform"),
  (
    {"outer": lambda comm: optax.masked(averaging(comm), {"b": True, "w": False})},
    ValueError,
    r"anchor\['w'\] would",
  ),
  (
    {"outer": lambda comm: optax.chain(optax.trace(0.5), averaging(comm))},
    ValueError,
    r"outer\[0\].trace\['b'\] would",
  ),
  (
    {"outer": lambda comm: js.spardl_transform(comm, density=2.0)},
    ValueError,
    "density=2.0",
  ),
  ({"number": -1}, ValueError, "number=-1, choose a whole number from 0 to 65535"),
  ({"wait": -1}, ValueError, "wait=-1, choose seconds from 0"),
  ({"wait": "auto"}, ValueError, "wait='auto', choose seconds from 0"),
  ({"timeout": float("inf")}, ValueError, "timeout=inf, choose seconds"),
  ({"address": "localhost:2900"}, ValueError, "choose tcp://HOST:PORT"),
  ({"address": []}, ValueError, "choose tcp://HOST:PORT"),
  (
    {"address": "tcp://127.0.0.1:*"},
    ValueError,
    "choose tcp://HOST:PORT with a PORT of 1 … 65535$",
  ),
  ({"params": {"w": None}}, ValueError, r"params={'w': None} has no arrays"),
  (
    {"params": {"count": jnp.zeros(3, jnp.int32)}},
    TypeError,
    r"params\['count'\] has dtype int32",
  ),
  (
    {"state": STATE | {"fragments": np.int64(2)}},
    ValueError,
    "fragments=1, but the state was saved with 2",
  ),
  ({"state": {}}, ValueError, "the state has no anchor, digest, fragments, latest"),
  (
    {"state": {"fragments": np.int64(1)}},
    ValueError,
    "the state has no anchor, digest, latest, moved, names, number, part, residual, run",
  ),
  (
    {"state": {name: STATE[name] for name in STATE if name != "share"}},
    ValueError,
    "the state has no share: give what .* versions of jaxsparse without",
  ),
  (
    {"state": checks.seal(STATE, 1, run=1)},
    ValueError,
    "number=0, but the state was saved by worker 1",
  ),
  (
    {"state": STATE, "params": {"other": START["b"], "w": START["w"]}},
    ValueError,
    "the state was saved with parameters whose leaves have other names",
  ),
  (
    {"state": STATE | {"residual": np.full(12, np.nan)}},
    ValueError,
    "the residual in the state has NaN or Inf",
  ),
  *(
    (
      {"state": STATE | {name: changed}},
      ValueError,
      "the state has changed since it was saved, its digest",
    )
    for name, changed in {
      "moved": np.full(12, 2.0),
      "share": 2.0**-55,
      "trained": np.array([[1 << 20, 0]]),
      "run": 2,
      "latest": 5,
    }.items()
  ),
  ({"state": STATE | {"share": np.nan}}, ValueError, "the share in the state has NaN"),
  *(
    ({"state": STATE | {name: value}}, ValueError, f"the {name} in the state is {kind}")
    for name, value, kind in [
      ("residual", "x", "str"),
      ("latest", np.nan, "float64"),
      ("trained", None, "object"),
      ("part", [], "float64"),
      ("share", np.zeros(2), "float64"),
      ("digest", [], "float64"),
    ]
  ),
  ({"state": NOT_FINITE}, ValueError, "the parameters of the anchor have NaN or Inf"),
]


@pytest.mark.parametrize(
  ("wrong", "error", "message"), WRONG, ids=lambda one: str(one)[:30]
)
def test_what_is_wrong_is_refused_and_the_number_stays_free(wrong, error, message):
  with serve(1) as server:
    given = {
      "address": server.address,
      "number": 0,
      "params": START,
      "outer": averaging,
      "every": 2,
    }
    with pytest.raises(error, match=message):
      js.partial.Rounds(**given | wrong)
    # The server takes a moment to see that a connection is gone.
    with (
      js.partial.Rounds(**given) as worker,
      pytest.raises(ValueError, match="weight=1099511627776, choose"),
    ):
      worker.step(worker.params, weight=2**40)


MASK = np.ones((4, 8))


@pytest.mark.parametrize(
  "weight",
  [
    *(32, 32.0, np.int64(32), np.uint8(32), np.float16(32), np.array(32)),
    *(jnp.int32(32), jnp.bfloat16(32), jnp.asarray(MASK).sum(), MASK.sum()),
    fractions.Fraction(32),
  ],
)
def test_the_weight_of_a_step_is_any_whole_scalar(weight):
  assert checks.read_weight(weight) == 32
  assert type(checks.read_weight(weight)) is int


@pytest.mark.parametrize(
  "weight",
  [
    *(-1, 0.5, math.nan, math.inf, 2**31, 2**70, True, np.True_, jnp.bool_(True)),
    *("32", None, 3 + 0j, np.complex64(3), [32], np.array([32]), jnp.ones((1, 1))),
    decimal.Decimal("0.5"),
  ],
)
def test_another_weight_is_refused_by_name(weight):
  with pytest.raises(
    ValueError, match="^step: weight=.*, choose a whole number from 0"
  ):
    checks.read_weight(weight)
