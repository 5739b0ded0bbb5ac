"""Comparison of values that must be equal on all workers: parameters before training, replicated values on demand.

`comm.replication` proves on a jaxpr, before a program runs, that replicated results stay equal. This module compares
present values. Workers or processes exchange checksums, so that every process finds the same difference and raises.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
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
  leaves = [
    (jax.tree_util.keystr(path), str(jnp.result_type(leaf)), jnp.shape(leaf), _crc(leaf))
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  ]
  every = gather_where_different(engine, leaves, lambda: leaves)
  kinds = [[leaf[:3] for leaf in one] for one in every]
  if others := unlike_first(kinds):
    raise ValueError(
      f"{name}: those of {listing(others)} have other names, shapes or dtypes than those of process 0; on this process "
      f"they are {[leaf[:3] for leaf in leaves]}. Every process must give the same"
    )
  for row in zip(*every, strict=True):
    if others := unlike_first(row):
      raise ValueError(
        f"{name}{row[0][0]} differs between processes: {listing(others)} and process 0 give other values. Make it "
        "from the same seed on every process, not from jax.process_index()"
      )


def gather_where_different(engine: Engine, digest: Any, value: Callable[[], Any]) -> list[Any]:
  """What `value` returns on each process, as JSON has it, if their digests differ; else []. Every process must call.

  A digest is exchanged as an array of one shape, so that processes need not have equally many lines, leaves or shapes.
  """
  found = hashlib.sha256(json.dumps(digest).encode()).digest()[:8]
  digests = engine.of_processes(np.frombuffer(found, np.uint32))
  if np.all(digests == digests[0]):
    return []
  text = json.dumps(value()).encode()
  longest = int(engine.of_processes(np.array([len(text)], np.uint32)).max())
  texts = engine.of_processes(np.frombuffer(text.ljust(longest + -longest % 4), np.uint32))
  return [json.loads(text.tobytes()) for text in texts]


def unlike_first(values: Sequence[Any]) -> list[int]:
  """The numbers of the values that are not equal to the first one."""
  return [number for number, value in enumerate(values) if value != values[0]]


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
  flat = engine.flat
  trees, specs = tuple(trees), tuple(specs)
  arguments = engine.place(trees, specs)
  if inside := engine.shardings(trees, specs):  # the devices of a worker hold shards
    specs = jax.tree.map(lambda sharding: sharding.spec, inside)
  every = jax.tree.leaves(broadcast_specs(specs, trees), is_leaf=is_spec)
  same = [number for number, spec in enumerate(every) if axes_of_spec(spec).isdisjoint(names_of(engine.axis))]

  def checksums(*trees: Any) -> jax.Array:
    leaves = jax.tree.leaves(trees)
    sums = jnp.stack([_checksum(leaves[number]) for number in same])
    return jax.lax.all_gather(sums, flat.others).reshape(-1, *sums.shape) if flat.others else sums[None]

  rows = rows_of(flat, checksums, specs)(*arguments)  # [worker, device of it, array, 2]
  alike = np.stack([_first_alike(flat, every[number]) for number in same], axis=1)
  differs = np.any(rows != np.take_along_axis(rows[0], alike[..., None], axis=0), axis=3)  # [worker, device, array]
  wrong = differs.any(axis=(0, 1))
  if wrong.any():
    number = int(np.argmax(wrong))
    worker, device = np.argwhere(differs[..., number])[0]
    who = f"{listing(np.flatnonzero(differs[..., number].any(1)), 'worker', 'workers')} and worker 0 hold other values"
    if flat.others:
      who = f"device {device} of worker {worker} and device {alike[device, number]} of worker 0 hold other values"
    path, _ = jax.tree_util.tree_leaves_with_path(trees)[same[number]]
    raise ValueError(
      f"{names[path[0].idx]}{jax.tree_util.keystr(path[1:])} and {wrong.sum() - 1} other of {len(same)} arrays that "
      f"should be the same on every worker are not: {who}"
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


def _crc(leaf: Any) -> int:
  """The checksum of the first shard of a leaf on this process; 0 where other processes hold other parts."""
  if isinstance(leaf, jax.Array):
    if not leaf.is_fully_addressable and not leaf.is_fully_replicated:
      return 0
    leaf = local_shard(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
  return zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)


def listing(numbers: Sequence[int] | np.ndarray, one: str = "process", several: str = "processes") -> str:
  """Numbers as text: "process 1", or "processes 1, 2"."""
  return f"{one if len(numbers) == 1 else several} " + ", ".join(map(str, numbers))
