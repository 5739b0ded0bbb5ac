"""Parameters that differ between workers, for a collective whose total does (`Collective.replicates` is False).

The caller has one replicated `params`, those of the last synchronization. The state contains the local update of each
worker since then and the optimizer state of each worker, so that a checkpoint of (params, state) is complete.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxsparse import flatten
from jaxsparse.transform.shards import Shards, shards_of
from jaxsparse.types import Comm


class PerWorker(NamedTuple):
  """The optimizer state of workers that each have parameters of their own; every leaf has a leading worker axis.

  Attributes:
    state: the state of the optax transformation, [1, …] at a worker and [P, …] outside shard_map.
    moved: like the parameters, f32[1 or P, …]: the local update, the sum of a worker's updates since the last
      synchronization.
    shards: how the parameters lie on the devices of a worker; None where a worker is one device.

  Example:
    >>> import jax, jax.numpy as jnp, jaxsparse as js
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("workers",))
    >>> state = js.init(js.a2sgd_transform("workers"), jnp.zeros(8), mesh)
    >>> isinstance(state, js.PerWorker), state.moved.shape == (len(jax.devices()), 8)
    (True, True)
  """

  state: Any
  moved: Any
  shards: Shards | None = None


def first(comm: Comm, state: Any, params: optax.Params) -> PerWorker:
  """The state of one worker before its first step: a local update of zeros."""
  moved = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32)[None], params)
  return PerWorker(_widened(state), moved, shards_of(comm, params))


def here(node: PerWorker, params: optax.Params) -> tuple[Any, optax.Params]:
  """The optimizer state and the parameters of this worker, inside shard_map."""
  own = jax.tree.map(lambda p, moved: (p.astype(jnp.float32) + moved[0]).astype(p.dtype), params, node.moved)
  return jax.tree.map(lambda leaf: leaf[0], node.state), own


def moved_on(node: PerWorker, updates: optax.Updates, state: Any) -> PerWorker:
  """`node` after this worker applied `updates` to its parameters; `state` is its next optimizer state."""
  moved = jax.tree.map(lambda was, update: was + update[None].astype(jnp.float32), node.moved, updates)
  return node._replace(state=_widened(state), moved=moved)


def synchronized(comm: Comm, params: optax.Params, node: PerWorker) -> tuple[optax.Params, PerWorker]:
  """Averages the parameters of all workers, densely: `params + Σ_w moved_w / P`; the local updates become zero."""

  def average(moved: Any, rest: Any = ()) -> tuple[Any, Any]:
    flat, unflatten = flatten.flatten(moved)
    return unflatten(comm.all_reduce(flat) / comm.size), rest

  if node.shards:
    leaves, structure = jax.tree.flatten(node.moved)
    means, _ = node.shards.over(average, [moved[0] for moved in leaves], ())
    mean = jax.tree.unflatten(structure, [step[None] for step in means])
  else:
    mean, _ = average(node.moved)
  params = jax.tree.map(lambda p, step: (p.astype(jnp.float32) + step[0]).astype(p.dtype), params, mean)
  return params, node._replace(moved=jax.tree.map(jnp.zeros_like, node.moved))


def drift(node: PerWorker, comm: Comm | None = None) -> jax.Array:
  """The distance between workers, f32[]: the root of the mean over workers of ‖parameters − their mean‖².

  Args:
    node: of all workers, or of this one.
    comm: all workers, where `node` is that of one.
  """
  everyone = comm.all_reduce if comm else lambda x: x
  leaves = jax.tree.leaves(node.moved)
  workers = comm.size if comm else leaves[0].shape[0]
  apart = [leaf - everyone(leaf.sum(0, keepdims=True)) / workers for leaf in leaves]
  return jnp.sqrt(everyone(sum((jnp.sum(leaf**2) for leaf in apart), jnp.float32(0))) / workers)


def _widened(state: Any) -> Any:
  return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], state)
