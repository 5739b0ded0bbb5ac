"""What is carried from step to step: how it is made, checked, sharded and read.

Everything lives in the optax state as arrays. Inside shard_map a worker sees its own part; outside, per-worker arrays
of all workers lie one after the other along their leading axis, sharded over it, and shared ones are replicated.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxsparse import perworker
from jaxsparse._compat import AxisName
from jaxsparse.comm import comm_of
from jaxsparse.perworker import PerWorker
from jaxsparse.types import Comm, Counters, State


class ReduceState(NamedTuple):
  """The optax state of a jaxsparse transform.

  Attributes:
    carried: the collective's own `State`.
    counters: `Counters` of the last step, [1] at each worker and [P] outside shard_map.

  Example:
    >>> import jax, jax.numpy as jnp, jaxsparse as js
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("workers",))
    >>> isinstance(js.init(js.dense_transform("workers"), jnp.zeros(8), mesh), js.ReduceState)
    True
  """

  carried: State
  counters: Counters


class Metrics(NamedTuple):
  """What the last step did, over all workers.

  Attributes:
    words_sent: 4-byte words sent by the worker that sent most; 2³² − 1 stands for that many or more.
    words_used: words that carried an entry, mean over workers.
    selected: entries that a worker chose to send, mean over workers.
    delivered: entries of the total that are not left out.
    density: the same as a share of all entries.
    overflow: entries that found no room in a message and stayed in a residual, all workers together; of each worker
      (2³¹ − 1)/P at most are counted.
    imbalance: entries of the fullest worker over the mean, before they are balanced (Ok-Topk).
    balanced: the same afterwards.
    merged: different indices in the fullest block after the sum over teams (SparDL's B-SAG).
    threshold_age: steps since `threshold_period` last made thresholds exact (Ok-Topk).
    skipped: whether the step met NaN or Inf and was skipped by every worker.
    skipped_steps: how many steps have been skipped so far.
    residual_norm: ℓ₂ norm of all residuals together, the mass not yet delivered.
    drift: how far the parameters of the workers are apart (root mean square of the ℓ₂ distance to their mean), for a
      collective whose totals differ; 0 right after they were averaged.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> js.simulate("spardl", jnp.array([[3.0, 4.0, 5.0]]), k=1).metrics.residual_norm
    Array(5., dtype=float32)
  """

  words_sent: jax.Array
  words_used: jax.Array
  selected: jax.Array
  delivered: jax.Array
  density: jax.Array
  overflow: jax.Array
  imbalance: jax.Array
  balanced: jax.Array
  merged: jax.Array
  threshold_age: jax.Array
  skipped: jax.Array
  skipped_steps: jax.Array
  residual_norm: jax.Array
  drift: jax.Array


def metrics(state: Any, over: AxisName | Comm | None = None) -> Metrics:
  """Reads the metrics of the last step from an optax state that holds one jaxsparse transform.

  The residual norm is computed here, when it is read, and not in every step: it would cost a pass over the residual.

  Args:
    state: an optax state, of a chain too. Outside shard_map it is that of all workers.
    over: where `state` is that of one worker, inside shard_map and under MPI, the axis or comm of all of them; every
      worker must call then. None reads what `state` holds.

  Raises:
    ValueError: if the state holds no jaxsparse transform, or more than one.

  Example:
    >>> import jax, jax.numpy as jnp, jaxsparse as js
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("workers",))
    >>> tx = js.spardl_transform("workers", density=0.5)
    >>> js.metrics(js.init(tx, jnp.zeros(8), mesh, axis="workers")).residual_norm
    Array(0., dtype=float32)
  """
  found = reduce_states(state)
  if len(found) != 1:
    raise ValueError(f"metrics: the state holds {len(found)} jaxsparse transforms, give a state that holds one")
  comm = None if over is None else comm_of(over)
  apart = perworker.drift(state, comm) if isinstance(state, PerWorker) else jnp.float32(0)
  return summary(*found[0], comm)._replace(drift=apart)


# How the counters of workers become one number.
_OVER_WORKERS: dict[str, Literal["sum", "max", "mean"]] = {
  "words_used": "mean",
  "selected": "mean",
  "overflow": "sum",
}


def summary(carried: State, counters: Counters, comm: Comm | None = None) -> Metrics:
  """Metrics of the workers whose counters and residuals are here, or with a comm of all its workers."""

  def over_workers(x: jax.Array, op: Literal["sum", "max", "mean"]) -> jax.Array:
    if op == "mean":
      x = x.astype(jnp.float32)
    elif op == "sum" and jnp.issubdtype(x.dtype, jnp.integer):
      x = jnp.minimum(x, jnp.iinfo(x.dtype).max // (x.size * (comm.size if comm else 1)))
    x = getattr(jnp, op)(x)
    if comm is None:
      return x
    return comm.all_reduce(x) / comm.size if op == "mean" else comm.all_reduce(x, op)

  read = {
    name: over_workers(x, _OVER_WORKERS.get(name, "max")) for name, x in counters._asdict().items() if name != "skipped"
  }
  squares = [over_workers(residual**2, "sum") for residual in jax.tree.leaves(carried.residual)]  # of each group
  return Metrics(
    **read,
    skipped=over_workers(counters.skipped.astype(jnp.int32), "max") > 0,
    residual_norm=jnp.sqrt(sum(squares, jnp.float32(0))),
    drift=jnp.float32(0),
  )


def specs(state: Any, axis: AxisName) -> Any:
  """The `PartitionSpec` of every leaf of an optax state, for the in_specs and out_specs of your own shard_map.

  Residuals, counters and other per-worker arrays get `P(axis)`; what is the same on every worker gets `P()`.

  Args:
    state: an optax state, as arrays or as `jax.ShapeDtypeStruct`.
    axis: the name, or tuple of names, of the mesh axis that the workers lie along.

  Raises:
    ValueError: if optax.MultiSteps wraps a jaxsparse transform: it would keep local gradients as if replicated. If
      workers have states of their own (A2SGD) and this one was not made with `js.init`.

  Example:
    >>> import jax, jax.numpy as jnp, optax, jaxsparse as js
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("workers",))
    >>> tx = optax.chain(js.spardl_transform("workers", density=0.5), optax.sgd(0.1, momentum=0.9))
    >>> spec = js.specs(js.init(tx, jnp.zeros(8), mesh, axis="workers"), axis="workers")
    >>> spec[0].carried.residual, spec[1][0].trace
    (P('workers',), P())
  """
  per_worker, replicated = PartitionSpec(axis), PartitionSpec()
  _check_wrappers(state)
  if isinstance(state, PerWorker):
    return jax.tree.map(lambda _: per_worker, state)
  if differs(state) and len(jax.tree.leaves(state)) != len(jax.tree.leaves(reduce_states(state))):
    raise ValueError(
      "the workers of this collective have parameters and optimizer states of their own, which no spec of this state "
      "would keep: make it with js.init and train with js.make_train_step"
    )

  def of_node(node: Any) -> Any:
    if not _is_reduce_state(node):
      return replicated
    carried = jax.tree.map(lambda _: per_worker, node.carried)
    shared, due = jax.tree.map(lambda _: replicated, (node.carried.shared, node.carried.due))
    return ReduceState(carried._replace(shared=shared, due=due), jax.tree.map(lambda _: per_worker, node.counters))

  return jax.tree.map(of_node, state, is_leaf=_is_reduce_state)


def reduce_states(state: Any) -> list[ReduceState]:
  """Every `ReduceState` within an optax state."""
  return [node for node in jax.tree.leaves(state, is_leaf=_is_reduce_state) if _is_reduce_state(node)]


def differs(state: Any) -> bool:
  """Whether the state is one of a collective whose total differs between workers."""
  return any(node.carried.due is not None for node in reduce_states(state))


def in_groups(state: Any) -> bool:
  """Whether the state is one of `js.bucketed_transform`: a residual for each of several communications."""
  return any(isinstance(node.carried.residual, tuple) for node in reduce_states(state))


def due(state: Any) -> jax.Array:
  """Whether such workers are to average their parameters now, bool[]; inside shard_map."""
  return jnp.any(jnp.array([node.carried.due for node in reduce_states(state) if node.carried.due is not None]))


def check_workers(state: ReduceState, workers: int, held: int = 1) -> None:
  """Checks that a state is of `workers` workers, before anything is computed with it.

  Args:
    state: the state, in which the per-worker arrays of `held` workers lie one after the other.
    workers: the workers of the axis.
    held: 1 inside shard_map, all of them outside.

  Raises:
    ValueError: naming the number of workers it was made for.
  """
  found = state.counters.skipped.size * workers // held
  if found != workers:
    raise ValueError(
      f"the optimizer state was made for {found} workers, the axis has {workers}: make a new one with js.init, or "
      f"restore it on {found} workers"
    )


def check_entries(state: ReduceState, n: int) -> None:
  """Checks that the state of one worker is of n gradient entries; raises ValueError naming those it was made for."""
  residual = state.carried.residual
  if residual is not None and residual.size != n:
    raise ValueError(
      f"the optimizer state holds a residual of {residual.size} entries a worker, the gradients have {n}: make a new "
      "one with js.init for these parameters"
    )


def check_kind(state: ReduceState, start: Callable[[], State], what: str) -> None:
  """Checks that a state carries the same things as one that `start` makes.

  Raises:
    ValueError: if it does not, naming `what` it should have been made for.
  """
  structure: Any = jax.tree.structure(jax.eval_shape(start))
  if structure != jax.tree.structure(state.carried):
    raise ValueError(f"the optimizer state is not one of {what} and these options: make a new one with js.init")


def _check_wrappers(state: Any) -> None:
  """MultiSteps accumulates what it is given: local gradients, which no checkpoint of replicated state would hold."""
  wrappers = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, optax.MultiStepsState))
  if any(isinstance(node, optax.MultiStepsState) and reduce_states(node.inner_opt_state) for node in wrappers):
    raise ValueError(
      "optax.MultiSteps around a jaxsparse transform accumulates the gradients of one worker as if they were those of "
      "all: put it after, as in optax.chain(js.spardl_transform(...), optax.MultiSteps(opt, every_k_schedule=k))"
    )


def _is_reduce_state(node: Any) -> bool:
  return isinstance(node, ReduceState)
