r"""Hosts with several devices each, in the network lab: seconds a step, bytes that a host sends, and the loss.

A transformer over bytes (benchmarks/tasks/lm.py) is trained in three ways; a host is a process with CPU devices:

  dense    XLA's own: one program under jax.jit, tensor parallel inside a host, no jaxsparse in it
  flat     SparDL over all devices of all hosts, each of which is a worker with a copy of the parameters
  between  SparDL between hosts alone, tensor parallel inside

The batch is the same. Links between hosts are shaped, devices of a host meet in its memory, over gloo too: a collective
inside takes milliseconds on busy cores, whatever its size, so the model is one wide block. Bytes are those that the
network interface of a host has counted, headers included: the host that sent most, mean of the timed steps. Needs root.

Examples:
  python -m benchmarks.hierarchy
  python -m benchmarks.hierarchy --rate=100mbit --hosts=2 --devices=4 --way=dense,between
  python -m benchmarks.hierarchy --rate=none --json | jq '.[] | [.rate, .way, .seconds]'
"""

import json
import pathlib
import sys
import tempfile

import jax
import rich.table
from absl import flags
from jax.sharding import AxisType

from benchmarks import entry, netlab
from benchmarks.hierarchy.hosts import AXES, WAYS, Row, measured
from benchmarks.workers import make_console
from jaxsparse import launch

_RATE = flags.DEFINE_list("rate", ["1gbit", "100mbit"], "Speeds of the links, as tc writes them; none for any speed.")
_HOSTS = flags.DEFINE_integer("hosts", 3, "Hosts of the lab.")
_DEVICES = flags.DEFINE_integer("devices", 2, "Devices of each host.")
_WAY = flags.DEFINE_list("way", list(WAYS), "Ways to train.")
_WIDTH = flags.DEFINE_integer("width", 1536, "Of the transformer.")
_BLOCKS = flags.DEFINE_integer("blocks", 1, "Of the transformer.")
_BATCH = flags.DEFINE_integer("batch", 1, "Windows of 64 bytes for each device.")
_DENSITY = flags.DEFINE_float("density", 0.01, "Fraction of the entries that SparDL delivers.")
_STEPS = flags.DEFINE_integer("steps", 10, "Timed steps of each way.")
_ROWS = flags.DEFINE_string("rows", None, "Write the rows here and print nothing: how ranks tell who started them.")
_JSON = flags.DEFINE_bool(
  "json", False, "Print the rows as JSON on standard output, everything else on standard error."
)


def table(rows: list[Row]) -> rich.table.Table:
  """The rows, those of one rate together."""
  size = f"{rows[0].n:,} parameters, {_HOSTS.value} hosts with {_DEVICES.value} devices each"
  result = rich.table.Table(title=f"{size}, density {_DENSITY.value:g}")
  for head in ("rate", "way"):
    result.add_column(head, no_wrap=True)
  for head in ("s a step", "dense / this", "MB a host", "flat / this", "loss"):
    result.add_column(head, justify="right", no_wrap=True)
  for number, row in enumerate(rows):
    own = {other.way: other for other in rows if other.rate == row.rate}
    dense, flat = own.get("dense"), own.get("flat")
    result.add_row(
      row.rate,
      row.way,
      f"{row.seconds:.3f}",
      f"{dense.seconds / row.seconds:.2f}" if dense else "–",
      f"{row.bytes / 1e6:.3f}",
      f"{flat.bytes / row.bytes:.2f}" if flat and row.bytes else "–",
      f"{row.loss:.3f}",
      end_section=number + 1 == len(rows) or rows[number + 1].rate != row.rate,
    )
  return result


def _rank(path: pathlib.Path) -> None:
  """Measures in a rank of the lab; rank 0 writes the rows."""
  launch.join()
  shape = (_HOSTS.value, _DEVICES.value)
  mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 2)
  sizes = (_WIDTH.value, _BLOCKS.value, _BATCH.value, _DENSITY.value, _STEPS.value)
  rows = [measured(name, mesh, _RATE.value[0], *sizes) for name in _WAY.value]
  if jax.process_index() == 0:
    path.write_text(json.dumps(rows))


def _lab(rate: str, path: pathlib.Path) -> list[Row]:
  """Starts a rank on each host of a lab whose links are that fast, and reads the rows."""
  command = [sys.executable, "-m", "benchmarks.hierarchy", *sys.argv[1:], f"--rate={rate}", f"--rows={path}"]
  with netlab.lab(_HOSTS.value, None if rate == "none" else rate) as hosts:
    launch.run(command, _HOSTS.value, devices=_DEVICES.value, hosts=hosts)
  return [Row(*row) for row in json.loads(path.read_text())]


def main() -> None:
  """Measures every way at every rate, and reports."""
  for name in _WAY.value or [""]:
    if name not in WAYS:
      raise ValueError(f"--way={name}, choose from {', '.join(WAYS)}")
  for flag, least in ((_HOSTS, 2), (_DEVICES, 1), (_BLOCKS, 1), (_BATCH, 1), (_STEPS, 3)):
    if flag.value < least:
      raise ValueError(f"--{flag.name}={flag.value}, choose at least {least}")
  if launch.is_rank():
    if not _ROWS.value:
      raise ValueError("the lab starts its own ranks: run this as one program")
    _rank(pathlib.Path(_ROWS.value))
    return
  console, rows = make_console(stderr=_JSON.value), []
  with tempfile.TemporaryDirectory() as folder:
    for rate in _RATE.value:
      rows += _lab(rate, pathlib.Path(folder) / "rows.json")
      console.print(table(rows))
  if _JSON.value:
    print(json.dumps([row._asdict() for row in rows]))


if __name__ == "__main__":
  entry.run(main)
