"""Dense: one all-reduce of all n entries, the baseline of the sparse collectives.

The cost is that of Rabenseifner's algorithm, reduce-scatter and all-gather: 2⌈log₂P⌉
messages, 2 n (P − 1)/P words.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from jaxsparse.collectives._base import Collective, Traits
from jaxsparse.comm import all_reduce_cost
from jaxsparse.types import Comm, Cost, Reduced, State


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(Collective):
  """Averages all n entries with one all-reduce: `total = Σ_w gradient_w`.

  There is no residual, so rounding errors are lost: of the mean, which is rounded to
  the dtype of the gradient where that is narrower than float32, and with
  `dtype="bfloat16"` of each gradient and the sum.

  Args:
    dtype: the dtype in which entries are sent and added. "bfloat16" halves the words
      and rounds each gradient and the sum to 8 significant bits. XLA on CPU sends
      float32 in either case.

  Example:
    >>> import optax, jaxsparse as js
    >>> tx = optax.chain(js.dense_transform("workers"), optax.adam(1e-3))
  """

  dtype: Literal["float32", "bfloat16"] = "float32"

  @property
  def traits(self) -> Traits:
    return dataclasses.replace(
      super().traits, differentiable=True, rounds=self.dtype != "float32"
    )

  def slots(self, n: int, size: int) -> int:
    return 0  # a dense all-reduce has no indices

  def cost(self, n: int, size: int) -> Cost:
    return all_reduce_cost(n, size, jnp.dtype(self.dtype).itemsize)

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    total = comm.all_reduce(grads.astype(self.dtype)).astype(jnp.float32)
    return Reduced(
      total,
      state,
      self.count(comm, grads.size, selected=grads.size, delivered=grads.size),
    )
