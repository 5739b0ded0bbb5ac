r"""Bits of an entry on the wire, in every wire format, beside the least that they could be.

The update of n entries is compiled for two workers, and `js.costs.audit` counts what
one of them sends: k entries. The bound is the entropy of a set of indices, or of a
position in a chunk, and the bits of a value. Nothing runs.

Example:
  python -m benchmarks.wires --n=100000 --algorithms=spardl:wire=int4,topka:wire=int4
"""

import pathlib

import jax
from absl import flags

from benchmarks import entry, report, specs, wires
from benchmarks.workers import make_console

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


def main() -> None:
  """Compiles every program, reports, and keeps the rows."""
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", wires.WORKERS)
  # Optimizations of machine code, which sends nothing.
  jax.config.update("jax_disable_most_optimizations", True)
  found = specs.parse(_ALGORITHMS.value, wires.WORKERS, density=_DENSITY.value)
  console, rows = make_console(), list[wires.Row]()
  for spec in found:
    rows.append(wires.row(spec, _N.value))
    console.print(*wires.cells(rows[-1]), highlight=False, soft_wrap=True)
  console.print(wires.table(rows))
  path = pathlib.Path(_REPORT_DIR.value) / "wires.json"
  report.keep(path, {"n": _N.value}, {"rows": [one._asdict() for one in rows]})


if __name__ == "__main__":
  entry.run(main)
