"""The outer step of a round, compiled once for each size of group: what the workers give, reduced, moves the anchor.

delta_w = θ − θ_w          θ′ = θ + outer(weight_w · delta_w, residual)          on the CPU of each worker
"""

import functools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core

from jaxsparse._compat import is_key, words_of_keys
from jaxsparse.arrays import flatten
from jaxsparse.comm.peers import PEERS, PeerComm, Send
from jaxsparse.comm.verbs import mark_total
from jaxsparse.partial.net.alike import MOST_ID
from jaxsparse.partial.net.messages import MOST_MEMBERS, MOST_ROUNDS, RoundPosition
from jaxsparse.partial.rounds.checks import check_alike, halve_step
from jaxsparse.partial.rounds.lineage import MOST_IDS, Lineage
from jaxsparse.train.program_digest import program_digest
from jaxsparse.transform import state as states
from jaxsparse.transform.atomic import atomic, select_state
from jaxsparse.transform.fragments import Fragments, fill_zeros
from jaxsparse.transform.residuals import residual_leaves
from jaxsparse.types import Comm, State
from jaxsparse.weights import digests

# the largest group whose program is compared: a collective of teams needs a group that
# they divide
_MOST_TEAMS = 8
_FORMAT = 2  # version of the bytes of an anchor
_NUMBERS = 7  # integers in the header of an anchor before its two lists


class Anchor(NamedTuple):
  """What all workers have alike after a round, and what this worker has of its own.

  Attributes:
    params: θ, f32, a pytree of arrays of the CPU.
    outer: the state of the outer chain for a group of `size` workers, by the number of
      the fragment. Of this worker alone: residuals, `worker` arrays and counters in it.
    size: the number of workers that the state of the outer chain is for; 0, without a
      state, before the first round.
    position: the last round.
    lineage: of the rounds that it has been through.
    latest: by worker, the number of the group of the last round with it in which the
      anchor moved. What a worker had not delivered in an earlier round is delivered,
      handed over or lost.
    residual_group: of this worker alone, the number of that group for its residual.
  """

  params: optax.Params
  outer: dict[int, optax.OptState]
  size: int = 0
  position: RoundPosition = RoundPosition()
  lineage: Lineage = Lineage()
  latest: Mapping[int, int] = MappingProxyType({})
  residual_group: int = 0

  def has_moved(self, members: Iterable[int], group: int) -> "Anchor":
    """The anchor with `latest` and `residual_group` set, after a round with this worker in which the anchor moved.

    Args:
      members: numbers of the workers in the round.
      group: number of the group.
    """
    latest = dict.fromkeys(members, group)
    return self._replace(latest={**self.latest, **latest}, residual_group=group)


class Result(NamedTuple):
  """The outcome of an exchange.

  Attributes:
    anchor: after the round.
    fragment: the number of the fragment that was exchanged.
    skipped: whether the total was not finite, so that nothing has happened.
    totals: all that a worker that was away needs to repeat the outer step; () if it was
      skipped.
  """

  anchor: Anchor
  fragment: int
  skipped: bool
  totals: tuple[np.ndarray, ...] = ()


class _Program(NamedTuple):
  """The compiled halves of the outer step, of leaves.

  Attributes:
    exchange: from the leaves of the operands of `_step`, totals, and then the results
      of this worker alone; sends all messages.
    apply: from totals and these leaves, the results that are the same on all workers.
    totals: shape and dtype of each total.
    equal: of each result of `_step`, whether it is the same on all workers.
    structure: the pytree structure of the results.
  """

  exchange: Callable[..., list[jax.Array]]
  apply: Callable[..., list[jax.Array]]
  totals: Sequence[Any]
  equal: list[bool]
  structure: Any

  def finish(
    self, operands: tuple, totals: Sequence[Any], local: Iterable[Any]
  ) -> tuple[optax.Params, optax.OptState, jax.Array]:
    """The results of `_step`: those equal on all workers from the totals, the others from `local`.

    Args:
      operands: of `_step`; those of this worker alone are not read.
      totals: of the round.
      local: the results of this worker alone, in their order.
    """
    alike = iter(self.apply(*totals, *jax.tree.leaves(operands)))
    of_worker = iter(local)
    leaves = [next(alike if equal else of_worker) for equal in self.equal]
    return jax.tree.unflatten(self.structure, leaves)


class OuterStep:
  """The outer chain of rounds.

  Args:
    chain: makes the chain for a comm: `lambda comm:
      optax.chain(js.onebit_transform(comm), optax.sgd(1.0))`.
    fragments: F, as in `js.local_steps`: round r exchanges fragment r mod F.
    device: of the CPU, by default the first one. JAX runs programs with messages one
      after the other on a device, so that workers in one process need one each.

  Attributes:
    fragments: `count`, F, and `part(tree, f)`: the leaves of fragment f of a pytree,
      with `MaskedNode` in place of the others.
    _chain: as `chain`.
    _cpu: as `device`.
    _send: sends and receives the messages of the exchange that runs, as in `PeerComm`.
    _programs: the compiled step by the size of the group and the fragment.
  """

  def __init__(
    self,
    chain: Callable[[Comm], optax.GradientTransformation],
    fragments: int = 1,
    device: jax.Device | None = None,
  ):
    self._chain = chain
    self.fragments = Fragments(fragments)
    self._cpu = device or _first_cpu()
    # `run` replaces this one, which returns each message as if it were received.
    self._send: Send = lambda messages: [words for words, *_ in messages]
    self._programs: dict[tuple[int, int], _Program] = {}

  def start(self, params: optax.Params) -> Anchor:
    """The anchor of a worker before the first round."""
    return Anchor(self.on_cpu(params), {})

  def on_cpu(self, tree: optax.Params) -> optax.Params:
    """A pytree in float32 on the CPU."""
    return jax.tree.map(
      lambda leaf: jax.device_put(np.asarray(leaf, np.float32), self._cpu), tree
    )

  def run(
    self,
    anchor: Anchor,
    delta: optax.Params,
    weight: float,
    size: int,
    rank: int,
    group: int,
    send: Send,
  ) -> Result:
    """The outer step of a round with `size` workers; blocks until all messages have come.

    Args:
      anchor: of this worker, the same on all workers but for residuals.
      delta: θ − θ_w of this worker, f32.
      weight: of this worker in the mean.
      size: P, the number of workers in the round.
      rank: of this worker among them.
      group: the number of the group.
      send: sends and receives messages, as in `PeerComm`.
    """
    fragment = anchor.position.round % self.fragments.count
    outer = self._carry(anchor, size)  # the last group may have had another size
    # Compiled programs call whatever `_send` is when they run.
    self._send = send
    operands = self._operands(fragment, anchor, outer, delta, rank, weight)
    program = self._program(size, fragment, operands)
    results = program.exchange(*jax.tree.leaves(operands))
    totals = results[: len(program.totals)]
    # results of this worker alone: residuals above all
    local = results[len(totals) :]
    params, after, skipped = program.finish(operands, totals, local)
    following = _after(anchor, size, group, params, outer | {fragment: after})
    # the totals are what an absent worker needs to repeat this step
    kept = () if skipped else tuple(map(np.asarray, totals))
    return Result(following, fragment, bool(skipped), kept)

  def follow(
    self,
    anchor: Anchor,
    size: int,
    group: int,
    totals: Callable[[Any], Any] | None = None,
  ) -> tuple[Anchor, int]:
    """`anchor` after a round of others, bit for bit as theirs, and its fragment.

    Args:
      anchor: before it; what is of this worker alone stays.
      size: P, the number of workers in the round.
      group: the number of the group.
      totals: a function from the list of the totals' shapes and dtypes to the totals of
        the round; None if it was skipped.
    """
    fragment = anchor.position.round % self.fragments.count
    outer = self._carry(anchor, size)
    if totals is None:
      return _after(anchor, size, group, anchor.params, outer), fragment
    operands = self._operands(fragment, anchor, outer)
    program = self._program(size, fragment, operands)
    # Results that differ between workers, residuals above all, are those of the
    # members: this worker keeps its own, in the structure of the results of `_step`.
    before = jax.tree.leaves((anchor.params, outer[fragment], False))
    kept = [
      leaf for leaf, equal in zip(before, program.equal, strict=True) if not equal
    ]
    params, after, _ = program.finish(operands, totals(program.totals), kept)
    return _after(anchor, size, group, params, outer | {fragment: after}), fragment

  def skip(self, anchor: Anchor, result: Result) -> Result:
    """`result`, of a round that began with `anchor`, as if its outer step had been skipped."""
    moved = result.anchor
    # In a round's position `base` is the number of its group.
    unmoved, fragment = self.follow(anchor, moved.size, moved.position.base)
    # The state stays as before the round, but for counters, which count a skipped step.
    kept = select_state(jnp.bool_(True), unmoved.outer[fragment], moved.outer[fragment])
    unmoved = unmoved._replace(outer=unmoved.outer | {fragment: kept})
    return result._replace(anchor=unmoved, skipped=True, totals=())

  def _operands(
    self,
    fragment: int,
    anchor: Anchor,
    outer: dict[int, optax.OptState],
    delta: optax.Params | None = None,
    rank: int = 0,
    weight: float = 0.0,
  ) -> tuple:
    """The array operands of `_step`, on the CPU; without `delta` arrays of the right shapes take its place.

    Args:
      fragment: number of the exchanged fragment.
      anchor: before the round.
      outer: the state of the outer chain for the size of the group, by fragment.
      delta: θ − θ_w, f32 leaves of all fragments.
      rank: of this worker in the group.
      weight: of this worker in the mean.
    """
    # `apply` does not read `delta`: the parameters, of the same shapes, take its place.
    leaves = self.fragments.part(anchor.params if delta is None else delta, fragment)
    numbers = np.int32(rank), np.float32(weight)
    return jax.device_put((*numbers, leaves, outer[fragment], anchor.params), self._cpu)

  def _program(self, size: int, fragment: int, operands: tuple) -> _Program:
    """The outer step of a fragment for groups of a size, compiled as two programs on first use.

    The first one sends all messages and ends with their totals. The second one computes
    what the totals determine: a worker that missed the round runs it alone, with the
    totals of a link of the chain.
    """
    key = size, fragment
    if key not in self._programs:
      step = functools.partial(self._step, size, fragment)
      with jax.default_device(self._cpu):
        halves, shapes = halve_step(step, operands)
        leaves = jax.tree.leaves(operands)
        # The first inputs of the second half are the totals: their shapes and dtypes.
        totals = halves.second.in_avals[: halves.totals]
        compiled = lambda closed, *inputs: (
          jax.jit(core.jaxpr_as_fun(closed)).lower(*inputs).compile()
        )
        self._programs[key] = _Program(
          compiled(halves.first, *leaves),
          compiled(halves.second, *totals, *leaves),
          totals,
          halves.equal,
          jax.tree.structure(shapes),
        )
    return self._programs[key]

  def chain_digest(self, anchor: Anchor) -> str:
    """A digest of the traced outer step of fragment 0, for the smallest group of two or more that the chain allows.

    Workers whose digests differ have different chains, and may not be in one run.

    Args:
      anchor: of any round, for the shapes of its parameters.

    Raises:
      ValueError: for a chain that no group of 2 … 8 workers allows, or whose results
        would not be alike on all workers.
    """
    for size in range(2, _MOST_TEAMS + 1):
      try:
        outer = self._first(anchor.params, size)
        break
      except ValueError:  # teams of a collective do not divide this size
        if size == _MOST_TEAMS:
          raise
    operands = self._operands(0, anchor, outer)
    with jax.default_device(self._cpu):
      step = check_alike(functools.partial(self._step, size, 0), outer[0])
      return program_digest(jax.make_jaxpr(step)(*operands))

  def compile(self, anchor: Anchor, size: int) -> None:
    """Compiles the outer steps of all fragments for groups of a size."""
    missing = [
      fragment
      for fragment in range(self.fragments.count)
      if (size, fragment) not in self._programs
    ]
    outer = self._carry(anchor, size) if missing else {}
    for fragment in missing:
      self._program(size, fragment, self._operands(fragment, anchor, outer))

  def _comm(self, size: int, rank: jax.Array) -> PeerComm:
    """The comm of a group of a size at one rank; the lambda calls what `_send` is when a program runs."""
    return PeerComm(size, rank, lambda messages: self._send(messages))

  def _step(
    self,
    size: int,
    fragment: int,
    rank: jax.Array,
    weight: jax.Array,
    delta: optax.Params,
    before: optax.OptState,
    params: optax.Params,
  ) -> tuple[optax.Params, optax.OptState, jax.Array]:
    """The outer step of a fragment: the new parameters and state, and whether it was skipped, which keeps both.

    Nothing but the chain's collective sends messages.

    Args:
      size: number of workers in the group.
      fragment: number of the exchanged fragment.
      rank: i32[], of this worker in the group.
      weight: f32[], of this worker in the mean.
      delta: θ − θ_w of this worker, the leaves of the fragment alone.
      before: the state of the fragment's outer chain before the step.
      params: θ, f32, all leaves.

    Returns:
      θ′, all leaves; the state of the fragment's outer chain; bool[], whether skipped.
    """
    leaves = self.fragments.part(params, fragment)
    weighted = jax.tree.map(lambda leaf: weight * leaf, delta)
    # `atomic`: where a collective skips, updates are zeros, and all of the state stays
    # but counters.
    updates, outer = atomic(self._chain(self._comm(size, rank))).update(
      weighted, before, leaves
    )
    if self.fragments.count > 1:
      updates = fill_zeros(params, updates)
    after = optax.apply_updates(params, updates)
    # The optimizer behind the collective may overflow, on all workers alike, since
    # `check_alike` proves that it uses nothing of one worker alone. `mark_total`
    # declares the flag equal on all workers.
    skipped = mark_total(
      states.is_skipped(outer) | ~flatten.all_finite(after), (PEERS,)
    )
    after = jax.tree.map(functools.partial(jnp.where, skipped), params, after)
    return after, select_state(skipped, before, outer), skipped

  def _first(self, params: optax.Params, size: int) -> dict[int, optax.OptState]:
    """The state of the outer chain before the first round, for groups of a size, by fragment.

    Raises:
      ValueError: for a chain without a jaxsparse transform, or with one that remembers
        what each worker has given last; for a size that the chain does not allow.
    """
    with jax.default_device(self._cpu):
      chain = self._chain(self._comm(size, jnp.int32(0)))
      first = {
        fragment: chain.init(self.fragments.part(params, fragment))
        for fragment in range(self.fragments.count)
      }
    if not all(map(states.reduce_states, first.values())):
      raise ValueError(
        "Rounds: outer has no jaxsparse transform, so nothing would exchange what workers have moved: begin it with "
        "one, as in optax.chain(js.dense_transform(comm), optax.sgd(1.0)), which averages the parameters"
      )
    for state in states.reduce_states(first):
      for collective in state.collectives:
        if collective.traits.tracks_workers:
          raise ValueError(
            f"Rounds: outer has {collective.name}, which adds up what each worker has given last, as js.ef21 does, and "
            "would move the anchor by that in each round for which a worker is late, or after it has left: choose the "
            "transform inside, as js.onebit_transform(comm), whose residual stays with its worker"
          )
    return first

  def _carry(self, anchor: Anchor, size: int) -> dict[int, optax.OptState]:
    """The state of the outer chain, by fragment, for groups of `size`; arrays whose shapes it does not change stay."""
    if size == anchor.size:
      return anchor.outer
    first = self._first(anchor.params, size)
    if not anchor.size:
      return first
    is_node = states.is_reduce_state
    return jax.tree.map(_carry_node, anchor.outer, first, is_leaf=is_node)

  def less_residual(self, anchor: Anchor, weight: float) -> optax.Params:
    """θ − r_w / weight, f32 leaves: the anchor less the residual r_w of this worker, in units of weight · (θ − θ_w)."""
    return _less_residual(anchor.params, anchor.outer, np.float32(weight))

  def residual(self, anchor: Anchor, fragment: int | None = None) -> np.ndarray:
    """f32[m], the residuals of this worker in all jaxsparse transforms of the outer chain, concatenated.

    Their unit is weight_w · (θ − θ_w); their order is that of `add_residual`.

    Args:
      anchor: of this worker, whose outer state has them.
      fragment: number of the fragment whose residuals; None for those of all fragments.
    """
    residuals = _residuals(_of_fragment(anchor, fragment))
    return np.concatenate(
      [np.empty(0, np.float32), *map(np.ravel, residuals)], dtype=np.float32
    )

  def add_residual(
    self, anchor: Anchor, more: np.ndarray, fragment: int | None = None
  ) -> Anchor:
    """`anchor` with f32[m] added to the residuals, of one fragment or of all.

    Args:
      anchor: of this worker.
      more: f32[m], in the order of `residual`.
      fragment: number of the fragment; None for all.

    Raises:
      ValueError: for another m.
    """
    outer = _of_fragment(anchor, fragment)
    ends = np.cumsum([leaf.size for leaf in _residuals(outer)], dtype=int)
    if more.size != (size := ends[-1] if ends.size else 0):
      raise ValueError(f"{more.size} entries, the residuals of this worker have {size}")
    # One after the other, in the order of the residuals.
    following = iter(np.split(more, ends[:-1]))

    # `map_states` below visits residuals in the order of `_residuals`.
    def add(leaf: jax.Array) -> jax.Array:
      added = next(following).reshape(leaf.shape).astype(leaf.dtype)
      return jax.device_put(np.asarray(leaf) + added, self._cpu)

    def add_to(state: Any) -> Any:
      residual = jax.tree.map(add, state.carried.residual)
      return state._replace(carried=state.carried._replace(residual=residual))

    return anchor._replace(outer=anchor.outer | states.map_states(add_to, outer))

  # The part that all workers have alike, as bytes.

  def _parts(self, anchor: Anchor) -> Iterable[bytes | memoryview]:
    """The buffers of what all workers have alike, without copies.

    bytes of header u32 | header i64: format, hash of shapes, round, base, size, number
    of ids, of pairs, ids, pairs of `latest` | parameters | shared state | padding
    """
    latest = sorted(anchor.latest.items())
    ids = anchor.lineage.ids
    numbers = _FORMAT, _shapes(anchor.params), *anchor.position[:2], anchor.size
    lists = len(ids), len(latest), *ids, *sum(latest, ())
    header = np.array(numbers + lists, np.int64)
    yield from (header.nbytes.to_bytes(4), header.tobytes())
    leaves = (*jax.tree.leaves(anchor.params), *_alike(anchor.outer))
    for leaf in leaves:
      yield np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data
    # messages consist of whole 4-byte words
    yield bytes(-sum(leaf.nbytes for leaf in leaves) % 4)

  def pack(self, anchor: Anchor) -> bytes:
    """The bytes of what all workers have alike; they are the same on each of them."""
    return b"".join(self._parts(anchor))

  def digest(self, anchor: Anchor) -> int:
    """62 bits of a hash of what all workers have alike."""
    return digests.digest(self._parts(anchor))

  def size(self, anchor: Anchor) -> int:
    """Bytes of `pack`."""
    return sum(map(len, self._parts(anchor)))

  def unpack(self, content: bytes, local: Anchor) -> Anchor:
    """The anchor of another worker, with the residuals of this one.

    Args:
      content: the bytes, as `pack` returns them.
      local: the anchor of this worker.

    Raises:
      ValueError: for bytes that are not those of such an anchor, or parameters that are
        not finite.
    """
    header, at = _header_of(content)  # `at`: where the next array begins
    shapes, round_, base, size, ids, _ = header[1:_NUMBERS]
    if shapes != _shapes(local.params):
      raise ValueError("Rounds: the anchor is one of parameters with other shapes")
    lineage = Lineage(round_, tuple(header[_NUMBERS : _NUMBERS + ids]))
    # `dict` reads the list as pairs: worker, group of its last round.
    pairs = iter(header[_NUMBERS + ids :])
    latest = dict(zip(pairs, pairs, strict=True))
    arrays = list[np.ndarray]()
    outer = self._carry(local, size) if size else {}
    leaves, structure = jax.tree.flatten(local.params)
    for like in (*leaves, *_alike(outer)):
      array = np.frombuffer(content, like.dtype, like.size, at)
      arrays.append(array.reshape(like.shape))
      at += like.nbytes
    # `pack` adds zeros up to a whole word.
    if not 0 <= len(content) - at < 4:
      raise ValueError(
        f"{len(content)} bytes, those of an anchor of this model are {at}"
      )
    if not all(np.isfinite(leaf).all() for leaf in arrays[: len(leaves)]):
      raise ValueError("Rounds: the parameters of the anchor have NaN or Inf")
    params = self.on_cpu(jax.tree.unflatten(structure, arrays[: len(leaves)]))
    outer = _with_alike(outer, jax.device_put(arrays[len(leaves) :], self._cpu))
    position = RoundPosition(round_, base)
    anchor = Anchor(
      params, outer, size, position, lineage, latest, local.residual_group
    )
    # An anchor of round 0 has no state that could have the residuals of this worker.
    return anchor if size else self.with_residual(anchor, local)

  def with_residual(self, anchor: Anchor, local: Anchor) -> Anchor:
    """`anchor` with this worker's residuals and their `residual_group`, which are those of the anchor `local`."""
    # An anchor before its first round has no state, and size 0.
    size = anchor.size or local.size
    alike = _alike(self._carry(anchor, size))
    outer = _with_alike(self._carry(local, size), alike)
    return anchor._replace(outer=outer, size=size, residual_group=local.residual_group)

  def without_residual(self, anchor: Anchor, group: int) -> Anchor:
    """`anchor` with residuals of zeros, as before the first round, and `residual_group` as given."""
    # For an anchor without a state `with_residual` makes that before the first round.
    return self.with_residual(anchor, Anchor(anchor.params, {}, residual_group=group))


def _after(
  anchor: Anchor,
  size: int,
  group: int,
  params: optax.Params,
  outer: dict[int, optax.OptState],
) -> Anchor:
  """`anchor` one round later, also where the round was skipped and it has not moved.

  `latest` and `residual_group` stay: where it has moved, `has_moved` sets them later.

  Args:
    anchor: before the round.
    size: number of workers in the round, for which `outer` is.
    group: number of the round's group: `base` of the position, hashed into the lineage.
    params: θ after the round, f32.
    outer: by fragment the state of the outer chain after the round, with the residuals
      of this worker.
  """
  return anchor._replace(
    params=params,
    outer=outer,
    size=size,
    position=RoundPosition(anchor.position.round + 1, group),
    lineage=anchor.lineage.after(group),
  )


def _first_cpu() -> jax.Device:
  """The first CPU device of this process.

  Raises:
    ValueError: if JAX has no CPU backend.
  """
  try:
    return jax.local_devices(backend="cpu")[0]
  except RuntimeError as error:
    raise ValueError(
      "Rounds: exchanges run on the CPU: add it to JAX_PLATFORMS, as in cuda,cpu"
    ) from error


def _carry_node(old: Any, new: Any) -> Any:
  """A node of the outer state, an array or a `ReduceState`, for a group of another size.

  Args:
    old: the node for the size before.
    new: the node before the first round, for the new size.
  """
  # An array of the optimizer behind the collective depends on no size.
  if not states.is_reduce_state(old):
    return old
  # Arrays whose shapes depend on the number of workers, for example bounds of regions,
  # begin anew.
  keep = lambda old, new: old if old.shape == new.shape else new
  structure: Any = jax.tree.structure

  def carry(old: Any, new: Any) -> Any:
    is_alike = structure(old) == structure(new)
    return jax.tree.map(keep, old, new) if is_alike else new

  was = old.carried
  # The residual stays; arrays of `worker` and `shared` stay where shapes are equal.
  fresh = new.carried
  worker = carry(was.worker, fresh.worker)
  carried = State(was.residual, worker, carry(was.shared, fresh.shared))
  return new._replace(carried=carried, counters=old.counters)


def _residuals(outer: optax.OptState) -> list[jax.Array]:
  """The residuals in a state of the outer chain, in its order."""
  return jax.tree.leaves(
    [state.carried.residual for state in states.reduce_states(outer)]
  )


@jax.jit
def _less_residual(
  params: optax.Params, outer: optax.OptState, weight: jax.Array
) -> optax.Params:
  """θ − residual / weight, f32 leaves: the model with what this worker has given and no round has delivered.

  The residual is in units of weight · (θ − θ_w).
  """
  # Names of leaves to f32 in their shapes; each leaf is in at most one transform.
  residuals = [residual_leaves(state) for state in states.reduce_states(outer)]
  behind = {name: leaf for leaves in residuals for name, leaf in leaves.items()}
  less = lambda name, leaf: leaf - behind[name] / weight if name in behind else leaf
  leaves = [less(name, leaf) for name, leaf in flatten.leaves_by_name(params).items()]
  return jax.tree.unflatten(jax.tree.structure(params), leaves)


def _of_fragment(anchor: Anchor, fragment: int | None) -> dict[int, optax.OptState]:
  """The state of the outer chain of one fragment, or of all, by the number of the fragment."""
  return anchor.outer if fragment is None else {fragment: anchor.outer[fragment]}


def _header_of(content: bytes) -> tuple[list[int], int]:
  """The numbers in the header of an anchor, as `_parts` has them, and the byte at which its arrays begin.

  Raises:
    ValueError: for bytes without such a header.
  """
  end = 4 + int.from_bytes(content[:4])
  header = np.frombuffer(content[4:end], np.int64).tolist()
  if len(header) < _NUMBERS:
    raise ValueError(f"Rounds: {len(content)} bytes are no anchor")
  if header[0] != _FORMAT:
    raise ValueError("Rounds: the anchor is one of another version of jaxsparse")
  # `ids` and `workers` say how long the two lists are.
  round_, _, size, ids, workers = header[2:_NUMBERS]
  is_whole = min(header) >= 0 and len(header) == _NUMBERS + ids + 2 * workers
  # Bounds of the server: with larger numbers it would refuse this worker's signals.
  is_small = round_ <= MOST_ROUNDS and ids <= MOST_IDS
  is_small &= max(size, workers) <= MOST_MEMBERS
  is_small &= max(header[_NUMBERS : _NUMBERS + ids], default=0) < MOST_ID
  if not is_whole or not is_small:
    raise ValueError(f"Rounds: {len(header)} numbers are no header of an anchor")
  return header, end


def _shapes(params: optax.Params) -> int:
  """A hash of the shapes of all leaves, since those of another model may have as many entries together."""
  return zlib.crc32(repr([leaf.shape for leaf in jax.tree.leaves(params)]).encode())


def _shared(outer: optax.OptState) -> optax.OptState:
  """A state of the outer chain with each `ReduceState` replaced by its part that is the same on every worker."""
  return states.map_states(lambda state: state.carried.shared, outer)


def _alike(outer: optax.OptState) -> list[jax.Array]:
  """The arrays of a state of the outer chain that are the same on every worker; random keys as their words."""
  return list(map(words_of_keys, jax.tree.leaves(_shared(outer))))


def _with_alike(outer: optax.OptState, arrays: list[jax.Array]) -> optax.OptState:
  """`outer` with `arrays`, in the order of `_alike`, in place of its arrays that are the same on every worker."""

  # Where `leaf` is a random key, `words` are those of the new key; else `words` is the
  # new array itself.
  def make(leaf: Any, words: Any) -> Any:
    make_keys = jax.random.wrap_key_data
    return make_keys(words, impl=jax.random.key_impl(leaf)) if is_key(leaf) else words

  # Of a `ReduceState` only `shared` is replaced; other nodes are arrays.
  def put(old: Any, shared: Any) -> Any:
    if not states.is_reduce_state(old):
      return shared
    return old._replace(carried=old.carried._replace(shared=shared))

  leaves, structure = jax.tree.flatten(_shared(outer))
  shared = jax.tree.unflatten(structure, map(make, leaves, arrays))
  return jax.tree.map(put, outer, shared, is_leaf=states.is_reduce_state)
