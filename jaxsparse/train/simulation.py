"""`js.simulate`: one reduction of any number of workers on one device, bitwise the same as on a mesh.

`js.costs.contraction`: how much of the gradients of several steps a collective leaves out.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse.arrays import flatten
from jaxsparse.collectives import Collective, make_collective
from jaxsparse.comm import SimComm
from jaxsparse.transform import checks
from jaxsparse.transform.metrics import Metrics, summary
from jaxsparse.transform.state import ReduceState
from jaxsparse.transform.update import init_state, reduce_step
from jaxsparse.types import ArrayTree

_AXIS = "workers"


class Simulated(NamedTuple):
  """One simulated reduction.

  Attributes:
    total: f32[n], the total at worker 0, an estimate of the sum over workers (not
      divided by P); or a pytree like one worker's gradients.
    residuals: f32[P, n], the residual of each worker, zeros for a collective without
      one; or a pytree like `grads`.
    metrics: `Metrics` over all workers.
    state: the state of all workers, for `state=` of the next call; every leaf has a
      leading axis of P.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> js.simulate("dense", jnp.ones((3, 2))).total
    Array([3., 3.], dtype=float32)
  """

  total: ArrayTree
  residuals: ArrayTree
  metrics: Metrics
  state: ReduceState


def simulate(
  name: str | Collective,
  grads: ArrayTree,
  residuals: ArrayTree = None,
  *,
  state: ReduceState | None = None,
  **config: Any,
) -> Simulated:
  """Runs one reduction of P workers on one device, under vmap.

  Args:
    name: one of `js.collective_names()`, with options as "spardl:density=0.01", or a
      collective of your own.
    grads: f32[P, n], one gradient per worker; or a pytree of arrays with a leading axis
      of P workers.
    residuals: the residuals before the step, like `grads`; zeros by default.
    state: the state that an earlier call returned, instead of `residuals`.
    **config: the options of the collective.

  Returns:
    `Simulated`: total, residuals, metrics and state.

  Raises:
    ValueError: for shapes that do not fit, for both `residuals` and `state`, or for
      rejected options.
    TypeError: for gradients that are not floating point.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> grads = jnp.array([[4.0, 0.0, 1.0, 0.0], [0.0, 1.0, 1.0, 3.0]])
    >>> out = js.simulate("spardl", grads, k=2)
    >>> out.total, out.residuals
    (Array([4., 0., 0., 3.], dtype=float32), Array([[0., 0., 1., 0.],
           [0., 1., 1., 0.]], dtype=float32))
    >>> js.simulate("spardl", jnp.zeros((2, 4)), state=out.state, k=2).total
    Array([0., 1., 2., 0.], dtype=float32)
  """
  rows = _rows_of("grads", grads)
  collective = make_collective(name, **config).for_leaves(
    # The shapes at one worker, which some collectives need.
    tuple(jnp.shape(x)[1:] for x in jax.tree.leaves(grads))
  )
  if state is None:
    state = initial(collective, *rows.shape)
    if residuals is not None:
      shapes, expected = map(flatten.leaf_shapes, (residuals, grads))
      if shapes != expected:
        raise ValueError(
          f"simulate: residuals have the shapes {shapes} by name, grads {expected}: give both the same"
        )
      # Flat vectors are one group of leaves, number 0.
      if state.carried.residual[0] is None:
        raise ValueError(
          f"simulate: {collective.name} keeps no residual, leave residuals out"
        )
      carried = state.carried._replace(residual=(_rows_of("residuals", residuals),))
      state = state._replace(carried=carried)
  elif residuals is not None:
    raise ValueError(
      "simulate: give residuals or state, not both: a state holds its own residuals"
    )
  totals, state = reduce_all(collective, rows, state)
  total, residuals, metrics = _results(grads, totals, state)
  return Simulated(total, residuals, metrics, state)


class Contraction(NamedTuple):
  """How much steps leave out; with accumulators acc_w = gradient_w + residual_w and the delivered mean d = total / P.

  Attributes:
    left_out: f32[steps], ‖mean acc − d‖² / ‖mean acc‖². A step of a δ-contraction has
      at most 1 − δ.
    xi: f32[steps], ‖top-k(mean acc) − d‖ / ‖mean gradient‖, with all n entries for a
      collective without k. Ok-Topk converges if these numbers have a small bound ξ
      (Ok-Topk, Assumption 1).
  """

  left_out: jax.Array
  xi: jax.Array


def contraction(name: str | Collective, grads: ArrayTree, **config: Any) -> Contraction:
  """How much each step leaves out when a collective reduces recorded gradients, one step after the other.

  Args:
    name: one of `js.collective_names()`, or a collective of your own.
    grads: f32[steps, P, n], the gradients of P workers; or a pytree of arrays with
      these two leading axes. Where the learning rate changes, multiply the gradients of
      each step by it.
    **config: the options of the collective.

  Returns:
    A `Contraction`, f32[steps] each: `left_out`, the part of ‖mean accumulator‖² that
    is not delivered, and `xi`, the error of the delivered mean against an exact top-k,
    relative to the norm of the mean gradient.

  Raises:
    ValueError, TypeError: as `js.simulate`; ValueError if there is no step.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> js.costs.contraction("topka", jnp.array([[[4.0, 3.0]], [[0.0, 0.0]]]), k=1).left_out  # 3²/5², then nothing
    Array([0.36, 0.  ], dtype=float32)
  """
  leaves = jax.tree.leaves(grads)
  if any(not jnp.shape(leaf)[:1] or not len(leaf) for leaf in leaves):
    raise ValueError("contraction: grads have no step, give a leading axis of them")
  # All steps have the shapes of the first, so its check suffices.
  _rows_of("grads", jax.tree.map(lambda leaf: leaf[0], grads))
  rows = jax.vmap(_flat_rows)(grads)
  collective = make_collective(name, **config).for_leaves(
    tuple(jnp.shape(x)[2:] for x in jax.tree.leaves(grads))
  )
  _, workers, n = rows.shape
  k = collective.entries(n)

  def step(state: ReduceState, grads: jax.Array) -> tuple[ReduceState, Contraction]:
    # f32[P, n]; flat vectors are one group of leaves, number 0.
    residual = state.carried.residual[0]
    # The mean over workers of the accumulators, from which a collective selects.
    mean = jnp.mean(grads if residual is None else grads + residual, axis=0)
    totals, state = reduce_all(collective, grads, state)
    # Some collectives (A2SGD) return other totals to each worker: the mean counts.
    delivered = jnp.mean(totals, axis=0) / workers
    # The k entries that an exact top-k of the mean accumulator would deliver.
    largest = jax.lax.top_k(jnp.abs(mean), k)[1]
    missing = jnp.zeros(n).at[largest].set(mean[largest]) - delivered
    left_out = _ratio(mean - delivered, mean) ** 2
    xi = _ratio(missing, jnp.mean(grads, axis=0))
    return state, Contraction(left_out, xi)

  return jax.lax.scan(step, initial(collective, workers, n), rows)[1]


def _ratio(x: jax.Array, y: jax.Array) -> jax.Array:
  """‖x‖ / ‖y‖; 0 if both are 0."""
  norm = jnp.linalg.norm(x)
  # 0 / 0 counts as 0; x / 0 stays Inf.
  return jnp.where(norm == 0, 0.0, norm / jnp.linalg.norm(y))


@jax.jit
def _results(
  grads: ArrayTree, totals: jax.Array, state: ReduceState
) -> tuple[Any, Any, Metrics]:
  """(total, residuals, metrics) of a `Simulated`, from totals f32[P, n] and the next state of all workers."""
  _, restore = flatten.flatten(
    jax.tree.map(lambda leaf: leaf[0].astype(jnp.float32), grads)
  )
  # A state of flat vectors has one group; None for a collective without a residual.
  residual = state.carried.residual[0]
  residuals = jnp.zeros_like(totals) if residual is None else residual
  # Worker 0's total stands for all: they are equal but for collectives such as A2SGD.
  return restore(totals[0]), jax.vmap(restore)(residuals), summary([state])


@jax.jit
def _flat_rows(tree: ArrayTree) -> jax.Array:
  return jax.vmap(lambda row: flatten.flatten(row)[0])(tree)


def _rows_of(what: str, tree: ArrayTree) -> jax.Array:
  """f32[P, n] of a pytree with a leading axis of P workers, each row flattened; `what` names the tree in errors.

  Raises:
    ValueError: for a leaf without the same leading axis, or no entries.
    TypeError: for a leaf that is not floating point.
  """
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  shapes = [jnp.shape(leaf) for _, leaf in leaves]
  workers = next((shape[0] for shape in shapes if shape), 0)
  for path, leaf in leaves:
    name = what + jax.tree_util.keystr(path)
    shape = jnp.shape(leaf)
    dtype = jnp.result_type(leaf)
    # An empty path: the tree is one array, which must be [P, n] itself.
    if not path and (len(shape) != 2 or not jnp.size(leaf)):
      raise ValueError(
        f"simulate: {name} have shape {shape}, give [workers, entries] with at least one of each"
      )
    if shape[:1] != (workers,) or not workers:
      raise ValueError(
        f"simulate: {name} has shape {shape}, give it a leading axis of the same {workers} workers"
      )
    if not jnp.issubdtype(dtype, jnp.floating):
      raise TypeError(
        f"simulate: {name} has dtype {dtype.name}, give a floating-point one"
      )
  flatten.check_entries(tree)
  return _flat_rows(tree)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def initial(collective: Collective, workers: int, n: int) -> ReduceState:
  """The states of all workers before the first step for n entries, each array with a leading axis of workers."""
  state = init_state(collective, n, workers)
  row = lambda leaf: jnp.broadcast_to(leaf, (workers, *leaf.shape))
  return jax.tree.map(row, state)


@functools.partial(jax.jit, static_argnums=0)
def reduce_all(
  collective: Collective, grads: jax.Array, state: ReduceState
) -> tuple[jax.Array, ReduceState]:
  """`reduce_step` at every worker, under vmap: the totals of all workers, f32[P, n], and their next states.

  Args:
    collective: the collective that reduces.
    grads: f32[P, n].
    state: of all workers, every array with a leading axis of P.
  """
  # `held`: the arrays of the state have rows of all workers, not of one.
  checks.check_workers(state, len(grads), held=len(grads))
  # `eval_shape` computes no array. A state of other options may have other shapes.
  expected = jax.eval_shape(
    functools.partial(initial, collective, *grads.shape)
  ).carried
  if flatten.leaf_shapes(state.carried) != flatten.leaf_shapes(expected):
    raise ValueError(
      f"simulate: the state is not one of {collective.name} with these options and {grads.shape[1]} entries a worker"
    )
  # The program of a worker on a mesh: vmap takes the place of messages between devices.
  worker = functools.partial(reduce_step, collective, SimComm(_AXIS))
  return jax.vmap(worker, axis_name=_AXIS)(grads, state)
