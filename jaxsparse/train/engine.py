"""Engines: workers on a mesh of devices of one or many processes, as ranks of MPI, or simulated on one device.

The program of one worker is the same on every engine. An engine maps the program over
its workers and compiles it. A `PartitionSpec` for each argument and result says whether
it is split along the workers or equal on all of them.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxsparse import _compat
from jaxsparse._compat import AxisName, local_shard, names_of
from jaxsparse._compat.one_at_a_time import dispatch
from jaxsparse.comm import AxisComm, SimComm, all_gather, in_rank_order
from jaxsparse.comm.mpi import RANKS, MpiComm
from jaxsparse.types import ArrayTree, Comm, SpecTree


def name_argument(path: jax.tree_util.KeyPath) -> str:
  """The path of an array in the arguments of a step, as errors name it."""
  # The first key is the index of the argument; the fourth argument is a dict of keyword
  # arguments.
  return ("params", "state", "batch", "argument ")[path[0].idx] + jax.tree_util.keystr(
    path[1:]
  )


class Engine:
  """Runs a program at every worker; `js.init` and `js.make_train_step` use workers through this interface only.

  Attributes:
    workers: number of workers P.
    held: number of workers in the leading axis of an array outside a program: P, or 1
      under MPI, where each process has the arrays of its own worker only.
    comm: the comm to use inside a mapped program.
    axes: names and sizes of the axes that a program is mapped over.
    axis: the axis, or tuple of axes, of the workers.
    same: the spec P() of what is equal on all workers.
    others: names of the mapped axes that are not those of the workers: axes of size 1,
      or for the engine `flat` the axes inside a worker.
    process: number of this process, 0 … processes − 1.
    processes: number of processes that run the program together.
  """

  workers: int
  held: int = 1
  comm: Comm
  axes: dict[Any, int]
  axis: AxisName
  same = PartitionSpec()
  others: tuple[str, ...] = ()
  process = 0
  processes = 1
  # Axes of the devices of a worker, which a program is not mapped over.
  _inside: tuple[str, ...] = ()

  @property
  def split(self) -> PartitionSpec:
    """The spec of what is split along the workers."""
    return PartitionSpec(self.axis)

  @property
  def platform(self) -> str:
    """The platform of the devices: "cpu", "gpu" or "tpu"."""
    return jax.default_backend()

  @property
  def flat(self) -> "Engine":
    """The engine itself; where workers have several devices, one that maps a program over these devices too."""
    return self

  def typed(self) -> contextlib.AbstractContextManager["Engine"]:
    """An engine of the same devices on which the types of arrays tell how they are sharded inside a worker."""
    return contextlib.nullcontext(self)

  def map(
    self, function: Callable, in_specs: SpecTree, out_specs: SpecTree
  ) -> Callable:
    """The function of all workers that runs `function` at each of them, like `jax.shard_map`.

    Where a process has one worker, with the arrays of this worker only, it is
    `function` itself.
    """
    return function

  def jit(
    self,
    worker: Callable,
    in_specs: SpecTree,
    out_specs: SpecTree,
    donate: Any = (),
    options: Any = None,
    shardings: SpecTree = None,
  ) -> Any:
    """`map`, jitted; `options` are those of the compiler.

    Arguments and results are sharded as their specs say. Where a worker has several
    devices, `shardings`, if given, replace the specs: a pair for arguments and results,
    in which None leaves the choice to JAX. `donate` are the indices of the donated
    arguments.
    """
    program = self.map(worker, in_specs, out_specs)
    # `_inside` is empty where a worker is one device: then specs alone count.
    in_shardings, out_shardings = (self._inside and shardings) or (
      self.shardings_of(in_specs),
      self.shardings_of(out_specs),
    )
    return jax.jit(
      program,
      in_shardings=in_shardings,
      out_shardings=out_shardings,
      donate_argnums=donate,
      compiler_options=options,
    )

  def place(self, tree: ArrayTree, specs: SpecTree) -> ArrayTree:
    """`tree` with the shardings of `specs`; `jit` would reshard it too, but compile once more for other shardings.

    Leaves may be `jax.ShapeDtypeStruct`, also on a mesh of devices that are not there
    (`jax.experimental.topologies`).
    """
    return tree

  def shardings(self, tree: ArrayTree, specs: SpecTree) -> SpecTree:
    """The shardings that `place` gives a tree, where a worker has several devices; None where specs alone count."""

  def shardings_of(self, specs: SpecTree) -> SpecTree:
    """The shardings that specs say, for a prefix of a tree; None where there is no mesh."""

  def spread(self, value: np.ndarray) -> jax.Array:
    """The array [workers, …] split along the workers, in which the rows of this process's workers are its `value`."""
    rows = jnp.broadcast_to(value, (self.held, *value.shape))
    return self.place(rows, self.split)

  def of_processes(self, value: np.ndarray) -> np.ndarray:
    """The values of all processes, [processes, …]; every process must call."""
    return value[None]


def check_batch(batch: ArrayTree, engine: Engine, micro_batches: int = 1) -> None:
  """Checks that the leading axis of a batch divides among the workers, and among `micro_batches` of each.

  Raises:
    ValueError: naming the array whose leading axis does not, or is empty.
  """
  # `held` is P; or 1 under MPI, where the batch is already that of one worker.
  rows = engine.held * micro_batches
  for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
    if np.shape(leaf)[:1] in ((), (0,)) or np.shape(leaf)[0] % rows:
      per_worker = f", {micro_batches} micro-batches each" if micro_batches > 1 else ""
      raise ValueError(
        f"batch{jax.tree_util.keystr(path)} has shape {np.shape(leaf)}: its leading axis must divide among the "
        f"{engine.workers} workers of axis {engine.axis!r}{per_worker}"
      )


def engine_of(where: Mesh | Comm, axis: AxisName) -> Engine:
  """The engine of a mesh, with one worker at each index of `axis`, or of a comm that knows its own workers.

  Other axes of a mesh lie inside a worker.

  Raises:
    ValueError: if the mesh has no such axis, or there are no workers.
    TypeError: if `where` is neither a mesh nor such a comm.
  """
  # A mesh without devices, or a simulated comm with `members=0`, would fail later with
  # a division by 0.
  if not (
    where.devices.size
    if isinstance(where, Mesh)
    else getattr(where, "members", None) != 0
  ):
    raise ValueError(
      f"{where!r} has no workers: give a mesh with devices, or a comm with members >= 1"
    )
  if isinstance(where, Mesh):
    # Where all axes inside have size 1, a worker is one device: none counts as inside.
    inside = tuple(name for name in where.axis_names if name not in names_of(axis))
    return _OnMesh(
      where, axis, inside if any(where.shape[name] > 1 for name in inside) else ()
    )
  if isinstance(where, MpiComm):
    return _Rank(where)
  if isinstance(where, SimComm) and where.members is not None:
    return _Simulated(where)
  raise TypeError(
    f"{where!r}: give a jax.sharding.Mesh, a js.MpiComm, or js.SimComm(axis, members=P)"
  )


def rows_of(
  engine: Engine, function: Callable, in_specs: SpecTree
) -> Callable[..., np.ndarray]:
  """A function that returns the results of `function` at all workers, as rows 0 … P − 1, on every process.

  `function` is the program of one worker and returns one array; `in_specs` are the
  specs of its arguments.
  """
  rows = lambda *arguments: in_rank_order(
    engine.comm, all_gather(engine.comm, function(*arguments))
  )
  program = engine.jit(rows, in_specs, engine.same)
  return lambda *arguments: local_shard(dispatch(program, *arguments))


class _OnMesh(Engine):
  """Workers along an axis of a mesh whose devices may belong to many processes.

  A program is mapped over all axes but those `inside` a worker, along which the
  compiler partitions it. Arguments that lie on the mesh, and along the workers as their
  specs say, keep their shardings inside, and so do the results that replace them; all
  others lie as their specs say. `_inside` is empty where a worker is one device, and in
  the engine `flat`.
  """

  def __init__(
    self,
    mesh: Mesh,
    axis: AxisName,
    inside: tuple[str, ...] = (),
  ):
    names = names_of(axis)
    if unknown := [name for name in names if name not in mesh.shape]:
      raise ValueError(
        f"axis {unknown[0]!r} is not an axis of the mesh, choose from {tuple(mesh.axis_names)}"
      )
    self.workers = self.held = math.prod(mesh.shape[name] for name in names)
    self.comm = AxisComm(axis)
    self.axis = axis
    # The axes that a program is mapped over.
    outside = [name for name in mesh.axis_names if name not in inside]
    self.axes = {name: mesh.shape[name] for name in outside}
    self.others = tuple(name for name in self.axes if name not in names)
    # A process without a device of this mesh takes no part.
    taking_part = sorted({device.process_index for device in mesh.devices.flat})
    self.processes = len(taking_part)
    me = jax.process_index()
    self.process = taking_part.index(me) if me in taking_part else 0
    self._mesh = mesh
    self._inside = inside
    # Where axes are Explicit, as with `jax.make_mesh`, the types of arrays have
    # shardings.
    self._is_explicit = AxisType.Explicit in mesh.axis_types
    # Cache of `shardings`, by (sharding, spec, number of dimensions) of an array.
    self._known: dict[Any, NamedSharding] = {}

  @property
  def platform(self) -> str:
    return self._mesh.devices.flat[0].platform

  @property
  def flat(self) -> Engine:
    return _OnMesh(self._mesh, self.axis)

  @contextlib.contextmanager
  def typed(self) -> Iterator[Engine]:
    """An engine of the same devices with Explicit axes: types of arrays tell how they are sharded inside a worker."""
    if not self._inside:
      yield self
      return
    devices = self._mesh.devices
    explicit = Mesh(
      devices, self._mesh.axis_names, axis_types=(AxisType.Explicit,) * devices.ndim
    )
    # Code that is traced in this context reads shardings from the types of its arrays.
    with jax.set_mesh(explicit):
      yield _OnMesh(explicit, self.axis, self._inside)

  def map(
    self, function: Callable, in_specs: SpecTree, out_specs: SpecTree
  ) -> Callable:
    """The function of all workers that runs `function` at each of them, a shard_map over all axes but those inside."""
    # A plain shard_map over a part of Explicit axes gathers arrays along all others.
    shard_map = (
      _compat.partly_mapped if self._inside and self._is_explicit else _compat.shard_map
    )
    # A shard_map over the workers may name no axis inside a worker in its specs: the
    # compiler partitions the program along these.
    specs = self._without_inside(in_specs), self._without_inside(out_specs)
    mapped = shard_map(function, self._mesh, *specs, tuple(self.axes))
    # XLA reshards arguments along Auto axes, and all axes are Auto at the boundary of
    # `partly_mapped`. With Explicit axes shard_map rejects arguments of other
    # shardings, so these are resharded before.
    if self._inside or not self._is_explicit:
      return mapped

    def program(*arguments: ArrayTree) -> ArrayTree:
      return mapped(
        *jax.tree.map(
          jax.sharding.reshard,
          arguments,
          jax.tree.broadcast(self.shardings_of(in_specs), arguments),
        )
      )

    return program

  def place(self, tree: ArrayTree, specs: SpecTree) -> ArrayTree:
    """`tree` on the devices, sharded as `specs` say along the workers; leaves may be arrays, shapes or tracers."""
    # Inside a worker an array keeps the sharding that it has.
    shardings = (
      self.shardings(tree, specs)
      if self._inside
      else jax.tree.broadcast(self.shardings_of(specs), tree)
    )
    put_array = put_global if self._mesh.is_multi_process else jax.device_put

    def put(leaf: Any, sharding: NamedSharding) -> ArrayTree:
      # On a tracer under vmap `device_put` would shard the axis that is mapped over.
      if isinstance(leaf, jax.core.Tracer):
        return jax.sharding.reshard(leaf, sharding) if self._is_explicit else leaf
      # Shapes, as of `js.abstract_state`, only record the sharding.
      return (
        shape_of(leaf, sharding)
        if isinstance(leaf, jax.ShapeDtypeStruct)
        else put_array(leaf, sharding)
      )

    # This runs in every step: comparing shardings is sixty times faster than a
    # device_put that moves nothing.
    keep = lambda leaf, sharding: (
      leaf if getattr(leaf, "sharding", None) == sharding else put(leaf, sharding)
    )
    return jax.tree.map(keep, tree, shardings)

  def shardings(self, tree: ArrayTree, specs: SpecTree) -> SpecTree:
    """The sharding that `place` gives each leaf of `tree`; None where a worker is one device: specs alone count."""
    if not self._inside:
      return None

    def sharding_of(
      path: jax.tree_util.KeyPath, leaf: Any, spec: PartitionSpec
    ) -> NamedSharding:
      sharding = (
        jax.typeof(leaf).sharding
        if isinstance(leaf, jax.core.Tracer)
        else getattr(leaf, "sharding", None)
      )
      key = sharding, spec, np.ndim(leaf)
      # This runs in every step, for every leaf: each sharding is made once. `_sharding`
      # depends on the shape by its length alone.
      if key not in self._known:
        self._known[key] = self._sharding(path, np.shape(leaf), sharding, spec)
      return self._known[key]

    return jax.tree_util.tree_map_with_path(
      sharding_of, tree, jax.tree.broadcast(specs, tree)
    )

  def of_processes(self, value: np.ndarray) -> np.ndarray:
    """The values of all processes, [processes, …], on each of them; every process must call."""
    # Gathered along an axis of processes, not of workers: several processes may hold
    # one worker, and each has its own value. Each process gives one row, `value[None]`.
    mesh, gather = _line_of_processes(self._mesh)
    split = NamedSharding(mesh, PartitionSpec("processes"))
    with jax.set_mesh(mesh):  # the caller may have set another mesh
      rows = jax.make_array_from_callback(
        (self.processes, *value.shape), split, lambda _: value[None]
      )
      return local_shard(dispatch(gather, rows))

  def shardings_of(self, specs: SpecTree) -> SpecTree:
    return jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), specs)

  def _sharding(
    self,
    path: jax.tree_util.KeyPath,
    shape: tuple[int, ...],
    sharding: Any,
    spec: PartitionSpec,
  ) -> NamedSharding:
    """The sharding of a leaf along the workers as `spec` says, and along the axes inside as it lies now.

    Args:
      path: of the leaf in the arguments of a step, for errors.
      shape: of the leaf.
      sharding: of the leaf now; None for one without.
      spec: along the workers, and for arrays of a `ReduceState` also along the axes
        inside; empty for all other leaves that are equal on all workers.

    Raises:
      ValueError: for a leaf that is cut along the workers and must be whole at each.
    """
    # None for an array that does not lie on this mesh: it is placed by `spec` alone.
    # Trailing None are dropped, to compare with `spec`.
    cut = self._own_spec(sharding)
    along_workers = None if cut is None else _compat.trimmed(self._without_inside(cut))
    if along_workers and not spec:
      raise ValueError(
        f"{name_argument(path)} of shape {shape} is sharded as {cut}, along {self.axis!r}, the axis of the workers, "
        f"each of which needs all of it: choose shards along {self._inside}"
      )
    # The present cuts, also those inside a worker, stay if those along the workers are
    # the ones of `spec`; else `spec` alone counts.
    if cut is not None and along_workers == spec:
      spec = cut
    # Padded by None to all dimensions, as the specs in the types of results are: with
    # others the next step would compile again.
    if self._is_explicit:
      spec = PartitionSpec(*spec, *[None] * (len(shape) - len(spec)))
    return NamedSharding(self._mesh, spec)

  def _own_spec(self, sharding: SpecTree) -> PartitionSpec | None:
    """The spec of a sharding on this mesh; None for a sharding on other devices, or none."""
    if (
      not isinstance(sharding, NamedSharding) or sharding.mesh.shape != self._mesh.shape
    ):
      return None
    # Under a trace a mesh is abstract, and has no devices to compare.
    is_abstract = not isinstance(sharding.mesh, Mesh)
    return (
      sharding.spec
      if is_abstract or np.array_equal(sharding.mesh.devices, self._mesh.devices)
      else None
    )

  def _without_inside(self, specs: SpecTree) -> SpecTree:
    return jax.tree.map(lambda spec: _compat.without_axes(spec, self._inside), specs)


class _Simulated(Engine):
  """All workers under vmap on one device; arrays outside a program have the shapes that they have on a mesh."""

  def __init__(self, comm: SimComm):
    assert comm.members is not None
    self.workers = self.held = comm.members
    self.axis = comm.axis
    self.axes = {comm.axis: comm.members}
    self.comm = comm

  def map(
    self, function: Callable, in_specs: SpecTree, out_specs: SpecTree
  ) -> Callable:
    """The function of all workers that runs `function` at each of them, under vmap."""
    workers = self.workers
    # Arrays split along the workers, of the spec P(axis), are [P·n, …] outside of a
    # program, as on a mesh, and [P, n, …] under vmap. Arrays that are equal on all
    # workers have the empty spec P(), which is falsy; of such results row 0 is
    # returned.
    rows = lambda x: x.reshape(workers, x.shape[0] // workers, *x.shape[1:])
    split = lambda spec, x: rows(x) if spec else x
    flat = lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    joined = lambda spec, x: flat(x) if spec else x[0]

    def mapped(*arguments: ArrayTree) -> ArrayTree:
      specs = jax.tree.broadcast(in_specs, arguments)
      axes = jax.tree.map(lambda spec: 0 if spec else None, specs)
      vmapped = jax.vmap(
        function, in_axes=axes, axis_name=self.axis, axis_size=self.workers
      )
      results = vmapped(*jax.tree.map(split, specs, arguments))
      return jax.tree.map(joined, jax.tree.broadcast(out_specs, results), results)

    return mapped


class _Rank(Engine):
  """A rank of MPI: one worker, with the arrays of this worker only."""

  axis: AxisName = RANKS

  def __init__(self, comm: MpiComm):
    self.workers = self.processes = comm.size
    self.process = int(comm.rank)
    self.axes = {}
    self.comm = comm

  def of_processes(self, value: np.ndarray) -> np.ndarray:
    return _gathered(self.comm)(self.spread(value))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4)  # a program compiles for a tenth of a second
def _line_of_processes(mesh: Mesh) -> tuple[Mesh, Callable]:
  """A mesh of one device of each process of a mesh, and a program that gathers rows of its devices on all of them.

  The program is a jitted identity of an array whose rows are sharded along "processes",
  and whose result is replicated: XLA makes the all-gather.
  """
  # Reversed: of several devices of a process the dict keeps the last, here the first.
  first = {device.process_index: device for device in reversed(list(mesh.devices.flat))}
  devices = np.array([first[process] for process in sorted(first)])
  line = Mesh(devices, ("processes",), axis_types=(AxisType.Auto,))
  return line, jax.jit(
    lambda rows: rows, out_shardings=NamedSharding(line, PartitionSpec())
  )


@functools.lru_cache(maxsize=4)
def _gathered(comm: MpiComm) -> Callable[..., np.ndarray]:
  """A function that gathers the values of all ranks, each given as [1, …]."""
  rank = _Rank(comm)
  return rows_of(rank, lambda x: x[0], (rank.split,))


def shape_of(
  x: Any, sharding: SpecTree = None, shape: tuple[int, ...] | None = None
) -> jax.ShapeDtypeStruct:
  """A `jax.ShapeDtypeStruct` with the dtype of x, and with its shape and sharding unless others are given.

  Args:
    x: an array, a `jax.ShapeDtypeStruct`, or a number.
    sharding: of the result; None for that of x, if it has one.
    shape: of the result; None for that of x.
  """
  dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
  shape = np.shape(x) if shape is None else shape
  return jax.ShapeDtypeStruct(
    shape, dtype, sharding=sharding or getattr(x, "sharding", None)
  )


def put_global(x: Any, sharding: NamedSharding) -> jax.Array:
  """A global array over all processes, from the same whole array on each of them."""
  # A global array already: this process cannot read all of it.
  if isinstance(x, jax.Array) and not x.is_fully_addressable:
    return jax.device_put(x, sharding)
  # Numpy has no dtype of typed random keys: their words are placed instead.
  if _compat.is_key(x):
    words = put_global(jax.random.key_data(x), sharding)
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
  array = np.asarray(x)
  # JAX asks each process for the parts of its own devices only.
  return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
