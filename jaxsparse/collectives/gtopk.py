"""gTopk: a tree of workers that adds two sets of k entries and keeps k of the sum (Shi et al., "gTop-k S-SGD").

Six workers, k entries in every message; what worker 0 holds at the end goes back the same way:

    reduce      1 -> 0    3 -> 2    5 -> 4
                2 -> 0
                4 -> 0              (6 is missing: a tree for any P)
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
from jaxsparse.types import Comm, Cost, Counters, Reduced, Sparse, State


@dataclasses.dataclass(frozen=True, kw_only=True)
class GTopk(SparseCollective):
  """Merges the k largest entries of all workers pairwise along a binary tree (gTopk).

  With `acc_w = gradient_w + residual_w` and `a ⊕ b = top_k(a + b)`, the total is the ⊕ of all `top_k(acc_w)` along the
  tree. An entry that a merge drops stays in a residual: in that of the merging worker where its index is in the total,
  and in that of the worker it came from elsewhere, as in SparDL. The authors' code loses such entries. The state is the
  residual, f32[n] a worker.

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
    return max(super().slots(n, size), 2 * self.entries(n))  # of a merge

  def cost(self, n: int, size: int) -> Cost:
    rounds = 2 * len(topology.strides(size))
    return Cost(rounds, 2 * self.entries(n) * rounds)

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n, k = grads.size, self.entries(grads.size)
    home = grads + state.residual
    held = top_k(home, k)
    dropped = sparse.put(home, held.indices, 0.0)
    for edges in topology.tree(comm.size):
      got = comm.permute(held, edges)
      both = jax.tree.map(lambda mine, theirs: jnp.stack([mine, theirs]), held, _received(comm, got, edges, n))
      held, rest = sparse.largest(sparse.merge(both, n), k, n)
      dropped = dropped.at[rest.indices].add(rest.values, mode="drop")
    for edges in reversed(topology.tree(comm.size)):
      down = tuple((parent, child) for child, parent in edges)
      got, here = comm.permute(held, down), _receives(comm, down)
      held = jax.tree.map(functools.partial(jnp.where, here), got, held)

    total = sparse.put(jnp.zeros_like(home), held.indices, held.values)
    still_here = dropped.at[held.indices].get(mode="clip")
    residual = sparse.put(home, held.indices, still_here)
    words = self.cost(n, comm.size).words
    counters = Counters(words, words, selected=k, delivered=sparse.count(held, n))
    return Reduced(total, state._replace(residual=residual), counters)


def _receives(comm: Comm, edges: topology.Pairs) -> jax.Array:
  """Whether a message along `edges` reaches this worker."""
  ends = jnp.array([destination for _, destination in edges], jnp.int32)
  return jnp.any(ends == comm.rank)


def _received(comm: Comm, got: Sparse, edges: topology.Pairs, n: int) -> Sparse:
  """`got`, with empty slots where nothing arrives (the zeros there would be entries of index 0)."""
  return sparse.where(_receives(comm, edges), got, n)
