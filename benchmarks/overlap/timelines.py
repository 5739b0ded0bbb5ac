"""Draws the timeline of a plan, backward above the network, as in Figures 1 and 3 of the ASC-WFBP paper."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxsparse.overlap import Plan

_COLORS = {"normal": "tab:blue", "merged": "tab:orange", "simultaneous": "tab:green"}
_GREYS = ("0.78", "0.88")
_NARROW = 0.012  # minimum width of a bar for one digit, as a fraction of the axis


def draw_plans(*plans: Plan) -> Figure:
  """Draws the predicted timeline of each plan, below each other on one time axis.

  The row "backward" has a bar for each layer, with its number. The rows below have a bar for each communication, with
  its layers where there is room; communications at the same time are in different rows. A bar is hatched during the
  start-up and coloured by kind during the transfer. The dashed line is the end of backward, the number beside the last
  bar the iteration time.
  """
  rows = [_rows(plan) for plan in plans]
  heights = [max(of_plan) + 1 for of_plan in rows]
  drawn = Figure(figsize=(11, 0.8 + 0.42 * sum(heights) + 0.35 * len(plans)), layout="constrained")
  panels = drawn.subplots(len(plans), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
  width = 1.08 * max(plan.iteration_time for plan in plans) or 1.0
  scale, unit = (1.0, "s") if width >= 1 else (1e3, "ms")
  for panel, plan, of_plan in zip(panels, plans, rows, strict=True):
    panel.set_xlim(0, scale * width)
    _draw(panel, plan, of_plan, scale, unit)
  panels[-1].set_xlabel(f"{unit} from the start of backward")
  style: dict[str, Any] = {"edgecolor": "black", "linewidth": 0.5}
  kinds = [kind for kind in _COLORS if any(group.kind == kind for plan in plans for group in plan.groups)]
  keys = [Patch(facecolor=_COLORS[kind], label=kind, **style) for kind in kinds]
  keys.append(Patch(facecolor="white", hatch="////", label="start-up", **style))
  drawn.legend(handles=keys, loc="outside upper right", ncols=len(keys), fontsize="small")
  return drawn


def _rows(plan: Plan) -> list[int]:
  """The row of each group, from 1 on: the first without another communication when it starts."""
  ends, rows = list[float](), list[int]()
  for sent in plan.timeline:
    row = next((row for row, end in enumerate(ends) if end <= sent.start * (1 + 1e-12)), len(ends))
    ends[row : row + 1] = [sent.end]
    rows.append(row + 1)
  return rows


def _draw(panel: Axes, plan: Plan, rows: list[int], scale: float, unit: str) -> None:
  now = 0.0
  for layer, seconds in reversed(list(enumerate(plan.backward_times))):
    _bar(panel, 0, scale * now, scale * seconds, str(layer), facecolor=_GREYS[layer % 2])
    now += seconds
  for group, sent, row in zip(plan.groups, plan.timeline, rows, strict=True):
    start, flows, end = (scale * time for time in (sent.start, min(sent.end, sent.start + plan.link.alpha), sent.end))
    layers = [str(layer) for layer in reversed(group.layers)]
    label = f"{layers[0]}…{layers[-1]}" if len(layers) > 3 else ", ".join(layers)
    _bar(panel, row, start, flows - start, "", facecolor="white", hatch="////")
    _bar(panel, row, flows, end - flows, label, facecolor=_COLORS[group.kind])
  end, last = max((scale * sent.end, row) for sent, row in zip(plan.timeline, rows, strict=True))
  panel.annotate(f"{end:.4g} {unit}", (end, last), (4, 0), textcoords="offset points", va="center", fontsize=8)
  panel.axvline(scale * plan.backward, color="black", linestyle="--", linewidth=0.8)
  panel.set_yticks(range(max(rows) + 1), ["backward", "network", *[""] * (max(rows) - 1)], fontsize="small")
  panel.set_ylim(max(rows) + 0.5, -0.5)
  several = "s" if len(plan.groups) > 1 else ""
  panel.set_title(f"{plan.kind}: {len(plan.groups)} communication{several}", loc="left", fontsize="small")
  panel.spines[["top", "right"]].set_visible(False)


def _bar(panel: Axes, row: int, start: float, width: float, label: str, **style: Any) -> None:
  whole = panel.get_xlim()[1]
  edge = 0.5 if width > 0.004 * whole else 0.0
  panel.barh(row, width, left=start, edgecolor="black", linewidth=edge, **style)
  if width > _NARROW * whole * max(1, 0.75 * len(label)):
    panel.text(start + width / 2, row, label, ha="center", va="center", fontsize=7)
