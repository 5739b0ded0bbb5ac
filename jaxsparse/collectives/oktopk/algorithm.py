"""The Ok-Topk all-reduce: split by regions, thresholds, balance, all-gather."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse._compat import varying
from jaxsparse.collectives._base import Traits
from jaxsparse.collectives._messages import (
  EncodingCollective,
  Writer,
  agree,
  geometric,
  send_up_to,
)
from jaxsparse.collectives.oktopk.balance import (
  TRIGGER,
  Sizes,
  balance_and_gather,
  consensus_bounds,
  even_bounds,
  imbalance,
)
from jaxsparse.collectives.oktopk.thresholds import (
  count_reaching,
  kth_of_all,
  nudge_by_factor,
  nudge_in_proportion,
  search_near,
)
from jaxsparse.comm import schedules
from jaxsparse.select import threshold as by_threshold
from jaxsparse.select.accumulator import SparseReduced, pending_nonzero
from jaxsparse.select.blocks import LazySum
from jaxsparse.sparse.codec import codec_of
from jaxsparse.types import (
  Comm,
  Cost,
  Counters,
  Reduced,
  Sparse,
  State,
  saturated_sum,
)


class PeriodicValues(NamedTuple):
  """The state that is the same on every worker; the local threshold, f32[1], is in `State.worker`.

  Attributes:
    step: i32[], the number of the step.
    threshold: f32[], the global threshold.
    bounds: i32[P + 1], region r is the flat indices bounds[r] … bounds[r + 1] − 1.
  """

  step: jax.Array
  threshold: jax.Array
  bounds: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class OkTopk(EncodingCollective):
  """Delivers about k entries a step in O(k) words whatever P is (Ok-Topk, Algorithm 2).

  With the accumulators `acc_w = gradient_w + residual_w`, local thresholds a_w and a global threshold b, the total is
  `s` where `|s| ≥ b` and 0 elsewhere, with `s = Σ_w acc_w [|acc_w| ≥ a_w]`, added in rank order. A worker's next
  residual is its accumulator, with zeros where it sent an entry that is in the total.

  Thresholds are exact k-th magnitudes every `threshold_period` steps. In between, the
  published algorithm (Algorithm 1, `nudge="none"`) reuses them unchanged. The authors'
  code (`nudge="fixed"`) multiplies them by 1.012 after a step with more than 5k/4
  entries, and divides them by 1.012 after one with fewer than 2k/3. The magnitudes of
  gradients change by more than that from batch to batch. By default (`nudge="search"`,
  ours) the local threshold is multiplied by 1 + x/10 with `x = selected / k − 1`, and
  the global one is searched around its last value, which takes one more all-reduce of
  33 counts.

  Two rules are ours, for every nudge. A threshold of 0, the result of an exact step
  with fewer than k non-zero entries, is computed exactly again in the next step, and so
  are the regions if the global threshold is 0. If more than 2k entries of a worker
  reach its threshold, the worker selects the 2k largest; if a message overflows its
  capacity, its smallest entries stay in the residual.

  If k is small, messages of the split overflow even where all entries are independent
  and of one distribution: their sizes are random numbers with mean k/P, and their
  capacity is 1.5 k/P. Of the selected entries of normal gradients overflow 6.5 % with k
  = 40 and 8 workers, 9.8 % with 16 workers; with k = 400 it is 0.1 % and 0.8 %. About k
  entries are delivered all the same, since the global threshold follows their number.

  Ablations: `nudge="fixed"` and `"none"`; `regions="even"` and `balance=False`, the
  paper's comparisons (Figures 7a and 7b). `js.metrics` shows selected and delivered
  entries, threshold age, imbalance of the owners before and after balancing, and
  overflow.

  Args:
    threshold_period: τ′, the number of steps from one exact threshold to the next (128
      for BERT in the paper).
    region_period: τ, the number of steps from one balancing of the regions to the next.
    nudge: how thresholds change between exact ones.
    regions: "balanced" regions contain equally many selected entries; "even" ones have
      equal length.
    balance: whether owners send their surplus to others before the all-gather, where
      one has more than 4 times the mean and more than fits in its blocks of up to 2
      k/P; with up to 4 workers none can. Without it an owner delivers at most 4 k/P.

  Example:
    >>> import optax, jaxsparse as js
    >>> tx = optax.chain(js.oktopk_transform("workers", density=0.01), optax.sgd(0.1))
  """

  threshold_period: int = 32
  region_period: int = 64
  nudge: Literal["search", "fixed", "none"] = "search"
  regions: Literal["balanced", "even"] = "balanced"
  balance: Literal[True, False] = True
  ranges = (("threshold_period", 1, None), ("region_period", 1, None))

  @property
  def traits(self) -> Traits:
    return dataclasses.replace(super().traits, sizes_vary=True)

  def is_partial(self, n: int, state: State) -> bool:
    return True  # A reused threshold may select fewer entries than `entries(n)`.

  def sizes(self, n: int, size: int) -> Sizes:
    """The capacities of messages, in entries: L = ⌈k/P⌉; L + ⌊L/2⌋ in the split; up to six of blocks, ⌈L/2⌉ … 4 L."""
    even = -(-self.entries(n) // size)
    largest_block = min(n, TRIGGER * even)
    blocks = geometric(-(-even // 2), largest_block, count=6)
    return Sizes(even, even + even // 2, blocks)

  def balances(self, size: int) -> bool:
    """Whether a step may balance the owners: none of `size` can have more than `size` times the mean."""
    return self.balance and size > TRIGGER

  def init(self, n: int, size: int) -> State:
    # Step 0, which also seeds the noise of `wire`, and a global threshold of 0. A
    # threshold of 0 is computed exactly in the next step.
    reused = PeriodicValues(jnp.int32(0), jnp.float32(0), even_bounds(n, size))
    local_threshold = jnp.zeros(1, jnp.float32)
    start = super().init(n, size)
    return start._replace(worker=local_threshold, shared=reused)

  def cost(self, n: int, size: int) -> Cost:
    """The most messages and words of a step, with the agreements of a usual one.

    The all-reduces of exact thresholds and of new regions count only if their period is
    1: else they are rare, every 32 and every 64 steps by default.
    """
    sizes = self.sizes(n, size)
    codec = codec_of(self.wire, n)
    even, most, direct = (
      codec.words(1, capacity) for capacity in (sizes.even, sizes.most, sizes.direct)
    )
    # The split to P − 1 workers. Then the all-gather of blocks of the largest capacity;
    # or P − 1 messages of L = `even` to balance, and an all-gather of blocks of L: 2 L.
    words = (most + max(direct, 2 * even)) * (size - 1)
    # All-reduces of a usual step: one finds the largest message of the split; one
    # counts the sums that reach the global threshold, or two search it (`search_near`).
    all_reduces = 1 + (2 if self.nudge == "search" else 1)
    # Exact thresholds in every step: one for the split, seven of `kth_of_all`.
    if self.threshold_period == 1:
      all_reduces = 1 + 7
    if self.region_period == 1 and self.regions == "balanced":
      all_reduces += 1
    # P − 1 messages of the split, P − 1 to balance if owners may be balanced, and
    # ⌈log₂P⌉ of the all-gather
    point_to_point = (1 + self.balances(size)) * (size - 1)
    messages = point_to_point + len(schedules.strides(size))
    return Cost(messages, words, all_reduces * schedules.agreement_messages(size))

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n = grads.size
    k = self.entries(n)
    sizes = self.sizes(n, comm.size)
    reused = state.shared
    acc = LazySum((grads, state.residual))
    age = reused.step % self.threshold_period
    exact = age == 0
    # local threshold a_w, and the entries that reach it (Algorithm 1, lines 2 to 4)
    local, chosen, selected = _select(acc, state.worker[0], exact, k)
    # regions (lines 5 to 7), split and reduce (line 8, §3.1.1)
    bounds = self._bounds(comm, reused, chosen.indices, n)
    starts = by_threshold.region_starts(chosen.indices, bounds)
    # how many entries of each region are selected here, i32[P]
    crowd = jnp.diff(starts)
    sent = by_threshold.read_regions(chosen, starts, sizes.most, n)
    writer = self.writer(codec_of(self.wire, n), reused.step, comm.rank)
    sums, lost, words, finite = _split(comm, writer, sent, crowd.max(), sizes)
    # global threshold b (lines 9 to 12); i32[P], how many sums of each worker reach it
    threshold, owned = self._threshold(comm, reused, sums, exact, k, n)
    # the own region's sums that are in the total
    selected_sums = sparse.where(jnp.abs(sums.values) >= threshold, sums, n)
    # balance and all-gather (line 13, §3.1.2)
    kept, rounded_off, balanced, gather_words = balance_and_gather(
      comm, writer, selected_sums, owned, sizes, self.balances(comm.size)
    )
    # next residual: the accumulator without what was sent and delivered (line 14)
    residual = pending_nonzero(acc, sent.indices, kept, lost + rounded_off)

    counters = _count(comm, writer, sizes, crowd, selected, sent, kept, owned)._replace(
      words_sent=saturated_sum(words, gather_words),
      balanced=balanced,
      threshold_age=age,
    )
    local, threshold = self._nudge(local, threshold, selected, owned, k)
    shared = PeriodicValues(reused.step + 1, threshold, bounds)
    # Once a worker has sent a NaN or Inf, every entry of the total is NaN (`agree`).
    total = kept._replace(values=jnp.where(finite, kept.values, jnp.nan))
    # leaves of `State.worker` have a leading axis
    return SparseReduced(total, State(residual, local[None], shared), counters)

  def _bounds(
    self, comm: Comm, reused: PeriodicValues, chosen: jax.Array, n: int
  ) -> jax.Array:
    """The boundaries of the regions, i32[P + 1]: new ones every τ steps (§3.1.1), and after a threshold of 0.

    `chosen`, i32[c], are the indices that this worker selected, ascending.
    """
    if self.regions != "balanced" or comm.size == 1:
      return reused.bounds
    fresh = (reused.step % self.region_period == 0) | (reused.threshold == 0)
    new = lambda: consensus_bounds(comm, chosen, n)
    return _every(self.region_period, fresh, new, lambda: reused.bounds)

  def _threshold(
    self,
    comm: Comm,
    reused: PeriodicValues,
    sums: Sparse,
    exact: jax.Array,
    k: int,
    n: int,
  ) -> tuple[jax.Array, jax.Array]:
    """The global threshold b, f32[], and the number of sums of each worker that reach it, i32[P].

    b is exact every τ′ steps, which `exact`, bool[], tells, and after a threshold of 0.
    """
    last = reused.threshold
    # Algorithm 1: the last threshold as it is, and how many sums reach it.
    follow = lambda: (last, count_reaching(comm, sums, last, n))
    if self.nudge == "search":
      follow = lambda: search_near(comm, sums, last, k, n)
    fresh = lambda: kth_of_all(comm, sums, k, n)
    return _every(self.threshold_period, exact | (last == 0), fresh, follow)

  def _nudge(
    self,
    local: jax.Array,
    threshold: jax.Array,
    selected: jax.Array,
    owned: jax.Array,
    k: int,
  ) -> tuple[jax.Array, jax.Array]:
    """The thresholds a_w and b, f32[] each, that the next step reuses unless it computes or searches them.

    Args:
      local: a_w of this step.
      threshold: b of this step.
      selected: i32[], entries of this worker that reach a_w.
      owned: i32[P], sums of each worker that reach b.
      k: the number of entries that should reach each.
    """
    # "none": both as they are. "search": b is searched in the next step (`_threshold`).
    if self.nudge == "search":
      local = nudge_in_proportion(local, selected, k)
    elif self.nudge == "fixed":
      local = nudge_by_factor(local, selected, k)
      wanted = jnp.sum(owned, dtype=jnp.int32)
      threshold = nudge_by_factor(threshold, wanted, k)
    return local, threshold


def _select(
  acc: LazySum, last: jax.Array, exact: jax.Array, k: int
) -> tuple[jax.Array, Sparse, jax.Array]:
  """The local threshold, f32[]; the entries that reach it, [2k] slots, the largest where more do; and how many do.

  `last`, f32[], is the last threshold, 0 if there is none; `exact`, bool[], asks for
  the k-th largest magnitude in place of it.
  """
  most = min(acc.size, 2 * k)
  local, members, selected = by_threshold.choose_reaching(
    acc, last, exact | (last == 0), k, most
  )
  return local, by_threshold.read_first(acc, members, most), selected


def _split(
  comm: Comm, writer: Writer, sent: Sparse, fullest: jax.Array, sizes: Sizes
) -> tuple[Sparse, list[Sparse], jax.Array, jax.Array]:
  """Sends each region to its owner: split and reduce (§3.1).

  Args:
    comm: the workers.
    writer: encodes messages.
    sent: [P, most] entries of the regions.
    fullest: i32[], the largest number of entries of a region.
    sizes: the capacities of messages.

  Returns:
    The sums of the own region, added in rank order; the rounding errors of messages;
    the words sent; and whether the entries of all workers are finite. NaN and Inf reach
    every threshold and are among the largest, so `sent` contains them.
  """
  n = writer.codec.length
  finite, needed = agree(comm, fullest, jnp.isfinite(sent.values).all())
  # Capacities from L/2 to `most`, since L = `sizes.even` entries are in a region if all
  # regions are equally full. The split is message 0 of the step.
  capacities = geometric(-(-sizes.even // 2), sizes.most, count=4)
  rows, lost, words = send_up_to(
    writer.exchange_rows, comm, sent, 0, capacities, needed, n
  )
  return sparse.merge(rows, n), lost, words, finite


def _count(
  comm: Comm,
  writer: Writer,
  sizes: Sizes,
  crowd: jax.Array,
  selected: jax.Array,
  sent: Sparse,
  kept: Sparse,
  owned: jax.Array,
) -> Counters:
  """The counters of a step, without the words sent, the balance and the age of the threshold.

  Args:
    comm: the workers.
    writer: encodes messages.
    sizes: the capacities of messages.
    crowd: i32[P], entries of each region that this worker selected.
    selected: i32[], entries of this worker that reach its threshold.
    sent: [P, most] entries of the split; those that overflow a message are not in it.
    kept: the entries of the total.
    owned: i32[P], selected sums of each worker.
  """
  n = writer.codec.length
  delivered = sparse.count(kept, n)
  # Selected sums that overflow a block. All workers know this number, and `overflow` of
  # all workers is added up, so only worker 0 counts it.
  undelivered = jnp.sum(owned, dtype=jnp.int32) - delivered
  # selected entries that fit into messages of the split
  fitting = sparse.count(sent, n)
  # Entries of the own region are not sent.
  to_others = fitting - jnp.minimum(crowd[comm.rank], sizes.most)
  from_others = delivered - jnp.minimum(owned[comm.rank], delivered)
  return Counters(
    # an entry takes as many words as in a message of L slots
    words_used=writer.words_used(saturated_sum(to_others, from_others), sizes.even),
    selected=selected,
    delivered=delivered,
    overflow=saturated_sum(
      selected - fitting, jnp.where(comm.rank == 0, undelivered, 0)
    ),
    imbalance=imbalance(owned),
  )


def _every(period: int, due: jax.Array, fresh: Callable, reused: Callable) -> Any:
  """`fresh()` in steps that are `due`, bool[], else `reused()`, which is not compiled where all are: a period of 1."""
  return fresh() if period == 1 else varying.cond(due, fresh, reused)
