"""`js.race`: its trainings are those of `make_train_step`, rates are tried fairly, and it goes on from its file."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from jaxsparse.racing.batching import batches_of, join
from jaxsparse.racing.result import Race, Row
from jaxsparse.train.agreement import Agreement
from jaxsparse.types import Link
from tests.cases import normals, sim

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax's Adam needs it

P, N, STEPS = 2, 24, 20
TARGET = normals(0, N)
RACE = {"workers": P, "steps": STEPS, "rate": 0.05, "rates": (1.0,), "seeds": 1}


def batches(step):
  """Rows of noise for each worker, and what they are to give."""
  x = normals(step + 1, 4 * P, N)
  return x, x @ TARGET


def loss_fn(params, batch):
  x, y = batch
  return jnp.mean((x @ params - y) ** 2)


HELD_OUT = batches(10**6)


def evaluate(params):
  return loss_fn(params, HELD_OUT)


def methods(*names, optimizer="adam"):
  every = js.recipes(optimizer, workers=P)
  return {name: every[name] for name in names}


def by_steps(method, rate, steps, evaluations, first=0, **named):
  """The losses of a loop over `make_train_step` in the simulator."""
  tx = method("workers", rate)
  params = jnp.zeros(N)
  state = js.init(tx, params, sim(P))
  step = js.make_train_step(named.pop("loss_fn", loss_fn), tx, sim(P))
  losses = []
  for number in range(steps):
    given = {name: make(number) for name, make in named.items()}
    params, state, metrics = step(params, state, batches(first + number), **given)
    if number + 1 in evaluations:
      losses.append(float(evaluate(params)))
  return losses, state


@pytest.mark.parametrize("name", ["signs, every 4", "4 bits"])
def test_a_training_is_that_of_the_step(name):
  chosen = methods("dense", name)
  race = js.race(loss_fn, jnp.zeros(N), batches, evaluate, methods=chosen, **RACE)
  dense, row = race.rows
  for found in dense, row:
    expected, state = by_steps(chosen[found.method], 0.05, found.steps[-1], found.steps)
    np.testing.assert_allclose(found.losses[0], expected, rtol=1e-5)
    words = float(js.metrics(state).total_words) / found.steps[-1]
    assert found.words == pytest.approx(words)
  assert row.every == (4 if name == "signs, every 4" else 1)
