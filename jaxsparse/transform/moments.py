"""Moments of optimizers of the workers' own, averaged now and then (DES-LOC, Iacob et al., 2025)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxsparse.collectives import Collective
from jaxsparse.collectives._base import check_whole
from jaxsparse.collectives._wrapped import Forgetful
from jaxsparse.comm import axes_of, varying
from jaxsparse.comm.replication import mark_total
from jaxsparse.transform.metrics import count_idle_step
from jaxsparse.transform.state import ReduceState, parameter_of
from jaxsparse.transform.update import check_transform

_AVERAGING = ("dense", "nbit", "qsgd")


class MomentsState(NamedTuple):
  """The state of `js.average_moments`.

  Attributes:
    inner: the state of the inner optimizer.
    means: the state of the transform, for the moments of each kind by their path in `inner`.
    since: i32[], steps since moments were averaged.
  """

  inner: Any
  means: dict[str, ReduceState]
  since: jax.Array


def average_moments(
  inner: optax.GradientTransformation, transform: optax.GradientTransformation, *, every: int
) -> optax.GradientTransformationExtraArgs:
  """An optimizer of each worker's own whose moments become their mean over the workers in every K-th step (DES-LOC).

      m_w ← mean_v m_v          every K steps; in between as `inner` says

  Workers that exchange updates (`js.local_steps`) each have the momentum of their own gradients, with P times the noise
  of the mean gradient. Muon orthogonalizes it, and many workers with small batches learn less so than one Muon behind a
  dense all-reduce. Averaged momentum has a P-th of that variance, of which after k steps a share of β²ᵏ is left: with
  Muon's β = 0.95 half after 7 steps.

  Moments are the floating-point arrays in the state of `inner` that lie there as the parameters do, in their shapes.

  Args:
    inner: any optax optimizer.
    transform: averages all entries: `js.dense_transform`, with `dtype="bfloat16"` for half of the words, or
      `js.nbit_transform` with 8 or 4 bits, or `js.qsgd_transform`. There is no residual: what it rounds off is lost.
    every: K, a whole number from 1 up; it need not be a multiple of the H of local steps.

  Returns:
    An optimizer for `js.local_steps`.

  Raises:
    TypeError: for a transformation that is not a jaxsparse transform.
    ValueError: for such an `every`, or another transform; when used, if `inner` has no moments.

  Example:
    >>> import optax, jaxsparse as js
    >>> mean = js.nbit_transform("workers", bits=8)
    >>> inner = js.average_moments(optax.contrib.muon(0.02), mean, every=16)
    >>> signs = optax.chain(js.onebit_transform("workers"), optax.sgd(1.0))
    >>> tx = js.local_steps(inner, signs, every=1, apply_residual=True)
  """
  check_whole("average_moments", 1, every=every)
  mean = check_transform("average_moments", transform).with_collectives(_without_residuals)
  inner = optax.with_extra_args_support(inner)

  def init(params: optax.Params) -> MomentsState:
    state = inner.init(params)
    means = {kind: mean.init(tree) for kind, tree in _moments(state, params).items()}
    if not means:
      raise ValueError("average_moments: inner has no moments, no floating-point arrays like the parameters")
    return MomentsState(state, means, jnp.int32(0))

  def exchange(moments: dict[str, Any], means: dict[str, ReduceState]) -> tuple[dict[str, Any], dict[str, ReduceState]]:
    done = {kind: mean.update(tree, means[kind]) for kind, tree in moments.items()}
    return {kind: tree for kind, (tree, _) in done.items()}, {kind: state for kind, (_, state) in done.items()}

  def update(
    grads: optax.Updates, state: MomentsState, params: Any = None, **extra: Any
  ) -> tuple[optax.Updates, MomentsState]:
    updates, after = inner.update(grads, state.inner, params, **extra)
    keep = lambda moments, means: (moments, count_idle_step(means, jnp.bool_(False)))
    due = mark_total(state.since + 1 >= every, axes_of(mean.comm))  # workers skip the same steps
    moments, means = varying.cond(due, exchange, keep, _moments(after, grads), state.means)
    return updates, MomentsState(_with_moments(after, moments), means, jnp.where(due, 0, state.since + 1))

  return optax.GradientTransformationExtraArgs(init, update)


def _without_residuals(collectives: list[Collective]) -> list[Collective]:
  """The collectives without their residuals, which must average all entries."""
  for collective in collectives:
    if collective.name not in _AVERAGING:
      raise ValueError(
        f"average_moments: {collective.name} does not average all entries at once, choose one of "
        + ", ".join(_AVERAGING)
      )
  return [Forgetful(collective=collective) for collective in collectives]


def _moments(state: Any, params: Any) -> dict[str, Any]:
  """The moments of each kind by its path, as pytrees like the parameters, with `MaskedNode` where there is none."""
  shapes = {path: np.shape(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
  found: dict[str, dict[Any, Any]] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(state):
    name = parameter_of(path, np.shape(leaf), shapes)
    if name is not None and jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
      found.setdefault(jax.tree_util.keystr(path[: len(path) - len(name)]), {})[name] = leaf
  structure = jax.tree.structure(params)
  masked = optax.MaskedNode()
  return {
    kind: jax.tree.unflatten(structure, [own.get(name, masked) for name in shapes]) for kind, own in found.items()
  }


def _with_moments(state: Any, moments: dict[str, Any]) -> Any:
  """A state of the inner optimizer with these moments."""
  found = {
    kind + jax.tree_util.keystr(name): leaf
    for kind, tree in moments.items()
    for name, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }
  return jax.tree_util.tree_map_with_path(lambda path, leaf: found.get(jax.tree_util.keystr(path), leaf), state)
