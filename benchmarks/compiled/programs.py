"""The programs to compile: an update of each collective, and the step of a transformer of 124 M parameters."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxsparse as js
from benchmarks import specs
from benchmarks.compiled.transformer import Transformer
from jaxsparse.collectives import make_plain

AXIS = "workers"
MODEL = Transformer()


def _shapes(spec: specs.Spec, n: int) -> dict[str, tuple[int, ...]]:
  return specs.VGG16 if make_plain(spec.name).traits.needs_shapes else {"w": (n,)}


def entries(spec: specs.Spec, n: int) -> int:
  """The entries of the gradient of a collective: n, or those of VGG-16 where it needs shapes."""
  return sum(map(math.prod, _shapes(spec, n).values()))


def traced(spec: specs.Spec, devices: list[Any], n: int) -> jax.stages.Traced:
  """The update of a collective on a gradient of n entries, each device a worker; it is donated, and so is the state."""
  mesh = Mesh(np.array(devices), (AXIS,))
  tx = js.make_transform(spec.name, AXIS, **spec.config)
  params = {
    name: jax.ShapeDtypeStruct(shape, jnp.float32)
    for name, shape in _shapes(spec, n).items()
  }
  state = js.abstract_state(tx, params, mesh, axis=AXIS)
  own, rows = js.specs(state, axis=AXIS), PartitionSpec(AXIS)
  split = NamedSharding(mesh, rows)
  each = lambda x: jax.ShapeDtypeStruct(
    (len(devices) * x.shape[0], *x.shape[1:]), x.dtype, sharding=split
  )
  program = jax.shard_map(
    tx.update, mesh=mesh, in_specs=(rows, own), out_specs=(rows, own)
  )
  return jax.jit(program, donate_argnums=(0, 1)).trace(
    jax.tree.map(each, params), state
  )


METHODS: dict[str, Callable[[js.overlap.Plan], optax.GradientTransformation]] = {
  "dense": lambda plan: optax.chain(
    js.bucketed_transform("dense", "hosts", plan=plan), optax.adam(3e-4)
  ),
  "spardl": lambda plan: optax.chain(
    js.bucketed_transform("spardl", "hosts", plan=plan, density=0.01), optax.adam(3e-4)
  ),
  "signs": lambda plan: js.local_steps(
    optax.adam(3e-4),
    optax.chain(js.bucketed_transform("onebit", "hosts", plan=plan), optax.sgd(1.0)),
    every=1,
    apply_residual=True,
  ),
}
"""The way between hosts: dense, and the two that docs/start.md recommends."""


def step(
  method: str, devices: list[Any], hosts: int, sequences: int = 8
) -> jax.stages.Lowered:
  """The training step of a transformer, with bfloat16 products: each host a worker, whose devices share the parameters.

  Args:
    method: one of `METHODS`.
    devices: of all hosts, those of one host behind another.
    hosts: number of workers.
    sequences: of 1,024 tokens, of each device.
  """
  mesh = Mesh(np.array(devices).reshape(hosts, -1), ("hosts", "devices"))
  lies = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))
  along_last = lambda x: jax.ShapeDtypeStruct(
    x.shape, x.dtype, sharding=lies(*[None] * (x.ndim - 1), "devices")
  )
  params = jax.tree.map(along_last, jax.eval_shape(MODEL.parameters))
  rows = len(devices) * sequences
  tokens = jax.ShapeDtypeStruct(
    (rows, MODEL.length + 1), jnp.int32, sharding=lies(("hosts", "devices"))
  )
  sizes = [4 * x.size for x in jax.tree.leaves(params)]
  plan = js.overlap.plan(
    "optimal", [1e-3] * len(sizes), sizes, alpha=1e-4, beta=1e-10, gamma=1.5
  )
  tx = METHODS[method](plan)
  state = js.abstract_state(tx, params, mesh, axis="hosts")
  # Weights travel inside a host, and no activations.
  gather = lambda tree: jax.lax.with_sharding_constraint(tree, PartitionSpec())
  loss = lambda params, tokens: MODEL.loss(params, tokens, gather)
  return js.make_train_step(loss, tx, mesh, axis="hosts").lower(params, state, tokens)
