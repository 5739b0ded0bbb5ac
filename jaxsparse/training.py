"""The boilerplate that a user should not write: state over the workers, and a training step."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from jaxsparse import perworker
from jaxsparse import state as states
from jaxsparse._compat import AxisName
from jaxsparse.compiling import compiler_options
from jaxsparse.engine import Engine, check_batch, engine_of
from jaxsparse.launch.rank import count_step
from jaxsparse.perworker import PerWorker
from jaxsparse.types import Comm


class StepMetrics(NamedTuple):
  """What a training step reports; `js.metrics(state)` has what it communicated.

  Attributes:
    loss: f32[], mean of the loss over the workers.
    skipped: bool[], whether the step met NaN or Inf and was skipped by every worker.
    aux: what `loss_fn` returned beside the loss, mean over the workers; None without `has_aux`.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> js.StepMetrics(loss=jnp.float32(0.5), skipped=jnp.bool_(False)).aux is None
    True
  """

  loss: jax.Array
  skipped: jax.Array
  aux: Any = None


def init(
  tx: optax.GradientTransformation, params: optax.Params, mesh: Mesh | Comm, *, axis: AxisName = "workers"
) -> Any:
  """The optimizer state over the workers: residuals sharded over `axis`, everything else replicated.

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
    ValueError: if the mesh has no such axis, or the configuration does not fit the parameters.

  Example:
    >>> import jax, jax.numpy as jnp, jaxsparse as js
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("workers",))
    >>> state = js.init(js.spardl_transform("workers", k=3), jnp.zeros(8), mesh, axis="workers")
    >>> state.carried.residual.size == 8 * len(jax.devices())
    True
  """

  def start(params: optax.Params) -> Any:
    state = tx.init(params)
    return perworker.first(state, params) if states.differs(state) else state

  return started(engine_of(mesh, axis), start, params, axis)[0]


def started(engine: Engine, start: Callable, params: optax.Params, axis: AxisName) -> tuple[Any, Any]:
  """The state that `start(params)` makes at every worker of an engine, and its specs."""
  replicated = PartitionSpec()
  arguments = engine.place((params,), (replicated,))
  spec = states.specs(jax.eval_shape(engine.map(start, (replicated,), replicated), *arguments), axis)
  return engine.jit(start, (replicated,), spec)(*arguments), spec


def make_train_step(
  loss_fn: Callable[..., Any],
  tx: optax.GradientTransformation,
  mesh: Mesh | Comm,
  *,
  axis: AxisName = "workers",
  has_aux: bool = False,
) -> "TrainStep":
  """A jitted data-parallel training step `params, state, metrics = step(params, state, batch)`.

  Each worker takes its share of the batch along the leading axis, computes the gradient of its own mean loss, and `tx`
  averages over the workers. The step donates `params` and `state`: use what it returns and not what it was given.

  Where the collective's total differs between workers (A2SGD), so do their parameters: the step keeps what each has
  moved in `state`, and `params` are those of the last synchronization. `step.synchronize(params, state)` averages them
  now: call it before you evaluate, and at the end.

  Args:
    loss_fn: (params, batch) -> f32[] loss of one worker's share of the batch, or (loss, aux) with `has_aux`.
    tx: a chain whose first transformation is a jaxsparse one over `axis`.
    mesh: the mesh, or the comm, that `js.init` was given; other axes than `axis` hold copies. Under MPI `batch` is this
      worker's share, elsewhere that of all workers; over a mesh of many processes each of them gives the whole batch,
      or an array that `jax.make_array_from_process_local_data` put together.
    axis: the axis, or tuple of axes, that the workers lie along.
    has_aux: whether `loss_fn` returns a pytree of arrays to average beside the loss.

  Returns:
    A `TrainStep`.

  Raises:
    ValueError: if the mesh has no such axis; when called, for a batch that P does not divide, a state of other sizes,
      or one without a jaxsparse transform.

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
  return TrainStep(loss_fn, tx, mesh, axis, has_aux)


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

  def __init__(
    self,
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh | Comm,
    axis: AxisName,
    has_aux: bool,
  ):
    self._engine = engine_of(mesh, axis)
    self.workers = self._engine.workers
    self._axis = axis
    self._step = functools.partial(_worker_step, loss_fn, tx, self._engine.comm, has_aux)
    self._programs: dict[Any, tuple[Any, Any]] = {}
    self._average: Any = None
    self._last: Any = None

  def __call__(self, params: optax.Params, state: Any, batch: Any) -> tuple[Any, Any, StepMetrics]:
    """One step; see `make_train_step`."""
    program, specs = self._program(state, batch)
    count_step(self._engine.processes)
    arguments = self._engine.place((params, state, batch), specs)
    if self._engine.waits:
      jax.block_until_ready(self._last)
    params, state, metrics = program(*arguments)
    self._last = metrics.loss
    return params, state, metrics

  def synchronize(self, params: optax.Params, state: Any) -> tuple[Any, Any]:
    """Averages the parameters of workers that have their own; returns everything as it is where they have not."""
    if not isinstance(state, PerWorker):
      return params, state
    if self._average is None:
      average, specs = (
        functools.partial(perworker.synchronized, self._engine.comm),
        (PartitionSpec(), PartitionSpec(self._axis)),
      )
      self._average = self._engine.jit(average, specs, specs)
    return self._average(params, state)

  def lower(self, params: optax.Params, state: Any, batch: Any) -> jax.stages.Lowered:
    """The step as `jax.stages.Lowered`, to look at its HLO; the arguments may be `jax.ShapeDtypeStruct`."""
    program, _ = self._program(state, batch)
    return program.lower(params, state, batch)

  def _program(self, state: Any, batch: Any) -> tuple[Any, Any]:
    """The jitted step for this structure of the state, and the specs of its arguments."""
    self._check(state, batch)
    structure = jax.tree.structure(state)
    if structure not in self._programs:
      replicated, split, own = PartitionSpec(), PartitionSpec(self._axis), states.specs(state, self._axis)
      in_specs, out_specs = (replicated, own, split), (replicated, own, replicated)
      options = compiler_options(self._engine.platform) if states.in_groups(state) else None
      program = self._engine.jit(self._step, in_specs, out_specs, donate=(0, 1), options=options)
      self._programs[structure] = program, in_specs
    return self._programs[structure]

  def _check(self, state: Any, batch: Any) -> None:
    check_batch(batch, self._engine, self._axis)
    nodes = states.reduce_states(state)
    if not nodes:
      raise ValueError(
        "the optimizer state holds no jaxsparse transform, so nothing would average the gradients of the workers: "
        "start the chain with one, js.dense_transform for the plain average"
      )
    for node in nodes:
      states.check_workers(node, self.workers, held=self._engine.held)


def _worker_step(
  loss_fn: Callable[..., Any],
  tx: optax.GradientTransformation,
  comm: Comm,
  has_aux: bool,
  params: optax.Params,
  state: Any,
  batch: Any,
) -> tuple[optax.Params, Any, StepMetrics]:
  """One worker's step, mapped over all of them. The mean of loss and aux is its only message beside those of `tx`."""
  inner, own = perworker.here(state, params) if isinstance(state, PerWorker) else (state, params)
  value, grads = jax.value_and_grad(loss_fn, has_aux=has_aux)(own, batch)
  loss, aux = value if has_aux else (value, None)
  updates, inner = tx.update(grads, inner, own)
  if isinstance(state, PerWorker):
    state = perworker.moved_on(state, updates, inner)
    average = functools.partial(perworker.synchronized, comm)
    params, state = jax.lax.cond(states.due(inner), average, lambda *same: same, params, state)
  else:
    params, state = optax.apply_updates(params, updates), inner
  skipped = [node.counters.skipped[0] for node in states.reduce_states(inner)]
  loss, aux = jax.tree.map(lambda x: comm.all_reduce(x) / comm.size, (loss, aux))
  return params, state, StepMetrics(loss, jnp.any(jnp.array(skipped)), aux)
