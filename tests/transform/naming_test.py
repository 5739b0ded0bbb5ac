"""A name, a name with options, and an instance mean the same collective wherever one is given."""

import jax.numpy as jnp
import optax
import pytest

import jaxsparse as js
from jaxsparse.collectives import collective_options
from jaxsparse.costs.calibration import Algorithm
from jaxsparse.transform.state import reduce_states
from tests.cases import CASES, assert_same_bits, normals, sim, start

WORKERS, N = 2, 24
COMM = sim(WORKERS)
PARAMS = {"bias": jnp.zeros(8), "w": jnp.zeros((4, 4))}
LABEL = "topka:wire=bf16:density=0.25"
INSTANCE = js.make_collective("topka", wire="bf16", density=0.25)
PROFILE = js.costs.Profile(
  workers=WORKERS,
  alpha=1e-4,
  beta=8e-9,
  reduce_alpha=1e-4,
  reduce_beta=8e-9,
  algorithms={
    LABEL: Algorithm(1e-9),
    "dense": Algorithm(0.0, reduces=True),
    "powersgd": Algorithm(1e-9),
  },
)
PLAN = js.overlap.plan("wfbp", [0.1, 0.2], [32, 64], alpha=1, beta=1, gamma=1)


def collectives(tx):
  """The labels of the collectives of a chain, by leaf."""
  state = js.abstract_state(tx, PARAMS, COMM)
  return [
    (group.leaves, group.collective.label)
    for node in reduce_states(state)
    for group in node.layout.method.groups
  ]


def grads():
  return jnp.asarray(normals(0, WORKERS, N))


WAYS = {
  "collective_options": collective_options,
  "make_collective": lambda one: js.make_collective(one).label,
  "make_transform": lambda one: collectives(js.make_transform(one, COMM)),
  "special": lambda one: collectives(js.dense_transform(COMM, special={"bias": one})),
  "demo": lambda one: collectives(js.demo_transform(COMM, special={"bias": one})),
  "bucketed": lambda one: collectives(js.bucketed_transform(one, COMM, plan=PLAN)),
  "bucketed special": lambda one: collectives(
    js.bucketed_transform("dense", COMM, plan=PLAN, special={"w": one})
  ),
  "diloco": lambda one: collectives(js.diloco(optax.sgd(1.0), COMM, collective=one)),
  "streaming": lambda one: collectives(
    js.streaming_diloco(optax.sgd(1.0), COMM, fragments=2, collective=one)
  ),
  "simulate": lambda one: js.simulate(one, grads()).total.tolist(),
  "contraction": lambda one: js.costs.contraction(one, grads()[None]).left_out.tolist(),
  "count": lambda one: js.costs.count(one, n=N, workers=WORKERS),
  "predict": lambda one: js.costs.predict(one, n=N, workers=WORKERS),
  "link_of": lambda one: js.costs.link_of(PROFILE, one),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_label_and_an_instance_are_the_same(way):
  assert WAYS[way](LABEL) == WAYS[way](INSTANCE)


@pytest.mark.parametrize("way", WAYS)
def test_a_name_alone_has_its_defaults(way):
  assert WAYS[way]("dense") == WAYS[way](js.make_collective("dense"))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_collective_is_refused_by_name(way):
  for wrong, error, message in (
    ("speedy:density=0.1", ValueError, "unknown collective 'speedy', choose one of"),
    ("topka:densty=0.1", TypeError, "topka: unknown option densty, choose from"),
    ("topka:density", ValueError, "'density' is not of the form option=value"),
    ("topka:k=1:k=2", ValueError, "k is given twice"),
    (type(INSTANCE), TypeError, "given as a TopkA: give one of a2sgd"),
    (js.dense_transform(COMM), TypeError, "given as a Transform: give one of"),
    (None, TypeError, "given as a NoneType: give one of a2sgd"),
    (0.01, TypeError, "given as a float: give one of a2sgd"),
  ):
    with pytest.raises(error, match=message):
      WAYS[way](wrong)


def test_options_join_those_of_a_label_and_none_is_given_twice():
  assert js.make_collective("topka:wire=bf16", density=0.25) == INSTANCE
  assert js.make_collective(INSTANCE, density=0.25) == INSTANCE
  assert js.make_collective(" topka : density = 0.25 : wire = bf16 ") == INSTANCE
  with pytest.raises(ValueError, match="has density already: give it once"):
    js.make_transform(LABEL, COMM, density=0.5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_label_of_every_collective_makes_it_again(case):
  collective = case.make(density=0.01)
  assert js.make_collective(collective.label) == collective
  assert js.make_collective(collective) == collective


def test_special_takes_a_collective_of_ones_own():
  class Doubled(type(js.make_collective("dense"))):
    def reduce(self, comm, grads, state):
      return super().reduce(comm, 2 * grads, state)

  tx = js.dense_transform(COMM, special={"bias": Doubled()})
  step, params, state = start(optax.chain(tx, optax.sgd(1.0)), COMM, PARAMS)
  params, _, _ = step(params, state, jnp.ones((WORKERS, N)))
  assert_same_bits(params, {"bias": jnp.full(8, -2.0), "w": jnp.full((4, 4), -1.0)})


def test_diloco_refuses_totals_that_differ_between_workers():
  with pytest.raises(ValueError, match="diloco: the totals of a2sgd differ"):
    js.diloco(optax.sgd(1.0), COMM, collective="a2sgd")
  with pytest.raises(ValueError, match="diloco: the totals of a2sgd differ"):
    js.streaming_diloco(optax.sgd(1.0), COMM, fragments=2, collective="a2sgd")


def test_a_link_of_what_needs_shapes_is_refused():
  with pytest.raises(ValueError, match="link_of: .*powersgd depend on the shapes"):
    js.costs.link_of(PROFILE, "powersgd")


def test_arguments_that_are_no_numbers_or_have_no_step():
  with pytest.raises(ValueError, match="contraction: grads have no step"):
    js.costs.contraction("topka", jnp.zeros((0, 2, 3)), k=1)
  with pytest.raises(ValueError, match="clip_norm='1', choose a number above 0"):
    js.momentum_corrected(js.dense_transform(COMM), clip_norm="1")
  with pytest.raises(TypeError, match="warmed_up: a .* is no jaxsparse transform"):
    js.warmed_up(
      js.momentum_corrected(js.make_transform("topka", COMM, k=2), clip_norm=1.0), {}
    )
