"""Checks of states and gradients before anything is computed with them; each error says what to do instead."""

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import OptState

from jaxsparse import _compat
from jaxsparse._compat import varying
from jaxsparse.arrays.flatten import (
  check_leaves,
  leaf_shapes,
  leaves_by_name,
  wide_dtype,
)
from jaxsparse.comm import AxisComm
from jaxsparse.transform.groups import Group
from jaxsparse.transform.state import (
  LocalState,
  ReduceState,
  axes_of_workers,
  checksum_of,
  is_reduce_state,
  local_states,
  reduce_states,
)
from jaxsparse.transform.wrapped import PLACEHOLDER, shapes_seen
from jaxsparse.types import ArrayTree, Comm


def why_none(state: OptState) -> str:
  """Why an optax state holds no `ReduceState`, for an error."""
  if any(map(_is_plain, jax.tree.leaves(state, is_leaf=_is_plain))):
    return (
      "the optimizer state is made of plain dicts and lists, as a checkpoint is when Orbax restores it without a "
      "target: restore it into js.abstract_state(tx, params, mesh)"
    )
  return (
    "the optimizer state holds no jaxsparse transform, so nothing would average the gradients of the workers: start "
    "the chain with one, js.dense_transform for the plain average"
  )


def _is_plain(state: OptState) -> bool:
  return isinstance(state, dict) and set(ReduceState._fields) <= set(state)


def check_workers(state: ReduceState, workers: int, held: int = 1) -> None:
  """Checks, by shapes alone since `layout` is traced, that a state was made for `workers` workers.

  Args:
    state: a state whose per-worker arrays are those of `held` workers, concatenated.
    workers: the number of workers of the axis.
    held: 1 inside shard_map, all of them outside.

  Raises:
    ValueError: naming the number of workers it was made for.
  """
  # `skipped` has an entry for each device of each worker whose arrays are here: `held`
  # workers if the state was made for `workers`, else proportionally more or fewer.
  made_for = state.counters.skipped.size // state.devices * workers // held
  if made_for != workers:
    raise ValueError(
      f"the optimizer state was made for {made_for} workers, the axis has {workers}: make one of it for these with "
      "js.resize"
    )


def check_layout(opt_state: OptState, workers: int | None = None) -> None:
  """Checks that the arrays have the sizes that the state was made with; states of shapes or tracers pass.

  Args:
    opt_state: the state of all workers.
    workers: the number of workers; None for that of the rows of the arrays.

  Raises:
    ValueError: if arrays were cut or padded, which Orbax does silently where it is not
      strict, or if the state was made for another number of workers, or restored into
      that of other leaves or options.
  """
  for state in reduce_states(opt_state):
    if isinstance(state.layout.workers, jax.core.Tracer) or not hasattr(
      state.layout.workers, "__array__"
    ):
      continue  # under a trace, or a jax.ShapeDtypeStruct
    # `layout[:3]` is (workers, entries, checksum). Where these have a row for each
    # worker, all rows are the same, so those of this process suffice.
    made_for, entries, checksum = (
      int(np.max(_compat.local_shard(array))) for array in state.layout[:3]
    )
    shards = state.layout.shards
    # One row for each device of each worker.
    rows = state.counters.skipped.size
    # A restore keeps `layout[3:]`, (shards, method), of its target: it holds no arrays.
    # The checksum, an array, is that of the saved state.
    if checksum != checksum_of(*state.layout[3:]):
      raise ValueError(
        "the optimizer state was restored into that of other parameters, shards, groups of leaves or options of a "
        "collective than it was saved from: restore it into js.abstract_state of what it was saved from, then call "
        "js.convert"
      )
    # A single row may be that of one of many workers: then only the layout tells P.
    expected = workers or (rows // state.devices if rows > 1 else made_for)
    # From here on the entries of a residual at one device, with padding.
    entries = sum(shards.sizes) if shards else entries
    sizes = [
      residual.size for residual in state.carried.residual if residual is not None
    ]
    # Groups without a residual have no array of n whose size could be compared.
    if made_for != expected or (
      len(sizes) == len(state.groups) and sum(sizes) != rows * entries
    ):
      raise ValueError(
        f"the optimizer state was made for {made_for} workers and {entries} gradient entries, its arrays are those of "
        f"{expected} workers and {sum(sizes) // rows or entries} entries: they were cut or padded, as Orbax does "
        "with strict=False, and residuals are lost. Restore it as it was saved"
      )


def check_arrays_of(
  init: optax.TransformInitFn, state: OptState, params: optax.Params
) -> None:
  """Checks, when an update is traced, that a state has the arrays of `init(params)`.

  Raises:
    ValueError: naming the first leaf of the parameters, or else the first array of the
      state, that differs.
  """
  states = reduce_states(state)
  check_params(states, params)
  if any(reduce_state.layout.shards for reduce_state in states):
    # Only js.init sees how parameters lie inside a worker, which `init` has to know.
    return
  actual = leaf_shapes(state)
  expected = leaf_shapes(jax.eval_shape(init, params))
  if actual == expected:
    return
  path = next(
    path for path in [*actual, *expected] if actual.get(path) != expected.get(path)
  )
  # `actual` and `expected` are shapes by name; one may lack an array of the other.
  shape = lambda shapes: f"shape {shapes[path]}" if path in shapes else "nothing"
  raise ValueError(
    f"the optimizer state has {shape(actual)} at state{path}, that of this transformation {shape(expected)}: it is one "
    "of another optimizer or of other parameters, make a new one with js.init"
  )


def check_params(states: Sequence[ReduceState], params: optax.Params) -> None:
  """Raises ValueError if a state was made for other parameters, naming the first leaf that differs."""
  # Shapes by name, of the leaves as transforms see them inside wrappers of optax.
  shapes = leaf_shapes(shapes_seen(states, params))
  for state in states:
    if state.layout.method is None:
      raise ValueError(
        "the state is one of js.simulate, which does not say of which parameters: give one of js.init"
      )
    for name, shape in state.leaves:
      if shapes.get(name) != shape:
        actual = (
          f"it has shape {shapes[name]}"
          if name in shapes
          else f"there are parameters{', '.join(shapes)}"
        )
        wrapped = (
          ". Or a wrapper around the jaxsparse transform changes leaves (optax.flatten of a part of them does): put it "
          "after, optax.chain(transform, wrapper(optimizer))"
        )
        raise ValueError(
          f"the optimizer state was made for parameters{name} of shape {shape}, here {actual}: give the parameters "
          f"that it was made for{wrapped * (name not in shapes)}"
        )


def check_own_leaves(params: optax.Params) -> None:
  """Raises ValueError or TypeError for parameters of which a transform cannot make its state."""
  if isinstance(params, optax.LookaheadParams):
    raise ValueError(
      "optax.lookahead goes around the chain, whose first transformation is the jaxsparse one: "
      "optax.lookahead(optax.chain(transform, optimizer), sync_period, slow_step_size)"
    )
  check_leaves(params)


def check_arrays(state: OptState) -> None:
  """Raises ValueError if a state is made of shapes, naming the first: a checkpoint is restored into one."""
  if abstract := [
    name
    for name, leaf in leaves_by_name(state).items()
    if isinstance(leaf, jax.ShapeDtypeStruct)
  ]:
    raise ValueError(
      f"state{abstract[0]} is a shape, as in js.abstract_state, and no array: restore a checkpoint into it and give "
      "what is restored"
    )


def check_agreed(before: ArrayTree, after: ArrayTree) -> None:
  """Raises ValueError if a step without an exchange had one, because `agree` did not reach the transform."""
  pairs = zip(reduce_states(before), reduce_states(after), strict=True)
  # `idle` passes the carried arrays on as they are; an exchange makes new ones.
  if any(old.carried is not new.carried for old, new in pairs):
    raise ValueError(
      "a wrapper around the jaxsparse transform (of `outer` in js.local_steps) does not pass on extra arguments: make "
      "it an optax.GradientTransformationExtraArgs, whose update takes **extra and gives them to the transform"
    )


def check_kept_types(before: ArrayTree, after: ArrayTree) -> None:
  """Raises TypeError if an update has changed dtypes in the state of a transform: a wrapper has computed with it."""
  types = lambda state: [
    jnp.result_type(leaf) for leaf in jax.tree.leaves(reduce_states(state))
  ]
  if types(before) != types(after):
    raise TypeError(
      "a wrapper around the jaxsparse transform computes with its state, and would lose its residuals, as "
      "optax.lookahead(reset_state=True) does: put the transform first, optax.chain(transform, wrapper(optimizer)); "
      "optax.lookahead goes around the chain, with reset_state=False"
    )


def check_local_state(state: LocalState, params: optax.Params) -> None:
  """Raises for an inner or outer transformation that local steps cannot use, or for complex parameters."""
  # `optax.tree_map_params` inits with a placeholder instead of parameters.
  if isinstance(params, PLACEHOLDER):
    return
  for name, leaf in leaves_by_name(params).items():
    if jnp.iscomplexobj(leaf):
      raise TypeError(
        f"local_steps: parameters{name} is complex: put optax.contrib.split_real_and_imaginary around js.local_steps"
      )
  if local_states((state.inner, state.outer)):
    raise ValueError(
      "local_steps: inner or outer has local steps itself: choose one number of steps"
    )
  if not reduce_states(state.outer):
    raise ValueError(
      "local_steps: outer has no jaxsparse transform, so nothing would exchange what workers have moved: begin it with "
      "one, as in optax.chain(js.dense_transform(axis), optax.sgd(1.0)), which averages the parameters"
    )
  # `inner` may have a transform without a residual, as a dense average.
  if any(
    jax.tree.leaves(reduce_state.carried.residual)
    for reduce_state in reduce_states(state.inner)
  ):
    raise ValueError(
      "local_steps: inner has a jaxsparse transform with a residual, what the residual holds would be of gradients and "
      "not of parameters: begin outer with this transform, and leave plain optax in inner"
    )


def check_landed(name: str, state: OptState) -> None:
  """Raises ValueError if an update of local steps with a delay is in flight, which the function `name` would lose."""
  if any(
    local.flight and int(np.max(_compat.local_shard(local.flight.left)))
    for local in local_states(state)
  ):
    raise ValueError(
      f"{name}: an update of local steps is in flight, apply it by step.synchronize(params, state)"
    )


def check_alive(trees: dict[str, Any]) -> None:
  """Raises ValueError for arrays that were donated to an earlier step: XLA would read freed memory."""
  gone = lambda leaf: (
    isinstance(leaf, jax.Array)
    and not isinstance(leaf, jax.core.Tracer)
    and leaf.is_deleted()
  )
  for what, tree in trees.items():
    # Names take longer than all of the other checks together.
    if any(map(gone, jax.tree.leaves(tree))):
      name = next(name for name, leaf in leaves_by_name(tree).items() if gone(leaf))
      raise ValueError(
        f"{what}{name} was donated to an earlier step and is gone: go on with the params and state that the step "
        "returned, copy what you want to keep, or give make_train_step donate=False"
      )


def check_method(
  state: ReduceState, groups: Sequence[Group], grads: optax.Updates, workers: int
) -> None:
  """Checks, when an update is traced, that a state was made for these gradients and this transform.

  Args:
    state: the state of one worker.
    groups: the groups of the gradients.
    grads: the gradients.
    workers: the workers of the axis.

  Raises:
    ValueError: if the state is one of other workers, shapes, groups of leaves,
      collectives or options.
  """
  check_workers(state, workers)
  method: Any = state.layout.method
  shapes = tuple(map(np.shape, jax.tree.leaves(grads)))
  # Raises for a state of js.simulate (None), or names the leaf whose shape differs. The
  # same leaves in another order, or with further ones, pass, and are refused below.
  if method is None or method.shapes != shapes:
    check_params([state], grads)
  # The collective with its options, by the numbers of the leaves of each group.
  labels_of = lambda groups: {group.leaves: group.collective.label for group in groups}
  was, now = labels_of(method.groups), labels_of(groups)
  if (was, method.shapes) != (now, shapes):
    # Equal labels in another grouping look alike in the error, so it says that.
    joined = lambda labels: ", ".join(dict.fromkeys(labels.values()))
    labels = joined(was), joined(now)
    others = " for other groups of leaves" if labels[0] == labels[1] else ""
    raise ValueError(
      f"the optimizer state is one of {labels[0]}{others}, and this transform is {labels[1]}: make one of it with "
      "js.convert for this transform"
    )


def _summed_error(path: jax.tree_util.KeyPath, axis: Any) -> ValueError:
  return ValueError(
    f"gradients{jax.tree_util.keystr(path)} is summed or averaged over {axis!r} already, or every worker has the same "
    "batch: leave out the pmean or psum, and take the gradient of one worker at js.own_params(params, state), since "
    "JAX sums those at replicated parameters; or where a partitioner averages by js.stacked(tx, mesh).value_and_grad"
  )


def check_own_gradients(grads: optax.Updates, state: LocalState) -> None:
  """Raises ValueError for gradients of local steps that by their types are equal on all workers.

  Such gradients were taken at the outer parameters, where JAX sums them over the
  workers; local steps need gradients at each worker's own parameters. Types tell only
  where a shard_map checks replication.
  """
  # The axes of the workers, over which counters vary by their types; empty without such
  # a check.
  axes = axes_of_workers(reduce_states(state.outer))
  leaves = jax.tree_util.tree_leaves_with_path(grads)
  if (
    axes and leaves and not any(axes & _compat.axes_of_type(leaf) for _, leaf in leaves)
  ):
    raise _summed_error(leaves[0][0], " and ".join(sorted(axes)))


def warn_of_frozen(states: Sequence[ReduceState], *trees: ArrayTree) -> None:
  """Warns of leaves whose gradient or update is zero in the program, as of frozen leaves, but that would move.

  Some collectives deliver other numbers for zeros: signs, for one, are +1 or −1.

  Args:
    states: of the transforms that leaves are given to.
    trees: gradients or updates of all leaves; a zero in one of the trees is enough.
  """
  # (name of the collective, names of leaves) of each group whose zeros may move.
  moving = [
    (group.collective.name, [method.names[leaf] for leaf in group.leaves])
    for state in states
    if (method := state.layout.method)
    for group in method.groups
    if group.collective.traits.moves_zeros
  ]
  if not moving:
    return
  # Names of leaves that are traced as zeros, whatever the data.
  zeros = {
    name
    for tree in trees
    for name, leaf in leaves_by_name(tree).items()
    if _compat.is_zero(leaf)
  }
  for collective, names in moving:
    # All leaves are zeros where a loss is constant: no leaf is frozen then.
    still = [name for name in names if name in zeros]
    if 0 < len(still) < len(names):
      warnings.warn(
        f"{collective}: the gradient or update of {', '.join(still)} is zero, and would move, since no entry is sent "
        "as zero: put optax.set_to_zero() around the transform or the local steps, give the leaf special={'its name': "
        "'dense'}, or keep what is frozen out of the parameters, step(..., shared=)",
        stacklevel=2,
      )


# Names of fields in optimizer states that may have 16 bits: momentum, whose memory is
# short, and what is no moving average.
_NARROW = {"mu", "trace", "acc_grads", "hyperparams", "flight"}


def warn_of_narrow(state: OptState) -> None:
  """Warns of an optimizer that keeps other averages than momentum in 16 bits, naming the first array."""
  narrow = []
  for path, leaf in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_reduce_state):
    # Fields anywhere in the path, since a momentum is a pytree below its field.
    fields = {getattr(key, "name", "") for key in path}
    is_average = not is_reduce_state(leaf) and _NARROW.isdisjoint(fields)
    # `wide_dtype` is float32 for 16 bits, else the dtype itself.
    if is_average and wide_dtype(leaf) != leaf.dtype:
      narrow.append((jax.tree_util.keystr(path), leaf.dtype.name))
  if not narrow:
    return
  (name, dtype), *others = narrow
  more = f" and {len(others)} more" if others else ""
  lost = {
    "bfloat16": "a decay of 0.999 to 1, so that nothing is forgotten",
    "float16": "an eps of 1e-8, and squares below 3e-8, to 0",
  }
  warnings.warn(
    f"js.init: the optimizer keeps state{name}{more} in {dtype}, the dtype of its parameters, which rounds "
    f"{lost[dtype]}: keep parameters in float32 and cast them in loss_fn, or take js.scale_by_window_adam, whose "
    "averages are float32 (with window=1 it is Adam)",
    stacklevel=3,
  )


def check_local(comm: Comm, grads: optax.Updates) -> None:
  """Checks that gradients are those of one worker, as far as it shows; raises ValueError if they are averaged.

  Where a shard_map checks replication, JAX sums the gradients of replicated parameters
  by itself, and types say so. Otherwise the last operations of the trace show a psum or
  pmean of the user's own.

  Warns:
    UserWarning: if the shard_map does not check replication, and all gradients are its
      arguments.
  """
  # Other comms name no axis, along which a type could vary or a psum be taken.
  if not isinstance(comm, AxisComm):
    return
  leaves = jax.tree_util.tree_leaves_with_path(grads)
  axes = set(_compat.names_of(comm.axis))
  checked = varying.checked_axes()
  # True: a shard_map checks replication over all axes of the workers, and no gradient
  # varies over them by its type, so all are sums already. A single leaf of such a type
  # proves nothing: it may be a constant.
  typed = axes <= checked and not any(
    axes & _compat.axes_of_type(leaf) for _, leaf in leaves
  )
  # The paths of gradients that are sums: all if `typed`, else those that end in a psum.
  if summed := [
    path for path, leaf in leaves if typed or _compat.is_psum(leaf, comm.axis)
  ]:
    raise _summed_error(summed[0], comm.axis)
  if not checked and all(_compat.is_argument_of_shard_map(leaf) for _, leaf in leaves):
    warnings.warn(
      "gradients come into a shard_map with check_vma=False as they are: if they are averaged already, or every worker "
      "has the same batch, no word is saved, and jaxsparse cannot tell; take them inside it, or by "
      "js.stacked(tx, mesh).value_and_grad",
      stacklevel=2,
    )


def is_traced(*trees: ArrayTree) -> bool:
  """Whether a leaf is a tracer, so that its value is not known."""
  return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees))


def check_not_traced(name: str, *trees: ArrayTree) -> None:
  """Raises ValueError under a trace, also of captured arrays: what is computed with them there has no values."""
  # Under `jit` a new number is a tracer, even where all arguments have values.
  if is_traced(jnp.int32(0) + 1, trees):
    raise ValueError(
      f"{name}: called under a trace, by jax.jit, jax.vmap or jax.eval_shape, and it computes with values on the "
      "host: call it outside, between two steps"
    )
