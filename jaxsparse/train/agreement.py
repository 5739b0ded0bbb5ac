"""`js.agreement`: whether the workers' gradients agree as well as on data that is dealt out at random.

The agreement of gradients g_w is ‖mean g_w‖² / mean ‖g_w‖², with means over workers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxsparse._compat import AxisName, is_key, local_shard, words_of_keys
from jaxsparse._compat.one_at_a_time import dispatch
from jaxsparse.arrays.flatten import split_complex
from jaxsparse.comm import all_gather, in_rank_order
from jaxsparse.train.engine import Engine, check_batch, engine_of
from jaxsparse.transform import checks
from jaxsparse.transform.wrapped import optimized, trained
from jaxsparse.types import ArrayTree, Comm


class Agreement(NamedTuple):
  """How far the gradients of the workers agree: 1 if all are equal, 1/P if they are orthogonal, 0 if they cancel.

  Attributes:
    own: ‖mean of g_w‖² / mean of ‖g_w‖², with the gradient g_w of each worker's part of
      the batch.
    shuffled: the same after the rows of the batch were dealt out to the workers at
      random.

  Example:
    >>> Agreement(own=0.3, shuffled=0.9).own
    0.3
  """

  own: float
  shuffled: float


def agreement(
  loss_fn: Callable[..., ArrayTree],
  params: optax.Params,
  batch: ArrayTree,
  mesh: Mesh | Comm,
  *,
  axis: AxisName = "workers",
  **given: ArrayTree,
) -> Agreement:
  """The agreement of the workers' gradients, for each worker's own rows of a batch and for shuffled rows.

  Small batches differ by chance, shuffled or not. Where `own` is well below `shuffled`,
  workers have data of different kinds: then local steps, and optimizers that each
  worker has of its own, lose accuracy (`docs/how_to/different_data.md`). Call it on a
  large batch, before training and after some hundred steps. A call is slow: it compiles
  two gradients, gathers the batch on every worker, and all-reduces whole gradients.

  Args:
    loss_fn: `(params, batch, **given) -> loss`, or a tuple that begins with the loss, as
      for `js.make_train_step`.
    params: the parameters, the same on every worker.
    batch: the batch of all workers; under MPI this rank's part. Every process must
      call.
    mesh: the mesh, or the comm, of the workers.
    axis: the axis of the mesh, or tuple of axes, with one worker at each index.
    **given: keyword arguments of `loss_fn`, the same for every worker: a `model_state`
      is that of one worker. A key `rng` is folded with the worker's number, as in a
      step.

  Returns:
    An `Agreement`, (own, shuffled): ‖mean g_w‖² / mean ‖g_w‖² of the gradients g_w; 1
    where all gradients are zero.

  Raises:
    ValueError: where it is traced, as in `jax.jit`; for parameters without entries; if
      the mesh has no such axis, or the batch does not divide among the workers.
    TypeError: if `mesh` is neither a mesh nor a comm that knows its workers.

  Example:
    Two workers that pull in opposite directions:

    >>> import jax.numpy as jnp, jaxsparse as js
    >>> loss = lambda x, batch: jnp.mean((x - batch) ** 2)
    >>> batch = jnp.array([1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0])
    >>> agreement = js.agreement(loss, jnp.float32(0.5), batch, js.SimComm("workers", members=2))
    >>> round(agreement.own, 3), agreement.shuffled
    (0.2, 1.0)
  """
  return agreements(loss_fn, [params], batch, mesh, axis=axis, **given)[0]


def agreements(
  loss_fn: Callable[..., ArrayTree],
  several: Sequence[optax.Params],
  batch: ArrayTree,
  mesh: Mesh | Comm,
  *,
  axis: AxisName,
  **loss_arguments: ArrayTree,
) -> list[Agreement]:
  """The `Agreement` at each of several parameters of the same shapes, by one program.

  `several` are one or more parameters, for instance of different steps of a run.
  `loss_arguments` are keyword arguments of `loss_fn`. All others are as in `agreement`.
  """
  checks.check_not_traced("js.agreement", several, batch, loss_arguments)
  # `trained` leaves out slow parameters of optax.lookahead, `optimized` Flax's scales
  # of fp8, whose "gradients" are their next values.
  leaves = jax.tree.leaves(optimized(trained(several[0])))
  if not any(jnp.size(leaf) for leaf in leaves):
    raise ValueError("js.agreement: params have no entries that are trained")
  engine = engine_of(mesh, axis)
  check_batch(batch, engine)
  # Specs of (params, batch, loss_arguments): only the batch is split along the workers.
  specs = engine.same, engine.split, engine.same
  place = lambda params: engine.place((params, batch, loss_arguments), specs)
  # None where a worker is one device. Else arguments keep the shardings that the first
  # parameters lead to, so that one program serves all.
  kept = engine.shardings(place(several[0]), specs)
  worker = functools.partial(_agreements, engine, loss_fn)
  program = engine.jit(
    worker,
    specs,
    engine.same,
    shardings=kept and (kept, engine.shardings_of(engine.same)),
  )
  # (own, shuffled) of each, f32[2].
  pairs = [local_shard(dispatch(program, *place(params))) for params in several]
  return [Agreement(*pair.tolist()) for pair in pairs]


def _agreements(
  engine: Engine,
  loss_fn: Callable,
  params: optax.Params,
  batch: ArrayTree,
  loss_arguments: dict[str, ArrayTree],
) -> jax.Array:
  """‖mean g_w‖² / mean ‖g_w‖² for own and for shuffled rows, f32[2], the same at every worker.

  `batch` is this worker's part.
  """
  comm = engine.comm
  if loss_arguments.get("rng") is not None:
    # Each worker draws noise of its own, as in a training step.
    loss_arguments = loss_arguments | {
      "rng": jax.random.fold_in(loss_arguments["rng"], comm.rank)
    }

  def agreement_for(batch: ArrayTree) -> jax.Array:
    def loss(params: optax.Params) -> jax.Array:
      returned = loss_fn(params, batch, **loss_arguments)
      # `loss_fn` may return a model state and aux behind the loss.
      return returned[0] if isinstance(returned, tuple) else returned

    # Without slow parameters of optax.lookahead and scales of fp8; a complex leaf
    # becomes two real ones.
    tree = split_complex(optimized(jax.grad(loss)(trained(params))))
    grads = [grad.astype(jnp.float32) for grad in jax.tree.leaves(tree) if grad.size]
    largest = jnp.array([jnp.abs(grad).max() for grad in grads], jnp.float32).max()
    # The largest magnitude of all workers, so that all divide by the same scale.
    largest = comm.all_reduce(largest, "max")
    scale = jnp.where(largest > 0, largest, 1.0)
    square_of_mean = jnp.float32(0)
    mean_square = jnp.float32(0)
    # Entries are divided by the largest one, so that sums of squares neither overflow
    # nor underflow.
    for grad in grads:
      unit = jnp.ravel(grad) / scale
      square_of_mean += jnp.sum((comm.all_reduce(unit) / comm.size) ** 2)
      mean_square += jnp.sum(unit**2)
    mean_square = comm.all_reduce(mean_square) / comm.size
    # Gradients that are all zeros are equal.
    return jnp.where(largest == 0, 1.0, square_of_mean / mean_square)

  return jnp.stack([agreement_for(batch), agreement_for(_shuffled(comm, batch))])


def _shuffled(comm: Comm, batch: ArrayTree) -> ArrayTree:
  """The worker's part of the whole batch after a random permutation of all rows; `batch` is its part before.

  Leaves with equal numbers of rows get the same permutation: inputs stay with labels.
  """

  def rows_of_worker(x: jax.Array) -> jax.Array:
    # Messages carry numbers, so typed keys are sent as their words.
    own_rows = words_of_keys(x)
    rows = jnp.concatenate(in_rank_order(comm, all_gather(comm, own_rows)))
    # All workers use the same key, so that each row goes to exactly one of them; and
    # all leaves do, so that inputs and labels stay together.
    shuffled = jax.random.permutation(jax.random.key(0), len(rows))
    # Row w has the indices of the rows that worker w gets.
    order = shuffled.reshape(comm.size, -1)
    chosen = rows[order[comm.rank]]
    return (
      jax.random.wrap_key_data(chosen, impl=jax.random.key_impl(x))
      if is_key(x)
      else chosen
    )

  return jax.tree.map(rows_of_worker, batch)
