"""gTopk: a reduction along a binary tree in which each merge keeps top-k of a sum (Shi et al., "gTop-k S-SGD").

The messages of six workers, k entries each; the result of worker 0 is broadcast along
the same tree:

    reduce      1 -> 0    3 -> 2    5 -> 4
                2 -> 0
                4 -> 0              (the tree is defined for any P)
    broadcast   0 -> 4
                0 -> 2
                0 -> 1    2 -> 3    4 -> 5

2⌈log₂P⌉ messages and 4 k ⌈log₂P⌉ words.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.collectives._messages import SelectingCollective, Writer
from jaxsparse.comm import schedules
from jaxsparse.select.accumulator import SparseReduced, pending_returned
from jaxsparse.select.blocks import LazySum
from jaxsparse.select.exact import top_k_of_entries
from jaxsparse.sparse.codec import codec_of
from jaxsparse.types import Comm, Cost, Reduced, Sparse, State


@dataclasses.dataclass(frozen=True, kw_only=True)
class GTopk(SelectingCollective):
  """Merges the k largest entries of all workers pairwise along a binary tree (gTopk).

  With `acc_w = gradient_w + residual_w` and `a ⊕ b = top_k(a + b)`, the total is the ⊕
  of all `top_k(acc_w)` along the tree. An entry that a merge drops stays in a residual,
  as in SparDL: if its index is in the total, in that of the merging worker, otherwise
  in those of the workers that contributed to it. The authors' code loses such entries.

  Example:
    >>> import optax, jaxsparse as js
    >>> tx = optax.chain(js.make_transform("gtopk", "workers", density=0.01), optax.sgd(0.1))
  """

  def cost(self, n: int, size: int) -> Cost:
    """Messages and 4-byte words that one of `size` workers sends in a step, for n entries."""
    # ⌈log₂P⌉ rounds up the tree, and as many down, of one message of k entries each
    rounds = 2 * len(schedules.strides(size))
    words = codec_of(self.wire, n).words(1, self.entries(n))
    return Cost(rounds, words * rounds)

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n = grads.size
    acc = LazySum((grads, state.residual))
    # Random rounding by `wire` has other noise in each step and at each rank. `shared`
    # is the number of the step; () where rounding is not random.
    writer = self.writer(codec_of(self.wire, n), state.shared, comm.rank)
    # top_k(acc_w), [1, k], how many slots are filled, and the selector's next memory
    chosen, selected, memory = self.choose(acc, state.worker)
    if self.selection.one_per_chunk:
      # Messages have entries in the order of indices, this selector in that of chunks.
      chosen = sparse.as_row(sparse.merge(chosen, n))
    total, returned = self._merge(comm, chosen, writer, n)
    # What this worker's merges dropped or rounded off is returned to it. An entry that
    # it sent and that is not in the total stays in its residual.
    residual = pending_returned(acc, total.indices, chosen.indices, returned)
    counters = self.count(comm, n, selected=selected, delivered=sparse.count(total, n))
    return SparseReduced(total, State(residual, memory, writer.next_step), counters)

  def _merge(
    self, comm: Comm, chosen: Sparse, writer: Writer, n: int
  ) -> tuple[Sparse, list[Sparse]]:
    """The ⊕ of the entries of all workers.

    Returns:
      (total, returned): [k] entries, the same on every worker; and a list of the
      entries that this worker's merges dropped and of the rounding errors of its
      messages, a `Sparse` for each merge and each message.
    """
    k = chosen.indices.size
    merged = chosen
    # (child, parent) pairs of each round, towards worker 0
    rounds = schedules.tree_rounds(comm.size)
    returned = list[Sparse]()
    for round_index, edges in enumerate(rounds):
      message, errors = writer.encode(merged, round_index)
      received = writer.codec.decode(comm.permute(message, edges))
      # Empty slots where no message arrives: `permute` returns zeros, which would be
      # entries of index 0.
      receives = _is_among(comm, [parent for _, parent in edges])
      received = sparse.where(receives, received, n)
      if writer.codec.rounds:
        # `encode` runs at all workers, but only a child sends, and has errors.
        sends = _is_among(comm, [child for child, _ in edges])
        returned.append(sparse.where(sends, errors, n))
      # a ⊕ b = top_k(a + b): k entries in k slots, and the rest
      both = sparse.merge(sparse.concatenate([merged, received]), n)
      kept, rest = top_k_of_entries(both, k, k, n)
      merged = sparse.as_row(kept)
      returned.append(rest)
    # Encoded once: every worker decodes the same message, worker 0 too (Law R).
    message, errors = writer.encode(merged, len(rounds))
    if writer.codec.rounds:
      returned.append(sparse.where(comm.rank == 0, errors, n))
    # The result of worker 0 goes down the tree that it came up.
    for edges in reversed(rounds):
      received = comm.permute(message, [(parent, child) for child, parent in edges])
      receives = _is_among(comm, [child for child, _ in edges])
      message = jax.tree.map(
        lambda new, old, receives=receives: jnp.where(receives, new, old),
        received,
        message,
      )
    return sparse.only_row(writer.codec.decode(message)), returned


def _is_among(comm: Comm, workers: list[int]) -> jax.Array:
  """Whether this worker is one of `workers`, numbers of workers; bool[]."""
  return jnp.any(jnp.array(workers, jnp.int32) == comm.rank)
