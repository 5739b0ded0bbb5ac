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
from jaxsparse.collectives._messages import SelectingCollective, Writer
from jaxsparse.comm import schedules
from jaxsparse.select.exact import top_k_of_entries
from jaxsparse.sparse.lazy import LazySum
from jaxsparse.types import Comm, Cost, Counters, Reduced, Sparse, State


@dataclasses.dataclass(frozen=True, kw_only=True)
class GTopk(SelectingCollective):
  """Merges the k largest entries of all workers pairwise along a binary tree (gTopk).

  With `acc_w = gradient_w + residual_w` and `a ⊕ b = top_k(a + b)`, the total is the ⊕ of all `top_k(acc_w)` along the
  tree. An entry that a merge drops stays in a residual, as in SparDL: if its index is in the total, in that of the
  merging worker, otherwise in those of the workers that contributed to it. The authors' code loses such
  entries. The state is the residual, f32[n] a worker.

  Args:
    density: ρ in (0, 1]; k = ⌈ρ n⌉ entries are delivered.
    k: the number of entries instead, 1 … n.
    selector: how the entries of a worker are selected, "exact", "chunked" or "reuse", as of `js.spardl_transform`;
      merges keep the k largest of a sum.
    wire: the format of values, "f32", "bf16" or "int8", as of `js.spardl_transform`.

  Raises:
    ValueError: for a density, k, selector or wire outside their choices.

  Example:
    >>> import optax, jaxsparse as js
    >>> tx = optax.chain(js.gtopk_transform("workers", density=0.01), optax.sgd(0.1))
  """

  def slots(self, n: int, size: int) -> int:
    k = self.entries(n)
    return max(super().slots(n, size), 2 * k, self.codec(n).slots(1, k))  # a merge has two times k slots

  def cost(self, n: int, size: int) -> Cost:
    rounds = 2 * len(schedules.strides(size))
    return Cost(rounds, self.codec(n).words(1, self.entries(n)) * rounds)

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n = grads.size
    acc = LazySum((grads, state.residual))
    writer = self.writer(self.codec(n), state.shared, comm.rank)
    chosen, selected, memory = self.choose(acc, state.worker)
    total, returned = self._merged(comm, chosen, writer, n)
    residual = acc.undelivered(total.indices, chosen._replace(values=jnp.zeros_like(chosen.values)), *returned)
    words = self.cost(n, comm.size).words
    counters = Counters(words, words, selected=selected, delivered=sparse.count(total, n))
    return Reduced(total, State(residual, memory, self.following_step(state.shared)), counters)

  def _merged(self, comm: Comm, chosen: Sparse, writer: Writer, n: int) -> tuple[Sparse, list[Sparse]]:
    """The ⊕ of the [1, k] entries of all workers, and what merges and messages of this worker dropped of the sums."""
    k, merged, returned, rounds = chosen.indices.size, sparse.only_row(chosen), [], schedules.tree_rounds(comm.size)
    for number, edges in enumerate(rounds):
      message, errors = writer.encode(sparse.as_row(merged), number)
      got = sparse.only_row(writer.decode(comm.permute(message, edges)))
      both = jax.tree.map(lambda mine, theirs: jnp.stack([mine, theirs]), merged, _received(comm, got, edges, n))
      if writer.rounds:
        returned.append(sparse.where(_sends(comm, edges), errors, n))
      merged, rest = top_k_of_entries(sparse.merge(both, n), k, k, n)
      returned.append(rest)
    message, errors = writer.encode(sparse.as_row(merged), len(rounds))
    if writer.rounds:
      returned.append(sparse.where(comm.rank == 0, errors, n))
    for edges in reversed(rounds):
      down = tuple((parent, child) for child, parent in edges)
      got, receives = comm.permute(message, down), _receives(comm, down)
      message = jax.tree.map(functools.partial(jnp.where, receives), got, message)
    return sparse.only_row(writer.decode(message)), returned


def _sends(comm: Comm, edges: schedules.Pairs) -> jax.Array:
  """Whether this worker sends a message along `edges`."""
  return _receives(comm, tuple((destination, source) for source, destination in edges))


def _receives(comm: Comm, edges: schedules.Pairs) -> jax.Array:
  """Whether a message along `edges` reaches this worker."""
  ends = jnp.array([destination for _, destination in edges], jnp.int32)
  return jnp.any(ends == comm.rank)


def _received(comm: Comm, got: Sparse, edges: schedules.Pairs, n: int) -> Sparse:
  """`got`, or empty slots where no message arrives: `permute` returns zeros, which would be entries of index 0."""
  return sparse.where(_receives(comm, edges), got, n)
