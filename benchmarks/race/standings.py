"""Who is first: steps and seconds until a loss is reached, the steps of a curve times the seconds a step of a pace."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.race.results import Curve, Pace, Results, Whole

DENSE = "dense"


class Spread(NamedTuple):
  """Numbers of several seeds."""

  mean: float  # over the seeds that have the number
  deviation: float  # standard deviation of these, 0 for one seed
  missing: int = 0  # seeds without a finite number: not trained, not as far, or diverged

  @classmethod
  def of(cls, values: Sequence[float | None] | np.ndarray) -> "Spread | None":
    """The spread of the finite numbers; None if there is none."""
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    if not known:
      return None
    return cls(statistics.mean(known), statistics.stdev(known) if len(known) > 1 else 0.0, len(values) - len(known))


class Target(NamedTuple):
  """The loss to reach."""

  steps: int  # dense's loss after these, from the same seed,
  loss: float | None = None  # unless this one is given, the same for all seeds

  def __str__(self) -> str:
    return f"dense's loss after {self.steps} steps" if self.loss is None else f"a loss of {self.loss:g}"

  def of_seeds(self, results: Results) -> dict[int, float]:
    """The loss for each seed."""
    if self.loss is not None:
      return dict.fromkeys((curve.seed for curve in results.rows["curves"]), self.loss)
    known = {seed: loss_after(curve, self.steps) for seed, curve in baselines(results, self.steps).items()}
    return {seed: loss for seed, loss in known.items() if loss is not None}

  def of_seed(self, results: Results, seed: int) -> float | None:
    """The loss for one seed; None where it is dense's and dense has no curve yet."""
    return self.of_seeds(results).get(seed, self.loss)


class Standing(NamedTuple):
  """One method at one rate."""

  method: str  # its label
  optimizer: str  # name and rate
  words: float  # 4-byte words a step
  drift: float  # the largest distance of the workers' parameters to their mean
  pace: Pace | None  # seconds a step and their parts, None where they were not measured
  steps: Spread | None  # to the target
  loss: Spread | None  # after as many steps as dense
  seconds: Spread | None  # to the target
  speed_up: Spread | None  # dense's seconds to the target / this one's, from the same seeds
  more_steps: Spread | None  # to the target / those of dense, from the same seeds
  # after the seconds in which the first method reached the target, as far as all curves go that do
  loss_in_time: Spread | None = None


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
  dense, targets = baselines(results, target.steps), target.of_seeds(results)
  paces: dict[str, Pace] = {pace.method: pace for pace in results.find("paces", rate=rate)}
  groups: dict[tuple[str, str], dict[int, Curve]] = {}
  for curve in results.rows["curves"]:
    if curve.seed in targets:
      groups.setdefault((curve.method, curve.optimizer), {})[curve.seed] = curve
  of_dense = _crossings(dense, targets)
  found = []
  for (method, optimizer), curves in groups.items():
    counts, pace = _crossings(curves, targets), paces.get(method)
    seconds, of_dense_seconds = counts * _seconds(pace), of_dense * _seconds(paces.get(DENSE))
    words, drift = (statistics.mean(getattr(one, name) for one in curves.values()) for name in ("words", "drift"))
    losses = [loss_after(curves[seed], target.steps) if seed in curves else None for seed in targets]
    spreads = [Spread.of(values) for values in (counts, losses, seconds, of_dense_seconds / seconds, counts / of_dense)]
    found.append(Standing(method, optimizer, words, drift, pace, *spreads))
  return _in_time(sorted(found, key=_order), groups)


def _crossings(curves: Mapping[int, Curve], targets: Mapping[int, float]) -> np.ndarray:
  """Steps to the target of each seed; NaN where there is no curve, or it does not get there."""
  return np.array([crossing(curves[seed], loss) if seed in curves else None for seed, loss in targets.items()], float)


def _seconds(pace: Pace | None) -> float:
  return pace.seconds if pace else math.nan


def _order(one: Standing) -> float:
  return one.seconds.mean if one.seconds and not one.seconds.missing else math.inf


def _in_time(ranked: list[Standing], groups: Mapping[tuple[str, str], Mapping[int, Curve]]) -> list[Standing]:
  """The same with the loss of each when the first one reaches the target, or the first of those that reach it ends."""
  curves_of = lambda one: list(groups[one.method, one.optimizer].values())
  reaching = [(one, curve) for one in ranked if math.isfinite(_order(one)) for curve in curves_of(one)]
  if not reaching:
    return ranked
  time = min(_order(ranked[0]), *(curve.steps[-1] * _seconds(one.pace) for one, curve in reaching))
  losses = lambda one: [loss_after(curve, time / one.pace.seconds) for curve in curves_of(one) if one.pace]
  return [one._replace(loss_in_time=Spread.of(losses(one))) for one in ranked]
