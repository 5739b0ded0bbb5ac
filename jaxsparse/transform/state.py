"""What is carried from step to step: how it is made, checked and sharded; `telemetry` reads it.

Everything lives in the optax state as arrays. Inside shard_map a worker sees its own part; outside, per-worker arrays
of all workers lie one after the other along their leading axis, sharded over it, and shared ones are replicated.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jaxsparse._compat import AxisName, here
from jaxsparse.transform.local import PerWorker
from jaxsparse.types import Counters, State


class Layout(NamedTuple):
  """What a state was made for, as values: shapes alone do not tell whether a restored array was cut or padded.

  Attributes:
    workers: i32[], number of workers P.
    entries: u32[], number of gradient entries n; 2³² − 1 stands for that many or more.

  Example:
    >>> Layout.of(4, 100).workers
    Array(4, dtype=int32)
  """

  workers: jax.Array
  entries: jax.Array

  @classmethod
  def of(cls, workers: int, entries: int) -> Self:
    """The layout of a state of `workers` workers and `entries` gradient entries."""
    return cls(jnp.int32(workers), jnp.uint32(min(entries, 2**32 - 1)))


class ReduceState(NamedTuple):
  """The optax state of a jaxsparse transform.

  Attributes:
    carried: the collective's own `State`.
    counters: `Counters` of the last step, [1] at each worker and [P] outside shard_map.
    layout: the `Layout` that the state was made for, the same on every worker.

  Example:
    >>> import jax, jax.numpy as jnp, jaxsparse as js
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("workers",))
    >>> isinstance(js.init(js.dense_transform("workers"), jnp.zeros(8), mesh), js.ReduceState)
    True
  """

  carried: State
  counters: Counters
  layout: Layout


def specs(state: Any, axis: AxisName) -> Any:
  """The `PartitionSpec` of every leaf of an optax state, for the in_specs and out_specs of your own shard_map.

  Residuals, counters and other per-worker arrays get `P(axis)`; what is the same on every worker gets `P()`.

  Args:
    state: an optax state, as arrays or as `jax.ShapeDtypeStruct`.
    axis: the name, or tuple of names, of the mesh axis that the workers lie along.

  Raises:
    ValueError: if optax.MultiSteps wraps a jaxsparse transform, or a transformation that keeps arrays comes before it
      in its chain: both would keep what comes of the gradients of one worker as if it were replicated. If workers have
      states of their own (A2SGD) and this one was not made with `js.init`. If arrays were cut or padded since.

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
  _check_chains(state)
  check_alive({"state": state})
  check_layout(state)
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
    counters, layout = (
      jax.tree.map(lambda _, spec=spec: spec, part)
      for part, spec in ((node.counters, per_worker), (node.layout, replicated))
    )
    return ReduceState(carried._replace(shared=shared, due=due), counters, layout)

  return jax.tree.map(of_node, state, is_leaf=_is_reduce_state)


def reduce_states(state: Any) -> list[ReduceState]:
  """Every `ReduceState` within an optax state."""
  return [node for node in jax.tree.leaves(state, is_leaf=_is_reduce_state) if _is_reduce_state(node)]


def labelled(state: Any) -> dict[str, ReduceState]:
  """Every `ReduceState` within an optax state by its label: that of `optax.multi_transform`, else its path."""
  leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_reduce_state)
  found = [(path, node) for path, node in leaves if _is_reduce_state(node)]
  labels = ["/".join(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)) for path, _ in found]
  if len(set(labels)) < len(labels) or "" in labels:
    labels = [jax.tree_util.keystr(path) for path, _ in found]
  return dict(zip(labels, (node for _, node in found), strict=True))


def differs(state: Any) -> bool:
  """Whether the state is one of a collective whose total differs between workers."""
  return any(node.carried.due is not None for node in reduce_states(state))


def in_groups(state: Any) -> bool:
  """Whether the state is one of `js.bucketed_transform`: a residual for each of several communications."""
  return any(isinstance(node.carried.residual, tuple) for node in reduce_states(state))


def due(state: Any) -> jax.Array:
  """Whether such workers are to average their parameters now, bool[]; inside shard_map."""
  return jnp.any(jnp.array([node.carried.due for node in reduce_states(state) if node.carried.due is not None]))


def why_none(state: Any) -> str:
  """Why an optax state holds no `ReduceState`, for an error."""
  plain = [node for node in jax.tree.leaves(state, is_leaf=_is_plain) if _is_plain(node)]
  if plain:
    return (
      "the optimizer state is made of plain dicts and lists, as a checkpoint is when Orbax restores it without a "
      "target: restore it as a state of js.init(tx, params, mesh), or of its jax.eval_shape"
    )
  return (
    "the optimizer state holds no jaxsparse transform, so nothing would average the gradients of the workers: start "
    "the chain with one, js.dense_transform for the plain average"
  )


def _is_plain(node: Any) -> bool:
  return isinstance(node, dict) and set(ReduceState._fields) <= set(node)


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


def check_layout(state: Any, workers: int | None = None) -> None:
  """Checks that the arrays are those of as many workers as the state was made for; abstract states pass.

  Args:
    state: the state of all workers.
    workers: how many there are; None for as many as the arrays have rows, where they have several.

  Raises:
    ValueError: if they are not, naming both numbers: Orbax cuts and pads arrays, silently, where it is not strict.
  """
  for node in reduce_states(state):
    if isinstance(node.layout.workers, jax.core.Tracer) or not hasattr(node.layout.workers, "__array__"):
      continue  # under a trace, or a jax.ShapeDtypeStruct
    found, entries = (int(np.max(here(number))) for number in node.layout)
    rows = node.counters.skipped.size
    expected = workers or (rows if rows > 1 else found)
    residuals = node.carried.residual if isinstance(node.carried.residual, tuple) else (node.carried.residual,)
    kept = [residual.size for residual in residuals if residual is not None]
    if found != expected or (len(kept) == len(residuals) and sum(kept) != rows * entries):
      raise ValueError(
        f"the optimizer state was made for {found} workers and {entries} gradient entries, its arrays are those of "
        f"{expected} workers and {sum(kept) // rows or entries} entries: they were cut or padded, as Orbax does "
        "with strict=False, and residuals are lost. Restore it as it was saved"
      )


def check_alive(trees: dict[str, Any]) -> None:
  """Raises ValueError for arrays that an earlier step was given to overwrite: XLA would read freed memory."""
  gone = lambda leaf: isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted()
  if not any(map(gone, jax.tree.leaves(trees))):  # paths take longer than all of them together
    return
  path = next(path for path, leaf in jax.tree_util.tree_leaves_with_path(trees) if gone(leaf))
  raise ValueError(
    f"{path[0].key}{jax.tree_util.keystr(path[1:])} was donated to an earlier step and is gone: go on with the params "
    "and state that the step returned, copy what you want to keep, or give make_train_step donate=False"
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


_WRAPPERS: dict[type, tuple[str, str]] = {
  optax.MultiStepsState: (
    "inner_opt_state",
    "optax.MultiSteps around a jaxsparse transform accumulates the gradients of one worker as if they were those of "
    "all: put it after, as in optax.chain(js.spardl_transform(...), optax.MultiSteps(opt, every_k_schedule=k))",
  ),
  optax.ApplyIfFiniteState: (
    "inner_state",
    "optax.apply_if_finite around a jaxsparse transform looks at the gradients of one worker, and so workers decide "
    "differently: put it after. A step with NaN or Inf is skipped by every worker in any case",
  ),
}


def _check_wrappers(state: Any) -> None:
  """Refuses wrappers that look at local gradients: what they keep would differ between workers."""
  for node in jax.tree.leaves(state, is_leaf=lambda node: type(node) in _WRAPPERS):
    if type(node) in _WRAPPERS:
      inner, why = _WRAPPERS[type(node)]
      if reduce_states(getattr(node, inner)):
        raise ValueError(why)


def _check_chains(state: Any) -> None:
  """A transformation before ours sees local gradients, so its state differs between workers."""
  chains = jax.tree.leaves(state, is_leaf=lambda node: type(node) is tuple and bool(reduce_states(node)))
  for chain in (node for node in chains if type(node) is tuple):
    ours = next(number for number, part in enumerate(chain) if reduce_states(part))
    for number, part in enumerate(chain[:ours]):
      if any(jnp.ndim(leaf) for leaf in jax.tree.leaves(part)):
        raise ValueError(
          f"transformation {number} of the chain ({type(part).__name__}) keeps arrays and comes before the jaxsparse "
          "transform: they would be made of the gradients of one worker, differ between workers, and be kept as if "
          "they did not. Put the jaxsparse transform first"
        )
    _check_chains(chain[ours])


def _is_reduce_state(node: Any) -> bool:
  return isinstance(node, ReduceState)
