"""Where the workers are: on a mesh of devices, of one process or of many; ranks of MPI; or simulated on one device.

The program of one worker is the same everywhere. An engine maps it over the workers, and knows how arrays of all of
them lie: `PartitionSpec`s say which are split along the workers and which are the same for all.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsparse import _compat
from jaxsparse._compat import AxisName, here
from jaxsparse.comm import AxisComm, SimComm, all_gather, in_rank_order
from jaxsparse.comm.mpi import RANKS, MpiComm
from jaxsparse.types import Comm


class Engine(Protocol):
  """What `js.init` and `js.make_train_step` know of where the workers are.

  Attributes:
    workers: number of workers P.
    held: workers whose parts the arrays outside a program hold: all P, or this one alone.
    comm: the comm of a program that is mapped.
    waits: whether a step must wait for the one before.
    axes: names of the axes that a program is mapped over, with their sizes.
    axis: the axis, or tuple of axes, that the workers lie along.
    others: the names of the other axes that a program is mapped over, along which a worker has copies.
    process: number of this process, of `processes` that run the program together.
    processes: how many there are.
  """

  @property
  def platform(self) -> str:
    """Of the devices."""
    ...

  process: int
  processes: int
  workers: int
  held: int
  comm: Comm
  waits: bool
  axes: dict[Any, int]
  axis: AxisName
  others: tuple[str, ...]

  def map(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """The program of all workers that runs `function` at each, as `jax.shard_map` does."""
    ...

  def jit(
    self, function: Callable, in_specs: Any, out_specs: Any, donate: Sequence[int] = (), options: Any = None
  ) -> Any:
    """The same compiled, with arguments and results where their specs say, and with compiler options."""
    ...

  def place(self, tree: Any, specs: Any) -> Any:
    """`tree` where `jit` wants it: it would move it too, but compile once more for what comes from elsewhere."""
    ...

  def spread(self, value: np.ndarray) -> jax.Array:
    """`value` of this process as the part of each of its workers, of an array that is split along the workers."""
    ...


def check_batch(batch: Any, engine: Engine, axis: AxisName, parts: int = 1) -> None:
  """Checks that the workers of an engine can share a batch out, in so many parts each.

  Raises:
    ValueError: naming the array whose leading axis they cannot.
  """
  for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
    if not np.ndim(leaf) or np.shape(leaf)[0] % (engine.held * parts):
      each = f", {parts} micro-batches each" if parts > 1 else ""
      raise ValueError(
        f"batch{jax.tree_util.keystr(path)} has shape {np.shape(leaf)}: its leading axis must divide among the "
        f"{engine.workers} workers of axis {axis!r}{each}"
      )


def engine_of(where: Mesh | Comm, axis: AxisName) -> Engine:
  """The engine for a mesh and the axis of it that workers lie along, or for a comm that brings its own workers.

  Raises:
    ValueError: if the mesh has no such axis.
    TypeError: if `where` is neither.
  """
  if isinstance(where, Mesh):
    return _OnMesh(where, axis)
  if isinstance(where, MpiComm):
    return _Rank(where)
  if isinstance(where, SimComm) and where.members is not None:
    return _Simulated(where)
  raise TypeError(f"{where!r}: give a jax.sharding.Mesh, a js.MpiComm, or js.SimComm(axis, members=P)")


def rows_of(engine: Engine, function: Callable, in_specs: Any) -> Callable[..., np.ndarray]:
  """What `function` gives at every worker, as rows 0 … P − 1 that every process gets."""
  rows = lambda *arguments: in_rank_order(engine.comm, all_gather(engine.comm, function(*arguments)))
  program = engine.jit(rows, in_specs, PartitionSpec())
  return lambda *arguments: np.asarray(here(program(*arguments)))


def apart(arguments: tuple[Any, ...], by_buffer: bool) -> tuple[Any, ...]:
  """The arguments of a step, with a copy of each array that shares memory with one of the first two, which are donated.

  XLA overwrites what is donated. What a step returned lies in buffers of its own, so that later calls look at the
  arrays only, and not at their buffers.
  """
  donated: set[Any] = set()

  def keys(leaf: jax.Array) -> set[Any]:
    if not by_buffer or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      return {id(leaf)}
    return {id(leaf), *(shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards if shard.data.size)}

  def own(leaf: Any, is_donated: bool) -> Any:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
      return leaf
    shared = not donated.isdisjoint(mine := keys(leaf))
    if is_donated:
      donated.update(mine)
    return jnp.copy(leaf) if shared else leaf

  first = jax.tree.map(functools.partial(own, is_donated=True), arguments[:2])
  return first + jax.tree.map(functools.partial(own, is_donated=False), arguments[2:])


class _OnMesh:
  """Workers along an axis of a mesh, whose devices may belong to many processes."""

  def __init__(self, mesh: Mesh, axis: AxisName):
    names = _compat.names_of(axis)
    unknown = [name for name in names if name not in mesh.shape]
    if unknown:
      raise ValueError(f"axis {unknown[0]!r} is not an axis of the mesh, choose from {tuple(mesh.axis_names)}")
    self.workers = self.held = math.prod(mesh.shape[name] for name in names)
    self.comm: Comm = AxisComm(axis)
    self.axis, self.axes = axis, dict(mesh.shape)
    self.others = tuple(name for name in mesh.axis_names if name not in names)
    taking_part = sorted({device.process_index for device in mesh.devices.flat})
    self.processes, me = len(taking_part), jax.process_index()
    self.process = taking_part.index(me) if me in taking_part else 0
    # XLA's CPU runtime runs the devices of a mesh on a small pool of threads: the rendezvous of steps in flight starve
    # each other until it aborts, so at most one step is in flight there.
    self.platform = mesh.devices.flat[0].platform
    self.waits = self.platform == "cpu"
    self._mesh = mesh

  def map(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    return _compat.shard_map(function, self._mesh, in_specs, out_specs)

  def jit(
    self, function: Callable, in_specs: Any, out_specs: Any, donate: Sequence[int] = (), options: Any = None
  ) -> Any:
    places, results = self._shardings(in_specs), self._shardings(out_specs)
    mapped = self.map(function, in_specs, out_specs)
    if _compat.has_explicit_axes(self._mesh):  # where shard_map takes arguments of the types of its specs alone
      mapped = self._resharding(mapped, places)
    return jax.jit(mapped, in_shardings=places, out_shardings=results, donate_argnums=donate, compiler_options=options)

  def place(self, tree: Any, specs: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    places = jax.tree.leaves(jax.tree.broadcast(self._shardings(specs), tree, is_leaf=_is_spec))
    # Comparing is sixty times faster than a device_put that has nothing to do, in every step.
    if all(getattr(leaf, "sharding", None) == place for leaf, place in zip(leaves, places, strict=True)):
      return tree
    put = _put_global if self._mesh.is_multi_process else jax.device_put
    return jax.tree.unflatten(structure, map(put, leaves, places))

  def spread(self, value: np.ndarray) -> jax.Array:
    place = self._shardings(PartitionSpec(self.axis))
    return jax.make_array_from_callback((self.workers, *value.shape), place, lambda _: value[None])

  @staticmethod
  def _resharding(mapped: Callable, places: Any) -> Callable:
    def program(*arguments: Any) -> Any:
      every = jax.tree.broadcast(places, arguments, is_leaf=_is_spec)
      return mapped(*jax.tree.map(jax.sharding.reshard, arguments, every))

    return program

  def _shardings(self, specs: Any) -> Any:
    return jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), specs, is_leaf=_is_spec)


class _OnOneDevice:
  """What engines share whose arrays lie on this process's one device."""

  held: int
  waits = False
  process, processes = 0, 1
  others: tuple[str, ...] = ()

  @property
  def platform(self) -> str:
    return jax.default_backend()

  def map(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    del in_specs, out_specs
    return function

  def jit(
    self, function: Callable, in_specs: Any, out_specs: Any, donate: Sequence[int] = (), options: Any = None
  ) -> Any:
    return jax.jit(self.map(function, in_specs, out_specs), donate_argnums=donate, compiler_options=options)

  def place(self, tree: Any, specs: Any) -> Any:
    del specs
    return tree

  def spread(self, value: np.ndarray) -> jax.Array:
    return jax.numpy.broadcast_to(value, (self.held, *value.shape))


class _Simulated(_OnOneDevice):
  """All workers under vmap; arrays outside lie as they do on a mesh."""

  def __init__(self, comm: SimComm):
    assert comm.members is not None
    self.workers = self.held = comm.members
    self.axis = comm.axis
    self.axes = {comm.axis: comm.members}
    self.comm: Comm = comm

  def map(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    def mapped(*arguments: Any) -> Any:
      stacked = self._each(in_specs, arguments, lambda x: x.reshape(self.workers, -1, *x.shape[1:]), lambda x: x)
      every = jax.tree.broadcast(in_specs, arguments, is_leaf=_is_spec)
      axes = jax.tree.map(lambda spec: 0 if spec else None, every, is_leaf=_is_spec)
      results = jax.vmap(function, in_axes=axes, axis_name=self.axis, axis_size=self.workers)(*stacked)
      return self._each(out_specs, results, lambda x: x.reshape(-1, *x.shape[2:]), lambda x: x[0])

    return mapped

  @staticmethod
  def _each(specs: Any, tree: Any, split: Callable, same: Callable) -> Any:
    """Applies `split` to the leaves that differ between workers, `same` to the others."""
    choose = lambda spec, leaf: (split if spec else same)(leaf)
    return jax.tree.map(choose, jax.tree.broadcast(specs, tree, is_leaf=_is_spec), tree, is_leaf=_is_spec)


class _Rank(_OnOneDevice):
  """A rank of MPI: one worker, whose arrays are its own."""

  held = 1
  axis: AxisName = RANKS

  def __init__(self, comm: MpiComm):
    self.workers = self.processes = comm.size
    self.process = int(comm.rank)
    self.axes: dict[Any, int] = {}
    self.comm: Comm = comm


def _put_global(x: Any, place: NamedSharding) -> jax.Array:
  """An array of all processes, from one that each of them has whole."""
  if getattr(x, "sharding", None) == place:
    return x
  if isinstance(x, jax.Array) and not x.is_fully_addressable:
    return jax.device_put(x, place)
  if jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key):
    words = _put_global(jax.random.key_data(x), place)
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
  whole = np.asarray(x)
  return jax.make_array_from_callback(whole.shape, place, whole.__getitem__)


def _is_spec(x: Any) -> bool:
  return isinstance(x, (PartitionSpec, NamedSharding))
