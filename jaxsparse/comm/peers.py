"""The verbs of `types.Comm` between processes of any kind: messages are callbacks to the host."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import io_callback

from jaxsparse.comm.verbs import CommView

PEERS = "peers"  # name of the axis of the workers of a round

# words to send, u32[m]; their destination; the source of the words to receive
Message = tuple[np.ndarray, int | None, int | None]
Send = Callable[[Sequence[Message]], list[np.ndarray]]


@dataclasses.dataclass(frozen=True, eq=False)
class PeerComm(CommView):
  """The `workers` of one round, each in a process of its own (`js.partial.Rounds`); sums are in rank order.

  Programs depend on the number of workers, not on who they are: the rank is an argument
  of the compiled program. So one program serves all groups of a size, and its results
  are bit-identical to those of the simulator.

  A worker multiplies its values by its weight before a collective gets them, and
  weights sum to 1 or less. So the mean is the total, not the total / P, and residuals
  are in the same unit in groups of any size.

  Attributes:
    workers: number of workers.
    own_rank: i32[], the rank of this worker.
    send: sends the words, u32[m], of each message to its destination, then returns for
      each message the words that its source has sent. A destination of None sends
      nothing, a source of None receives zeros. Called in the order of the program.
    divisor: 1: the mean is the total.
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
    # For each buffer: from a worker to its destination, and to its source.
    # A worker that sends, or receives, nothing is no key.
    to = [dict(pairs) for pairs in moves]
    origin = [{end: start for start, end in pairs} for pairs in moves]

    def send(
      buffers: list[np.ndarray],
      rank: np.ndarray,
    ) -> list[np.ndarray]:
      own_rank = int(rank)
      moves_of_buffers = zip(buffers, to, origin, strict=True)
      # One call sends all before it receives, so that all together take one delay.
      return self.send(
        [
          (np.asarray(words), destinations.get(own_rank), sources.get(own_rank))
          for words, destinations, sources in moves_of_buffers
        ]
      )

    like = [jax.ShapeDtypeStruct(buffer.shape, buffer.dtype) for buffer in buffers]
    return io_callback(send, like, buffers, self.own_rank, ordered=True)
