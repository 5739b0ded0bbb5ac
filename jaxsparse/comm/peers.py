"""The verbs of `types.Comm` between processes of any kind: each message is a callback to the host."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import io_callback

from jaxsparse.comm.schedules import all_reduce_in_order
from jaxsparse.comm.verbs import View, mark_total
from jaxsparse.types import Reduction

PEERS = "peers"  # name of the axis of the workers of a round

Send = Callable[[np.ndarray, int | None, int | None], np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class PeerComm(View):
  """The `workers` of one round, each in a process of its own (`js.partial.Rounds`); sums are in rank order.

  Programs depend on the number of workers, not on who they are: the rank is an argument of the compiled program. So one
  program serves all groups of a size, and its results are bit-identical to those of the simulator.

  What the workers of a round give is weighted already, with weights that sum to 1 or less. So the update of a transform
  is the total, not the total / P, and residuals are in the same unit in groups of any size.

  Attributes:
    workers: their number.
    number: i32[], the rank of this worker.
    send: `send(words, destination, source)` sends u32[m] words to a rank and returns those that it receives from
      another one; either may be None, and without a source the result is zeros. Called in the order of the program.
    divisor: 1, of a total for an update; the number of workers for any other comm.
    stride, members: as of `js.comm.View`.

  Example:
    >>> import jax.numpy as jnp
    >>> alone = PeerComm(1, jnp.int32(0), send=lambda words, destination, source: words)
    >>> alone.all_reduce(jnp.arange(3.0))
    Array([0., 1., 2.], dtype=float32)
  """

  workers: int
  number: jax.Array
  send: Send
  divisor = 1

  @property
  def axes(self) -> tuple[str, ...]:
    """(`PEERS`,) where all workers belong to this view, else ()."""
    return (PEERS,) if self.size == self.workers else ()

  def all_reduce(self, x: jax.Array, op: Reduction = "sum") -> jax.Array:
    """Combines `x` of all workers of the view in rank order."""
    return mark_total(all_reduce_in_order(self, x, op), self.axes)

  def _engine_size(self) -> int:
    return self.workers

  def _engine_rank(self) -> jax.Array:
    return self.number

  def _ppermute(self, buffer: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
    destinations, sources = dict(pairs), {destination: source for source, destination in pairs}

    def message(words: np.ndarray, rank: np.ndarray) -> np.ndarray:
      return self.send(np.asarray(words), destinations.get(int(rank)), sources.get(int(rank)))

    like = jax.ShapeDtypeStruct(buffer.shape, buffer.dtype)
    return io_callback(message, like, buffer, self.number, ordered=True)
