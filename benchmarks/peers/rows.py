"""The rows of `benchmarks.peers`, their table and their goals."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import rich.table

from benchmarks import netlab, report

_ROUNDING = {"fp16": 2**-10, "powersgd": 2**-14}  # of peers' results, relative to the norm of the mean; else 2⁻¹⁶


class Row(NamedTuple):
  """A method in one network."""

  model: str
  hosts: int
  rate: str  # of the links
  program: str  # "ddp", or the engine of ours
  method: str
  seconds: float  # of an update, median over the rounds; of the slowest rank
  bytes: float  # that the host that sent most has sent, median
  wrong: float  # of ours the parts of results that break a law; of a peer the error / its bound, at most 1 allowed

  @property
  def plain(self) -> str:
    """The method without the size of buckets."""
    return self.method.partition(":bucket")[0]


def network_of(row: Row) -> tuple[str, int, str]:
  """Its model, hosts and rate."""
  return row[:3]


def fastest(rows: Iterable[Row]) -> list[Row]:
  """The fastest size of buckets of each method."""
  found: dict[tuple[str, str], Row] = {}
  for row in sorted(rows, key=lambda row: row.seconds):
    found.setdefault((row.program, row.plain), row)
  return list(found.values())


def row_of(network: tuple[str, int, str], program: str, method: str, lines: Sequence[dict[str, Any]]) -> Row:
  """The row of the lines that a method's rank 0 wrote in all rounds."""
  median = lambda name: statistics.median(value for line in lines for value in line[name])
  wrong = max(line["wrong"] for line in lines)
  if program == "ddp":
    wrong /= _ROUNDING.get(method.partition(":")[0], 2**-16)
  return Row(*network, program, method, median("seconds"), median("bytes"), wrong)


def _peer(row: Row, rows: Sequence[Row]) -> Row | None:
  """Theirs of the same method in the same network."""
  here = (one for one in rows if one.program == "ddp" and network_of(one) == network_of(row))
  return next((one for one in here if one.plain == row.method), None)


def table(rows: Sequence[Row]) -> rich.table.Table:
  """All methods, the fastest of a network first; × of the fastest peer there, and of the peer of the same method."""
  lines = []
  for row in sorted(rows, key=lambda row: (row.model, row.hosts, -netlab.bits(row.rate), row.seconds)):
    best = min(one.seconds for one in rows if network_of(one) == network_of(row) and one.program == "ddp")
    same = _peer(row, rows) if row.program != "ddp" else None
    name = f"DDP, {row.method}" if row.program == "ddp" else row.method
    where = {"ddp": "gloo", "processes": "gloo", "mpi": "MPI"}[row.program]
    ratios = report.ratio(row.seconds, best), report.ratio(row.seconds, same and same.seconds)
    sizes = f"{row.bytes / 1e6:,.2f}", report.ratio(row.bytes, same and same.bytes)
    lines.append([row.model, str(row.hosts), row.rate, name, where, report.milliseconds(row.seconds), *ratios, *sizes])
  heads = "model", "hosts", "rate", "method", "over", "ms", "× best of DDP", "× same of DDP", "MB a host", "× same's"
  return report.table(
    "an update", heads, lines, text=5, caption="ms: median, of the slowest rank; MB: of the interface"
  )


def goals(rows: Sequence[Row]) -> list[report.Goal]:
  """What must hold of the rows."""
  found = []
  for row in rows:
    most = 1.0 if row.program == "ddp" else 0.0
    if not row.wrong <= most:
      found.append(report.goal(f"{row.program}, {row.method}, {row.hosts}, {row.rate}: right", row.wrong, most=most))
  for network in dict.fromkeys(map(network_of, rows)):
    here = sorted((row for row in rows if network_of(row) == network), key=lambda row: row.seconds)
    theirs, own = ([row for row in here if (row.program == "ddp") == is_peer] for is_peer in (True, False))
    name, bits = f"{network[0]}, {network[1]} hosts, {network[2]}", netlab.bits(network[2])
    most = 0.25 if bits >= 1e9 else 0.35 if bits >= 1e8 else 0.7
    gain = own[0].seconds / theirs[0].seconds
    found.append(report.goal(f"{name}: ms, {own[0].method} / DDP's {theirs[0].method} ≤ {most}", gain, most=most))
    for row in own:
      if row.method == "powersgd:rank=4" and (peer := _peer(row, rows)):
        ratios = row.seconds / peer.seconds, row.bytes / peer.bytes
        found.append(report.goal(f"{name}: PowerSGD, {row.program}, ms / DDP's ≤ 0.4", ratios[0], most=0.4))
        found.append(report.goal(f"{name}: PowerSGD, {row.program}, bytes / DDP's ≤ 1", ratios[1], most=1.005))
  return found
