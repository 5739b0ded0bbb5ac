"""What each worker of local steps has of its own: its parameters, and what it has moved."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxsparse.transform import owed
from jaxsparse.transform import state as states


def own_params(params: optax.Params, state: Any) -> optax.Params:
  """The parameters of this worker, θ_w: `params` itself where nothing is moved. Inside shard_map.

  Args:
    params: the anchor, the same on every worker.
    state: the state of one worker of a chain with `js.local_steps`, or of any other.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> js.own_params(jnp.ones(2), js.LocalState((), (), jnp.array([[0.25, 0.0]]), jnp.int32(1), jnp.int32(1)))
    Array([0.75, 1.  ], dtype=float32)
  """
  moved = moved_by_name(state)
  if not moved:
    return params

  def own(path: Any, p: jax.Array) -> jax.Array:
    gone = moved.get(jax.tree_util.keystr(path))
    return p if gone is None else (p.astype(jnp.float32) - gone[0]).astype(p.dtype)

  return jax.tree_util.tree_map_with_path(own, params)


def moved_by_name(state: Any) -> dict[str, jax.Array]:
  """What was moved of each leaf, by the name of the leaf: f32[1, …] at a worker, f32[P, …] of all of them."""
  nodes = states.local_states(state)
  return {name: leaf for node in nodes for name, leaf in _named(node.moved).items()}


def with_residual(moved: Any, outer: Any) -> tuple[Any, Any]:
  """What a worker has moved with its residuals added, and `outer` with residuals of zeros."""
  named = _named(moved)

  def of(node: Any) -> Any:
    if not states.is_reduce_state(node):
      return node
    names = node.layout.method.names
    own = [named[name][0] for name in names]
    leaves, node = owed.taken(own, node, own)
    named.update({name: leaf[None] for name, leaf in zip(names, leaves, strict=True)})
    return node

  outer = jax.tree.map(of, outer, is_leaf=states.is_reduce_state)
  return jax.tree.unflatten(jax.tree.structure(moved), list(named.values())), outer


def _named(tree: Any) -> dict[str, jax.Array]:
  return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
