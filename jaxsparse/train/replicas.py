"""Comparison of what must be the same everywhere: values on all workers, values and programs on all processes.

`comm.replication` proves on a jaxpr, before a program runs, that replicated results
stay equal. `check_replicas` compares present values, by checksums that workers
exchange. Processes that run other programs, with another learning rate or other shapes,
would train apart or wait for each other for ever. So before a program runs for the
first time, they exchange a digest of it and of its head: versions, settings, arguments,
collectives. Where these differ, they exchange heads, which are short, so that every
process finds the same first difference and raises the same error.
"""

import hashlib
import itertools
import json
import math
import os
import pathlib
import re
import sys
import warnings
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import PartitionSpec

from jaxsparse import _compat
from jaxsparse.comm import pack
from jaxsparse.comm.replication import axes_of_spec
from jaxsparse.train.engine import Engine, local_shard, name_argument, rows_of
from jaxsparse.train.program_digest import program_digest
from jaxsparse.transform.checks import is_traced
from jaxsparse.transform.state import is_reduce_state
from jaxsparse.types import ArrayTree, SpecTree

_PATIENCE = 300.0  # seconds; one process may evaluate before a step
# Settings of JAX, and flags of XLA, with which one jaxpr has other results, and flags
# that change none.
_SETTINGS = (
  "jax_disable_most_optimizations",
  "jax_random_seed_offset",
  "jax_threefry_gpu_kernel_lowering",
  "jax_threefry_partitionable",
)
_HARMLESS_FLAGS = ("--xla_dump", "--xla_force_host_platform_device_count")
# What to do where programs differ, and nothing that is short enough to be exchanged.
_TO_SEE = (
  ". Versions, settings and arguments are the same. To see the difference, write the program to a file on each "
  "process, and compare the files with diff: step.lower(params, js.abstract_state(tx, params, mesh), batch).as_text(), "
  "or for the initial state str(jax.make_jaxpr(lambda params: js.init(tx, params, mesh))(params))"
)


def unlike_first(values: Sequence[Any]) -> list[int]:
  """The numbers of the values that are not equal to the first one."""
  return [index for index, value in enumerate(values) if value != values[0]]


def wait_for_all(tree: ArrayTree, now: str) -> None:
  """Waits for the other processes that hold a part of a tree, before they compare a step that has run before.

  Args:
    tree: global arrays; the processes of their devices are waited for, `_PATIENCE`
      seconds (300) at most.
    now: what the step has on this process, for the error.

  Raises:
    RuntimeError: if one of them does not come in time, for instance because it runs the
      program with the shapes of before, without a comparison.
  """
  what = "the training step"
  try:
    _compat.wait_for_processes(tree, what, _PATIENCE)
  except RuntimeError:
    raise RuntimeError(
      f"{what} of process {jax.process_index()} has arguments of other shapes than before, and within {_PATIENCE:g} s "
      f"another process did not come to a step that has. Give the same shapes on every process in each step; here {now}"
    ) from None  # The error of JAX would say something else of the same cause.


def check_traced(
  engine: Engine,
  what: str,
  program: Any,
  arguments: Sequence[Any],
  makes_state: bool = False,
) -> None:
  """Checks that a jitted function, and its result if that is the state, are the same on all processes.

  The function is traced; JAX keeps the trace for the call with the same arguments. With
  one process, or under a trace, there is nothing to compare.

  Args:
    engine: the workers.
    what: the name of the program, for the error.
    program: the jitted function.
    arguments: of the program.
    makes_state: whether the result is an optax state, whose dtypes, shapes and
      collectives are compared by lines, so that an error names the array.
  """
  if engine.processes > 1 and not is_traced(arguments):
    traced = program.trace(*arguments)
    check_same(
      engine,
      what,
      # None in the place of the parameters: `described` names the second item "state".
      described((None, traced.out_info)) if makes_state else (),
      traced.jaxpr,
    )


def check_same(
  engine: Engine, what: str, head: Sequence[str], jaxpr: core.ClosedJaxpr | None = None
) -> None:
  """Checks that all processes of an engine have the same head and the same jaxpr; every process must call.

  Warns where their CPUs have different instructions, for then results may differ in
  bits.

  Args:
    engine: the workers, of several processes.
    what: the name of the program, for the error.
    head: lines that say what the program is made of.
    jaxpr: of the program; None compares the heads alone.

  Raises:
    ValueError: naming the first line of the head that differs, else the digests of the
      jaxpr; on every process.
  """
  head = [
    f"jax {jax.__version__}, jaxsparse {sys.modules['jaxsparse'].__version__}",
    *_settings(),
    *head,
  ]
  digest = f"a jaxpr with the digest {program_digest(jaxpr)}" if jaxpr else "no jaxpr"
  # [instructions, digest, head] of each process; empty if all are equal.
  every = _gather_where_different(engine, [_instructions(), digest, head])
  if not every:
    return
  computing, digests, heads = zip(*every, strict=True)
  # Other instructions lead to a warning, other code to an error.
  if unlike := unlike_first(computing):
    warnings.warn(
      f"{what} of {listing(unlike)} is computed with other instructions than that of process 0 "
      f"({computing[unlike[0]]!r} and {computing[0]!r}), so results may differ in bits: give all processes "
      "XLA_FLAGS=--xla_cpu_max_isa=AVX2, or the most that all have",
      stacklevel=2,
    )
  # Line by line of all heads, then the digests. Where only digests differ, `_TO_SEE`
  # tells how to find the difference.
  for row in [*itertools.zip_longest(*heads, fillvalue="nothing"), digests]:
    if others := unlike_first(row):
      raise ValueError(
        f"{what} of {listing(others)} is not that of process 0. The first difference is `{row[0]}` on process 0, and "
        f"`{row[others[0]]}` on process {others[0]}. Every process must run the same code with the same options, "
        "seeds, shapes and versions; data of a process's own belongs in the batch"
        f"{_TO_SEE if row is digests else ''}"
      )


def _gather_where_different(engine: Engine, value: object) -> list[Any]:
  """The value of each process, through JSON, if not all are equal; else []. Every process must call.

  Digests are exchanged first: they are short, and have one shape on all processes.
  """
  text = json.dumps(value).encode()
  # 64 bits, as two u32: arrays have no 64-bit integers without x64.
  digest = np.frombuffer(hashlib.sha256(text).digest()[:8], np.uint32)
  digests = engine.of_processes(digest)
  if np.all(digests == digests[0]):
    return []
  lengths = engine.of_processes(np.array([len(text)], np.uint32))
  longest = int(lengths.max())
  # Arrays of all processes have one length, in words of 4 bytes: shorter texts are
  # padded by spaces, which JSON ignores.
  texts = engine.of_processes(
    np.frombuffer(text.ljust(longest + -longest % 4), np.uint32)
  )
  return [json.loads(text.tobytes()) for text in texts]


def _instructions() -> str:
  """The vector instructions for which this process compiles, by name, sorted: "avx avx2 fma".

  "" where they do not matter or are not known: for devices that are no CPUs, without
  /proc/cpuinfo, or if XLA_FLAGS sets them, which `_settings` compares.
  """
  cpuinfo = pathlib.Path("/proc/cpuinfo")
  if (
    jax.default_backend() != "cpu"
    or "xla_cpu_max_isa" in os.environ.get("XLA_FLAGS", "")
    or not cpuinfo.exists()
  ):
    return ""
  return " ".join(
    sorted({*re.findall(r"\b(?:sse4|avx|amx|fma|sve|asimd)\w*", cpuinfo.read_text())})
  )


def _settings() -> list[str]:
  """Lines for `check_same` of the settings of this process that change results without changing a jaxpr."""
  flags = os.environ.get("XLA_FLAGS", "").split()
  flags = sorted(flag for flag in flags if not flag.startswith(_HARMLESS_FLAGS))
  # Some settings are attributes in some versions of JAX only.
  settings = {
    name: getattr(jax.config, name, jax.config.values.get(name)) for name in _SETTINGS
  }
  return [
    f"XLA_FLAGS={' '.join(flags)}",
    *(f"{name}={value}" for name, value in settings.items()),
  ]


def described(
  arguments: tuple[ArrayTree, ...], shardings: SpecTree = None
) -> list[str]:
  """Lines for `check_same`: the collectives in the state, then dtype, shape and sharding of each array.

  Args:
    arguments: of a step, (params, state, batch, named) or the first of these; None
      stands for an argument that is left out.
    shardings: of each array; None where each worker is one device.
  """
  leaf_shardings = jax.tree.leaves(shardings)
  lines = []
  for index, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(arguments)):
    sharded = f" sharded as {leaf_shardings[index].spec}" if leaf_shardings else ""
    lines.append(f"{name_argument(path)} is {_type(x)}{sharded}")
  for path, leaf in jax.tree_util.tree_leaves_with_path(
    arguments, is_leaf=is_reduce_state
  ):
    if is_reduce_state(leaf) and leaf.layout.method:
      labels = ", ".join(collective.label for collective in leaf.collectives)
      # In front: shapes follow from collectives, and errors name the first difference.
      lines.insert(0, f"{name_argument(path)} is that of {labels}")
  return lines


def checksums(name: str, tree: ArrayTree) -> list[str]:
  """Lines for `check_same` of the values of a pytree: checksums, which are shorter to exchange than values."""
  return [
    f"{name}{jax.tree_util.keystr(path)} is {_type(leaf)} with the checksum {_crc(leaf)}"
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  ]


def _type(x: Any) -> str:
  return f"{jnp.result_type(x).name}{list(np.shape(x))}"


def _crc(leaf: Any) -> int:
  """The CRC-32 of the first shard of a leaf on this process; 0 where processes hold different parts of the leaf.

  Such parts may differ, and every process must have the same line.
  """
  if (
    isinstance(leaf, jax.Array)
    and not leaf.is_fully_addressable
    and not leaf.is_fully_replicated
  ):
    return 0
  held = np.ascontiguousarray(local_shard(_compat.words_of_keys(leaf)))
  return zlib.crc32(held.reshape(-1).view(np.uint8).data)


def check_replicas(
  engine: Engine, trees: tuple[ArrayTree, ...], specs: tuple[SpecTree, ...]
) -> None:
  """Checks that leaves with an empty spec are bitwise the same on all devices of all workers; every process must call.

  Args:
    engine: the workers.
    trees: the parameters and the state.
    specs: a prefix pytree of specs for each tree, as `placed` makes them.

  Raises:
    ValueError: naming the first leaf that differs and the workers, on every process.
  """
  # Devices inside a worker are compared, too: `flat` maps a program over all devices,
  # and `flat.others` are the axes inside a worker.
  flat = engine.flat
  arguments = engine.place(trees, specs)
  # None where a worker is one device; else specs along the axes inside a worker, too.
  if inside := engine.shardings(trees, specs):
    specs = jax.tree.map(lambda sharding: sharding.spec, inside)
  spec_of_leaf = jax.tree.leaves(jax.tree.broadcast(specs, trees))
  # Indices of the leaves that are not cut along the workers. Leaves that are cut, such
  # as residuals, are each worker's own and may differ.
  compared = [
    leaf_index
    for leaf_index, spec in enumerate(spec_of_leaf)
    if axes_of_spec(spec).isdisjoint(_compat.names_of(engine.axis))
  ]

  def checksums(*trees: ArrayTree) -> jax.Array:
    leaves = jax.tree.leaves(trees)
    sums = jnp.stack(
      [
        hashed(pack(_compat.words_of_keys(leaves[leaf_index])))
        for leaf_index in compared
      ]
    )
    # u32[device, array, 2]: the hashes of all devices of this worker.
    return (
      jax.lax.all_gather(sums, flat.others).reshape(-1, *sums.shape)
      if flat.others
      else sums[None]
    )

  # u32[worker, device of the worker, array, 2]
  hashes = rows_of(flat, checksums, specs)(*arguments)
  # i[device, array]: the device of worker 0 that holds the same entries.
  same_shard = np.stack(
    [_first_alike(flat, spec_of_leaf[leaf_index]) for leaf_index in compared], axis=1
  )
  # u32[device, array, 2]: the hashes of worker 0, which all workers must have.
  expected = np.take_along_axis(hashes[0], same_shard[..., None], axis=0)
  # bool[worker, device, array]; axis 3 has the two hashes of an array.
  differs = np.any(hashes != expected, axis=3)
  wrong = differs.any(axis=(0, 1))
  if wrong.any():
    # The index in `compared` of the first array that differs; then the first device
    # with other values of this array.
    first = int(np.argmax(wrong))
    worker, device = np.argwhere(differs[..., first])[0]
    workers = listing(
      np.flatnonzero(differs[..., first].any(axis=1)), "worker", "workers"
    )
    who = f"{workers} and worker 0 hold other values"
    if flat.others:
      who = f"device {device} of worker {worker} and device {same_shard[device, first]} of worker 0 hold other values"
    path, _ = jax.tree_util.tree_leaves_with_path(trees)[compared[first]]
    raise ValueError(
      f"{name_argument(path)} and {wrong.sum() - 1} other of {len(compared)} arrays that "
      f"should be the same on every worker are not: {who}"
    )


def _first_alike(flat: Engine, spec: PartitionSpec) -> np.ndarray:
  """For each device of a worker, i[S], the first one that holds the same shard of an array with this spec.

  That is device 0, unless the spec cuts the array along an axis inside a worker.
  Devices are numbered in the order of `flat.others`, the axes inside.
  """
  sizes = [flat.axes[name] for name in flat.others]
  cut = axes_of_spec(spec)
  devices = np.arange(math.prod(sizes)).reshape(sizes)
  # Along an axis that cuts the array each device holds another shard: its index stays.
  # Along other axes index 0 stands for all.
  first = devices[
    tuple(slice(None) if name in cut else slice(1) for name in flat.others)
  ]
  return np.broadcast_to(first, sizes).reshape(-1)


def hashed(words: jax.Array) -> jax.Array:
  """u32[…, 2] of u32[…, n]: two sums over i of hashes of word i and of i, modulo 2³².

  The hash is not linear: with other signs, a factor or a permutation the sums are as
  good as random, so that other words have both sums equal with a probability of 2⁻⁶⁴. A
  change of one word always changes the first sum, since `_mixed` is a bijection.
  """
  # Sums modulo 2³² do not depend on the order in which a device adds.
  # `_mixed(0)` is 0. The constants, fractions of the golden ratio and of √2, keep words
  # of zeros from being hashed to 0.
  index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, words.ndim - 1)
  first = _mixed(words ^ _mixed(index + jnp.uint32(0x9E3779B9)))
  second = _mixed(first + jnp.uint32(0x6A09E667))
  sums = [jnp.sum(hashes, -1, dtype=jnp.uint32) for hashes in (first, second)]
  return jnp.stack(sums, -1)


def _mixed(x: jax.Array) -> jax.Array:
  """The finalizer of MurmurHash3: each bit of u32 x changes each bit of the result with a probability of about 1/2."""
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    x = (x ^ (x >> shift)) * jnp.uint32(factor)
  return x ^ (x >> 16)


def listing(
  numbers: Sequence[int] | np.ndarray, noun: str = "process", plural: str = "processes"
) -> str:
  """Numbers as text: "process 1", or "processes 1, 2"."""
  return f"{noun if len(numbers) == 1 else plural} " + ", ".join(map(str, numbers))
