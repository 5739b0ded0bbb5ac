"""1-bit all-reduce: the sign of each entry and a scale for each block, before and after the sum (1-bit Adam, 2021).

Sending signs and adding the rounding errors to the next gradient is 1-bit SGD (Seide et
al., 2014). Rounding the sums, too, so that a worker receives one bit an entry and not P
− 1, is the compressed all-reduce of 1-bit Adam (Tang et al.). The messages of worker 0
of four:

    scatter      signs of its region 1 -> worker 1, of region 2 -> worker 2, of region 3 -> worker 3
    all-gather   stride 1, 2: the signs of the sums of regions, as in SparDL

`algorithm` has the collective, `blocks` the layout of signs, and how they are computed
in few passes over memory.
"""

from jaxsparse.collectives.onebit.algorithm import OneBit

__all__ = ["OneBit"]
