"""The SparDL all-reduce: reduce-scatter inside teams, sums over teams, all-gather inside teams."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.collectives._base import check_whole
from jaxsparse.collectives._messages import SelectingCollective, Writer, words_of
from jaxsparse.collectives.spardl import teams as spar_all_gather
from jaxsparse.collectives.spardl.adaptive_h import Adaptive, adapt
from jaxsparse.comm import schedules
from jaxsparse.select.accumulator import Accumulator
from jaxsparse.select.blocks import Blocks
from jaxsparse.sparse import saturating
from jaxsparse.sparse.capacities import geometric, switch
from jaxsparse.sparse.codec import Codec
from jaxsparse.sparse.lazy import LazySum
from jaxsparse.types import Comm, Cost, Counters, Pending, Reduced, Sparse, State


class Shared(NamedTuple):
  """The state that is the same on every worker; () for a part that the options do not need.

  Attributes:
    adaptive: the state of Algorithm 2, for B-SAG.
    step: i32[], the number of the step, from which random rounding draws its noise.
  """

  adaptive: Any = ()
  step: Any = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparDL(SelectingCollective):
  """All-reduces k of n entries a step; all other entries stay in residuals and are sent in later steps (SparDL, §3).

  Each worker w adds its gradient to the residual of the last step, which gives its accumulator
  `acc_w = gradient_w + residual_w`. The total estimates the sum of the accumulators at k indices I and is 0 elsewhere;
  the next residuals are the entries that were not delivered:

      total + Σ_w residual_w  =  Σ_w acc_w      (Law C)

  Workers are divided into d teams, by default one, and the vector into P/d equal blocks, which workers reduce in rounds
  of messages. Before a block is sent, its L = ⌈k d/P⌉ entries of largest magnitude are selected. No worker sees all
  accumulators, so I is close to the k largest entries of their sum, but not always equal. The state is the residual,
  f32[n] a worker for every dtype of the gradients.

  Args:
    density: ρ in (0, 1]; k = ⌈ρ n⌉ entries are delivered.
    k: the number of entries to deliver instead, 1 … n. It is rounded up to ⌈k d/P⌉ for each of P/d blocks.
    teams: d, a divisor of P: workers reduce blocks inside d teams, then teams add up their sums. More teams need fewer
      messages, 2⌈log₂(P/d)⌉ + ⌈log₂d⌉, which helps where latency dominates. But blocks are longer, and are merged
      over teams: six workers with n = 14.7 M at 1 Gbit/s take 159 ms an update with one team, and 169, 171 and 189 ms
      with 2, 3 and 6.
    sag: how teams add up their sums. "recursive" (R-SAG) needs d to be a power of two, "bruck" (B-SAG) takes any d;
      "auto" is "recursive" if d is a power of two, else "bruck".
    residual: which undelivered entries stay in the residual. "global" keeps all of them. The others are the paper's
      ablation (§4.1.3) and break Law C: "partial" keeps the entries of a worker's accumulator outside I, "local" those
      that the worker did not send.
    selector: how the L entries of a block are selected. "exact" selects those of largest magnitude. "chunked" divides a
      block into L interleaved chunks and selects the largest entry of each, which needs less arithmetic, and one or two
      bytes for an index. "reuse" is "exact" restricted to entries that reach a threshold reused from the last step. The
      threshold rises as residuals grow, and falls while fewer than L entries reach it; if far more than L entries reach
      it, or fewer than half of L did in the last step, "exact" is used.
    wire: the format of values. "f32" sends them unchanged, "bf16" rounds them to 8 significant bits. "int8" rounds them
      to multiples of 1/127 of the largest magnitude of a block, up or down at random, so that rounding is unbiased.
      "bf16" and "int8" also send indices in about 9 bits each. Rounding errors stay in the residual of the worker that
      rounds.

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

  def __post_init__(self) -> None:
    super().__post_init__()
    check_whole(self.name, 1, teams=self.teams)
    if self.sag == "recursive" and not _is_power_of_two(self.teams):
      raise ValueError(
        f"{self.name}: sag='recursive' with teams={self.teams}, choose a power of two, or sag='bruck' or 'auto'"
      )
    if self.method.one_per_chunk and self.teams > 1:
      raise ValueError(
        f"{self.name}: selector={self.selector!r} with teams={self.teams}: sums over teams may have several entries in "
        "a chunk, choose teams=1, or another selector"
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

  def share(self, n: int, size: int) -> int:
    """L, the number of entries that are sent of each of the size / teams blocks.

    Raises:
      ValueError: if `teams` does not divide `size`, naming the divisors; if blocks are too long for the selector.
    """
    team = schedules.team_size(size, self.teams)
    share, length = -(-self.entries(n) // team), -(-n // team)
    self.check_selector(length, share)
    return share

  def slots(self, n: int, size: int) -> int:
    team, share = size // self.teams, self.share(n, size)
    inside, between = self._codecs(-(-n // team))
    merged = self.teams if self.is_bruck else min(2, self.teams)
    return max(super().slots(n, size), merged * share, inside.slots(team, share), between.slots(self.teams, share))

  def capacities(self, n: int, size: int) -> tuple[int, ...]:
    """The capacities of a block in a message: L; for B-SAG ⌈L/d⌉ … L, since Algorithm 2 changes h."""
    share = self.share(n, size)
    everything = share * size >= n * self.teams  # whole blocks are sent, so no entry is dropped
    return geometric(-(-share // self.teams), share) if self.is_bruck and not everything else (share,)

  def init(self, n: int, size: int) -> State:
    share = self.share(n, size)
    adaptive = Adaptive.start(self.capacities(n, size)[0], share) if self.is_bruck else ()
    shared = Shared(adaptive, self.first_step())
    return super().init(n, size)._replace(worker=self.method.init(size // self.teams), shared=shared)

  def cost(self, n: int, size: int) -> Cost:
    share, team = self.share(n, size), size // self.teams
    inside, between = self._codecs(-(-n // team))
    rounds = len(schedules.strides(self.teams))  # R-SAG sends L entries per round, B-SAG up to L of each other team
    sag = words_of(between, self.teams, share) if self.is_bruck else rounds * between.words(1, share)
    words = 2 * words_of(inside, team, share) + sag
    return Cost(2 * len(schedules.strides(team)) + rounds, words, agreements=int(self.is_bruck))

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    share, capacities = self.share(grads.size, comm.size), self.capacities(grads.size, comm.size)
    team, member = comm.split(self.teams)
    blocks = Blocks.of(team, LazySum((grads, state.residual)), share)
    inside, between = self._writers(team, blocks.length, state)
    acc = self.method.start(blocks, state.worker)

    acc, chosen = reduce_scatter(team, acc, inside)
    own = jax.tree.map(lambda x: x[:1], chosen)
    summed = self._sum_over_teams(member, own, between, state, capacities)
    merged = comm.all_reduce(summed.merged, "max") if self.is_bruck else summed.merged
    delivered, errors, gather_words = all_gather(team, summed.own, merged, capacities, inside)
    for entries in summed.lost + spar_all_gather.divided(errors, self.teams):
      acc = acc.add(entries)

    residual = self._residual(acc, delivered, chosen)
    words = saturating.total(inside.words(team.size, share), summed.words, gather_words)
    selected = sparse.count(chosen, blocks.length)
    used = words
    if not self.method.fills_slots:
      used = words.astype(jnp.float32) * selected.astype(jnp.float32) / (share * team.size)
    counters = Counters(words, used, selected=selected, delivered=jnp.count_nonzero(delivered.values), merged=merged)
    memory = self.method.next(state.worker, chosen, blocks.length)
    shared = self._next(state.shared, merged, capacities[0], share)
    total = Sparse(blocks.flat(delivered.indices), delivered.values)
    return Reduced(total, State(residual, memory, shared), counters)

  def _sum_over_teams(
    self, member: Comm, own: Sparse, writer: Writer, state: State, capacities: tuple[int, ...]
  ) -> spar_all_gather.Summed:
    if self.is_bruck:
      return spar_all_gather.b_sag(member, own, state.shared.adaptive.h, capacities, writer)
    return spar_all_gather.r_sag(member, own, writer)

  def _residual(self, acc: Accumulator, delivered: Sparse, chosen: Sparse) -> Pending:
    """The next residual, by the option `residual` (§4.1.3)."""
    if self.residual == "global":
      return acc.pending(delivered.indices)
    zeroed = delivered if self.residual == "partial" else chosen
    return acc.pending_except(Sparse(acc.blocks.flat(zeroed.indices), jnp.zeros_like(zeroed.values)))

  def _codecs(self, length: int) -> tuple[Codec, Codec]:
    """The codecs of blocks inside a team, and between teams."""
    return self.chosen_codec(length), self.codec(length)

  def _writers(self, team: Comm, length: int, state: State) -> tuple[Writer, Writer]:
    # The noise depends on the block, not on the team: all teams must round the sum of a block alike.
    inside, between = (self.writer(codec, state.shared.step, team.rank) for codec in self._codecs(length))
    return inside, between

  def _next(self, shared: Shared, merged: jax.Array, low: int, share: int) -> Shared:
    if self.is_bruck:
      shared = shared._replace(adaptive=adapt(shared.adaptive, merged, low, share))
    return shared._replace(step=self.following_step(shared.step))


def reduce_scatter(comm: Comm, acc: Accumulator, writer: Writer) -> tuple[Accumulator, Sparse]:
  """Spar-Reduce-Scatter: worker w gets the sum of block w, of which each message contains L entries (§3.1).

  Each worker numbers the blocks from its own: row b is block (rank + b) mod P, the "home frame". In the round of stride
  s a worker sends rows s … min(2s, P) − 1, the paper's bag of blocks, to worker rank + s, where they are rows 0 … s − 1
  and are added. After the rounds of strides …, 4, 2, 1, row 0 is the sum of the worker's own block. (That this works
  for every P is the paper's Theorem 3.1.)

  Args:
    comm: the P workers.
    acc: the accumulator of this worker.
    writer: encodes and decodes messages.

  Returns:
    (acc, chosen): the accumulator without the sent entries, and the `Sparse` [P, L] entries selected of each row. Row 0
    of `chosen` is the sum of this worker's block; the other rows were sent.
  """
  bags = []
  for stride in schedules.strides(comm.size):
    bag = acc.largest(stride, min(2 * stride, comm.size))
    message, errors = writer.encode(bag, stride)
    acc = acc.sent(errors, stride)
    acc = acc.add(writer.decode(comm.shift(message, stride)))
    bags.append(bag)
  own = acc.largest(0, 1)
  # Subtract the own block; entries that later rounds drop are added back as residual.
  acc = acc.add(own._replace(values=-own.values))
  return acc, jax.tree.map(lambda *rows: jnp.concatenate(rows), own, *reversed(bags))


def all_gather(
  team: Comm, own: Sparse, largest: jax.Array, capacities: tuple[int, ...], writer: Writer
) -> tuple[Sparse, list[Sparse], jax.Array]:
  """The blocks of all workers of a team, by Bruck's all-gather.

  Args:
    team: the P/d workers of the team.
    own: [1, L] entries, the total of this worker's block.
    largest: i32[], the largest number of entries of a block, the same on every worker.
    capacities: the message sizes that are compiled, up to L.
    writer: encodes and decodes messages.

  Returns:
    (rows, lost, words): [P/d, L] entries, one row for each block in the home frame; the rounding errors of the own
    block, the same in every team; and the words sent.
  """
  share = own.indices.size

  def gather(capacity: int) -> tuple[Sparse, list[Sparse], jax.Array]:
    message, errors = writer.encode(sparse.narrowed(own, capacity), 0)
    rows = sparse.widened(writer.gather(team, message), share, writer.length)
    return rows, writer.lost(errors, share), saturating.total(writer.words(team.size, capacity))

  return switch(capacities, largest, gather)


def _is_power_of_two(number: int) -> bool:
  return number & (number - 1) == 0
