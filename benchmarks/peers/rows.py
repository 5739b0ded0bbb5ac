"""The rows of `benchmarks.peers`, of updates and of trainings, their tables and their goals."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import rich.table

from benchmarks import netlab, report
from benchmarks.peers import ranks
from benchmarks.race.report import PACE, slow_first
from benchmarks.race.report import milliseconds as parts_of
from benchmarks.race.results import Pace, Results, Whole
from benchmarks.race.standings import Target, crossing

# Rounding errors of peers' results, relative to the norm of the mean; else 2⁻¹⁶.
_ROUNDING = {"fp16": 2**-10, "powersgd": 2**-14}
_ROUNDING |= {
  "hivemind:float16": 2**-10,
  "hivemind:uniform8": 2**-4,
  "hivemind:quantile8": 2**-4,
}
_OVER = {"ddp": "gloo", "processes": "gloo", "mpi": "MPI", "hivemind": "libp2p"}


class Row(NamedTuple):
  """A method in one network."""

  model: str
  hosts: int
  rate: str  # of the links
  program: str  # "ddp", "hivemind", or the engine of ours
  method: str
  seconds: float  # of an update, median over the rounds; of the slowest rank
  bytes: float  # that the host that sent most has sent, median
  # of ours the parts of results that break a law; of a peer the error / its bound, at
  # most 1 allowed
  wrong: float

  @property
  def is_peer(self) -> bool:
    """Whether it is one of theirs."""
    return self.program in ranks.UPDATES

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


def row_of(
  network: tuple[str, int, str],
  program: str,
  method: str,
  lines: Sequence[dict[str, Any]],
) -> Row:
  """The row of the lines that a method's rank 0 wrote in all rounds."""
  median = lambda name: statistics.median(
    value for line in lines for value in line[name]
  )
  wrong = max(line["wrong"] for line in lines)
  if program in ranks.UPDATES:
    wrong /= _ROUNDING.get(
      method if program == "hivemind" else method.partition(":")[0], 2**-16
    )
  return Row(*network, program, method, median("seconds"), median("bytes"), wrong)


def _peer(row: Row, rows: Sequence[Row]) -> Row | None:
  """Theirs of the same method in the same network."""
  here = (one for one in rows if one.is_peer and network_of(one) == network_of(row))
  return next(
    (one for one in here if one.plain == row.method.removesuffix(":wire=bf16")), None
  )


def table(rows: Sequence[Row]) -> rich.table.Table:
  """All methods, the fastest of a network first; × of the fastest peer there, and of the peer of the same method."""
  lines = []
  for row in sorted(
    rows, key=lambda row: (row.model, row.hosts, -netlab.bits(row.rate), row.seconds)
  ):
    best = min(
      one.seconds for one in rows if network_of(one) == network_of(row) and one.is_peer
    )
    same = None if row.is_peer else _peer(row, rows)
    name = ranks.named(row.method) if row.is_peer else row.method
    ratios = (
      report.ratio(row.seconds, best),
      report.ratio(row.seconds, same and same.seconds),
    )
    sizes = f"{row.bytes / 1e6:,.2f}", report.ratio(row.bytes, same and same.bytes)
    lines.append(
      [
        row.model,
        str(row.hosts),
        row.rate,
        name,
        _OVER[row.program],
        report.milliseconds(row.seconds),
        *ratios,
        *sizes,
      ]
    )
  heads = (
    "model",
    "hosts",
    "rate",
    "method",
    "over",
    "ms",
    "× best peer",
    "× same of DDP",
    "MB a host",
    "× same's",
  )
  return report.table(
    "an update",
    heads,
    lines,
    text=5,
    caption="ms: median, of the slowest rank; MB: of the interface",
  )


def goals(rows: Sequence[Row]) -> list[report.Goal]:
  """What must hold of the rows."""
  found = []
  for row in rows:
    most = 1.0 if row.is_peer else 0.0
    if not row.wrong <= most:
      found.append(
        report.goal(
          f"{row.program}, {row.method}, {row.hosts}, {row.rate}: right",
          row.wrong,
          most=most,
        )
      )
  for network in dict.fromkeys(map(network_of, rows)):
    here = sorted(
      (row for row in rows if network_of(row) == network), key=lambda row: row.seconds
    )
    theirs, own = (
      [row for row in here if row.is_peer == is_peer] for is_peer in (True, False)
    )
    name, bits = (
      f"{network[0]}, {network[1]} hosts, {network[2]}",
      netlab.bits(network[2]),
    )
    most = 0.25 if bits >= 1e9 else 0.35 if bits >= 1e8 else 0.7
    gain = own[0].seconds / theirs[0].seconds
    found.append(
      report.goal(
        f"{name}: ms, {own[0].method} / {ranks.named(theirs[0].method)} ≤ {most}",
        gain,
        most=most,
      )
    )
    for row in own:
      if row.method.startswith("powersgd:rank=4") and (peer := _peer(row, rows)):
        ratios = row.seconds / peer.seconds, row.bytes / peer.bytes
        label = f"{name}: {row.method}, {row.program}"
        found.append(report.goal(f"{label}, ms / DDP's ≤ 0.4", ratios[0], most=0.4))
        found.append(report.goal(f"{label}, bytes / DDP's ≤ 1", ratios[1], most=1.005))
  return found


class Trained(NamedTuple):
  """Whole trainings of a method with one optimizer, from several seeds, on links of one rate."""

  rate: str  # of the links
  method: str  # "DDP, …" or "torchft, …" of a peer
  optimizer: str  # name, rate and options
  seconds: report.Spread | None  # to dense's loss
  steps: report.Spread | None  # to dense's loss
  pace: Pace | None  # seconds a step and their parts, None where they were not measured

  @property
  def is_peer(self) -> bool:
    """Whether it is one of DistributedDataParallel or torchft."""
    return ranks.is_named_peer(self.method)


def trained(results: Results, steps: int) -> list[Trained]:
  """The trainings of a race and its peers to dense's loss after so many steps, the fastest at a rate first."""
  targets, groups = (
    Target(steps).of_seeds(results),
    dict[tuple[str, str, str], list[Whole]](),
  )
  for whole in results.rows["wholes"]:
    groups.setdefault((whole.rate, whole.method, whole.optimizer), []).append(whole)
  found = []
  for key, wholes in groups.items():
    ends = {one.seed: one for one in wholes}
    spread = lambda along, ends=ends: report.Spread.of(
      [
        crossing(ends[seed], loss, along) if seed in ends else None
        for seed, loss in targets.items()
      ]
    )
    found.append(
      Trained(
        *key, spread("seconds"), spread("steps"), results.pace_of(wholes[0], key[0])
      )
    )
  rates = slow_first(one.rate for one in found)
  return sorted(found, key=lambda one: (rates.index(one.rate), _mean(one)))


def _mean(one: Trained) -> float:
  """Seconds, infinite where a seed did not get to the target."""
  return one.seconds.mean if one.seconds and not one.seconds.missing else math.inf


def _best(rows: Sequence[Trained], rate: str, is_peer: bool) -> Trained | None:
  """The fastest of ours or of the peers at a rate that reaches the target from every seed."""
  return next(
    (
      row
      for row in rows
      if (row.rate, row.is_peer) == (rate, is_peer) and math.isfinite(_mean(row))
    ),
    None,
  )


def trained_table(rows: Sequence[Trained]) -> rich.table.Table:
  """Seconds to dense's loss; × of the fastest peer at the same rate."""
  lines = []
  for row in rows:
    best = _best(rows, row.rate, is_peer=True)
    ratio = (
      report.ratio(_mean(row), best and _mean(best))
      if math.isfinite(_mean(row))
      else "–"
    )
    lines.append(
      [row.rate, row.method, row.optimizer, report.number(row.seconds, ",.1f"), ratio]
    )
    lines[-1] += [report.number(row.steps, ",.0f"), parts_of(row.pace)]
    lines[-1] += [report.number(row.pace and row.pace.bytes / 1e6, ",.3f")]
  heads = [
    "rate",
    "method",
    "optimizer",
    "seconds",
    "× best peer",
    "steps",
    PACE,
    "MB a step",
  ]
  caption = "MB: sent by the interface of the busiest host; (1 missing): of a seed that was not trained, or not as far"
  return report.table(
    "to dense's loss", heads, lines, text=3, caption=caption, wraps=[*heads[:3], PACE]
  )


def trained_goals(rows: Sequence[Trained]) -> list[report.Goal]:
  """Ours has dense's loss twice as soon as the fastest peer."""
  found = []
  for rate in dict.fromkeys(row.rate for row in rows):
    own, peer = (_best(rows, rate, is_peer) for is_peer in (False, True))
    if own and peer:
      what = f"{rate}: seconds to dense's loss, {own.method} / {peer.method} ≤ 0.5"
      found.append(report.goal(what, _mean(own) / _mean(peer), most=0.5))
  return found
