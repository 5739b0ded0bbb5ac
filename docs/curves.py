"""The figures of docs/how_to/adam.md, of the curves that `benchmarks.race` keeps: `python docs/curves.py`."""

import pathlib

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.race.results import Results
from benchmarks.race.standings import DENSE, points

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "how_to"
SIGNS = "updates:apply_residual=True/onebit"
RESTORED = "updates:apply_residual=True/restored/onebit"
# The label, color, method and optimizer of each curve.
SHORT = [
  ("dense, then Adam", "black", "dense", "adam:0.001"),
  ("signs of updates, every step", "tab:blue", SIGNS, "window_adam:0.001:window=4"),
  ("PowerSGD, then Adam", "tab:green", "powersgd:rank=4:alternate=True", "adam:0.001"),
  ("SparDL 1 %, then Adam", "tab:red", "spardl:density=0.01", "adam:0.001"),
]
LONG = [
  ("dense, then Adam", "black", "dense", "adam:0.0007:b1=0.8"),
  (
    "signs of updates, every step",
    "tab:blue",
    SIGNS,
    "window_adam:0.0007:window=4:b1=0.8",
  ),
  (
    "signs of updates, every 2 steps",
    "tab:cyan",
    "local:apply_residual=True:every=2/onebit",
    "window_adam:0.0007:window=4:b1=0.8",
  ),
]
# Results with one sequence for each worker, by the number of workers.
WORKERS = {
  4: "four_one_lm_medium.json",
  8: "eight_one_lm_medium.json",
  16: "sixteen_small_lm_medium.json",
  64: "sixtyfour_lm_medium.json",
}


def draw_gaps(axes: Axes, label: str, color: str, method: str) -> None:
  """Held-out loss in % above dense Muon after 300 steps, each at its best rate: mean and deviation of seeds."""
  above = [
    next(
      one.above
      for one in points(Results(RESULTS / name, None), 300)
      if one.method == method and one.above
    )
    for name in WORKERS.values()
  ]
  axes.errorbar(
    list(WORKERS),
    [one.mean for one in above],
    # One seed has a deviation of 0: no bar.
    [one.deviation or np.nan for one in above],
    color=color,
    marker="o",
    capsize=4,
    label=label,
  )


def draw(
  axes: Axes, name: str, curves: list[tuple[str, str, str, str]], last: int
) -> None:
  """Held-out loss over steps: a line for the mean over seeds, a band for the standard deviation."""
  results = Results(RESULTS / name, None)
  dense = results.find("curves", method=DENSE)[0].words
  for label, color, method, optimizer in curves:
    same = results.find("curves", method=method, optimizer=optimizer)
    steps = [step for step in same[0].steps if step <= last]
    losses = np.array([curve.loss[: len(steps)] for curve in same])
    mean, deviation = losses.mean(0), losses.std(0, ddof=1)
    words = (
      f"{100 * same[0].words / dense:.2g} % of the words"
      if method != DENSE
      else "100 %"
    )
    axes.plot(steps, mean, color=color, label=f"{label}: {words}")
    axes.fill_between(
      steps, mean - deviation, mean + deviation, color=color, alpha=0.2, linewidth=0
    )
  axes.set(xlabel="step", ylabel="held-out loss, nats a byte")
  axes.legend(fontsize="small")
  axes.grid(alpha=0.3)


if __name__ == "__main__":
  figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
  draw(left, "local_lm_medium.json", SHORT, 300)
  left.set_title("0.66 M parameters, constant rate", fontsize="medium")
  draw(right, "thousand_lm.json", LONG, 1000)
  right.set_title("3.3 M parameters, cosine rate, b1 = 0.8", fontsize="medium")
  figure.savefig(PAGES / "adam.png", dpi=100)

  figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
  draw_gaps(axes, "signs of Muon's updates", "tab:blue", SIGNS)
  draw_gaps(axes, "with js.norm_restored", "tab:green", RESTORED)
  axes.axhline(0, color="black", linewidth=1)
  axes.set_xscale("log", base=2)
  axes.set_xticks(list(WORKERS), [str(workers) for workers in WORKERS])
  axes.set(xlabel="workers", ylabel="loss above dense Muon, %")
  axes.legend(fontsize="small")
  axes.grid(alpha=0.3)
  figure.savefig(PAGES / "workers.png", dpi=100)
