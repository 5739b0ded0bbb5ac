"""A collective as an `optax.GradientTransformation`, written once for all of them."""

import functools

import jax
import jax.numpy as jnp
import optax

from jaxsparse import _compat, flatten, sparse
from jaxsparse.collectives import Collective
from jaxsparse.comm import AxisComm, axes_of, comm_of
from jaxsparse.comm.replication import mark_total
from jaxsparse.sparse import saturating
from jaxsparse.transform import state as states
from jaxsparse.transform.metrics import accumulated
from jaxsparse.transform.state import ReduceState
from jaxsparse.types import Comm, Counters, Kept, Reduced, Sparse


def transform_of(collective: Collective, axis: _compat.AxisName | Comm) -> optax.GradientTransformation:
  """The transform that averages gradients with `collective` over the workers of `axis`.

  Args:
    collective: from `js.make_collective`, or one of your own.
    axis: the name of the shard_map axis the workers lie along, a tuple of such names, or a comm.

  Raises:
    TypeError: if `axis` is none of these.

  Example:
    >>> import jaxsparse as js
    >>> tx = js.transform_of(js.make_collective("spardl", k=100), "workers")
  """
  comm = comm_of(axis)

  def init(params: optax.Params) -> ReduceState:
    state = init_state(collective.for_leaves(flatten.sizes(params)), flatten.count(params), comm.size)
    return state._replace(layout=mark_total(state.layout, axes_of(comm)))

  def update(
    updates: optax.Updates, state: ReduceState, params: optax.Params | None = None
  ) -> tuple[optax.Updates, ReduceState]:
    del params
    grads, unflatten = flatten.flatten(updates)
    states.check_workers(state, comm.size)
    states.check_entries(state, grads.size)
    check_local(comm, updates)
    own = collective.for_leaves(flatten.sizes(updates))
    states.check_kind(state, functools.partial(own.init, grads.size, comm.size), own.name)
    mean, state = reduce_step(own, comm, grads, state, divisor=comm.size)
    return unflatten(mean), state

  return optax.GradientTransformation(init, update)


def init_state(collective: Collective, n: int, size: int) -> ReduceState:
  """The state of one of `size` workers before the first step.

  Raises:
    ValueError: for a number of entries that the collective cannot index, or that its options do not fit.
  """
  collective.check_size(n, size)
  return ReduceState(collective.init(n, size), Counters.zeros(), states.Layout.of(size, n))


def reduce_step(
  collective: Collective, comm: Comm, grads: jax.Array, state: ReduceState, divisor: int = 1
) -> tuple[jax.Array, ReduceState]:
  """One reduction at one worker: f32[n] to the f32[n] sum over workers, divided by `divisor`, and the next state.

  NaN and Inf rank above everything in selection, so one of them anywhere is in the total of every worker. All of them
  see it without an extra message, return a total of zeros and keep what they carried: the step is skipped.
  """
  reduced = collective.reduce(comm, grads, state.carried)
  update, after = applied(reduced, is_finite(comm, reduced), grads, state, divisor)
  return marked(collective, comm, update), finished(comm, after)


def marked(collective: Collective, comm: Comm, update: jax.Array) -> jax.Array:
  """f32[n] `update`, marked as the same on every worker where Law R makes it so."""
  return mark_total(update, axes_of(comm)) if collective.replicates else update


def finished(comm: Comm, state: ReduceState) -> ReduceState:
  """The state at the end of a step: words are added up, and what workers share is marked."""
  shared, due = mark_total((state.carried.shared, state.carried.due), axes_of(comm))
  carried = state.carried._replace(shared=shared, due=due)
  return state._replace(carried=carried, counters=accumulated(state.counters))


def is_finite(comm: Comm, reduced: Reduced) -> jax.Array:
  """Whether the total has neither NaN nor Inf, bool[], the same at every worker."""
  total = reduced.total
  finite = jnp.isfinite(total.values if isinstance(total, Sparse) else total).all()
  return mark_total(finite, axes_of(comm))


def applied(
  reduced: Reduced, finite: jax.Array, grads: jax.Array, state: ReduceState, divisor: int = 1
) -> tuple[jax.Array, ReduceState]:
  """What `reduce_step` gives back, from what was reduced; zeros and the old state where the step is not `finite`."""
  total, carried, counters = reduced
  skipped_steps = state.counters.skipped_steps + (~finite).astype(jnp.int32)
  density = jnp.asarray(counters.delivered, jnp.float32) / float(grads.size)
  counters = counters._replace(
    density=density,
    skipped=~finite,
    skipped_steps=skipped_steps,
    total_words=state.counters.total_words,
    total_wraps=state.counters.total_wraps,
  )
  counters = jax.tree.map(lambda new, old: saturating.cast(new, old.dtype).reshape(1), counters, state.counters)
  keep = lambda new, old: jnp.where(finite, new, old)
  if isinstance(carried.residual, Kept):
    # Order all reads before the in-place writes, so that XLA can alias the buffers.
    ready = finite.astype(jnp.int32)
    for entries in carried.residual.entries:
      ready = sparse.after(entries.values, ready)
    residual = _written(carried.residual, ready > 0)
    rest = jax.tree.map(keep, carried._replace(residual=None), state.carried._replace(residual=None))
    carried, zero = rest._replace(residual=residual), sparse.after(residual[:1], jnp.int32(0)).astype(jnp.float32)
  else:
    carried, zero = jax.tree.map(keep, carried, state.carried), jnp.float32(0)
  if isinstance(total, Sparse):
    values = jnp.where(finite, total.values, 0.0) / divisor
    update = sparse.put(jnp.full_like(grads, zero), total.indices, values)
  else:
    update = jnp.where(finite, total, 0.0) / divisor
  return update, state._replace(carried=carried, counters=counters)


def _written(kept: Kept, finite: jax.Array) -> jax.Array:
  """The new residual, f32[n], or the old one if not `finite`: one pass over n entries, and a few in place."""
  residual = jnp.where(finite, kept.grads + kept.residual, kept.residual)
  for places, values in kept.entries:
    residual = sparse.put(residual, jnp.where(finite, places, residual.size), values)
  return residual


def check_local(comm: Comm, grads: optax.Updates) -> None:
  """Checks that gradients are those of one worker, as far as it shows; raises ValueError if they are not.

  Under check_vma=True JAX sums the gradients of replicated parameters by itself, and types say so. Otherwise the last
  operations of the trace show a psum or pmean of the user's own.
  """
  if not isinstance(comm, AxisComm):
    return
  leaves = jax.tree_util.tree_leaves_with_path(grads)
  if all(_compat.is_summed_over(comm.axis, leaf) for _, leaf in leaves):
    raise ValueError(
      f"the gradients are already summed over {comm.axis!r}: jaxsparse takes the local gradients of one worker, so "
      "give jax.shard_map check_vma=False (js.make_train_step does)"
    )
  for path, leaf in leaves:
    if _compat.is_psum(leaf, comm.axis):
      raise ValueError(
        f"gradients{jax.tree_util.keystr(path)} is summed or averaged over {comm.axis!r} already: jaxsparse takes the "
        "local gradients of one worker, leave out the pmean or psum"
      )
