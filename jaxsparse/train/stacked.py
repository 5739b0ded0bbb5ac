"""`js.stacked`: a chain for trainers that are programs of all workers, under `jax.jit` with global arrays.

There a gradient of each worker is a row of an array [P, …] that is sharded along the
axis of the workers. What other axes of the mesh shard is left to the partitioner.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec
from optax import OptState

from jaxsparse._compat import AxisName
from jaxsparse.arrays import flatten
from jaxsparse.comm import replication
from jaxsparse.train.engine import Engine, check_batch, engine_of, shape_of
from jaxsparse.train.skipped import SkipWatch
from jaxsparse.train.starting import LIKELY_MISTAKES, check_state
from jaxsparse.train.step import init
from jaxsparse.train.worker import combine_scales, mean_over
from jaxsparse.transform import state as states
from jaxsparse.transform.atomic import atomic, commit_early
from jaxsparse.transform.checks import check_workers
from jaxsparse.transform.residuals import own_params
from jaxsparse.transform.specs import specs
from jaxsparse.transform.wrapped import (
  overwritten,
  shapes_seen,
  synchronizing,
  trained,
  with_optimized,
)
from jaxsparse.types import ArrayTree, Comm, SpecTree

_SAME = PartitionSpec()


@jax.tree_util.register_static
class Stacked(optax.GradientTransformationExtraArgs):
  """A chain over stacked gradients; made by `stacked`.

  It is a pytree without leaves, so that it may be an argument of a jitted function, or
  a field of a module.

  Attributes:
    own_params: `own_params(params, state)` are the parameters of each worker, [P, …].
    value_and_grad: `value_and_grad(loss_fn, has_aux=False)(params, state, *batches,
      **shared)` is the mean loss of `loss_fn(params, *batches, **shared)` and the
      gradient of each worker, at its own parameters and for its part of each batch.
      With `has_aux` the loss is (loss, aux), with the aux of each worker as a row.
  """

  own_params: Callable[[optax.Params, OptState], optax.Params]
  value_and_grad: Callable[..., Callable[..., tuple[ArrayTree, optax.Updates]]]

  def _replace(self, **functions: Callable) -> "Stacked":
    """A copy with another `init` or `update`, and the same attributes."""
    # Wrappers of optax copy a transformation, and `super` knows its two functions only.
    copy = super()._replace(**functions)
    vars(copy).update(vars(self))
    return copy


def stacked(
  tx: optax.GradientTransformation, mesh: Mesh | Comm, *, axis: AxisName = "workers"
) -> Stacked:
  """`tx` for a `jax.jit` of your own, outside of `shard_map`: gradients have a leading axis of workers.

      loss, grads = tx.value_and_grad(loss_fn)(params, state, batch)      before anything is averaged
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)

  Row w of a gradient, [P, …], is the gradient of worker w, and lies on its devices.
  `jax.grad` of a loss over the whole batch would average these before `tx` sees them:
  take gradients by `tx.value_and_grad`, or by `jax.vmap` over replicas. The update
  sends the messages of `tx` and no others. The result is that of `js.make_train_step`,
  with its checks, and a step with NaN or Inf leaves everything as it was (`js.atomic`).

  Parameters are shared, [...], or have a row for each worker, [P, …], with equal rows;
  updates are like the parameters. With `js.local_steps` both are those of the outer
  parameters, and a worker computes its gradient at its row of `tx.own_params(params,
  state)`, as `tx.value_and_grad` does. `tx.update(grads, state, params,
  synchronize=True)` is the exchange without a step.

  `tx.init(params)` is `js.init(tx, params, mesh, axis=axis)` of shared parameters;
  `js.abstract_state`, `js.specs`, `js.metrics`, `js.resize` and `js.flush` take its
  state.

  Args:
    tx: the chain.
    mesh: the mesh, or the comm, of the workers. Axes other than `axis` lie inside a
      worker.
    axis: the axis of the mesh, or tuple of axes, with one worker at each index.

  Returns:
    A `Stacked`, an `optax.GradientTransformation` with `own_params` and
    `value_and_grad`.

  Raises:
    ValueError: as `js.init`. When used: for arrays without a row for each worker,
      naming the first; for a state of other workers or parameters.

  Example:
    >>> import jax, jax.numpy as jnp, optax, jaxsparse as js
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("workers",))
    >>> chain = optax.chain(js.make_transform("topka", "workers", density=0.5), optax.sgd(0.25))
    >>> tx, params = js.stacked(chain, mesh), jnp.zeros(4)
    >>> state = tx.init(params)
    >>> @jax.jit
    ... def step(params, state, batch):
    ...   loss, grads = tx.value_and_grad(lambda p, batch: jnp.mean((p[None] - batch) ** 2))(params, state, batch)
    ...   updates, state = tx.update(grads, state, params)
    ...   return optax.apply_updates(params, updates), state
    >>> for _ in range(100):
    ...   params, state = step(params, state, jnp.ones((len(jax.devices()), 4)))
    >>> float(jnp.abs(params - 1).max()) < 1e-3
    True
  """
  workers = _Workers(tx, engine_of(mesh, axis), SkipWatch("js.stacked"))
  start = functools.partial(init, tx, mesh=mesh, axis=axis)
  result = Stacked(start, workers.update)
  result.own_params = workers.own_params
  result.value_and_grad = workers.value_and_grad
  return result


class _Workers(NamedTuple):
  """The functions of a `Stacked`.

  Outside of a mapped program arrays with rows are [P, …], one row a worker; parameters
  and updates may be [...] instead, one copy for all. `_SAME` is the spec P() of arrays
  that are equal on all workers, `engine.split` that of arrays with rows.

  Attributes:
    tx: the chain.
    engine: the workers.
    skips: warns of many skipped steps in a row.
  """

  tx: optax.GradientTransformation
  engine: Engine
  skips: SkipWatch

  def update(
    self,
    grads: optax.Updates,
    state: OptState,
    params: optax.Params | None = None,
    *,
    synchronize: bool = False,
    **extra: ArrayTree,
  ) -> tuple[optax.Updates, OptState]:
    """`update` of the chain at every worker.

    Args:
      grads: with rows.
      state: of all workers.
      params: with rows or not; None if the chain needs none.
      synchronize: whether local steps exchange at once, without a step.
      **extra: extra arguments of the chain, the same for all workers.

    Returns:
      The updates, with rows if the parameters have them, and the next state.
    """
    engine = self.engine
    _check_rows(grads, state, params, engine.held)
    # A learning rate that the user has set in local optimizers is repeated for each
    # worker; specs below expect these rows.
    state = _of_workers(state, engine)
    # Parameters are one copy for all workers, or a row for each, as gradients are.
    has_rows = params is not None and _has_rows(state, params, engine.held)
    # The spec of the parameters and of the updates.
    form = engine.split if has_rows else _SAME
    state_specs = specs(state, engine.axis)
    in_specs, out_specs = (engine.split, state_specs, form, _SAME), (form, state_specs)

    def worker(
      grads: optax.Updates,
      state: OptState,
      params: optax.Params,
      extra: dict[str, ArrayTree],
    ) -> tuple[optax.Updates, OptState]:
      # Arrays are those of one worker here, [1, …] where they have rows. `synchronize`
      # is set by a context: some wrappers of optax pass no argument on to local steps.
      with synchronizing(synchronize):
        updates, state = atomic(self.tx).update(
          states.first_row(grads),
          state,
          states.first_row(params) if has_rows else params,
          **extra,
        )
      return states.add_row(updates) if has_rows else updates, state

    # For errors: the name of each result, in order, and its likely mistake.
    mistakes = {"updates": LIKELY_MISTAKES["params"], "state": LIKELY_MISTAKES["state"]}
    # Raises when traced if a replicated result would differ between workers;
    # `commit_early` lets XLA reuse the memory of the old state.
    checked = replication.checked(
      worker, in_specs, out_specs, engine.axis, mistakes, engine.others, commit_early
    )
    program = engine.map(checked, in_specs, out_specs)
    updates, after = program(grads, state, params, extra)
    # The watch ignores flags that are tracers, as in the `jax.jit` of a user.
    self.skips.add(
      [reduce_state.counters.skipped for reduce_state in states.reduce_states(after)]
    )
    self.skips.look(gradients=grads, params=params, state=after)
    return updates, after

  def own_params(self, params: optax.Params, state: OptState) -> optax.Params:
    """The parameters of each worker, [P, …], at which it takes its gradient; `params` have rows or not."""
    # `_each` calls this with a worker's own parameters, and no batch.
    own_row = lambda params, *_: states.add_row(params)
    return self._each(own_row, params, state, (), (), self.engine.split)

  def value_and_grad(
    self, loss_fn: Callable[..., ArrayTree], has_aux: bool = False
  ) -> Callable[..., tuple[ArrayTree, optax.Updates]]:
    """(params, state, *batches, **shared) -> (mean loss, gradients [P, …]), at each worker's own parameters.

    With `has_aux` the loss is (loss, aux), with the aux of each worker as a row.
    """
    # Results of `_gradient`: (loss, aux, gradients, scales of fp8).
    rows = self.engine.split
    of_worker = functools.partial(_gradient, self.engine.comm, loss_fn, has_aux)
    results = _SAME, rows, rows, _SAME

    def value_and_grad_of(
      params: optax.Params, state: OptState, *batch: ArrayTree, **shared: ArrayTree
    ) -> tuple[ArrayTree, optax.Updates]:
      check_batch(batch, self.engine)
      loss, aux, grads, scales = self._each(
        of_worker, params, state, batch, shared, results
      )
      params = trained(params)
      # The scales are one copy for all workers; each worker's row gets it where
      # parameters have rows.
      as_like = lambda x, like: jnp.broadcast_to(x, like.shape)
      scales = jax.tree.map(as_like, scales, overwritten(params))
      grads = with_optimized(params, grads, scales)
      return (loss, aux) if has_aux else loss, grads

    return value_and_grad_of

  def _each(
    self,
    function: Callable,
    params: optax.Params,
    state: OptState,
    batch: ArrayTree,
    shared: ArrayTree,
    results: SpecTree,
  ) -> ArrayTree:
    """The results of `function(own parameters, batch, shared)` at every worker.

    Args:
      function: the program of one worker.
      params: with rows or not.
      state: of all workers.
      batch: a tuple of batches, split along the workers.
      shared: the same for all workers.
      results: specs of what `function` returns.
    """
    engine = self.engine
    state = _of_workers(state, engine)
    # Whether parameters are [P, …], not [...].
    has_rows = _has_rows(state, params, engine.held)

    def worker(
      params: optax.Params, state: OptState, batch: ArrayTree, shared: ArrayTree
    ) -> ArrayTree:
      # `own_params` subtracts what this worker has moved.
      outer_params = states.first_row(params) if has_rows else params
      return function(own_params(outer_params, state), batch, shared)

    rows = engine.split
    in_specs = (rows if has_rows else _SAME, specs(state, engine.axis), rows, _SAME)
    return engine.map(worker, in_specs, results)(params, state, batch, shared)


def _gradient(
  comm: Comm,
  loss_fn: Callable[..., ArrayTree],
  has_aux: bool,
  params: optax.Params,
  batch: tuple[ArrayTree, ...],
  shared: dict[str, ArrayTree],
) -> tuple[jax.Array, ArrayTree, optax.Updates, ArrayTree]:
  """(loss, aux, gradient, scales) at one worker: loss and scales equal on all workers, the others rows [1, …].

  Args:
    comm: the workers.
    loss_fn: (params, *batch, **shared) -> loss, or (loss, aux) with `has_aux`.
    has_aux: whether there is an aux; else () stands for it.
    params: this worker's.
    batch: this worker's part of each batch.
    shared: keyword arguments of `loss_fn`.

  Returns:
    The mean of the loss; aux and gradient of this worker; the next scales of fp8, the
    maximum over workers, () without.
  """
  # The fast parameters of `optax.lookahead`.
  params = trained(params)
  value, grads = jax.value_and_grad(loss_fn, has_aux=has_aux)(params, *batch, **shared)
  loss, aux = value if has_aux else (value, ())
  grads, scales = combine_scales(comm, params, grads)
  return mean_over(comm, loss), states.add_row(aux), states.add_row(grads), scales


def _of_workers(state: OptState, engine: Engine) -> OptState:
  """The state, numbers set by hand repeated for each worker; raises ValueError for a state of other workers."""
  for reduce_state in states.reduce_states(state):
    check_workers(reduce_state, engine.workers, held=engine.held)
  return states.with_rows(state)


def _has_rows(state: OptState, params: optax.Params, workers: int) -> bool:
  """Whether parameters are [P, …], with a row for each worker, and not [...].

  Raises:
    ValueError: if they are not those that the state was made for, with rows or without.
  """
  leaves = jax.tree.leaves(params)
  if all(np.shape(leaf)[:1] == (workers,) for leaf in leaves):
    reduce_states = states.reduce_states(state)
    # Shapes without rows, by name; empty if the state has no jaxsparse transform.
    known = {name: shape for state in reduce_states for name, shape in state.leaves}
    # The leading axis may be P by chance: the state knows the shapes of leaves.
    without_row = lambda x: shape_of(x, shape=np.shape(x)[1:])
    of_worker = jax.tree.map(without_row, params)
    seen = flatten.leaf_shapes(shapes_seen(reduce_states, of_worker))
    if known and known.items() <= seen.items():
      return True
  # Parameters without rows: raises if the state was made for others.
  check_state(state, params, shapes=True)
  return False


def _check_rows(
  grads: optax.Updates, state: OptState, params: optax.Params | None, workers: int
) -> None:
  """Raises ValueError unless gradients have the leaves of the parameters, with a row for each of `workers` workers.

  `params` are None where `update` got none.
  """
  flatten.check_are_arrays(params, "params")
  flatten.check_not_overwritten(grads, "gradients")
  leaves = flatten.leaves_by_name(grads)
  # (name, shape without rows) of each leaf that the state was made for.
  made = [leaf for substate in states.reduce_states(state) for leaf in substate.leaves]
  # Around js.stacked, MultiSteps keeps sums in the shapes of parameters, without rows.
  hint = (
    "optax.MultiSteps goes into the chain, after the transform, not around js.stacked"
  )
  if params is not None and (
    others := set(leaves) ^ set(flatten.leaves_by_name(trained(params)))
  ):
    # The first by name, so that the error is the same on all processes.
    raise ValueError(
      f"gradients or parameters have no leaf {min(others)}: give both with the same leaves"
    )
  for name, leaf in leaves.items():
    if np.shape(leaf)[:1] != (workers,):
      raise ValueError(
        f"gradients{name} has shape {np.shape(leaf)}, not a row for each of {workers} workers: take gradients by "
        f"tx.value_and_grad(loss_fn)(params, state, batch), before they are averaged. {hint}"
      )
  # Where the first dimension of every parameter happens to be P, averaged gradients
  # have passed the check above: their shapes, those of parameters, give them away.
  if made and set(made) <= set(flatten.leaf_shapes(grads).items()):
    raise ValueError(
      f"gradients{made[0][0]} has shape {made[0][1]}, that of its parameter in the state: give gradients a row for "
      f"each of {workers} workers, and tx.init shared parameters. {hint}"
    )
