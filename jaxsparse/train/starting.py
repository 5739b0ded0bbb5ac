"""The state of all workers before the first step, as arrays and as shapes (`js.abstract_state`), and its checks."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, SingleDeviceSharding
from optax import OptState

from jaxsparse._compat import AxisName
from jaxsparse._compat.one_at_a_time import dispatch
from jaxsparse.arrays.flatten import check_are_arrays, check_entries
from jaxsparse.comm import SoloComm, replication
from jaxsparse.train import replicas
from jaxsparse.train.engine import Engine, engine_of, local_shard, shape_of
from jaxsparse.train.skipped import is_sound
from jaxsparse.transform import checks
from jaxsparse.transform import state as states
from jaxsparse.transform.specs import placed
from jaxsparse.transform.update import first_state
from jaxsparse.transform.wrapped import optimized, shapes_seen, trained
from jaxsparse.types import ArrayTree, Comm, SpecTree, check_whole

LIKELY_MISTAKES = {
  "params": "no jaxsparse transform covers its gradient (optax.masked passes masked leaves on unchanged, here the "
  "gradient of one worker), or a transformation after or around the transform uses the data of one worker (as "
  "optax.apply_if_finite does), or the totals of the collective differ (A2SGD), which then belongs inside "
  "js.local_steps. Give every leaf a transform, js.dense_transform for a plain average: "
  "optax.multi_transform({'sparse': js.spardl_transform(...), 'dense': js.dense_transform(...)}, labels); or freeze it "
  "with optax.set_to_zero()",
  "state": "it is computed from the gradient of one worker, before the jaxsparse transform averages it. Put that "
  "transform first in its chain",
  "metrics": "it is computed from the data of one worker",
}


def abstract_state(
  tx: optax.GradientTransformation,
  params: optax.Params,
  mesh: Mesh | Comm,
  *,
  axis: AxisName = "workers",
  workers: int | None = None,
) -> ArrayTree:
  """The shapes, dtypes and shardings of `js.init(tx, params, mesh)`: the target to restore a checkpoint into.

  A step may change dtypes, as a float32 rate under `optax.inject_hyperparams` makes
  bfloat16 momentum float32; Orbax would round it to the dtype of `js.init`. In that
  case give Orbax the shapes of a state after a step.

  Args:
    tx: the chain.
    params: the parameters.
    mesh: the mesh or comm of the workers.
    axis: the axis of the mesh, or tuple of axes, with one worker at each index.
    workers: number P of the workers that wrote the checkpoint, if the mesh has another
      number. P rows may not divide among its devices, so each process restores them
      into the memory of its host, P · n entries of residuals, until `js.resize`
      converts them. Arrays of optimizers that all workers share lie on the mesh.

  Returns:
    The state with `jax.ShapeDtypeStruct` in place of arrays, with shardings where
    `mesh` is a mesh.

  Raises:
    ValueError: as `js.init`; for `workers` less than 1.

  Example:
    With Orbax, after `saver.save(folder, (params, state))`:

    >>> import jax, jax.numpy as jnp, jaxsparse as js
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("workers",))
    >>> tx, params = js.spardl_transform("workers", density=0.5), jnp.zeros(8)
    >>> like = js.abstract_state(tx, params, mesh, workers=6)
    >>> like.carried.residual[0].shape
    (48,)
    >>> params, state = saver.restore(folder, (params, like))  # doctest: +SKIP
    >>> state = js.resize(state, params, mesh)  # doctest: +SKIP
  """
  check_whole("abstract_state", 1, optional=True, workers=workers)
  engine = engine_of(mesh, axis)
  check_are_arrays(params, "params")
  # Without Flax's scales of fp8, which have no optimizer state.
  params = optimized(params)
  # In this context types tell how arrays are sharded inside a worker.
  with engine.typed() as typed:
    arguments, specs = _specs_of(typed, tx.init, jax.tree.map(shape_of, params))
    program = typed.map(tx.init, (typed.same,), specs)
    state = jax.eval_shape(program, *arguments)
  # By leaf where workers have several devices, else by spec; None without a mesh.
  if shardings := engine.shardings(state, specs) or engine.shardings_of(specs):
    state = jax.tree.map(shape_of, state, shardings)
  if workers is None or workers == engine.workers:
    return state
  # Arrays of other workers fit no sharding of this mesh: they are restored on the host.
  host = _host() if shardings else None
  # Workers' own arrays, in wrappers such as `js.local_steps`, have a row for each.
  row_of_workers = lambda x: shape_of(x, host, (workers, *x.shape[1:]))

  def resize(leaf: OptState, row: bool) -> OptState:
    if row:
      return jax.tree.map(row_of_workers, leaf)
    return _resize_state(leaf, workers, host) if states.is_reduce_state(leaf) else leaf

  return jax.tree.map(
    resize, state, states.worker_rows(state), is_leaf=states.is_reduce_state
  )


def place_state(
  engine: Engine, start: Callable, params: optax.Params
) -> tuple[ArrayTree, ArrayTree]:
  """The state that `start(params)` returns at every worker, on the devices of the engine, and its specs.

  The mesh axes inside a worker are Explicit while it starts, so that the type of a
  parameter tells its sharding.
  """
  with engine.typed() as typed:
    state, specs = start_workers(typed, start, params)
  return engine.place(state, specs), specs


def start_workers(
  engine: Engine, start: Callable, params: optax.Params
) -> tuple[ArrayTree, ArrayTree]:
  """The state that `start(params)` returns at every worker of an engine, and its specs.

  Args:
    engine: the workers; of `engine.typed()` where a worker has several devices.
    start: `init` of a chain.
    params: the parameters, arrays or tracers.

  Returns:
    (state, specs): arrays of all workers, and a `PartitionSpec` for each.
  """
  arguments, spec = _specs_of(engine, start, params)
  # Random keys in the states of workers' own optimizers (`js.local_steps`) must differ.
  start_worker = lambda params: states.with_own_keys(start(params), engine.comm.rank)
  # Where a worker has several devices, (None, None) leaves arguments and results
  # sharded as their types say. Else the specs alone count.
  program = engine.jit(start_worker, (engine.same,), spec, shardings=(None, None))
  # Before the dispatch: processes with other programs would wait for each other for
  # ever. `makes_state` compares the state's shapes, too, to name an array in the error.
  replicas.check_traced(
    engine, "the initial state", program, arguments, makes_state=True
  )
  return dispatch(program, *arguments), spec


def check_update(
  engine: Engine,
  tx: optax.GradientTransformation,
  params: optax.Params,
  state: OptState,
  state_specs: ArrayTree,
) -> None:
  """Compares `tx.update` between processes, and warns of leaves that no jaxsparse transform covers.

  Where the update of such a leaf is made of one worker's gradient, a step of
  `make_train_step` raises. A user's own step may average the gradient before, or keep
  the leaf constant, which cannot be seen here, so this function only warns.

  Args:
    engine: the workers.
    tx: the chain.
    params: the parameters.
    state: of all workers, before the first step.
    state_specs: of the state.
  """
  # Number of entries that workers average. Transforms in inner optimizers, whose states
  # have a row for each worker, do not count: their updates are still a worker's own.
  covered = sum(
    int(np.max(local_shard(reduce_state.layout.entries)))
    for reduce_state, row in states.reduce_rows(state)
    if not row
  )
  seen = jax.tree.leaves(shapes_seen(states.reduce_states(state), params))
  floating = [leaf for leaf in seen if jnp.issubdtype(leaf.dtype, jnp.floating)]
  # `covered` is 0 without a jaxsparse transform: a step refuses such a state.
  uncovered = 0 < covered < sum(leaf.size for leaf in floating)
  if not uncovered and engine.processes == 1:
    return

  def updates(
    like: optax.Updates, state: OptState, params: optax.Params
  ) -> tuple[optax.Updates]:
    # Any arrays serve as gradients, and 0 as the loss. Gradients are computed here,
    # since `tx` warns of gradients that are inputs: they might be averages already.
    grads = jax.tree.map(jnp.negative, trained(like))
    return (
      optax.with_extra_args_support(tx).update(
        grads, state, params, value=jnp.float32(0)
      )[0],
    )

  specs = (engine.same, state_specs, engine.same)
  arguments = engine.place((params, state, params), specs)
  if engine.processes > 1:
    # The trace may fail, as where `tx` needs arguments that only a step gives: then
    # only the heads are compared. Other errors are raised again by the step.
    try:
      jaxpr = engine.jit(updates, specs, (engine.same,)).trace(*arguments).jaxpr
    except Exception:
      jaxpr = None
    replicas.check_same(engine, "tx.update", replicas.described((params, state)), jaxpr)
  if not uncovered:
    return
  # For this check the gradients, the first argument, are declared to differ between
  # workers; the arrays are the parameters.
  in_specs = (engine.split, *specs[1:])
  checked = replication.checked(
    updates, in_specs, (engine.same,), engine.axis, LIKELY_MISTAKES
  )
  try:
    # Traced for the error of the check alone.
    jax.eval_shape(engine.map(checked, specs, (engine.same,)), *arguments)
  except ValueError as error:
    warnings.warn(
      f"js.init: {error}. Ignore this if your own step averages its gradient",
      stacklevel=3,
    )
  except TypeError as error:
    # `tx` needs extra arguments, which only a step has, or does not take `value=`.
    if "keyword" not in str(error):
      raise


def owed_not_finite(state: OptState) -> list[str]:
  """Names of the arrays with NaN or Inf among residuals, other arrays of collectives, and movement of local steps.

  With these all further steps would be skipped. Inf counts only in residuals and
  movement, of the kind "owed": elsewhere it may be valid, as in a threshold. Every
  process must call; the call waits for the arrays.
  """
  leaves = jax.tree_util.tree_leaves_with_path(state)
  return [
    f"state{jax.tree_util.keystr(path)}"
    for (path, leaf), kind in zip(leaves, _kinds(state), strict=True)
    # Arrays of the kind "" may be anything.
    if kind
    and isinstance(leaf, jax.Array | np.ndarray)
    and not is_sound(leaf, may_be_inf=kind != "owed")
  ]


def without_not_finite(state: OptState) -> OptState:
  """The state with zeros in place of entries with NaN or Inf in the arrays that `owed_not_finite` names.

  `_kinds` gives each array a kind: "owed", residuals and movement of local steps, must
  be finite; "carried", all else that a collective remembers, may have Inf, as in a
  threshold, but no NaN; "" are all others, which stay as they are.
  """
  leaves, structure = jax.tree.flatten(state)
  clean = [
    leaf if not kind or is_sound(leaf, may_be_inf=kind != "owed") else _cleaned(leaf)
    for leaf, kind in zip(leaves, _kinds(state), strict=True)
  ]
  return jax.tree.unflatten(structure, clean)


def _kinds(state: OptState) -> list[str]:
  """The kind of each array of a state, in the order of its leaves.

  "owed": residuals, and the movement of local steps, must be finite. "carried": all
  else that collectives remember may have Inf, as in a threshold, but no NaN. "": all
  other arrays may be anything.
  """
  mark = lambda kind, tree: jax.tree.map(lambda _: kind, tree)

  def of_subtree(subtree: OptState) -> OptState:
    if not states.is_reduce_state(subtree):
      return ""
    # The residual is "owed", all else that a collective carries is "carried".
    carried = mark("carried", subtree.carried)
    owed = mark("owed", subtree.carried.residual)
    return mark("", subtree)._replace(carried=carried._replace(residual=owed))

  def of_local(subtree: OptState) -> OptState:
    # Local steps hold the `ReduceState`s of their outer and inner chains.
    kinds = jax.tree.map(of_subtree, subtree, is_leaf=states.is_reduce_state)
    if not states.is_local_state(subtree):
      return kinds
    return kinds._replace(moved=mark("owed", subtree.moved))

  return jax.tree.leaves(jax.tree.map(of_local, state, is_leaf=states.is_ours))


_cleaned = jax.jit(lambda leaf: jnp.where(jnp.isfinite(leaf), leaf, 0))


def check_state(
  state: OptState,
  params: optax.Params,
  engine: Engine | None = None,
  shapes: bool = False,
  finite: bool = True,
) -> None:
  """Checks that a state fits these parameters, and these workers if an engine is given.

  Args:
    state: of all workers.
    params: the parameters.
    engine: the workers; None does not compare their number.
    shapes: whether the state may consist of `jax.ShapeDtypeStruct`.
    finite: whether NaN or Inf in residuals and the like (`owed_not_finite`) is an
      error; this check waits for the arrays.

  Raises:
    ValueError: saying what does not fit, and what to do.
  """
  check_are_arrays(params, "params")
  # Donated arrays cannot be read, so this check comes first.
  checks.check_alive({"params": params, "state": state})
  if not shapes:
    checks.check_arrays(state)
  reduce_states = states.reduce_states(state)
  if not reduce_states:
    raise ValueError(checks.why_none(state))
  # Under MPI, where `held` is 1, the arrays of one worker do not show how many workers
  # there are: the number in the layout of the state is compared.
  checks.check_layout(state, engine.workers if engine and engine.held == 1 else None)
  checks.check_params(reduce_states, params)
  if finite and (names := owed_not_finite(state)):
    raise ValueError(
      f"{', '.join(names)} has NaN or Inf, so that all steps would be skipped: restore an older checkpoint, or call "
      "js.flush, which drops those entries"
    )
  if engine:
    for reduce_state in reduce_states:
      checks.check_workers(reduce_state, engine.workers, held=engine.held)


def _specs_of(
  engine: Engine, start: Callable, params: optax.Params
) -> tuple[tuple[Any], Any]:
  """The arguments of `start`, placed on the devices, and the specs of the state that it returns."""
  # Raises for parameters without an entry.
  check_entries(params)

  def checked(params: optax.Params) -> ArrayTree:
    # A transform over a wrong axis gets an error of its own, before shard_map raises
    # one that does not name it.
    replication.check_axes(start, (params,), engine.axis)
    return start(params)

  arguments = engine.place((params,), (engine.same,))
  # Specs follow from the structure of the state, so for its shapes all results may be
  # mapped as if they were equal on all workers.
  program = engine.map(checked, (engine.same,), engine.same)
  state = jax.eval_shape(program, *arguments)
  return arguments, placed(state, engine.axis)


def _host() -> SingleDeviceSharding:
  """The memory of this process."""
  try:
    return SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
  except RuntimeError:  # JAX_PLATFORMS leaves out the CPU
    return SingleDeviceSharding(jax.local_devices()[0])


def _resize_state(
  state: states.ReduceState, workers: int, sharding: SpecTree
) -> states.ReduceState:
  """The shapes of a `ReduceState` for another number of workers.

  Args:
    state: of all workers, as shapes.
    workers: the other number of workers.
    sharding: of the shapes; None for none.
  """
  method = state.layout.method
  shards = state.layout.shards
  devices = state.devices
  assert method is not None  # only states of js.simulate have none
  # Each device of a worker has a state of its own pieces of the leaves. `shapes` below
  # are those at one device of a `SoloComm`, of which only the size counts.
  device_method = (
    dataclasses.replace(method, groups=tuple(shards.groups(method.groups)))
    if shards
    else method
  )
  shapes = jax.eval_shape(lambda: first_state(SoloComm(workers), device_method, None))
  # A worker's own arrays are concatenated, of all devices of all workers, along the
  # leading axis; arrays that workers share have an axis of the S devices, if several.
  own_shape = lambda shape: (workers * devices * shape[0], *shape[1:])
  shared_shape = lambda shape: (devices, *shape) if shards else shape
  # The three functions are for a worker's own arrays, shared arrays, and those of the
  # layout, whose shapes do not depend on the number of workers.
  return shapes._replace(layout=state.layout).map_arrays(
    lambda x: shape_of(x, sharding, own_shape(x.shape)),
    lambda x: shape_of(x, sharding, shared_shape(x.shape)),
    lambda x: shape_of(x, sharding),
  )
