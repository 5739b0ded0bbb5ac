"""The leaves of a model in the serving dtype, and the bit patterns of those that a process holds."""

import concurrent.futures
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.sparse import flatten, packing
from jaxsparse.weights.digests import BYTES, digest

_PIECE = 1 << 22  # entries that a thread reads at a time


class Patterns(NamedTuple):
  """The bit patterns that one process holds.

  Attributes:
    boxes: the number of a leaf, where a box of it starts, and the box's shape.
    arrays: the patterns of each box, u8, u16 or u32[entries]; two u32 for 8 bytes.
  """

  boxes: list[tuple[int, Sequence[int], Sequence[int]]]
  arrays: list[np.ndarray]

  def pieces(self) -> list[np.ndarray]:
    """Views of the arrays, long ones in parts."""
    return [
      array[start : start + _PIECE]
      for array in self.arrays
      for start in range(0, array.size, _PIECE)
    ]

  def digest(self) -> int:
    """62 bits of the patterns."""
    return digest(each(lambda piece: digest([piece]).to_bytes(BYTES), self.pieces()))

  def difference(self, new: "Patterns") -> list[np.ndarray]:
    """The words of a link from these patterns to new ones."""
    parts = each(_differences, self.pieces(), new.pieces())
    return [words for part in parts for words in part]

  def after(self, link: np.ndarray) -> "Patterns":
    """The patterns after a link, u8[bytes]."""
    words = link.view("<u4")
    new = Patterns(self.boxes, [array.copy() for array in self.arrays])
    for piece in new.pieces():
      changed, numbers, words = packing.unpack(words, piece.size)
      differences = (numbers >> 1) ^ -(numbers & 1)
      piece[changed] += differences.astype(piece.dtype)
    return new


class Model:
  """Names, shapes and serving dtypes of leaves.

  Args:
    params_like: arrays, or their shapes and dtypes.
    dtype: of leaves of floating-point numbers; None leaves all as they are.
  """

  def __init__(self, params_like: Any, dtype: Any):
    flatten.check_are_arrays(params_like, "params_like")
    self._dtype = dtype
    self._like, self._structure = jax.tree.flatten(params_like)
    self._served = jax.eval_shape(self._cast, params_like)
    self.layout = _layout(self._served)

  def patterns(self, params: Any) -> Patterns:
    """A copy of this process's shards; each shard belongs to one process.

    Raises:
      ValueError: for parameters of another model.
    """
    served = self._cast(params)
    self.check(_layout(served), "params")
    found = Patterns([], [])
    for number, leaf in enumerate(jax.tree.leaves(served)):
      # Other processes have the same array.
      if jax.process_index() and leaf.is_fully_addressable:
        continue
      for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
          start = [int(part.start or 0) for part in shard.index]
          found.boxes.append((number, start, shard.data.shape))
          found.arrays.append(_view(np.array(shard.data, order="C").reshape(-1)))
    return found

  def split(self, boxes: list[Any], body: np.ndarray) -> Patterns:
    """The patterns of an anchor, u8[bytes]."""
    served = jax.tree.leaves(self._served)
    arrays = []
    for number, _, shape in boxes:
      array = np.zeros(shape, served[number].dtype).reshape(-1)
      arrays.append(_view(array))
      array.view(np.uint8)[:] = body[: array.nbytes]
      body = body[array.nbytes :]
    return Patterns(boxes, arrays)

  def params(self, parts: Sequence[Patterns]) -> Any:
    """The leaves of all parts, where those of `params_like` are."""
    leaves = [np.zeros(x.shape, x.dtype) for x in jax.tree.leaves(self._served)]
    for patterns in parts:
      for (number, start, shape), array in zip(*patterns, strict=True):
        leaf = leaves[number]
        box = tuple(map(slice, start, np.add(start, shape)))
        leaf[box] = array.view(leaf.dtype).reshape(shape)
    return jax.tree.unflatten(self._structure, map(_put, leaves, self._like))

  def check(self, layout: Sequence[str], what: str) -> None:
    """Raises ValueError for the first leaf that is not the model's."""
    for other, own in itertools.zip_longest(layout, self.layout):
      if other != own:
        raise ValueError(f"{what}: leaf {other}, where params_like has {own}")

  def _cast(self, params: Any) -> Any:
    def cast(leaf: Any) -> jax.Array:
      array = jnp.asarray(leaf)
      is_float = jnp.issubdtype(array.dtype, jnp.floating)
      return array.astype(self._dtype) if is_float and self._dtype else array

    return jax.tree.map(cast, params)


def each(function: Callable[..., Any], *items: Sequence[Any]) -> list[Any]:
  """The results of a function, computed by threads: numpy and hashlib release the lock."""
  with concurrent.futures.ThreadPoolExecutor() as pool:
    return list(pool.map(function, *items))


def _layout(served: Any) -> list[str]:
  named = flatten.leaves_by_name(served).items()
  return [f"{name} {leaf.dtype}{list(leaf.shape)}" for name, leaf in named]


def _view(array: np.ndarray) -> np.ndarray:
  return array.view(f"u{min(array.itemsize, 4)}")


def _differences(old: np.ndarray, new: np.ndarray) -> list[np.ndarray]:
  """The patterns that changed, packed; the numbers 1, 2, 3, 4 are differences of -1, 1, -2, 2."""
  changed = np.flatnonzero(old != new)
  signed = (new[changed] - old[changed]).view(f"i{new.itemsize}").astype(np.int32)
  numbers = (signed << 1) ^ (signed >> 31)
  return packing.pack(changed, numbers.view(np.uint32), new.size)


def _put(leaf: np.ndarray, like: Any) -> jax.Array:
  """Where `like` is, unless JAX may move it."""
  sharding = getattr(like, "sharding", None)
  return jax.device_put(leaf, sharding if getattr(like, "committed", True) else None)
