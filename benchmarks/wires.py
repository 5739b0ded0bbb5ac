r"""Bits of an entry on the wire, in every wire format, beside the least that they could be.

The update of n entries is compiled for two workers, and `js.costs.audit` counts what
one of them sends: k entries. The bound is the entropy of a set of indices, or of a
position in a chunk, and the bits of a value. Nothing runs.

Example:
  python -m benchmarks.wires --n=100000 --algorithms=spardl:wire=int4,topka:wire=int4
"""

import functools
import math
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np
import rich.table
from absl import flags
from jax.sharding import Mesh

import jaxsparse as js
from benchmarks import entry, report, specs
from benchmarks.compiled import programs
from benchmarks.workers import make_console
from jaxsparse.sparse.values import FORMATS

WORKERS = 2  # that send each other the k entries of one of them
_WIRES = ("coo", "f32", "bf16", "int8", "int4")
DEFAULT = [
  *(f"spardl:wire={wire}" for wire in _WIRES),
  *(f"spardl:density=0.001:wire={wire}" for wire in ("f32", "int4")),
  *(f"spardl:selector=chunked:wire={wire}" for wire in _WIRES[1:]),
  "chunktopk:density=0.015625:wire=2bit",
]

_ALGORITHMS = flags.DEFINE_multi_string("algorithms", DEFAULT, specs.HELP)
_N = flags.DEFINE_integer(
  "n", 14_728_266, "Gradient entries; VGG-16 by default.", lower_bound=1
)
_DENSITY = flags.DEFINE_float("density", 0.01, "Fraction of the entries to deliver.")
_REPORT_DIR = entry.define_report_dir("wires.json")


class Row(NamedTuple):
  """One wire format of one collective."""

  algorithm: str  # as it was asked for
  density: float  # of the entries that are delivered
  bits: float  # of an entry, in the compiled program
  entropy: float  # bits of an index
  value: int  # bits of a value

  @property
  def ratio(self) -> float:
    """The bits of an entry over the least."""
    return self.bits / (self.entropy + self.value)


def row(spec: specs.Spec, n: int) -> Row:
  """Compiles the update of a collective for two workers of this machine, and counts its bits."""
  devices = jax.devices()[:WORKERS]
  mesh = Mesh(np.array(devices), (programs.AXIS,))
  audit = js.costs.audit(programs.traced(spec, devices, n).lower(), mesh)
  collective: Any = spec.collective
  entries = collective.entries(n)
  block = n // WORKERS if spec.name == "spardl" else getattr(collective, "chunk", n)
  index = (
    math.log2(n / entries)
    if spec.config.get("selector") == "chunked"
    else entropy(round(block * entries / n), block)
  )
  bits = 8 * audit.bytes / entries
  value = FORMATS[spec.config.get("wire", "coo")].bits
  return Row(spec.label, spec.config["density"], bits, index, value)


def entropy(k: int, n: int) -> float:
  """Bits of an index of a set of k of n: log₂ C(n, k) / k.

  Example:
    >>> round(entropy(1, 256), 3), round(entropy(10_000, 1_000_000), 2)
    (8.0, 8.08)
  """
  ways = functools.reduce(
    float.__sub__, map(math.lgamma, (n + 1.0, k + 1.0, n - k + 1.0))
  )
  return ways / math.log(2) / k


HEADS = (
  "exchange",
  "density",
  "bits an entry",
  "entropy of an index",
  "bits of a value",
  "ratio",
)


def cells(one: Row) -> list[str]:
  """The row of a table."""
  numbers = f"{one.bits:.1f}", f"{one.entropy:.2f}", str(one.value), f"{one.ratio:.2f}"
  return [one.algorithm, f"{one.density:.2%}", *numbers]


def table(rows: list[Row]) -> rich.table.Table:
  """All rows."""
  return report.table("bits on the wire", HEADS, map(cells, rows))


def main() -> None:
  """Compiles every program, reports, and keeps the rows."""
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", WORKERS)
  # Of machine code, which sends nothing.
  jax.config.update("jax_disable_most_optimizations", True)
  found = specs.parse(_ALGORITHMS.value, WORKERS, density=_DENSITY.value)
  console, rows = make_console(), list[Row]()
  for spec in found:
    rows.append(row(spec, _N.value))
    console.print(*cells(rows[-1]), highlight=False, soft_wrap=True)
  console.print(table(rows))
  path = pathlib.Path(_REPORT_DIR.value) / "wires.json"
  report.keep(path, {"n": _N.value}, {"rows": [one._asdict() for one in rows]})


if __name__ == "__main__":
  entry.run(main)
