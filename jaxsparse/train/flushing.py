"""`js.flush`: all residuals, delivered densely."""

import functools
import warnings

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from optax import OptState

from jaxsparse._compat import AxisName
from jaxsparse._compat.one_at_a_time import dispatch
from jaxsparse.arrays import flatten
from jaxsparse.train.engine import Engine, engine_of
from jaxsparse.train.starting import (
  check_state,
  owed_not_finite,
  without_not_finite,
)
from jaxsparse.transform import checks
from jaxsparse.transform.residuals import moved_leaves, take_residuals
from jaxsparse.transform.specs import placed
from jaxsparse.transform.state import (
  LocalState,
  is_reduce_state,
  map_states,
  reduce_states,
  with_rows,
  worker_rows,
)
from jaxsparse.transform.wrapped import leaves_seen, map_seen
from jaxsparse.types import Comm


def flush(
  state: OptState,
  params: optax.Params,
  mesh: Mesh | Comm,
  *,
  axis: AxisName = "workers",
) -> tuple[optax.Updates, OptState]:
  """Everything that the workers owe, delivered densely at once: for the end of training, or before another method.

      update = Σ_w r_w / P,    r′_w = 0

  What all steps have delivered and this update add up to what dense means would have
  delivered. The update is what the jaxsparse transform would return, a gradient: give
  it to the rest of the chain, or subtract it times a rate. Each transform takes one
  all-reduce of all its residuals. Every process must call.

  With `js.local_steps` workers also owe what they have moved since the last exchange:
  it is added to the residual of each, delivered with it, and zero afterwards. The
  update is that of the transform of the outer chain.

  Args:
    state: of `js.init` or a step.
    params: the parameters.
    mesh: the mesh or comm of the workers.
    axis: the axis of the mesh, or tuple of axes, with one worker at each index.

  Returns:
    (update, state): the update like the parameters, with their dtypes, zeros for leaves
    without a residual or movement; and the state, whose residuals and movement are
    zeros, but for what the dtypes of the parameters cannot hold. `params` and `state`
    stay valid. Entries with NaN or Inf of a damaged state are dropped; a warning names
    the arrays.

  Raises:
    ValueError: if the state was donated, is not one of these workers and parameters, or
      not of `js.init`; if an update of local steps with a delay is in flight.

  Example:
    >>> import jax, jax.numpy as jnp, optax, jaxsparse as js
    >>> comm = js.SimComm("workers", members=2)
    >>> tx, params = js.make_transform("topka", comm, k=1), jnp.zeros(3)
    >>> step = js.make_train_step(lambda p, batch: jnp.vdot(p, batch[0]), tx, comm)
    >>> params, state, _ = step(params, js.init(tx, params, comm), jnp.array([[4.0, 1.0, 0.0], [0.0, 1.0, 6.0]]))
    >>> update, state = js.flush(state, params, comm)
    >>> params, update, float(js.metrics(state).residual_norm)
    (Array([2., 0., 3.], dtype=float32), Array([0., 1., 0.], dtype=float32), 0.0)
  """
  engine = engine_of(mesh, axis)
  # NaN and Inf are no error here: they are dropped below, with a warning.
  check_state(state, params, engine, finite=False)
  if names := owed_not_finite(state):
    warnings.warn(
      f"js.flush: {', '.join(names)} has NaN or Inf: these entries are dropped, and their residuals begin anew",
      stacklevel=2,
    )
    state = without_not_finite(state)
  state = with_rows(state)
  checks.check_landed("js.flush", state)
  worker = functools.partial(_deliver, engine)
  specs = (engine.same, placed(state, engine.axis))
  # None unless workers have several devices: then results are sharded as arguments.
  kept = engine.shardings((params, state), specs)
  program = engine.jit(worker, specs, specs, shardings=kept and (kept, kept))
  return dispatch(program, *engine.place((params, state), specs))


def _deliver(
  engine: Engine, params: optax.Params, state: OptState
) -> tuple[optax.Updates, OptState]:
  """The update of `flush` and the state after it, at one worker.

  Names are those of the leaves that transforms see; a complex leaf is two.
  """
  nodes = reduce_states(state)
  zeros = optax.tree.zeros_like(params)
  # Zeros by name, which each transform replaces for the leaves that it covers.
  updates = leaves_seen(nodes, zeros)
  # f32 by name: the part of an update that the dtype of the parameter cannot hold, the
  # next `moved` of local steps.
  left = {name: leaf.astype(jnp.float32) for name, leaf in updates.items()}
  # θ − θ_w of local steps, f32[1, …] by name; empty without local steps, and with
  # `every=1`.
  moved = moved_leaves(state)

  def mean(owing: list[jax.Array]) -> list[jax.Array]:
    if not owing:
      return owing
    # One message for all leaves of a transform, at each device of a worker.
    flat, restore = flatten.flatten(owing)
    return restore(engine.comm.all_reduce(flat) / engine.workers)

  def deliver(subtree: OptState, row: bool) -> OptState:
    # `row`: the subtree is of an inner optimizer of local steps, one for each worker. A
    # transform there has no residual.
    if row or not is_reduce_state(subtree):
      return subtree
    names = subtree.layout.method.names
    movement = [moved[name][0] for name in names if name in moved]
    # Where all leaves of a transform have movement, it is the outer one of local steps.
    added = movement if len(movement) == len(names) else None
    # The first list gives shapes and dtypes. `added` is added to the residuals, None
    # adds nothing; `mean` averages the sums over the workers.
    means, subtree = take_residuals(
      [updates[name] for name in names], subtree, added, mean
    )
    # With movement the means are f32; else they have the dtype of the leaf already.
    for name, exact in zip(names, means, strict=True):
      sent, left[name] = flatten.representable(exact, updates[name].dtype)
      updates[name] = sent.astype(updates[name].dtype)
    return subtree

  def empty(local_state: LocalState) -> LocalState:
    # All movement is delivered, but for what dtypes cannot hold. [None] adds the axis
    # of workers.
    rest = [left[name][None] for name in flatten.leaves_by_name(local_state.moved)]
    structure = jax.tree.structure(local_state.moved)
    return local_state._replace(moved=jax.tree.unflatten(structure, rest))

  state = jax.tree.map(deliver, state, worker_rows(state), is_leaf=is_reduce_state)
  update = map_seen(lambda name, _: updates[name], nodes, zeros)
  return update, map_states(empty, state, LocalState)
