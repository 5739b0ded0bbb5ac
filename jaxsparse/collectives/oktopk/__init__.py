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

from jaxsparse.collectives.oktopk.algorithm import OkTopk

__all__ = ["OkTopk"]
