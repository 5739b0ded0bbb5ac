"""Fragments that are exchanged in turn, and updates that are applied later, against numpy (Streaming DiLoCo)."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from jaxsparse.comm import all_reduce_cost
from jaxsparse.transform.residuals import moved_leaves
from tests.cases import averaged, flat, mesh_of, normals, quadratic, quick_of, rows, sim
from tests.cases import start as start_with

PARAMS = {"a": jnp.zeros(6), "b": jnp.zeros((4, 5)), "c": jnp.zeros(9)}
N, WORKERS, MU, RATE, INNER = 35, 3, 0.9, 0.7, 0.25
# the entries of "b", which are the first of two fragments
LARGEST = (np.arange(N) >= 6) & (np.arange(N) < 26)
COMM = sim(WORKERS)


def start(tx, where, loss=quadratic):
  return start_with(tx, where, PARAMS, loss)


def stream_in_numpy(every, delay, mixing, fragments, batches):
  """Inner SGD at rate `INNER` on a quadratic, outer Nesterov momentum: the anchor, all workers, entries exchanged."""
  anchor, momentum, update, own = (
    np.zeros(N),
    np.zeros(N),
    np.zeros(N),
    np.zeros((WORKERS, N)),
  )
  for number, batch in enumerate(batches, 1):
    own -= INNER * (own - batch)
    exchanged = 0
    for fragment, entries in enumerate(fragments, 1):
      turn = every * fragment // len(fragments)
      if (number + delay - turn) % every == 0:
        delta = (anchor - own.mean(0))[entries]
        momentum[entries] = MU * momentum[entries] + delta
        update[entries] = -RATE * (delta + MU * momentum[entries])
        exchanged += delta.size
      if (number - turn) % every == 0:
        anchor[entries] += update[entries]
        own[:, entries] = mixing * own[:, entries] + (1 - mixing) * anchor[entries]
    yield anchor, own, exchanged


@pytest.mark.parametrize(
  ("fragments", "every", "delay", "mixing"),
  quick_of(
    [(2, 6, 1, 0.5), (2, 5, 0, 0.0), (2, 6, 2, 0.0), (1, 4, 3, 0.5), (1, 3, 0, 0.5)],
    quick=[(2, 6, 1, 0.5)],
  ),
)
def test_streaming_in_numpy(fragments, every, delay, mixing):
  """Anchor and parameters of each worker after every step, and the words of every step: those of a fragment."""
  batches = [normals(number, WORKERS, N) for number in range(3 * every)]
  entries = [LARGEST, ~LARGEST] if fragments == 2 else [slice(None)]
  options = {"fragments": fragments, "every": every, "delay": delay, "mixing": mixing}
  step, params, state = start(
    js.streaming_diloco(optax.sgd(INNER), COMM, **options), COMM
  )
  expected = stream_in_numpy(every, delay, mixing, entries, batches)
  for batch, (anchor, own, exchanged) in zip(batches, expected, strict=True):
    params, state, _ = step(params, state, batch)
    np.testing.assert_allclose(flat(params), anchor, atol=1e-5)
    np.testing.assert_allclose(
      flat(params) - rows(moved_leaves(state), WORKERS), own, atol=1e-5
    )
    words = all_reduce_cost(exchanged, WORKERS).words if exchanged else 0
    assert float(js.metrics(state).words_sent) == pytest.approx(words, abs=2)


@pytest.mark.long
def test_what_is_in_flight_outlives_the_run():
  """Other workers apply it; js.flush refuses it; step.synchronize applies it, leaves nothing moved, and keeps turns."""
  tx = js.local_steps(optax.sgd(0.5), averaged("workers"), every=4, delay=2, mixing=0.5)
  step, params, state = start(tx, mesh_of(4))
  for number in range(3):
    params, state, _ = step(params, state, normals(number, 4, N))
  assert int(state.flight.left) == 1
  landed = jax.tree.map(lambda p, u: np.asarray(p + u), params, state.flight.update)
  with pytest.raises(
    ValueError,
    match="an update of local steps is in flight, apply it by step.synchronize",
  ):
    js.flush(state, params, mesh_of(4))
  host = jax.tree.map(np.asarray, params)
  with pytest.warns(UserWarning, match="go on from the mean"):
    resized = js.resize(state, host, mesh_of(2))
  after, _, _ = js.make_train_step(quadratic, tx, mesh_of(2), donate=False)(
    host, resized, normals(3, 2, N)
  )
  chex.assert_trees_all_close(after, landed, atol=1e-6)
  after, state = step.synchronize(params, state)
  chex.assert_trees_all_close(after, landed, atol=1e-6)
  assert float(js.metrics(state).drift) == 0
  js.flush(state, after, mesh_of(4))
  words = []
  for number in range(4):
    after, state, _ = step(after, state, normals(number, 4, N))
    words.append(float(js.metrics(state).words_sent))
  # H − τ = 2 steps after the exchange
  assert [count > 0 for count in words] == [
    False,
    True,
    False,
    False,
  ]


@pytest.mark.long
def test_synchronizing_with_an_update_in_flight_leaves_nothing_moved_in_bfloat16():
  tx = js.local_steps(optax.sgd(0.37), averaged(COMM), every=4, delay=2)
  params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
  step, params, state = start_with(tx, COMM, params)
  for number in range(3):
    params, state, _ = step(params, state, normals(number, WORKERS, N))
  assert int(state.flight.left) == 1
  params, state = step.synchronize(params, state)
  assert float(js.metrics(state).drift) == 0


def test_another_rhythm_loses_no_update():
  """After js.convert in the middle of a turn all that was moved is still delivered once; in flight it is refused."""
  every, ones = (
    4,
    lambda p, batch: sum(leaf.sum() for leaf in jax.tree.leaves(p)) * batch.mean(),
  )
  slow, quick = (
    js.local_steps(optax.sgd(1.0), averaged(COMM), every=turn, delay=3)
    for turn in (8, every)
  )
  step, params, state = start(slow, COMM, ones)
  batch = np.ones((WORKERS, 1), np.float32)
  for _ in range(4):
    params, state, _ = step(params, state, batch)
  state, step = (
    js.convert(state, quick, params, COMM),
    js.make_train_step(ones, quick, COMM, donate=False),
  )
  for number in range(5, 5 + 2 * every):
    params, state, _ = step(params, state, batch)
    flying = float(state.flight.update["a"][0])
    assert flying or number > 5  # the turn of the new rhythm is over
    assert float(params["a"][0]) == 0 or float(params["a"][0]) <= -5 + 3
    if flying and number < 8:
      with pytest.raises(
        ValueError, match="js.convert: an update of local steps is in flight"
      ):
        js.convert(state, slow, params, COMM)
  assert float(params["a"][0]) < -4


@pytest.mark.long
def test_leaves_of_their_own_collective_in_one_fragment_of_two():
  """Fragment 0 has no leaf that `special` names: its exchange is all TopkA; what the others name is sent whole."""
  sparse = js.make_transform("topka", COMM, {"a|c": "dense"}, k=1)
  tx = js.local_steps(
    optax.sgd(INNER), optax.chain(sparse, optax.sgd(1.0)), every=2, fragments=2
  )
  step, params, state = start(tx, COMM)
  batches = [normals(number, WORKERS, N) for number in range(2)]
  own = np.zeros((WORKERS, N))
  for number, batch in enumerate(batches):
    params, state, _ = step(params, state, batch)
    own -= INNER * (own - batch)
    if number == 0:
      assert 1 <= np.count_nonzero(flat(params)) <= WORKERS
      own[:, LARGEST] = 0
  np.testing.assert_allclose(flat(params)[~LARGEST], own.mean(0)[~LARGEST], atol=1e-5)
  parts = js.metrics(state).as_dict()
  assert (
    sum(parts[f".outer[{fragment}][0]/words_per_step"] for fragment in (0, 1))
    == parts["words_per_step"]
  )
  assert ".outer[0][0]/drift" not in parts
