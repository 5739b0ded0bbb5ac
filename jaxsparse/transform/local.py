"""Local steps: each worker trains with an optimizer of its own, and workers exchange what they have moved now and then.

    local step   θ_w ← θ_w + inner(∇_w(θ_w))                          every step
    exchange     θ   ← θ + outer(reduce(θ − θ_w)),   θ_w ← θ          every H steps

θ, the outer parameters, are the same on every worker: they are the `params` of the
caller. θ − θ_w, the movement of a worker and the pseudo-gradient of an exchange, is the
sum of its updates with a minus sign, so that it looks like a gradient to `outer`. It is
summed up in float32 and not computed from parameters.

`local_steps` composes two choices:

    when to exchange       `_EveryStep`, `_OnDemand` or `_Periods`
    how updates arrive     `Exchange`, `Mixed` or `Delayed`, in `exchange`

A step is skipped by all workers or by none: then nothing has happened, and the next
step takes its place.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxsparse._compat import varying
from jaxsparse.arrays import flatten
from jaxsparse.transform.atomic import select_state, zeros_if
from jaxsparse.transform.checks import check_arrays_of, check_own_gradients
from jaxsparse.transform.exchange import (
  Delayed,
  Exchange,
  Extra,
  Given,
  Mixed,
  Stepped,
)
from jaxsparse.transform.fragments import Fragments
from jaxsparse.transform.state import LocalState, add_row
from jaxsparse.transform.wrapped import synchronizing
from jaxsparse.types import MOST_STEPS, check_whole

Result = tuple[optax.Updates, LocalState]


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
  give `update` θ, the outer parameters:

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
  outer parameters (Streaming DiLoCo, Douillard et al., 2025):

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
  the outer parameters to this mean.

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
      applied then, and all workers go on from θ, with `apply_residual` less their
      residuals; a second call without a step between changes nothing. Or a schedule: at
      the beginning of each period it is called with the number of steps so far, and
      returns the H of the period, which is rounded down and at least 1. While the
      learning rate decays, an H that grows reaches a lower loss than a constant H with
      as many exchanges: `lambda step: 4 * 2 ** jnp.minimum(step // 300, 5)`; without a
      limit the i32 overflows.
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
  _check_options(every, fragments, delay, mixing, apply_residual)
  inner, outer = map(optax.with_extra_args_support, (inner, outer))
  # How updates arrive; `Delayed` mixes, too.
  how = Delayed if delay else Mixed if mixing else Exchange
  # Numbers of numpy could overflow, and their dtypes could promote results.
  exchange = how(
    inner, outer, Fragments(int(fragments)), apply_residual, float(mixing), int(delay)
  )
  # When workers exchange: on demand (`every=None`), in each step, or once in a period.
  steps: _EveryStep | _OnDemand = _OnDemand(exchange)
  if every == 1:
    steps = _EveryStep(exchange)
  elif every is not None:
    steps = _Periods(exchange, every if callable(every) else int(every))

  def update(
    grads: optax.Updates,
    state: LocalState,
    params: optax.Params | None = None,
    *,
    synchronize: bool = False,
    **extra: object,
  ) -> tuple[optax.Updates, LocalState]:
    if params is None:
      raise ValueError(
        "local_steps: update needs the parameters, give tx.update(grads, state, params)"
      )
    check_arrays_of(steps.init, state, params)
    # The context `synchronizing` replaces the argument in wrappers that pass none on.
    # Gradients are not read then, and need no check.
    if synchronize or synchronizing.value:
      return steps.synchronize(state, params, extra)
    check_own_gradients(grads, state)
    local_updates, inner, finite = exchange.step_inner(grads, state, params, extra)
    # `inner` is left out, since a step of the outer parameters does not read it.
    tried = state._replace(inner=(), steps=state.steps + 1)
    done, after = steps.step(local_updates, tried, Given(params, finite, extra))
    after = after._replace(inner=inner, flight=done.flight)
    # A skipped step is undone. The exchange has undone `outer` already: to choose here
    # again would take a pass over residuals.
    kept = select_state(
      done.skipped, state._replace(outer=()), after._replace(outer=())
    )
    return done.updates, kept._replace(outer=done.outer)

  return optax.GradientTransformationExtraArgs(steps.init, update)


def _check_options(
  every: int | optax.Schedule | None,
  fragments: int,
  delay: int,
  mixing: float,
  apply_residual: bool,
) -> None:
  """Raises ValueError for arguments of `local_steps` outside their choices, or that do not go together."""
  if not callable(every):
    check_whole("local_steps", 1, MOST_STEPS, optional=True, every=every)
  elif (period := jax.eval_shape(every, jnp.int32(0))).shape != ():
    raise ValueError(
      f"local_steps: every(0) has the shape {period.shape}, give a schedule of one number"
    )
  # The smallest H. A schedule may come down to 1, so it has one fragment and no delay;
  # so has `every=None`.
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


class _EveryStep(NamedTuple):
  """Each step exchanges the updates of the inner optimizers in place of gradients; `moved` is () in the state."""

  exchange: Exchange

  def init(self, params: optax.Params) -> LocalState:
    return self.exchange.init(params)

  def step(
    self, updates: optax.Updates, state: LocalState, given: Given
  ) -> tuple[Stepped, LocalState]:
    """The step of the outer parameters, and the next state, from the `updates` of this worker's inner optimizer."""
    # Updates with NaN or Inf skip the step, too: `finite` is so far of the inner state.
    given = given._replace(finite=given.finite & flatten.all_finite(updates))
    state = state._replace(since=jnp.int32(0))
    # Without an entry to mark with NaN, the workers agree by a flag. There is one
    # fragment, 0.
    if not self.exchange.fragments.has_entries(given.params, 0):
      return self.exchange.agree(state, given), state
    # Outer chains subtract gradients, so an update u has the pseudo-gradient −u.
    pseudo_gradient = jax.tree.map(jnp.negative, updates)
    return self.exchange.reduce(0, pseudo_gradient, state, given), state

  def synchronize(
    self, state: LocalState, params: optax.Params, extra: Extra
  ) -> Result:
    # Each step has exchanged its updates: nothing is left.
    return optax.tree.zeros_like(params), state


@dataclasses.dataclass(frozen=True)
class _OnDemand:
  """Movement is exchanged when `synchronize` is called, and by no step.

  `state.moved` is the movement of this worker, f32[1, …] of each leaf: minus the sum of
  its updates since the last exchange, plus what the dtype of the leaf could not hold
  then. `state.since` counts the steps since that exchange.
  """

  exchange: Exchange

  def init(self, params: optax.Params) -> LocalState:
    state = self.exchange.init(params)
    zeros = optax.tree.zeros_like(params, jnp.float32)
    return state._replace(moved=add_row(zeros))

  def step(
    self, updates: optax.Updates, state: LocalState, given: Given
  ) -> tuple[Stepped, LocalState]:
    """The step of the outer parameters, and the next state, from the `updates` of this worker's inner optimizer."""
    # An update u of the worker raises θ_w by u, and lowers the movement by u.
    moved = jax.tree.map(
      lambda moved, u: moved - u[None].astype(jnp.float32), state.moved, updates
    )
    since = jnp.maximum(state.since, 0) + 1
    state = state._replace(moved=moved, since=since)
    finite = flatten.all_finite(moved) & given.finite
    return self.step_outer(state, given._replace(finite=finite))

  def step_outer(self, state: LocalState, given: Given) -> tuple[Stepped, LocalState]:
    """The step of the outer parameters after the local one, and the state with the movement that it leaves."""
    return self.exchange.agree(state, given), state

  def synchronize(
    self, state: LocalState, params: optax.Params, extra: Extra
  ) -> Result:
    """The exchange without a local step: the updates of the outer parameters, and the next state."""
    unchanged = lambda: (optax.tree.zeros_like(params), state)
    exchange = functools.partial(self._exchange_all, state, params, extra)
    # Without movement outer momentum would move the parameters all the same: so no
    # exchange then. `since` is -1 after a synchronization, which leaves no movement,
    # and 0 after a period, which leaves none of a single fragment without mixing.
    is_whole = self.exchange.fragments.count == 1 and not self.exchange.mixing
    return varying.cond(state.since < int(is_whole), unchanged, exchange)

  def _exchange_all(
    self, state: LocalState, params: optax.Params, extra: Extra
  ) -> Result:
    """The exchanges of all fragments; for a fragment whose update is in flight, that update is applied instead."""
    fragments = self.exchange.fragments
    # True: this worker is finite, since no local step is taken. It is made here, within
    # the branch of a conditional; as an operand of the branch it would add equations.
    given = Given(params, jnp.bool_(True), extra)
    total = optax.tree.zeros_like(params)
    # The inner optimizer has no part in an exchange.
    after = state._replace(inner=())
    skipped = jnp.bool_(False)
    # The counters of each fragment are those of its own exchange.
    outer = []
    for fragment in range(fragments.count):
      done = self.exchange.deliver(fragment, after, given)
      total = optax.tree.add(total, done.updates)
      skipped |= done.skipped
      outer.append(done.outer[fragment])
      after = after._replace(flight=done.flight)
    # Movement that these exchanges have not delivered is kept: what the dtypes of
    # parameters cannot hold.
    left = functools.partial(self.exchange.undelivered, state)
    moved = jax.tree.map(left, fragments.numbers(params), state.moved, params)
    after = after._replace(
      inner=state.inner,
      outer=tuple(outer),
      moved=moved,
      since=jnp.int32(-1),
    )
    # If the exchange of one fragment is skipped, all of them are undone.
    return zeros_if(skipped, total), select_state(skipped, state, after)


@dataclasses.dataclass(frozen=True)
class _Periods(_OnDemand):
  """Each fragment is exchanged once in a period of H steps.

  Attributes:
    every: H, or a schedule of it.
  """

  every: int | optax.Schedule

  def step_outer(self, state: LocalState, given: Given) -> tuple[Stepped, LocalState]:
    """The step of the outer parameters after the local one, an exchange if a turn is due, and the next state."""
    # `state.since` counts the steps of the period so far, this one included.
    exchange = self.exchange
    period = self._period(state)
    due = self._due_fragment(state, period)
    # `due` and `updated` are 1 + a fragment, 0 for none; with a delay the fragment that
    # is updated now was exchanged before.
    done, updated = exchange.step(due, state, given)
    # Movement changes outside the branches of the step: XLA copies what a conditional
    # returns. Leaves of other fragments keep theirs.
    keep = lambda fragment, moved, u, p: jnp.where(
      updated == fragment + 1, exchange.keep_moved(moved, u, p), moved
    )
    fragments = exchange.fragments.numbers(state.moved)
    moved = jax.tree.map(keep, fragments, state.moved, done.updates, given.params)
    ends = state.since >= period
    # `flight` is () without a delay. With a delay the period lasts until its last
    # update is applied.
    if done.flight:
      ends &= done.flight.left == 0
    since = jnp.where(ends, 0, state.since)
    return done, state._replace(moved=moved, since=since)

  def _period(self, state: LocalState) -> int | jax.Array:
    """H of the current period; that of a schedule depends on the step where the period begins, so it is constant."""
    if not callable(self.every):
      return self.every
    # `steps` counts all steps and `since` those of this period, so that it began at
    # their difference.
    begin = state.steps - state.since
    steps = jnp.asarray(self.every(begin)).astype(jnp.float32)
    # Clipped as float32, since Inf or a huge number would overflow i32.
    return jnp.clip(steps, 1, 2**30).astype(jnp.int32)

  def _due_fragment(self, state: LocalState, period: int | jax.Array) -> jax.Array:
    """1 + the fragment whose turn it is; 0 for none."""
    count = self.exchange.fragments.count
    # For each turn 1 … F, the step of the period that begins its exchange: turn t ends
    # H t / F steps after the period began, its delay included.
    *others, last = (
      period * turn // count - self.exchange.delay for turn in range(1, count + 1)
    )
    # `>=`, since `since` may be beyond the last turn after js.convert has shortened H.
    due = [*(state.since == turn for turn in others), state.since >= last]
    # At most one of these is true.
    return sum(
      (turn * is_due.astype(jnp.int32) for turn, is_due in enumerate(due, 1)),
      jnp.int32(0),
    )
