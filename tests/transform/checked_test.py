"""In a shard_map of one's own that checks replication, as `jax.shard_map` does unless told otherwise."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from tests.cases import (
  CASES,
  LONG,
  assert_same_bits,
  each_case,
  linear,
  mesh_of,
  row,
  start,
)
from tests.compositions_test import (
  COMPOSITIONS,
  SHAPES,
  SPARSE,
  WORKERS,
  N,
  integers,
  jnp,
  refusal,
)

NAMES = [case.name for case in CASES if not case.options]
QUICK = {("dense", "multi_transform")}
CELLS = [
  (name, composition)
  for name in NAMES
  for composition in COMPOSITIONS
  if (name == "spardl" or composition in ("plain", "multi_transform"))
  and not refusal(name, composition)
]
"""Each collective, and each composition: what is checked are the types of what they make."""


@pytest.mark.parametrize(
  ("name", "composition"),
  [row(*cell, quick=cell in QUICK, id="-".join(cell)) for cell in CELLS],
)
def test_the_bits_are_those_of_a_training_step(name, composition):
  options = {"density": 0.2} if name in SPARSE else {}
  options |= {"special": {"bias": "dense"}} if composition == "special" else {}
  options |= {"decay": 0.5} if composition == "decayed" else {}
  tx = js.atomic(
    COMPOSITIONS[composition](js.make_transform(name, "workers", **options))
  )
  params, mesh = (
    {leaf: jnp.zeros(shape) for leaf, shape in SHAPES.items()},
    mesh_of(WORKERS),
  )
  step, params, state = start(tx, mesh, params)
  specs = js.specs(state, "workers")

  def worker(params, state, batch):
    grads = jax.grad(linear)(js.own_params(params, state), batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  own = jax.jit(
    jax.shard_map(
      worker, mesh=mesh, in_specs=(P(), specs, P("workers")), out_specs=(P(), specs)
    )
  )
  params2, state2 = params, state
  for number in range(5):
    batch = integers(number, WORKERS, N)
    batch[1, 3] = np.nan if number == 2 else 1
    with jax.numpy_dtype_promotion("standard"):  # adam needs it
      params, state, _ = step(params, state, batch)
      params2, state2 = jax.block_until_ready(own(params2, state2, batch))
  assert_same_bits((params2, state2), (params, state))


def trace(case, density, leaves):
  """Traces an update on a mesh whose shard_map checks replication; nothing is compiled."""
  workers = next(size for size in case.workers() if size > 1)
  tx = js.make_transform(case.name, "workers", **case.config(density=density))
  params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in leaves]
  state = js.abstract_state(tx, params, mesh_of(workers))
  specs = js.specs(state, "workers")

  def worker(grads, state):
    return tx.update([jnp.squeeze(grad, 0) for grad in grads], state)

  grads = [jax.ShapeDtypeStruct((workers, *shape), jnp.float32) for shape in leaves]
  replicates = case.make(density=density).traits.replicates
  mapped = jax.shard_map(
    worker,
    mesh=mesh_of(workers),
    in_specs=(P("workers"), specs),
    out_specs=(P() if replicates else P("workers"), specs),
  )
  jax.eval_shape(mapped, grads, state)


@each_case(CASES, quick=[str(case) for case in CASES if not LONG.match(str(case))])
def test_every_collective_can_be_traced_where_replication_is_checked(case):
  trace(case, 0.2, [(5, 4), (10,)])


SELECTING = [case for case in CASES if not case.options or "selector" in str(case)]


@each_case(SELECTING, quick=[])
def test_long_blocks_can_be_traced_where_replication_is_checked(case):
  """Blocks so long that they are searched among candidates, by the implementations of all platforms."""
  with js.traced_for("any"):
    trace(case, 0.01, [(400, 720), (32_000,)])
