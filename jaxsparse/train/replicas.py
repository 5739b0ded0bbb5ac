"""Comparison of values that must be equal on all workers: parameters before training, replicated values on demand.

`comm.replication` proves on a jaxpr, before a program runs, that replicated results stay equal. This module compares
present values. Workers or processes exchange checksums, so that every process finds the same difference and raises.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxsparse._compat import names_of
from jaxsparse.comm import pack
from jaxsparse.comm.replication import axes_of_spec
from jaxsparse.train.engine import Engine, broadcast_specs, is_spec, local_shard, rows_of


def check_processes(engine: Engine, tree: Any, name: str) -> None:
  """Checks that all processes of an engine give the same values; every process must call.

  Args:
    engine: the workers.
    tree: a pytree of arrays; of arrays that are sharded over processes only the shapes are compared.
    name: the name of the tree, for the error.

  Raises:
    ValueError: naming the first leaf that differs and the processes, on every process.
  """
  if engine.processes == 1:
    return
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  shapes = [(jax.tree_util.keystr(path), jnp.shape(leaf), str(jnp.result_type(leaf))) for path, leaf in leaves]
  sums = [0 if _is_sharded(leaf) else zlib.crc32(_bytes(leaf)) for _, leaf in leaves]
  # Two numbers, so that processes with different numbers of leaves exchange arrays of one shape.
  shape, values = gather_numbers(engine, [zlib.crc32(repr(shapes).encode()), zlib.crc32(repr(sums).encode())]).T
  if (others := np.flatnonzero(shape != shape[0])).size:
    raise ValueError(
      f"{name}: those of {listing(others)} have other names, shapes or dtypes than those of process 0; on this process "
      f"they are {shapes}. Every process must give the same"
    )
  if np.all(values == values[0]):
    return
  rows = gather_numbers(engine, sums)
  number = int(np.flatnonzero(np.any(rows != rows[0], axis=0))[0])
  others = np.flatnonzero(rows[:, number] != rows[0, number])
  raise ValueError(
    f"{name}{shapes[number][0]} differs between processes: {listing(others)} and process 0 give other values. Make it "
    "from the same seed on every process, not from jax.process_index()"
  )


def check_replicas(engine: Engine, trees: Sequence[Any], specs: Sequence[Any], names: Sequence[str]) -> None:
  """Checks that leaves with an empty spec are bitwise the same on all devices of all workers; every process must call.

  Args:
    engine: the workers.
    trees: pytrees of arrays.
    specs: a prefix pytree of specs for each tree.
    names: a name for each tree, for the error.

  Raises:
    ValueError: naming the first leaf that differs and the workers, on every process.
  """
  every = broadcast_specs(tuple(specs), tuple(trees))
  axes = set(names_of(engine.axis))
  split = [not axes.isdisjoint(axes_of_spec(spec)) for spec in jax.tree.leaves(every, is_leaf=is_spec)]
  paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tuple(trees))]
  same = [path for path, is_split in zip(paths, split, strict=True) if not is_split]

  def checksums(*trees: Any) -> jax.Array:
    leaves = [leaf for leaf, is_split in zip(jax.tree.leaves(trees), split, strict=True) if not is_split]
    sums = jnp.stack([_checksum(leaf) for leaf in leaves])
    return jax.lax.all_gather(sums, flat.others).reshape(-1, *sums.shape) if flat.others else sums[None]

  flat = engine.flat
  arguments = engine.place(tuple(trees), tuple(specs))
  if inside := engine.shardings(tuple(trees), tuple(specs)):  # the devices of a worker hold shards
    specs = jax.tree.map(lambda sharding: sharding.spec, inside)
    every = specs
  rows = rows_of(flat, checksums, tuple(specs))(*arguments)  # [worker, device of it, array, 2]
  own = [spec for spec, is_split in zip(jax.tree.leaves(every, is_leaf=is_spec), split, strict=True) if not is_split]
  alike = np.stack([_first_alike(flat, spec) for spec in own], axis=1)
  differs = np.any(rows != np.take_along_axis(rows[0], alike[..., None], axis=0), axis=3)  # [worker, device, array]
  if differs.any():
    number = int(np.flatnonzero(differs.any(axis=(0, 1)))[0])
    worker, device = np.argwhere(differs[..., number])[0]
    who = f"{listing(np.flatnonzero(differs[..., number].any(1)), 'worker', 'workers')} and worker 0 hold other values"
    if flat.others:
      who = f"device {device} of worker {worker} and device {alike[device, number]} of worker 0 hold other values"
    leaf = names[same[number][0].idx] + jax.tree_util.keystr(same[number][1:])
    raise ValueError(
      f"{leaf} and {differs.any(axis=(0, 1)).sum() - 1} other of {len(same)} arrays that should be the "
      f"same on every worker are not: {who}"
    )


def _first_alike(flat: Engine, spec: PartitionSpec) -> np.ndarray:
  """For each device of a worker the first one that holds the same shard: device 0, unless the spec cuts the array."""
  sizes = [flat.axes[name] for name in flat.others]
  if not sizes:
    return np.zeros(1, np.int64)
  cut = np.array([name in axes_of_spec(spec) for name in flat.others])
  return np.ravel_multi_index(tuple(np.indices(sizes).reshape(len(sizes), -1) * cut[:, None]), sizes)


def _checksum(x: jax.Array) -> jax.Array:
  """u32[2] of an array: `hashed` of its words."""
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  return hashed(pack(x))


def hashed(words: jax.Array) -> jax.Array:
  """u32[…, 2] of u32[…, n]: two sums over i of hashes of word i and of i, modulo 2³².

  A hash of both is not linear, so signs, factors and permutations change the sums as if these were drawn anew: others
  have the same two with a probability of 2⁻⁶⁴. A change of one word always changes the first sum, since `_mixed` is a
  bijection.
  """
  index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, words.ndim - 1)
  first = _mixed(words ^ _mixed(index + jnp.uint32(0x9E3779B9)))
  second = _mixed(first + jnp.uint32(0x6A09E667))
  return jnp.stack([jnp.sum(each, -1, dtype=jnp.uint32) for each in (first, second)], -1)


def _mixed(x: jax.Array) -> jax.Array:
  """The finalizer of MurmurHash3: each bit of u32 x changes each bit of the result with a probability of about 1/2."""
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    x = (x ^ (x >> shift)) * jnp.uint32(factor)
  return x ^ (x >> 16)


def gather_numbers(engine: Engine, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
  """The numbers of all processes, u32[processes, …]; every process must call."""
  return engine.of_processes(np.array(numbers, np.uint32))


def _is_sharded(leaf: Any) -> bool:
  return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and not leaf.is_fully_replicated


def _bytes(leaf: Any) -> memoryview:
  """The first shard of a leaf on this process, as bytes."""
  if isinstance(leaf, jax.Array):
    leaf = local_shard(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
  return np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data


def listing(numbers: np.ndarray, one: str = "process", several: str = "processes") -> str:
  """Numbers as text: "process 1", or "processes 1, 2"."""
  return f"{one if numbers.size == 1 else several} " + ", ".join(map(str, numbers))
