"""SparDL: Spar-Reduce-Scatter, Spar-All-Gather, global residuals (Zhao et al., "SparDL", §3, Algorithms 1 and 2).

Blocks of the gradient are reduced while they travel, and each is cut to its L = ⌈k d/P⌉ largest entries just before it
leaves, so that messages never grow. One team (d = 1) of six workers, the blocks that worker 0 sends, L entries each:

    reduce-scatter   stride 4   blocks 4 5      ->  worker 4   which adds them to its own
                     stride 2   blocks 2 3      ->  worker 2
                     stride 1   block  1        ->  worker 1
                     worker 0 now holds the sum of block 0
    all-gather       stride 1   block  0        ->  worker 5
                     stride 2   blocks 0 1      ->  worker 4
                     stride 4   blocks 0 1      ->  worker 2   (2 of 6 were missing)

2⌈log₂P⌉ messages and 4 L (P − 1) words for any P: no round knows whether P is a power of two.

With d teams the two halves run inside teams of P/d workers, over P/d blocks, and in between Spar-All-Gather adds up the
same block of all teams (§3.3): fewer rounds for more words. Two teams of three, worker 0:

    reduce-scatter   stride 2   block  2        ->  worker 2   of its team 0 1 2
                     stride 1   block  1        ->  worker 1
    R-SAG            block 0  <->  worker 3   which is worker 0 of the other team; both keep L of the sum
    all-gather       stride 1   block  0        ->  worker 2
                     stride 2   block  0        ->  worker 1

R-SAG repeats that log₂d times, for a power of two. B-SAG, for any d, gathers the h largest entries of each team instead
and adds them up at once; h follows the number N of different indices that come together (Algorithm 2), so that about L
remain. (The lower end 2k(d² + P − 2d)/(Pd) of B-SAG's words in the paper's Table 1 leaves out the reduce-scatter.)
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import selectors, sparse
from jaxsparse.blocks import Blocks
from jaxsparse.chunked import Chunked
from jaxsparse.collectives._base import SparseCollective, check_whole
from jaxsparse.comm import all_gather, in_rank_order, topology
from jaxsparse.held import Held
from jaxsparse.sparse import capacities as ladder
from jaxsparse.sparse import saturating
from jaxsparse.sparse.codec import Codec, Wire, codec_of
from jaxsparse.types import Comm, Cost, Counters, Reduced, Sparse, State

_LONGEST_CHUNK = 1 << 22  # entries: a magnitude keeps its exponent beside the number of a row
_SUMS = 1 << 30  # message numbers of sums over teams begin here, those of the reduce-scatter are strides


class Adaptive(NamedTuple):
  """What Algorithm 2 carries from step to step, the same on every worker.

  Attributes:
    h: i32[], entries of a block that each team sends, ⌈L/d⌉ … L.
    step: i32[], what was last added to h.
    right: bool[], whether that step was already in the right direction.
  """

  h: jax.Array
  step: jax.Array
  right: jax.Array


class Shared(NamedTuple):
  """What is the same on every worker; what an option has no use for is ().

  Attributes:
    adaptive: for B-SAG.
    step: i32[], which the noise of "int8" comes from.
  """

  adaptive: Any = ()
  step: Any = ()


@dataclasses.dataclass(frozen=True)
class Wired:
  """A codec, and the noise that it rounds with.

  Attributes:
    codec: for blocks of `length`.
    length: of a block.
    wire: what the codec does to values.
    key: of the noise, for "int8".
  """

  codec: Codec
  length: int
  wire: Wire
  key: jax.Array | None

  @property
  def rounds(self) -> bool:
    """Whether anything is lost on the way."""
    return self.wire != "f32"

  def encode(self, entries: Sparse, number: int) -> tuple[Any, Sparse]:
    """Rows of entries as message `number` of this step, and what that rounds off, in their slots."""
    noise = None
    if self.key is not None:
      noise = jax.random.uniform(jax.random.fold_in(self.key, number), entries.values.shape, jnp.float32)
    message, rounded = self.codec.encode(entries, noise)
    off = entries.values - rounded if self.rounds else jnp.zeros_like(rounded)
    return message, entries._replace(values=off)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparDL(SparseCollective):
  """Delivers k of n entries a step; residuals hold all others for later steps (SparDL, §3).

  With the accumulator `acc_w = gradient_w + residual_w` at each of P workers, `total` estimates the sum of all `acc_w`
  at k indices I, and the next residuals hold exactly what it leaves out:

      total + Σ_w residual_w  =  Σ_w acc_w      (Law C)

  The state is the residual, f32[n] a worker, whatever the gradients' dtype.

  Args:
    density: ρ in (0, 1]; k = ⌈ρ n⌉ entries are delivered.
    k: the number of entries to deliver instead, 1 … n. It is rounded up to ⌈k d/P⌉ for each of P/d blocks.
    teams: d, a divisor of P. More teams take fewer messages, 2⌈log₂(P/d)⌉ + ⌈log₂d⌉, which helps where the start-up of
      a message dominates. Each worker then reduces P/d longer blocks, and sums of teams sort entries: six workers with
      n = 14.7 M at 1 Gbit/s take 217 ms an update with one team, 472, 632 and 761 ms with 2, 3 and 6.
    sag: how teams add up their blocks. "recursive" (R-SAG) takes a power of two of teams, "bruck" (B-SAG) any number;
      "auto" is the first where it can be.
    residual: which of the undelivered entries the residual holds. "global" holds all. "partial" (without what later
      workers drop at I) and "local" (only what this worker did not send) are the paper's ablation (§4.1.3) and lose
      gradient mass.
    selector: how the L entries of a block are selected. "exact" selects the largest. "chunked" selects the largest of
      each of L equal chunks, which interleave: less arithmetic, and an index within a chunk is a byte on the wire.
      "reuse" selects those of the largest that reach a threshold reused from the last step, which rises as residuals
      fill, and falls while fewer than L reach it; where far too many do, or fewer than half did in the last step,
      entries are selected as by "exact".
    wire: the format of values. "bf16" rounds to 8 bits, "int8" to 127 levels of the largest of a message's block, up or
      down at random so that the mean stays; both also write indices in about 9 bits each. Rounding errors stay in the
      residual of the worker that rounded.

  Raises:
    ValueError: for a density, k, teams or another option outside their choices, or teams that do not divide P.

  Example:
    >>> import jax, jax.numpy as jnp, optax, jaxsparse as js
    >>> tx = optax.chain(js.spardl_transform("workers", density=0.25), optax.sgd(0.1))
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("workers",))
    >>> params = {"w": jnp.zeros((4, 4))}
    >>> state = js.init(tx, params, mesh, axis="workers")
    >>> step = js.make_train_step(lambda p, batch: jnp.sum((p["w"][None] - batch) ** 2), tx, mesh, axis="workers")
    >>> params, state, metrics = step(params, state, jnp.ones((len(jax.devices()), 4, 4)))
    >>> float(metrics.loss)
    16.0
  """

  teams: int = 1
  sag: Literal["auto", "recursive", "bruck"] = "auto"
  residual: Literal["global", "partial", "local"] = "global"
  selector: Literal["exact", "chunked", "reuse"] = "exact"
  wire: Wire = "f32"

  def __post_init__(self) -> None:
    super().__post_init__()
    check_whole(self.name, 1, teams=self.teams)
    if self.sag == "recursive" and not _is_power_of_two(self.teams):
      raise ValueError(
        f"{self.name}: sag='recursive' with teams={self.teams}, choose a power of two, or sag='bruck' or 'auto'"
      )
    if self.selector == "chunked" and self.teams > 1:
      raise ValueError(
        f"{self.name}: selector='chunked' with teams={self.teams}: sums of teams are no longer one entry a chunk, "
        "choose teams=1, or another selector"
      )

  @property
  def conserves(self) -> bool:
    return self.residual == "global"

  @property
  def is_bruck(self) -> bool:
    """Whether teams are added up by B-SAG."""
    return self.teams > 1 and (self.sag == "bruck" or not _is_power_of_two(self.teams))

  @property
  def sizes_vary(self) -> bool:
    return self.is_bruck

  def share(self, n: int, size: int) -> int:
    """L, the entries of each of size / teams blocks that travel.

    Raises:
      ValueError: if `teams` does not divide `size`, naming the divisors; for chunks that are too long.
    """
    team = topology.team_size(size, self.teams)
    share, length = -(-self.entries(n) // team), -(-n // team)
    if self.selector == "chunked" and length > share * _LONGEST_CHUNK:
      raise ValueError(
        f"{self.name}: selector='chunked' with {share} chunks in blocks of {length} entries, choose at least "
        f"{-(-length // _LONGEST_CHUNK)} chunks by a larger k or density, or another selector"
      )
    return share

  def slots(self, n: int, size: int) -> int:
    merged = self.teams if self.is_bruck else min(2, self.teams)
    return max(super().slots(n, size), merged * self.share(n, size))

  def rungs(self, n: int, size: int) -> tuple[int, ...]:
    """The sizes of a block of L entries in a message: fixed, but for B-SAG from L/d, where all teams chose the same."""
    share = self.share(n, size)
    everything = share * size >= n * self.teams  # whole blocks: then there is nothing to leave out
    return ladder.rungs(-(-share // self.teams), share) if self.is_bruck and not everything else (share,)

  def init(self, n: int, size: int) -> State:
    share = self.share(n, size)
    adaptive: Any = ()
    if self.is_bruck:
      low = self.rungs(n, size)[0]
      first = max(1, round(0.01 * (share - low)))
      adaptive = Adaptive(jnp.int32(low), jnp.int32(first), jnp.bool_(False))
    shared = Shared(adaptive, jnp.int32(0) if self.wire == "int8" else ())
    team = topology.team_size(size, self.teams)
    # Two arrays: one that is twice in a state cannot be donated.
    reused: Any = ()
    if self.selector == "reuse":
      reused = selectors.Reused(jnp.zeros(team, jnp.float32), jnp.zeros(team, jnp.float32))
    return super().init(n, size)._replace(worker=reused, shared=shared)

  def cost(self, n: int, size: int) -> Cost:
    share, team = self.share(n, size), size // self.teams
    blocks, sums = self._codecs(-(-n // team))
    rounds = len(topology.strides(self.teams))  # R-SAG sends L entries in each; B-SAG up to L of each other team
    sag = _words_of(sums, self.teams, share) if self.is_bruck else rounds * sums.words(1, share)
    words = 2 * _words_of(blocks, team, share) + sag
    return Cost(2 * len(topology.strides(team)) + rounds, words, agreements=int(self.is_bruck))

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n, share = grads.size, self.share(grads.size, comm.size)
    team, member = comm.split(self.teams)
    held = self._held(Blocks.of(team, grads, state.residual, share), state)
    inside, between = self._wires(team, held.length, state)
    held, chosen = spar_reduce_scatter(team, held, inside)

    rungs = self.rungs(n, comm.size)
    own = jax.tree.map(lambda x: x[:1], chosen)
    own, lost, merged, sag_words = self._spar_all_gather(member, own, between, state, rungs)
    largest = comm.all_reduce(merged, "max") if self.is_bruck else merged
    kept, off, gather_words = _all_gather(team, own, largest, rungs, inside)
    for entries in lost + _divided(off, self.teams):
      held = held.add(entries)

    delivered = held.places(kept.indices)
    residual = {
      "global": lambda: held.kept(kept.indices),
      "partial": lambda: held.kept_but(Sparse(delivered, jnp.zeros_like(kept.values))),
      "local": lambda: held.kept_but(Sparse(held.places(chosen.indices), jnp.zeros_like(chosen.values))),
    }[self.residual]()
    words = saturating.total(_words_of(inside.codec, team.size, share), sag_words, gather_words)
    selected = sparse.count(chosen, held.length)
    counters = Counters(
      words,
      # Slots stay empty with "reuse" only.
      words
      if self.selector != "reuse"
      else words.astype(jnp.float32) * selected.astype(jnp.float32) / (share * team.size),
      selected=selected,
      delivered=jnp.count_nonzero(kept.values),
      merged=largest,
    )
    next_state = self._next(state, chosen, held.length, largest, rungs[0])
    return Reduced(Sparse(delivered, kept.values), next_state._replace(residual=residual), counters)

  def _spar_all_gather(
    self, member: Comm, own: Sparse, wire: Wired, state: State, rungs: tuple[int, ...]
  ) -> tuple[Sparse, list[Sparse], jax.Array, jax.Array]:
    """Adds up this worker's block over teams: (own [1, L], what it lost, different indices, words)."""
    share = own.indices.size
    if self.is_bruck:
      return b_sag(member, own, state.shared.adaptive.h, rungs, wire)
    own, lost = r_sag(member, own, wire)
    words = saturating.total(wire.codec.words(1, share) * len(topology.strides(self.teams)))
    return own, lost, jnp.int32(share), words

  def _held(self, blocks: Blocks, state: State) -> Held | Chunked:
    if self.selector == "chunked":
      return Chunked.of(blocks)
    return Held.starting(blocks, selectors.above(state.worker.bounds) if self.selector == "reuse" else selectors.exact)

  def _codecs(self, length: int) -> tuple[Codec, Codec]:
    """How blocks travel inside a team, and how between teams."""
    return codec_of(self.wire, length, by_chunk=self.selector == "chunked"), codec_of(self.wire, length)

  def _wires(self, team: Comm, length: int, state: State) -> list[Wired]:
    key = None
    if self.wire == "int8":  # the same for the same block of every team, which must round alike
      key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), state.shared.step), team.rank)
    return [Wired(codec, length, self.wire, key) for codec in self._codecs(length)]

  def _next(self, state: State, chosen: Sparse, length: int, merged: jax.Array, low: int) -> State:
    """The state after this step, but for the residual."""
    shared = state.shared
    if self.is_bruck:
      shared = shared._replace(adaptive=adapt(shared.adaptive, merged, low, chosen.indices.shape[1]))
    if self.wire == "int8":
      shared = shared._replace(step=shared.step + 1)
    if self.selector == "reuse":
      state = state._replace(worker=selectors.following(state.worker, chosen, length))
    return state._replace(shared=shared)


def _is_power_of_two(number: int) -> bool:
  return number & (number - 1) == 0


def spar_reduce_scatter(comm: Comm, held: Held | Chunked, wire: Wired) -> tuple[Held | Chunked, Sparse]:
  """Sums P blocks over P workers, L entries of each, cut just before they leave (§3.1).

  In the home frame row b is block (rank + b) mod P. The bag of a stride s is then rows s … 2s − 1, clipped at P, and
  lands on the receiver's rows 0 … s − 1, for every P (the paper's Theorem 3.1 as a slice).

  Args:
    comm: the workers.
    held: gradient + residual of this worker.
    wire: how bags are written.

  Returns:
    (held, chosen): what this worker has left, parts received and what was rounded off included, and the `Sparse`
    [P, L] that it selected in each row. Row 0 of `chosen` is this worker's block of the sum; the others have left.
  """
  bags = []
  for stride in topology.strides(comm.size):
    bag = held.largest(stride, min(2 * stride, comm.size))
    message, off = wire.encode(bag, stride)
    held = held.left(off, stride)
    held = held.add(wire.codec.decode(comm.shift(message, stride)))
    bags.append(bag)
  own = held.largest(0, 1)
  held = held.add(own._replace(values=-own.values))  # what a later cut leaves out is added to it again
  return held, jax.tree.map(lambda *rows: jnp.concatenate(rows), own, *reversed(bags))


def _words_of(codec: Codec, size: int, share: int) -> int:
  """Words of all bags of a reduce-scatter over `size` workers, or of as many rows gathered."""
  return sum(codec.words(min(stride, size - stride), share) for stride in topology.strides(size))


def _all_gather(
  team: Comm, own: Sparse, largest: jax.Array, rungs: tuple[int, ...], wire: Wired
) -> tuple[Sparse, Sparse | None, jax.Array]:
  """The blocks of all workers of a team, [P/d, L] in the home frame, what was rounded off of the own one, and words."""
  share = own.indices.size

  def gather(capacity: int) -> tuple[Sparse, Sparse | None, jax.Array]:
    message, off = wire.encode(sparse.narrowed(own, capacity), 0)
    rows = wire.codec.decode(gathered_rows(team, message))
    words = saturating.total(_words_of(wire.codec, team.size, capacity))
    lost = sparse.widened(off, share, wire.length) if wire.rounds else None
    return sparse.widened(rows, share, wire.length), lost, words

  return ladder.climb(rungs, largest, gather)


def _divided(entries: Sparse | None, by: int) -> list[Sparse]:
  """What each of `by` workers keeps of entries that all of them lose alike."""
  return [] if entries is None else [entries._replace(values=entries.values / by)]


def gathered_rows(comm: Comm, rows: Any) -> Any:
  """`all_gather` of pytrees of a single row, as rows."""
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), all_gather(comm, rows))


def r_sag(member: Comm, own: Sparse, wire: Wired) -> tuple[Sparse, list[Sparse]]:
  """Adds up one block over 2^j teams by recursive doubling, cut to its largest entries after each step (§3.3.1).

  Args:
    member: the workers that hold this block, one of each team.
    own: [1, L] entries of the block.
    wire: how they are written.

  Returns:
    (own, lost): the sum, and what each step lost, [1, …] each. Step t = 0, 1, … drops the same at 2^(t + 1) workers, so
    each of them keeps 1/2^(t + 1) of it. (The paper's "half" is right for the first step only.) What it rounds off is
    the same at 2^t.
  """
  lost = []
  for step, stride in enumerate(reversed(topology.strides(member.size))):
    message, off = wire.encode(own, _SUMS + step)
    got = member.permute(message, topology.partners(member.size, stride))
    mine, theirs = wire.codec.decode(message), wire.codec.decode(got)
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), mine, theirs)
    kept, rest = sparse.largest(sparse.merge(both, wire.length), own.indices.size, wire.length)
    own, rest = (jax.tree.map(lambda x: x[None], entries) for entries in (kept, rest))
    lost += _divided(rest, 2 ** (step + 1)) + _divided(off if wire.rounds else None, 2**step)
  return own, lost


def b_sag(
  member: Comm, own: Sparse, h: jax.Array, rungs: tuple[int, ...], wire: Wired
) -> tuple[Sparse, list[Sparse], jax.Array, jax.Array]:
  """Adds up the h largest entries of one block of each team, for any number of teams (§3.3.2).

  The sum is in team order. What the last cut drops is in no team's total, so its origins keep it as it is.

  Args:
    member: the workers that hold this block, one of each team.
    own: [1, L] entries of the block.
    h: i32[], how many of them travel.
    rungs: the sizes of a message that are compiled, up to L.
    wire: how they are written.

  Returns:
    (own, lost, merged, words): the L largest entries of the sum, what was not sent or rounded off, the number N of
    different indices that came together, and the words sent.
  """
  share, length = own.indices.size, wire.length
  # A selector's slots are in no order of indices, and ties must not depend on how it found the entries.
  in_order, _ = sparse.largest(sparse.by_index(jax.tree.map(lambda x: x[0], own)), share, length)
  travels = jnp.arange(share, dtype=jnp.int32) < h
  head, tail = (jax.tree.map(lambda x: x[None], sparse.where(mask, in_order, length)) for mask in (travels, ~travels))

  def gather(capacity: int) -> tuple[Sparse, Sparse | None, jax.Array, jax.Array]:
    message, off = wire.encode(sparse.narrowed(head, capacity), _SUMS)
    rows = in_rank_order(member, wire.codec.decode(gathered_rows(member, message)))
    merged = sparse.merge(rows, length)
    kept, _ = sparse.largest(merged, share, length)
    lost = sparse.widened(off, share, length) if wire.rounds else None
    words = saturating.total(_words_of(wire.codec, member.size, capacity))
    return jax.tree.map(lambda x: x[None], kept), lost, sparse.count(merged, length), words

  kept, lost, merged, words = ladder.climb(rungs, h, gather)
  return kept, [tail, *_divided(lost, by=1)], merged, words


def adapt(state: Adaptive, merged: jax.Array, low: int, share: int) -> Adaptive:
  """Algorithm 2: moves h so that about L different indices come together (the directions of its pseudocode).

  Two steps in the right direction double the step, one in the wrong direction turns it and halves it.

  Args:
    state: what was used in this step.
    merged: i32[], the largest N of any block, the same on every worker.
    low: ⌈L/d⌉, the least that h can be.
    share: L, the most.
  """
  right_way = (merged > share) ^ (state.step > 0)
  doubled = jnp.clip(2 * state.step, -share, share)
  turned = -jnp.sign(state.step) * jnp.maximum(1, jnp.abs(state.step) // 2)
  step = jnp.where(right_way, jnp.where(state.right, doubled, state.step), turned)
  h = jnp.clip(state.h + step, low, share)
  return Adaptive(h, step, right_way & ~state.right)
