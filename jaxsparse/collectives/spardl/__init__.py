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

from jaxsparse.collectives.spardl.algorithm import SparDL

__all__ = ["SparDL"]
