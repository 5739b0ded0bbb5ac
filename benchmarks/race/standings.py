"""Who is first: steps and seconds until a loss is reached, the steps of a curve times the seconds a step of a pace."""

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from benchmarks.race.results import Curve, Pace, Results, Whole
from benchmarks.report import Spread

DENSE = "dense"


class Target(NamedTuple):
  """The loss to reach."""

  steps: int  # dense's loss after these, from the same seed,
  loss: float | None = None  # unless this one is given, the same for all seeds

  def __str__(self) -> str:
    return f"dense's loss after {self.steps} steps" if self.loss is None else f"a loss of {self.loss:g}"

  def of_seeds(self, results: Results) -> dict[int, float]:
    """The loss for each seed whose target is known."""
    if self.loss is not None:
      return dict.fromkeys((curve.seed for curve in results.rows["curves"]), self.loss)
    known = {seed: loss_after(curve, self.steps) for seed, curve in baselines(results, self.steps).items()}
    return {seed: loss for seed, loss in known.items() if loss is not None}


class Standing(NamedTuple):
  """One method at one rate."""

  method: str  # its label
  optimizer: str  # name and rate
  words: float  # 4-byte words a step
  pace: Pace | None  # seconds a step and their parts, None where they were not measured
  steps: Spread | None  # to the target
  loss: Spread | None  # after as many steps as dense
  seconds: Spread | None  # to the target
  speed_up: Spread | None  # dense's seconds to the target / this one's, from the same seeds
  more_steps: Spread | None  # to the target / those of dense, from the same seeds


def crossing(curve: Curve | Whole, target: float) -> float | None:
  """The first step at which the loss is at most `target`, interpolated between evaluations; None if it never is."""
  first = next((number for number, loss in enumerate(curve.loss) if loss <= target), None)
  if first is None:
    return None
  if not first or math.isinf(curve.loss[first - 1]):
    return float(curve.steps[first])
  return float(np.interp(target, curve.loss[first - 1 : first + 1][::-1], curve.steps[first - 1 : first + 1][::-1]))


def loss_after(curve: Curve, steps: float) -> float | None:
  """The loss after so many steps, interpolated; None outside of the evaluations, infinite once a training diverges."""
  if not curve.steps or steps < curve.steps[0]:
    return None
  if steps > curve.steps[-1]:
    return math.inf if math.isinf(curve.loss[-1]) else None
  found = float(np.interp(steps, curve.steps, curve.loss))
  return found if math.isfinite(found) else math.inf


def baselines(results: Results, steps: int) -> dict[int, Curve]:
  """For each seed dense's curve, with the optimizer of lowest mean loss after `steps`, of those from most seeds."""
  of: dict[str, list[tuple[Curve, float]]] = {}
  for curve in results.find("curves", method=DENSE):
    loss = loss_after(curve, steps)
    if loss is not None:
      of.setdefault(curve.optimizer, []).append((curve, loss))
  most = max(map(len, of.values()), default=0)
  mean = lambda optimizer: statistics.mean(loss for _, loss in of[optimizer])
  best = min((optimizer for optimizer in of if len(of[optimizer]) == most), key=mean, default=None)
  if best is None or math.isinf(mean(best)):
    return {}
  return {curve.seed: curve for curve, _ in of[best]}


def standings(results: Results, rate: str, target: Target) -> list[Standing]:
  """The methods, the fastest first; those that do not reach the target, or have no pace, at the end."""
  targets = target.of_seeds(results)
  paces: dict[str, Pace] = {pace.method: pace for pace in results.find("paces", rate=rate)}
  seconds_of = lambda method: paces[method].seconds if method in paces else math.nan
  groups: dict[tuple[str, str], dict[int, Curve]] = {}
  for curve in results.rows["curves"]:
    if curve.seed in targets:
      groups.setdefault((curve.method, curve.optimizer), {})[curve.seed] = curve
  of_dense = _crossings(baselines(results, target.steps), targets)
  found = []
  for (method, optimizer), curves in groups.items():
    counts = _crossings(curves, targets)
    seconds = counts * seconds_of(method)
    words = statistics.mean(curve.words for curve in curves.values())
    losses = [loss_after(curves[seed], target.steps) if seed in curves else None for seed in targets]
    speed_ups = of_dense * seconds_of(DENSE) / seconds
    spreads = map(Spread.of, (counts, losses, seconds, speed_ups, counts / of_dense))
    found.append(Standing(method, optimizer, words, paces.get(method), *spreads))
  in_all = lambda one: one.seconds.mean if one.seconds and not one.seconds.missing else math.inf
  return sorted(found, key=in_all)


def _crossings(curves: Mapping[int, Curve], targets: Mapping[int, float]) -> np.ndarray:
  """Steps to the target of each seed; NaN where there is no curve, or it does not get there."""
  return np.array([crossing(curves[seed], loss) if seed in curves else None for seed, loss in targets.items()], float)
