"""Ok-Topk: a balanced sparse all-reduce of O(k) words with reused thresholds (Li and Hoefler, "Ok-Topk", §3).

The gradient is divided into P regions, each owned by one worker. Each worker sends its entries of magnitude ≥ a local
threshold to the owners of their regions. An owner adds them up, selects the sums of magnitude ≥ a global threshold, and
all owners gather the selected sums. Exact thresholds cost a sort, so they are computed every 32 steps and reused in
between. The boundaries of regions are chosen so that regions contain equally many selected entries, every 64 steps. The
messages that worker 0 of six sends:

    split       its entries of region 1 -> worker 1, of region 2 -> worker 2, … of region 5 -> worker 5
    balance     if one owner has far more sums than the mean: its surplus -> owners with fewer than the mean
    all-gather  stride 1, 2, 4: the selected sums, as in SparDL

With L = ⌈k/P⌉, a message of the split contains at most L + ⌊L/2⌋ entries, and balance and all-gather use the rest of
3 L: at most 6 L (P − 1) words in 2 (P − 1) + ⌈log₂P⌉ messages. Where a message overflows, its smallest entries stay in
the residuals of their senders and are counted.

The limit on the words is the paper's. The capacities that meet it and the number of messages are ours: the published
formula is 2 P + 2 log₂P messages (Table 1).

`algorithm` has the collective, `balance` the regions and the balancing of owners, `thresholds` the global threshold and
how thresholds change between exact ones.
"""

from jaxsparse.collectives.oktopk.algorithm import OkTopk

__all__ = ["OkTopk"]
