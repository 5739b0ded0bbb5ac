"""Where the parameters of a worker of rounds are: on the devices of one process, or of several, its parts.

Each of P parts exchanges one of P equal slices of every leaf, in the order of its flat
entries, with zeros at the end. So every entry is in one part, also of leaves that are
replicated, and how a worker shards its leaves does not matter.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
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
    part: the number of this process among those of the worker, 0, of `parts`, 1.
  """

  part = 0
  parts = 1

  def __init__(self, params: optax.Params):
    self._shardings = jax.tree.map(lambda leaf: leaf.sharding, params)

  @property
  def where(self) -> tuple[int, int]:
    """The number of this part, and how many there are."""
    return self.part, self.parts

  def to_host(self, tree: optax.Params) -> optax.Params:
    """The leaves that this part exchanges, which numpy copies to the host."""
    return tree

  def to_device(self, tree: optax.Params) -> optax.Params:
    """From the leaves that this part exchanges, on the CPU, arrays with the shardings of the parameters."""
    return jax.device_put(tree, self._shardings)


class Slices(Whole):
  """Parameters that several processes share, joined by `jax.distributed`: all of them call each method together.

  Raises:
    ValueError: for a leaf that has no `NamedSharding` over all processes, with equally
      many devices of each.
  """

  def __init__(self, params: optax.Params):
    self.part = jax.process_index()
    self.parts = jax.process_count()
    for name, leaf in leaves_by_name(params).items():
      _check(f"params{name}", leaf.sharding, self.parts)
    self._programs = jax.tree.map(
      lambda leaf: _programs_of(leaf.shape, leaf.sharding, self.parts), params
    )

  def to_host(self, tree: optax.Params) -> optax.Params:
    """The slices of this part."""
    return jax.tree.map(
      lambda leaf, programs: programs.slice_of(leaf), tree, self._programs
    )

  def to_device(self, tree: optax.Params) -> optax.Params:
    """The leaves, from the slices of all parts."""
    return jax.tree.map(
      lambda leaf, programs: programs.whole_of(np.asarray(leaf)), tree, self._programs
    )


def place_of(params: optax.Params) -> Whole:
  """Where parameters are.

  Example:
    >>> place = place_of({"w": jnp.zeros(3)})
    >>> place.part, place.parts
    (0, 1)
  """
  here = all(leaf.is_fully_addressable for leaf in jax.tree.leaves(params))
  return Whole(params) if here else Slices(params)


def _check(name: str, sharding: Any, parts: int) -> None:
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
  """The slice of a leaf that this process has, on its devices."""

  rows: list[jax.Array]
  size: int

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    return np.concatenate([np.ravel(row) for row in self.rows])[: self.size].astype(
      dtype or self.rows[0].dtype
    )


@dataclasses.dataclass(frozen=True)
class _Programs:
  """The programs that cut a leaf into rows, one for each device, and join them.

  Attributes:
    devices: of this process, in the order of its rows.
    rows: the sharding of the rows, f32[number of devices, entries of a row].
    size: entries of the slice of a part.
    place: the sharding of the leaf.
  """

  devices: list[jax.Device]
  rows: NamedSharding
  size: int
  place: NamedSharding
  automatic: NamedSharding
  cut: Callable[[jax.Array], jax.Array]
  join: Callable[[jax.Array], jax.Array]

  def slice_of(self, leaf: jax.Array) -> _Slice:
    """The slice of this process."""
    shards = self.cut(jax.device_put(leaf, self.automatic)).addressable_shards
    rows = {shard.device: shard.data for shard in shards}
    return _Slice([rows[device] for device in self.devices], self.size)

  def whole_of(self, values: np.ndarray) -> jax.Array:
    """The leaf, from the slices of all processes."""
    row = -(-self.size // len(self.devices))
    padded = np.pad(values, (0, row * len(self.devices) - self.size)).reshape(
      len(self.devices), 1, row
    )
    shards = [
      jax.device_put(part, device)
      for part, device in zip(padded, self.devices, strict=True)
    ]
    shape = self.rows.mesh.size, row
    return jax.device_put(
      self.join(jax.make_array_from_single_device_arrays(shape, self.rows, shards)),
      self.place,
    )


@functools.cache
def _programs_of(shape: tuple[int, ...], place: NamedSharding, parts: int) -> _Programs:
  devices: Any = place.mesh.devices.ravel()
  # A mesh may have its devices in any order: row j of the program is on device j, and
  # is row `order[j]` of the slices.
  by_process = sorted(
    range(devices.size), key=lambda number: devices[number].process_index
  )
  order = np.argsort(by_process)
  each = devices.size // parts
  size = -(-math.prod(shape) // parts)
  row = -(-size // each)
  # Sharded reshapes need no types of shardings here: the axes of a user's mesh may be
  # Explicit.
  automatic = NamedSharding(Mesh(place.mesh.devices, place.mesh.axis_names), place.spec)
  rows = NamedSharding(Mesh(devices, ("devices",)), PartitionSpec("devices"))

  def cut(leaf: jax.Array) -> jax.Array:
    slices = jnp.pad(leaf.ravel(), (0, parts * size - leaf.size)).reshape(parts, size)
    return jnp.pad(slices, ((0, 0), (0, each * row - size))).reshape(parts * each, row)[
      order
    ]

  def join(rows: jax.Array) -> jax.Array:
    slices = rows[np.array(by_process)].reshape(parts, each * row)[:, :size]
    return slices.ravel()[: math.prod(shape)].reshape(shape)

  here = [
    devices[number]
    for number in by_process
    if devices[number].process_index == jax.process_index()
  ]
  programs = jax.jit(cut, out_shardings=rows), jax.jit(join, out_shardings=automatic)
  return _Programs(here, rows, size, place, automatic, *programs)
