"""Predicted seconds of one update on the wire: messages · α + bytes · β by each algorithm's formula."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import rich.table

import jaxsparse as js
from benchmarks import report, specs

BEST = "teams=best"


class Network(NamedTuple):
  """What a message costs."""

  name: str  # as the user wrote it
  alpha: float  # seconds a message
  beta: float  # seconds a byte


PRESETS = {
  network.name: network
  for network in (
    Network("1GbE", alpha=50e-6, beta=8e-9),  # TCP, 1 Gbit/s
    Network("25GbE", alpha=30e-6, beta=0.32e-9),  # TCP, 25 Gbit/s
    Network("400Gb", alpha=5e-6, beta=0.02e-9),  # RDMA, 400 Gbit/s
  )
}


class Predicted(NamedTuple):
  """One algorithm at one number of workers in one network."""

  network: str  # its name
  workers: int  # P
  algorithm: str  # as it was asked for
  teams: int | None  # what `teams=best` stands for here; None without it
  messages: int  # a worker
  words: int  # 4-byte words a worker
  seconds: float  # on the wire
  replicates: bool  # whether the total is the same on every worker


def parse_network(text: str) -> Network:
  """A network from the flag."""
  if text in PRESETS:
    return PRESETS[text]
  name, *options = text.split(":")
  try:
    values = {key: float(value) for key, _, value in (option.partition("=") for option in options)}
    network = Network(name, **values)
    if 0 < network.alpha < math.inf and 0 < network.beta < math.inf:
      return network
  except (TypeError, ValueError):
    pass
  choices = f"choose from {', '.join(PRESETS)}, or write name:alpha=seconds:beta=seconds, both above 0"
  raise ValueError(f"--network={text}, {choices}")


def predict(label: str, workers: int, networks: Sequence[Network], n: int, density: float) -> list[Predicted]:
  """One algorithm in every network."""
  teams: list[int | None] = [None]
  if BEST in label.split(":"):
    teams = [d for d in range(1, workers + 1) if workers % d == 0]
  choices = []
  for d in teams:
    (spec,) = specs.parse([label.replace(BEST, f"teams={d}")], workers, density=density)
    choices.append((d, spec, js.costs.predict(spec.name, n=n, workers=workers, **spec.config)))
  rows = []
  for network in networks:
    seconds = [cost.seconds(network.alpha, network.beta) for _, _, cost in choices]
    d, spec, cost = choices[seconds.index(min(seconds))]
    replicates = spec.collective.replicates
    rows.append(Predicted(network.name, workers, label, d, cost.messages, cost.words, min(seconds), replicates))
  return rows


def speed_table(rows: Sequence[Predicted], title: str) -> rich.table.Table:
  """What is fastest in each network at each P, beside dense and SparDL."""
  settings: dict[tuple[str, int], dict[str, Predicted]] = {}
  for row in rows:
    settings.setdefault((row.network, row.workers), {})[row.algorithm] = row
  lines = []
  for (network, workers), of in settings.items():
    ranked = sorted((row for row in of.values() if row.replicates), key=lambda row: row.seconds)
    names = [*(row.algorithm for row in ranked), "–", "–"][:2]
    dense, spardl, best = (of.get(label) for label in ("dense", "spardl", f"spardl:{BEST}"))
    gain = report.ratio(dense and dense.seconds, spardl and spardl.seconds, 1)
    times = map(_ms, (ranked[0] if ranked else None, dense, spardl))
    lines.append([network, *names, str(workers), *times, gain, _ms(best), str(best.teams) if best else "–"])
  heads = ("network", "fastest", "next", "P", "ms", "dense", "spardl", "dense / spardl", f"spardl:{BEST}", "d")
  caption = "ms an update; fastest of those whose total is the same everywhere"
  return report.table(title, heads, lines, text=3, caption=caption)


def _ms(row: Predicted | None) -> str:
  if row is None:
    return "–"
  ms = 1e3 * row.seconds
  return f"{ms:,.0f}" if ms >= 100 else f"{ms:#.3g}"
