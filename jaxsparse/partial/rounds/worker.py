"""`Rounds`: local steps of workers that come and go, each in a process of its own; exchanges that wait for nobody.

The anchor θ is the outer parameters, equal on all workers. Between two calls of `step`
a worker w has:

    _exchanger     the anchor, the residual r of this worker, and its exchanges
    _protocol      what the server and other workers are told, in a thread
    _endpoint      passes requests to that thread, and its answers back
    _place         where the parameters are: on one process, or on the several of a worker
    _base          f32 leaves from which θ_w was trained: θ, with `apply_residual` θ − r / weight
    _moved         f32 leaves: base − θ_w when training last went on from an anchor
    _undelivered   i64[F, 2]: for each fragment Σ weight of the steps since its movement
                   was delivered last, and the number of these steps
    _trained       i64[F, 2]: the part of `_undelivered` whose movement `_moved` has
    _recent_weight the weight of this worker in its rounds, a running mean; 0 before the first
    _since         the steps since training last went on from an anchor
    _turn          H // F, the steps from the round of one fragment to that of the next
    _flight        the exchange under way: the movement that it delivers, `_undelivered` when
                   it began, and `_exchanger.delivered`, the result of the round before; or None
    _answer        to `_flight`: LATER: it has not ended; a position: its round has counted;
                   None: parameters that are not finite are in no round
    _refused       how often in succession the parameters were not finite
    _of_fragment   a pytree like the parameters: the number of the fragment of each leaf
    _dtypes        a pytree: the dtype of each parameter
    _applies       `apply_residual`
    _has_left      whether `leave` was called
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxsparse.arrays.flatten import all_finite, flatten
from jaxsparse.launch.rank import START_TIMEOUT
from jaxsparse.partial.net import messages, sockets
from jaxsparse.partial.net.alike import REFUSALS, Alike, check_start
from jaxsparse.partial.net.endpoint import ControllerLost
from jaxsparse.partial.net.messages import Next, WorkerMessage
from jaxsparse.partial.net.sockets import Keys
from jaxsparse.partial.rounds import checks, moving, processes, slices
from jaxsparse.partial.rounds.checks import SavedState
from jaxsparse.partial.rounds.exchanger import Exchanger
from jaxsparse.partial.rounds.outer_step import OuterStep, Result
from jaxsparse.partial.rounds.protocol import RoundRequest
from jaxsparse.train.skipped import SkipWatch
from jaxsparse.types import Comm

_FRACTION = 16  # fractional bits of a mean weight, which is sent as an integer
# bound of a message, in sizes of this worker's anchor at the start: for the anchor of a
# donor with the state of its outer chain, and a message of a round of many workers
_MOST_ARRAYS = 64


class Rounds:
  """A worker that trains by itself and exchanges what it has moved in rounds with those that are there.

      θ_w ← θ_w + inner(∇_w(θ_w))                                      your steps, without a message
      θ   ← θ + outer(Σ_w weight_w (θ − θ_w)),   θ_w ← θ               a round, every H steps

  This is `js.local_steps` between processes that may be lost, suspended, slow, or new:
  the anchor θ is the same on all workers after each round, bit for bit, which they
  check. The server (`python -m jaxsparse.partial --quorum=K`) begins a round when all
  workers that are there are ready, or K have been for the grace window, with all that
  are ready. Who comes later keeps what it has moved, and its residual, for the next
  round. A round counts for all its members or for none. Over all rounds, with r the
  residuals, and weights as in `step`:

      Σ_rounds total + Σ_w r_w = Σ_rounds Σ_w weight_w (θ − θ_w)        (Law C)

  A worker that leaves for good hands its residual over to another one, in its last
  round; the residual of a lost worker is lost. The exchange runs on the CPU in the
  background. With a delay of τ steps it begins τ steps before it is applied, and takes
  no time from training. What a worker moves meanwhile goes into the next round.

  Args:
    address: of the server, or a list, the same for all workers: where a server is
      silent for the `limit` that it was started with, or has too few workers for a
      round, the next one is tried, over and over, while training goes on.
    number: this worker's, 0 … N − 1; a worker that is started again takes its old one,
      or any that is free.
    params: the parameters that training starts from, the same for all workers; global
      arrays where a worker is several processes that `jax.distributed` joins. They all
      make `Rounds`, and call its methods and `state` together.
    outer: makes the outer chain for the `js.Comm` of a round, which begins with any
      transform but A2SGD's and `js.ef21`: `lambda comm:
      optax.chain(js.onebit_transform(comm), optax.sgd(1.0))`.
    every: H, the steps from a round to the next one. A slow worker may have fewer.
    fragments, delay: F and τ, as in `js.local_steps`.
    mixing: α, as in `js.local_steps`, whose default with a delay is 0: a worker then
      drops what it moved meanwhile. None, the default here, keeps it.
    apply_residual: whether the parameters of a worker include what it has given and no
      round has delivered, as in `js.local_steps`: θ_w ← θ − r_w / weight_w after a
      round. Signs then converge faster. Not with `mixing`.
    link: whether this is a link, which does not train, but brings to its group what
      others have moved: Σ_links (θ_w − θ) is added to the anchor in a round, as it is,
      in float32. Its steps have no weight.
    wait: every H / F steps, wait up to so many seconds for the round to end; a late
      round is applied after a later step. By default the `grace` of the server; where
      that is "auto" 2 s less what H / F steps usually take, at least 0.
    bind, keys: as in `js.partial.Worker`.
    timeout: seconds to wait for the server at the start, and for the next message of a
      worker that the server has; more where messages to all members of a round take
      longer at 5 Mbit/s.
    device: a CPU device for the exchanges; one for each of several workers in one
      process.
    state: a saved `state` of this worker, to resume after all have ended; one of an
      older round takes the last anchor. If the worker was in rounds after that one, the
      residual and the movement in the state are dropped, with a warning.

  Attributes:
    params: to begin with: those given, or the anchor of a worker that was there before.
    round: the number of rounds that the anchor has been through.
    group: the `WorkerGroup` of the last round of this worker: `members`, their
      `weights`, and its `iteration`, from 0. A change of members tells a loop to share
      out its data anew.

  Raises:
    ValueError: for arguments outside these choices, an address that requires keys
      without them, keys of another worker, a number that a living worker has,
      parameters or a state that are not finite; a state that was saved by another
      number or run, in rounds that the others have not had, or that has changed since;
      leaves, values at the start, `fragments` or an outer chain unlike those of other
      workers.
    ControllerLost: if no server answers at the start.
    RuntimeError: if another process of this worker is lost.

  Example:
    >>> import jax.numpy as jnp, optax, jaxsparse as js
    >>> outer = lambda comm: optax.chain(js.onebit_transform(comm), optax.sgd(1.0))
    >>> with js.partial.Server(js.partial.Quorum(1, quorum=1)) as server:
    ...   with js.partial.Rounds(server.address, 0, jnp.zeros(3), outer, every=10) as worker:
    ...     params = worker.params
    ...     for _ in range(10):
    ...       params = worker.step(params + 0.5)
    >>> params, worker.round
    (Array([5., 5., 5.], dtype=float32), 1)

  DiLoCo (Douillard et al., 2023), Streaming DiLoCo (2025) for fragments, delay and
  mixing.
  """

  @slices.without_mesh()
  def __init__(
    self,
    address: str | Sequence[str],
    number: int,
    params: optax.Params,
    outer: Callable[[Comm], optax.GradientTransformation],
    *,
    every: int,
    fragments: int = 1,
    delay: int = 0,
    mixing: float | None = None,
    apply_residual: bool = False,
    link: bool = False,
    wait: float | None = None,
    bind: str = sockets.LOOPBACK,
    keys: Keys | None = None,
    timeout: float = START_TIMEOUT,
    device: jax.Device | None = None,
    state: SavedState | None = None,
  ):
    checks.check_options(
      number,
      every,
      fragments,
      delay,
      mixing,
      apply_residual,
      link,
      wait=wait,
      timeout=timeout,
    )
    check_start(params)
    params = jax.tree.map(jnp.asarray, params)
    self._place = slices.place_of(params)
    self._turn = every // fragments  # steps from one fragment to the next
    self._delay = delay
    self._mixing = mixing
    self._wait = wait
    self._worker = number
    self._applies = apply_residual
    self._has_left = False
    self._refused = 0
    self._skips = SkipWatch("js.partial.Rounds", "rounds")
    self._dtypes = jax.tree.map(jnp.result_type, params)
    with processes.errors_told(self._place):
      servers = sockets.servers(address, keys)
      sockets.check_keys(keys, number)
      step = OuterStep(outer, fragments, device)
      # `alike` is what the server compares between workers when this one joins.
      alike = self._make_anchor(params, step, link, state)
      # Bytes of this anchor, before the first round of its parameters alone. A donor
      # also sends the state of the outer chain, of Adam for example two arrays a
      # parameter: `_MOST_ARRAYS` leaves room for it.
      size = step.size(self._exchanger.anchor)
      self._endpoint = processes.PartEndpoint(
        servers, bind, keys, _MOST_ARRAYS * size + messages.LONGEST, timeout
      )
    self._connect(alike, len(servers))
    # Of a stale state the anchor alone is kept.
    is_kept = state and not self._exchanger.is_stale
    self._start(state if is_kept else None)

  def _make_anchor(
    self,
    params: optax.Params,
    step: OuterStep,
    link: bool,
    state: SavedState | None,
  ) -> Alike:
    """Makes the exchanger with the anchor of a saved state, or of `params`; returns what must be equal on all workers.

    Args:
      params: of the worker, in their own dtypes.
      step: the outer step.
      link: whether this worker is a link.
      state: a saved one, or None.

    Returns:
      Leaves, their start values, options, outer chain and run, which the server
      compares between workers.
    """
    # the leaves, or the slices of them, that this process exchanges
    own_params = self._place.to_host(params)
    anchor = step.start(own_params)
    fragments = step.fragments.count
    # a pytree like the parameters: the number of the fragment of each leaf
    self._of_fragment = step.fragments.numbers(anchor.params)
    self._exchanger = Exchanger(step, anchor, self._worker, link)
    if state is not None:
      names = checks.hash_names(params)
      checks.check_state(state, self._worker, fragments, self._place.where, names)
      self._exchanger.restore(state)
    alike = Alike.of(
      params,
      own_params,
      fragments=fragments,
      parts=self._place.parts,
      outer=step.chain_digest(anchor),
    )
    # 0: a worker without a state belongs to no run yet.
    return alike._replace(run=int(state["run"]) if state else 0)

  def _connect(self, alike: Alike, servers: int) -> None:
    """Joins the workers at the server; returns once this worker has their anchor.

    Args:
      alike: what all workers need alike.
      servers: how many addresses of servers there are.
    """
    endpoint = self._endpoint
    exchanger = self._exchanger
    exchanger.post = endpoint.post
    self._membership = endpoint.make_membership(
      self._worker,
      # until a server states its own limit: each gets an equal part of the timeout
      limit=endpoint.timeout / servers,
      position=exchanger.anchor.position,
      alike=alike,
      part=self._place.part,
    )
    self._protocol = processes.make_protocol(
      self._place,
      endpoint,
      self._membership,
      exchanger,
      flatten(exchanger.anchor.params)[0].size,  # entries
      servers,
    )
    name = f"rounds, worker {self._worker}"
    endpoint.start(self._protocol, exchanger.model, ControllerLost, name)
    try:
      # the answer to the request to join: waits for it, and raises a refusal
      processes.take(self._place, endpoint)
      exchanger.compile(self._protocol.sizes)
    except Exception as error:
      # Ends the thread, or its heartbeats would keep this worker alive at the server.
      endpoint.post(error)
      endpoint.join()
      raise

  def _start(self, state: SavedState | None) -> None:
    """Goes on from the anchor, with what was moved and not delivered when the state was saved; None: nothing was."""
    vector, unflatten = flatten(self._exchanger.anchor.params)
    fragments = self._exchanger.outer.fragments.count
    state = state or {
      "moved": np.zeros_like(vector),
      "trained": np.zeros((fragments, 2), int),
      "share": 0.0,
    }
    share = float(state["share"])  # `_recent_weight` when it was saved
    base = self._make_base(share)
    moved = self._place.to_device(unflatten(state["moved"]))
    self.params = self._go_on(base, moved, np.array(state["trained"]), share)

  def _go_on(
    self,
    base: optax.Params,
    moved: optax.Params,
    undelivered: np.ndarray,
    recent: float,
  ) -> optax.Params:
    """The parameters θ_w = base − moved, from which training goes on after a change of the anchor.

    Args:
      base: f32 leaves, as `_make_base` has them of the anchor as it is now.
      moved: f32 leaves, base − θ_w, which no round has delivered.
      undelivered: i64[F, 2], weights and numbers of the steps in `moved`, by fragment.
      recent: weight of this worker in its rounds, a running mean; 0 before the first.
    """
    # Made first, since this line may raise: then nothing has changed.
    params = self._make_params(base, moved)
    # Python raises no KeyboardInterrupt between assignments without calls: up to
    # `_since` all change, or none.
    self._base = base
    self._moved = moved  # base − θ_w when training last went on from the anchor
    # by fragment: weights of the steps, and steps
    self._undelivered = self._trained = undelivered
    self._recent_weight = recent  # weight of this worker in a round, smoothed
    # what was given, its `_undelivered`, and the result of the round before
    self._flight: tuple[optax.Params, np.ndarray, Result | None] | None = None
    self._answer: Any = Next.LATER  # to the exchange under way, until it is applied
    self._since = 0
    self.round = self._exchanger.anchor.position.round
    self.group = self._exchanger.group
    return params

  @property
  @slices.without_mesh()
  def state(self) -> SavedState:
    """Arrays to save and to begin with again: the anchor and the outer state, the residual, and what was moved since.

    The movement is that of when `step` has changed `round`: later steps are not in it.

    Raises:
      RuntimeError: while an exchange is under way: save after a call of `step` that has
        changed `round`, or `leave`.
    """
    if self._flight is not None:
      raise RuntimeError(
        "an exchange is under way: save the state after a call of `step` that has changed `round`"
      )
    moved = self._exchanger.outer.on_cpu(self._place.to_host(self._moved))
    local = {
      "moved": np.asarray(flatten(moved)[0]),
      "trained": self._trained,
      "share": np.float64(self._recent_weight),
      "fragments": np.int64(len(self._undelivered)),
      "part": np.array(self._place.where),
      "names": np.int64(checks.hash_names(self._dtypes)),
    }
    return checks.seal(
      self._exchanger.arrays | local, self._worker, self._membership.alike.run
    )

  @slices.without_mesh()
  def step(self, params: optax.Params, weight: Any = 1) -> optax.Params:
    """Call it after each local step: begins an exchange or applies a round when one is due.

    Args:
      params: of this worker, after a local step from those that the last call returned.
      weight: of this step: the examples or tokens of its batch, a whole number of
        Python, numpy or JAX, also 32.0; 0 if nothing was trained. The weight of a
        worker in a round is the mean of its steps, divided by the sum of the means of
        all workers that are there, late ones included: every step counts alike,
        whenever it is delivered.

    Returns:
      The parameters to go on from: the given ones, or after a round the anchor and what
      was moved meanwhile. When a round is due, parameters that are not finite are
      replaced by the anchor, with a warning.

    Raises:
      FloatingPointError: at the tenth time in succession that the parameters are not
        finite.
      RuntimeError: after `leave`.
    """
    if self._has_left:
      raise RuntimeError(
        f"Rounds: worker {self._worker} has left: go on with another Rounds(…, state=worker.state)"
      )
    weight = checks.read_weight(weight)
    self._since += 1  # 0 again when training goes on from an anchor
    # Each row, of a fragment, gets the weight and one step: all fragments are trained.
    added = 0 if self._exchanger.is_link else weight, 1
    self._undelivered = np.add(self._undelivered, added)
    # What the server counts as lost with this worker: the steps that are not wholly
    # delivered. The fragment delivered longest ago has all of them, the largest sum.
    self._protocol.undelivered = int(self._undelivered[:, 0].max())
    # The round is due at the end of a turn of H / F steps, and its exchange begins τ
    # steps before.
    if self._flight is None and self._since >= self._turn - self._delay:
      self._begin(params)
    if self._since < self._turn:
      return params
    wait = self._protocol.grace if self._wait is None else self._wait
    # Training waits for a round at the end of a turn; at other steps it only looks.
    # `_finish` also replaces parameters in which `_begin` has found NaN or Inf.
    return self._finish(params, 0 if self._since % self._turn else wait)

  @slices.without_mesh()
  def leave(self, params: optax.Params | None = None) -> optax.Params:
    """Leaves: the other workers continue without this one.

    Args:
      params: as `step` returned them last, to leave for good: what they have moved is
        exchanged in a last round of each fragment, in which another member takes over
        the residual; `state` has it where there is none. Parameters that are not finite
        are replaced by the anchor before, with a warning. Without a quorum within the
        grace window and `timeout` a warning says so, and `state` has what was moved,
        too. None to leave at once, and to go on some day from `state`, which then
        lacks the steps since `round` has changed or an exchange has begun.

    Returns:
      The anchor, as parameters.
    """
    if params is not None and self._membership.state != "ended":
      params = self._deliver(params)
    self._has_left = True
    self._endpoint.post(RoundRequest(WorkerMessage.BYE))
    self._endpoint.join()
    self._exchanger.close()
    self._endpoint.check_parts()
    self._land(params)
    return self._make_params(
      self._place.to_device(self._exchanger.anchor.params),
      jax.tree.map(jnp.zeros_like, self._base),
    )

  def _deliver(self, params: optax.Params) -> optax.Params:
    """Takes part in a last round of each fragment; returns the parameters then, or once the time is over."""
    self._exchanger.is_final = True
    # A round for each fragment, and before them the one that is under way.
    rounds = len(self._undelivered) + (self._flight is not None)
    while rounds:
      if self._flight is None:
        self._begin(params)
      params = self._finish(params, self._protocol.grace + self._membership.timeout)
      if self._flight is not None:  # there was no time for it
        break
      # Parameters that are not finite, which the anchor has replaced, were in no round.
      rounds -= not self._refused
    return params

  def _land(self, params: optax.Params | None) -> None:
    """Ends the exchange under way, once no round can count any more: applies its round, or keeps all movement.

    Args:
      params: θ_w, where the worker leaves with parameters; None for those with which
        the exchange began.
    """
    if self._flight is None:
      return
    # `trained`: the steps up to `params`
    delta, trained, before = self._flight
    if params is None:
      params = self._make_params(self._base, delta)
    else:
      trained = self._undelivered
    # `delivered` is not the result from before the exchange: its round has counted.
    if self._exchanger.delivered is not before:
      self._apply(params)  # which ends the exchange, too
      return
    # base − params; `_moved` keeps what rounding to the dtypes of `params` has lost
    moved = moving.movement(self._base, self._moved, params)
    # A state with NaN could not be restored: movement that is not finite is dropped,
    # and its steps with it.
    finite = all_finite(moved)
    self._moved = jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0.0), moved)
    self._trained = trained * int(finite)
    self._flight = None
    if self._exchanger.is_final:
      logging.getLogger(__name__).warning(
        f"worker {self._worker} leaves, and its last round has not taken place: "
        "`state` has what it has moved since the one before"
      )

  def __enter__(self) -> Self:
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
    """Leaves, if it has not left."""
    # The error may come from JAX, since another process of this worker is lost: within
    # the limit the thread notices that too, and ends.
    if kind and self._place.parts > 1:
      self._endpoint.join(self._membership.limit)
    self.leave()

  def _begin(self, params: optax.Params) -> None:
    """Begins the exchange of what was moved: asks for a round, or for the answer None if `params` are not finite."""
    delta = moving.movement(self._base, self._moved, params)
    flight = delta, self._undelivered, self._exchanger.delivered
    # Round r exchanges fragment r mod F. The request has the mean weight of its steps
    # since its last round, as an integer with `_FRACTION` fractional bits.
    fragment = self._exchanger.anchor.position.round % len(self._undelivered)
    weight, steps = self._undelivered[fragment].tolist()
    weights = self._undelivered[:, 0]
    # The steps that another fragment lacks after the round are not wholly delivered.
    delivers = weights.max() - np.delete(weights, fragment).max(initial=0)
    request = RoundRequest(
      WorkerMessage.READY, (weight << _FRACTION) // max(1, steps), int(delivers)
    )
    post = lambda kind: self._endpoint.post(request._replace(kind=kind))
    self._exchanger.prepare(delta, self._place.to_host(delta), post)
    # Set last: if a line above raises, or is interrupted, the next step begins again.
    self._flight = flight

  def _finish(self, params: optax.Params, wait: float) -> optax.Params:
    """The parameters to go on from, after at most `wait` seconds: after the round, if it has ended, or `params`.

    Parameters that were not finite when the exchange began are replaced by the anchor.

    Args:
      params: θ_w now, in the dtypes of the parameters.
      wait: seconds to wait for the exchange under way to end.
    """
    # An earlier call may have taken the answer, and an error or an interrupt have kept
    # it from being applied: then `_answer` still has it.
    if self._answer == Next.LATER:
      self._answer = processes.take(self._place, self._endpoint, wait)
    if self._answer == Next.LATER:
      return params
    # None: `_begin` has found parameters that are not finite.
    return self._restart() if self._answer is None else self._apply(params)

  def _restart(self) -> optax.Params:
    """The parameters of the anchor, in place of those that are not finite."""
    self._refused += 1
    if self._refused >= REFUSALS:
      raise FloatingPointError(
        f"the parameters are not finite, {REFUSALS} times in succession"
      )
    logging.getLogger(__name__).warning(
      f"worker {self._worker}: the parameters are not finite, and enter no round: "
      "training goes on from the anchor"
    )
    recent = self._recent_weight
    base = self._make_base(recent)
    # The movement since the anchor is dropped, and its steps with it.
    moved = jax.tree.map(jnp.zeros_like, base)
    return self._go_on(base, moved, np.zeros_like(self._undelivered), recent)

  def _apply(self, params: optax.Params) -> optax.Params:
    """The parameters after the round of the exchange that was under way: the anchor, and what is not delivered.

    Args:
      params: θ_w now; steps after the exchange has begun are in the next round.
    """
    result = self._exchanger.delivered
    assert self._flight
    assert result
    delta, trained, _ = self._flight
    group = self._exchanger.group
    weight = group.weights[group.members.index(self._worker)]
    # The residual, in the unit of weight · (θ − θ_w), is from rounds with different
    # weights of this worker: it is divided by their running mean. Rounds of weight 0
    # deliver nothing, and leave the mean as it was.
    before = self._recent_weight
    recent = ((before or weight) + (weight or before)) / 2
    after = self._make_base(recent)
    undelivered = self._undelivered.copy()
    moved = moving.movement(self._base, self._moved, params)
    if not result.skipped:
      mix = functools.partial(moving.mix, self._mixing)
      keep = moving.keep if self._mixing is None else mix
      # The exchanged fragment alone is delivered: what other fragments have moved
      # stays.
      choose = lambda fragment, *leaves: (
        keep(*leaves) if fragment == result.fragment else leaves[0]
      )
      moved = jax.tree.map(choose, self._of_fragment, moved, delta, self._base, after)
      undelivered[result.fragment] -= trained[result.fragment]
    # A round that was revoked later has delivered movement, which is given again.
    if (returned := self._exchanger.returned) is not None:
      moved = jax.tree.map(jnp.add, moved, self._place.to_device(returned))
    self._skips.add(result.skipped)
    # The warning names the user's line that calls `step`.
    self._skips.look(stacklevel=6, params=params, anchor=after)
    new_params = self._go_on(after, moved, undelivered, recent)
    self._exchanger.returned = None
    self._protocol.undelivered = int(undelivered[:, 0].max())
    self._refused = 0
    return new_params

  def _make_base(self, weight: float) -> optax.Params:
    """The parameters from which a worker goes on, f32 on its device: the anchor, with `apply_residual` less r / weight.

    Args:
      weight: of this worker in its rounds, a running mean, by which r is divided; 0
        before its first round.
    """
    anchor = self._exchanger.anchor
    params = anchor.params
    if self._applies and weight:
      params = self._exchanger.outer.less_residual(anchor, weight)
    return self._place.to_device(params)

  def _make_params(self, anchor: optax.Params, moved: optax.Params) -> optax.Params:
    """`anchor` − `moved`, f32, rounded to the dtypes of the parameters."""
    return jax.tree.map(moving.parameters, anchor, moved, self._dtypes)
