"""`js.init` and `js.make_train_step`: the optimizer state of all workers, and a jitted data-parallel training step."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from optax import OptState

from jaxsparse._compat import AxisName
from jaxsparse._compat.compiling import compiler_options
from jaxsparse._compat.one_at_a_time import dispatch
from jaxsparse.arrays.flatten import check_are_arrays, without_arrays
from jaxsparse.comm import replication
from jaxsparse.comm.mpi import MpiComm
from jaxsparse.launch.rank import count_step
from jaxsparse.train import replicas, starting
from jaxsparse.train.donation import without_aliases
from jaxsparse.train.engine import check_batch, engine_of, shape_of
from jaxsparse.train.skipped import SkipWatch
from jaxsparse.train.worker import (
  TO_LOSS,
  AuxReduce,
  ModelState,
  StepMetrics,
  WorkerStep,
)
from jaxsparse.transform import checks
from jaxsparse.transform import state as states
from jaxsparse.transform.atomic import commit_early
from jaxsparse.transform.specs import placed
from jaxsparse.transform.wrapped import PLACEHOLDER, optimized
from jaxsparse.types import ArrayTree, Comm, SpecTree, check_whole


def init(
  tx: optax.GradientTransformation,
  params: optax.Params,
  mesh: Mesh | Comm,
  *,
  axis: AxisName = "workers",
) -> ArrayTree:
  """The optimizer state of all workers: residuals sharded over `axis`, everything else the same on every worker.

  Every process of the mesh must call `init` with the same parameters and the same `tx`.
  The axes of a mesh other than `axis` lie inside a worker: parameters keep the
  shardings along them, and moments get those of the parameters. Each of the S devices
  of a worker then has a residual of n/S entries: of its shards, and of its piece of
  each leaf that is replicated inside.

  Args:
    tx: a chain whose first transformation is a jaxsparse one over `axis`.
    params: the parameters, a pytree of floating-point arrays.
    mesh: a mesh, whose devices may belong to many processes; or a comm that knows its
      own workers, `js.MpiComm()` or `js.SimComm(axis, members=P)`.
    axis: the axis of the mesh, or tuple of axes, with one worker at each index.

  Returns:
    The state of `tx`. The residual is one f32[P · n] of all workers, or this worker's
    f32[n] under MPI. Give the state to the step of `js.make_train_step`, or shard it by
    `js.specs(state, axis)` in your own shard_map.

  Raises:
    ValueError: if the mesh has no such axis, the transform is over another axis, its
      options do not fit the parameters, these are sharded over `axis`, they or the
      programs of `tx` differ between processes, or a transformation with arrays in its
      state precedes the transform.

  Warns: UserWarning: if no transform covers a leaf, whose update would be made of the
    gradient of one worker; if an optimizer keeps averages other than momentum in 16
    bits, as `optax.adam` does for parameters of 16 bits.

  Example:
    >>> import jax, jax.numpy as jnp, jaxsparse as js
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("workers",))
    >>> state = js.init(js.spardl_transform("workers", k=3), jnp.zeros(8), mesh, axis="workers")
    >>> state.carried.residual[0].size == 8 * len(jax.devices())
    True
  """
  engine = engine_of(mesh, axis)
  # optax.tree_map_params calls `init` with a placeholder to find copies of parameters.
  if isinstance(params, PLACEHOLDER):
    return tx.init(params)
  check_are_arrays(params, "params")
  checks.check_alive({"params": params})
  # Without Flax's scales of fp8, which have no optimizer state.
  params = optimized(params)
  # Under a trace there are no values to compare.
  if checks.is_traced(params):
    return starting.start_workers(engine, tx.init, params)[0]
  if engine.processes > 1:
    replicas.check_same(engine, "params", replicas.checksums("params", params))
  state, specs = starting.place_state(engine, tx.init, params)
  starting.check_update(engine, tx, params, state, specs)
  checks.warn_of_narrow(state)
  return state


def make_train_step(
  loss_fn: Callable[..., ArrayTree],
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

  The leading axis of the batch is split evenly among the workers. Each worker computes
  the gradient of the mean loss of its part, and `tx` averages the gradients over the
  workers. The step donates `params` and `state`: XLA overwrites them, so use the
  returned ones from then on.

  The step passes keyword arguments on to `loss_fn` and `tx`:

      step(params, state, batch, rng=key)            loss_fn(params, batch, rng=...): each worker gets a different key,
                                                     folded from `key`; give a new `key` in every step
      step(params, state, batch, model_state=stats)  loss_fn(params, batch, model_state=...) -> (loss, model_state), or
                                                     (loss, model_state, aux); `metrics.model_state` is the next one
      step(params, state, batch, shared=teacher)     loss_fn(params, batch, shared=...): untrained arrays of any dtype,
                                                     the same for all workers: a teacher, a reference, a target network,
                                                     quantized weights below adapters
      step(params, state, batch, **extra)            tx.update(..., value=loss, **extra), optax's extra arguments

  Before a new step runs, its jaxpr is checked: the step raises if replicated parameters
  or states would differ between workers afterwards, or if processes have other jaxprs,
  options, shapes or versions, naming the first difference. Ranks of MPI compare only
  their first step. `step.check(params, state)` compares the present values on all
  workers.

  With `js.local_steps` workers have parameters of their own between exchanges. Then
  `params` are those of the last exchange, and `state` has what each worker has moved
  since. `step.synchronize(params, state)` exchanges it at once.

  Args:
    loss_fn: (params, batch) -> f32[], the mean loss of one worker's part of the batch;
      or (loss, aux) with `has_aux`. With `optax.LookaheadParams` it gets the fast ones.
    tx: a chain whose first transformation is a jaxsparse one over `axis`. Later ones
      get `value=`, the mean loss, if they take it.
    mesh: the mesh, or the comm, that `js.init` was given. Along axes other than `axis`,
      inside a worker, arrays keep the shardings that they come with, and the compiler
      partitions `loss_fn` as under `jax.jit`. `batch` is the batch of all workers, but
      that of this worker under MPI. On a mesh of many processes each process gives the
      whole batch, or a global array made by `jax.make_array_from_process_local_data`.
    axis: the axis of the mesh, or tuple of axes, with one worker at each index.
    has_aux: whether `loss_fn` also returns aux, a pytree of arrays to reduce, of
      numbers or booleans.
    aux_reduce: how aux is reduced over workers and micro-batches. "mean" averages
      floating-point and complex leaves and sums integer and boolean ones, which are
      counts; "sum", "max" and "min" treat all leaves alike; "stack" returns the leaves
      of all workers along a leading axis, [P, …], or [P, accumulate, …] with
      micro-batches.
    model_state: how the model states of the workers (for example running statistics of
      BatchNorm) are combined. "mean" averages floating-point and complex leaves over
      the workers in every step, and takes the maximum of integer ones, which are
      counts. "worker" leaves each worker its own: every leaf, also in the first step,
      has a leading axis of P workers.
    accumulate: number of micro-batches into which each worker's part is split. They are
      computed one after the other, and the mean of their gradients is communicated
      once.
    donate: False does not overwrite `params` and `state`, and needs memory for a second
      copy of both.

  Returns:
    A `TrainStep`. It warns once where eight steps in a row were skipped.

  Raises:
    ValueError: if the mesh has no such axis, or an option is outside its choices. When
      called: if the batch does not divide among the workers, the state was made for
      other parameters or has no jaxsparse transform, arrays were donated to an earlier
      step, a replicated result would differ between workers, or the programs of
      processes differ.
    RuntimeError: when called: if one process gives arguments of other shapes than
      before, and others do not.

  Example:
    >>> import jax, jax.numpy as jnp, optax, jaxsparse as js
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("workers",))
    >>> tx = optax.chain(js.make_transform("topka", "workers", density=0.5), optax.sgd(0.25))
    >>> params = jnp.zeros(4)
    >>> state = js.init(tx, params, mesh, axis="workers")
    >>> step = js.make_train_step(lambda p, batch: jnp.mean((p[None] - batch) ** 2), tx, mesh, axis="workers")
    >>> for _ in range(100):
    ...   params, state, metrics = step(params, state, jnp.ones((len(jax.devices()), 4)))
    >>> float(jnp.abs(params - 1).max()) < 1e-3
    True
  """
  for option, value, kind in (
    ("aux_reduce", aux_reduce, AuxReduce),
    ("model_state", model_state, ModelState),
  ):
    if value not in get_args(kind):
      raise ValueError(
        f"make_train_step: {option}={value!r}, choose one of {', '.join(map(repr, get_args(kind)))}"
      )
  check_whole("make_train_step", 1, accumulate=accumulate)
  return TrainStep(
    WorkerStep(loss_fn, tx, has_aux, aux_reduce, model_state, accumulate),
    mesh,
    axis,
    donate,
  )


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
    self, worker: WorkerStep, mesh: Mesh | Comm, axis: AxisName, donate: bool
  ):
    self._engine = engine_of(mesh, axis)
    self.workers = self._engine.workers
    self._worker = worker
    self._donate = donate
    # Cache of `_once`: the specs of steps by the structure of their arguments, and the
    # jitted programs of steps and exchanges.
    self._made: dict[Hashable, Any] = {}
    # (program, shapes of the batch and named arguments) that were compared between all
    # processes and are alike.
    self._alike: set[Hashable] = set()
    self._skips = SkipWatch("make_train_step")
    # `_identity` of the state that the last call returned, by which that state is
    # recognized: it needs no check. None before the first call.
    self._known: jax.Array | None = None
    # `id`s of the parameters and the model state that it returned
    self._known_arrays: list[int] = []

  def __call__(
    self,
    params: optax.Params,
    state: OptState,
    batch: ArrayTree,
    **named: ArrayTree,
  ) -> tuple[optax.Params, OptState, StepMetrics]:
    """One step; see `make_train_step` for `rng=`, `model_state=`, `shared=` and others."""
    # A learning rate that the user sets in local optimizers gets a row for each worker.
    arguments = _arguments(params, states.with_rows(state), batch, named)
    program, specs = self._program(*arguments)
    # The launcher counts begun steps, to see whether one can still complete.
    count_step(self._engine.processes)
    # Before the dispatch: processes with other programs would wait for each other.
    self._compare_processes(program, arguments, specs)
    arguments = self._engine.place(arguments, specs)
    if self._donate:
      # Arrays that this step returned last share no buffers; named ones of the user
      # may, also with those.
      ids = _ids((params, named.get("model_state")))
      is_known = _identity(state) is self._known and ids == self._known_arrays
      is_named = bool(named.keys() - {"rng", "model_state"})
      arguments = without_aliases(arguments, not is_known or is_named)
    # On several CPU devices, where programs run one at a time, the next program waits
    # for the loss of this one, and this call returns at once.
    params, state, metrics = dispatch(
      program, *arguments, follow=lambda results: results[2].loss
    )
    self._known = _identity(state)
    self._known_arrays = _ids((params, metrics.model_state))
    self._skips.add(metrics.skipped, metrics.loss)
    # Flags of steps that have ended are read; none is waited for. `find` computes the
    # gradients once more, at the results of this step: skipped steps changed nothing.
    self._skips.look(
      find=lambda: self._find_gradients(_arguments(params, state, batch, named)),
      batch=batch,
      params=params,
      state=state,
    )
    return params, state, metrics

  def _find_gradients(self, arguments: tuple[ArrayTree, ...]) -> list[str] | None:
    """Names of the gradients, and of the model state, that have NaN or Inf, each with the first such worker.

    None with several processes, which would all have to call. `arguments` are those of
    a step, as `_arguments` gives them.
    """
    engine = self._engine
    # Processes come here at different times, so no message may be sent.
    if engine.processes > 1:
      return None
    _, specs = self._program(*arguments)
    # None unless a worker has several devices: then arguments keep their shardings.
    kept = engine.shardings(arguments, specs)
    function = functools.partial(self._worker.finite_gradients, engine.comm)
    program = engine.jit(function, specs, engine.split, shardings=kept and (kept, None))
    # bool[P] of each name.
    flags = dispatch(program, *engine.place(arguments, specs))
    return [
      f"{name} of worker {np.argmin(finite)}"
      for name, finite in jax.tree.map(np.asarray, flags).items()
      if not finite.all()
    ]

  def synchronize(
    self, params: optax.Params, state: OptState, **extra: ArrayTree
  ) -> tuple[ArrayTree, ArrayTree]:
    """Exchanges what workers have moved since the last exchange; without `js.local_steps` returns both unchanged.

    Leaves without local steps stay as they are. Extra arguments go to `tx`, as those of
    a step, `value` too.
    """
    # Without local steps nothing has moved.
    if not states.local_states(state):
      return params, state
    starting.check_state(state, params, self._engine)
    state = states.with_rows(state)

    # Parameters and state go in and come out; the extra arguments only go in.
    specs = (self._engine.same, placed(state, self._engine.axis))
    in_specs = (*specs, dict.fromkeys(extra, self._engine.same))
    arguments = params, state, extra
    # None unless a worker has several devices: then arrays keep their shardings.
    kept = self._engine.shardings(arguments, in_specs)

    def make_program() -> Callable[..., tuple[ArrayTree, ArrayTree]]:
      return self._engine.jit(
        self._worker.synchronize, in_specs, specs, shardings=kept and (kept, kept[:2])
      )

    try:
      key = "exchange", jax.tree.structure(arguments), tuple(jax.tree.leaves(kept))
      return dispatch(self._once(key, make_program), *arguments)
    except TypeError as error:
      if "keyword-only argument" not in str(error):
        raise
      raise TypeError(
        f"step.synchronize: {error}, which a transformation of tx needs: pass it by its name"
      ) from error

  def check(self, params: optax.Params, state: OptState) -> None:
    """Compares hashes of replicated parameters and state on all workers, for tests; every process must call.

    Parts of the state that each worker has of its own, as residuals, are not compared.

    Raises:
      ValueError: naming the first array that differs and the workers.
    """
    checks.check_alive({"params": params, "state": state})
    checks.check_params(states.reduce_states(state), params)
    state = states.with_rows(state)
    replicas.check_replicas(
      self._engine,
      (params, state),
      (self._engine.same, placed(state, self._engine.axis)),
    )

  def lower(
    self,
    params: optax.Params,
    state: OptState,
    batch: ArrayTree,
    **named: ArrayTree,
  ) -> jax.stages.Lowered:
    """The lowered step, to inspect its HLO or to compile ahead; the arguments may be `jax.ShapeDtypeStruct`.

    `compiled = step.lower(params, state, batch).compile()` is called as
    `compiled(params, state, batch)`, with arrays that have the step's shardings.
    Keyword arguments, where there are some, are a dict in the fourth place:
    `compiled(params, state, batch, {"rng": key})`.
    """
    arguments = _arguments(params, states.with_rows(state), batch, named)
    program, specs = self._program(*arguments)
    return program.lower(*self._engine.place(jax.tree.map(shape_of, arguments), specs))

  def traced(
    self,
    params: optax.Params,
    state: OptState,
    batch: ArrayTree,
    **named: ArrayTree,
  ) -> tuple[optax.Params, OptState, StepMetrics]:
    """One step within a program that is traced, as in `jax.lax.scan` over steps: processes are not compared."""
    arguments = _arguments(params, states.with_rows(state), batch, named)
    # Shapes and dtypes, which numbers of Python have not, suffice to choose the program.
    program, _ = self._program(*without_arrays(arguments))
    return program(*arguments)

  def _program(self, *arguments: ArrayTree) -> tuple[Any, SpecTree]:
    """The jitted step for `arguments`, (params, state, batch, and named ones if any), and the specs of these."""
    self._check(*arguments)
    # The structure of (state, named arguments), from which specs follow. For other
    # parameters and batches `jit` traces the program again by itself.
    structure = jax.tree.structure(arguments[1:2] + arguments[3:])
    in_specs, out_specs = self._once(
      structure, lambda: self._specs(arguments[1], _by_name(arguments))
    )
    shardings = self._engine.shardings(arguments, in_specs)
    # Other shardings inside a worker need another jitted program.
    key = structure, tuple(jax.tree.leaves(shardings))
    return self._once(
      key, lambda: self._jitted(arguments[1], in_specs, out_specs, shardings)
    ), in_specs

  def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
    """The result of the first `make()` with this key."""
    if key not in self._made:
      self._made[key] = make()
    return self._made[key]

  def _specs(
    self, state: OptState, named: dict[str, ArrayTree]
  ) -> tuple[SpecTree, SpecTree]:
    """The specs of the arguments and of the results of a step; `named` are its keyword arguments."""
    same: SpecTree = self._engine.same
    specs = placed(state, self._engine.axis)
    model_state = self._engine.split if self._worker.model_state == "worker" else same
    named = {name: model_state if name == "model_state" else same for name in named}
    # In the order of the fields: loss, skipped, aux, model_state, words_beside.
    metrics = StepMetrics(same, same, same, model_state, same)
    return _arguments(same, specs, self._engine.split, named), (same, specs, metrics)

  def _jitted(
    self,
    state: OptState,
    in_specs: SpecTree,
    out_specs: SpecTree,
    shardings: SpecTree,
  ) -> Callable:
    """The jitted step.

    Args:
      state: of all workers.
      in_specs: of the arguments, along the workers.
      out_specs: of the results (params, state, metrics).
      shardings: of the arguments, as `_arguments` orders them, where a worker has
        several devices; else None.
    """
    engine = self._engine
    step = functools.partial(self._worker.step, engine.comm)
    instead = functools.partial(self._worker.step_instead, engine.comm)
    # Raises when traced if a replicated result would differ between workers, with the
    # name of the result and its likely mistake. `instead` is traced where `tx` takes no
    # `value=`; `commit_early` lets XLA reuse the memory of the old state.
    checked = replication.checked(
      step,
      in_specs,
      out_specs,
      engine.axis,
      starting.LIKELY_MISTAKES,
      engine.others,
      commit_early,
      instead,
    )
    unspecified: SpecTree = None  # The compiler chooses the sharding.
    # Results that replace arguments, as the model state, keep the arguments' shardings.
    model_state = shardings and _by_name(shardings).get("model_state")
    metrics = StepMetrics(
      unspecified, unspecified, unspecified, model_state, unspecified
    )
    kept = shardings and (shardings, (*shardings[:2], metrics))
    # Only with several groups of leaves: options with which the messages of one group
    # may run while the gradients of the next are computed.
    has_groups = any(
      len(reduce_state.groups) > 1 for reduce_state in states.reduce_states(state)
    )
    options = compiler_options(engine.platform) if has_groups else None
    return engine.jit(
      checked, in_specs, out_specs, (0, 1) if self._donate else (), options, kept
    )

  def _compare_processes(
    self, program: Any, arguments: tuple[ArrayTree, ...], specs: SpecTree
  ) -> None:
    """Compares a program and its arguments between all processes, where the program or a shape is new.

    Compared by value: keyword arguments, which every process must give alike, but for a
    model state of each worker. By shape: the batch and the state, since a process may
    have rows and residuals of its own; and the parameters, whose values `js.init`
    compares.

    Args:
      program: the jitted step, the same object for arguments of the same structure.
      arguments: as `_arguments` gives them.
      specs: of the arguments.

    Raises:
      ValueError: on every process, naming the first difference.
      RuntimeError: if another process does not come to the comparison in time.
    """
    engine = self._engine
    # Ranks of MPI compare once: in a later step only some of them may come here, and
    # the others would take the messages of the comparison for those of the step.
    if engine.processes == 1 or (self._alike and isinstance(engine.comm, MpiComm)):
      return
    # Parameters and state keep their shapes, so shapes of the other arguments suffice.
    known = (
      program,
      *(
        (jnp.shape(leaf), jnp.result_type(leaf))
        for leaf in jax.tree.leaves(arguments[2:])
      ),
    )
    if known in self._alike:
      return
    options = {
      name: value
      # `loss_fn` and `tx`, a tuple of functions, have no text that is equal in all
      # processes: the jaxpr shows what they do.
      for name, value in self._worker._asdict().items()
      if not callable(value) and name != "tx"
    }
    head = [f"make_train_step has {options | {'donate': self._donate}}"]
    shardings = engine.shardings(arguments, specs)
    head += replicas.described(arguments, shardings)
    # The first steps of processes may begin far apart, so no limit is set for them. In
    # a later step some may see new shapes, and the others, with the old ones, never
    # come here: the wait is limited, and ends with an error.
    if self._alike:
      # Parameters and state cannot have new shapes: None keeps their places, since
      # errors name an argument by its place.
      kept = shardings and (None, None, *shardings[2:])
      new = replicas.described((None, None, *arguments[2:]), kept)
      # Parameters and state lie on all processes of the mesh: their shardings tell for
      # which processes to wait. A batch may be an array of one process.
      replicas.wait_for_all(arguments[:2], "\n".join(new))
    # A worker's own model state may differ.
    own_name = "model_state" if self._worker.model_state == "worker" else None
    alike = {name: x for name, x in _by_name(arguments).items() if name != own_name}
    head += replicas.checksums("argument ", alike)
    replicas.check_same(engine, "the training step", head)
    replicas.check_traced(
      engine, "the training step", program, engine.place(arguments, specs)
    )
    self._alike.add(known)

  def _check(
    self,
    params: optax.Params,
    state: OptState,
    batch: ArrayTree,
    named: ArrayTree = None,
  ) -> None:
    """Raises ValueError or TypeError for arguments of a step that do not fit; `named` are its keyword arguments."""
    named = named or {}
    checks.check_alive({"params": params, "state": state, "batch": batch} | named)
    extra = {name: value for name, value in named.items() if name not in TO_LOSS}
    for path, leaf in jax.tree_util.tree_leaves_with_path(extra):
      if not isinstance(
        leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic | int | float
      ):
        raise TypeError(
          f"step: extra{jax.tree_util.keystr(path)}={leaf!r}: give arrays or numbers, and no line search"
        )
    check_batch(batch, self._engine, self._worker.accumulate)
    # None, a tree without leaves, unless each worker has its own model state.
    rows = named.get("model_state") if self._worker.model_state == "worker" else None
    for path, leaf in jax.tree_util.tree_leaves_with_path(rows):
      if jnp.shape(leaf)[:1] != (self._engine.held,):
        raise ValueError(
          f"model_state{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}: with model_state='worker' give it a "
          f"leading axis of {self._engine.held}, one entry for each worker. Those of other workers, after js.resize: "
          f"np.resize(x, ({self._engine.held}, *x.shape[1:]))"
        )
    # The state that this step returned last needs no check.
    if self._known is None or _identity(state) is not self._known:
      starting.check_state(state, params, self._engine, shapes=True)


def _arguments(
  params: optax.Params,
  state: OptState,
  batch: ArrayTree,
  named: dict[str, ArrayTree],
) -> tuple[ArrayTree, ...]:
  """The arguments of the program: (params, state, batch, named); without keyword arguments (params, state, batch)."""
  # None for `rng`, `model_state` or `shared` counts as not given; for an extra argument
  # of `tx` None is a value.
  named = {
    name: value
    for name, value in named.items()
    if value is not None or name not in TO_LOSS
  }
  return (params, state, batch, named) if named else (params, state, batch)


def _by_name(arguments: ArrayTree) -> dict[str, ArrayTree]:
  """The keyword arguments in what `_arguments` returned; {} without any."""
  return arguments[3] if len(arguments) > 3 else {}


def _ids(params: optax.Params) -> list[int]:
  return list(map(id, jax.tree.leaves(params)))


def _identity(state: OptState) -> jax.Array | None:
  """An array that identifies a state: a step returns its state with a new one."""
  reduce_states = states.reduce_states(state)
  # Any array serves that a step makes anew and does not donate.
  return reduce_states[0].layout.workers if reduce_states else None
