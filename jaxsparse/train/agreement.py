"""`js.agreement`: whether the gradients of the workers agree as far as those of a random share of all data would."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from jaxsparse._compat import AxisName, local_shard
from jaxsparse.comm import all_gather, in_rank_order
from jaxsparse.comm.one_at_a_time import dispatch
from jaxsparse.train.engine import Engine, check_batch, engine_of
from jaxsparse.types import Comm


class Agreement(NamedTuple):
  """How far the gradients of the workers agree, from 1, where all are equal, to 1/P, where they have nothing in common.

  Attributes:
    own: ‖mean of g_w‖² / mean of ‖g_w‖², with the gradient g_w of each worker's part of the batch.
    dealt: the same after the rows of the batch were dealt out to the workers, row i to worker i mod P.

  Example:
    >>> Agreement(own=0.3, dealt=0.9).own
    0.3
  """

  own: float
  dealt: float


def agreement(
  loss_fn: Callable[..., Any],
  params: optax.Params,
  batch: Any,
  mesh: Mesh | Comm,
  *,
  axis: AxisName = "workers",
  **given: Any,
) -> Agreement:
  """Whether the gradients of the workers agree as far as those of a random share of all data would.

  Small batches differ by chance; `dealt` has the same noise, and no other difference. Where `own` is well below it,
  workers have data of different kinds: an optimizer of each worker's own and local steps then lose accuracy
  (`docs/which_method.md`). It compiles two gradients, and sends the batch and the gradients whole: for one batch of
  many rows before the training, and one after some hundred steps.

  Args:
    loss_fn: that of `js.make_train_step`.
    params: the parameters, the same on every worker.
    batch: the batch of all workers, but that of this worker under MPI; every process must call.
    mesh: the mesh, or the comm, of the workers.
    axis: the axis of the mesh, or tuple of axes, with one worker at each index.
    **given: keyword arguments of `loss_fn`, the same for every worker.

  Returns:
    An `Agreement`.

  Raises:
    ValueError: if the mesh has no such axis, or the batch does not divide among the workers.

  Example:
    Two workers that pull into opposite directions:

    >>> import jax.numpy as jnp, jaxsparse as js
    >>> loss = lambda x, batch: jnp.mean((x - batch) ** 2)
    >>> batch = jnp.array([1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0])
    >>> js.agreement(loss, jnp.float32(0.5), batch, js.SimComm("workers", members=2))
    Agreement(own=0.20000000298023224, dealt=1.0)
  """
  engine = engine_of(mesh, axis)
  check_batch(batch, engine, axis)
  same, split = PartitionSpec(), PartitionSpec(engine.axis)
  specs = same, split, same
  arguments = engine.place((params, batch, given), specs)
  kept = engine.shardings(arguments, specs)
  both = functools.partial(_agreements, engine, loss_fn)
  program = engine.jit(both, specs, same, shardings=kept and (kept, engine.shardings_of(same)))
  return Agreement(*local_shard(dispatch(program, *arguments)).tolist())


def _agreements(
  engine: Engine, loss_fn: Callable, params: optax.Params, batch: Any, given: dict[str, Any]
) -> jax.Array:
  """The two numbers, f32[2], at one worker."""
  comm = engine.comm

  def of(batch: Any) -> jax.Array:
    def loss(params: optax.Params) -> jax.Array:
      found = loss_fn(params, batch, **given)
      return found[0] if isinstance(found, tuple) else found

    mean, each = jnp.float32(0), jnp.float32(0)
    for grad in map(jnp.ravel, jax.tree.leaves(jax.grad(loss)(params))):
      wide = grad.astype(jnp.float32)
      mean += jnp.sum((comm.all_reduce(wide) / comm.size) ** 2)
      each += jnp.sum(wide**2)
    return mean / (comm.all_reduce(each) / comm.size)

  return jnp.stack([of(batch), of(_dealt(comm, batch))])


def _dealt(comm: Comm, batch: Any) -> Any:
  """The rows of the whole batch that are dealt out to this worker."""
  rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), in_rank_order(comm, all_gather(comm, batch)))
  return jax.tree.map(lambda x: x.reshape(-1, comm.size, *x.shape[1:])[:, comm.rank], rows)
