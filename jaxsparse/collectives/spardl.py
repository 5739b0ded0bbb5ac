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
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxsparse import ladder, routes, sparse
from jaxsparse._compat import AxisName
from jaxsparse.collectives._base import SparseCollective, check_whole
from jaxsparse.comm import all_gather, in_rank_order
from jaxsparse.held import Held
from jaxsparse.transform import transform_of
from jaxsparse.types import Comm, Cost, Counters, Reduced, Sparse, State


def spardl_transform(
  axis: AxisName | Comm,
  *,
  density: float | None = None,
  k: int | None = None,
  teams: int = 1,
  sag: Literal["auto", "recursive", "bruck"] = "auto",
  residual: Literal["global", "partial", "local"] = "global",
) -> optax.GradientTransformation:
  """Averages gradients over the workers, k of n entries a step, and keeps the rest for later steps (SparDL, §3).

  With `home = gradient + residual` at each of P workers, the update is `total / P`, where `total` estimates the sum of
  all `home` at k indices I, and the new residuals hold exactly what it leaves out:

      total + Σ_w residual_w  =  Σ_w home_w      (Law C)

  It must be the **first** transformation of its chain: it takes the local, un-averaged gradients of one worker, inside
  `jax.shard_map` over `axis` with `check_vma=False` (`js.make_train_step` does it), and what follows sees the average.

  Args:
    axis: the name of the shard_map axis the workers lie along, a tuple of such names, or a comm.
    density: ρ in (0, 1]; k = ⌈ρ n⌉ entries are delivered.
    k: the number of entries to deliver instead, 1 … n. It is rounded up to ⌈k d/P⌉ for each of P/d blocks.
    teams: d, a divisor of P. More teams take fewer messages and more words: 2⌈log₂(P/d)⌉ + ⌈log₂d⌉ messages.
    sag: how teams add up their blocks. "recursive" (R-SAG) takes a power of two of teams, "bruck" (B-SAG) any number;
      "auto" is the first where it can be.
    residual: what to keep of the entries that are not delivered. "global" keeps all. "partial" (without what later
      workers drop at I) and "local" (only what this worker did not send) are the paper's ablation (§4.1.3) and lose
      gradient mass.

  Returns:
    An `optax.GradientTransformation`. Its state holds the residual, f32[n] a worker, whatever the gradients' dtype.

  Raises:
    ValueError: for a density, k, teams, sag or residual outside their choices, teams that do not divide P, outside
      shard_map, or with a state of other sizes.
    TypeError: for gradients that are not floating point.

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
  return transform_of(SparDL(density=density, k=k, teams=teams, sag=sag, residual=residual), axis)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparDL(SparseCollective):
  """SparDL with any number of teams; see `spardl_transform` for the fields."""

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
      ValueError: if `teams` does not divide `size`, naming the divisors.
    """
    return -(-self.entries(n) // routes.team_size(size, self.teams))

  def rungs(self, n: int, size: int) -> tuple[int, ...]:
    """The sizes of a block of L entries in a message: fixed, but for B-SAG from L/d, where all teams chose the same."""
    share = self.share(n, size)
    everything = share * size >= n * self.teams  # whole blocks: then there is nothing to leave out
    return ladder.rungs(-(-share // self.teams), share) if self.is_bruck and not everything else (share,)

  def init(self, n: int, size: int) -> State:
    share, state = self.share(n, size), super().init(n, size)
    if not self.is_bruck:
      return state
    low = self.rungs(n, size)[0]
    first = max(1, round(0.01 * (share - low)))
    return state._replace(shared=Adaptive(jnp.int32(low), jnp.int32(first), jnp.bool_(False)))

  def cost(self, n: int, size: int) -> Cost:
    share, team = self.share(n, size), size // self.teams
    rounds = len(routes.strides(self.teams))  # R-SAG sends L entries in each; B-SAG up to L of each other team
    blocks = 2 * (team - 1) + (self.teams - 1 if self.is_bruck else rounds)
    return Cost(2 * len(routes.strides(team)) + rounds, 2 * share * blocks, agreements=int(self.is_bruck))

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n, share = grads.size, self.share(grads.size, comm.size)
    team, member = comm.split(self.teams)
    held, sent = spar_reduce_scatter(team, Held.of(team, grads, state.residual, share=share))

    rungs = self.rungs(n, comm.size)
    own, lost, merged, sag_words = self._spar_all_gather(member, sent, held.length, state.shared, rungs)
    for entries in lost:
      held = held.add(jax.tree.map(lambda x: x[None], entries))
    largest = comm.all_reduce(merged, "max") if self.is_bruck else merged
    kept, gather_words = _all_gather(team, own, largest, rungs, held.length)

    delivered = held.places(kept.indices)
    residual = held.keeping(
      {
        "global": lambda: Sparse(delivered, held.at(delivered)),
        "partial": lambda: Sparse(delivered, jnp.zeros_like(kept.values)),
        "local": lambda: Sparse(held.places(sent.indices), jnp.zeros_like(sent.values)),
      }[self.residual]()
    )
    shared = adapt(state.shared, largest, rungs[0], share) if self.is_bruck else state.shared
    words = jnp.uint32(2 * share * (team.size - 1)) + sag_words + gather_words
    counters = Counters(
      words, words, selected=share * team.size, delivered=jnp.count_nonzero(kept.values), merged=largest
    )
    return Reduced(Sparse(delivered, kept.values), state._replace(residual=residual, shared=shared), counters)

  def _spar_all_gather(
    self, member: Comm, sent: Sparse, length: int, adaptive: Adaptive, rungs: tuple[int, ...]
  ) -> tuple[Sparse, list[Sparse], jax.Array, jax.Array]:
    """Adds up this worker's block, row 0 of `sent`, over teams: (own [L], what it lost, different indices, words)."""
    own = jax.tree.map(lambda x: x[0], sent)
    if self.is_bruck:
      return b_sag(member, own, adaptive.h, rungs, length)
    own, lost = r_sag(member, own, length)
    words = jnp.uint32(2 * own.indices.size * len(routes.strides(self.teams)))
    return own, lost, jnp.int32(own.indices.size), words


def _is_power_of_two(number: int) -> bool:
  return number & (number - 1) == 0


def spar_reduce_scatter(comm: Comm, held: Held) -> tuple[Held, Sparse]:
  """Sums P blocks over P workers, L entries of each, cut just before they leave (§3.1).

  In the home frame row b is block (rank + b) mod P. The bag of a stride s is then rows s … 2s − 1, clipped at P, and
  lands on the receiver's rows 0 … s − 1, for every P (the paper's Theorem 3.1 as a slice).

  Args:
    comm: the workers.
    held: gradient + residual of this worker.

  Returns:
    (held, sent): what this worker has left, received parts included, and the `Sparse` [P, L] that it selected in each
    row. Row 0 of `sent` is this worker's block of the sum; the others have left.
  """
  bags = []
  for stride in routes.strides(comm.size):
    held, bag = held.take(stride, min(2 * stride, comm.size))
    held = held.receive(comm.shift(bag, stride), rows=stride)
    bags.append(bag)
  held, own = held.take(0, 1)
  return held, jax.tree.map(lambda *rows: jnp.concatenate(rows), own, *reversed(bags))


def _all_gather(
  team: Comm, own: Sparse, largest: jax.Array, rungs: tuple[int, ...], length: int
) -> tuple[Sparse, jax.Array]:
  """The blocks of all workers of a team, [P/d, L] in the home frame, and the words that took."""
  share = own.indices.size

  def gather(capacity: int) -> tuple[Sparse, jax.Array]:
    rows = all_gather(team, jax.tree.map(lambda x: x[:capacity], own))
    return sparse.widened(rows, share, length), jnp.uint32(2 * capacity * (team.size - 1))

  return ladder.climb(rungs, largest, gather)


def r_sag(member: Comm, own: Sparse, length: int) -> tuple[Sparse, list[Sparse]]:
  """Adds up one block over 2^j teams by recursive doubling, cut to its largest entries after each step (§3.3.1).

  Args:
    member: the workers that hold this block, one of each team.
    own: [L] entries of the block.
    length: of the block.

  Returns:
    (own, lost): the sum, and what each step dropped. Step t = 0, 1, … drops the same at 2^(t + 1) workers, so each of
    them keeps 1/2^(t + 1) of it. (The paper's "half" is right for the first step only.)
  """
  lost = []
  for step, stride in enumerate(reversed(routes.strides(member.size)), start=1):
    got = member.permute(own, routes.partners(member.size, stride))
    both = jax.tree.map(lambda mine, theirs: jnp.stack([mine, theirs]), own, got)
    own, rest = sparse.largest(sparse.merge(both, length), own.indices.size, length)
    lost.append(rest._replace(values=rest.values / 2**step))
  return own, lost


def b_sag(
  member: Comm, own: Sparse, h: jax.Array, rungs: tuple[int, ...], length: int
) -> tuple[Sparse, list[Sparse], jax.Array, jax.Array]:
  """Adds up the h largest entries of one block of each team, for any number of teams (§3.3.2).

  The sum is in team order. What the last cut drops is in no team's total, so its origins keep it as it is.

  Args:
    member: the workers that hold this block, one of each team.
    own: [L] entries of the block.
    h: i32[], how many of them travel.
    rungs: the sizes of a message that are compiled, up to L.
    length: of the block.

  Returns:
    (own, lost, merged, words): the L largest entries of the sum, what was not sent, the number N of different indices
    that came together, and the words sent.
  """
  share, teams = own.indices.size, member.size
  own, _ = sparse.largest(own, share, length)
  travels = jnp.arange(share, dtype=jnp.int32) < h
  head, tail = sparse.where(travels, own, length), sparse.where(~travels, own, length)

  def gather(capacity: int) -> tuple[Sparse, jax.Array, jax.Array]:
    rows = in_rank_order(member, all_gather(member, jax.tree.map(lambda x: x[:capacity], head)))
    merged = sparse.merge(rows, length)
    kept, _ = sparse.largest(merged, share, length)
    return kept, sparse.count(merged, length), jnp.uint32(2 * capacity * (teams - 1))

  kept, merged, words = ladder.climb(rungs, h, gather)
  return kept, [tail], merged, words


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
