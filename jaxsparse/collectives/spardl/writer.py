"""Writes and reads the messages of a SparDL step: a codec, and the noise that it rounds with."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.comm import all_gather, topology
from jaxsparse.sparse.codec import Codec
from jaxsparse.types import Comm, Sparse


@dataclasses.dataclass(frozen=True)
class Writer:
  """A codec, with the key of its noise.

  Attributes:
    codec: for the blocks of this step.
    key: of the noise; None for a codec that draws none.
  """

  codec: Codec
  key: jax.Array | None

  @property
  def length(self) -> int:
    """Of a block."""
    return self.codec.length

  @property
  def rounds(self) -> bool:
    """Whether values are rounded."""
    return self.codec.format.rounds

  def encode(self, entries: Sparse, number: int) -> tuple[Any, Sparse]:
    """Rows of entries as message `number` of this step, and what rounding takes from them, in their slots."""
    noise = None
    if self.key is not None:
      noise = jax.random.uniform(jax.random.fold_in(self.key, number), entries.values.shape, jnp.float32)
    message, rounded = self.codec.encode(entries, noise)
    lost = entries.values - rounded if self.rounds else jnp.zeros_like(rounded)
    return message, entries._replace(values=lost)

  def decode(self, message: Any) -> Sparse:
    """Rows of entries, the same bits on every worker."""
    return self.codec.decode(message)

  def gather(self, comm: Comm, message: Any) -> Sparse:
    """The rows of all workers of `comm`, in the home frame, from messages of a single row."""
    return self.decode(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), all_gather(comm, message)))

  def words(self, size: int, capacity: int) -> int:
    """Words that a worker sends in a reduce-scatter over `size` workers, or in an all-gather of as many rows."""
    return words_of(self.codec, size, capacity)


def words_of(codec: Codec, size: int, capacity: int) -> int:
  """Words that a worker sends in a reduce-scatter of `size` rows, or an all-gather of as many rows."""
  return sum(codec.words(min(stride, size - stride), capacity) for stride in topology.strides(size))
