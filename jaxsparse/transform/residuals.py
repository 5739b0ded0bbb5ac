"""Residuals, and the movement of local steps, in the shapes of the parameters."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import OptState

from jaxsparse._compat import varying
from jaxsparse.arrays import flatten
from jaxsparse.transform import state as states
from jaxsparse.transform.groups import Group
from jaxsparse.transform.state import Applied, ReduceState
from jaxsparse.transform.update import at_devices
from jaxsparse.transform.wrapped import map_seen
from jaxsparse.types import ArrayTree

_Leaves = list[jax.Array]


def own_params(params: optax.Params, state: OptState) -> optax.Params:
  """The parameters of this worker, θ_w, at which it takes its gradient; inside shard_map.

  Without movement and applied residuals they have the values of `params`, but are typed
  as this worker's own: JAX would sum gradients at `params`, which are typed as equal on
  all workers, over the workers.

  Args:
    params: θ, the outer parameters, the same on every worker.
    state: the state of one worker of a chain with `js.local_steps`, or of any other.

  Raises:
    ValueError: for the state of several workers.

  Example:
    >>> import optax, jaxsparse as js
    >>> from jaxsparse.comm import SoloComm
    >>> outer = optax.chain(js.dense_transform(SoloComm(1)), optax.sgd(1.0))
    >>> tx, params = js.local_steps(optax.sgd(0.25), outer, every=10), jnp.ones(2)
    >>> _, state = tx.update(jnp.array([1.0, 0.0]), tx.init(params), params)
    >>> js.own_params(params, state)
    Array([0.75, 1.  ], dtype=float32)
  """
  moved = moved_leaves(state).items()
  # What to subtract from each leaf of θ, by name: movement, and the residual where
  # local steps apply it. Empty for a state without local steps.
  behind: dict[str, jax.Array] = {name: leaf[0] for name, leaf in moved}
  for local in states.local_states(state):
    # These arrays have a row for each worker: one row at one worker.
    of_workers = jax.tree.leaves((local.inner, local.moved))
    if rows := {len(leaf) for leaf in of_workers} - {1}:
      raise ValueError(
        f"own_params: the state of {max(rows)} workers, give that of one: call it inside shard_map"
      )
    # With `apply_residual` a worker's own parameters include what it has not delivered
    # yet, θ_w = θ − moved − residual. `Applied` marks such local steps.
    is_applied = isinstance(local.applied, Applied)
    for outer in states.reduce_states(local.outer) if is_applied else ():
      behind |= {
        name: behind.get(name, 0.0) + leaf
        for name, leaf in residual_leaves(outer).items()
      }

  def own_leaf(name: str, p: jax.Array) -> jax.Array:
    # At least float32, so that the difference is rounded once, to the dtype of p.
    wide = p.dtype if p.dtype.itemsize > 4 else jnp.float32
    return (
      (p.astype(wide) - behind[name].astype(wide)).astype(p.dtype)
      if name in behind
      else p
    )

  # The axes of the workers: the results are typed as varying over them.
  reduce_states = states.reduce_states(state)
  axes = states.axes_of_workers(reduce_states)
  return varying.as_varying(map_seen(own_leaf, reduce_states, params), axes)


def moved_leaves(state: OptState) -> dict[str, jax.Array]:
  """The movement of local steps by the names of leaves: f32[1, …] in the state of a worker, f32[P, …] in that of all.

  Empty without local steps, and with `every=1`, which leaves no movement.
  """
  moved = [flatten.leaves_by_name(local.moved) for local in states.local_states(state)]
  return {name: leaf for leaves in moved for name, leaf in leaves.items()}


def residual_leaves(state: ReduceState) -> dict[str, jax.Array]:
  """The residual of this worker by the names of its leaves, f32 in their shapes; zeros of leaves without one."""
  method: Any = state.layout.method
  # Of leaves of float32 nothing is rounded off: residuals are returned whole.
  leaves, _ = take_residuals(
    [jnp.zeros(shape, jnp.float32) for shape in method.shapes], state
  )
  return dict(zip(method.names, leaves, strict=True))


def take_residuals(
  leaves: _Leaves,
  state: ReduceState,
  moved: _Leaves | None = None,
  mean: Callable[[_Leaves], _Leaves] = lambda owing: owing,
) -> tuple[_Leaves, ReduceState]:
  """The residual of a worker, in the shapes and dtypes of the leaves, and the state without it.

  What the dtype of a leaf rounds off, or cannot hold, stays in the residual.

  Args:
    leaves: of the parameters that the transform covers; only shapes and dtypes matter.
    state: of one worker.
    moved: θ − θ_w of local steps, f32 like each leaf, to add to the residual; the sum
      is f32. None adds nothing.
    mean: maps residual plus movement at a device, a list of f32 leaves, to the means
      over the workers; by default each worker keeps its own values.
  """

  def step(
    groups: Sequence[Group], leaves: _Leaves, state: ReduceState, **_: ArrayTree
  ) -> tuple[_Leaves, ReduceState]:
    # Arguments are those of one device; leaves start as zeros, or as the movement.
    # `carried` has a `State` for each group.
    carried = state.groups
    leaves = list(leaves)
    # By number of the leaf: the residual, plus movement, f32.
    owing: dict[int, jax.Array] = {}
    for group, group_state in zip(groups, carried, strict=True):
      # Movement is delivered also where a group keeps no residual.
      if group_state.residual is not None or moved is not None:
        wide = [leaves[leaf].astype(jnp.float32) for leaf in group.leaves]
        owing |= zip(group.leaves, _add_flat(wide, group_state.residual), strict=True)
    # By number of the leaf: what its dtype cannot hold, the next residual.
    left = {}
    means = mean(list(owing.values()))
    for leaf, exact in zip(owing, means, strict=True):
      # `exact` = `sent`, what the dtype of the leaf holds, + the rest.
      sent, left[leaf] = flatten.representable(exact, leaves[leaf].dtype)
      leaves[leaf] = sent.astype(leaves[leaf].dtype)
    for index, (group, group_state) in enumerate(zip(groups, carried, strict=True)):
      if group_state.residual is not None:
        residual = flatten.flatten([left[leaf] for leaf in group.leaves])[0]
        carried[index] = group_state._replace(residual=residual)
    return leaves, state._replace(carried=states.join_groups(carried))

  method: Any = state.layout.method
  # Devices of a worker hold pieces of its residual, and each delivers its own.
  return at_devices(
    step,
    method.groups,
    [jnp.zeros_like(x) for x in leaves] if moved is None else list(moved),
    state,
  )


def _add_flat(leaves: _Leaves, flat: jax.Array | None) -> _Leaves:
  """The sum of leaves and `flat`, f32[n] of their entries one leaf after the other; None adds nothing.

  Leaf by leaf, since the sum of flat vectors would take two passes more.
  """
  if flat is None:
    return leaves
  pieces = flatten.parts(flat, [leaf.size for leaf in leaves])
  return [
    leaf + piece.reshape(leaf.shape) for leaf, piece in zip(leaves, pieces, strict=True)
  ]
