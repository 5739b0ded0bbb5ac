"""Selectors and wire formats of the collectives that share them; conformance_test.py has their laws."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from tests.cases import integers, normals, quick_of
from tests.reference import spardl as reference


def bf16(x):
  return x.astype(jnp.bfloat16).astype(np.float32)


def test_who_selects_and_who_encodes():
  has = lambda option: {name for name in js.collective_names() if option in js.collective_options(name)}
  assert has("selector") == {"gtopk", "spardl", "topka", "topkdsa"}  # the others have a way of their own to select
  assert has("wire") == has("selector") | {"chunktopk", "gaussiank", "oktopk"}  # the others send no indices


@pytest.mark.parametrize("selector", ["exact", "chunked"])
def test_topka_rounds_what_it_sends(selector):
  """The total is the sum of rounded entries in rank order, and rounding errors stay in residuals."""
  workers, n, k = 4, 60, 12
  left, state = np.zeros((workers, n), np.float32), None
  for step in range(3):
    grads = normals(step, workers, n)
    acc, sent = grads + left, np.zeros_like(grads)
    for worker in range(workers):
      if selector == "exact":
        chosen = np.argsort(-np.abs(acc[worker]), kind="stable")[:k]
      else:
        chosen = list(reference.Chunked(k, n).choose(0, 0, acc[worker]))
      sent[worker, chosen] = bf16(acc[worker, chosen])
    left = acc - sent
    out = js.simulate("topka", grads, state=state, k=k, selector=selector, wire="bf16")
    state, total = out.state, np.zeros(n, np.float32)
    for row in sent:
      total = total + row
    np.testing.assert_array_equal(out.total, total)
    np.testing.assert_array_equal(out.residuals, left)


@pytest.mark.parametrize("name", quick_of(["gaussiank", "gtopk", "oktopk", "topka", "topkdsa"], quick=["gaussiank"]))
def test_shorter_messages_change_nothing_that_they_can_say(name):
  """Whole numbers survive bf16 on every way they take: totals and residuals are those of f32, in fewer words."""
  plain, short = None, None
  for step in range(3):
    grads = integers(step, 4, 3000)
    plain = js.simulate(name, grads, state=plain and plain.state, k=300)
    short = js.simulate(name, grads, state=short and short.state, k=300, wire="bf16")
    np.testing.assert_array_equal(short.total, plain.total)
    np.testing.assert_array_equal(short.residuals, plain.residuals)
  assert int(short.metrics.words_sent) < (0.75 if name == "topkdsa" else 0.5) * int(plain.metrics.words_sent)
