"""Where the parameters of a worker of rounds are: on the devices of one process, or of several, its parts.

Each of P parts exchanges one of P equal slices of every leaf, in the order of its flat
entries, with zeros at the end. So every entry is in one part, also of leaves that are
replicated, and how a worker shards its leaves does not matter.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsparse.arrays.flatten import leaves_by_name


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
  """Leaves the mesh of `jax.set_mesh` for a block or a function: JAX refuses arrays of other devices, here of the CPU.

  Example:
    >>> with jax.set_mesh(jax.make_mesh((1,), ("data",))), without_mesh():
    ...   jax.sharding.get_abstract_mesh().axis_names
    ()
  """
  with jax.set_mesh(Mesh(np.empty((), object), ())):
    yield


class Whole:
  """Parameters in one process.

  Args:
    params: a pytree of arrays of this process.

  Attributes:
    part: the number of this process among those of the worker: 0.
    parts: the number of processes of the worker: 1.
    _puts: for each leaf, puts a host array where that leaf is.
  """

  part = 0
  parts = 1

  def __init__(self, params: optax.Params):
    # None: an uncommitted leaf stays one, so that JAX may move it to the devices of
    # the arrays that a program has besides.
    self._puts = jax.tree.map(
      lambda leaf: functools.partial(
        jax.device_put, device=leaf.sharding if leaf.committed else None
      ),
      params,
    )

  @property
  def where(self) -> tuple[int, int]:
    """The number of this part, and how many there are."""
    return self.part, self.parts

  def to_host(self, tree: optax.Params) -> optax.Params:
    """The leaves that this part exchanges, which numpy copies to the host."""
    return tree

  def to_device(self, tree: optax.Params) -> optax.Params:
    """From the leaves that this part exchanges, on the CPU, arrays with the shardings of the parameters."""
    put_leaf = lambda leaf, put: put(np.asarray(leaf))
    return jax.tree.map(put_leaf, tree, self._puts)


class Slices(Whole):
  """Parameters that several processes share, joined by `jax.distributed`: all of them call each method together.

  Attributes:
    part, parts: the number of this process, and how many there are.
    _slices: for each leaf the `_LeafSlices`, its programs.

  Raises:
    ValueError: for a leaf that has no `NamedSharding` over all processes, with equally
      many devices of each.
  """

  def __init__(self, params: optax.Params):
    self.part = jax.process_index()
    self.parts = jax.process_count()
    for name, leaf in leaves_by_name(params).items():
      _check(f"params{name}", leaf.sharding, self.parts)
    self._slices = jax.tree.map(
      lambda leaf: _slices_of(leaf.shape, leaf.sharding, self.parts), params
    )

  def to_host(self, tree: optax.Params) -> optax.Params:
    """The slices of this part, a `_Slice` for each leaf: flat, with zeros behind the last entry of the leaf."""
    return jax.tree.map(lambda leaf, its: its.slice_of(leaf), tree, self._slices)

  def to_device(self, tree: optax.Params) -> optax.Params:
    """The leaves with their shardings, from the slices of all parts, each of which gives its own."""
    whole_of = lambda leaf, its: its.whole_of(np.asarray(leaf))
    return jax.tree.map(whole_of, tree, self._slices)


def place_of(params: optax.Params) -> Whole:
  """Where parameters are: `Whole` for one process, `Slices` where a leaf has devices of several.

  Example:
    >>> place = place_of({"w": jnp.zeros(3)})
    >>> place.part, place.parts
    (0, 1)
  """
  here = all(leaf.is_fully_addressable for leaf in jax.tree.leaves(params))
  return Whole(params) if here else Slices(params)


def _check(name: str, sharding: Any, parts: int) -> None:
  """Raises ValueError unless a leaf is sharded over equally many devices of each process."""
  choice = "choose a NamedSharding over equally many devices of each process of the worker, for every leaf"
  if not isinstance(sharding, NamedSharding):
    raise ValueError(f"Rounds: {name} has a {type(sharding).__name__}, {choice}")
  devices = [device.process_index for device in sharding.mesh.devices.flat]
  counts = [devices.count(process) for process in range(parts)]
  if len(set(counts)) > 1:
    raise ValueError(
      f"Rounds: {name} is on {counts} devices of processes 0 … {parts - 1}, {choice}"
    )


@dataclasses.dataclass(frozen=True)
class _Slice:
  """The slice of a leaf that this process has, on its devices; numpy copies it to the host.

  Attributes:
    rows: [1, row] of each device of this process, in order; the last ones are padded.
    size: entries of the slice.
  """

  rows: list[jax.Array]
  size: int

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    """`dtype`[size], without the padding of the rows."""
    return np.concatenate([np.ravel(row) for row in self.rows])[: self.size].astype(
      dtype or self.rows[0].dtype
    )


class _LeafSlices:
  """The programs that cut a leaf into rows, one for each device, and join them.

  Args:
    shape: of the leaf.
    place: its sharding.
    parts: how many processes share it.

  Attributes:
    _size: entries of the slice of a process, of all processes alike.
    _row: entries of the row of a device.
    _place: the leaf's sharding, and `_automatic` the same on a mesh of Auto axes.
    _rows: the sharding of [devices, row], one row for each device.
    _devices: of this process, in the order of their rows in its slice.
    _cut, _join: compiled, from the leaf to its rows and back.
  """

  def __init__(self, shape: tuple[int, ...], place: NamedSharding, parts: int):
    devices: Any = place.mesh.devices.ravel()
    # A mesh may have its devices in any order; slices are in that of processes. Row i
    # of the slices is on device `by_process[i]`, and device j has row `order[j]`.
    by_process = sorted(
      range(devices.size), key=lambda index: devices[index].process_index
    )
    order = np.argsort(by_process)
    per_part = devices.size // parts  # devices of each process
    self._size = size = -(-math.prod(shape) // parts)  # entries of the slice of a part
    self._row = row = -(-size // per_part)
    # A mesh of Auto axes, on which a reshape of a sharded array needs no sharding: the
    # axes of the user's mesh may be Explicit.
    mesh = Mesh(place.mesh.devices, place.mesh.axis_names)
    self._place = place
    self._automatic = NamedSharding(mesh, place.spec)
    self._rows = NamedSharding(Mesh(devices, ("devices",)), PartitionSpec("devices"))

    # The flat leaf with zeros at the end is [parts, size]; each slice with zeros at its
    # end is `per_part` rows.
    def cut(leaf: jax.Array) -> jax.Array:
      slices = jnp.pad(leaf.ravel(), (0, parts * size - leaf.size)).reshape(parts, size)
      padded = jnp.pad(slices, ((0, 0), (0, per_part * row - size)))
      return padded.reshape(parts * per_part, row)[order]

    def join(rows: jax.Array) -> jax.Array:
      slices = rows[np.array(by_process)].reshape(parts, per_part * row)[:, :size]
      return slices.ravel()[: math.prod(shape)].reshape(shape)

    self._cut = jax.jit(cut, out_shardings=self._rows)
    self._join = jax.jit(join, out_shardings=self._automatic)
    # devices of this process, in the order of their rows
    here = jax.process_index()
    ordered = devices[by_process]
    self._devices = [device for device in ordered if device.process_index == here]

  def slice_of(self, leaf: jax.Array) -> _Slice:
    """The slice of this process; all processes call it together."""
    shards = self._cut(jax.device_put(leaf, self._automatic)).addressable_shards
    rows = {shard.device: shard.data for shard in shards}
    return _Slice([rows[device] for device in self._devices], self._size)

  def whole_of(self, values: np.ndarray) -> jax.Array:
    """The leaf, from `values`, [size] on the host, the slice of this process; all processes call it together."""
    count = len(self._devices)
    padded = np.pad(values, (0, self._row * count - self._size))
    shards = map(jax.device_put, padded.reshape(count, 1, self._row), self._devices)
    shape = self._rows.mesh.size, self._row
    rows = jax.make_array_from_single_device_arrays(shape, self._rows, [*shards])
    return jax.device_put(self._join(rows), self._place)


# One for all leaves of a shape and sharding, so that their programs compile once.
_slices_of = functools.cache(_LeafSlices)
