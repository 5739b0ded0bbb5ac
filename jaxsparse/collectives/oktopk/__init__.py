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

from typing import Literal

import optax

from jaxsparse._compat import AxisName
from jaxsparse.collectives.oktopk.algorithm import OkTopk
from jaxsparse.transform.update import transform_of
from jaxsparse.types import Comm


def oktopk_transform(
  axis: AxisName | Comm,
  *,
  density: float | None = None,
  k: int | None = None,
  threshold_period: int = 32,
  region_period: int = 64,
  nudge: Literal["search", "fixed", "none"] = "search",
  regions: Literal["balanced", "even"] = "balanced",
) -> optax.GradientTransformation:
  """Averages gradients over the workers, about k entries a step, in O(k) words whatever P is (Ok-Topk, Algorithm 2).

  With `home = gradient + residual`, a local threshold a and a global one b, the total is `s` where `|s| ≥ b` and 0
  elsewhere, with `s = Σ_w home_w [|home_w| ≥ a_w]` added in rank order. A worker's residual is its `home`, with zeros
  where it sent an entry that is in the total.

  Thresholds are exact k-th magnitudes every `threshold_period` steps. In between, the published algorithm
  (Algorithm 1, `nudge="none"`) reuses them unchanged. The authors' code (`nudge="fixed"`) multiplies them by 1.012
  after a step with more than 5k/4 entries, and divides after one with fewer than 2k/3. Batches differ by more than
  that. By default (`nudge="search"`, ours) the local threshold is multiplied by
  1 + x/10 with `x = selected / k − 1`, and the global one is searched around the last one, with two more all-reduces of
  33 counts.

  Two rules are ours, whatever the nudge. A threshold of 0, which an exact step with fewer than k non-zero entries
  gives, is taken anew at the next step, and so are the regions where the global threshold is 0. Where more than 2k
  entries of a worker reach its threshold, it takes the 2k largest; of those that a message cannot hold, the smallest
  stay in the residual.

  Like every jaxsparse transform it must be the first of its chain and run inside `jax.shard_map` over `axis` with
  `check_vma=False`; see `js.spardl_transform`.

  Args:
    axis: the name of the shard_map axis the workers lie along, a tuple of such names, or a comm.
    density: ρ in (0, 1]; about k = ⌈ρ n⌉ entries are delivered.
    k: the number of entries to aim at instead, 1 … n.
    threshold_period: steps from one exact threshold to the next, τ′ (128 for BERT in the paper).
    region_period: steps from one balancing of the regions to the next, τ.
    nudge: how thresholds follow in between: "search" (ours), the "fixed" factor of the authors' code, or "none", the
      published algorithm.
    regions: "balanced" by what workers select, or "even" in length, the paper's comparison (Figure 7).

  Returns:
    An `optax.GradientTransformation`. Its state holds the residual, f32[n] a worker, the thresholds and the regions;
    `js.metrics` shows selected and delivered entries, threshold age, imbalance of the owners before and after
    balancing, and overflow.

  Raises:
    ValueError: for a density, k, period, nudge or regions outside their choices, outside shard_map, or with a
      state of other sizes.
    TypeError: for gradients that are not floating point.

  Example:
    >>> import optax, jaxsparse as js
    >>> tx = optax.chain(js.oktopk_transform("workers", density=0.01), optax.sgd(0.1))
  """
  config = OkTopk(
    density=density,
    k=k,
    threshold_period=threshold_period,
    region_period=region_period,
    nudge=nudge,
    regions=regions,
  )
  return transform_of(config, axis)
