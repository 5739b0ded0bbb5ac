r"""What XLA makes of an update of each collective, and of a training step, for accelerators that need not be there.

Compiles for H100 or TPU on any machine: `make accelerators` installs the compilers. For
each collective the update of n float32, each device a worker; then the step of a
transformer of 124 M parameters, each host a worker whose devices share the parameters.
Nothing runs, so these are no milliseconds. Prints tables and goals, writes a JSON file;
the exit status is 1 where a goal is missed.

Examples:
  python -m benchmarks.compiled --platform=cuda --topology=1x1x64
  --algorithms=spardl,onebit python -m benchmarks.compiled --platform=tpu
  --topology=v5e:2x4 --steps=
"""

import functools
import importlib.metadata
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

from absl import flags

import jaxsparse as js
from benchmarks import entry, report, specs, workers
from benchmarks.compiled import hlo, programs, toolchain
from benchmarks.compiled.rows import HEADS, Row, goals

_PLATFORM = flags.DEFINE_enum(
  "platform", "cuda", list(toolchain.TOPOLOGIES), "H100 or TPU."
)
_TOPOLOGY = flags.DEFINE_string(
  "topology", None, f"Devices, as XLA names them; by default {toolchain.TOPOLOGIES}."
)
_ALGORITHMS = flags.DEFINE_multi_string(
  "algorithms", ["all"], f"{specs.HELP} None with --algorithms=."
)
_STEPS = flags.DEFINE_list(
  "steps", list(programs.METHODS), f"Steps to compile: {', '.join(programs.METHODS)}."
)
_HOSTS = flags.DEFINE_integer(
  "hosts",
  2,
  "Workers of a step, which have equally many of the devices.",
  lower_bound=2,
)
_N = flags.DEFINE_integer(
  "n",
  14_728_266,
  "Gradient entries of a collective that needs no shapes.",
  lower_bound=1,
)
_DENSITY = flags.DEFINE_float("density", 0.01, "Fraction of the entries to deliver.")
_TEXTS = flags.DEFINE_string("texts", None, "Folder for the optimized programs.")
_REPORT_DIR = entry.define_report_dir("compiled_PLATFORM_TOPOLOGY.json")

entry.require_choices(_STEPS, list(programs.METHODS))


def _row(label: str, lower: Callable[[], Any], n: int, between: str = "") -> Row:
  """Compiles a program of which a device holds n float32; opcodes of exchanges between workers begin with `between`."""
  start = time.perf_counter()
  compiled = lower().compile()
  seconds, text, memory = (
    time.perf_counter() - start,
    compiled.as_text(),
    hlo.memory_of(compiled),
  )
  if _TEXTS.value:
    report.replace(
      pathlib.Path(_TEXTS.value) / f"{label.replace(':', '_')}.{_PLATFORM.value}.hlo",
      text,
    )
  array = 4 * n
  found = hlo.summarize(text, large=3 * array // 4)
  exchanges = [
    one._replace(covered=one.covered / array)
    for one in found.exchanges
    if one.opcode.startswith(between)
  ]
  counts = (
    found.kernels,
    found.in_branches,
    found.in_loops,
    found.bytes / array,
    memory.temp / n,
    memory.peak / n,
  )
  return Row(
    label,
    seconds,
    *counts,
    found.sorts,
    found.copies,
    found.synchronizations,
    exchanges,
  )


def main() -> None:
  """Compiles all programs, and reports."""
  toolchain.prepare()
  platform = _PLATFORM.value
  topology = _TOPOLOGY.value or toolchain.TOPOLOGIES[platform]
  devices = toolchain.devices(platform, topology)
  names = _ALGORITHMS.value
  if names == ["all"]:
    # Not `rows`, which is for embeddings: the shapes here are of convolutions.
    names = [
      *(name for name in js.collective_names() if name != "rows"),
      "spardl:selector=chunked",
    ]
  cases = (
    [] if names == [""] else specs.parse(names, len(devices), density=_DENSITY.value)
  )
  if _STEPS.value and len(devices) % _HOSTS.value:
    raise ValueError(
      f"--hosts={_HOSTS.value} do not divide the {len(devices)} devices of {topology}"
    )
  updates, steps = list[Row](), list[Row]()
  for spec in cases:
    n = programs.entries(spec, _N.value)
    updates.append(_row(spec.label, programs.traced(spec, devices, n).lower, n))
    print(" ".join(updates[-1].cells), file=sys.stderr, flush=True)
  for method in _STEPS.value:
    n = programs.MODEL.entries * _HOSTS.value // len(devices)
    lower = functools.partial(programs.step, method, devices, _HOSTS.value)
    steps.append(_row(method, lower, n, between="collective-permute"))
    print(" ".join(steps[-1].cells), file=sys.stderr, flush=True)
  path = (
    pathlib.Path(_REPORT_DIR.value)
    / f"compiled_{platform}_{topology.replace(':', '_')}.json"
  )
  head = {
    "platform": platform,
    "topology": topology,
    "jax": importlib.metadata.version("jax"),
    "hosts": _HOSTS.value,
  }
  report.keep(
    path,
    head,
    {"updates": map(report.rounded, updates), "steps": map(report.rounded, steps)},
  )
  console, found = workers.make_console(), goals(platform, updates, steps)
  for title, rows in ("updates", updates), (f"steps of {_HOSTS.value} hosts", steps):
    if rows:
      console.print(
        report.table(
          f"{title}, {platform} {topology}",
          HEADS,
          [row.cells for row in rows],
          wraps=HEADS[1:],
        )
      )
  report.say(found, console)
  console.print(f"rows: {path}", soft_wrap=True)
  sys.exit(any(goal.met is False for goal in found))


if __name__ == "__main__":
  entry.run(main)
