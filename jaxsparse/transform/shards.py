"""Devices inside a worker: each of them reduces its own piece of every leaf with the same device of the other workers.

The axes of a mesh other than those of the workers lie inside a worker. Within a
shard_map over the axis of the workers alone, `update.at_devices` opens a second one
over the axes inside, so that a transform sees one device: its shards of the leaves. A
leaf that is replicated along some axes inside is cut into equal pieces along them,
padded with zeros, and gathered afterwards. So no two devices of a worker send the same
entry:

    leaf              spec inside, 2 x 3 devices   piece of each device
    [8, 12]           P("a", "b")                  its shard, 16 entries
    [8, 12]           P("a")                       a third of its shard, 16 entries
    [5]               P()                          a sixth, 1 entry; one of the six is padding

The state of a transform records the specs (`ReduceState.layout.shards`), since the
types of arrays tell them only where axes are Explicit.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxsparse import _compat
from jaxsparse._compat import names_of
from jaxsparse.arrays import flatten
from jaxsparse.comm import axes_of
from jaxsparse.transform.groups import Group
from jaxsparse.types import ArrayTree, Comm, SpecTree


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Shards:
  """How the leaves of a gradient lie on the devices inside a worker: a part of the structure of a state, no array.

  Attributes:
    axes: names and sizes of the axes inside, in the order of the mesh.
    shapes: of the whole leaves.
    specs: of the leaves, along the axes inside.

  Example:
    >>> shards = Shards((("devices", 4),), ((8, 6), (5,)), (PartitionSpec("devices"), PartitionSpec()))
    >>> shards.devices, shards.sizes  # [8, 6] is sharded, [5] is cut into four pieces
    (4, (12, 2))
  """

  axes: tuple[tuple[str, int], ...]
  shapes: tuple[tuple[int, ...], ...]
  specs: tuple[PartitionSpec, ...]

  @classmethod
  def from_specs(
    cls, tree: ArrayTree, axes: dict[str, int], specs: Sequence[PartitionSpec]
  ) -> Self:
    """The shards of a pytree.

    Args:
      tree: the parameters.
      axes: names and sizes of the axes inside a worker.
      specs: of the leaves along these axes, in pytree order.

    Raises:
      ValueError: if a dimension of a leaf does not divide among the devices of its
        axes, naming the leaf.
    """
    shapes = flatten.leaf_shapes(tree)
    # Uneven shards would give devices pieces of several sizes, and one program has one.
    for (name, shape), spec in zip(shapes.items(), specs, strict=True):
      # A spec may have fewer items than a shape has dimensions: the others are whole.
      for size, entry in zip(shape, spec, strict=False):
        ways = _ways(entry, axes)
        if size % ways:
          raise ValueError(
            f"parameters{name} has shape {shape} and the sharding {spec}, which cuts {size} entries into {ways} "
            f"shards: choose a dimension that {ways} divides, or replicate it inside"
          )
    # Without trailing None, so that equal shardings have equal specs where states are
    # compared.
    return cls(
      tuple(axes.items()), tuple(shapes.values()), tuple(map(_compat.trimmed, specs))
    )

  @property
  def names(self) -> tuple[str, ...]:
    """Names of the axes inside."""
    return tuple(name for name, _ in self.axes)

  @property
  def devices(self) -> int:
    """Number of devices of a worker, S."""
    return math.prod(size for _, size in self.axes)

  @property
  def pieces(self) -> list[tuple[int, ...]]:
    """The shape of the piece of each leaf, the same on every device.

    A piece is a shard, or where devices hold copies of a shard an equal share of it:
    whole rows if the copies divide these, else a vector with padding.
    """
    axes = dict(self.axes)
    pieces = []
    for shape, spec in zip(self.shapes, self.specs, strict=True):
      # A spec may be shorter than a shape: the other dimensions are whole.
      uncut = [1] * (len(shape) - len(spec))
      ways = [*(_ways(entry, axes) for entry in spec), *uncut]
      shard = tuple(size // count for size, count in zip(shape, ways, strict=True))
      # Devices along the axes that do not cut the leaf hold copies of a shard: each
      # reduces one share of it, so that no entry is reduced twice.
      pieces.append(share_of(shard, _ways(self._replicated(spec), axes)))
    return pieces

  @property
  def sizes(self) -> tuple[int, ...]:
    """Entries of the piece of each leaf, with padding; the same on every device."""
    return tuple(map(math.prod, self.pieces))

  def groups(self, groups: Sequence[Group]) -> list[Group]:
    """The groups of one device, given those of whole leaves: a density stays, k is divided by S and rounded up."""
    pieces = self.pieces

    def of_device(group: Group) -> Group:
      # The shapes of pieces, since a collective may depend on rows and columns.
      shapes = tuple(pieces[leaf] for leaf in group.leaves)
      collective = group.collective.for_devices(self.devices).for_leaves(shapes)
      return group._replace(entries=sum(map(math.prod, shapes)), collective=collective)

    return list(map(of_device, groups))

  def cut(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """The pieces of this device, vectors, from the shards of leaves that it holds; inside a shard_map over its axes."""
    pieces = []
    for shard, spec in zip(leaves, self.specs, strict=True):
      flat = shard.reshape(-1)
      # Names of the axes along which devices hold copies of this shard.
      alike = self._replicated(spec)
      if alike and flat.size:
        copies = math.prod(map(jax.lax.axis_size, alike))
        # Zeros behind the last entry give all devices pieces of one size.
        padded = jnp.pad(flat, (0, -flat.size % copies))
        # Row i is the piece of copy i.
        flat = padded.reshape(copies, -1)[jax.lax.axis_index(alike)]
      pieces.append(flat)
    return pieces

  def join(
    self, pieces: Sequence[jax.Array], shards: Sequence[jax.Array]
  ) -> list[jax.Array]:
    """Undoes `cut`: the shards of this device, in the shapes of `shards`, from the pieces of all devices with copies.

    Pieces of leaves with the same dtype and the same axes of copies are gathered in one
    message.
    """
    flat = list(pieces)
    # The indices of the leaves that have copies, by (axes of copies, dtype).
    alike: dict[Any, list[int]] = {}
    for index, (piece, spec) in enumerate(zip(pieces, self.specs, strict=True)):
      # A leaf that is cut along all axes inside has no copies: its piece is its shard.
      if (axes := self._replicated(spec)) and piece.size:
        alike.setdefault((axes, piece.dtype), []).append(index)
    for (axes, _), indices in alike.items():
      joined = jnp.concatenate([pieces[index] for index in indices])
      rows = jax.lax.all_gather(joined, axes)
      sizes = [pieces[index].size for index in indices]
      columns_of_leaves = flatten.parts(rows, sizes, axis=1)
      for index, columns in zip(indices, columns_of_leaves, strict=True):
        # One row a copy; behind the last entry is padding.
        flat[index] = columns.reshape(-1)[: shards[index].size]
    pairs = zip(flat, shards, strict=True)
    return [leaf.reshape(shard.shape) for leaf, shard in pairs]

  def _replicated(self, spec: PartitionSpec) -> tuple[str, ...]:
    """The axes inside along which devices hold copies, in the order of the mesh."""
    # An entry of a spec is a name, a tuple of names, or None.
    used = {name for entry in spec for name in names_of(entry or ())}
    return tuple(name for name in self.names if name not in used)


def share_of(shape: tuple[int, ...], ways: int) -> tuple[int, ...]:
  """The shape of one of `ways` equal shares of an array: rows where these divide, else a vector, padded in the last.

  Example:
    >>> share_of((8, 6), 2), share_of((5, 3), 2)
    ((4, 6), (8,))
  """
  # `-(-a // b)` below rounds up.
  if ways == 1 or (shape and shape[0] % ways == 0):
    return (shape[0] // ways, *shape[1:]) if shape else shape
  return (-(-math.prod(shape) // ways),)


def _ways(entry: Any, axes: dict[str, int]) -> int:
  """Into how many blocks an entry of a PartitionSpec cuts a dimension."""
  return math.prod(axes[name] for name in names_of(entry or ()))


def shards_of(
  comm: Comm, params: optax.Params, shardings: SpecTree = None
) -> Shards | None:
  """The shards of parameters; None where a worker is one device.

  Args:
    comm: the workers.
    params: the parameters, whose types tell how they lie along Explicit axes.
    shardings: for other axes a pytree like the parameters, of `PartitionSpec` or
      `NamedSharding`.

  Raises:
    ValueError: if an axis inside is not Explicit and there are no shardings, or not of
      each leaf.
  """
  axes = _compat.axes_inside(axes_of(comm))
  if not axes:
    return None
  # Types tell shardings along Explicit axes; along Auto ones only the caller knows.
  if shardings is None:
    if hidden := [name for name in axes if not _compat.is_explicit(name)]:
      raise ValueError(
        f"the axis {hidden[0]!r} lies inside a worker, and is not Explicit, so the types of the parameters do not tell "
        "how they are sharded along it: make the state with js.init, outside jit; or give the transform shardings=, or "
        "the mesh Explicit axes"
      )
    leaves = jax.tree.leaves(params)
    of_types = [jax.typeof(leaf).sharding.spec for leaf in leaves]
    return Shards.from_specs(params, axes, of_types)
  # A spec is a leaf of this tree; None in the place of a spec is an error below.
  is_spec = lambda x: isinstance(x, (PartitionSpec, NamedSharding))
  by_path = jax.tree_util.tree_leaves_with_path(shardings, is_leaf=is_spec)
  specs = {
    jax.tree_util.keystr(path): x.spec if isinstance(x, NamedSharding) else x
    for path, x in by_path
    if is_spec(x)
  }
  names = flatten.leaf_shapes(params)  # optax.masked leaves some of them out
  if unknown := [name for name in names if name not in specs]:
    raise ValueError(
      f"shardings={shardings!r}: parameters{unknown[0]} has none, give a PartitionSpec or NamedSharding of each leaf"
    )
  # A sharding of the caller may also name the workers, along which nothing is cut here.
  workers = axes_of(comm) or ()
  return Shards.from_specs(
    params, axes, [_compat.without_axes(specs[name], workers) for name in names]
  )


def check_inside(comm: Comm, shards: Shards | None) -> None:
  """Raises ValueError if a state was made for workers of other devices than those of this program."""
  # Sizes of the axes inside a worker by name, of the state; `axes` are those of this
  # program. Empty for a worker of one device.
  made = dict(shards.axes) if shards else {}
  axis = axes_of(comm)
  axes = _compat.axes_inside(axis)
  if made != axes:
    raise ValueError(
      f"the optimizer state was made for workers with {_listed(made)} inside, here a worker of {axis} has "
      f"{_listed(axes)}: make a new one with js.init on this mesh, and in a shard_map of your own give "
      f"axis_names={set(axis or ())}, so that the other axes stay inside a worker"
    )


def _listed(axes: dict[str, int]) -> str:
  return (
    " and ".join(f"{size} devices along {name!r}" for name, size in axes.items())
    or "one device"
  )
