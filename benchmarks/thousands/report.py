"""Tables of `benchmarks.thousands`: the columns of each part, with the field of a row and its format."""

from collections.abc import Callable, Mapping
from typing import Any

import rich.table

from benchmarks.report import number, table

Row = dict[str, Any]
Column = Callable[[Row], str]
_plain = lambda name, form="": lambda row: number(row[name], form)
_kilo = lambda name: lambda row: f"{row[name] / 1000:,.0f}"
_last = lambda name, form=",.0f": (
  lambda row: " / ".join(f"{value:{form}}" for value in row[name])
)

_SIMULATED: Mapping[str, Column] = {
  "workers": _plain("workers", ",.0f"),
  "failures an hour": _plain("failures", "g"),
  "K / P": _plain("quorum"),
  "window, s": lambda row: f"{row['grace']}".removesuffix(".0"),
  "goodput": _plain("goodput", ".1%"),
  "lockstep": _plain("lockstep", ".1%"),
  "s a round": _plain("round", ".0f"),
  "exchange, s": _plain("exchange", ".1f"),
  "rounds failed / counted": lambda row: f"{row['failed']} / {row['counted']}",
  "members": _plain("members", ".0%"),
  "server, messages/s in": _plain("messages_in", ",.0f"),
  "out": _plain("messages_out", ",.0f"),
  "kB/s in": _kilo("bytes_in"),
  "kB/s out": _kilo("bytes_out"),
  "core": _plain("cpu", ".1%"),
}
# the first of fixed windows that are as good
_best = lambda row, kind: max(row[kind], key=lambda pair: pair[1])
_seconds = lambda kind: lambda row: f"{_best(row, kind)[0]:g}"
_useful = lambda kind: lambda row: f"{_best(row, kind)[1]:.1%}"
_loss = lambda row: _best(row, "training")[1] - row["auto"]["useful"]
_WINDOWS: Mapping[str, Column] = {
  "scenario": lambda row: row["scenario"],
  "τ / H": _plain("delay"),
  "auto: useful": lambda row: f"{row['auto']['useful']:.1%}",
  "late": lambda row: f"{row['auto']['late']:.1%}",
  "goodput": lambda row: f"{row['auto']['goodput']:.1%}",
  "best fixed that trains on, s": _seconds("training"),
  "useful": _useful("training"),
  "auto loses, points": lambda row: f"{100 * _loss(row):.1f}",
  "best fixed that waits (one seed), s": _seconds("waiting"),
  "useful ": _useful("waiting"),
}
_STATE: Mapping[str, Column] = {
  "workers": _plain("workers", ",.0f"),
  "MB of the server": _plain("memory", ".1f"),
  "µs of CPU a message": lambda row: f"{1e6 * row['cpu_event']:.0f}",
  "bytes that begin the first round, to each": _plain("first", ",.0f"),
  "the next": _plain("later", ",.0f"),
}
_LEVELS: Mapping[str, Column] = {
  "workers": _plain("workers", ",.0f"),
  "in a group": _plain("group", ".0f"),
  "seed": _plain("seed"),
  "failures an hour": _plain("failures", "g"),
  "goodput": _plain("goodput", ".1%"),
  "of groups": _plain("inner", ".1%"),
  "s a round of a group": _plain("inner_round", ".0f"),
  "failed / counted": lambda row: f"{row['inner_failed']:,} / {row['inner_counted']:,}",
  "s a round among groups": lambda row: number(row["outer"]["round"], ".0f"),
  "failed / counted ": lambda row: (
    f"{row['outer']['failed']} / {row['outer']['counted']}"
  ),
}
_SERVER: Mapping[str, Column] = {
  "join at once": _plain("workers"),
  "seconds until all are there": _plain("joining", ".2f"),
  "members of a round": _plain("members", ".0f"),
  "joined": _plain("joined"),
  "left": _plain("left"),
  "killed": _plain("killed"),
  "rounds counted": _plain("rounds"),
  "failed": _plain("failed"),
  "s a round": _plain("gap", ".2f"),
  "longest": _plain("longest", ".1f"),
  "MB at first / with all / at the end": _last("memory", ".1f"),
  "descriptors": _last("files"),
  "threads": _plain("threads"),
  "core": _plain("cpu", ".1%"),
}
_PROCESSES: Mapping[str, Column] = {
  "processes": _plain("workers"),
  "groups": _plain("groups"),
  "rounds of all": _plain("rounds"),
  "among groups": _plain("above"),
  "s until all have joined": _plain("joining", ".0f"),
  "s a round": _plain("gap", ".1f"),
  "MB of a worker": _plain("memory", ".0f"),
  "anchors equal": lambda row: "yes" if row["equal"] else "no",
}


def make(part: str, rows: list[Row]) -> rich.table.Table:
  """The table of a part, by the number of workers."""
  columns = {
    "simulated": _SIMULATED,
    "windows": _WINDOWS,
    "state": _STATE,
    "levels": _LEVELS,
    "server": _SERVER,
    "processes": _PROCESSES,
  }[part]
  ordered = sorted(rows, key=lambda row: (row["workers"], row.get("failures", 0)))
  return table(
    "", list(columns), [[cell(row) for cell in columns.values()] for row in ordered]
  )
