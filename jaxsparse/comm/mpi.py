"""The verbs of `types.Comm` on MPI: one process for each worker, on any number of hosts, through mpi4jax.

The only operation of MPI is point to point, of a u32 buffer; all verbs are built from
it, the all-reduce too. Sums are therefore in rank order, and the results of a run are
bit-identical to those of the simulator.
"""

import dataclasses
import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jaxsparse.comm.verbs import MESSAGE, CommView, rank_p
from jaxsparse.launch import environment
from jaxsparse.launch.rank import join_mpi

RANKS = "ranks of MPI"  # name of the axis of the workers


def _world() -> Any:
  """A clone of COMM_WORLD: messages of other users of COMM_WORLD cannot match ours."""
  join_mpi()
  return _mpi4jax()[0].COMM_WORLD.Clone()


@dataclasses.dataclass(frozen=True, eq=False)
class MpiComm(CommView):
  """The ranks of an MPI job as workers, for example of `js.spardl_transform(js.MpiComm(), density=0.01)`.

  Every rank runs the same program on its one device and jits its own steps; arrays are
  local, those of one worker. Give the comm in place of a mesh to `js.init` and
  `js.make_train_step`, or call the transform in your own step, without shard_map.

  mpi4jax's operations keep their order within a process, so all ranks must run the same
  updates in the same order. A rank that ends by an exception ends the whole job:
  otherwise the other ranks would wait for it forever.

  Attributes:
    communicator: of mpi4py; a clone of COMM_WORLD by default. Use your own communicator
      for nothing else.
    host_staging: whether messages go through host memory and mpi4py. None chooses this
      where the device is not a CPU and mpi4jax was built without CUDA, which would
      crash otherwise.
    stride, members: as in `js.comm.CommView`.

  Raises:
    RuntimeError: in one of several ranks of `jaxsparse.launch --engine=processes`,
      which MPI does not connect, or if COMM_WORLD has another number of ranks than a
      variable of the launcher states (Open MPI, PMI, PMIx, Slurm).
    ImportError: without mpi4jax, or where it was built for another MPI, naming what to
      install.

  Example:
    >>> import jaxsparse as js
    >>> comm = js.MpiComm()  # doctest: +SKIP
    >>> tx = optax.chain(js.spardl_transform(comm, density=0.01), optax.sgd(0.1))  # doctest: +SKIP
    >>> state = js.init(tx, params, comm)  # doctest: +SKIP
    >>> step = js.make_train_step(loss_fn, tx, comm)  # batches are this worker's own  # doctest: +SKIP
  """

  communicator: Any = dataclasses.field(default_factory=_world)
  host_staging: bool | None = None
  _names = (RANKS,)

  def __post_init__(self) -> None:
    # The numbers of ranks that the launcher's variables state; none without a launcher.
    if counts := join_mpi():  # also where the caller gives a communicator
      environment.check_mpi("js.MpiComm()", counts, _mpi4jax()[0])

  def _engine_size(self) -> int:
    return self.communicator.Get_size()

  def _engine_rank(self) -> jax.Array:
    # Marked, since ranks may trace different numbers here and nowhere else.
    return rank_p.bind(jnp.int32(self.communicator.Get_rank()))

  def _ppermute(
    self,
    buffer: jax.Array,
    pairs: list[tuple[int, int]],
  ) -> jax.Array:
    """Sends u32[words] along (source, destination) pairs of ranks; zeros if this rank is no destination."""
    # `get` returns None if this rank sends nothing, or receives nothing.
    rank = self.communicator.Get_rank()
    sources = {destination: source for source, destination in pairs}
    return _send_jitted(self, buffer, dict(pairs).get(rank), sources.get(rank))


def _send_message(
  view: MpiComm, buffer: jax.Array, destination: int | None, source: int | None
) -> jax.Array:
  """What this rank receives from `source`, while it sends `buffer` to `destination`.

  Args:
    view: the comm.
    buffer: u32[words].
    destination: rank in the engine; None if this rank sends nothing.
    source: rank in the engine; None if this rank receives nothing: the result is zeros.
  """
  # A message to this rank itself needs no MPI.
  if destination == source == view.communicator.Get_rank():
    return buffer
  through_host = _needs_staging() if view.host_staging is None else view.host_staging
  return (_send_staged if through_host else _send_direct)(
    view.communicator, buffer, destination, source
  )


# The name marks messages in a jaxpr: ranks have different partners in them.
_send_message.__name__ = MESSAGE
_send_jitted = jax.jit(_send_message, static_argnums=(0, 2, 3))


def _send_direct(
  communicator: Any, buffer: jax.Array, destination: int | None, source: int | None
) -> jax.Array:
  """Sends one message by mpi4jax, from device memory where mpi4jax can."""
  _, mpi4jax = _mpi4jax()
  # One call for both directions: two blocking sends to each other would wait for ever.
  if destination is not None and source is not None:
    return mpi4jax.sendrecv(
      buffer, buffer, source=source, dest=destination, comm=communicator
    )
  if destination is not None:
    mpi4jax.send(buffer, dest=destination, comm=communicator)
  return (
    jnp.zeros_like(buffer)
    if source is None
    else mpi4jax.recv(buffer, source=source, comm=communicator)
  )


def _send_staged(
  communicator: Any, buffer: jax.Array, destination: int | None, source: int | None
) -> jax.Array:
  """Sends one message by mpi4py, from host memory to host memory."""
  # A send to, or a receive from, PROC_NULL does nothing.
  null = _mpi4jax()[0].PROC_NULL
  to, origin = (null if end is None else end for end in (destination, source))

  def exchange(words: np.ndarray) -> np.ndarray:
    # stays zero where this rank receives nothing, as `permute` promises
    received = np.zeros(buffer.shape, buffer.dtype)
    communicator.Sendrecv(
      np.ascontiguousarray(words), to, recvbuf=received, source=origin
    )
    return received

  like = jax.ShapeDtypeStruct(buffer.shape, buffer.dtype)
  return io_callback(exchange, like, buffer, ordered=True)


@functools.cache
def _mpi4jax() -> tuple[Any, ModuleType]:
  """(mpi4py.MPI, mpi4jax), imported for the first communicator, since their import initializes MPI."""
  try:
    import mpi4jax
    from mpi4py import MPI
  except (ImportError, RuntimeError) as error:
    raise ImportError(
      f"js.MpiComm needs mpi4jax, built for this JAX and this MPI, which could not be loaded: {error}. Install it as "
      "docs/how_to/many_hosts.md says; python -m jaxsparse.doctor tells what is missing"
    ) from error
  return MPI, mpi4jax


def _needs_staging() -> bool:
  """Whether arrays are on a device whose memory this build of mpi4jax cannot send."""
  if jax.default_backend() == "cpu":
    return False
  from mpi4jax._src import xla_bridge

  return not xla_bridge.HAS_CUDA_EXT
