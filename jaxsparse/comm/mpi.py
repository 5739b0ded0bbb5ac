"""The verbs of `types.Comm` on MPI: one process a worker, on any number of hosts, through mpi4jax.

MPI carries one thing only, a u32 buffer from a rank to a rank; everything else, the all-reduce too, is built from that.
So the additions happen in rank order, and a run gives bit for bit what the simulator gives.
"""

import dataclasses
import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jaxsparse.comm.all_reduce import all_reduce_in_order
from jaxsparse.comm.replication import mark_total
from jaxsparse.comm.view import View
from jaxsparse.launch import guard
from jaxsparse.launch.rank import join_mpi
from jaxsparse.types import Reduction

RANKS = "ranks of MPI"  # the name of the axis that they lie along


def _world() -> Any:
  """A communicator of our own: a clone, so that no message of somebody else's is taken for one of ours."""
  join_mpi()
  return _mpi4jax()[0].COMM_WORLD.Clone()


@dataclasses.dataclass(frozen=True, eq=False)
class MpiComm(View):
  """The ranks of an MPI job: what `js.spardl_transform(js.MpiComm(), density=0.01)` runs on.

  Every rank runs the same program on its one device and jits its own steps; arrays are local, of one worker. Give it in
  place of a mesh to `js.init` and `js.make_train_step`, or use the transform in a step of your own: no shard_map.

  mpi4jax's operations keep their order within a process, so all ranks must run the same updates in the same order. A
  rank that ends by an exception ends the whole job: the others would wait for it, and it for them.

  Attributes:
    communicator: of mpi4py; a clone of COMM_WORLD by default. Use one of yours for nothing else.
    host_staging: whether messages go through host memory and mpi4py. None chooses it where the device is no CPU and
      mpi4jax was built without CUDA, which would crash otherwise.
    stride: distance between neighbours of this view.
    members: how many workers this view has; None for all ranks.

  Raises:
    RuntimeError: in one of several ranks of `jaxsparse.launch --engine=processes`, which MPI does not connect, or if
      the launcher started another number of ranks than MPI has in COMM_WORLD.
    ImportError: without mpi4jax, or where it was built for another MPI, with what to install.

  Example:
    >>> import jaxsparse as js
    >>> comm = js.MpiComm()  # doctest: +SKIP
    >>> tx = optax.chain(js.spardl_transform(comm, density=0.01), optax.sgd(0.1))  # doctest: +SKIP
    >>> state = js.init(tx, params, comm)  # doctest: +SKIP
    >>> step = js.make_train_step(loss_fn, tx, comm)  # batches are this worker's own  # doctest: +SKIP
  """

  communicator: Any = dataclasses.field(default_factory=_world)
  host_staging: bool | None = None
  stride: int = 1
  members: int | None = None

  def __post_init__(self) -> None:
    join_mpi()  # for a communicator of the caller's, too
    if (ranks := guard.ranks()) is not None:
      _check_world(ranks)

  def all_reduce(self, x: jax.Array, op: Reduction = "sum") -> jax.Array:
    """Combines `x` of all workers of the view in rank order."""
    return mark_total(all_reduce_in_order(self, x, op), self.axes)

  def _everyone(self) -> int:
    return self.communicator.Get_size()

  def _names(self) -> tuple[str, ...]:
    return (RANKS,)

  def _position(self) -> jax.Array:
    return jnp.int32(self.communicator.Get_rank())

  def _ppermute(self, buffer: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
    me = self.communicator.Get_rank()
    to, of = dict(pairs).get(me), {destination: source for source, destination in pairs}.get(me)
    if to == of == me:
      return buffer
    through_host = _needs_staging() if self.host_staging is None else self.host_staging
    return (_staged if through_host else _direct)(self.communicator, buffer, to, of)


def _direct(communicator: Any, buffer: jax.Array, to: int | None, of: int | None) -> jax.Array:
  """One message by mpi4jax, from device memory where it can."""
  _, mpi4jax = _mpi4jax()
  if to is not None and of is not None:
    return mpi4jax.sendrecv(buffer, buffer, source=of, dest=to, comm=communicator)
  if to is not None:
    mpi4jax.send(buffer, dest=to, comm=communicator)
  return jnp.zeros_like(buffer) if of is None else mpi4jax.recv(buffer, source=of, comm=communicator)


def _staged(communicator: Any, buffer: jax.Array, to: int | None, of: int | None) -> jax.Array:
  """One message from host memory to host memory."""
  null = _mpi4jax()[0].PROC_NULL

  def exchange(words: np.ndarray) -> np.ndarray:
    got = np.zeros(buffer.shape, buffer.dtype)
    destination, source = (null if end is None else end for end in (to, of))
    communicator.Sendrecv(np.ascontiguousarray(words), destination, recvbuf=got, source=source)
    return got

  like = jax.ShapeDtypeStruct(buffer.shape, buffer.dtype)
  return io_callback(exchange, like, buffer, ordered=True)


@functools.cache
def _mpi4jax() -> tuple[Any, ModuleType]:
  """(mpi4py.MPI, mpi4jax): imported when the first communicator is made, for importing them starts MPI."""
  try:
    import mpi4jax
    from mpi4py import MPI
  except (ImportError, RuntimeError) as error:
    raise ImportError(
      f"js.MpiComm needs mpi4jax, built for this JAX and this MPI, which could not be loaded: {error}. Install it as "
      "README.md says, section 'Many hosts'; python -m jaxsparse.doctor tells what is missing"
    ) from error
  return MPI, mpi4jax


def _check_world(ranks: int) -> None:
  """Raises RuntimeError if COMM_WORLD has another size than the run, as under an MPI other than that of mpirun."""
  found = _mpi4jax()[0].COMM_WORLD.Get_size()
  if found != ranks:
    raise RuntimeError(
      f"js.MpiComm() in rank {guard.rank()} of {ranks}: MPI.COMM_WORLD has size {found}. mpi4py and mpi4jax were built "
      "for another MPI than that of mpirun: install both for it, as README.md says, section 'Many hosts'"
    )


def _needs_staging() -> bool:
  if jax.default_backend() == "cpu":
    return False
  from mpi4jax._src import xla_bridge

  return not xla_bridge.HAS_CUDA_EXT
