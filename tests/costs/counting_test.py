"""Counting: from the jaxpr, for sizes that nothing could hold."""

import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from jaxsparse.collectives import collective_options
from jaxsparse.comm import AxisComm, all_reduce_cost
from jaxsparse.costs.counting import count_jaxpr
from tests.cases import CASES, quick_of


def counted(function, workers):
  """The cost of `function(comm, f32[10])` at one of `workers` workers."""
  program = jax.make_jaxpr(
    lambda x: function(AxisComm("w"), x), axis_env=[("w", workers)]
  )
  return count_jaxpr(program(jax.ShapeDtypeStruct((10,), jnp.float32)).jaxpr, workers)


def test_programs():
  """Loops count their length, switches their dearest branch, a word is an agreement, and views count their size."""
  once, twice = (
    lambda comm, x: comm.shift(x, 1),
    lambda comm, x: comm.shift(comm.shift(x, 1), 1),
  )
  switch = lambda comm, x: jax.lax.cond(
    x[0] > 0, lambda y: once(comm, y), lambda y: twice(comm, y), x
  )
  assert counted(
    lambda comm, x: jax.lax.fori_loop(0, 5, lambda _, y: comm.shift(y, 1), x), 4
  ) == js.Cost(5, 50)
  assert counted(switch, 4) == js.Cost(2, 20)
  assert counted(lambda comm, x: x + comm.all_reduce(x[0], "max"), 4) == js.Cost(
    0, 0, agreements=4
  )
  assert counted(lambda comm, x: comm.split(4)[0].all_reduce(x), 8) == all_reduce_cost(
    10, 2
  )
  endless = lambda comm, x: jax.lax.while_loop(
    lambda y: y[0] > 0, lambda y: comm.shift(y, 1), x
  )
  with pytest.raises(NotImplementedError, match="unknown length"):
    counted(endless, 4)
  assert counted(
    lambda comm, x: comm.all_to_all(x.reshape(5, 2)).reshape(-1), 5
  ) == js.Cost(4, 8)
  other = lambda comm, x: jax.lax.all_gather(x, comm.axis)[0]
  with pytest.raises(NotImplementedError, match="all_gather is not known"):
    counted(other, 2)


@pytest.mark.parametrize("axis", [js.SimComm("workers", members=2), ("a", "b")])
def test_an_update_is_counted_over_one_axis_by_its_name(axis):
  tx = js.dense_transform(axis)
  with pytest.raises(TypeError, match="give the name of one axis"):
    js.costs.count_update(tx, jnp.zeros(3), workers=2, axis=axis)


def test_the_update_of_a_chain_is_counted():
  """Published ways by their names: an exchange each; and of fragments, one after the other, all together."""
  sgd, axis, sizes = optax.sgd(1.0), "workers", {"n": 9100, "workers": 6}
  params = {
    "b": jax.ShapeDtypeStruct((100,), jnp.float32),
    "w": jax.ShapeDtypeStruct((300, 30), jnp.float32),
  }
  count_chain = lambda tx: js.costs.count_update(tx, params, workers=6)
  assert count_chain(js.diloco(sgd, axis)) == js.costs.count("dense", **sizes)
  assert count_chain(js.sparseloco(sgd, axis)) == js.costs.count(
    "chunktopk", density=1 / 64, wire="2bit", **sizes
  )
  assert count_chain(js.demo_transform(axis)) == js.costs.count(
    "dcttopk", density=1 / 128, **sizes
  )
  parts = [js.costs.count("dense", n=n, workers=6) for n in (9000, 100)]
  streamed = count_chain(js.streaming_diloco(sgd, axis, fragments=2, delay=3))
  assert streamed == js.Cost(*map(sum, zip(*parts, strict=True)))
  assert streamed.words_per_step(every=100) == streamed.words / 100


@pytest.mark.parametrize(
  "examples", quick_of([5, 60], quick=[5]), ids=lambda examples: f"{examples} examples"
)
def test_the_formula_is_what_is_counted(examples):
  """Of any collective, options, n, P and density; where sizes vary, only agreements must be equal."""

  @hypothesis.settings(max_examples=examples, deadline=None)
  @hypothesis.given(
    case=st.sampled_from(CASES),
    workers=st.integers(1, 20),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    density=st.sampled_from([1e-4, 0.01, 0.07, 0.5, 1.0]),
  )
  def check(case, workers, shape, density):
    teams = dict(case.options).get("teams", 1)
    collective = case.make(density=density).for_leaves((shape,))
    sizes = {"n": math.prod(shape), "workers": workers * teams}
    counted = js.costs.count(collective, **sizes)
    predicted = js.costs.predict(collective, **sizes)
    assert counted.agreements == predicted.agreements
    if collective.traits.sizes_vary:
      assert counted.messages <= predicted.messages
      assert counted.words <= predicted.words
    else:
      assert counted == predicted

  check()


WRONG = [
  ("dense", 0, 2, "n=0"),
  ("dense", 5, 0, "workers=0"),
  ("dense", 1e3, 2, "n=1000.0, give a whole"),
  ("dense", {}, 2, "n={}"),
  (
    "powersgd",
    8,
    2,
    "powersgd: the words of n=8 .* give the parameters as n",
  ),  # a vector would be sent as it is
]


@pytest.mark.parametrize("function", [js.costs.count, js.costs.predict])
def test_bad_sizes(function):
  assert function("dense", n=np.int64(1000), workers=8).words == 1750
  for name, n, workers, message in WRONG:
    with pytest.raises(ValueError, match=message):
      function(name, n=n, workers=workers)


@pytest.mark.parametrize(
  "name",
  quick_of(
    js.collective_names(), quick=["dense", "onebit", "powersgd", "qsgd", "spardl"]
  ),
)
@pytest.mark.parametrize(
  ("n", "density"),
  quick_of([(2 * 10**9, 0.01), (7 * 10**8, 1.0)], quick=[(7 * 10**8, 1.0)]),
)
def test_a_gradient_of_so_many_entries_is_counted(name, n, density):
  """Traced with the counters of a step, which hold 2³² − 1 words at most; the count itself is a Python number."""
  config = {"density": density} if "density" in collective_options(name) else {}
  collective = js.make_collective(name, **config).for_leaves(((n // 50_000, 50_000),))
  counted, predicted = (
    count(collective, n=n, workers=32) for count in (js.costs.count, js.costs.predict)
  )
  assert all(was <= most for was, most in zip(counted, predicted, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("wire", quick_of(["bf16", "int8"], quick=["int8"]))
def test_messages_of_more_bits_than_31_can_number(wire):
  """Rows of all P workers are decoded some at a time."""
  n, k = 10**9, 10**7
  for name in ("topka", "gaussiank"):
    js.costs.count(name, n=n, workers=256, k=k, wire=wire)


@pytest.mark.parametrize("name", js.collective_names())
def test_more_entries_than_indices_can_tell_are_refused(name):
  config = {"k": 1000} if "k" in collective_options(name) else {}
  if name == "dense":
    assert js.costs.count(name, n=10**11, workers=4).words == 15 * 10**10
    return
  message = rf"{name}: 2147483648 gradient entries .* 21474\d+ indices, .* choose at most 2147352576"
  with pytest.raises(ValueError, match=message):
    js.costs.count(
      js.make_collective(name, **config).for_leaves(((2**31,),)), n=2**31, workers=4
    )
  init = jax.vmap(
    js.make_transform(name, js.SimComm("w", members=4), **config).init, axis_name="w"
  )
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(init, jax.ShapeDtypeStruct((4, 2**31), jnp.float32))


def test_the_words_of_an_update_do_not_depend_on_shardings():
  mesh = jax.make_mesh((2,), ("workers",), devices=jax.devices()[:2])
  replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  tx = js.onebit_transform("workers")
  params = jnp.zeros(256)
  costs = [
    js.costs.count_update(tx, x, workers=2)
    for x in (params, jax.device_put(params, replicated))
  ]
  assert costs[0] == costs[1]
