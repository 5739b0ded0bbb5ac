"""A2SGD: workers exchange two means of their gradients and nothing else (Bhattacharya et al., §III).

The two means of a gradient are that of its positive entries and that of its negative
ones. They are averaged over the workers by one all-reduce of 64 bits. Each worker then
shifts its large entries by the difference between the average and its own means. The
shifted gradients still differ between workers, so the models drift apart and are
averaged from time to time, by `js.local_steps`.
"""

import dataclasses
import math
from typing import Literal, Self

import jax
import jax.numpy as jnp

from jaxsparse.arrays import flatten
from jaxsparse.arrays.sums import ordered_sum
from jaxsparse.collectives._base import Collective, Traits, replace_fields
from jaxsparse.comm import all_reduce_cost
from jaxsparse.sparse import bitset
from jaxsparse.types import Comm, Cost, Reduced, State


@dataclasses.dataclass(frozen=True, kw_only=True)
class A2SGD(Collective):
  """Averages two means of each gradient; each worker applies a different update (A2SGD).

  With μ₊ the mean of the entries ≥ 0 of a gradient g, and μ₋ that of `|g|` where g < 0 (0 if there is no such entry):

      pos = [g ≥ μ₊],  neg = [g ≤ −μ₋ and g < 0]
      g′  = g − (pos μ₊ − neg μ₋) + pos μ̄₊ − neg μ̄₋          (Algorithm 1)

  where μ̄ is the mean over workers. The update is g′: **it differs between workers**,
  and so do their parameters. So the transform and the optimizer after it belong inside
  `js.local_steps`, whose outer chain averages the parameters, here every 100 steps:

      js.local_steps(optax.chain(js.a2sgd_transform("workers"), optax.sgd(0.1)),
                     optax.chain(js.dense_transform("workers"), optax.sgd(1.0)),
                     every=100)

  Call `step.synchronize(params, state)`, which averages at once, before you evaluate or
  save, and at the end. With `every=None` that is the only synchronization. The
  published Algorithm 1 has one too, before its last step, which takes the mean of the
  gradients. Updates differ between workers: where only one worker's is too large for
  its dtype, only that worker skips the step.

  Args:
    means: one pair of means for the whole "vector", 2 words, or one for each "leaf" of
      the gradient, an ablation.

  Attributes:
    leaves: with `means="leaf"` the number of entries of each leaf that has any; () with
      "vector", and before `for_leaves`: the gradient is then one part.

  Example:
    The first worker's g′ in the paper's example (§III); the total is P times it:

    >>> import jax.numpy as jnp, jaxsparse as js
    >>> js.simulate("a2sgd", jnp.array([[1.0, 2.0, -1.0], [-1.0, -2.0, 3.0]])).total / 2
    Array([ 1.  ,  2.75, -1.25], dtype=float32)
  """

  means: Literal["vector", "leaf"] = "vector"
  leaves: tuple[int, ...] = dataclasses.field(default=(), init=False)

  @property
  def traits(self) -> Traits:
    return dataclasses.replace(super().traits, conserves=False, replicates=False)

  def for_leaves(self, shapes: tuple[tuple[int, ...], ...]) -> Self:
    # A leaf without entries has no means.
    sizes = tuple(size for size in map(math.prod, shapes) if size)
    return self if self.means == "vector" else replace_fields(self, leaves=sizes)

  def cost(self, n: int, size: int) -> Cost:
    # one all-reduce of the two means of the vector, or of each leaf
    return all_reduce_cost(2 * len(self.leaves or (n,)), size)

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    parts = flatten.parts(grads, self.leaves or (grads.size,))
    # Algorithm 1: the two means of this worker, μ₊ and μ₋, f32[parts, 2]
    local = jnp.stack([two_means(leaf) for leaf in parts])
    # Divided before the all-reduce. After it, the division and the subtraction in
    # `shift_entries` could be fused, in some programs only, and round otherwise.
    averages = comm.all_reduce(local / comm.size)
    # g′ of each part: entries beyond a mean move by average − mean
    shifts = list(map(shift_entries, parts, local, averages))
    counters = self.count(
      comm, grads.size, selected=2 * len(parts), delivered=grads.size
    )
    # P times g′, since a total is a sum, which the caller divides by P.
    update = comm.size * jnp.concatenate(shifts)
    # A NaN at one worker makes the averaged means NaN, so every worker skips the step.
    total = jnp.where(jnp.isfinite(averages).all(), update, jnp.nan)
    return Reduced(total, state, counters)


def two_means(grads: jax.Array) -> jax.Array:
  """(μ₊, μ₋), f32[2]: the mean of the entries ≥ 0, and the mean magnitude of those < 0; 0 if there is no such entry.

  Example:
    >>> two_means(jnp.array([1.0, 2.0, -1.0]))
    Array([1.5, 1. ], dtype=float32)
  """
  positive = bitset.count_true(grads >= 0)
  counts = jnp.stack([positive, grads.size - positive])
  # the mean of no entries is 0, not 0/0
  counts = jnp.maximum(counts, 1).astype(jnp.float32)
  magnitudes = [
    lambda entries: jnp.maximum(entries, 0.0),
    lambda entries: jnp.maximum(-entries, 0.0),
  ]
  return jnp.stack([ordered_sum(grads, term=term) for term in magnitudes]) / counts


def shift_entries(
  grads: jax.Array,
  local: jax.Array,
  averages: jax.Array,
) -> jax.Array:
  """g′ of Algorithm 1: `grads`, with the worker's two means replaced by the averages over all workers.

  Args:
    grads: f32[m], the gradient of this worker, or a leaf of it.
    local: f32[2], (μ₊, μ₋) of `grads`.
    averages: f32[2], (μ̄₊, μ̄₋), the means of `local` over workers.
  """
  is_positive = grads >= local[0]
  is_negative = (grads <= -local[1]) & (grads < 0)
  # Algorithm 1 without the vector ε that it stores: g′ − g is `up` = μ̄₊ − μ₊ where
  # pos, and −`down` = μ₋ − μ̄₋ where neg.
  up, down = averages - local
  positive = jnp.where(is_positive, up, 0.0)
  return grads + positive - jnp.where(is_negative, down, 0.0)
