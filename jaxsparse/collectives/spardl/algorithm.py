"""The SparDL all-reduce: reduce-scatter and all-gather inside teams, and sums over teams in between."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.collectives._base import SparseCollective, check_whole
from jaxsparse.collectives.spardl import teams as spar_all_gather
from jaxsparse.collectives.spardl.adaptive_h import Adaptive, adapt
from jaxsparse.collectives.spardl.writer import Writer, words_of
from jaxsparse.comm import topology
from jaxsparse.select.accumulator import Accumulator
from jaxsparse.select.blocks import Blocks
from jaxsparse.select.selectors import SELECTORS, Selector, SelectorName
from jaxsparse.sparse import saturating
from jaxsparse.sparse.capacities import climb, rungs
from jaxsparse.sparse.codec import Codec, codec_of
from jaxsparse.sparse.lazy import LazySum
from jaxsparse.sparse.values import FORMATS, Wire
from jaxsparse.types import Comm, Cost, Counters, Pending, Reduced, Sparse, State


class Shared(NamedTuple):
  """The state that is the same on every worker; () where the options do without.

  Attributes:
    adaptive: for B-SAG.
    step: i32[], from which random rounding draws its noise.
  """

  adaptive: Any = ()
  step: Any = ()


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
  selector: SelectorName = "exact"
  wire: Wire = "f32"

  def __post_init__(self) -> None:
    super().__post_init__()
    check_whole(self.name, 1, teams=self.teams)
    if self.sag == "recursive" and not _is_power_of_two(self.teams):
      raise ValueError(
        f"{self.name}: sag='recursive' with teams={self.teams}, choose a power of two, or sag='bruck' or 'auto'"
      )
    if self._selector.one_per_chunk and self.teams > 1:
      raise ValueError(
        f"{self.name}: selector={self.selector!r} with teams={self.teams}: sums of teams are no longer one entry a "
        "chunk, choose teams=1, or another selector"
      )

  @property
  def conserves(self) -> bool:
    return self.residual == "global"

  @property
  def is_bruck(self) -> bool:
    """Whether teams are summed by B-SAG."""
    return self.teams > 1 and (self.sag == "bruck" or not _is_power_of_two(self.teams))

  @property
  def sizes_vary(self) -> bool:
    return self.is_bruck

  @property
  def _selector(self) -> Selector:
    return SELECTORS[self.selector]

  @property
  def _draws(self) -> bool:
    return FORMATS[self.wire].draws

  def share(self, n: int, size: int) -> int:
    """L, the entries that are sent of each of size / teams blocks.

    Raises:
      ValueError: if `teams` does not divide `size`, naming the divisors; for blocks the selector cannot choose from.
    """
    team = topology.team_size(size, self.teams)
    share, length = -(-self.entries(n) // team), -(-n // team)
    try:
      self._selector.check(length, share)
    except ValueError as error:
      raise ValueError(f"{self.name}: {error}") from None
    return share

  def slots(self, n: int, size: int) -> int:
    merged = self.teams if self.is_bruck else min(2, self.teams)
    return max(super().slots(n, size), merged * self.share(n, size))

  def capacities(self, n: int, size: int) -> tuple[int, ...]:
    """The slots of a block in a message: L, but for B-SAG from L/d, where all teams chose the same indices."""
    share = self.share(n, size)
    everything = share * size >= n * self.teams  # whole blocks: then there is nothing to leave out
    return rungs(-(-share // self.teams), share) if self.is_bruck and not everything else (share,)

  def init(self, n: int, size: int) -> State:
    adaptive: Any = ()
    if self.is_bruck:
      adaptive = Adaptive.start(self.capacities(n, size)[0], self.share(n, size))
    shared = Shared(adaptive, jnp.int32(0) if self._draws else ())
    self.share(n, size)
    return super().init(n, size)._replace(worker=self._selector.init(size // self.teams), shared=shared)

  def cost(self, n: int, size: int) -> Cost:
    share, team = self.share(n, size), size // self.teams
    inside, between = self._codecs(-(-n // team))
    rounds = len(topology.strides(self.teams))  # R-SAG sends L entries in each; B-SAG up to L of each other team
    sag = words_of(between, self.teams, share) if self.is_bruck else rounds * between.words(1, share)
    words = 2 * words_of(inside, team, share) + sag
    return Cost(2 * len(topology.strides(team)) + rounds, words, agreements=int(self.is_bruck))

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    share, capacities = self.share(grads.size, comm.size), self.capacities(grads.size, comm.size)
    team, member = comm.split(self.teams)
    blocks = Blocks.of(team, LazySum((grads, state.residual)), share)
    inside, between = self._writers(team, blocks.length, state)
    acc = self._selector.start(blocks, state.worker)

    acc, chosen = reduce_scatter(team, acc, inside)
    own = jax.tree.map(lambda x: x[:1], chosen)
    summed = self._sum_over_teams(member, own, between, state, capacities)
    merged = comm.all_reduce(summed.merged, "max") if self.is_bruck else summed.merged
    kept, rounded, gather_words = all_gather(team, summed.own, merged, capacities, inside)
    for entries in summed.lost + [entries._replace(values=entries.values / self.teams) for entries in rounded]:
      acc = acc.add(entries)

    residual = self._residual(acc, kept, chosen)
    words = saturating.total(inside.words(team.size, share), summed.words, gather_words)
    selected = sparse.count(chosen, blocks.length)
    used = words
    if not self._selector.fills_slots:
      used = words.astype(jnp.float32) * selected.astype(jnp.float32) / (share * team.size)
    counters = Counters(words, used, selected=selected, delivered=jnp.count_nonzero(kept.values), merged=merged)
    memory = self._selector.next(state.worker, chosen, blocks.length)
    shared = self._next(state.shared, merged, capacities[0], share)
    total = Sparse(blocks.flat(kept.indices), kept.values)
    return Reduced(total, State(residual, memory, shared), counters)

  def _sum_over_teams(
    self, member: Comm, own: Sparse, writer: Writer, state: State, capacities: tuple[int, ...]
  ) -> spar_all_gather.Summed:
    if self.is_bruck:
      return spar_all_gather.b_sag(member, own, state.shared.adaptive.h, capacities, writer)
    return spar_all_gather.r_sag(member, own, writer)

  def _residual(self, acc: Accumulator, kept: Sparse, chosen: Sparse) -> Pending:
    """What is kept of the entries that are not delivered (§4.1.3)."""
    if self.residual == "global":
      return acc.pending(kept.indices)
    gone = kept if self.residual == "partial" else chosen
    return acc.pending_except(Sparse(acc.blocks.flat(gone.indices), jnp.zeros_like(gone.values)))

  def _codecs(self, length: int) -> tuple[Codec, Codec]:
    """The codecs of blocks inside a team, and between teams."""
    by_chunk = self._selector.one_per_chunk
    return codec_of(self.wire, length, by_chunk=by_chunk), codec_of(self.wire, length)

  def _writers(self, team: Comm, length: int, state: State) -> tuple[Writer, Writer]:
    key = None
    if self._draws:  # the same for the same block of every team, which must round alike
      key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), state.shared.step), team.rank)
    inside, between = self._codecs(length)
    return Writer(inside, key), Writer(between, key)

  def _next(self, shared: Shared, merged: jax.Array, low: int, share: int) -> Shared:
    if self.is_bruck:
      shared = shared._replace(adaptive=adapt(shared.adaptive, merged, low, share))
    return shared._replace(step=shared.step + 1) if self._draws else shared


def reduce_scatter(comm: Comm, acc: Accumulator, writer: Writer) -> tuple[Accumulator, Sparse]:
  """Spar-Reduce-Scatter: sums P blocks over P workers, L entries of each, chosen just before they are sent (§3.1).

  In the home frame row b is block (rank + b) mod P. The bag of a stride s is then rows s … 2s − 1, clipped at P, and is
  added to the receiver's rows 0 … s − 1, for every P (the paper's Theorem 3.1 as a slice).

  Args:
    comm: the workers.
    acc: gradient + residual of this worker.
    writer: of the messages.

  Returns:
    (acc, chosen): the accumulator, and the `Sparse` [P, L] entries chosen of each row. Row 0 of `chosen` is the sum of
    this worker's block; the others were sent.
  """
  bags = []
  for stride in topology.strides(comm.size):
    bag = acc.largest(stride, min(2 * stride, comm.size))
    message, rounded = writer.encode(bag, stride)
    acc = acc.sent(rounded, stride)
    acc = acc.add(writer.decode(comm.shift(message, stride)))
    bags.append(bag)
  own = acc.largest(0, 1)
  # Subtract the own block; entries that later rounds drop are added back as residual.
  acc = acc.add(own._replace(values=-own.values))
  return acc, jax.tree.map(lambda *rows: jnp.concatenate(rows), own, *reversed(bags))


def all_gather(
  team: Comm, own: Sparse, largest: jax.Array, capacities: tuple[int, ...], writer: Writer
) -> tuple[Sparse, list[Sparse], jax.Array]:
  """The blocks of all workers of a team.

  Returns:
    (kept, rounded, words): [P/d, L] entries in the home frame; what was rounded off of the own block, the same in every
    team; and the words sent.
  """
  share = own.indices.size

  def gather(capacity: int) -> tuple[Sparse, list[Sparse], jax.Array]:
    message, rounded = writer.encode(sparse.narrowed(own, capacity), 0)
    rows = sparse.widened(writer.gather(team, message), share, writer.length)
    lost = [sparse.widened(rounded, share, writer.length)] if writer.rounds else []
    return rows, lost, saturating.total(writer.words(team.size, capacity))

  return climb(capacities, largest, gather)


def _is_power_of_two(number: int) -> bool:
  return number & (number - 1) == 0
