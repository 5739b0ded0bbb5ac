"""The SparDL all-reduce: reduce-scatter inside teams, sums over teams, all-gather inside teams."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.collectives._base import Traits, words_used
from jaxsparse.collectives._messages import (
  SelectingCollective,
  Writer,
  geometric,
  words_of,
)
from jaxsparse.collectives.spardl.teams import Adaptive, Summed, adapt, b_sag, r_sag
from jaxsparse.comm import schedules
from jaxsparse.select.accumulator import SparseReduced
from jaxsparse.select.blocks import Blocks, LazySum
from jaxsparse.select.selectors import Accumulator
from jaxsparse.sparse import bitset
from jaxsparse.types import Comm, Cost, Counters, Reduced, Sparse, State, saturated_sum


class Shared(NamedTuple):
  """The state of SparDL that is the same on every worker; () for a part that the options do not need.

  Attributes:
    adaptive: the size of messages between teams, which Algorithm 2 adapts, for
      `sag="bruck"`.
    step: i32[], the number of the step, the seed of random rounding, for `wire="int8"`.
  """

  adaptive: Any = ()
  step: Any = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparDL(SelectingCollective):
  """All-reduces k of n entries a step; all other entries stay in residuals and are sent in later steps (SparDL, §3).

  Each worker w adds its gradient to the residual of the last step, which gives its
  accumulator `acc_w = gradient_w + residual_w`. The total estimates the sum of the
  accumulators at k indices I and is 0 elsewhere; the next residuals are the entries
  that were not delivered:

      total + Σ_w residual_w  =  Σ_w acc_w      (Law C)

  Workers are divided into d teams, by default one, and the vector into P/d equal
  blocks, which workers reduce in rounds of messages. Before a block is sent, its L = ⌈k
  d/P⌉ entries of largest magnitude are selected. No worker sees all accumulators, so I
  is close to the k largest entries of their sum, but not always equal. k is rounded up
  to a multiple of P/d. Ablations: `residual="partial"` and `"local"` (§4.1.3), which
  break Law C.

  Args:
    teams: d, a divisor of P: workers reduce blocks inside d teams, then teams add up
      their sums. More teams need fewer messages, 2⌈log₂(P/d)⌉ + ⌈log₂d⌉, which helps
      where latency dominates. But blocks are longer, and merging them over teams takes
      arithmetic.
    sag: how teams add up their sums. "recursive" (R-SAG) needs d to be a power of two,
      "bruck" (B-SAG) takes any d; "auto" is "recursive" if d is a power of two, else
      "bruck". B-SAG gathers the h largest entries of the block of each team, adds them
      up, and keeps the L largest of the N different indices; Algorithm 2 adapts h from
      step to step so that N is about L.
    residual: "global" keeps all undelivered entries. "partial" loses those that other
      workers have sent and that were dropped on the way: of its own accumulator a
      worker keeps all that it has not both sent and seen delivered. "local" keeps what
      it has not sent.

  Raises:
    ValueError: for teams that do not divide P, or with a selector or a `sag` that does
      not go with them.

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
  ranges = (("teams", 1, None),)

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.sag == "recursive" and not _is_power_of_two(self.teams):
      raise ValueError(
        f"{self.name}: sag='recursive' with teams={self.teams}, choose a power of two, or sag='bruck' or 'auto'"
      )
    if self.selection.one_per_chunk and self.teams > 1:
      raise ValueError(
        f"{self.name}: selector={self.selector!r} with teams={self.teams}: sums over teams may have several entries in "
        "a chunk, choose teams=1, or another selector"
      )

  @property
  def traits(self) -> Traits:
    return dataclasses.replace(
      super().traits, conserves=self.residual == "global", sizes_vary=self.is_bruck
    )

  @property
  def is_bruck(self) -> bool:
    """Whether teams are summed by B-SAG; never with one team."""
    return self.teams > 1 and (self.sag == "bruck" or not _is_power_of_two(self.teams))

  def capacities(self, n: int, size: int) -> tuple[int, ...]:
    """The capacities of a message, in entries of a block: L; for B-SAG ⌈L/d⌉ … L, since Algorithm 2 changes h.

    Raises:
      ValueError: if `teams` does not divide `size`, naming the divisors.
    """
    team = schedules.team_size(size, self.teams)
    # L = ⌈k d / P⌉
    k_block = -(-self.entries(n) // team)
    self.selection.check(self.name, -(-n // team), k_block)
    # L · P/d ≥ n: messages are whole blocks, no entry is dropped, and h stays L.
    sends_all = k_block * size >= n * self.teams
    return (
      geometric(-(-k_block // self.teams), k_block)
      if self.is_bruck and not sends_all
      else (k_block,)
    )

  def init(self, n: int, size: int) -> State:
    capacities = self.capacities(n, size)
    # h starts at the smallest capacity, ⌈L/d⌉; the largest is L. `first_step` is ()
    # where `wire` draws no random numbers.
    shared = Shared(
      Adaptive.start(capacities[0], capacities[-1]) if self.is_bruck else (),
      self.first_step,
    )
    # The selector's memory has a row for each of the P/d blocks of a team.
    return State(
      jnp.zeros(n, jnp.float32), self.selection.init(size // self.teams), shared
    )

  def cost(self, n: int, size: int) -> Cost:
    """The most messages and 4-byte words that one of `size` workers sends in a step, for n entries."""
    k_block = self.capacities(n, size)[-1]
    team = size // self.teams
    codec = self.chosen_codec(-(-n // team))
    # R-SAG sends L entries per round, B-SAG up to L of each other team
    rounds = len(schedules.strides(self.teams))
    sag = (
      words_of(codec, self.teams, k_block)
      if self.is_bruck
      else rounds * codec.words(1, k_block)
    )
    # the reduce-scatter and the all-gather inside a team, and the sum over teams
    words = 2 * words_of(codec, team, k_block) + sag
    if self.is_bruck:
      words += team - 1  # one N in each block that the all-gather sends
    return Cost(2 * len(schedules.strides(team)) + rounds, words)

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    # of a message, in entries of a block: the last one is L, the first the least h
    capacities = self.capacities(grads.size, comm.size)
    k_block = capacities[-1]
    # the P/d workers of this team, and the d workers that own this block in their teams
    team, same_block = comm.split(self.teams)
    # acc_w = gradient_w + residual_w, in the P/d blocks of a team
    blocks = Blocks.for_workers(team, LazySum((grads, state.residual)), k_block)
    # Team rank = number of the own block. The noise depends on the block, not on the
    # team: all teams must round the sum of a block alike.
    writer = self.writer(self.chosen_codec(blocks.length), state.shared.step, team.rank)

    # Spar-Reduce-Scatter inside teams (§3.1; Algorithm 1, lines 1 to 10)
    start = self.selection.start(blocks, state.worker)
    # `chosen` [P/d, L] entries have the sum of the own block in row 0. `sent` has the
    # other rows, with the rounding error of each entry as its value; row 0 is empty.
    acc, chosen, sent = reduce_scatter(team, start, writer)
    # Spar-All-Gather: the own block is summed over teams (§3.3)
    summed = self._add_teams(same_block, chosen, state, capacities, writer)
    # All-gather inside teams (line 11). It is message 0: numbers seed the noise of
    # rounding, and those of the reduce-scatter are its strides. Only the next step
    # needs N, so N travels with the blocks: `merged` is the N of each, i32[P/d], None
    # without B-SAG.
    merged, delivered, errors, gather_words = writer.gather_rows_with(
      summed.merged, team, summed.block, 0, k_block
    )
    # Global residual collection (§3.2; lines 12 to 14). `summed.returned` is what the
    # sum over teams has dropped or rounded off, `errors` the rounding errors of the own
    # block in the all-gather.
    acc = self._add_back(acc, summed.returned, errors)
    residual = acc.pending(*self._gone(blocks, chosen, delivered, sent))
    scatter_words = words_of(writer.codec, team.size, k_block)
    words = saturated_sum(scatter_words, summed.words, gather_words)
    selected = self.count_chosen(chosen, grads.size)
    # words of filled slots, of the L slots of each of the P/d blocks
    used = words_used(words, selected, k_block * team.size)
    delivers = jnp.count_nonzero(delivered.values)
    counters = Counters(words, used, selected=selected, delivered=delivers)
    adaptive: Any = ()
    if self.is_bruck:
      # Other teams gather the same N of the same blocks, so h stays equal everywhere.
      merged = jnp.max(merged)
      counters = counters._replace(merged=merged)
      adaptive = adapt(state.shared.adaptive, merged, capacities[0], k_block)
    memory = self.selection.next(state.worker, chosen, blocks.length)
    total = Sparse(blocks.flat_indices(delivered.indices), delivered.values)
    return SparseReduced(
      total, State(residual, memory, Shared(adaptive, writer.next_step)), counters
    )

  def _add_teams(
    self,
    same_block: Comm,
    chosen: Sparse,
    state: State,
    capacities: tuple[int, ...],
    writer: Writer,
  ) -> Summed:
    """The sum over teams of the own block, row 0 of `chosen`, cut to its L largest entries.

    Args:
      same_block: the d workers that own this block, one in each team.
      chosen: [P/d, L] entries; row 0 is the sum of the own block inside this team.
      state: before the step; `shared.adaptive.h` is h, i32[], the entries that a team
        sends by B-SAG (Algorithm 2).
      capacities: numbers of entries for which a message of B-SAG is compiled, up to L.
      writer: encodes messages.
    """
    block = Sparse(chosen.indices[:1], chosen.values[:1])
    # B-SAG, only with d > 1
    if self.is_bruck:
      return b_sag(same_block, block, state.shared.adaptive.h, capacities, writer)
    if self.teams > 1:
      return r_sag(same_block, block, writer)
    # One team: `block` is the sum, nothing is dropped, there is no N, 0 words are sent.
    return Summed(block, [], None, jnp.uint32(0))

  def _add_back(
    self, acc: Accumulator, returned: list[Sparse], errors: list[Sparse]
  ) -> Accumulator:
    """Adds to row 0 of the accumulator, the own block, what was dropped or rounded off of its sum.

    Args:
      acc: the accumulator, from which `reduce_scatter` has subtracted the own block.
      returned: [1, c] entries each that the sum over teams dropped or rounded off.
      errors: the [1, L] errors of rounding the own block for the all-gather inside
        teams; [] where values are not rounded.
    """
    # The d owners of a block, one in each team, round the same sum alike: each adds 1/d
    # of the errors.
    shares = [lost._replace(values=lost.values / self.teams) for lost in errors]
    for entries in [*returned, *shares]:
      acc = acc.add(entries)
    return acc

  def _gone(
    self, blocks: Blocks, chosen: Sparse, delivered: Sparse, sent: Sparse
  ) -> tuple[jax.Array, Sparse]:
    """The arguments (indices, errors) of `Accumulator.pending`, which makes the next residual of them.

    At an index the next residual is

        not in indices               gradient + old residual, also where it was sent
        in indices and in errors     the value in errors: the rest of it was sent
        in indices, not in errors    the value of the accumulator, with received values

    Args:
      blocks: the P/d blocks of the gradient.
      chosen: [P/d, L] entries that were selected and sent; row 0 is the own block.
      delivered: [P/d, c] entries of the total.
      sent: the entries of `chosen` with their rounding errors as values; none in row 0.
    """
    if self.residual == "global":
      return delivered.indices, sent
    # ablations: the residual is 0 where entries were sent (§4.1.3)
    indices = chosen.indices
    if self.residual == "partial":
      n = blocks.x.size
      flat = blocks.flat_indices(delivered.indices)
      # Only entries that the total delivers become 0.
      members = bitset.insert(bitset.empty(n), flat, n)
      is_delivered = bitset.contains(members, blocks.flat_indices(indices))
      # index `length` is an empty slot
      indices = jnp.where(is_delivered, indices, blocks.length)
    return indices, Sparse(indices, jnp.zeros(indices.shape, jnp.float32))


def reduce_scatter(
  comm: Comm, acc: Accumulator, writer: Writer
) -> tuple[Accumulator, Sparse, Sparse]:
  """Spar-Reduce-Scatter: worker w gets the sum of block w, of which each message contains L entries (§3.1).

  Each worker numbers the blocks from its own: row b is block (rank + b) mod P, the
  "home frame". In the round of stride s a worker sends rows s … min(2s, P) − 1, the
  paper's bag of blocks, to worker rank + s, where they are rows 0 … s − 1 and are
  added. After the rounds of strides …, 4, 2, 1, row 0 is the sum of the worker's own
  block. For every P: row b is sent in the round with s ≤ b < 2s; rows received in it
  are below s, so they are still to be sent, or are row 0 (the paper's Theorem 3.1).

  Args:
    comm: the P workers.
    acc: the accumulator of this worker.
    writer: encodes messages.

  Returns:
    (acc, chosen, errors): the accumulator, in which the sent entries still are; the [P,
    L] entries selected of each row, of which row 0 is the sum of this worker's block
    and the others were sent; and [P, L] the sent ones with the rounding error of each
    value, none in row 0.
  """
  bags = []
  lost = []
  for stride in schedules.strides(comm.size):
    # Transmission with sparsification (§3.1): the L largest entries of each block of
    # the bag, after all values received so far have been added.
    bag = acc.largest(stride, min(2 * stride, comm.size))
    # The stride is the number of the message, so that each has other noise.
    message, errors = writer.encode(bag, stride)
    # The received bag has blocks that this worker has not sent yet (Theorem 3.1).
    acc = acc.add(writer.codec.decode(comm.shift(message, stride)))
    bags.append(bag)
    lost.append(errors)
  own_block = acc.largest(0, 1)
  # Subtract the own block; `reduce` adds back what R-SAG, B-SAG or rounding drop of it.
  acc = acc.add(own_block._replace(values=-own_block.values))
  # row 0 of the errors: empty slots, whose index is the block's length
  not_sent = own_block._replace(
    indices=jnp.full_like(own_block.indices, writer.codec.length)
  )
  # Bags were sent from the last rows to the first: reversed they are rows 1 … P − 1.
  return (
    acc,
    sparse.concatenate([own_block, *reversed(bags)]),
    sparse.concatenate([not_sent, *reversed(lost)]),
  )


def _is_power_of_two(count: int) -> bool:
  return count & (count - 1) == 0
