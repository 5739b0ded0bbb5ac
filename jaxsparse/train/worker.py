"""The training step of one worker: loss, gradients, update, metrics. `TrainStep` maps it over the workers."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import OptState

from jaxsparse import _compat
from jaxsparse.arrays import flatten
from jaxsparse.comm import all_gather, all_reduce_cost, axes_of, in_rank_order
from jaxsparse.comm.replication import mark_total
from jaxsparse.transform import state as states
from jaxsparse.transform.atomic import atomic
from jaxsparse.transform.residuals import moved_leaves, own_params
from jaxsparse.transform.wrapped import (
  map_seen,
  optimized,
  overwritten,
  synchronizing,
  trained,
  with_optimized,
)
from jaxsparse.types import ArrayTree, Comm, saturated

AuxReduce = Literal["mean", "sum", "max", "min", "stack"]
ModelState = Literal["mean", "worker"]
# Keyword arguments of a step that `loss_fn` gets, and `tx` does not.
TO_LOSS = (
  "rng",
  "model_state",
  "shared",
)


class StepMetrics(NamedTuple):
  """The metrics of a training step; `js.metrics(state)` reads those of its communication.

  Attributes:
    loss: f32[], mean of the loss over the workers.
    skipped: bool[], whether every worker skipped the step, because of NaN or Inf at one
      of them: then nothing has changed but counters.
    aux: the auxiliary output of `loss_fn`, reduced over the workers; None without
      `has_aux`.
    model_state: the model state for the next step; None if the step got none.
    words_beside: u32[], 4-byte words that a worker sent beside those of the transform:
      for aux and the model state.

  Example:
    >>> import jax.numpy as jnp
    >>> StepMetrics(loss=jnp.float32(0.5), skipped=jnp.bool_(False)).aux is None
    True
  """

  loss: jax.Array
  skipped: jax.Array
  aux: ArrayTree = None
  model_state: ArrayTree = None
  words_beside: jax.Array | int = 0


class WorkerStep(NamedTuple):
  """The step of one worker; the fields are the arguments of `make_train_step`.

  In its methods `params` are those that the caller holds, the same on every worker;
  with `js.local_steps` a worker's own are `own_params(params, state)`. `batch` is this
  worker's part, and `named` are the keyword arguments of the step by name.
  """

  loss_fn: Callable[..., ArrayTree]
  tx: optax.GradientTransformation
  has_aux: bool
  aux_reduce: AuxReduce
  model_state: ModelState
  accumulate: int

  def step(
    self,
    comm: Comm,
    params: optax.Params,
    state: OptState,
    batch: ArrayTree,
    named: ArrayTree = None,
    gives_value: bool = True,
  ) -> tuple[optax.Params, OptState, StepMetrics]:
    """One step: the next parameters, state, and metrics. Besides `tx`, only loss, aux and model state are reduced.

    Args:
      comm: the workers.
      params: the parameters.
      state: the optax state of one worker.
      batch: this worker's part of the batch.
      named: the keyword arguments of the step, by name.
      gives_value: whether `tx` gets the mean loss as `value=`; False for a `tx` that
        does not take it.
    """
    named = named or {}
    # The model state before the step, which a skipped step keeps; None without one.
    before = named.get("model_state")
    # TO_LOSS is (rng, model_state, shared): all else goes to `tx`.
    extra = {name: value for name, value in named.items() if name not in TO_LOSS}
    # `finite`: whether this worker's model state stays finite.
    (loss, grads, model_state, aux), finite = self._own_gradients(
      comm, params, state, batch, named
    )
    # The parameters at which the gradient was taken. They hold Flax's present scales of
    # fp8, and `grads` the next ones.
    taken_at = trained(own_params(params, state))
    grads, scales = combine_scales(comm, taken_at, grads)
    # NaN in a model state would stay for good: mark the gradient by NaN, so that all
    # workers skip the step.
    if before is not None:
      grads = _nan_unless(finite, grads)
    loss = mean_over(comm, loss)
    # Schedules such as optax.contrib.reduce_on_plateau take the loss as `value`.
    extra = {"value": loss} | extra if gives_value else extra
    # `optimized` leaves out Flax's scales of fp8, which no optimizer updates.
    updates, state = atomic(self.tx).update(grads, state, optimized(params), **extra)
    skipped = states.is_skipped(state)
    # A skipped step keeps the scales, too.
    scales = optax.tree.where(skipped, overwritten(params), scales)
    params = with_optimized(
      params, optax.apply_updates(optimized(params), updates), scales
    )
    model_state = _next_model_state(self, comm, model_state)
    # Running statistics never recover from NaN, which optax.zero_nans may have hidden.
    keep = skipped | ~flatten.stays_finite(before, model_state)
    model_state = optax.tree.where(keep, before, model_state)
    aux = _reduced(aux, self.aux_reduce, functools.partial(_over_workers, comm))
    return (
      params,
      state,
      StepMetrics(
        loss,
        skipped,
        aux,
        model_state,
        _words_beside(self, comm.size, aux, model_state, scales),
      ),
    )

  def finite_gradients(
    self,
    comm: Comm,
    params: optax.Params,
    state: OptState,
    batch: ArrayTree,
    named: ArrayTree = None,
  ) -> dict[str, jax.Array]:
    """Whether each gradient of one worker, and its model state, is finite: bool[1] by name, one entry a worker."""
    (_, grads, *_), finite = self._own_gradients(
      comm, params, state, batch, named or {}
    )
    flags = {
      f"gradients{name}": flatten.all_finite(grad)
      for name, grad in flatten.leaves_by_name(grads).items()
    }
    flags["model_state"] = jnp.asarray(finite)
    return states.add_row(flags)

  def _own_gradients(
    self,
    comm: Comm,
    params: optax.Params,
    state: OptState,
    batch: ArrayTree,
    named: dict[str, ArrayTree],
  ) -> tuple[tuple[ArrayTree, ...], jax.Array | bool]:
    """((loss, gradients, model state, aux) at the parameters of one worker, whether its model state stays finite)."""
    # TO_LOSS is (rng, model_state, shared); each is None where the step got none.
    rng, before, shared = (named.get(name) for name in TO_LOSS)
    # With "worker" each leaf has a leading axis of workers, [1, …] here.
    model_state = states.first_row(before) if self.model_state == "worker" else before
    # Each worker draws its own noise.
    key = None if rng is None else jax.random.fold_in(rng, comm.rank)
    results = _gradients(
      self, trained(own_params(params, state)), batch, key, model_state, shared
    )
    # `results[2]` is the model state after the gradient.
    return results, model_state is None or flatten.stays_finite(model_state, results[2])

  def step_instead(self, comm: Comm, error: TypeError) -> Callable:
    """The step that gives `tx` no `value=`, where `error` says that a transformation does not take that argument.

    Whether all transformations of a chain take `value=` shows only when it is traced:
    `optax.contrib.sam`, for example, takes extra arguments and rejects `value`.

    Args:
      comm: the workers.
      error: raised by the trace of `step`.

    Raises:
      TypeError: for every other error, `error` itself or with what to change.
    """
    if "unexpected keyword argument 'value'" in str(error):
      return functools.partial(self.step, comm, gives_value=False)
    if "keyword-only argument" in str(error) and "value_fn" in str(error):
      raise TypeError(
        f"step: {error}: a line search computes the loss of all workers at several parameters within an update, and a "
        "step has one gradient: choose a rate in its place, optax.lbfgs(rate, linesearch=None)"
      ) from error
    raise error

  def synchronize(
    self, params: optax.Params, state: OptState, extra: dict[str, ArrayTree]
  ) -> tuple[optax.Params, OptState]:
    """An exchange of local steps at any time: the next parameters and state; leaves without local steps stay.

    `extra` are the extra arguments of `tx`, by name.
    """
    before = optimized(params)
    # In this context local steps exchange, and ignore gradients. Other optimizers of
    # the chain get zeros; their next states are thrown away below.
    with synchronizing(True):
      updates, after = atomic(self.tx).update(
        optax.tree.zeros_like(before), state, before, **extra
      )
    is_local = states.is_local_state
    after = jax.tree.map(
      lambda old, new: new if is_local(old) else old, state, after, is_leaf=is_local
    )
    # Leaves outside of local steps stay, even where an outer optimizer would move them.
    moved = moved_leaves(state)
    local_update = lambda name, u: u if name in moved else jnp.zeros_like(u)
    # Names in the state are those of the leaves that a transform sees: the two parts of
    # a complex leaf, or one vector of all leaves inside optax.flatten.
    updates = map_seen(local_update, states.reduce_states(state), updates)
    return with_optimized(params, optax.apply_updates(before, updates)), after


def combine_scales(
  comm: Comm, params: optax.Params, grads: optax.Updates
) -> tuple[optax.Updates, OptState]:
  """The gradients for the optimizer, and the next scales of fp8: their maximum over the workers, in one message.

  Flax's histories hold largest magnitudes, so their maximum over workers is that of the
  whole batch. Where a gradient or a scale of a worker is not finite, the scales of
  `params` stay, and the gradients of that worker are NaN, so that all workers skip the
  step.

  Args:
    comm: the workers.
    params: those of this worker, at which the gradients were taken.
    grads: of this worker, with its next scales in the place of those of `params`.

  Returns:
    (gradients, scales); () as scales for parameters without scales.
  """
  before, after = overwritten(params), overwritten(grads)
  if not jax.tree.leaves(before):
    return grads, ()
  finite = flatten.all_finite(optimized(grads)) & flatten.stays_finite(before, after)
  marked = _nan_unless(finite, optimized(grads))
  flat, restore = flatten.flatten((jnp.where(finite, 0.0, 1.0), after))
  # The first entry is the flag, 1 at a worker with NaN or Inf, which sends its scales
  # as zeros.
  sent = jnp.where(finite, flat, 0.0).at[0].set(flat[0])
  failed, largest = restore(comm.all_reduce(sent, "max"))
  return marked, optax.tree.where(failed > 0, before, largest)


def _nan_unless(finite: jax.Array | bool, tree: ArrayTree) -> ArrayTree:
  """The leaves as they are if `finite`, else all NaN: then all workers skip the step."""
  return jax.tree.map(lambda x: jnp.where(finite, x, jnp.nan), tree)


def mean_over(comm: Comm, x: jax.Array) -> jax.Array:
  """The mean over workers in the dtype of `x`, summed in float32 where 16 bits could overflow."""
  total = comm.all_reduce(x.astype(flatten.wide_dtype(x)))
  return (total / comm.size).astype(x.dtype)


def _gradients(
  worker: WorkerStep,
  params: optax.Params,
  batch: ArrayTree,
  key: jax.Array | None,
  model_state: ArrayTree,
  shared: ArrayTree,
) -> tuple[ArrayTree, ...]:
  """(loss, gradients, model state, aux) of one worker's part of the batch, nothing averaged over workers yet.

  `key`, `model_state` and `shared` are None where the step got none: `loss_fn` is then
  called without them.
  """

  def grads_of_batch(
    batch: ArrayTree, key: jax.Array | None, model_state: ArrayTree
  ) -> tuple[ArrayTree, ...]:
    optional = {"rng": key, "model_state": model_state, "shared": shared}
    named = {name: x for name, x in optional.items() if x is not None}

    def loss_fn(params: optax.Params) -> tuple[jax.Array, tuple[Any, Any]]:
      # What loss_fn should return follows from what the step was given.
      wanted = [
        "loss",
        *["model_state"] * (model_state is not None),
        *["aux"] * worker.has_aux,
      ]
      returned = worker.loss_fn(params, batch, **named)
      returned = returned if isinstance(returned, tuple) else (returned,)
      if len(returned) != len(wanted):
        raise ValueError(
          f"loss_fn returned {len(returned)} values, it should return ({', '.join(wanted)}): for aux give "
          "make_train_step has_aux=True, for a model state give the step model_state="
        )
      results = dict(zip(wanted, returned, strict=True))
      _check_model_state(model_state, results.get("model_state"))
      return results["loss"], (results.get("model_state"), results.get("aux"))

    (loss, (after, aux)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return loss, grads, after, aux

  if worker.accumulate == 1:
    return grads_of_batch(batch, key, model_state)
  return _accumulated(worker, grads_of_batch, batch, key, model_state, params)


def _check_model_state(before: ArrayTree, after: ArrayTree) -> None:
  """Raises ValueError unless both model states have the same leaves, naming the first that differs."""
  # Shapes and dtypes too: a scan over micro-batches carries the model state.
  types = lambda tree: {
    name: jax.typeof(leaf).str_short()
    for name, leaf in flatten.leaves_by_name(tree).items()
  }
  was, now = types(before), types(after)
  for name in was | now:
    if was.get(name) != now.get(name):
      raise ValueError(
        f"loss_fn returned model_state{name} of {now.get(name, 'nothing')}, it was given one of "
        f"{was.get(name, 'nothing')}"
      )
  # Leaves with equal names and types may still have other containers or static fields.
  structures: Any = [jax.tree.structure(tree) for tree in (before, after)]
  if structures[0] != structures[1]:
    raise ValueError(
      f"loss_fn returned a model_state of the structure {structures[1]}, it was given one of {structures[0]}"
    )


def _accumulated(
  worker: WorkerStep,
  grads_of_batch: Callable,
  batch: ArrayTree,
  key: jax.Array | None,
  model_state: ArrayTree,
  params: optax.Params,
) -> tuple[ArrayTree, ...]:
  """`_gradients` of one worker's part of the batch in `accumulate` micro-batches, one after the other.

  Loss and gradients are averaged in their dtype, in float32 where that has 16 bits.
  Each micro-batch gets the model state of the one before, and aux is reduced.

  Args:
    worker: the options of the step.
    grads_of_batch: (batch, key, model state) -> `_gradients` of one micro-batch.
    batch: leading axis divisible by `accumulate`.
    key: folded with the number of the micro-batch; None without `rng`.
    model_state: of the first micro-batch; None without one.
    params: the parameters, whose shapes the sums have; gradients also have their
      dtypes.
  """
  micro_batches = jax.tree.map(lambda x: _compat.in_parts(x, worker.accumulate), batch)
  # Sums are kept in wide dtypes: 16 bits would lose small gradients.
  add = lambda a, b: a + b.astype(a.dtype)

  def accumulate(carry: ArrayTree, indexed: ArrayTree) -> tuple[ArrayTree, ArrayTree]:
    # `total` is (sum of losses, sum of gradients with the largest scales of fp8).
    total, model_state = carry
    index, batch = indexed
    # Each micro-batch draws noise of its own.
    own_key = None if key is None else jax.random.fold_in(key, index)
    loss, grads, model_state, aux = grads_of_batch(batch, own_key, model_state)
    # Scales of fp8 are not summed: the largest of each counts.
    scales = jax.tree.map(jnp.maximum, overwritten(total[1]), overwritten(grads))
    total = jax.tree.map(add, total, (loss, grads))
    total = total[0], with_optimized(total[1], optimized(total[1]), scales)
    return (total, model_state), aux

  # Traced for the dtype of the loss alone.
  loss = jax.eval_shape(
    grads_of_batch, states.first_row(micro_batches), key, model_state
  )[0]
  zeros = jax.tree.map(
    lambda x: jnp.zeros_like(x, flatten.wide_dtype(x)), (loss, params)
  )
  indices = jnp.arange(worker.accumulate, dtype=jnp.int32)
  ((loss, grads), model_state), aux = jax.lax.scan(
    accumulate, (zeros, model_state), (indices, micro_batches)
  )
  # Scales are no sums, so only what an optimizer updates is divided.
  mean = jax.tree.map(
    lambda grad, like: (grad / worker.accumulate).astype(like.dtype),
    optimized(grads),
    optimized(params),
  )
  return (
    loss / worker.accumulate,
    with_optimized(grads, mean),
    model_state,
    _reduced(aux, worker.aux_reduce, _over_parts),
  )


def _next_model_state(
  worker: WorkerStep, comm: Comm, model_state: ArrayTree
) -> ArrayTree:
  """The model state for the next step: averaged over the workers, or [1, …] where each worker keeps its own.

  Args:
    worker: the options of the step.
    comm: the workers.
    model_state: this worker's, after its gradient.
  """
  if worker.model_state == "worker":
    return states.add_row(model_state)
  for path, leaf in jax.tree_util.tree_leaves_with_path(model_state):
    if _compat.is_key(leaf):
      raise TypeError(
        f"model_state{jax.tree_util.keystr(path)} is a random key, which workers cannot average: keep keys out of the "
        "model state and give the step rng=key"
      )
  over_workers = functools.partial(_over_workers, comm)

  def next_leaf(x: jax.Array) -> jax.Array:
    # Counts have no mean: the largest goes on.
    if not jnp.issubdtype(x.dtype, jnp.inexact):
      return _reduced(x, "max", over_workers).astype(x.dtype)
    mean = over_workers(x, "mean")
    # The mean of equal numbers must be that number. Where P is no power of two, the sum
    # or its quotient is rounded: the mean of the differences corrects it.
    return (
      mean if comm.size & comm.size - 1 == 0 else mean + over_workers(x - mean, "mean")
    )

  return jax.tree.map(next_leaf, model_state)


def _words_beside(
  worker: WorkerStep,
  size: int,
  aux: ArrayTree,
  model_state: ArrayTree,
  scales: ArrayTree,
) -> jax.Array:
  """4-byte words that a worker sends in a step besides those of `tx`, u32[].

  All-reduces of one entry, as of the loss, count none.

  Args:
    worker: the options of the step.
    size: number of workers P.
    aux: as reduced, [P, …] with "stack"; None without.
    model_state: as averaged, or this worker's own, which is not sent; None without.
    scales: the next scales of fp8, sent with one flag in one message; () without.
  """
  cost_as = lambda dtype, x: all_reduce_cost(x.size, size, dtype.itemsize).words
  cost = lambda x: cost_as(x.dtype, x)
  cost_of_mean = lambda x: cost_as(flatten.wide_dtype(x), x)
  # Bytes: x holds P rows, and an all-gather sends this worker's row to P − 1 others.
  sent_bytes = lambda x: x.size // size * (size - 1) * x.dtype.itemsize
  rows = lambda x: math.ceil(sent_bytes(x) / 4)
  of_aux = {"stack": rows, "mean": cost_of_mean}.get(worker.aux_reduce, cost)
  words = sum(map(of_aux, jax.tree.leaves(aux)))
  for leaf in [] if worker.model_state == "worker" else jax.tree.leaves(model_state):
    # `next_leaf` reduces twice where P is no power of two.
    twice = size & size - 1 and jnp.issubdtype(leaf.dtype, jnp.inexact)
    words += cost_of_mean(leaf) * (2 if twice else 1)
  if entries := sum(leaf.size for leaf in jax.tree.leaves(scales)):
    words += all_reduce_cost(entries + 1, size).words
  return saturated(words, jnp.uint32)


def _over_parts(x: jax.Array, how: AuxReduce) -> jax.Array:
  """The reduction of a leaf over the micro-batches, its leading axis."""
  if how == "stack":
    return x
  # JAX would widen a sum of small integers.
  if how == "sum":
    return x.sum(0, dtype=x.dtype)
  return getattr(x, how)(0)


def _over_workers(comm: Comm, x: jax.Array, how: AuxReduce) -> jax.Array:
  """The reduction of a leaf over the workers; "stack" gives it a leading axis of P."""
  if how == "stack":
    # In rank order the rows are the same on all workers, which `mark_total` declares.
    return mark_total(in_rank_order(comm, all_gather(comm, x)), axes_of(comm))
  if how == "mean":
    return mean_over(comm, x)
  return comm.all_reduce(x, how)


def _reduced(
  tree: ArrayTree, how: AuxReduce, reduce: Callable[[jax.Array, Any], jax.Array]
) -> ArrayTree:
  """Each leaf reduced by `reduce(leaf, how)`; "mean" sums integers and booleans, which are counts.

  Integers and booleans of less than 32 bits become 32 bits, but for "stack".
  """

  def reduced(path: jax.tree_util.KeyPath, x: jax.Array) -> jax.Array:
    x = jnp.asarray(x)
    if _compat.is_key(x):
      raise TypeError(
        f"aux{jax.tree_util.keystr(path)} is a random key, which aux_reduce={how!r} cannot reduce: return "
        "jax.random.key_data(key) and choose 'stack'"
      )
    if jnp.iscomplexobj(x) and how in ("max", "min"):
      raise ValueError(
        f"aux is complex: there is no {how} of it, choose aux_reduce='mean', 'sum' or 'stack'"
      )
    if how == "stack" or jnp.issubdtype(x.dtype, jnp.inexact):
      return reduce(x, how)
    # A sum over workers of 8 or 16 bits would overflow.
    if x.dtype.itemsize < 4:
      x = x.astype(
        jnp.uint32 if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else jnp.int32
      )
    return reduce(x, "sum" if how == "mean" else how)

  return jax.tree_util.tree_map_with_path(reduced, tree)
