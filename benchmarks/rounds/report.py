"""Tables of `benchmarks.rounds`: the columns of each part, with the field of a record and its format."""

import pathlib
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import rich.table

from benchmarks.report import milliseconds, number, pyplot, ratio, save, table

Row = dict[str, Any]
Column = Callable[[Row], str]
_EQUAL = {True: "yes", False: "no", None: "–"}
_plain = lambda name, form="": lambda row: number(row[name], form)
_ms = lambda name: lambda row: milliseconds(row[name])
_per_second = lambda name: (
  lambda row: number(row[name], ",.0f" if (row[name] or 0) >= 10 else ".2f")
)

_HIDDEN: Mapping[str, Column] = {
  "links": _plain("rate"),
  "H": _plain("every"),
  "delay": _plain("delay"),
  "step without an exchange, ms": _ms("without"),
  "with one in flight": _ms("flying"),
  "ratio": lambda row: ratio(row["flying"], row["without"]),
  "steps in flight": _plain("flight", ".1f"),
  "call of `step`": _ms("call"),
  "longest": _ms("longest"),
  "a step with all": _ms("step"),
}
_RACE: Mapping[str, Column] = {
  "links": _plain("rate"),
  "H": _plain("every"),
  "delay": _plain("delay"),
  "seed": _plain("seed"),
  "loss": _plain("target", ".3f"),
  "steps": _plain("steps", ".0f"),
  "seconds": _plain("seconds", ".1f"),
  "synchronous, seconds": _plain("synchronous", ".1f"),
  "ratio": lambda row: ratio(row["synchronous"], row["seconds"]),
}
_GOODPUT: Mapping[str, Column] = {
  "": _plain("mode"),
  "faults": _plain("kills"),
  "seconds": _plain("seconds", ".0f"),
  "trained/s": _per_second("trained"),
  "in the model/s": _per_second("delivered"),
  "goodput": _plain("goodput", ".1%"),
  "steps lost": _plain("lost"),
  "longest `step`, s": _plain("longest", ".2f"),
  "anchors equal": lambda row: _EQUAL[row["equal"]],
}
_FAULTS: Mapping[str, Column] = {
  "fault": _plain("fault"),
  "longest `step`, s": _plain("longest", ".2f"),
  "longest gap, s": _plain("gap", ".2f"),
  "median gap": _plain("usual", ".2f"),
  "until all again, s": _plain("again", ".1f"),
  "workers lost": _plain("lost"),
  "anchors equal": lambda row: _EQUAL[row["equal"]],
}
_FETCHES: Mapping[str, Column] = {
  "": _plain("what"),
  "MB": _plain("megabytes", ".1f"),
  "median, s": _plain("seconds", ".1f"),
  "longest": _plain("longest", ".1f"),
}
_COLUMNS = {
  "hidden": _HIDDEN,
  "race": _RACE,
  "goodput": _GOODPUT,
  "vector": _GOODPUT,
  "transformer": {**_GOODPUT, "loss": _plain("loss", ".3f")},
  "faults": _FAULTS,
  "interrupted": _FAULTS,
  "fetches": _FETCHES,
}
_PHASES = {
  "round": "kill to the next round of the rest",
  "usual": "between two rounds",
  "imported": "newcomer: start, import",
  "compiled": "newcomer: data, model, compile",
  "joined": "newcomer: join, fetch the anchor, compile the outer step",
  "member": "newcomer: until its first round",
}


def draw(curves: list[Row], path: pathlib.Path) -> None:
  """Loss of training over seconds, with a mark at each fault."""
  plot, panel = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
  for row in curves:
    (line,) = panel.plot(row["seconds"], row["loss"], label=row["name"], linewidth=1.2)
    panel.plot(
      row["marks"],
      np.interp(row["marks"], row["seconds"], row["loss"]),
      "x",
      color=line.get_color(),
    )
  panel.set(xlabel="seconds", ylabel="loss of training", yscale="log")
  panel.grid(alpha=0.3)
  panel.legend(fontsize="small")
  save(plot, "six workers in rounds, x where a fault happens", path)


def make(part: str, rows: list[Row]) -> rich.table.Table:
  """The table of a part."""
  if part == "recoveries":
    own = {
      what: [row[name] for row in rows if row[name] is not None]
      for name, what in _PHASES.items()
    }
    cells = [
      [what, f"{statistics.median(all_):.1f}", f"{max(all_):.1f}"]
      for what, all_ in own.items()
      if all_
    ]
    return table("", ["seconds", "median", "worst"], cells)
  columns = _COLUMNS[part]
  calm = (
    {row["mode"]: row["delivered"] for row in rows if not row["kills"]}
    if "goodput" in columns
    else {}
  )
  rows = (
    [row | {"goodput": row["delivered"] / calm[row["mode"]]} for row in rows]
    if calm
    else rows
  )
  return table(
    "", list(columns), [[cell(row) for cell in columns.values()] for row in rows]
  )
