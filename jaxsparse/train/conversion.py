"""`js.resize` and `js.convert`: an optimizer state for another number of workers, or for another collective.

Both first make a fresh state: `resize` from the collectives that the old state records
(`Layout.method`), `convert` from a new transformation. Then `_carry_state` copies what
must not be lost: residuals (`residual_rows`), totals of counters, and the arrays of all
other transformations.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optax import OptState

from jaxsparse._compat import AxisName, is_key
from jaxsparse.arrays.flatten import leaf_shapes
from jaxsparse.train.engine import Engine, engine_of
from jaxsparse.train.residual_rows import (
  Residual,
  carry_over,
  gather,
  homes_of,
  put_like,
  residuals_of,
)
from jaxsparse.train.starting import check_state, place_state
from jaxsparse.train.step import init
from jaxsparse.transform import checks
from jaxsparse.transform import state as states
from jaxsparse.transform.specs import placed
from jaxsparse.transform.update import first_state
from jaxsparse.transform.wrapped import shapes_seen
from jaxsparse.types import ArrayTree, Comm


def resize(
  state: OptState,
  params: optax.Params,
  mesh: Mesh | Comm,
  *,
  axis: AxisName = "workers",
) -> OptState:
  """Converts the optimizer state of P workers to one for the P′ workers of a mesh, without losing residuals.

  An update is `total / P`, so workers owe the mean of their residuals. It stays the
  same, `Σ r′ / P′ = Σ r / P`:

      r′_w = P′/P Σ_{v ≡ w mod P′} r_v

  With fewer workers each takes over the residuals of several; new workers begin with
  zeros. This is exact where P′/P is 1, 2, 4, …; else an entry is rounded once, to
  float32. Every worker goes on with the total counters of the old worker that had sent
  most. All else that a collective remembers, `worker` and `shared` of its `js.State`,
  starts anew: thresholds, regions, random steps, momenta, the totals that `js.ef21`
  tracks. With P′ = P nothing changes, bit for bit.

  Workers with parameters of their own (`js.local_steps`) go on from the mean of these
  parameters: each new worker gets the mean of the old workers' movements and of
  floating-point arrays in their inner states, and the maximum of integers. A warning
  says so.

  Args:
    state: of `js.init` or a step. Its arrays may lie on another mesh, of which every
      process must call, or on the host, like a checkpoint that is restored into
      `js.abstract_state(..., workers=P)`. For an MPI comm give the arrays of all ranks,
      concatenated; those of one rank only where P′ = P.
    params: the parameters.
    mesh: the mesh or comm of the P′ workers. Axes inside a worker must be those of the
      state.
    axis: the axis of the mesh, or tuple of axes, with one worker at each index.

  Returns:
    The state on the new mesh. It may share arrays with `state`: go on with the returned
      one.

  Raises:
    ValueError: if the state was donated, cut or padded, is not one of these parameters,
      or not of `js.init`; if the mesh has no workers, or other devices inside a worker;
      under a trace, such as `jax.jit`.

  Example:
    >>> import jax, jax.numpy as jnp, jaxsparse as js
    >>> six, four = (js.SimComm("workers", members=workers) for workers in (6, 4))
    >>> tx, params = js.spardl_transform(six, k=3), jnp.zeros(8)
    >>> state = js.resize(js.init(tx, params, six), params, four)
    >>> int(state.layout.workers), state.carried.residual[0].shape
    (4, (32,))
  """
  engine = engine_of(mesh, axis)
  checks.check_not_traced("js.resize", state, params)
  check_state(state, params)
  state = states.with_rows(state)

  def restart(row: bool, subtree: OptState) -> OptState:
    # `row`: whether the subtree is in workers' own optimizers, with a row for each.
    if not states.is_reduce_state(subtree):
      return ()
    # A fresh residual of zeros: `_carry_state` fills in what is owed.
    fresh = first_state(engine.comm, subtree.layout.method, subtree.layout.shards)
    return states.add_row(fresh) if row else fresh

  # Whether each array or `ReduceState` of the state has a row for each worker.
  every_row = states.worker_rows(state)
  # Fresh `ReduceState`s on the new mesh, with () in place of all other arrays.
  restarted, _ = place_state(
    engine, lambda _: jax.tree.map(restart, every_row, state), params
  )

  def begin(
    path: jax.tree_util.KeyPath, row: bool, x: Any, restarted: states.ReduceState
  ) -> ArrayTree:
    # Shapes of the other arrays on the new mesh; `_carry_state` gives them values.
    if states.is_reduce_state(x):
      return restarted
    # `held` is the number of new workers, 1 under MPI.
    rows = (engine.held,) if row else ()
    axes = (axis,) if row else ()
    shape = np.shape(x)[len(rows) :]
    # A moment or the like is sharded as its parameter inside a worker; `shape` has
    # no leading axis of workers.
    spec = _spec_of_moment(path, shape, params)
    sharding = (
      None if spec is None else engine.shardings_of(PartitionSpec(*axes, *spec))
    )
    return jax.ShapeDtypeStruct((*rows, *shape), jnp.result_type(x), sharding=sharding)

  fresh = jax.tree_util.tree_map_with_path(begin, every_row, state, restarted)
  return _carry_state(engine, state, fresh, params)


def convert(
  state: OptState,
  tx: optax.GradientTransformation,
  params: optax.Params,
  mesh: Mesh | Comm,
  *,
  axis: AxisName = "workers",
) -> OptState:
  """Converts an optimizer state to a chain with other jaxsparse transforms, also for another number of workers.

  Each leaf keeps its residual when the collective, its options, or the groups of leaves
  (`special`, plans) change; for another number of workers it is scaled as by
  `js.resize`. Total counters go on. All else that a transform remembers starts anew,
  unless its collectives, groups and workers are the old ones. All other transformations
  must stay the same; their arrays keep the dtypes of `state`.

  `every` of `js.local_steps` may change; for 1 no movement may be pending. The new
  chain may begin local steps: `inner` is then the optimizer that followed the
  transform, and each worker gets a copy of its state. The state of `outer` is new, but
  for total counters: what transforms remember of gradients is not of updates.

  Args:
    state: of the old chain, as for `js.resize`.
    tx: the new chain.
    params: the parameters.
    mesh: the mesh or comm of the new workers.
    axis: the axis of the mesh, or tuple of axes, with one worker at each index.

  Returns:
    The state of `tx` on the mesh. It may share arrays with `state`: go on with the
      returned one.

  Raises:
    ValueError: as `js.resize` and `js.init`; if another transformation of the chain is
      not the same; if a leaf has a residual, and its new collective keeps none or local
      steps begin: call `js.flush` before; if an update of local steps is in flight.

  Example:
    >>> import jax, jax.numpy as jnp, jaxsparse as js
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("workers",))
    >>> state = js.init(js.spardl_transform("workers", density=0.5), jnp.zeros(8), mesh)
    >>> state = js.convert(state, js.oktopk_transform("workers", density=0.25), jnp.zeros(8), mesh)
    >>> state.carried.shared[0].step
    Array(0, dtype=int32)
  """
  engine = engine_of(mesh, axis)
  checks.check_not_traced("js.convert", state, params)
  check_state(state, params)
  state = states.with_rows(state)
  checks.check_landed("js.convert", state)
  fresh = init(tx, params, mesh, axis=axis)
  # Local steps begin: the state is first brought to the new number of workers, each of
  # which then gets a copy of the optimizer's state.
  if states.local_states(fresh) and not states.local_states(state):
    state = _start_local(resize(state, params, mesh, axis=axis), fresh)
  return _carry_state(engine, state, fresh, params)


def _carry_state(
  engine: Engine, state: OptState, fresh: OptState, params: optax.Params
) -> OptState:
  """`fresh` with the residuals, total counters and other arrays of `state`, as `resize` and `convert` return it.

  Args:
    engine: the new workers.
    state: of the old workers.
    fresh: of the new workers: `ReduceState`s before their first step, and arrays or
      shapes of all other transformations, whose values do not count.
    params: the parameters.

  Raises:
    ValueError: if transformations other than jaxsparse ones differ, or the leaves that
      jaxsparse ones see; if a leaf with a residual has another sharding inside a
      worker; if a residual or movement would be lost; for the state of one rank of MPI,
      if the number of workers changes.
  """
  reduce_states = states.reduce_states(state)
  # The old P: one number, or the same one for each worker.
  before = int(np.max(gather(reduce_states[0].layout.workers)))
  after = engine.workers
  # Rows of the arrays: 1 at a rank of MPI, else the number of devices of all workers.
  rows = reduce_states[0].counters.skipped.size
  state = _fit_moved(state, fresh, before)
  _check_structure(state, fresh)
  # A rank of MPI holds one row, and has no way to read the others.
  if rows == 1 < before != after:
    raise ValueError(
      f"the state is that of one of {before} workers, and is to become one of {after}: give the arrays of all "
      f"{before}, concatenated along their leading axes, as js.init makes them on a mesh"
    )
  _check_seen(reduce_states, fresh, params)
  residuals = residuals_of(reduce_states, before)
  _check_homes(residuals, states.reduce_states(fresh))
  if before != after and any(jax.tree.leaves(states.worker_rows(state))):
    warnings.warn(
      f"js.resize: the workers have parameters or optimizers of their own, all {after} of them go on from the mean of "
      f"those of the {before} workers",
      stacklevel=3,
    )

  # `old` and `new` are both an array, or both a `ReduceState`. `put_like` shards an old
  # array as the new one.
  def carry(old: ArrayTree, new: ArrayTree) -> ArrayTree:
    if not states.is_reduce_state(old):
      # Only rows of workers differ in shape; all else is checked by now.
      same = np.shape(old) == new.shape
      return put_like(new, old if same else _mean(gather(old), new))
    # `layout[3:]` is (shards, method). If these and the workers are the old ones,
    # nothing changes for this transform: thresholds and momenta go on as they are.
    if (
      before == after
      and old.layout[3:] == new.layout[3:]
      and rows == new.counters.skipped.size
    ):
      return jax.tree.map(put_like, new, old)
    return carry_over(new, residuals, old.counters, engine)

  # (leaves, structure) of both; of the old state, `old[0]`, the leaves alone count.
  old, (new, structure) = (
    jax.tree.flatten(x, is_leaf=states.is_reduce_state) for x in (state, fresh)
  )
  # The structure is the fresh one: `apply_residual` of local steps, a marker without
  # arrays in the state, may be another than before.
  after_state = jax.tree.unflatten(structure, map(carry, old[0], new))
  return engine.place(after_state, placed(after_state, engine.axis))


def _check_seen(
  old: Sequence[states.ReduceState], fresh: OptState, params: optax.Params
) -> None:
  """Raises ValueError if the new transform sees leaves of other names or shapes than the old one.

  Wrappers of optax change the leaves that a transform sees, as `optax.flatten` does.
  """
  new = states.reduce_states(fresh)
  was, now = (leaf_shapes(shapes_seen(side, params)) for side in (old, new))
  if was != now:
    raise ValueError(
      f"the old transform sees parameters{', '.join(was)} and the new one {', '.join(now)}: js.convert keeps the "
      "wrappers around it. To change them call js.flush, and then js.init"
    )


def _spec_of_moment(
  path: jax.tree_util.KeyPath, shape: tuple[int, ...], params: optax.Params
) -> PartitionSpec | None:
  """The spec of the parameter that an array of a state belongs to; None without such a parameter or its spec.

  An array, such as a moment, belongs to a parameter if both have the same shape and its
  path ends with that of the parameter, as `[0].mu['w']` with `['w']`.

  Args:
    path: of the array in the state.
    shape: of the array, without an axis of workers.
    params: the parameters.
  """
  # By the length of the parameter's path.
  specs = {
    len(suffix): param.sharding.spec
    for suffix, param in jax.tree_util.tree_leaves_with_path(params)
    if path[len(path) - len(suffix) :] == suffix
    and np.shape(param) == shape
    and isinstance(getattr(param, "sharding", None), NamedSharding)
  }
  # The path of one parameter may end that of another: the longest match is meant.
  return specs[max(specs)] if specs else None


def _mean(rows: Any, like: ArrayTree) -> ArrayTree:
  """The mean of the rows of the old workers, or the maximum of integers, repeated for each new worker.

  `rows` is [P, …] of the old workers; the result has the shape [P′, …] of `like`.
  Random keys have no mean: the old ones are used in turn, and a key that is used again
  is folded with the number of its earlier uses.
  """
  if is_key(rows):
    # New worker w gets the key of old worker w mod P, which has served w // P times.
    again, first = np.divmod(np.arange(like.shape[0]), len(rows))
    words = jnp.asarray(np.asarray(jax.random.key_data(rows))[first])
    keys = jax.random.wrap_key_data(words, impl=jax.random.key_impl(rows))
    # A key stays as it is for its first use.
    folded = jax.vmap(jax.random.fold_in)(keys, again)
    return jnp.where(again > 0, folded, keys)
  rows = np.asarray(rows)
  floating = jnp.issubdtype(rows.dtype, jnp.floating)
  # In float64 no sum overflows, and the mean of equal rows is rounded to that row.
  value = (
    rows.astype(np.float64).mean(axis=0).astype(rows.dtype)
    if floating
    else rows.max(axis=0)
  )
  return np.broadcast_to(value, like.shape)


def _start_local(state: OptState, fresh: OptState) -> OptState:
  """The state before the first local step, from one without: each worker gets a copy of the optimizer state.

  Args:
    state: without local steps, of as many workers as `fresh`.
    fresh: the new state, with local steps.

  Raises:
    ValueError: for a residual that is not zero, or an optimizer that is not the inner
      one.
  """

  def begin(new: ArrayTree, old: ArrayTree) -> ArrayTree:
    # `new` is an array or state of `fresh`, `old` the subtree of the old state there.
    if not states.is_local_state(new):
      return old
    reduce_states = states.reduce_states(old)
    # If `old` is the state of a chain, a tuple: the states of its other transformations.
    rest = (
      tuple(substate for substate in old if not states.reduce_states(substate))
      if type(old) is tuple
      else ()
    )
    # `inner` is a chain of these transformations, whose state is `rest`, or a single
    # optimizer, whose state is the only item.
    choices = [rest, *rest] if len(rest) == 1 else [rest]
    like: Any = jax.tree.structure(new.inner)
    inner = [
      candidate for candidate in choices if jax.tree.structure(candidate) == like
    ]
    if len(reduce_states) != 1 or not inner:
      raise ValueError(
        "js.convert to local steps: inner is not the optimizer that follows the one jaxsparse transform of the old "
        "chain: from optax.chain(transform, optimizer) to js.local_steps(optimizer, outer, every=…). For another one "
        "start anew with js.init"
      )
    # A residual of gradients cannot go on: local steps owe changes of parameters.
    residuals = jax.tree.leaves(reduce_states[0].carried.residual)
    if any(np.any(gather(leaf)) for leaf in residuals):
      raise ValueError(
        "js.convert to local steps: a residual of gradients is not zero, deliver it by js.flush before"
      )
    # The first `ReduceState` of `outer` goes on with the counters of the old one. All
    # else that the old one remembers, as thresholds and momenta, is of gradients.
    following = iter(reduce_states)
    go_on = lambda x: x._replace(counters=next(following, x).counters)
    # Random keys stay those of the new state, which differ between workers.
    row = lambda leaf, like: (
      like if is_key(leaf) else np.broadcast_to(gather(leaf), like.shape)
    )
    outer = states.map_states(go_on, new.outer)
    copies = jax.tree.map(row, inner[0], new.inner)
    return new._replace(inner=copies, outer=outer)

  # The subtrees of the old state where the fresh one has an array, a `ReduceState` or a
  # `LocalState`.
  is_ours = states.is_ours
  structure: Any = jax.tree.structure(fresh, is_leaf=is_ours)
  try:
    old_subtrees = structure.flatten_up_to(state)
  except ValueError:
    return state  # `_check_structure` names what else differs
  new_subtrees = jax.tree.leaves(fresh, is_leaf=is_ours)
  return jax.tree.unflatten(structure, map(begin, new_subtrees, old_subtrees))


def _fit_moved(state: OptState, fresh: OptState, workers: int) -> OptState:
  """The state whose local steps have movement (`moved`) where those of `fresh` do: zeros are added or removed.

  Movement, f32[P, …] like the parameters, is what each worker has moved since the last
  exchange; local steps with `every=1` have none, ().

  Args:
    state: of the old workers.
    fresh: of the new chain.
    workers: number of the old workers.

  Raises:
    ValueError: if a `moved` that is not zero would be lost.
  """
  # Both chains have their local steps in the same order.
  following = iter(states.local_states(fresh))

  def fit(local_state: states.LocalState) -> states.LocalState:
    new = next(following, local_state)
    moved = jax.tree.leaves(local_state.moved)
    # Both have movement, or neither has.
    if bool(moved) == bool(jax.tree.leaves(new.moved)):
      return local_state
    if any(np.any(gather(leaf)) for leaf in moved):
      raise ValueError(
        "workers have moved since the last exchange: call step.synchronize(params, state) before"
      )
    # Like the movement of `fresh`, for the old workers; () where it has none.
    zeros = lambda x: np.zeros((workers, *x.shape[1:]), x.dtype)
    return local_state._replace(moved=jax.tree.map(zeros, new.moved))

  return states.map_states(fit, state, states.LocalState)


def _check_structure(state: OptState, fresh: OptState) -> None:
  """Raises ValueError unless both states have the same arrays, by path, kind and shape, outside of `ReduceState`s."""
  old = _described(state)
  new = _described(fresh)
  if old != new:
    raise ValueError(
      f"the optimizer state has {', '.join(sorted(old - new)) or 'nothing'} where that of the new chain has "
      f"{', '.join(sorted(new - old)) or 'nothing'}: js.convert replaces jaxsparse transforms and keeps all others. "
      "For other changes call step.synchronize where there are local steps, js.flush, and then js.init"
    )


def _described(tree: ArrayTree) -> set[str]:
  """The path of each array and each `ReduceState` in a state; for arrays with dtype and shape at one worker.

  All floating-point dtypes are "floating": a step may change that of `init`, as a
  float32 rate under `optax.inject_hyperparams` makes bfloat16 momentum float32.
  """
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=states.is_reduce_state)
  # The arrays in a `ReduceState` may differ: they are converted. `row`, a boolean, cuts
  # off the leading axis of workers where an array has one.
  kind = lambda dtype: "floating" if jnp.issubdtype(dtype, jnp.floating) else dtype
  shape = lambda x, row: (
    ""
    if states.is_reduce_state(x)
    else f" {kind(jnp.result_type(x))}{list(np.shape(x)[row:])}"
  )
  rows = jax.tree.leaves(states.worker_rows(tree))
  return {
    jax.tree_util.keystr(path) + shape(x, row)
    for (path, x), row in zip(leaves, rows, strict=True)
  }


def _check_homes(
  residuals: dict[str, Residual], fresh: Sequence[states.ReduceState]
) -> None:
  """Raises ValueError if the residual of a leaf would be lost, or if its sharding inside a worker changes.

  Args:
    residuals: of the old state, by the names of leaves.
    fresh: of the new state.
  """
  groups = [group for state in fresh for group in homes_of(state)]
  # How each leaf with a residual is sharded inside a worker; None for one device.
  homes = {name: placement for group in groups for name, _, placement in group}
  for name, residual in sorted(residuals.items()):
    if name not in homes:
      # A residual of zeros owes nothing, and may go.
      if residual.rows.any():
        raise ValueError(
          f"parameters{name} has a residual that is not zero, and its new collective keeps none: deliver it "
          "by js.flush before, or choose a collective with a residual"
        )
    elif homes[name] != residual.placement:
      raise ValueError(
        f"parameters{name} lies inside a worker as {residual.placement} in the state, and as {homes[name]} here, with "
        "axes and spec: give a mesh with the same axes inside, and the same shardings of the parameters"
      )
