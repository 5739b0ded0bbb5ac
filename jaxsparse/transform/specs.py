"""How an optax state is sharded: `js.specs`."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from optax import OptState

from jaxsparse._compat import AxisName, names_of
from jaxsparse.arrays.flatten import leaves_by_name
from jaxsparse.transform.checks import check_alive, check_layout
from jaxsparse.transform.state import (
  is_reduce_state,
  local_states,
  reduce_rows,
  reduce_states,
  worker_rows,
)
from jaxsparse.types import SpecTree


def specs(state: OptState, axis: AxisName) -> SpecTree:
  """The `PartitionSpec` of every leaf of an optax state, for the in_specs and out_specs of your own shard_map.

  Residuals, counters and other per-worker arrays get `P(axis)`; what is the same on
  every worker gets `P()`. Other axes of a mesh lie inside a worker: map over the
  workers alone, `jax.shard_map(..., axis_names={axis})`.

  Args:
    state: an optax state, as arrays or as `jax.ShapeDtypeStruct`.
    axis: the name of the mesh axis of the workers, or a tuple of names.

  Raises:
    ValueError: if a wrapper that works with the gradients of one worker
      (optax.MultiSteps, optax.contrib.sam) is around a jaxsparse transform, or a
      transformation that keeps arrays comes before it in its chain: their states would
      be stored as if they were replicated. If the totals of a collective differ between
      workers (A2SGD), and what follows it is not inside `js.local_steps`. If arrays
      were cut or padded.

  Example:
    >>> import jax, jax.numpy as jnp, optax, jaxsparse as js
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("workers",))
    >>> tx = optax.chain(js.spardl_transform("workers", density=0.5), optax.sgd(0.1, momentum=0.9))
    >>> spec = js.specs(js.init(tx, jnp.zeros(8), mesh, axis="workers"), axis="workers")
    >>> spec[0].carried.residual, spec[1][0].trace
    ((P('workers',),), P())
  """
  return placed(state, axis, inside=False)


def placed(state: OptState, axis: AxisName, inside: bool = True) -> SpecTree:
  """`specs` that may also name axes inside a worker, over which a shard_map of the workers alone does not map.

  Only specs of a `ReduceState` name these axes. Arrays of other transformations keep
  the shardings that they have inside a worker.

  Args:
    state: an optax state, as arrays or as shapes.
    axis: the axis of the workers, or a tuple of axes.
    inside: whether specs also name the axes inside a worker.

  Raises:
    ValueError: as `specs`.
  """
  replicated = PartitionSpec()
  _check_wrappers(state)
  _check_chains(state)
  check_alive({"state": state})
  check_layout(state)
  _check_differing(state)

  def spec_of(subtree: OptState, row: bool) -> SpecTree:
    # `row`: the subtree has a row for each worker. Its spec names the axis of workers
    # alone: `Engine.shardings` keeps the shardings that leaves have inside a worker.
    if row:
      return jax.tree.map(lambda _: PartitionSpec(axis), subtree)
    if not is_reduce_state(subtree):
      return replicated
    devices = subtree.layout.shards.names if inside and subtree.layout.shards else ()
    # Workers come first, so that the rows of a worker's devices lie together.
    own_spec = PartitionSpec((*names_of(axis), *devices))
    # Shared arrays are equal on all workers, and each device of a worker has a part.
    same = PartitionSpec(devices) if devices else replicated
    # The specs of arrays of each worker's own, of shared arrays, and of the layout.
    return subtree.map_arrays(lambda _: own_spec, lambda _: same, lambda _: replicated)

  return jax.tree.map(spec_of, state, worker_rows(state), is_leaf=is_reduce_state)


def _check_differing(state: OptState) -> None:
  """Raises ValueError where arrays of other transformations would be computed from totals that differ between workers.

  Inner optimizers of local steps, whose states have a row for each worker, may differ.
  """
  collectives = [
    collective
    for reduce_state, row in reduce_rows(state)
    if not row
    for collective in reduce_state.collectives
  ]
  differing = [
    collective for collective in collectives if not collective.traits.replicates
  ]
  other_arrays = [
    leaf
    for leaf in jax.tree.leaves(state, is_leaf=is_reduce_state)
    if not is_reduce_state(leaf)
  ]
  # Scalars, as counts of steps, are computed from no total.
  if differing and any(jnp.ndim(leaf) for leaf in other_arrays):
    name = differing[0].name
    raise ValueError(
      f"{name}: its totals differ between workers, and so would parameters and optimizer states that follow: give each "
      f"worker its own, js.local_steps(optax.chain(js.{name}_transform(axis), optimizer), "
      "optax.chain(js.dense_transform(axis), optax.sgd(1.0)), every=100)"
    )


# State of an optax wrapper -> (why it is refused, finder of the states inside that make
# it wrong: the wrapper is refused if the finder returns any).
_WRAPPERS: dict[type, tuple[str, Callable[[Any], list[Any]]]] = {
  optax.MultiStepsState: (
    "optax.MultiSteps around a jaxsparse transform accumulates the gradients of one worker as if they were those of "
    "all: put it after, as in optax.chain(js.spardl_transform(...), optax.MultiSteps(opt, every_k_schedule=k))",
    reduce_states,
  ),
  optax.ApplyIfFiniteState: (
    "optax.apply_if_finite around a jaxsparse transform looks at the gradients of one worker, and so workers decide "
    "differently: put it after. A step with NaN or Inf is skipped by every worker in any case",
    reduce_states,
  ),
  optax.contrib.SAMState: (
    "optax.contrib.sam around a jaxsparse transform takes its adversarial steps along the gradient of one worker: put "
    "it after, optax.chain(js.spardl_transform(...), optax.contrib.sam(opt, adversary))",
    reduce_states,
  ),
  optax.contrib.MechanicState: (
    "optax.contrib.mechanize around a jaxsparse transform tunes its rate by the gradient of one worker: put it after, "
    "optax.chain(js.spardl_transform(...), optax.contrib.mechanize(opt))",
    reduce_states,
  ),
  optax.LookaheadState: (
    "optax.lookahead around js.local_steps: leave it out, the anchor of local steps is its slow parameters. With "
    "outer=optax.chain(js.dense_transform(...), optax.sgd(0.5)) it moves by half",
    local_states,
  ),
}


def _check_wrappers(state: OptState) -> None:
  """Raises ValueError for wrappers of optax that must not be around a jaxsparse transform or local steps.

  Most look at local gradients, so that what they keep would differ between workers.
  `_WRAPPERS` has the states of these wrappers by type, each with the error and a
  function that lists the states inside for which the wrapper is wrong.
  """
  for leaf in jax.tree.leaves(state, is_leaf=lambda leaf: type(leaf) in _WRAPPERS):
    if type(leaf) in _WRAPPERS:
      message, find_refused = _WRAPPERS[type(leaf)]
      if find_refused(tuple(leaf)):
        raise ValueError(message)
      # Wrappers may be nested. As a tuple, since the wrapper itself is a leaf here.
      _check_wrappers(tuple(leaf))


def _check_chains(state: OptState, averaged: frozenset[str] = frozenset()) -> None:
  """Refuses arrays before ours in a chain: they are made of local gradients, so they differ between workers.

  Args:
    state: the state of a chain, or of a wrapper at any depth around one.
    averaged: the names of the leaves that a jaxsparse transform has averaged before.
  """
  for leaf in jax.tree.leaves(state, is_leaf=_is_chain):
    if _is_chain(leaf):
      _check_chain(leaf, averaged)


def _is_chain(state: OptState) -> bool:
  """Whether it is the state of optax.chain or optax.named_chain, with a jaxsparse transform inside."""
  return type(state) in (tuple, OrderedDict) and bool(reduce_states(state))


def _check_chain(chain: OptState, averaged: frozenset[str]) -> None:
  """`_check_chains` of the state of one chain: `averaged` are the names of leaves that were averaged before it."""
  # (name or number, state) of each transformation.
  named = chain.items() if isinstance(chain, OrderedDict) else enumerate(chain)
  states = list(named)
  for position, (name, state) in enumerate(states):
    # The leaves that this transformation, or one inside it, averages.
    reduced = _reduced_leaves(state)
    # Leaves that this or a later transformation averages and none has before: their
    # gradients are still those of one worker here.
    local = _reduced_leaves([later for _, later in states[position:]]) - averaged
    arrays = leaves_by_name(state).items()
    # A transformation that contains a jaxsparse transform may hold chains itself.
    if reduced:
      _check_chains(state, averaged)
    elif any(_is_local(path, leaf, local, averaged) for path, leaf in arrays):
      raise ValueError(
        f"transformation {name!r} of the chain ({type(state).__name__}) keeps arrays and comes before the jaxsparse "
        "transform: the arrays would be computed from the gradients of one worker and differ between workers, but be "
        "stored as replicated. Put the jaxsparse transform first"
      )
    averaged |= reduced


def _reduced_leaves(tree: OptState) -> frozenset[str]:
  """The names of the leaves that the jaxsparse transforms in a tree of states reduce."""
  return frozenset(name for state in reduce_states(tree) for name, _ in state.leaves)


def _is_local(
  path: str, leaf: jax.Array, local: frozenset[str], averaged: frozenset[str]
) -> bool:
  """Whether an array in the state of another transformation is made of gradients that are not averaged yet.

  Scalars may be rates, or counts of steps, which are the same on every worker; a
  boolean scalar may say whether gradients are finite. Before any leaf is averaged,
  every array counts; after that, an array counts if its path ends with the name of a
  local leaf.

  Args:
    path: of the array in the state.
    leaf: the array.
    local: names of leaves whose gradients are still those of one worker.
    averaged: names of leaves that a transform has averaged before.
  """
  of_gradients = jnp.ndim(leaf) > 0 or jnp.result_type(leaf) == jnp.bool_
  return of_gradients and bool(local) and (not averaged or path.endswith(tuple(local)))
