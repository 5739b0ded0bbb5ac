"""Selection of the entries that are sent, and the residual of those that are not, shared by all collectives.

blocks        gradient + residual as a lazy sum in blocks, and the k-th largest magnitude of a row, by counting
accumulator   selection and residual: entries are sent from it and added to it in rounds; what is left is the residual
selectors     selection methods of a collective: exact, per chunk, or by the threshold of the last step
exact         `top_k`, found among candidates: few entries that provably contain the top-k of each block
per_chunk     the largest entry of each of k chunks instead of the k largest
chunks        the k largest entries of each chunk of consecutive entries
threshold     all entries that reach a given threshold
"""

from jaxsparse.select.exact import top_k

__all__ = ["top_k"]
