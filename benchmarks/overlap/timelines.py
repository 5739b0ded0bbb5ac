"""Draws the timeline of a plan, backward above the network, as in Figures 1 and 3 of the ASC-WFBP paper."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxsparse.overlap import Plan

_COLORS = {"normal": "tab:blue", "merged": "tab:orange", "simultaneous": "tab:green"}
_EDGE: Any = {"edgecolor": "black", "linewidth": 0.3}
_START_UP: Any = {"facecolor": "white", "hatch": "////"}
_NARROW = 0.05  # bars that are narrower, as a fraction of the axis, have no text


def draw_plans(*plans: Plan) -> Figure:
  """Draws the predicted timeline of each plan, below each other on one time axis.

  The row "backward" has a bar for each layer, with its number. The rows below have a bar for each communication, with
  its layers where there is room; communications at the same time are in different rows. A bar is hatched during the
  start-up and coloured by kind during the transfer. The dashed line is the end of backward, the number beside the last
  bar the iteration time.
  """
  drawn = Figure(figsize=(11, 0.8 + 1.4 * len(plans)), layout="constrained")
  panels = drawn.subplots(len(plans), 1, sharex=True, squeeze=False)[:, 0]
  panels[0].set_xlim(0, 1.08e3 * max(plan.iteration_time for plan in plans))
  for panel, plan in zip(panels, plans, strict=True):
    _draw(panel, plan)
  drawn.supxlabel("ms from the start of backward", fontsize="small")
  keys = [Patch(facecolor=color, label=kind, **_EDGE) for kind, color in _COLORS.items()]
  keys.append(Patch(label="start-up", **_START_UP, **_EDGE))
  drawn.legend(handles=keys, loc="outside upper right", ncols=len(keys), fontsize="small")
  return drawn


def _draw(panel: Axes, plan: Plan) -> None:
  _, starts, ends = 1e3 * np.array(plan.timeline).T
  rows: list[int] = []
  for number, start in enumerate(starts):  # the first row without another communication at its start, from 1 on
    busy = {row for row, end in zip(rows, ends[:number], strict=True) if end > start * (1 + 1e-12)}
    rows.append(min(set(range(1, number + 2)) - busy))
  layers = range(len(plan.sizes))[::-1]
  times = 1e3 * np.array(plan.backward_times)[::-1]
  greys = ["0.78" if layer % 2 else "0.88" for layer in layers]
  backward = panel.barh([0] * len(layers), times, left=np.cumsum(times) - times, color=greys, **_EDGE)
  colors = [_COLORS[group.kind] for group in plan.groups]
  sent = panel.barh(rows, ends - starts, left=starts, color=colors, **_EDGE)
  panel.barh(rows, np.minimum(ends - starts, 1e3 * plan.link.alpha), left=starts, **_START_UP, **_EDGE)
  ranges = ["…".join(dict.fromkeys([str(group.layers[-1]), str(group.layers[0])])) for group in plan.groups]
  for bars, texts in ((backward, list(map(str, layers))), (sent, ranges)):
    wide = (bar.get_width() > _NARROW * panel.get_xlim()[1] for bar in bars)
    shown = [text if has_room else "" for text, has_room in zip(texts, wide, strict=True)]
    panel.bar_label(bars, shown, label_type="center", fontsize=7)
  last = int(np.argmax(ends))
  panel.annotate(f" {ends[last]:.4g} ms", (ends[last], rows[last]), va="center", fontsize=8)
  panel.axvline(1e3 * plan.backward, color="black", linestyle="--", linewidth=0.8)
  panel.set_yticks([0, 1], ["backward", "network"], fontsize="small")
  panel.invert_yaxis()
  panel.set_title(f"{plan.kind}: {len(plan.groups)} communications", loc="left", fontsize="small")
