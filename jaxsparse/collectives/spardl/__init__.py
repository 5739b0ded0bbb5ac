"""SparDL: Spar-Reduce-Scatter, sums over teams, global residuals (Zhao et al., "SparDL", §3, Algorithms 1 and 2).

The gradient is divided into P equal blocks. In the reduce-scatter workers send blocks
to each other in ⌈log₂P⌉ rounds, after which each worker has the sum of one block over
all workers; in the all-gather workers exchange these sums. A dense reduce-scatter sends
all entries of a block. SparDL sends the L = ⌈k/P⌉ largest, selected just before the
block is sent, when the entries received so far have been added to it. So messages do
not grow from round to round, although the sum of two sparse blocks has up to 2 L
entries. The messages that worker 0 of six sends, L entries per block:

    reduce-scatter   stride 4   blocks 4 5      ->  worker 4   which adds them to its values of blocks 4 and 5
                     stride 2   blocks 2 3      ->  worker 2
                     stride 1   block  1        ->  worker 1
                     now worker 0 has the sum of block 0
    all-gather       stride 1   block  0        ->  worker 5
                     stride 2   blocks 0 1      ->  worker 4
                     stride 4   blocks 0 1      ->  worker 2   (which lacks only these two)

That is 2⌈log₂P⌉ messages and 4 L (P − 1) words, an entry being two words, for any P, a
power of two or not.

With d teams the reduce-scatter and the all-gather run inside teams of P/d workers, over
P/d blocks of L = ⌈k d/P⌉ entries. Between them Spar-All-Gather adds up the same block
of all teams (§3.3): fewer messages, more words. The messages that worker 0 of two teams
of three sends:

    reduce-scatter   stride 2   block  2        ->  worker 2   of its team 0 1 2
                     stride 1   block  1        ->  worker 1
    R-SAG            block 0  <->  worker 3   which is worker 0 of the other team; both keep the L largest of the sum
    all-gather       stride 1   block  0        ->  worker 2
                     stride 2   block  0        ->  worker 1

R-SAG repeats the exchange log₂d times, with d a power of two. B-SAG takes any d: it
gathers the h largest entries of the block of each team, adds them up, and keeps the L
largest. The sum has N different indices, more or fewer depending on how much the teams
overlap, and Algorithm 2 adapts h from step to step so that N is about L. It needs the
largest N of all blocks, which no worker has before the all-gather: each block of the
all-gather carries its N, one word. So blocks there have L slots, also where N < L: to
agree on fewer would take an all-reduce before it. (The lower end 2k(d² + P − 2d)/(Pd)
of B-SAG's words in the paper's Table 1 leaves out the reduce-scatter, too.)

`algorithm` has the collective, the reduce-scatter and the all-gather; `teams` has
R-SAG, B-SAG and Algorithm 2. tests/reference/spardl.py is the same algorithm in plain
numpy.
"""

from jaxsparse.collectives.spardl.algorithm import SparDL

__all__ = ["SparDL"]
