"""Encodes and decodes the messages of a SparDL step: a codec, and the noise of its random rounding."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.comm import all_gather, topology
from jaxsparse.sparse.codec import Codec
from jaxsparse.types import Comm, Sparse


@dataclasses.dataclass(frozen=True)
class Writer:
  """A codec and the random key of its noise.

  Attributes:
    codec: the codec of the blocks of this step.
    key: the key of the noise; None for a codec without random rounding.
  """

  codec: Codec
  key: jax.Array | None

  @property
  def length(self) -> int:
    """Number of entries of a block."""
    return self.codec.length

  @property
  def rounds(self) -> bool:
    """Whether values are rounded."""
    return self.codec.format.rounds

  def encode(self, entries: Sparse, number: int) -> tuple[Any, Sparse]:
    """Rows of entries as message `number` of this step, and their rounding errors, in the slots of the entries."""
    noise = None
    if self.key is not None:
      noise = jax.random.uniform(jax.random.fold_in(self.key, number), entries.values.shape, jnp.float32)
    message, rounded = self.codec.encode(entries, noise)
    lost = entries.values - rounded if self.rounds else jnp.zeros_like(rounded)
    return message, entries._replace(values=lost)

  def decode(self, message: Any) -> Sparse:
    """The rows of entries of a message, bitwise the same on every worker."""
    return self.codec.decode(message)

  def gather(self, comm: Comm, message: Any) -> Sparse:
    """All-gathers messages of one row each: the rows of all workers, row b that of worker (rank + b) mod P."""
    return self.decode(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), all_gather(comm, message)))

  def words(self, size: int, capacity: int) -> int:
    """Words that a worker sends in a reduce-scatter, or in an all-gather, over `size` workers."""
    return words_of(self.codec, size, capacity)


def words_of(codec: Codec, size: int, capacity: int) -> int:
  """Words that a worker sends in a reduce-scatter, or in an all-gather, over `size` workers with one row each."""
  return sum(codec.words(min(stride, size - stride), capacity) for stride in topology.strides(size))
