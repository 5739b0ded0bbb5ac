"""Selection of the entries that are sent; all collectives share these functions.

blocks        a lazily summed vector in blocks
kth_largest   the k-th largest magnitude, by counting
candidates    entries that provably contain the top-k of each block, found in one pass
exact         `top_k`, found among candidates
accumulator   blocks of which entries are sent and to which received entries are added, in rounds
per_chunk     the largest entry of each of k chunks instead of the k largest
threshold     all entries that reach a given threshold
selectors     selection methods of a collective: exact, per chunk, or by the threshold of the last step
"""

from jaxsparse.select.exact import top_k

__all__ = ["top_k"]
