"""Writes in place follow all reads of the buffer, so the compiled update copies no vector of n entries."""

import re

import jax
import jax.numpy as jnp

import jaxsparse as js
from jaxsparse.comm import SoloComm
from jaxsparse.transform import ordering
from tests.cases import AS_USERS

N = 1 << 14


def copies_of(collective):
  """Copies of f32[n] in the compiled update of one worker that donates its gradient and state."""
  tx = js.make_transform(collective, SoloComm(4))
  update = jax.jit(tx.update, donate_argnums=(0, 1))
  text = update.lower(jnp.zeros(N), tx.init(jnp.zeros(N))).compile(AS_USERS).as_text()
  return len(re.findall(rf"= f32\[{N}\]\S* copy\(", text))


def test_an_update_copies_no_vector_and_would_without_the_order(monkeypatch):
  collective = js.make_collective("spardl", density=0.01, selector="chunked")
  assert copies_of(collective) == 0
  monkeypatch.setattr(ordering, "after", lambda _, x: x)
  assert copies_of(collective) > 0


def test_a_comm_without_totals_to_follow_is_the_comm_itself():
  comm = SoloComm(2)
  assert ordering.following(comm, []) is comm


def test_following_changes_no_bits():
  values = {"a": jnp.array([jnp.nan, -0.0, 1.0]), "b": jnp.array([7], jnp.int32)}
  comm = ordering.following(SoloComm(2), [jnp.bool_(True), jnp.bool_(False)])
  sent = comm.shift(values, 1)
  assert jax.tree.map(lambda x: x.tobytes(), jax.device_get(sent)) == jax.tree.map(
    lambda x: x.tobytes(), jax.device_get(values)
  )
