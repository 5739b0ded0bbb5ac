"""Local steps: each worker trains with an optimizer of its own, and workers exchange what they have moved now and then.

    local step   θ_w ← θ_w + inner(∇_w(θ_w))                          every step, without a message
    exchange     θ   ← θ + outer(reduce(θ − θ_w)),   θ_w ← θ          every H steps

With a delay the exchange computes an update of the anchor, which is in flight for τ steps before it is applied.

θ, the anchor, is the same on every worker: it is the `params` of the caller. The state of a worker has θ − θ_w, the sum
of its updates with a minus sign, so that it looks like a gradient to `outer`. It is summed up in float32 and not
computed from parameters.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxsparse import flatten
from jaxsparse.collectives._base import check_whole
from jaxsparse.transform import metrics
from jaxsparse.transform import state as states
from jaxsparse.transform.checks import with_check
from jaxsparse.transform.own import own_params, with_residual
from jaxsparse.transform.state import Flight, LocalState


def local_steps(
  inner: optax.GradientTransformation,
  outer: optax.GradientTransformation,
  *,
  every: int | None,
  fragments: int = 1,
  delay: int = 0,
  mixing: float = 0.0,
  apply_residual: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """H steps of each worker's own, then one exchange of what the workers have moved (local SGD, DiLoCo, SparseLoCo).

      θ_w ← θ_w + inner(∇_w(θ_w))                         H times
      θ   ← θ + outer(θ − θ_w),   θ_w ← θ                 the exchange

  `outer` reduces θ − θ_w over the workers as if it were a gradient, so plain optax after the collective descends:
  `optax.sgd(1.0)` moves the parameters to the mean of those of all workers. The state has θ − θ_w of each worker, in
  float32, and the inner state of each; `outer` has the residual and whatever else is the same on every worker.

      total + Σ_w residual_w = Σ_w (θ − θ_w) + Σ_w (residual_w before)      (Law C, at an exchange)

  Updates are those of θ: zeros in local steps, so that parameters are bitwise the same on every worker at all times
  (Law R). The step of `js.make_train_step` takes the gradient at θ_w; in a step of your own take it at
  `js.own_params(params, state)`, and give `update` the anchor:

      grads = jax.grad(loss_fn)(js.own_params(params, state), batch)
      updates, state = tx.update(grads, state, params)

  With `every=1` nothing stays moved, and each step exchanges the updates of the inner optimizers instead of gradients.
  Then `local_steps(optax.sgd(1.0), optax.chain(transform, optax.sgd(η)), every=1)` has the bits of
  `optax.chain(transform, optax.sgd(η))`.

  With `fragments=F` the leaves are shared out to F fragments that are exchanged in turn, one every H/F steps: the
  largest number of words of a step is about 1/F. Each fragment has its own states of `inner` and `outer`, so what needs
  the norm of all leaves comes before: `optax.chain(optax.clip_by_global_norm(1.0), js.local_steps(...))`.

  With `delay=τ` an exchange takes what was moved in the first H − τ steps, and its update u is applied τ steps later.
  Each worker then mixes its own parameters with the anchor (Streaming DiLoCo, Douillard et al., 2025):

      u = outer(θ − θ_w),    τ steps later    θ ← θ + u,   θ_w ← α θ_w + (1 − α) θ

  Law C holds at the exchange. The mixture is as published: it drops a share of 1 − α of the τ local steps after the
  exchange, and keeps α of how far a worker was from the anchor, which is exchanged again.

  With `apply_residual` a worker goes on from θ minus its residual r_w instead of θ: from parameters with all of its own
  updates in them, delivered or not (the local models of CSER, Xie et al., 2020). Then a gradient is not late because
  its entries wait to be delivered, and a sparse exchange learns faster, above all with `every=1`:

      θ   ← θ + outer(θ − θ_w),   θ_w ← θ − r_w           (θ − θ_w includes the residual from now on)

  With `optax.sgd(1.0)` outside, the mean of θ_w over the workers moves as if everything were delivered at once. At the
  end `js.flush` gives the update that takes the anchor there.

  A worker whose gradient holds NaN or Inf leaves out a local step. In a step with an exchange all workers then skip the
  exchange, keep what they have moved, and exchange in the next step; with `every=1` the updates of this step are lost,
  unless `apply_residual` keeps them as moved.

  Args:
    inner: any optax optimizer, run by each worker on its own gradients. It may hold a jaxsparse transform without a
      residual, which every worker calls in every step; of A2SGD, whose totals differ between workers, it must.
    outer: a chain whose first transformation is a jaxsparse one, then plain optax.
    every: H, the number of steps from one exchange to the next; None exchanges only when `step.synchronize(params,
      state)` is called, which `tx.update(grads, state, params, synchronize=True)` does without a local step. An update
      in flight is applied then, and all workers go on from the anchor.
    fragments: F, 1 … H. Leaves stay whole: the largest first, each goes to the fragment with the fewest entries so far.
    delay: τ, less than H/F, the steps between an exchange and its use. A step that is compiled as one program still
      ends after its messages.
    mixing: α in [0, 1), the weight of a worker's own parameters; 0 in plain DiLoCo.
    apply_residual: whether the parameters of a worker include what it has moved and no exchange has delivered. Then
      `moved` of the state has what else the residual would have, for a few passes over n entries at an exchange. It
      goes without a delay.

  Returns:
    An `optax.GradientTransformation` whose state is a `js.LocalState`; with fragments that of an
    `optax.multi_transform`, with a `js.LocalState` for each.

  Raises:
    ValueError: for a number outside its choices; when used, if `outer` has no jaxsparse transform or `inner` has one
      with a residual, if one of them has local steps itself, for fewer leaves than fragments, or without `params`.

  Example:
    >>> import jax, jax.numpy as jnp, optax, jaxsparse as js
    >>> outer = optax.chain(js.spardl_transform("workers", density=0.5), optax.sgd(1.0))
    >>> tx = js.local_steps(optax.sgd(0.1, momentum=0.5), outer, every=10)
    >>> mesh, params = jax.make_mesh((len(jax.devices()),), ("workers",)), jnp.zeros(4)
    >>> step = js.make_train_step(lambda p, batch: jnp.mean((p[None] - batch) ** 2), tx, mesh)
    >>> state = js.init(tx, params, mesh)
    >>> for _ in range(100):
    ...   params, state, metrics = step(params, state, jnp.ones((len(jax.devices()), 4)))
    >>> float(jnp.abs(params - 1).max()) < 0.1, float(js.metrics(state).drift)
    (True, 0.0)
  """
  check_whole("local_steps", 1, optional=True, every=every)
  steps = every or 1
  check_whole("local_steps", 1, steps, fragments=fragments)
  check_whole("local_steps", 0, steps // fragments - 1, delay=delay)
  if apply_residual and delay:
    raise ValueError(f"local_steps: apply_residual={apply_residual!r} with delay={delay!r}, choose one of them")
  if not 0 <= mixing < 1 or (mixing and every in (1, None)):
    raise ValueError(
      f"local_steps: mixing={mixing!r} with every={every!r}, choose 0, or less than 1 with 2 steps or more"
    )
  inner, outer = map(optax.with_extra_args_support, (inner, outer))
  turns = []
  for number in range(1, fragments + 1):
    offset = steps - steps * number // fragments
    turn = _LocalSteps(inner, outer, every, delay, mixing, apply_residual, offset)
    turns.append(optax.GradientTransformationExtraArgs(turn.init, turn.update))
  if fragments == 1:
    return with_check(turns[0])
  return with_check(optax.multi_transform(dict(enumerate(turns)), functools.partial(_fragments, count=fragments)))


def _fragments(params: optax.Params, count: int) -> Any:
  """The number of the fragment of each leaf."""
  sizes = flatten.sizes(params)
  if len(sizes) < count:
    raise ValueError(f"local_steps: fragments={count}, choose at most the number of leaves, {len(sizes)}")
  entries, numbers = [0] * count, [0] * len(sizes)
  for leaf in sorted(range(len(sizes)), key=lambda leaf: -sizes[leaf]):
    numbers[leaf] = min(range(count), key=entries.__getitem__)
    entries[numbers[leaf]] += max(1, sizes[leaf])  # every fragment has a leaf
  return jax.tree.unflatten(jax.tree.structure(params), numbers)


class _LocalSteps(NamedTuple):
  """The local steps of a fragment; the first exchange of a fragment comes `offset` steps earlier than others."""

  inner: optax.GradientTransformationExtraArgs
  outer: optax.GradientTransformationExtraArgs
  every: int | None
  delay: int
  mixing: float
  apply_residual: bool
  offset: int

  @property
  def at_once(self) -> bool:
    """Whether nothing stays moved from one step to the next."""
    return self.every == 1 and not self.apply_residual

  def init(self, params: optax.Params) -> LocalState:
    """The state of one worker before the first step."""
    moved = () if self.at_once else jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32)[None], params)
    flight = Flight(jax.tree.map(jnp.zeros_like, params), jnp.int32(0)) if self.delay else ()
    inner, since = _in_rows(self.inner.init(params)), jnp.int32(self.offset)
    state = LocalState(inner, self.outer.init(params), moved, since, jnp.int32(0), flight)
    _check(state)
    return state

  def update(
    self,
    grads: optax.Updates,
    state: LocalState,
    params: optax.Params | None = None,
    *,
    synchronize: bool = False,
    **extra: Any,
  ) -> tuple[optax.Updates, LocalState]:
    """The update of the anchor, zeros in a local step, and the next state."""
    if params is None:
      raise ValueError("local_steps: update needs the parameters, give tx.update(grads, state, params)")
    if synchronize:
      return self._synchronize(state, params, extra)
    state, finite = self._own_step(grads, state, params, extra)
    if self.every in (1, None):
      return (self._exchange if self.every == 1 else self._silence)(state, params, finite, extra)
    number = (state.since >= self.every - self.delay).astype(jnp.int32)
    if self.delay:
      number = jnp.where(state.flight.left > 0, 2 * (state.flight.left == 1).astype(jnp.int32), number)
    ways = (self._silence, self._send, self._arrive) if self.delay else (self._silence, self._exchange)
    branches = [lambda rest, way=way: way(rest, params, finite, extra) for way in ways]
    # The inner state stays outside, so that its buffers need not pass through the branches.
    updates, rest = jax.lax.switch(number, branches, state._replace(inner=()))
    return updates, rest._replace(inner=state.inner)

  def _synchronize(self, state: LocalState, params: optax.Params, extra: Any) -> tuple[optax.Updates, LocalState]:
    """The update of the anchor after which nothing is moved or in flight."""
    whole = self._replace(mixing=0.0)
    exchange, silence, arrive = (
      lambda state, way=way: way(state, params, jnp.bool_(True), extra)
      for way in (whole._exchange, whole._silence, whole._arrive)
    )
    if self.every == 1:  # nothing was moved
      return silence(state)
    if self.delay:
      updates, state = jax.lax.cond(state.flight.left > 0, arrive, exchange, state)
    else:
      updates, state = exchange(state)
    return updates, state._replace(since=jnp.int32(self.offset))

  def _own_step(
    self, grads: optax.Updates, state: LocalState, params: optax.Params, extra: Any
  ) -> tuple[LocalState, jax.Array]:
    """The state after the local step of a worker, and whether its gradient is finite, bool[]."""
    before = jax.tree.map(lambda leaf: leaf[0], state.inner)
    updates, after = self.inner.update(grads, before, own_params(params, state), **extra)
    alone = not states.reduce_states(before)  # else a transform skips the step on all workers
    leaves = jax.tree.leaves(grads) if alone else []
    finite = jnp.all(jnp.array([jnp.isfinite(leaf).all() for leaf in leaves], jnp.bool_))
    keep = lambda new, old: jnp.where(finite, new, old) if alone else new
    if self.at_once:
      moved = jax.tree.map(lambda update: -update[None], updates)
    else:
      moved = jax.tree.map(lambda was, u: keep(was - u[None].astype(jnp.float32), was), state.moved, updates)
    inner = _in_rows(jax.tree.map(keep, after, before))
    return state._replace(inner=inner, moved=moved, since=state.since + 1, steps=state.steps + 1), finite

  def _exchange(
    self, state: LocalState, params: optax.Params, finite: jax.Array, extra: Any
  ) -> tuple[optax.Updates, LocalState]:
    """The update of the anchor, and the state with nothing moved; unless one worker has no finite gradient."""
    # NaN of one worker makes all of them skip the exchange: `outer` finds it in its total.
    sent = jax.tree.map(lambda moved, p: jnp.where(finite, moved[0], jnp.nan).astype(p.dtype), state.moved, params)
    updates, outer = self.outer.update(sent, state.outer, params, **extra)
    skipped = states.skipped(outer)
    moved: Any = ()
    if not self.at_once:
      rest = lambda moved, gone: moved - gone[None].astype(moved.dtype)  # 0 in float32
      left = self._mixed(state.moved, updates) if self.mixing else jax.tree.map(rest, state.moved, sent)
      moved = jax.tree.map(lambda new, old: jnp.where(skipped, old, new), left, state.moved)
      if self.apply_residual:
        moved, outer = with_residual(moved, outer)
    return updates, state._replace(outer=outer, moved=moved, since=jnp.where(skipped, state.since, 0))

  def _send(
    self, state: LocalState, params: optax.Params, finite: jax.Array, extra: Any
  ) -> tuple[optax.Updates, LocalState]:
    """The exchange of what was moved, with its update in flight; one that is skipped is repeated in the next step."""
    updates, after = self._exchange(state, params, finite, extra)
    skipped = states.skipped(after.outer)
    either = lambda now, later: jax.tree.map(lambda a, b: jnp.where(skipped, a, b), now, later)
    zeros = jax.tree.map(jnp.zeros_like, updates)
    flight = Flight(either(zeros, updates), jnp.where(skipped, 0, self.delay))
    return either(updates, zeros), state._replace(outer=after.outer, flight=flight)

  def _arrive(
    self, state: LocalState, params: optax.Params, finite: jax.Array, extra: Any
  ) -> tuple[optax.Updates, LocalState]:
    """The update of the anchor that was in flight, and the state with the parameters of the worker mixed with it."""
    _, state = self._silence(state, params, finite, extra)
    updates = state.flight.update
    flight = Flight(jax.tree.map(jnp.zeros_like, updates), jnp.int32(0))
    moved = self._mixed(state.moved, updates)
    return updates, state._replace(moved=moved, since=jnp.int32(0), flight=flight)

  def _mixed(self, moved: Any, updates: optax.Updates) -> Any:
    """θ′ − (α θ_w + (1 − α) θ′) = α (θ − θ_w + u), with θ′ = θ + u."""
    return jax.tree.map(lambda was, u: self.mixing * (was + u[None].astype(was.dtype)), moved, updates)

  def _silence(
    self, state: LocalState, params: optax.Params, finite: jax.Array, extra: Any
  ) -> tuple[optax.Updates, LocalState]:
    """No update of the anchor, and the counters of a step without a message."""
    del extra
    idle = lambda node: metrics.without_messages(node, finite) if states.is_reduce_state(node) else node
    outer = jax.tree.map(idle, state.outer, is_leaf=states.is_reduce_state)
    flight = state.flight
    if self.delay:
      flight = flight._replace(left=jnp.maximum(flight.left - 1, 0))
    return jax.tree.map(jnp.zeros_like, params), state._replace(outer=outer, flight=flight)


def _in_rows(state: Any) -> Any:
  return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], state)


def _check(state: LocalState) -> None:
  """Raises ValueError for an inner or outer transformation that cannot be one."""
  if not states.reduce_states(state.outer):
    raise ValueError(
      "local_steps: outer has no jaxsparse transform, so nothing would exchange what workers have moved: begin it with "
      "one, as in optax.chain(js.dense_transform(axis), optax.sgd(1.0)), which averages the parameters"
    )
  if any(jax.tree.leaves(node.carried.residual) for node in states.reduce_states(state.inner)):
    raise ValueError(
      "local_steps: inner has a jaxsparse transform with a residual, what the residual holds would be of gradients and "
      "not of parameters: begin outer with this transform, and leave plain optax in inner"
    )
  if states.local_states((state.inner, state.outer)):
    raise ValueError("local_steps: inner or outer has local steps itself: choose one number of steps")
