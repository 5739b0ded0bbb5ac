"""State of one worker before the jaxsparse transform is refused when a state is made, however chains are nested."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxsparse as js
from tests.cases import mesh_of

PARAMS = {"bias": jnp.zeros(2), "kernel": jnp.zeros((2, 3))}
BIAS = {"bias": True, "kernel": False}
KERNEL = {"bias": False, "kernel": True}
LABELS = {"bias": "dense", "kernel": "sparse"}
MEAN = js.dense_transform("workers")
TRACE = optax.trace(0.9)
RATE = optax.scale(-0.1)
named = lambda *parts: optax.named_chain(*zip("abcdefgh", parts, strict=False))


class Wrapper(NamedTuple):
  """The state of a wrapper that a user wrote."""

  steps: jax.Array
  inner: Any


def wrapped(inner):
  """A user's own wrapper."""

  def init(params):
    return Wrapper(jnp.int32(0), inner.init(params))

  def update(updates, state, params=None):
    updates, after = inner.update(updates, state.inner, params)
    return updates, Wrapper(state.steps + 1, after)

  return optax.GradientTransformation(init, update)


AROUND = {
  "alone": lambda chain: chain,
  "chain": lambda chain: optax.chain(chain, RATE),
  "named_chain": lambda chain: named(chain, RATE),
  "chains": lambda chain: optax.chain(named(optax.identity(), optax.chain(chain))),
  "masked": lambda chain: optax.masked(chain, KERNEL),
  "second masked": lambda chain: optax.chain(
    optax.masked(MEAN, BIAS), optax.masked(chain, KERNEL)
  ),
  "partition": lambda chain: optax.partition({"sparse": chain, "dense": MEAN}, LABELS),
  "partition in chain": lambda chain: optax.chain(
    optax.clip(1.0), optax.partition({"sparse": chain, "dense": MEAN}, LABELS)
  ),
  "inject_hyperparams": lambda chain: optax.inject_hyperparams(
    lambda rate: named(chain, optax.sgd(rate))
  )(rate=0.1),
  "lookahead": lambda chain: optax.lookahead(named(chain, RATE), 5, 0.5),
  "flatten": lambda chain: optax.flatten(named(chain, RATE)),
  "conditionally_transform": lambda chain: optax.conditionally_transform(
    chain, lambda step: step < 3
  ),
  "local steps": lambda chain: js.local_steps(RATE, named(chain, RATE), every=2),
  "fragments": lambda chain: js.local_steps(
    RATE, optax.chain(chain, RATE), every=2, fragments=2
  ),
  "atomic": lambda chain: js.atomic(named(chain, RATE)),
  "a user's wrapper": lambda chain: named(wrapped(wrapped(chain)), RATE),
}
BEFORE = {
  "chain": lambda: optax.chain(TRACE, MEAN),
  "named_chain": lambda: named(TRACE, MEAN),
  "a user's wrapper": lambda: named(wrapped(TRACE), wrapped(MEAN)),
}


@pytest.mark.filterwarnings("ignore:js.init. params")
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("around", AROUND)
def test_momentum_before_the_transform_is_refused(around, before):
  params = jax.tree.map(jnp.copy, PARAMS)
  if around == "lookahead":
    params = optax.LookaheadParams.init_synced(params)
  message = r"transformation (0|1|'a'|'b') of the chain \((TraceState|Wrapper)\) keeps arrays and comes before"
  with pytest.raises(ValueError, match=message):
    js.abstract_state(AROUND[around](BEFORE[before]()), params, mesh_of(2))
  js.abstract_state(AROUND[around](named(MEAN, TRACE)), params, mesh_of(2))


EARLIER = {
  "masked": optax.masked(TRACE, KERNEL),
  "inject_hyperparams": optax.inject_hyperparams(optax.trace)(decay=0.9),
  "MultiSteps": optax.MultiSteps(optax.identity(), 2),
  "apply_if_finite": optax.apply_if_finite(optax.identity(), 3),
  "zero_nans": optax.zero_nans(),
  "ema": optax.ema(0.9),
  "partition": optax.partition({"dense": TRACE, "sparse": RATE}, LABELS),
}


@pytest.mark.parametrize("name", EARLIER)
def test_every_state_that_gradients_are_kept_in_is_refused_before_the_transform(name):
  for chain in (optax.chain, named):
    with pytest.raises(ValueError, match="keeps arrays and comes before"):
      js.abstract_state(chain(EARLIER[name], MEAN, RATE), PARAMS, mesh_of(2))


MEANS = {
  "count of steps": named(optax.scale_by_schedule(lambda _: 1.0), MEAN),
  "rate": named(optax.inject_hyperparams(optax.scale)(step_size=2.0), MEAN),
  "clipped": named(optax.clip_by_global_norm(1.0), optax.adaptive_grad_clip(0.1), MEAN),
  "averaged twice": named(MEAN, TRACE, MEAN),
  "masks one after the other": optax.chain(
    optax.masked(MEAN, BIAS),
    optax.masked(TRACE, BIAS),
    optax.masked(MEAN, KERNEL),
    optax.masked(TRACE, KERNEL),
  ),
}


@pytest.mark.parametrize("name", MEANS)
def test_states_that_are_equal_on_all_workers_pass(name):
  js.abstract_state(MEANS[name], PARAMS, mesh_of(2))


def test_momentum_of_a_leaf_that_is_averaged_later_is_refused():
  leaves = optax.masked(MEAN, BIAS), optax.masked(TRACE, KERNEL)
  tx = optax.chain(*leaves, optax.masked(MEAN, KERNEL))
  with pytest.raises(ValueError, match="transformation 1 of the chain"):
    js.abstract_state(tx, PARAMS, mesh_of(2))


def test_named_chains_are_refused_by_init_and_specs():
  tx = named(TRACE, MEAN)
  with pytest.raises(ValueError, match="transformation 'a' of the chain"):
    js.init(tx, PARAMS, mesh_of(2))
  state = js.init(named(MEAN, TRACE), PARAMS, mesh_of(2))
  state.move_to_end("a")
  with pytest.raises(ValueError, match="transformation 'b' of the chain"):
    js.specs(state, "workers")
