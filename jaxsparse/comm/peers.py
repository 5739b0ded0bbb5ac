"""The verbs of `types.Comm` between processes of any kind: messages are callbacks to the host."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import io_callback

from jaxsparse.comm.verbs import CommView

PEERS = "peers"  # name of the axis of the workers of a round

# u32[m] words, their destination, and the source of others
Message = tuple[np.ndarray, int | None, int | None]
Send = Callable[[Sequence[Message]], list[np.ndarray]]


@dataclasses.dataclass(frozen=True, eq=False)
class PeerComm(CommView):
  """The `workers` of one round, each in a process of its own (`js.partial.Rounds`); sums are in rank order.

  Programs depend on the number of workers, not on who they are: the rank is an argument
  of the compiled program. So one program serves all groups of a size, and its results
  are bit-identical to those of the simulator.

  What the workers of a round give is weighted already, with weights that sum to 1 or
  less. So the update of a transform is the total, not the total / P, and residuals are
  in the same unit in groups of any size.

  Attributes:
    workers: their number.
    own_rank: i32[], the rank of this worker.
    send: sends u32[m] words of each message to its destination, then returns those that
      come from its source; either may be None, and without a source the result is
      zeros. Called in the order of the program.
    divisor: 1, of a total, for its mean.
    stride, members: as in `js.comm.CommView`.

  Example:
    >>> import jax.numpy as jnp
    >>> alone = PeerComm(1, jnp.int32(0), send=lambda messages: [words for words, *_ in messages])
    >>> alone.all_reduce(jnp.arange(3.0))
    Array([0., 1., 2.], dtype=float32)
  """

  workers: int
  own_rank: jax.Array
  send: Send
  divisor = 1
  _names = (PEERS,)

  def _engine_size(self) -> int:
    return self.workers

  def _engine_rank(self) -> jax.Array:
    return self.own_rank

  def _ppermute(
    self,
    buffer: jax.Array,
    pairs: list[tuple[int, int]],
  ) -> jax.Array:
    return self._ppermutes([buffer], [pairs])[0]

  def _ppermutes(
    self, buffers: list[jax.Array], moves: list[list[tuple[int, int]]]
  ) -> list[jax.Array]:
    """Sends each u32[m] buffer along its (source, destination) pairs; zeros where this worker is no destination."""
    # All are sent before one is received, so that they take one delay.
    # Of each buffer: the destination of each worker, and the source of each worker; a
    # worker that sends or receives nothing has none.
    to = [dict(pairs) for pairs in moves]
    origin = [{end: start for start, end in pairs} for pairs in moves]

    def send(
      buffers: list[np.ndarray],
      rank: np.ndarray,
    ) -> list[np.ndarray]:
      own_rank = int(rank)
      moves_of_buffers = zip(buffers, to, origin, strict=True)
      return self.send(
        [
          (np.asarray(words), destinations.get(own_rank), sources.get(own_rank))
          for words, destinations, sources in moves_of_buffers
        ]
      )

    like = [jax.ShapeDtypeStruct(buffer.shape, buffer.dtype) for buffer in buffers]
    return io_callback(send, like, buffers, self.own_rank, ordered=True)
