"""Ok-Topk: a balanced sparse all-reduce of O(k) words with thresholds that are reused (Li and Hoefler, "Ok-Topk", §3).

Each worker sends its entries of magnitude ≥ a local threshold to the owner of their region; the owner adds them up and
keeps those ≥ a global threshold. Exact thresholds cost a sort, so they are taken every 32 steps only and reused in
between; regions are drawn so that they hold equally many entries, and drawn anew every 64 steps. Six workers, worker 0:

    split       its entries of region 1 -> worker 1, of region 2 -> worker 2, … of region 5 -> worker 5
    balance     where one owner holds far more than the mean: its surplus -> those with room
    all-gather  stride 1, 2, 4: what the owners keep, as in SparDL

With L = ⌈k/P⌉ a message of the split has at most L + ⌊L/2⌋ entries, and what follows fits the rest of 3 L: 6 L (P − 1)
words at most, in 2 (P − 1) + ⌈log₂P⌉ messages. The smallest entries of a message that overflows stay with their senders
and are counted.

The bound on the words is the paper's. The capacities that meet it and the number of messages are ours: the published
formula is 2 P + 2 log₂P messages (Table 1).
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import sparse
from jaxsparse.collectives._base import SparseCollective, check_whole
from jaxsparse.comm import all_gather, exchange, topology
from jaxsparse.select import threshold as by_threshold
from jaxsparse.select import top_k
from jaxsparse.sparse import bitset, saturating
from jaxsparse.sparse import capacities as ladder
from jaxsparse.types import Comm, Cost, Counters, Reduced, Sparse, State

_STEP = 1.012
_INT32 = jnp.iinfo(jnp.int32).max
_TRIGGER = 4  # balance where the fullest owner holds more than this many times the mean (§5.3)


class Reused(NamedTuple):
  """What Ok-Topk reuses, the same on every worker; the local threshold, f32[1], is its own.

  Attributes:
    step: i32[].
    threshold: f32[], the global threshold.
    bounds: i32[P + 1], region r is bounds[r] … bounds[r + 1] − 1.
  """

  step: jax.Array
  threshold: jax.Array
  bounds: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class OkTopk(SparseCollective):
  """Delivers about k entries a step in O(k) words whatever P is (Ok-Topk, Algorithm 2).

  With `acc = gradient + residual`, a local threshold a and a global one b, the total is `s` where `|s| ≥ b` and 0
  elsewhere, with `s = Σ_w acc_w [|acc_w| ≥ a_w]`, added in rank order. A worker's next residual is its `acc`, with
  zeros where it sent an entry that is in the total.

  Thresholds are exact k-th magnitudes every `threshold_period` steps. In between, the published algorithm
  (Algorithm 1, `nudge="none"`) reuses them unchanged. The authors' code (`nudge="fixed"`) multiplies them by 1.012
  after a step with more than 5k/4 entries, and divides after one with fewer than 2k/3. Batches differ by more than
  that. By default (`nudge="search"`, ours) the local threshold is multiplied by
  1 + x/10 with `x = selected / k − 1`, and the global one is searched around the last one, with two more all-reduces of
  33 counts.

  Two rules are ours, whatever the nudge. A threshold of 0, which an exact step with fewer than k non-zero entries
  gives, is computed anew at the next step, and so are the regions where the global threshold is 0. Where more than 2k
  entries of a worker reach its threshold, it selects the 2k largest; of those that exceed the capacity of a message,
  the smallest stay in the residual.

  The state is the residual, f32[n] a worker, the thresholds and the regions; `js.metrics` shows selected and delivered
  entries, threshold age, imbalance of the owners before and after balancing, and overflow.

  Args:
    density: ρ in (0, 1]; about k = ⌈ρ n⌉ entries are delivered.
    k: the number of entries to aim at instead, 1 … n.
    threshold_period: steps from one exact threshold to the next, τ′ (128 for BERT in the paper).
    region_period: steps from one balancing of the regions to the next, τ.
    nudge: how thresholds change in between: "search" (ours), the "fixed" factor of the authors' code, or "none", the
      published algorithm.
    regions: "balanced" by the entries that workers select, or "even" in length, the paper's comparison (Figure 7).

  Raises:
    ValueError: for a density, k, period, nudge or regions outside their choices.

  Example:
    >>> import optax, jaxsparse as js
    >>> tx = optax.chain(js.oktopk_transform("workers", density=0.01), optax.sgd(0.1))
  """

  threshold_period: int = 32
  region_period: int = 64
  nudge: Literal["search", "fixed", "none"] = "search"
  regions: Literal["balanced", "even"] = "balanced"

  def __post_init__(self) -> None:
    super().__post_init__()
    check_whole(self.name, 1, threshold_period=self.threshold_period, region_period=self.region_period)

  @property
  def sizes_vary(self) -> bool:
    return True

  def sizes(self, n: int, size: int) -> "Sizes":
    """How many entries messages hold."""
    even = -(-self.entries(n) // size)
    most = even + even // 2
    return Sizes(even, most, direct=3 * even - most, surplus=2 * even - most)

  def slots(self, n: int, size: int) -> int:
    sizes = self.sizes(n, size)
    return max(super().slots(n, size), size * (sizes.most + sizes.surplus))  # of what an owner has and receives

  def init(self, n: int, size: int) -> State:
    reused = Reused(jnp.int32(0), jnp.float32(0), even_bounds(n, size))
    return super().init(n, size)._replace(worker=jnp.zeros(1, jnp.float32), shared=reused)

  def cost(self, n: int, size: int) -> Cost:
    words = 6 * self.sizes(n, size).even * (size - 1)
    # The fullest message, P owners' sizes, 31 bits or 66 counts for the global threshold, P − 1 boundaries in 2 parts.
    agreements = (
      1 + size + (66 if self.nudge == "search" else 31) + (2 * (size - 1) if self.regions == "balanced" else 0)
    )
    return Cost(2 * (size - 1) + len(topology.strides(size)), words, agreements * (size > 1))

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n, k, sizes = grads.size, self.entries(grads.size), self.sizes(grads.size, comm.size)
    reused: Reused = state.shared
    home = grads + state.residual
    exact, last = reused.step % self.threshold_period == 0, state.worker[0]
    local = jax.lax.cond(exact | (last == 0), lambda: jnp.abs(top_k(home, k).values).min(), lambda: last)
    reach = by_threshold.selected(home, local)
    selected, most = bitset.count(reach), min(n, 2 * k)
    chosen = by_threshold.at_most(home, reach, most)
    bounds = self._bounds(comm, chosen, n, reused)
    crowd = jnp.diff(by_threshold.counts_before(chosen, bounds))
    finite, needed = ladder.agree(comm, crowd.max(), jnp.isfinite(home).all())

    sent = by_threshold.in_regions(home, chosen, bounds, sizes.most, most)
    rows, words = _split(comm, sent, n, needed, sizes)
    sums = sparse.merge(rows, n)
    followed = lambda: nearest(comm, sums, reused.threshold, k, n) if self.nudge == "search" else reused.threshold
    anew = exact | (reused.threshold == 0)
    threshold = jax.lax.cond(anew, lambda: kth_magnitude(comm, sums, k, n), followed)
    mine = sparse.where(jnp.abs(sums.values) >= threshold, sums, n)
    owned = comm.all_reduce(jnp.zeros(comm.size, jnp.int32).at[comm.rank].set(sparse.count(mine, n)))
    kept, balanced, gather_words = _balance_and_gather(comm, mine, owned, sizes, n)

    total = sparse.put(jnp.zeros_like(home), kept.indices, kept.values)
    residual = sparse.undelivered(home, sent, total)
    delivered, wanted = sparse.count(kept, n), jnp.sum(owned, dtype=jnp.int32)
    if self.nudge == "fixed":
      local, threshold = by_a_fixed_step(local, selected, k), by_a_fixed_step(threshold, wanted, k)
    elif self.nudge == "search":
      local = proportionally(local, selected, k)
    next_reused = Reused(reused.step + 1, threshold, bounds)
    next_state = state._replace(residual=residual, worker=local[None], shared=next_reused)
    gone = sparse.count(sent, n) - jnp.minimum(crowd[comm.rank], sizes.most)
    counters = Counters(
      words_sent=saturating.total(words, gather_words),
      words_used=saturating.times(saturating.total(gone, delivered - jnp.minimum(owned[comm.rank], delivered)), 2),
      selected=selected,
      delivered=delivered,
      overflow=saturating.total(selected - sparse.count(sent, n), jnp.where(comm.rank == 0, wanted - delivered, 0)),
      imbalance=imbalance(owned),
      balanced=balanced,
      threshold_age=reused.step % self.threshold_period,
    )
    return Reduced(jnp.where(finite, total, jnp.nan), next_state, counters)

  def _bounds(self, comm: Comm, chosen: jax.Array, n: int, reused: Reused) -> jax.Array:
    """The regions of this step: drawn anew every `region_period` steps, and after one with fewer than k entries."""
    if self.regions == "even" or comm.size == 1:
      return reused.bounds
    fresh = (reused.step % self.region_period == 0) | (reused.threshold == 0)
    return jax.lax.cond(fresh, lambda: consensus_bounds(comm, chosen, n), lambda: reused.bounds)


class Sizes(NamedTuple):
  """How many entries the messages of a step hold at most.

  Attributes:
    even: L = ⌈k/P⌉, the equal share of a region.
    most: in a message of the split.
    direct: in a block of the all-gather, where nothing was balanced.
    surplus: in a message that balances; a block of the all-gather then holds `even`.
  """

  even: int
  most: int
  direct: int
  surplus: int


def even_bounds(n: int, size: int) -> jax.Array:
  """The P + 1 bounds of P regions of equal length, to within one entry.

  Example:
    >>> even_bounds(10, 4)
    Array([ 0,  2,  5,  7, 10], dtype=int32)
  """
  return jnp.array([n * region // size for region in range(size + 1)], jnp.int32)


def consensus_bounds(comm: Comm, chosen: jax.Array, n: int) -> jax.Array:
  """Regions that hold equally many selected entries, i32[P + 1]: the mean of what each worker would choose (§3.1.1).

  A worker that selected fewer than P entries proposes regions of equal length.

  Args:
    comm: at least two workers.
    chosen: the packed set of the entries that this worker selected.
    n: length of the gradient.
  """
  size, selected = comm.size, bitset.count(chosen)
  cut = jnp.arange(1, size, dtype=jnp.int32)
  ordinals = cut * (selected // size) + cut * (selected % size) // size  # cut · selected / P without overflow
  proposal = by_threshold.at_ordinals(chosen, ordinals)
  proposal = jnp.where(selected < size, even_bounds(n, size)[1:-1], proposal)
  edge = lambda value: jnp.full(1, value, jnp.int32)
  return jnp.concatenate([edge(0), floor_mean(comm, proposal), edge(n)])


def floor_mean(comm: Comm, x: jax.Array) -> jax.Array:
  """⌊Σ_w x_w / P⌋ of i32 arrays, whose sum may be beyond int32."""
  quotient, rest = comm.all_reduce(jnp.stack([x // comm.size, x % comm.size]))
  return quotient + rest // comm.size


def kth_magnitude(comm: Comm, entries: Sparse, k: int, end: int) -> jax.Array:
  """The exact k-th largest magnitude of the entries of all workers, f32[]; 0 where there are fewer than k.

  Bisection on the 31 bits of a magnitude, which are ordered as the numbers are: 31 agreements and nothing is sorted.
  """
  bits = jax.lax.bitcast_convert_type(jnp.abs(entries.values), jnp.int32)
  bits = jnp.where(entries.indices < end, bits, -1)

  def decide(step: jax.Array, found: jax.Array) -> jax.Array:
    candidate = found | (1 << (30 - step))
    reached = comm.all_reduce(jnp.sum(bits >= candidate, dtype=jnp.int32))
    return jnp.where(reached >= k, candidate, found)

  return jax.lax.bitcast_convert_type(jax.lax.fori_loop(0, 31, decide, jnp.int32(0)), jnp.float32)


def nearest(comm: Comm, entries: Sparse, threshold: jax.Array, k: int, end: int) -> jax.Array:
  """The threshold near the last one that about k entries of all workers reach, f32[].

  The best of 33 from a quarter to four times the last one, then the best of 33 around that, 0.3 % apart: residuals make
  magnitudes so equal that 9 % of the threshold can be all of k. 66 agreements in two all-reduces.
  """
  magnitude = jnp.where(entries.indices < end, jnp.abs(entries.values), -1.0)
  for octave in (8, 256):
    factors = np.exp2(np.arange(-16, 17) / octave).astype(np.float32)
    candidates = threshold * factors
    reached = comm.all_reduce(jnp.sum(magnitude[None] >= candidates[:, None], axis=1, dtype=jnp.int32))
    threshold = candidates[jnp.argmin(jnp.abs(reached - k))]
  return threshold


def by_a_fixed_step(threshold: jax.Array, selected: jax.Array, k: int) -> jax.Array:
  """The threshold for the next step: up after far too many entries, down after far too few (the authors' code).

  Example:
    >>> [round(float(by_a_fixed_step(jnp.float32(1), jnp.int32(selected), k=100)), 4) for selected in (100, 130, 60)]
    [1.0, 1.012, 0.9881]
  """
  many, few = min(5 * k // 4, _INT32), -(-2 * k // 3)
  factor = jnp.where(selected > many, _STEP, jnp.where(selected < few, 1 / _STEP, 1.0))
  return threshold * factor


def proportionally(threshold: jax.Array, selected: jax.Array, k: int) -> jax.Array:
  """The threshold for the next step: up or down by a tenth of what the number of entries is off.

  Example:
    >>> [round(float(proportionally(jnp.float32(1), jnp.int32(selected), k=100)), 4) for selected in (100, 130, 0)]
    [1.0, 1.03, 0.9]
  """
  return threshold * jnp.minimum(0.9 + selected.astype(jnp.float32) / (10.0 * k), 2.0)


def imbalance(owned: jax.Array) -> jax.Array:
  """The largest over the mean, f32[]; 1 where all are 0.

  Example:
    >>> imbalance(jnp.array([1, 2, 9]))
    Array(2.25, dtype=float32)
  """
  counts = owned.astype(jnp.float32)
  return jnp.where(counts.max() > 0, counts.max() / jnp.maximum(counts.mean(), 1e-9), 1.0)


def _split(comm: Comm, chunks: Sparse, n: int, needed: jax.Array, sizes: Sizes) -> tuple[Sparse, jax.Array]:
  """Selected entries [P, most] to the owners of their regions: (rows by sender [P, most], words)."""

  def send(capacity: int) -> tuple[Sparse, jax.Array]:
    rows = exchange(comm, sparse.narrowed(chunks, capacity))
    return sparse.widened(rows, sizes.most, n), saturating.times(capacity, 2 * (comm.size - 1))

  rows, words = ladder.climb(ladder.rungs(-(-sizes.even // 2), sizes.most, count=4), needed, send)
  return rows, words


def _balance_and_gather(
  comm: Comm, mine: Sparse, owned: jax.Array, sizes: Sizes, n: int
) -> tuple[Sparse, jax.Array, jax.Array]:
  """What the owners keep, on every worker: (entries [P · direct], imbalance of the blocks, words).

  Args:
    comm: the workers.
    mine: entries that this worker keeps.
    owned: i32[P], how many each worker keeps.
    sizes: of messages.
    n: length of the gradient.
  """
  crowded = (imbalance(owned) > _TRIGGER) | (owned.max() > sizes.direct)

  def gather(block: Sparse) -> tuple[Sparse, jax.Array]:
    """The blocks of all workers in rows of `direct` slots, and the words that took."""
    rows = sparse.widened(all_gather(comm, block), sizes.direct, n)
    return jax.tree.map(jnp.ravel, rows), saturating.times(block.indices.size, 2 * (comm.size - 1))

  def direct() -> tuple[Sparse, jax.Array, jax.Array]:
    capacities = ladder.rungs(-(-sizes.even // 2), sizes.direct, count=4)
    most, _ = sparse.largest(mine, sizes.direct, n)
    kept, words = ladder.climb(capacities, owned.max(), lambda c: gather(sparse.narrowed(most, c)))
    return kept, imbalance(owned), words

  def balanced() -> tuple[Sparse, jax.Array, jax.Array]:
    block = balance(comm, mine, owned, sizes.even, sizes.surplus, n)
    kept, words = gather(block)
    held = jnp.sum((kept.indices < n).reshape(comm.size, -1), axis=1, dtype=jnp.int32)
    return kept, imbalance(held), saturating.total(words, 2 * sizes.surplus * (comm.size - 1))

  if comm.size == 1:
    return direct()
  return jax.lax.cond(crowded, balanced, direct)


def balance(comm: Comm, mine: Sparse, owned: jax.Array, even: int, surplus: int, n: int) -> Sparse:
  """Moves entries from workers with more than an equal share to those with less, point to point (§3.1.2).

  All surplus entries of all workers stand in one line, by rank; all free places in another, the first of each worker
  before the second of any, so that no two workers have much to send to each other. Each entry goes to the place of its
  number: everyone knows from `owned` alone who sends what to whom.

  Args:
    comm: the workers.
    mine: entries of this worker.
    owned: i32[P], how many each worker has.
    even: the largest equal share.
    surplus: slots of a message.
    n: length of the gradient.

  Returns:
    [even] entries; what finds no room is in none of them.
  """
  share = jnp.minimum(-(-jnp.sum(owned, dtype=jnp.int32) // comm.size), even)
  above, below = jnp.maximum(owned - share, 0), jnp.maximum(share - owned, 0)
  line, _ = sparse.largest(mine, mine.indices.size, n)
  ordinal = jnp.arange(line.indices.size, dtype=jnp.int32) - share
  place = jnp.cumsum(above, dtype=jnp.int32)[comm.rank] - above[comm.rank] + ordinal
  free = jnp.arange(even, dtype=jnp.int32)[:, None] < below[None]
  found = jnp.searchsorted(jnp.cumsum(free.ravel(), dtype=jnp.int32), place + 1).astype(jnp.int32)
  moves = (ordinal >= 0) & (line.indices < n) & (found < free.size)
  away = sparse.split(line, jnp.where(moves, found % comm.size, comm.size), comm.size, surplus, n)
  came = exchange(comm, away)
  stays = sparse.where(ordinal < 0, line, n)
  here = jax.tree.map(lambda a, b: jnp.concatenate([a, b.reshape(-1)]), stays, came)
  return sparse.largest(here, even, n)[0]
