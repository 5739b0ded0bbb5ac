"""Measured inputs: in which order gradients come, and what each takes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxsparse as js
from jaxsparse.overlap import measured
from jaxsparse.train import timing
from tests.cases import mesh_of, quick_of

WIDTHS = (16, 16, 256, 16, 16, 16)


def params_of(widths=WIDTHS):
  """Layers whose names are not in the order of the forward pass, as dictionaries sort them."""
  pairs = itertools.pairwise(widths)
  return {
    f"{'cab'[n % 3]}{n}": {"w": jnp.ones((a, b)) / a, "bias": jnp.zeros(b)}
    for n, (a, b) in enumerate(pairs)
  }


def loss(params, batch):
  for name in sorted(params, key=lambda name: name[1:]):
    batch = jnp.tanh(batch @ params[name]["w"] + params[name]["bias"][None])
  return jnp.sum(batch)


@pytest.mark.long
def test_layers_are_in_the_order_of_the_forward_pass():
  params = params_of()
  layers = js.overlap.measure(
    loss, params, jnp.ones((16384, 16)), mesh_of(2), cuts=3, repetitions=3
  )
  assert [name[3] for name in layers.names] == list("0011223344")
  leaves = jax.tree.leaves(params)
  assert list(layers.sizes) == [4.0 * leaves[number].size for number in layers.order]
  assert sorted(layers.order) == list(range(10))
  assert min(layers.backward_times) >= 0 < layers.forward


@pytest.mark.parametrize(
  "kind", quick_of([AxisType.Auto, AxisType.Explicit], quick=[AxisType.Explicit])
)
def test_sharded_parameters_stay_sharded(kind, monkeypatch):
  """The programs that are timed take and give shards, and no leaf is gathered."""
  mesh = jax.make_mesh(
    (2, 2), ("hosts", "devices"), (kind,) * 2, devices=jax.devices()[:4]
  )
  place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
  params = {
    "up": place(jnp.ones((64, 256)), None, "devices"),
    "scale": place(jnp.ones((1, 256)), None, "devices"),
  }
  texts, run = [], timing.Stopwatch.time

  def kept(watch, program, *arguments):
    texts.append(program.lower(*arguments).compile().as_text())
    return run(watch, program, *arguments)

  monkeypatch.setattr(timing.Stopwatch, "time", kept)
  loss = lambda params, batch: jnp.sum(jnp.tanh(batch @ params["up"]) * params["scale"])
  batch = place(jnp.ones((8, 64)), "hosts")
  layers = js.overlap.measure(
    loss, params, batch, mesh, axis="hosts", cuts=2, repetitions=1
  )
  assert sorted(layers.names) == ["['scale']", "['up']"]
  assert all(
    "f32[64,128]" in text and "f32[64,256]" not in text and "all-gather" not in text
    for text in texts
  )


def work_of(loss, params, batch):
  both = lambda params, x: jax.tree.leaves(jax.value_and_grad(loss)(params, x))
  order, done = measured.order_backward(jax.make_jaxpr(both)(params, batch).jaxpr)
  return order, np.diff(done)


def test_operations_of_backward():
  """Each weight's own product, and that of the gradient handed down, are as large as the layer."""
  order, work = work_of(loss, params_of(), jnp.ones((32, 16)))
  assert len(order) == len(work) == 10
  products = 2 * 32 * sum(2 * a * b for a, b in itertools.pairwise(WIDTHS[1:]))
  assert products < sum(work) < 1.5 * products
  loop = lambda params, x: jnp.sum(
    jax.lax.scan(lambda x, _: (jnp.tanh(x @ params[0]), None), x, None, length=7)[0]
  )
  assert (
    sum(work_of(loop, [jnp.ones((8, 8))], jnp.ones((32, 8)))[1])
    > 7 * 2 * 2 * 32 * 8 * 8
  )


@pytest.mark.parametrize(
  "wrap", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(jax.jit(f)))]
)
def test_calls_within_a_loss_hide_no_order(wrap):
  """As `jax.jit`, `jax.checkpoint` and the functions of flax and jax.nn make them: of the whole, or of each layer."""
  layer = wrap(lambda w, x: jax.nn.silu(x @ w))
  each = lambda params, x: jnp.sum(
    layer(params[1], layer(params[0], layer(params[2], x)))
  )
  whole = wrap(
    lambda params, x: jnp.sum(
      jnp.tanh(jnp.tanh(jnp.tanh(x @ params[2]) @ params[0]) @ params[1])
    )
  )
  for one in (each, whole):
    order, work = work_of(one, [jnp.ones((8, 8))] * 3, jnp.ones((32, 8)))
    assert order == [1, 0, 2]
    assert min(work) >= 2 * 32 * 8 * 8


@pytest.mark.parametrize("where", [mesh_of(2), js.SimComm("workers", members=2)])
def test_a_loss_may_talk_over_the_axis_and_leave_parameters_unused(where):
  """Which are there from the start."""
  loss = lambda params, x: jnp.sum(
    jax.lax.pmean(jnp.mean(x @ params[1]), "workers") * params[0]
  )
  params = [jnp.ones(3), jnp.ones((4, 2)), jnp.ones(3)]
  assert js.overlap.measure(
    loss, params, jnp.ones((4, 4)), where, repetitions=1
  ).order == (1, 0, 2)


def test_seconds_between_two_cuts_are_shared_out_by_work(monkeypatch):
  """The gradients of one leaf take 1 s more than the forward pass, those of all three 8 s more than that."""

  def time(_, program, *arguments):
    ready = len(jax.eval_shape(program, *arguments)) - 1
    return {0: 1.0, 1: 2.0, 3: 10.0}[ready], None

  monkeypatch.setattr(
    measured, "order_backward", lambda _: ([2, 1, 0], np.array([0.0, 4.0, 7.0, 8.0]))
  )
  monkeypatch.setattr(timing.Stopwatch, "time", time)
  linear = lambda params, batch: sum(jnp.sum(batch * one[None]) for one in params)
  layers = js.overlap.measure(
    linear, [jnp.ones(2)] * 3, jnp.ones((2, 2)), mesh_of(2), cuts=2, repetitions=1
  )
  assert (layers.forward, layers.backward_times) == (1.0, (2.0, 6.0, 1.0))


BAD = [
  ({"params": {}}, "have no leaf"),
  ({"cuts": 0}, "cuts=0, choose a whole"),
  ({"repetitions": 1.5}, "repetitions=1.5"),
  (
    {"batch": jnp.ones((3, 16))},
    r"batch has shape \(3, 16\): its leading axis must divide among the 2 workers",
  ),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input(change, message):
  with pytest.raises(ValueError, match=message):
    js.overlap.measure(
      loss,
      **(
        {"params": params_of(), "batch": jnp.ones((2, 16)), "mesh": mesh_of(2)} | change
      ),
    )
