"""The programs to compile: an update of each collective, and the step of a transformer of 124 M parameters."""

import numpy as np
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxsparse as js
from benchmarks import specs
from jaxsparse.collectives import make_plain

AXIS = "workers"


def update(spec: specs.Spec, devices: list, n: int) -> jax.stages.Lowered:
  """The update of a collective on n float32 (VGG-16's leaves where it needs shapes), each device a worker.

  Gradient and state are donated, as in a step.
  """
  mesh = Mesh(np.array(devices), (AXIS,))
  tx = js.make_transform(spec.name, AXIS, **spec.config)
  shapes = specs.VGG16 if make_plain(spec.name).needs_shapes else {"w": (n,)}
  params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
  state = js.abstract_state(tx, params, mesh, axis=AXIS)
  own, rows = js.specs(state, axis=AXIS), PartitionSpec(AXIS)
  each = lambda x: jax.ShapeDtypeStruct((len(devices) * x.shape[0], *x.shape[1:]), x.dtype, sharding=NamedSharding(mesh, rows))
  program = jax.shard_map(tx.update, mesh=mesh, in_specs=(rows, own), out_specs=(rows, own), check_vma=False)
  return jax.jit(program, donate_argnums=(0, 1)).lower(jax.tree.map(each, params), state)
