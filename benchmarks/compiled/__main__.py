r"""Compile seconds, kernels, memory and schedule of every collective's update, compiled for devices that are not there.

Examples:
  make accelerators
  python -m benchmarks.compiled --platform=cuda --topology=1x1x64 --algorithms=spardl,onebit
"""

import pathlib
import sys
import time
from typing import Any, NamedTuple

from benchmarks.compiled import toolchain

toolchain.prepare()

from absl import flags

from benchmarks import entry, report, specs
from benchmarks.compiled import hlo, programs

_PLATFORM = flags.DEFINE_enum("platform", "cuda", list(toolchain.TOPOLOGIES), "Compile for H100 or for TPU.")
_TOPOLOGY = flags.DEFINE_string("topology", None, f"Devices, by default {toolchain.TOPOLOGIES}.")
_ALGORITHMS = flags.DEFINE_multi_string("algorithms", ["all"], specs.HELP)
_N = flags.DEFINE_integer("n", 14_728_266, "Gradient entries of a collective.", lower_bound=1)
_DENSITY = flags.DEFINE_float("density", 0.01, "Fraction of the entries to deliver.")
_TEXTS = flags.DEFINE_string("texts", None, "Folder for the optimized programs.")
_JSON = entry.define_json()


class Row(NamedTuple):
  """One compiled program; bytes and arrays are of one device."""

  program: str
  seconds: float  # of lowering and compilation
  kernels: int
  in_branches: int
  in_loops: int
  arrays: float  # moved, of n float32
  temp: float  # arrays of n float32
  sorts: int
  copies: int
  synchronizations: int
  exchanges: int
  asynchronous: int  # of the exchanges
  covered: float  # arrays of n float32 that kernels move between starts and dones


def _row(label: str, lower: Any, n: int) -> Row:
  start = time.perf_counter()
  compiled = lower().compile()
  seconds, text = time.perf_counter() - start, compiled.as_text()
  if _TEXTS.value:
    report.replace(pathlib.Path(_TEXTS.value) / f"{label.replace(':', '_')}.{_PLATFORM.value}.hlo", text)
  found = hlo.summarize(text, large=3 * n)
  temp = compiled.memory_analysis().temp_size_in_bytes
  exchanges = found.exchanges
  return Row(
    label, seconds, found.kernels, found.in_branches, found.in_loops, found.bytes / 4 / n, temp / 4 / n, found.sorts,
    found.copies, found.synchronizations, len(exchanges), sum(one.is_asynchronous for one in exchanges),
    sum(one.covered for one in exchanges) / 4 / n,
  )


def main() -> None:
  devices = toolchain.devices(_PLATFORM.value, _TOPOLOGY.value or toolchain.TOPOLOGIES[_PLATFORM.value])
  names = _ALGORITHMS.value
  if names == ["all"]:
    names = [*specs.labels_of(names), "spardl:selector=chunked"]
  print(("{:28s}" + " {:>8s}" * (len(Row._fields) - 1)).format(*[f[:8] for f in Row._fields]))
  for spec in specs.parse(names, len(devices), density=_DENSITY.value):
    row = _row(spec.label, lambda: programs.update(spec, devices, _N.value), _N.value)
    print(f"{row.program:28s} " + " ".join(f"{x:8.2f}" if isinstance(x, float) else f"{x:8d}" for x in row[1:]), flush=True)


if __name__ == "__main__":
  entry.run(main)
