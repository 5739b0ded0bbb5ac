"""An exchange of local steps: how an update of the outer parameters is computed, and when it reaches the workers.

    Exchange   θ ← θ + u,   θ_w ← θ                          u = outer(reduce(θ − θ_w))
    Mixed      θ ← θ + u,   θ_w ← α θ_w + (1 − α) θ
    Delayed    as `Mixed`, τ steps after u was computed

θ are the outer parameters, θ_w those of a worker.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import OptState

from jaxsparse._compat import varying
from jaxsparse.arrays import flatten
from jaxsparse.transform import state as states
from jaxsparse.transform.atomic import atomic, zeros_if
from jaxsparse.transform.checks import (
  check_agreed,
  check_local_state,
  warn_of_frozen,
)
from jaxsparse.transform.fragments import Fragments, fill_zeros
from jaxsparse.transform.residuals import own_params
from jaxsparse.transform.state import Applied, Flight, LocalState
from jaxsparse.transform.wrapped import PLACEHOLDER, mean_dtypes, shapes_seen
from jaxsparse.types import ArrayTree

Extra = dict[str, object]  # arguments of the caller that every transformation gets


class Stepped(NamedTuple):
  """The result of a step for the outer parameters.

  Attributes:
    updates: of the outer parameters.
    outer: the next states of the outer chain, one a fragment; of a skipped step those
      before it, but for their counters.
    flight: the next `Flight`; () without a delay.
    skipped: bool[], whether the workers skip the step.
  """

  updates: optax.Updates
  outer: tuple[OptState, ...]
  flight: ArrayTree
  skipped: jax.Array


class Given(NamedTuple):
  """What a step of the outer parameters is given, besides the state.

  Attributes:
    params: the outer parameters.
    finite: bool[], whether the local step of this worker is finite.
    extra: arguments of the caller that every transformation gets.
  """

  params: optax.Params
  finite: jax.Array
  extra: Extra


@dataclasses.dataclass(frozen=True)
class Exchange:
  """Updates that are applied in the step that computes them.

  A state is that of one worker: arrays of its own, `inner` and `moved`, are [1, …]. Its
  `outer` has one state of the outer chain for each fragment. `moved`, f32, is θ − θ_w;
  θ_w is meant here without an applied residual.

  Attributes:
    inner: the optimizer of each worker.
    outer: the chain that reduces pseudo-gradients.
    fragments: the leaves that are exchanged together.
    apply_residual: whether the parameters of a worker include its residual.
    mixing: α, 0 here.
    delay: τ, 0 here.
  """

  inner: optax.GradientTransformationExtraArgs
  outer: optax.GradientTransformationExtraArgs
  fragments: Fragments
  apply_residual: bool
  mixing: float
  delay: int

  def init(self, params: optax.Params) -> LocalState:
    """The state of one worker before the first step, without movement."""
    if not isinstance(params, PLACEHOLDER):
      flatten.check_are_arrays(params, "params")
    # One state a fragment.
    outer = tuple(
      self.outer.init(self.fragments.part(params, fragment))
      for fragment in range(self.fragments.count)
    )
    inner = states.add_row(self.inner.init(params))
    applied = Applied() if self.apply_residual else ()
    # inner, outer, moved, since, steps, flight, applied. `_OnDemand` replaces `moved`,
    # and `Delayed` the flight.
    state = LocalState(inner, outer, (), jnp.int32(0), jnp.int32(0), (), applied)
    check_local_state(state, params)
    return state

  def step_inner(
    self, grads: optax.Updates, state: LocalState, params: optax.Params, extra: Extra
  ) -> tuple[optax.Updates, OptState, jax.Array]:
    """The updates of this worker, its next inner state, and whether that state stays finite, bool[].

    Args:
      grads: of this worker, at its own parameters.
      state: before the step.
      params: the outer parameters.
      extra: arguments of the caller that every transformation gets.
    """
    # Inner states have a leading axis of workers, here of this one.
    before = states.first_row(state.inner)
    updates, after = self.inner.update(
      grads, before, own_params(params, state), **extra
    )
    warn_of_frozen(states.reduce_states(state.outer), grads, updates)
    finite = flatten.stays_finite(before, after)
    # A transform inside returns zeros in place of NaN and Inf, so its flag counts, too.
    if states.reduce_states(after):
      finite &= ~states.is_skipped(after)
    return updates, states.add_row(after), finite

  def step(
    self, due: jax.Array, state: LocalState, given: Given
  ) -> tuple[Stepped, jax.Array]:
    """A step of the outer parameters, and 1 + the fragment that it updates, 0 for none.

    Args:
      due: i32[], 1 + the fragment whose turn it is, 0 for none.
      state: after the local step.
      given: to all kinds of steps.
    """
    return varying.switch(due, self.kinds(given), state), due

  def kinds(self, given: Given) -> list[Callable[[LocalState], Stepped]]:
    """The kinds of steps, as functions of the state: item 0 has no exchange, item 1 + f exchanges fragment f."""
    agree = functools.partial(self.agree, given=given)
    # In an exchange NaN in the entries of one worker makes all skip. A fragment without
    # entries sends none: its workers agree as in a step without an exchange.
    return [agree] + [
      functools.partial(self.exchange, fragment, given=given)
      if self.fragments.has_entries(given.params, fragment)
      else agree
      for fragment in range(self.fragments.count)
    ]

  def keep_moved(self, moved: jax.Array, u: jax.Array, p: jax.Array) -> jax.Array:
    """θ − θ_w of a leaf after the update u of its outer parameters p."""
    return flatten.representable(moved, p.dtype)[1]

  def agree(self, state: LocalState, given: Given) -> Stepped:
    """A step without an exchange: no update; the workers agree to skip it unless all of them are finite."""
    zeros = optax.tree.zeros_like(given.params)
    # Any fragment would do: with `agree=` its outer chain exchanges one flag only.
    sent = self.fragments.part(zeros, 0)
    params = self.fragments.part(given.params, 0)
    before = state.outer[0]
    _, agreed = self.outer.update(
      sent, before, params, agree=given.finite, **given.extra
    )
    # Raises if a wrapper in the chain has not passed `agree` on.
    check_agreed(before, agreed)
    skipped = states.is_skipped(agreed)
    outer = states.idle_step(state.outer, skipped)
    return Stepped(zeros, outer, state.flight, skipped)

  def exchange(self, fragment: int, state: LocalState, given: Given) -> Stepped:
    """The exchange of the movement of a fragment."""
    # The movement is sent in the dtype of the parameter. `keep_moved` keeps what this
    # dtype cannot hold; with mixing it keeps a part of all movement.
    held = lambda moved, p: flatten.representable(moved[0], p.dtype)[0]
    moved = self.fragments.part(state.moved, fragment)
    params = self.fragments.part(given.params, fragment)
    pseudo_gradient = optax.tree.cast_like(jax.tree.map(held, moved, params), params)
    return self.reduce(fragment, pseudo_gradient, state, given)

  def reduce(
    self, fragment: int, pseudo_gradient: optax.Updates, state: LocalState, given: Given
  ) -> Stepped:
    """The update of a fragment from the pseudo-gradients of all workers; skipped unless all workers are finite."""
    # NaN of one worker is in the total of all, so that all skip the exchange without a
    # further message.
    mark = lambda x: jnp.where(given.finite, x, jnp.nan)
    sent = optax.tree.cast_like(jax.tree.map(mark, pseudo_gradient), pseudo_gradient)
    params = self.fragments.part(given.params, fragment)
    before = state.outer[fragment]
    # The transform rounds means to the dtypes of the parameters, which it gets by the
    # names of the leaves that it sees. Its residual keeps the rounding errors.
    seen = flatten.leaves_by_name(shapes_seen(states.reduce_states(before), params))
    with mean_dtypes(tuple((name, leaf.dtype) for name, leaf in seen.items())):
      updates, after = atomic(self.outer).update(sent, before, params, **given.extra)
    updates = optax.tree.cast_like(updates, params)
    skipped = states.is_skipped(after)
    # The other fragments count a step without messages, so that `skipped` and
    # `skipped_steps` are the same in all.
    outer = tuple(
      after if index == fragment else states.idle_step(idle, skipped)
      for index, idle in enumerate(state.outer)
    )
    updates = fill_zeros(given.params, updates)
    return Stepped(updates, outer, state.flight, skipped)

  def deliver(self, fragment: int, state: LocalState, given: Given) -> Stepped:
    """The update of a fragment when workers synchronize."""
    # `Delayed` overrides this to apply an update that is in flight instead.
    return self.exchange(fragment, state, given)

  def undelivered(
    self, state: LocalState, fragment: int, moved: jax.Array, p: jax.Array
  ) -> jax.Array:
    """θ − θ_w of a leaf p after workers have synchronized: what its dtype cannot hold.

    Args:
      state: before the synchronization.
      fragment: of the leaf.
      moved: θ − θ_w of the leaf before, [1, …].
      p: the leaf of the outer parameters.
    """
    return flatten.representable(moved, p.dtype)[1]


class Mixed(Exchange):
  """Workers mix their own parameters with the outer ones after an update."""

  def keep_moved(self, moved: jax.Array, u: jax.Array, p: jax.Array) -> jax.Array:
    """`mixing` times the difference to the new outer parameters."""
    # θ′ − (α θ_w + (1 − α) θ′) = α (θ − θ_w + u), with θ′ = θ + u
    return self.mixing * (moved + u[None].astype(moved.dtype))


class Delayed(Mixed):
  """An update is in flight for `delay` steps before it is applied; one at most is in flight at a time.

  `state.flight.left` is the number of steps until it is applied, 0 while none is in
  flight.
  """

  def init(self, params: optax.Params) -> LocalState:
    """The state with nothing in flight."""
    state = super().init(params)
    return state._replace(flight=_landed(optax.tree.zeros_like(params)))

  def step(
    self, due: jax.Array, state: LocalState, given: Given
  ) -> tuple[Stepped, jax.Array]:
    """The step, and 1 + the fragment that it updates, 0 for none; no exchange begins while an update is in flight.

    `due` is i32[], 1 + the fragment whose turn it is, 0 for none.
    """
    count = self.fragments.count
    flight = state.flight
    # Kinds of steps: 0 without an exchange, 1 + f exchanges fragment f, and `count + 1`
    # applies the update in flight, which is due when one step is left.
    arrives = jnp.where(flight.left == 1, count + 1, 0)
    kind = jnp.where(flight.left > 0, arrives, due)
    kinds = [*self.kinds(given), lambda state: self._apply_flight(state, given)]
    # An exchange updates no parameters: its update is applied later.
    updated = jnp.where(kind > count, flight.fragment + 1, 0)
    return varying.switch(kind, kinds, state), updated

  def agree(self, state: LocalState, given: Given) -> Stepped:
    """A step without an exchange, after which the flight is one step shorter."""
    agreed = super().agree(state, given)
    left = jnp.maximum(state.flight.left - 1, 0)
    return agreed._replace(flight=state.flight._replace(left=left))

  def exchange(self, fragment: int, state: LocalState, given: Given) -> Stepped:
    """The exchange of a fragment, whose update is in flight from now on instead of being applied."""
    done = super().exchange(fragment, state, given)
    flight = Flight(done.updates, jnp.int32(self.delay), jnp.int32(fragment))
    # Nothing reaches the parameters in the step that computes the update.
    zeros = optax.tree.zeros_like(done.updates)
    return done._replace(updates=zeros, flight=flight)

  def deliver(self, fragment: int, state: LocalState, given: Given) -> Stepped:
    """When workers synchronize: applies the update of the fragment if it is in flight, else exchanges now."""
    apply = lambda state: self._apply_flight(state, given)
    # Within the lambda, `super()` would take its `state` for `self`.
    exchange = super().exchange
    exchange_now = lambda state: exchange(fragment, state, given)
    return varying.cond(_is_flying(state, fragment), apply, exchange_now, state)

  def undelivered(
    self, state: LocalState, fragment: int, moved: jax.Array, p: jax.Array
  ) -> jax.Array:
    """θ − θ_w of a leaf after workers have synchronized: zeros where an update in flight was applied."""
    # That update is of the movement before its flight. Movement during the flight is
    # dropped, since workers go on from the outer parameters.
    left = super().undelivered(state, fragment, moved, p)
    return jnp.where(_is_flying(state, fragment), jnp.zeros_like(left), left)

  def _apply_flight(self, state: LocalState, given: Given) -> Stepped:
    """The update that was in flight."""
    agreed = self.agree(state, given)
    # No exchange begins: the workers only agree whether to skip.
    updates = zeros_if(agreed.skipped, state.flight.update)
    return agreed._replace(updates=updates, flight=_landed(agreed.updates))


def _landed(zeros: optax.Updates) -> Flight:
  """The `Flight` while nothing is in flight."""
  return Flight(zeros, jnp.int32(0), jnp.int32(0))


def _is_flying(state: LocalState, fragment: int) -> jax.Array:
  """Whether the update of a fragment is in flight, bool[]."""
  return (state.flight.left > 0) & (state.flight.fragment == fragment)
