"""A folder of versions of a model in a serving dtype, and the bit patterns that a process holds.

A `Folder` knows of the model:

    _like, _structure   the leaves of `params_like`, and the structure of the pytree
    _served             the shape and serving dtype of each leaf
    _layout             the name, serving dtype and shape of each leaf, in words
    _folder             the folder of this dtype and model, within the one that was given
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from fsspec.implementations.dirfs import DirFileSystem

from jaxsparse.arrays import flatten
from jaxsparse.sparse import packing
from jaxsparse.types import ArrayTree
from jaxsparse.weights import files
from jaxsparse.weights.digests import BYTES, digest


class Patterns(NamedTuple):
  """The bit patterns of the leaves, or of the shards of leaves, that one process writes.

  Attributes:
    boxes: of each shard: the number of its leaf, where it starts in the leaf, and its
      shape.
    arrays: the patterns of each box, u8, u16 or u32[entries]; two u32 for 8 bytes.
  """

  boxes: Sequence[tuple[int, Sequence[int], Sequence[int]]]
  arrays: list[np.ndarray]

  def digest(self) -> int:
    """A digest of all patterns, 62 bits, of the digests of pieces, which threads compute."""
    of_piece = lambda piece: digest([piece]).to_bytes(BYTES)
    return digest(packing.each_piece(of_piece, self.arrays))


class Folder:
  """Where a `Publisher` writes and a `Subscriber` reads: a folder of its own for each model and dtype.

  Args:
    folder: a path, or an address that fsspec knows.
    params_like: the parameters, or their shapes and dtypes.
    dtype: the serving dtype, of floating-point leaves; None leaves them as they are.

  Raises:
    ValueError: for an address of a protocol that fsspec does not know, a dtype that is
      not floating-point, and a leaf that JAX would narrow, such as one in int64 without
      `jax_enable_x64`.
    ImportError: if the package for the protocol of an address is not installed.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    params_like: ArrayTree,
    dtype: Any = "bfloat16",
  ):
    system, root = files.system_of(folder)
    flatten.check_are_arrays(params_like, "params_like")
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
      raise ValueError(f"dtype={dtype!r}, choose a floating-point dtype, or None")
    self._dtype = dtype
    # leaves whose shardings those that are read get, and the structure of the pytree
    self._like, self._structure = jax.tree.flatten(params_like)
    served = jax.tree_util.tree_map_with_path(
      lambda path, leaf: jax.ShapeDtypeStruct(
        np.shape(leaf), self._dtype_of(path, leaf)
      ),
      params_like,
    )
    # shapes and dtypes of the leaves in the folder
    self._served = jax.tree.leaves(served)
    self._layout = _layout(served)
    # Models of other names, dtypes or shapes get folders of their own.
    model = digest(line.encode() for line in self._layout)
    own = f"{dtype and jnp.dtype(dtype)}-{model:x}"
    self._folder = DirFileSystem(f"{root}/{own}", system)

  def _patterns(self, params: ArrayTree) -> Patterns:
    """A copy of this process's shards; each shard belongs to one process.

    Raises:
      ValueError: for parameters of another model, and a leaf that JAX would narrow.
    """
    served = self._cast(params)
    # Leaves are numbered: an `OrderedDict` may have them in another order.
    if (layout := _layout(served)) != self._layout:
      unlike = sorted({*layout} ^ {*self._layout}) or "another order"
      raise ValueError(f"params have other leaves than params_like: {unlike}")
    boxes, arrays = [], []
    for leaf_index, leaf in enumerate(jax.tree.leaves(served)):
      # Other processes have the same array: process 0 writes it.
      if jax.process_index() and leaf.is_fully_addressable:
        continue
      for shard in leaf.addressable_shards:
        # Devices may hold equal shards: one of them is written.
        if shard.replica_id == 0:
          start = [int(cut.start or 0) for cut in shard.index]
          boxes.append((leaf_index, start, shard.data.shape))
          # Patterns have 1, 2 or 4 bytes, as differences are packed.
          array = np.array(shard.data).ravel()
          arrays.append(array.view(f"u{min(array.itemsize, 4)}"))
    return Patterns(boxes, arrays)

  def _params(self, parts: Sequence[Patterns]) -> ArrayTree:
    """The parameters in the serving dtype, where the leaves of `params_like` are.

    Args:
      parts: of each process that has written, the patterns; together all entries.
    """
    leaves = [np.zeros(leaf.shape, leaf.dtype) for leaf in self._served]
    for patterns in parts:
      for (leaf_index, start, shape), array in zip(*patterns, strict=True):
        leaf = leaves[leaf_index]
        # A scalar has an empty box, which is all of it.
        box = tuple(map(slice, start, np.add(start, shape)))
        leaf[box] = array.view(leaf.dtype).reshape(shape)
    return jax.tree.unflatten(self._structure, map(_put, leaves, self._like))

  def _cast(self, params: ArrayTree) -> ArrayTree:
    """The parameters with floating-point leaves in the serving dtype."""
    cast = lambda path, leaf: jnp.asarray(leaf, self._dtype_of(path, leaf))
    return jax.tree_util.tree_map_with_path(cast, params)

  def _dtype_of(self, path: Any, leaf: Any) -> np.dtype:
    """The dtype in which the leaf at `path` is served; ValueError for one that JAX narrows."""
    dtype = np.dtype(getattr(leaf, "dtype", jnp.result_type(leaf)))
    # Counters and other integers keep their dtypes.
    if self._dtype and jnp.issubdtype(dtype, jnp.floating):
      dtype = np.dtype(self._dtype)
    if (narrowed := jax.dtypes.canonicalize_dtype(dtype)) != dtype:
      raise ValueError(
        f"{jax.tree_util.keystr(path)} would be served in {dtype}, which JAX narrows to {narrowed}: "
        "convert the leaf, choose another dtype, or set jax_enable_x64"
      )
    return dtype


def _layout(served: ArrayTree) -> list[str]:
  """The name, dtype and shape of each leaf, in words, by which models are compared."""
  named = flatten.leaves_by_name(served).items()
  return [f"{name} {leaf.dtype}{list(leaf.shape)}" for name, leaf in named]


def _put(leaf: np.ndarray, like: Any) -> jax.Array:
  """`leaf` on the devices of `like`, or on the default device if JAX may move `like`."""
  # JAX may move an array that its user has put nowhere.
  sharding = getattr(like, "sharding", None)
  return jax.device_put(leaf, sharding if getattr(like, "committed", True) else None)
