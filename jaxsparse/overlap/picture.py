"""Draws the timeline of a plan, backward above the network, as in Figures 1 and 3 of the ASC-WFBP paper."""

from typing import TYPE_CHECKING, Any

from jaxsparse.overlap.network import Sent
from jaxsparse.overlap.plans import Group, Plan

if TYPE_CHECKING:
  import matplotlib.axes
  import matplotlib.figure

_COLORS = {"normal": "tab:blue", "merged": "tab:orange", "simultaneous": "tab:green"}
_GREYS = ("0.78", "0.88")
_HEIGHT = 0.8
_NARROW = 0.012  # minimum width of a bar for one digit, as a fraction of the axis


def figure(*plans: Plan) -> "matplotlib.figure.Figure":
  """Draws the predicted timeline of a plan, or of several below each other on one time axis.

  The row "backward" has a bar for each layer, with its number. The rows below have a bar for each communication, with
  its layers where there is room; communications at the same time are in different rows. A bar is hatched during the
  start-up and coloured by kind during the transfer. The dashed line is the end of backward, the number beside the last
  bar the iteration time.

  Args:
    *plans: made by `js.overlap.plan`.

  Returns:
    A matplotlib figure: `.savefig("timeline.png")`, or the last value of a notebook's cell.

  Raises:
    ValueError: without a plan.
    ModuleNotFoundError: without matplotlib, which is no dependency of jaxsparse.

  Example:
    >>> import jaxsparse as js
    >>> layers = [0.2, 0.1, 0.1], [1e6, 2e6, 4e6]
    >>> both = [js.overlap.plan(kind, *layers, alpha=0.05, beta=1e-7, gamma=1.5) for kind in ("wfbp", "asc_wfbp")]
    >>> len(js.overlap.figure(*both).axes)
    2
  """
  if not plans:
    raise ValueError("figure: give at least one plan")
  try:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
  except ModuleNotFoundError as error:
    raise ModuleNotFoundError("figure: drawing needs matplotlib: pip install matplotlib") from error
  rows = [_rows(plan) for plan in plans]
  heights = [max(of_plan) + 2 for of_plan in rows]
  drawn = Figure(figsize=(11, 0.8 + 0.42 * sum(heights) + 0.35 * len(plans)), layout="constrained")
  panels = drawn.subplots(len(plans), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
  width = 1.08 * max(plan.iteration_time for plan in plans) or 1.0
  scale, unit = (1.0, "s") if width >= 1 else (1e3, "ms")
  for panel, plan, of_plan in zip(panels, plans, rows, strict=True):
    panel.set_xlim(0, scale * width)
    _draw(panel, plan, of_plan, scale, unit)
  panels[-1].set_xlabel(f"{unit} from the start of backward")
  kinds = [kind for kind in _COLORS if any(group.kind == kind for plan in plans for group in plan.groups)]
  keys = [Patch(facecolor=_COLORS[kind], edgecolor="black", linewidth=0.5, label=kind) for kind in kinds]
  start_up = Patch(facecolor="white", edgecolor="black", linewidth=0.5, hatch="////", label="start-up")
  drawn.legend(handles=[*keys, start_up], loc="outside upper right", ncols=len(keys) + 1, fontsize="small")
  return drawn


def _rows(plan: Plan) -> list[int]:
  """The row of each group: the first without another communication when it starts."""
  ends: list[float] = []
  rows = []
  for sent in plan.timeline:
    free = [row for row, end in enumerate(ends) if end <= sent.start * (1 + 1e-12)]
    row = free[0] if free else len(ends)
    ends[row : row + 1] = [sent.end]
    rows.append(row)
  return rows


def _draw(panel: "matplotlib.axes.Axes", plan: Plan, rows: list[int], scale: float, unit: str) -> None:
  now = 0.0
  for layer, seconds in reversed(list(enumerate(plan.backward_times))):
    _bar(panel, 0, scale * now, scale * seconds, str(layer), facecolor=_GREYS[layer % 2])
    now += seconds
  for group, sent, row in zip(plan.groups, plan.timeline, rows, strict=True):
    _communication(panel, plan, group, sent, 1 + row, scale)
  end = scale * plan.iteration_time
  last = max(range(len(rows)), key=lambda number: plan.timeline[number].end)
  panel.annotate(
    f"{end:.4g} {unit}", (end, 1 + rows[last]), (4, 0), textcoords="offset points", va="center", fontsize=8
  )
  panel.axvline(scale * plan.backward, color="black", linestyle="--", linewidth=0.8)
  lanes = max(rows) + 1
  panel.set_yticks(range(lanes + 1), ["backward", "network", *[""] * (lanes - 1)], fontsize="small")
  panel.set_ylim(lanes + 0.5, -0.5)
  several = "s" if len(plan.groups) > 1 else ""
  panel.set_title(f"{plan.kind}: {len(plan.groups)} communication{several}", loc="left", fontsize="small")
  panel.spines[["top", "right"]].set_visible(False)


def _communication(panel: "matplotlib.axes.Axes", plan: Plan, group: Group, sent: Sent, row: int, scale: float) -> None:
  start, flows, end = (scale * time for time in (sent.start, min(sent.end, sent.start + plan.link.alpha), sent.end))
  label = ", ".join(map(str, reversed(group.layers)))
  short = f"{group.layers[-1]}…{group.layers[0]}" if len(group.layers) > 3 else label
  _bar(panel, row, start, flows - start, "", facecolor="white", hatch="////")
  _bar(panel, row, flows, end - flows, short, facecolor=_COLORS[group.kind])


def _bar(panel: "matplotlib.axes.Axes", row: int, start: float, width: float, label: str, **style: Any) -> None:
  whole = panel.get_xlim()[1]
  edge = 0.5 if width > 0.004 * whole else 0.0
  panel.barh(row, width, _HEIGHT, left=start, edgecolor="black", linewidth=edge, **style)
  if width > _NARROW * whole * max(1, 0.75 * len(label)):
    panel.text(start + width / 2, row, label, ha="center", va="center", fontsize=7)
