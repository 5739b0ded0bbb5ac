"""Dense: XLA's own all-reduce of all n entries, the alternative that every sparse one has to beat.

Its cost is that of Rabenseifner's algorithm, reduce-scatter and all-gather: 2⌈log₂P⌉ messages, 2 n (P − 1)/P words.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from jaxsparse._compat import AxisName
from jaxsparse.collectives._base import Collective
from jaxsparse.comm import all_reduce_cost
from jaxsparse.transform.update import transform_of
from jaxsparse.types import Comm, Cost, Counters, Reduced, State


def dense_transform(
  axis: AxisName | Comm, *, dtype: Literal["float32", "bfloat16"] = "float32"
) -> optax.GradientTransformation:
  """Averages gradients over the workers with one all-reduce of all entries: `update = Σ_w gradient_w / P`.

  Like every jaxsparse transform it must be the first of its chain and run inside `jax.shard_map` over `axis` with
  `check_vma=False`; see `js.spardl_transform`.

  Args:
    axis: the name of the shard_map axis the workers lie along, a tuple of such names, or a comm.
    dtype: what travels. "bfloat16" halves the words and rounds each gradient and the sum to 8 bits, without a residual.
      XLA on CPU widens it to float32 on the wire.

  Returns:
    An `optax.GradientTransformation`.

  Raises:
    ValueError: for another dtype, or outside shard_map.
    TypeError: for gradients that are not floating point.

  Example:
    >>> import optax, jaxsparse as js
    >>> tx = optax.chain(js.dense_transform("workers"), optax.adam(1e-3))
  """
  return transform_of(Dense(dtype=dtype), axis)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(Collective):
  """One all-reduce of all entries; see `dense_transform` for the fields."""

  dtype: Literal["float32", "bfloat16"] = "float32"

  def slots(self, n: int, size: int) -> int:
    del n, size
    return 0  # nothing is indexed

  def cost(self, n: int, size: int) -> Cost:
    return all_reduce_cost(n, size, jnp.dtype(self.dtype).itemsize)

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    total = comm.all_reduce(grads.astype(self.dtype)).astype(jnp.float32)
    words = self.cost(grads.size, comm.size).words
    return Reduced(total, state, Counters(words, words, grads.size, grads.size))
