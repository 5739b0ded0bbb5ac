"""Momentum of optimizers of the workers' own, averaged now and then (DES-LOC, Iacob et al., 2025)."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import GetAttrKey, keystr
from optax import OptState

from jaxsparse._compat import AxisName, varying
from jaxsparse.collectives import make_collective
from jaxsparse.comm import axes_of
from jaxsparse.comm.replication import mark_total
from jaxsparse.transform.state import ReduceState, idle_step, local_states
from jaxsparse.transform.update import collective_transform
from jaxsparse.transform.wrapped import PLACEHOLDER
from jaxsparse.types import MOST_STEPS, ArrayTree, Comm, check_whole

_FIELDS = ("mu", "trace")  # fields of optax's states that hold a momentum
_Momentum = dict[str, optax.Updates]  # each momentum by its path in an inner state


class AveragedState(NamedTuple):
  """The state of `js.average_momentum`.

  Attributes:
    inner: the state of the inner optimizer.
    means: the state of the transform that averages, for each momentum in `inner` by its
      path.
    since: i32[], steps since momentum was averaged.
  """

  inner: OptState
  means: dict[str, ReduceState]
  since: jax.Array


def average_momentum(
  inner: optax.GradientTransformation,
  axis: AxisName | Comm,
  *,
  every: int,
  dtype: Literal["float32", "bfloat16"] = "bfloat16",
) -> optax.GradientTransformationExtraArgs:
  """An optimizer of each worker's own whose momentum becomes its mean over the workers in every K-th step (DES-LOC).

      m_w ← mean_v m_v          every K steps; in between as `inner` says

  Workers that exchange updates (`js.local_steps`) each have the momentum of their own
  gradients, whose noise has P times the variance of that of the mean gradient. Updates
  that are normalized by it differ, and their mean is shorter than each:
  `js.norm_restored` restores its length for two words a leaf. Momentum is what optax's
  states call `mu` or `trace`: of SGD, Adam, Lion, Muon; there is an all-reduce for
  each. Second moments stay each worker's own: those of `js.scale_by_window_adam` are
  about alike.

  Args:
    inner: any optax optimizer with such a momentum.
    axis: the name of the shard_map axis of the workers, a tuple of such names, or a
      comm.
    every: K, steps of the worker; it need not be a multiple of the H of local steps. A
      skipped step does not count.
    dtype: in which momentum is sent and added. Nothing else of it is rounded, and there
      is no residual.

  Returns:
    An optimizer to be the `inner` of `js.local_steps`.

  Raises:
    ValueError: for an `every` that is no whole number from 1 to 2³¹ − 1, or a dtype
      outside its choices; when used, if `inner` has no momentum, or local steps.

  Example:
    >>> import optax, jaxsparse as js
    >>> inner = js.average_momentum(optax.contrib.muon(0.02), "workers", every=16)
    >>> signs = optax.chain(js.onebit_transform("workers"), optax.sgd(1.0))
    >>> tx = js.local_steps(inner, signs, every=1, apply_residual=True)
  """
  check_whole("average_momentum", 1, MOST_STEPS, every=every)
  mean = collective_transform(make_collective("dense", dtype=dtype), axis)
  inner = optax.with_extra_args_support(inner)

  def init(params: optax.Params) -> AveragedState:
    state = inner.init(params)
    momentum = _momentum_of(state, params)
    _check_inner(state, momentum)
    # One exchange for each momentum: a chain may have several, of different leaves.
    means = {path: mean.init(tree) for path, tree in momentum.items()}
    return AveragedState(state, means, jnp.int32(0))

  def exchange(
    momentum: _Momentum, means: dict[str, ReduceState]
  ) -> tuple[_Momentum, dict[str, ReduceState]]:
    averaged, states = {}, {}
    for path, tree in momentum.items():
      averaged[path], states[path] = mean.update(tree, means[path])
    return averaged, states

  def update(
    grads: optax.Updates,
    state: AveragedState,
    params: optax.Params | None = None,
    **extra: ArrayTree,
  ) -> tuple[optax.Updates, AveragedState]:
    # The optimizer steps first, so that the momentum of this step is averaged.
    updates, after = inner.update(grads, state.inner, params, **extra)
    # Without an exchange the counters note a step without messages, as not skipped: if
    # the workers skip it, local steps undo the whole state.
    skipped = jnp.bool_(False)
    keep = lambda momentum, means: (momentum, idle_step(means, skipped))
    # `since` counts the steps since the last average. It is state of a worker's own but
    # equal on all, which skip the same steps; `mark_total` declares that.
    due = mark_total(state.since + 1 >= int(every), axes_of(mean.comm))
    momentum, means = varying.cond(
      due, exchange, keep, _momentum_of(after, grads), state.means
    )
    after = _with_momentum(after, momentum)
    return updates, AveragedState(after, means, jnp.where(due, 0, state.since + 1))

  return optax.GradientTransformationExtraArgs(init, update)


def _check_inner(state: OptState, momentum: _Momentum) -> None:
  """Raises ValueError for the state of local steps, and for one without momentum."""
  if local_states(state):
    raise ValueError(
      "average_momentum: inner has local steps itself, give js.local_steps(js.average_momentum(...), outer, every=…)"
    )
  if not momentum:
    raise ValueError(
      f"average_momentum: the state of inner has no momentum, no {' or '.join(_FIELDS)}"
    )


def _with_momentum(state: OptState, momentum: _Momentum) -> OptState:
  """The state with the momentum at each path replaced by `momentum[path]`."""
  return jax.tree_util.tree_map_with_path(
    lambda path, part: momentum.get(keystr(path), part),
    state,
    is_leaf=lambda path, _: keystr(path) in momentum,
    is_leaf_takes_path=True,
  )


def _momentum_of(state: OptState, params: ArrayTree) -> _Momentum:
  """Each momentum in the state of an optimizer, a pytree like the parameters, by its path."""
  # _FIELDS are "mu" and "trace". Only fields of named tuples: a parameter may have such
  # a name, too.
  is_field = lambda path, _: isinstance(path[-1], optax.tree_utils.NamedTupleKey)
  fields = lambda tree: [
    pair
    for name in _FIELDS
    for pair in optax.tree.get_all_with_path(tree, name, is_field)
  ]
  # Nor fields of named tuples of the parameters, of which a state has copies.
  tuple_name = lambda pair: pair[0][-1].tuple_name
  of_params = set(map(tuple_name, fields(params)))
  trees = [pair for pair in fields(state) if tuple_name(pair) not in of_params]
  # Momentum without entries, as of masked leaves, needs no exchange. Placeholders, with
  # which optax.tree_map_params inits instead of arrays, count as momentum.
  has_entries = lambda tree: (
    isinstance(tree, PLACEHOLDER) or any(leaf.size for leaf in jax.tree.leaves(tree))
  )
  # JAX's keys in place of optax's, which have the names of named tuples, too.
  key_of = lambda key: GetAttrKey(key.name) if is_field([key], None) else key
  path_of = lambda path: keystr(tuple(map(key_of, path)))
  return {path_of(path): tree for path, tree in trees if has_entries(tree)}
