"""The state of all workers before the first step, as arrays and as shapes (`js.abstract_state`), and its checks."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxsparse._compat import AxisName
from jaxsparse.collectives._base import check_whole
from jaxsparse.comm import replication
from jaxsparse.comm.one_at_a_time import dispatch
from jaxsparse.train import programs
from jaxsparse.train.engine import Engine, engine_of, local_shard
from jaxsparse.transform import checks
from jaxsparse.transform import state as states
from jaxsparse.transform.specs import placed
from jaxsparse.transform.state import ReduceState
from jaxsparse.transform.update import init_state
from jaxsparse.types import Comm

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
) -> Any:
  """The shapes, dtypes and shardings of `js.init(tx, params, mesh)`: what a checkpoint is restored into.

  Args:
    tx: the chain.
    params: the parameters.
    mesh: the mesh or comm of the workers.
    axis: the axis of the mesh, or tuple of axes, with one worker at each index.
    workers: P, if another number of workers than that of the mesh wrote the checkpoint. Their arrays do not divide
      among the devices of the mesh, so each process restores them into the memory of its host, P · n entries of
      residuals, until `js.resize` has made them those of its own workers. What all workers share lies on the mesh.

  Returns:
    The state with `jax.ShapeDtypeStruct` in place of arrays, with shardings where `mesh` is a mesh.

  Raises:
    ValueError: as `js.init`; for `workers` less than 1.

  Example:
    With Orbax, after `saver.save(folder, (params, state))`:

    >>> import jax, jax.numpy as jnp, jaxsparse as js
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("workers",))
    >>> tx, params = js.spardl_transform("workers", density=0.5), jnp.zeros(8)
    >>> like = js.abstract_state(tx, params, mesh, workers=6)
    >>> like.carried.residual.shape
    (48,)
    >>> params, state = saver.restore(folder, (params, like))  # doctest: +SKIP
    >>> state = js.resize(state, params, mesh)  # doctest: +SKIP
  """
  check_whole("abstract_state", 1, optional=True, workers=workers)
  engine = engine_of(mesh, axis)
  with engine.typed() as typed:
    state, specs = _shapes(typed, start_of(engine, tx), params)

  def shape(path: Any, x: Any, row: bool) -> Any:
    return x if states.is_reduce_state(x) else shape_of(mesh, path, x, params, engine if row else None)

  state = jax.tree_util.tree_map_with_path(shape, state, states.has_worker_axis(state), is_leaf=states.is_reduce_state)
  if workers == engine.workers:
    workers = None
  if workers is not None:
    state = _of_workers(state, workers)
    specs = jax.tree.map(lambda _: PartitionSpec(), state)
  if not isinstance(mesh, Mesh):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
  shardings = engine.shardings(state, specs) or jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
  if workers is not None:
    shardings = _on_host(shardings)
  return jax.tree.map(lambda x, lies: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lies), state, shardings)


def start_of(engine: Engine, tx: optax.GradientTransformation) -> Callable[[optax.Params], Any]:
  """The function of parameters that makes the state of one worker of an engine."""

  def start(params: optax.Params) -> Any:
    replication.check_axes(tx.init, (params,), engine.axis)
    return tx.init(params)

  return start


def place_state(engine: Engine, start: Callable, params: optax.Params) -> tuple[Any, Any]:
  """`start_workers`, where types tell how parameters lie inside a worker, and placed on the devices of the engine."""
  with engine.typed() as typed:
    state, specs = start_workers(typed, start, params)
  return engine.place(state, specs), specs


def start_workers(engine: Engine, start: Callable, params: optax.Params) -> tuple[Any, Any]:
  """The state that `start(params)` returns at every worker of an engine, and its specs."""
  arguments, spec = _specs_of(engine, start, params)
  program = engine.jit(start, (PartitionSpec(),), spec, shardings=(None, None))
  programs.check_traced(engine, "the initial state", program, arguments, results="state")
  return dispatch(program, *arguments), spec


def check_update(engine: Engine, tx: optax.GradientTransformation, params: Any, state: Any, own: Any) -> None:
  """Compares `tx.update` between processes, and warns of leaves that no jaxsparse transform covers.

  Where their updates would be made of one worker's gradient, a step of `make_train_step` rejects such leaves. A step of
  the user's own may average their gradients before the update or leave them constant, which the state does not show, so
  this is a warning.
  """
  covered = sum(int(np.max(local_shard(node.layout.entries))) for node, row in states.reduce_rows(state) if not row)
  floating = [leaf for leaf in jax.tree.leaves(params) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)]
  uncovered = 0 < covered < sum(map(jnp.size, floating))
  if not uncovered and engine.processes == 1:
    return

  def updates(grads: optax.Updates, state: Any, params: optax.Params) -> tuple[optax.Updates]:
    return (optax.with_extra_args_support(tx).update(grads, state, params, value=jnp.float32(0))[0],)

  same, split = PartitionSpec(), PartitionSpec(engine.axis)
  arguments = engine.place((params, state, params), (same, own, same))
  if engine.processes > 1:
    head = programs.described((params, state), ("params", "state"))
    try:
      jaxpr = engine.jit(updates, (same, own, same), (same,)).trace(*arguments).jaxpr
    except Exception:  # it needs what only a step gives, or the step will show the error
      jaxpr = None
    programs.check_same(engine, "tx.update", head, jaxpr)
  if not uncovered:
    return
  checked = replication.checked(updates, (split, own, same), (same,), engine.axis, LIKELY_MISTAKES)
  try:
    jax.eval_shape(engine.map(checked, (same, own, same), (same,)), *arguments)
  except ValueError as error:
    warnings.warn(f"js.init: {error}. Ignore this if your own step averages its gradient", stacklevel=3)
  except TypeError as error:
    if "keyword-only argument" not in str(error):  # tx needs extra arguments, which only a step has
      raise


def shape_of(
  mesh: Mesh | Comm, path: Any, x: Any, params: optax.Params, of_each: Engine | None = None
) -> jax.ShapeDtypeStruct:
  """The shape of an array of a state on a mesh, sharded as its parameter if it is one of a parameter.

  Args:
    mesh: the mesh, or a comm.
    path: of the array in the state; that of a moment ends with the path of its parameter.
    x: the array, perhaps of another number of workers.
    params: the parameters.
    of_each: the workers, if the array has a row for each of them.
  """
  rows, axes = ((of_each.held,), (of_each.axis,)) if of_each else ((), ())
  own, sharding = np.shape(x)[len(rows) :], None
  for name, param in jax.tree_util.tree_leaves_with_path(params):
    lies = getattr(param, "sharding", None)
    if path[len(path) - len(name) :] == name and own == np.shape(param) and isinstance(lies, NamedSharding):
      sharding = NamedSharding(mesh, PartitionSpec(*axes, *lies.spec)) if isinstance(mesh, Mesh) else None
  return jax.ShapeDtypeStruct((*rows, *own), jnp.result_type(x), sharding=sharding)


def check_state(state: Any, params: optax.Params) -> list[ReduceState]:
  """The states of transforms in a state of these parameters, after all checks that need no other state."""
  checks.check_alive({"params": params, "state": state})
  checks.check_arrays(state)
  nodes = states.reduce_states(state)
  if not nodes:
    raise ValueError(checks.why_none(state))
  checks.check_layout(state)
  checks.check_params(nodes, params)
  return nodes


def _shapes(engine: Engine, start: Callable, params: optax.Params) -> tuple[Any, Any]:
  """The shapes of `start_workers`, and its specs."""
  arguments, spec = _specs_of(engine, start, params)
  return jax.eval_shape(engine.map(start, (PartitionSpec(),), spec), *arguments), spec


def _specs_of(engine: Engine, start: Callable, params: optax.Params) -> tuple[tuple[Any], Any]:
  """The arguments of `start`, placed, and the specs of the state that it returns."""
  replicated = PartitionSpec()
  arguments = engine.place((params,), (replicated,))
  return arguments, placed(jax.eval_shape(engine.map(start, (replicated,), replicated), *arguments), engine.axis)


def _on_host(shardings: Any) -> Any:
  """The shardings of a state, with one of this process alone for the arrays that belong to workers."""
  try:
    host = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
  except RuntimeError:  # JAX_PLATFORMS leaves out the CPU
    host = SingleDeviceSharding(jax.local_devices()[0])

  def move(node: Any, row: bool) -> Any:
    return jax.tree.map(lambda _: host, node) if row or states.is_reduce_state(node) else node

  return jax.tree.map(move, shardings, states.has_worker_axis(shardings), is_leaf=states.is_reduce_state)


def _of_workers(state: Any, workers: int) -> Any:
  """The shapes of a state as those of a state of another number of workers."""

  def resize_node(node: Any, row: bool) -> Any:
    if row:
      return jax.tree.map(lambda x: jax.ShapeDtypeStruct((workers, *x.shape[1:]), x.dtype), node)
    return _node_of_workers(node, workers) if states.is_reduce_state(node) else node

  return jax.tree.map(resize_node, state, states.has_worker_axis(state), is_leaf=states.is_reduce_state)


def _node_of_workers(node: ReduceState, workers: int) -> ReduceState:
  method, shards, devices = node.layout.method, node.layout.shards, states.devices_of(node)
  assert method is not None
  groups = shards.groups(method.groups) if shards else method.groups
  parts = [jax.eval_shape(lambda group=group: init_state(group.collective, group.entries, workers)) for group in groups]
  carried = states.join_groups([part.carried for part in parts], method.alone)
  rows = lambda x: jax.ShapeDtypeStruct((workers * devices * x.shape[0], *x.shape[1:]), x.dtype)
  same = lambda x: jax.ShapeDtypeStruct((devices, *x.shape) if shards else x.shape, x.dtype)
  shared, split = jax.tree.map(same, carried.shared), jax.tree.map(rows, carried._replace(shared=()))
  return node._replace(carried=split._replace(shared=shared), counters=jax.tree.map(rows, parts[0].counters))
