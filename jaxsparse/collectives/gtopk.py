"""gTopk: a reduction along a binary tree in which each merge keeps top-k of a sum (Shi et al., "gTop-k S-SGD").

The messages of six workers, k entries each; the result of worker 0 is broadcast along the same tree:

    reduce      1 -> 0    3 -> 2    5 -> 4
                2 -> 0
                4 -> 0              (the tree is defined for any P)
    broadcast   0 -> 4
                0 -> 2
                0 -> 1    2 -> 3    4 -> 5

2⌈log₂P⌉ messages and 4 k ⌈log₂P⌉ words.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.collectives._base import SparseCollective
from jaxsparse.comm import topology
from jaxsparse.select import top_k
from jaxsparse.select.exact import top_k_of_entries
from jaxsparse.sparse import bitset
from jaxsparse.sparse.lazy import LazySum
from jaxsparse.types import Comm, Cost, Counters, Pending, Reduced, Sparse, State


@dataclasses.dataclass(frozen=True, kw_only=True)
class GTopk(SparseCollective):
  """Merges the k largest entries of all workers pairwise along a binary tree (gTopk).

  With `acc_w = gradient_w + residual_w` and `a ⊕ b = top_k(a + b)`, the total is the ⊕ of all `top_k(acc_w)` along the
  tree. An entry that a merge drops stays in a residual, as in SparDL: if its index is in the total, in that of the
  merging worker, otherwise in those of the workers that contributed to it. The authors' code loses such
  entries. The state is the residual, f32[n] a worker.

  Args:
    density: ρ in (0, 1]; k = ⌈ρ n⌉ entries are delivered.
    k: the number of entries instead, 1 … n.

  Raises:
    ValueError: for a density or k outside their choices.

  Example:
    >>> import optax, jaxsparse as js
    >>> tx = optax.chain(js.gtopk_transform("workers", density=0.01), optax.sgd(0.1))
  """

  def slots(self, n: int, size: int) -> int:
    return max(super().slots(n, size), 2 * self.entries(n))  # a merge has two times k slots

  def cost(self, n: int, size: int) -> Cost:
    rounds = 2 * len(topology.strides(size))
    return Cost(rounds, 2 * self.entries(n) * rounds)

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n, k = grads.size, self.entries(grads.size)
    acc = LazySum((grads, state.residual))
    merged = sent = top_k(acc, k)
    dropped = []
    for edges in topology.tree(comm.size):
      got = comm.permute(merged, edges)
      both = jax.tree.map(lambda mine, theirs: jnp.stack([mine, theirs]), merged, _received(comm, got, edges, n))
      merged, rest = top_k_of_entries(sparse.merge(both, n), k, k, n)
      dropped.append(rest)
    for edges in reversed(topology.tree(comm.size)):
      down = tuple((parent, child) for child, parent in edges)
      got, receives = comm.permute(merged, down), _receives(comm, down)
      merged = jax.tree.map(functools.partial(jnp.where, receives), got, merged)

    words = self.cost(n, comm.size).words
    counters = Counters(words, words, selected=k, delivered=sparse.count(merged, n))
    return Reduced(merged, state._replace(residual=_residual(acc, sent, dropped, merged)), counters)


def _residual(acc: LazySum, sent: Sparse, dropped: list[Sparse], total: Sparse) -> Pending:
  """The next residual: at the indices of the total the entries that merges at this worker dropped, elsewhere `acc`.

  Args:
    acc: the accumulator.
    sent: [k] entries, the largest of `acc`.
    dropped: the entries that merges at this worker dropped, in the order of the merges.
    total: [k] entries.
  """
  n, slots = acc.size, total.indices.size
  members = bitset.insert(bitset.empty(n), total.indices, n)
  slot_of = lambda entries: jnp.where(
    bitset.contains(members, entries.indices), bitset.rank(members, entries.indices), slots
  )
  # At the indices of the total: the accumulator, zero where it was sent, plus the entries that merges dropped.
  values = sparse.put(acc.at(total.indices), slot_of(sent), 0.0)
  for rest in dropped:
    values = values.at[slot_of(rest)].add(rest.values, mode="drop", unique_indices=True)
  grads, residual = acc.parts
  return Pending(grads, residual, Sparse(total.indices, values))


def _receives(comm: Comm, edges: topology.Pairs) -> jax.Array:
  """Whether a message along `edges` reaches this worker."""
  ends = jnp.array([destination for _, destination in edges], jnp.int32)
  return jnp.any(ends == comm.rank)


def _received(comm: Comm, got: Sparse, edges: topology.Pairs, n: int) -> Sparse:
  """`got`, or empty slots where no message arrives: `permute` returns zeros, which would be entries of index 0."""
  return sparse.where(_receives(comm, edges), got, n)
