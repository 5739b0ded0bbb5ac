"""Ok-Topk: a balanced sparse all-reduce of O(k) words with reused thresholds (Li and Hoefler, "Ok-Topk", §3).

The gradient is divided into P regions, each owned by one worker. Each worker sends its
entries of magnitude ≥ a local threshold to the owners of their regions. An owner adds
them up, selects the sums of magnitude ≥ a global threshold, and all owners gather the
selected sums. Exact thresholds cost a sort, so they are computed every 32 steps and
reused in between. The boundaries of regions are chosen so that regions contain equally
many selected entries, every 64 steps. The messages that worker 0 of six sends:

    split       its entries of region 1 -> worker 1, of region 2 -> worker 2, … of region 5 -> worker 5
    balance     if one owner has more than 4 times the mean of sums: its surplus -> owners with fewer than the mean
    all-gather  stride 1, 2, 4: the selected sums, as in SparDL

With L = ⌈k/P⌉, a message of the split contains at most L + ⌊L/2⌋ entries. Owners gather
blocks of one of six capacities from L/2 to 4 L, the smallest that is sufficient for all
of them, or blocks of L after balancing with messages of L. Where a message overflows,
its smallest entries stay in the residuals of their senders and are counted.

A step sends at most 11 L (P − 1) words in 2 (P − 1) + ⌈log₂P⌉ messages. The paper has
at most 6 k (P − 1)/P words and 2 P + 2 log₂P messages (Table 1). Its words are those of
the entries; here all messages of a round have the size of the largest.

`algorithm` has the collective, `balance` the regions and the balancing of owners,
`thresholds` the global threshold and how thresholds change between exact ones.
"""

from jaxsparse.collectives.oktopk.algorithm import OkTopk

__all__ = ["OkTopk"]
