"""Local steps: each worker trains with an optimizer of its own, and workers exchange what they have moved now and then.

    local step   θ_w ← θ_w + inner(∇_w(θ_w))                          every step
    exchange     θ   ← θ + outer(reduce(θ − θ_w)),   θ_w ← θ          every H steps

With a delay the exchange computes an update of the anchor, which is in flight for τ
steps before it is applied.

θ, the anchor, is the same on every worker: it is the `params` of the caller. The state
of a worker has θ − θ_w, the sum of its updates with a minus sign, so that it looks like
a gradient to `outer`. It is summed up in float32 and not computed from parameters.

A step is skipped by all workers or by none: then nothing has happened, and the next
step takes its place.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxsparse._compat import varying
from jaxsparse.arrays import flatten
from jaxsparse.transform import state as states
from jaxsparse.transform.atomic import atomic, select_state
from jaxsparse.transform.checks import (
  check_agreed,
  check_arrays_of,
  check_local_state,
  check_own_gradients,
  warn_of_frozen,
)
from jaxsparse.transform.fragments import Fragments, fill_zeros
from jaxsparse.transform.residuals import own_params
from jaxsparse.transform.state import Applied, Flight, LocalState
from jaxsparse.transform.wrapped import (
  PLACEHOLDER,
  mean_dtypes,
  shapes_seen,
  synchronizing,
)
from jaxsparse.types import check_whole


def local_steps(
  inner: optax.GradientTransformation,
  outer: optax.GradientTransformation,
  *,
  every: int | optax.Schedule | None,
  fragments: int = 1,
  delay: int = 0,
  mixing: float = 0.0,
  apply_residual: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """H steps of each worker's own, then one exchange of what the workers have moved (local SGD, DiLoCo, SparseLoCo).

      θ_w ← θ_w + inner(∇_w(θ_w))                         H times
      θ   ← θ + outer(θ − θ_w),   θ_w ← θ                 the exchange

  `outer` reduces θ − θ_w over the workers as if it were a gradient, so plain optax
  after the collective descends: `optax.sgd(1.0)` moves the parameters to the mean of
  those of all workers. The state has θ − θ_w of each worker, in float32, and the inner
  state of each; `outer` has the residual and whatever else is the same on every worker.

      total + Σ_w residual_w = Σ_w (θ − θ_w) + Σ_w (residual_w before)      (Law C, at an exchange)

  Updates are those of θ: zeros in local steps, so that parameters are bitwise the same
  on every worker at all times (Law R). The step of `js.make_train_step` takes the
  gradient at θ_w; in a step of your own take it at `js.own_params(params, state)`, and
  give `update` θ, the anchor:

      grads = jax.grad(loss_fn)(js.own_params(params, state), batch)
      updates, state = tx.update(grads, state, params)

  With `every=1` no movement is pending, and each step exchanges the updates of the
  inner optimizers instead of gradients. Then `local_steps(optax.sgd(1.0),
  optax.chain(transform, optax.sgd(η)), every=1)` equals `optax.chain(transform,
  optax.sgd(η))` bitwise.

  With `fragments=F` the leaves are shared out to F fragments that are exchanged in
  turn, one every H/F steps: the largest number of words of a step is about 1/F. Each
  fragment has an `outer` state of its own, `inner` sees all leaves.

  With `delay=τ` an exchange takes what was moved in the first H − τ steps, and its
  update u is applied τ steps later. Each worker then mixes its own parameters with the
  anchor (Streaming DiLoCo, Douillard et al., 2025):

      u = outer(θ − θ_w),    τ steps later    θ ← θ + u,   θ_w ← α θ_w + (1 − α) θ

  Law C holds at the exchange. The mixture is as published: it drops a share of 1 − α of
  the τ local steps after the exchange, and keeps α (θ_w − θ), which is exchanged again.

  With `apply_residual` a worker goes on from θ minus its residual r_w instead of θ:
  from parameters with all of its own updates in them, delivered or not (the local
  models of CSER, Xie et al., 2020). Gradients then see undelivered updates at once, and
  a sparse exchange learns faster, above all with `every=1`:

      θ   ← θ + outer(θ − r_w − θ_w),   θ_w ← θ − r_w     (r_w that of the last exchange, then of this one)

  With `optax.sgd(1.0)` in `outer`, the mean of θ_w over the workers moves as if
  everything were delivered at once. At the end `js.flush` gives the update that takes
  the anchor there.

  Where an update or an inner state of one worker becomes NaN or Inf, or a sum of the
  exchange does, all workers skip the step: it leaves nothing changed, as under
  `js.atomic`, and the next step retries, exchange included. For that, workers agree on
  one word in each step without an exchange.

  Args:
    inner: any optax optimizer, run by each worker on its own gradients. It may hold a
      jaxsparse transform without a residual, which every worker calls in every step;
      A2SGD, whose totals differ between workers, must be here. `js.init` folds the
      random keys (`jax.random.key`) in its state with the number of the worker.
    outer: a chain whose first transformation is a jaxsparse one, then plain optax.
    every: H, the number of steps from one exchange to the next; None exchanges only
      when `step.synchronize(params, state)` is called, which `tx.update(grads, state,
      params, synchronize=True)` does without a local step. An update in flight is
      applied then, and all workers go on from the anchor, with `apply_residual` less
      their residuals. Or a schedule: at the beginning of each period it is called with
      the number of steps so far, and returns the H of the period, which is rounded down
      and at least 1. While the learning rate decays, an H that grows reaches a lower
      loss than a constant H with as many exchanges: `lambda step: 4 * 2 ** (step //
      300)`.
    fragments: F, 1 … H, and 1 with a schedule. Leaves stay whole: the largest first,
      each goes to the fragment with the fewest entries so far.
    delay: τ, less than H/F, and 0 with a schedule: the steps between an exchange and
      its use. A step that is compiled as one program still ends after its messages.
    mixing: α in [0, 1), the weight of a worker's own parameters; 0 in plain DiLoCo.
    apply_residual: whether the parameters of a worker include what it has moved and no
      exchange has delivered. Not together with `delay`.

  Returns:
    An `optax.GradientTransformation` whose state is a `LocalState`.

  Raises:
    ValueError: for a number outside its choices; when used, if `outer` has no jaxsparse
      transform or `inner` has one with a residual, if one of them has local steps
      itself, for fewer leaves than fragments, or without `params`.

  Example:
    >>> import jax, jax.numpy as jnp, optax, jaxsparse as js
    >>> outer = optax.chain(js.make_transform("topka", "workers", density=0.5), optax.sgd(1.0))
    >>> tx = js.local_steps(optax.sgd(0.1, momentum=0.5), outer, every=10)
    >>> mesh, params = jax.make_mesh((len(jax.devices()),), ("workers",)), jnp.zeros(4)
    >>> step = js.make_train_step(lambda p, batch: jnp.mean((p[None] - batch) ** 2), tx, mesh)
    >>> state = js.init(tx, params, mesh)
    >>> for _ in range(100):
    ...   params, state, metrics = step(params, state, jnp.ones((len(jax.devices()), 4)))
    >>> float(jnp.abs(params - 1).max()) < 0.1
    True
  """
  if not callable(every):
    check_whole("local_steps", 1, optional=True, every=every)
  elif (found := jax.eval_shape(every, jnp.int32(0))).shape != ():
    raise ValueError(
      f"local_steps: every(0) has the shape {found.shape}, give a schedule of one number"
    )
  steps = 1 if callable(every) else every or 1
  check_whole("local_steps", 1, steps, fragments=fragments)
  check_whole("local_steps", 0, steps // fragments - 1, delay=delay)
  if apply_residual and delay:
    raise ValueError(
      f"local_steps: apply_residual={apply_residual!r} with delay={delay!r}, choose one of them"
    )
  if not 0 <= mixing < 1 or (mixing and every in (1, None)):
    raise ValueError(
      f"local_steps: mixing={mixing!r} with every={every!r}, choose a number in [0, 1), and 0 with every=1 or None"
    )
  inner, outer = map(optax.with_extra_args_support, (inner, outer))
  steps_of = _LocalSteps(
    inner, outer, every, Fragments(fragments), delay, mixing, apply_residual
  )
  return optax.GradientTransformationExtraArgs(steps_of.init, steps_of.update)


class _Stepped(NamedTuple):
  """The result of a step, but for the inner optimizer.

  Attributes:
    updates: of the anchor.
    outer: the next states of the outer chain; of a skipped step those before it, but
      for their counters.
    flight: the next one.
    skipped: bool[], whether the workers skip the step.
  """

  updates: optax.Updates
  outer: Any
  flight: Any
  skipped: jax.Array


class _LocalSteps(NamedTuple):
  """The arguments of `local_steps`."""

  inner: optax.GradientTransformationExtraArgs
  outer: optax.GradientTransformationExtraArgs
  every: int | optax.Schedule | None
  fragments: Fragments
  delay: int
  mixing: float
  apply_residual: bool

  def init(self, params: optax.Params) -> LocalState:
    """The state of one worker before the first step."""
    if not isinstance(params, PLACEHOLDER):
      flatten.check_are_arrays(params, "params")
    moved = (
      ()
      if self.every == 1
      else jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32)[None], params)
    )
    flight = (
      Flight(jax.tree.map(jnp.zeros_like, params), jnp.int32(0), jnp.int32(0))
      if self.delay
      else ()
    )
    outer = tuple(
      self.outer.init(self.fragments.part(params, number))
      for number in range(self.fragments.count)
    )
    applied = Applied() if self.apply_residual else ()
    state = LocalState(
      _in_rows(self.inner.init(params)),
      outer,
      moved,
      jnp.int32(0),
      jnp.int32(0),
      flight,
      applied,
    )
    check_local_state(state, params)
    return state

  def update(
    self,
    grads: optax.Updates,
    state: LocalState,
    params: Any = None,
    *,
    synchronize: bool = False,
    **extra: Any,
  ) -> tuple[optax.Updates, LocalState]:
    """The update of the anchor, zeros in a local step, and the next state."""
    if params is None:
      raise ValueError(
        "local_steps: update needs the parameters, give tx.update(grads, state, params)"
      )
    check_arrays_of(self.init, state, params)
    if synchronize or synchronizing.value:
      return self._synchronize(state, params, extra)
    check_own_gradients(grads, state)
    inner, moved, finite = self._own_step(grads, state, params, extra)
    tried = state._replace(
      inner=(), moved=moved, since=state.since + 1, steps=state.steps + 1
    )
    # without entries an exchange marks no NaN
    exchange = lambda number: functools.partial(self._exchange, number)
    exchanges = [
      exchange(one) if self.fragments.has_entries(params, one) else self._agree
      for one in range(self.fragments.count)
    ]
    kinds = [self._agree, *exchanges, *([self._apply_flight] if self.delay else [])]
    # The branches return neither what was moved nor the inner state: XLA copies the
    # results of a conditional.
    branches = [
      lambda tried, kind=kind: kind(tried, params, finite, extra) for kind in kinds
    ]
    period = self._period(state)
    kind = jnp.int32(1) if self.every == 1 else self._choose_kind(tried, period)
    done = (
      branches[1](tried) if self.every == 1 else varying.switch(kind, branches, tried)
    )
    applied = (
      jnp.where(kind > self.fragments.count, tried.flight.fragment + 1, 0)
      if self.delay
      else kind
    )
    moved = (
      () if self.every == 1 else self._keep_moved(applied, moved, done.updates, params)
    )
    if self.every:
      ends = tried.since >= period
      ends = ends & (done.flight.left == 0) if self.delay else ends
      tried = tried._replace(since=jnp.where(ends, 0, tried.since))
    after = tried._replace(inner=inner, outer=(), moved=moved, flight=done.flight)
    return done.updates, select_state(
      done.skipped, state._replace(outer=()), after
    )._replace(outer=done.outer)

  def _choose_kind(self, state: LocalState, period: Any) -> jax.Array:
    """The kind of this step: 0 no exchange, 1 … F that of a fragment, F + 1 the update in flight is applied."""
    if period is None:
      return jnp.int32(0)
    count = self.fragments.count
    *others, last = (
      period * number // count - self.delay for number in range(1, count + 1)
    )
    # Later than the last turn if js.convert has shortened H.
    due = [*(state.since == turn for turn in others), state.since >= last]
    kind = sum(
      (number * one.astype(jnp.int32) for number, one in enumerate(due, 1)),
      jnp.int32(0),
    )
    if not self.delay:
      return kind
    arrives = jnp.where(state.flight.left == 1, count + 1, 0)
    return jnp.where(state.flight.left > 0, arrives, kind)

  def _period(self, state: LocalState) -> Any:
    """H of the current period; that of a schedule depends on the step where the period begins, so it is constant."""
    if not callable(self.every):
      return self.every
    steps = jnp.asarray(self.every(state.steps - state.since)).astype(jnp.float32)
    return jnp.clip(steps, 1, 2**30).astype(jnp.int32)

  def _own_step(
    self, grads: optax.Updates, state: LocalState, params: optax.Params, extra: Any
  ) -> tuple[Any, Any, jax.Array]:
    """The inner state and what is moved after the step of this worker, and whether both are finite, bool[]."""
    before = jax.tree.map(lambda leaf: leaf[0], state.inner)
    updates, after = self.inner.update(
      grads, before, own_params(params, state), **extra
    )
    warn_of_frozen(state.outer, grads, updates)
    if self.every == 1:
      moved = jax.tree.map(lambda u: -u[None], updates)
    else:
      moved = jax.tree.map(
        lambda was, u: was - u[None].astype(jnp.float32), state.moved, updates
      )
    finite = flatten.all_finite(
      updates if self.every == 1 else moved
    ) & flatten.stays_finite(before, after)
    if states.reduce_states(after):  # a transform returns zeros for what is not finite
      finite &= ~states.is_skipped(after)
    return _in_rows(after), moved, finite

  def _keep_moved(
    self, applied: jax.Array, moved: Any, updates: optax.Updates, params: optax.Params
  ) -> Any:
    """θ − θ_w after an update of the anchor; `applied`: 1 + the updated fragment, 0 for none."""

    def keep(was: jax.Array, u: jax.Array, p: jax.Array) -> jax.Array:
      # θ′ − (α θ_w + (1 − α) θ′) = α (θ − θ_w + u), with θ′ = θ + u
      if self.mixing or self.delay:
        return self.mixing * (was + u[None].astype(was.dtype))
      return flatten.representable(was, p.dtype)[1]

    choose = lambda number, was, u, p: jnp.where(
      applied == number + 1, keep(was, u, p), was
    )
    return jax.tree.map(choose, self.fragments.numbers(moved), moved, updates, params)

  def _agree(
    self, state: LocalState, params: optax.Params, finite: jax.Array, extra: Any
  ) -> _Stepped:
    """No update of the anchor; the workers agree on whether all of them are finite."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    sent, own = (self.fragments.part(tree, 0) for tree in (zeros, params))
    _, agreed = self.outer.update(sent, state.outer[0], own, agree=finite, **extra)
    check_agreed(state.outer[0], agreed)
    skipped = states.is_skipped(agreed)
    flight = (
      state.flight._replace(left=jnp.maximum(state.flight.left - 1, 0))
      if self.delay
      else ()
    )
    return _Stepped(zeros, states.idle_step(state.outer, skipped), flight, skipped)

  def _exchange(
    self,
    number: int,
    state: LocalState,
    params: optax.Params,
    finite: jax.Array,
    extra: Any,
  ) -> _Stepped:
    """The exchange of what was moved in a fragment; with a delay its update is in flight from then on."""
    moved = self.fragments.part(state.moved, number)
    own = self.fragments.part(params, number)
    # NaN of one worker makes all of them skip the exchange: `outer` finds it in its
    # total.
    mark = lambda moved: jnp.where(finite, moved, jnp.nan).astype(moved.dtype)
    # the rest stays in `moved`
    held = lambda moved, p: flatten.representable(moved, p.dtype)[0].astype(p.dtype)
    sent = jax.tree.map(
      lambda moved, p: mark(moved[0] if self.every == 1 else held(moved[0], p)),
      moved,
      own,
    )
    # With every=1 no `moved` stays: sums are rounded to these dtypes, what that leaves
    # is in the residual.
    seen = shapes_seen(states.reduce_states(state.outer[number]), own)
    with mean_dtypes(
      tuple((name, leaf.dtype) for name, leaf in flatten.leaves_by_name(seen).items())
    ):
      updates, outer = atomic(self.outer).update(
        sent, state.outer[number], own, **extra
      )
    updates = jax.tree.map(lambda u, p: u.astype(p.dtype), updates, own)
    skipped = states.is_skipped(outer)
    updates = fill_zeros(params, updates)
    outer = tuple(
      outer if one == number else states.idle_step(before, skipped)
      for one, before in enumerate(state.outer)
    )
    if self.delay:
      flight = Flight(updates, jnp.int32(self.delay), jnp.int32(number))
      return _Stepped(jax.tree.map(jnp.zeros_like, updates), outer, flight, skipped)
    return _Stepped(updates, outer, state.flight, skipped)

  def _apply_flight(
    self, state: LocalState, params: optax.Params, finite: jax.Array, extra: Any
  ) -> _Stepped:
    """The update of the anchor that was in flight; `_keep_moved` mixes the parameters of the worker with it."""
    agreed = self._agree(state, params, finite, extra)
    updates = jax.tree.map(
      lambda u: jnp.where(agreed.skipped, jnp.zeros_like(u), u), state.flight.update
    )
    return agreed._replace(
      updates=updates, flight=Flight(agreed.updates, jnp.int32(0), jnp.int32(0))
    )

  def _synchronize(
    self, state: LocalState, params: optax.Params, extra: Any
  ) -> tuple[optax.Updates, LocalState]:
    """The update of the anchor after which nothing is moved or in flight."""
    nothing = lambda: (jax.tree.map(jnp.zeros_like, params), state)
    if self.every == 1:  # each step has exchanged what it moved
      return nothing()
    exchange = functools.partial(self._exchange_all, state, params, extra)
    # Nothing is moved right after an exchange, and outer momentum would move the anchor
    # all the same.
    may_be_done = self.fragments.count == 1 and not self.mixing
    return (
      varying.cond(state.since == 0, nothing, exchange) if may_be_done else exchange()
    )

  def _exchange_all(
    self, state: LocalState, params: optax.Params, extra: Any
  ) -> tuple[optax.Updates, LocalState]:
    """The exchanges of all fragments; of one in flight its update is applied instead."""
    total = jax.tree.map(jnp.zeros_like, params)
    after = state._replace(inner=())
    skipped = jnp.bool_(False)
    finite = jnp.bool_(True)
    is_flying = lambda number: (
      (state.flight.left > 0) & (state.flight.fragment == number)
    )
    apply = lambda state: self._apply_flight(state, params, finite, extra)
    for number in range(self.fragments.count):
      exchange = lambda state, number=number: self._replace(delay=0)._exchange(
        number, state, params, finite, extra
      )
      done = (
        varying.cond(is_flying(number), apply, exchange, after)
        if self.delay
        else exchange(after)
      )
      total = jax.tree.map(jnp.add, total, done.updates)
      skipped |= done.skipped
      after = after._replace(outer=done.outer, flight=done.flight)

    def keep(number: int, was: jax.Array, p: jax.Array) -> jax.Array:
      """What the dtype rounds off; nothing where an update in flight was applied, which is of what was moved before."""
      left = flatten.representable(was, p.dtype)[1]
      return (
        jnp.where(is_flying(number), jnp.zeros_like(left), left) if self.delay else left
      )

    moved = jax.tree.map(keep, self.fragments.numbers(params), state.moved, params)
    after = after._replace(inner=state.inner, moved=moved, since=jnp.int32(0))
    return jax.tree.map(
      lambda u: jnp.where(skipped, jnp.zeros_like(u), u), total
    ), select_state(skipped, state, after)


def _in_rows(state: Any) -> Any:
  return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], state)
