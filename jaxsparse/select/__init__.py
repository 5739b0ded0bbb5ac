"""Which entries are sent: the hot loop of this library, one engine for every collective.

kth_largest   where a selection of the k largest ends, by counting
candidates    one pass over blocks of a lazily summed vector (`blocks`): the few entries that can be among the k largest
top_k         the k largest, found among candidates
accumulator   blocks to which received entries are added and of which entries are sent, for multi-round collectives
per_chunk     the largest entry of each of k chunks instead of the k largest
threshold     all entries that reach a given threshold
selectors     how a collective chooses: exact, per chunk, or by the threshold of the last step
"""

from jaxsparse.select.exact import top_k

__all__ = ["top_k"]
