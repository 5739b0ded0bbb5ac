"""The boilerplate that a user should not write: state over the workers, and a training step."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from jaxsparse._compat import AxisName
from jaxsparse.collectives._base import check_whole
from jaxsparse.comm import replication
from jaxsparse.launch.rank import count_step
from jaxsparse.train import replicas
from jaxsparse.train.compiling import compiler_options
from jaxsparse.train.engine import Engine, apart, check_batch, engine_of, here
from jaxsparse.train.worker import AuxReduce, Given, ModelState, StepMetrics, Worker
from jaxsparse.transform import checks
from jaxsparse.transform import local as perworker
from jaxsparse.transform import state as states
from jaxsparse.transform.local import PerWorker
from jaxsparse.transform.specs import specs as specs_of
from jaxsparse.types import Comm


def init(
  tx: optax.GradientTransformation, params: optax.Params, mesh: Mesh | Comm, *, axis: AxisName = "workers"
) -> Any:
  """The optimizer state over the workers: residuals sharded over `axis`, everything else replicated.

  Every process of the mesh must call, and give the same parameters.

  Args:
    tx: a chain whose first transformation is a jaxsparse one over `axis`.
    params: the parameters, a pytree of floating-point arrays.
    mesh: the mesh whose axis, or tuple of axes, `axis` is; its devices may belong to many processes. Or a comm that
      brings its own workers: `js.MpiComm()`, `js.SimComm(axis, members=P)`.
    axis: the axis that the workers lie along.

  Returns:
    The state of `tx`; the residual is one f32[P · n] of all workers, or this worker's f32[n] under MPI. Go on with
    `js.make_train_step`, or with `js.specs(state, axis)` in a shard_map of your own. For a collective whose totals
    differ between workers (A2SGD) a `js.PerWorker` of it.

  Raises:
    ValueError: if the mesh has no such axis, the transform is over another one, the configuration does not fit the
      parameters, these differ between processes, or a transformation that keeps arrays comes before the transform.

  Warns:
    UserWarning: if a leaf would get the gradient of one worker, since no transform covers it.

  Example:
    >>> import jax, jax.numpy as jnp, jaxsparse as js
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("workers",))
    >>> state = js.init(js.spardl_transform("workers", k=3), jnp.zeros(8), mesh, axis="workers")
    >>> state.carried.residual.size == 8 * len(jax.devices())
    True
  """
  engine = engine_of(mesh, axis)
  checks.check_alive({"params": params})

  def start(params: optax.Params) -> Any:
    replication.check_axes(tx.init, (params,), engine.axis)
    state = tx.init(params)
    return perworker.first(state, params) if states.differs(state) else state

  abstract = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(params))
  if not abstract:
    replicas.check_processes(engine, params, "params")
  state, specs = started(engine, start, params, engine.axis)
  if not abstract:
    _warn_uncovered(engine, tx, params, state, specs)
  return state


def started(engine: Engine, start: Callable, params: optax.Params, axis: AxisName) -> tuple[Any, Any]:
  """The state that `start(params)` makes at every worker of an engine, and its specs."""
  replicated = PartitionSpec()
  arguments = engine.place((params,), (replicated,))
  spec = specs_of(jax.eval_shape(engine.map(start, (replicated,), replicated), *arguments), axis)
  return engine.jit(start, (replicated,), spec)(*arguments), spec


def _warn_uncovered(engine: Engine, tx: optax.GradientTransformation, params: Any, state: Any, own: Any) -> None:
  """Warns of leaves that no jaxsparse transform covers and whose updates would be made of one worker's gradient.

  A step of `make_train_step` refuses them. One of the user's own may average their gradients before the update, or
  leave them constant, which no state shows.
  """
  covered = sum(int(np.max(here(node.layout.entries))) for node in states.reduce_states(state))
  floating = [leaf for leaf in jax.tree.leaves(params) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)]
  if isinstance(state, PerWorker) or not covered or covered >= sum(map(jnp.size, floating)):
    return

  def updates(grads: optax.Updates, state: Any, params: optax.Params) -> tuple[optax.Updates]:
    return (optax.with_extra_args_support(tx).update(grads, state, params, value=jnp.float32(0))[0],)

  same, split = PartitionSpec(), PartitionSpec(engine.axis)
  checked = replication.checked(updates, (split, own, same), (same,), engine.axis, _LIKELY_MISTAKES)
  arguments = engine.place((params, state, params), (same, own, same))
  try:
    jax.eval_shape(engine.map(checked, (same, own, same), (same,)), *arguments)
  except ValueError as error:
    warnings.warn(f"js.init: {error}. If your own step averages its gradient, all is well", stacklevel=3)
  except TypeError as error:
    if "keyword-only argument" not in str(error):  # extra arguments that the step alone has
      raise


def make_train_step(
  loss_fn: Callable[..., Any],
  tx: optax.GradientTransformation,
  mesh: Mesh | Comm,
  *,
  axis: AxisName = "workers",
  has_aux: bool = False,
  aux_reduce: AuxReduce = "mean",
  model_state: ModelState = "mean",
  accumulate: int = 1,
  donate: bool = True,
) -> "TrainStep":
  """A jitted data-parallel training step `params, state, metrics = step(params, state, batch)`.

  Each worker takes its share of the batch along the leading axis, computes the gradient of its own mean loss, and `tx`
  averages over the workers. The step donates `params` and `state`: use what it returns and not what it was given.

  The step takes what else training needs by keyword, and gives it to `loss_fn` likewise:

      step(params, state, batch, rng=key)            loss_fn(params, batch, rng=...), with a key of each worker's own
                                                     that is folded from `key`; give another one in every step
      step(params, state, batch, model_state=stats)  loss_fn(params, batch, model_state=...) -> (loss, model_state), or
                                                     (loss, model_state, aux); the next one is `metrics.model_state`
      step(params, state, batch, **extra)            tx.update(..., value=loss, **extra), optax's extra arguments

  Before it runs, a new step is checked on its jaxpr: it raises if parameters or states would come to differ between
  workers. `step.check(params, state)` compares those that workers hold.

  Where the collective's total differs between workers (A2SGD), so do their parameters: the step keeps what each has
  moved in `state`, and `params` are those of the last synchronization. `step.synchronize(params, state)` averages them
  now: call it before you evaluate, and at the end.

  Args:
    loss_fn: (params, batch) -> f32[] loss of one worker's share of the batch, or (loss, aux) with `has_aux`.
    tx: a chain whose first transformation is a jaxsparse one over `axis`. Later ones get `value=`, the mean loss.
    mesh: the mesh, or the comm, that `js.init` was given; other axes than `axis` hold copies. Under MPI `batch` is this
      worker's share, elsewhere that of all workers; over a mesh of many processes each of them gives the whole batch,
      or an array that `jax.make_array_from_process_local_data` put together.
    axis: the axis, or tuple of axes, that the workers lie along.
    has_aux: whether `loss_fn` returns a pytree of arrays to reduce beside the loss.
    aux_reduce: how it is reduced over workers and micro-batches. "mean" averages floating-point leaves and sums others,
      which count; "sum", "max" and "min" do so to all leaves; "stack" gives the leaves of all workers along a leading
      axis, [P, …], or [P, accumulate, …].
    model_state: what becomes of the model state of the workers, running statistics of BatchNorm say. "mean" averages
      floating-point leaves over the workers in every step, and takes the largest of others, which count. With "worker"
      each has its own: all leaves, also those of the first, have a leading axis of P workers.
    accumulate: micro-batches that each worker's share is split into, one after the other, before one exchange of the
      mean of their gradients.
    donate: False keeps `params` and `state`, at the price of memory for both.

  Returns:
    A `TrainStep`.

  Raises:
    ValueError: if the mesh has no such axis, or an option is outside its choices; when called, for a batch that the
      workers cannot share out, a state of other sizes or without a jaxsparse transform, arrays that were donated, or a
      result that would differ between workers.

  Example:
    >>> import jax, jax.numpy as jnp, optax, jaxsparse as js
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("workers",))
    >>> tx = optax.chain(js.spardl_transform("workers", density=0.5), optax.sgd(0.25))
    >>> params = jnp.zeros(4)
    >>> state = js.init(tx, params, mesh, axis="workers")
    >>> step = js.make_train_step(lambda p, batch: jnp.mean((p[None] - batch) ** 2), tx, mesh, axis="workers")
    >>> for _ in range(100):
    ...   params, state, metrics = step(params, state, jnp.ones((len(jax.devices()), 4)))
    >>> float(jnp.abs(params - 1).max()) < 1e-3
    True
  """
  for option, value, choices in (
    ("aux_reduce", aux_reduce, get_args(AuxReduce)),
    ("model_state", model_state, get_args(ModelState)),
  ):
    if value not in choices:
      raise ValueError(f"make_train_step: {option}={value!r}, choose one of {', '.join(map(repr, choices))}")
  check_whole("make_train_step", 1, accumulate=accumulate)
  return TrainStep(Worker(loss_fn, tx, has_aux, aux_reduce, model_state, accumulate), mesh, axis, donate)


class TrainStep:
  """A training step of all workers; made by `make_train_step`.

  Attributes:
    workers: number of workers P.

  Example:
    >>> import jax, jax.numpy as jnp, jaxsparse as js
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("workers",))
    >>> tx, params = js.dense_transform("workers"), jnp.zeros(3)
    >>> step = js.make_train_step(lambda p, batch: jnp.sum(p) * jnp.mean(batch), tx, mesh)
    >>> lowered = step.lower(params, js.init(tx, params, mesh), jnp.zeros(step.workers))
    >>> "all_reduce" in lowered.as_text()
    True
  """

  def __init__(self, worker: Worker, mesh: Mesh | Comm, axis: AxisName, donate: bool):
    self._engine = engine_of(mesh, axis)
    self.workers = self._engine.workers
    self._axis, self._worker, self._donate = self._engine.axis, worker, donate
    self._programs: dict[Any, tuple[Any, Any]] = {}
    self._average: Any = None
    self._last: Any = None
    self._known: Any = None  # of the state that was returned last: it needs no check again

  def __call__(
    self, params: optax.Params, state: Any, batch: Any, *, rng: Any = None, model_state: Any = None, **extra: Any
  ) -> tuple[Any, Any, StepMetrics]:
    """One step; see `make_train_step`."""
    given = Given(rng, model_state, extra)
    program, specs = self._program(params, state, batch, given)
    count_step(self._engine.processes)
    first = _identity(state) is not self._known
    arguments = self._engine.place((params, state, batch, given), specs)
    if self._donate:
      arguments = apart(arguments, by_buffer=first)
    if self._engine.waits:
      jax.block_until_ready(self._last)
    params, state, metrics = program(*arguments)
    self._last, self._known = metrics.loss, _identity(state)
    return params, state, metrics

  def synchronize(self, params: optax.Params, state: Any) -> tuple[Any, Any]:
    """Averages the parameters of workers that have their own; returns everything as it is where they have not."""
    if not isinstance(state, PerWorker):
      return params, state
    checks.check_alive({"params": params, "state": state})
    if self._average is None:
      average, specs = (
        functools.partial(perworker.synchronized, self._engine.comm),
        (PartitionSpec(), PartitionSpec(self._axis)),
      )
      self._average = self._engine.jit(average, specs, specs)
    return self._average(params, state)

  def check(self, params: optax.Params, state: Any) -> None:
    """Compares what the workers hold of parameters and state, for tests; every process must call.

    Raises:
      ValueError: naming the first array that should be the same on every worker and is not, and the workers.
    """
    checks.check_alive({"params": params, "state": state})
    specs = (PartitionSpec(), specs_of(state, self._axis))
    replicas.check_replicas(self._engine, (params, state), specs, ("params", "state"))

  def lower(
    self, params: optax.Params, state: Any, batch: Any, *, rng: Any = None, model_state: Any = None, **extra: Any
  ) -> jax.stages.Lowered:
    """The step as `jax.stages.Lowered`, to look at its HLO; the arguments may be `jax.ShapeDtypeStruct`."""
    given = Given(rng, model_state, extra)
    program, _ = self._program(params, state, batch, given)
    return program.lower(params, state, batch, given)

  def _program(self, params: optax.Params, state: Any, batch: Any, given: Given) -> tuple[Any, Any]:
    """The jitted step for this structure of its arguments, and their specs."""
    self._check(params, state, batch, given)
    structure = jax.tree.structure((state, given))
    if structure not in self._programs:
      own_model_state = self._worker.model_state == "worker"
      shared = given._replace(model_state=None) if own_model_state else given
      replicas.check_processes(self._engine, shared._asdict(), "step: argument ")
      replicated, split, own = PartitionSpec(), PartitionSpec(self._axis), specs_of(state, self._axis)
      model_state = split if own_model_state else replicated
      in_specs = (replicated, own, split, Given(replicated, model_state, dict.fromkeys(given.extra, replicated)))
      same: Any = replicated
      out_specs = (replicated, own, StepMetrics(same, same, same, model_state))
      worker = functools.partial(self._worker.step, self._engine.comm)
      engine = self._engine
      checked = replication.checked(worker, in_specs, out_specs, engine.axis, _LIKELY_MISTAKES, engine.others)
      options = compiler_options(self._engine.platform) if states.in_groups(state) else None
      donated = (0, 1) if self._donate else ()
      program = self._engine.jit(checked, in_specs, out_specs, donate=donated, options=options)
      self._programs[structure] = program, in_specs
    return self._programs[structure]

  def _check(self, params: optax.Params, state: Any, batch: Any, given: Given) -> None:
    checks.check_alive({"params": params, "state": state, "batch": batch, "model_state": given.model_state})
    numbers = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, bool, int, float)
    for name, value in given.extra.items():
      if not all(isinstance(leaf, numbers) for leaf in jax.tree.leaves(value)):
        raise TypeError(f"step: extra argument {name}={value!r}: give arrays or numbers, which can be traced")
    check_batch(batch, self._engine, self._axis, self._worker.accumulate)
    if self._worker.model_state == "worker":
      self._check_rows(given.model_state)
    if self._known is not None and _identity(state) is self._known:
      return
    nodes = states.reduce_states(state)
    if not nodes:
      raise ValueError(checks.why_none(state))
    for node in nodes:
      checks.check_workers(node, self.workers, held=self._engine.held)
    checks.check_layout(state, self.workers)

  def _check_rows(self, model_state: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(model_state):
      if jnp.shape(leaf)[:1] != (self._engine.held,):
        raise ValueError(
          f"model_state{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}: with model_state='worker' each worker "
          f"has its own, along a leading axis of {self._engine.held}"
        )


_LIKELY_MISTAKES = {
  "params": "no jaxsparse transform covers its gradient (optax.masked leaves what it masks as it is, here the gradient "
  "of one worker), or what comes after the transform uses the data of one worker (as optax.apply_if_finite around it "
  "does). Give every leaf a transform, js.dense_transform for a plain average: optax.multi_transform({'sparse': "
  "js.spardl_transform(...), 'dense': js.dense_transform(...)}, labels); or freeze it with optax.set_to_zero()",
  "state": "it is made of what one worker has before the jaxsparse transform averages it. Put that transform first in "
  "its chain",
  "metrics": "it is made of the data of one worker",
}


def _identity(state: Any) -> Any:
  """An array that is of this state alone, and that a step passes on as a new one."""
  nodes = states.reduce_states(state)
  return nodes[0].layout.workers if nodes else None
