"""Who is first: steps and seconds until a loss is reached, the steps of a curve times the seconds a step of a pace."""

import math
import re
import statistics
from collections.abc import Iterable, Mapping
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
    return (
      f"dense's loss after {self.steps} steps"
      if self.loss is None
      else f"a loss of {self.loss:g}"
    )

  def of_seeds(self, results: Results) -> dict[int, float]:
    """The loss for each seed whose target is known."""
    if self.loss is not None:
      return dict.fromkeys((curve.seed for curve in results.rows["curves"]), self.loss)
    known = {
      seed: loss_after(curve, self.steps)
      for seed, curve in baselines(results, self.steps).items()
    }
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
  # dense's seconds to the target / this one's, from the same seeds
  speed_up: Spread | None
  more_steps: Spread | None  # to the target / those of dense, from the same seeds


class Point(NamedTuple):
  """One method with one optimizer, after equal steps."""

  method: str  # its label
  optimizer: str  # name, rate and options
  seeds: int  # that were trained
  bits: float  # that a worker sends a parameter and step, of the worker that sent most
  losses: list[Spread | None]  # after each number of steps
  loss: float  # after the last of them, mean over the seeds
  # percent over that of dense with its best optimizer, from the same seeds
  above: Spread | None
  accuracy: float  # after the last of them, mean over the seeds
  drift: float  # the largest RMS distance of the workers' parameters to their mean


def crossing(curve: Curve | Whole, target: float, along: str = "steps") -> float | None:
  """The first step, or second of `along`, at which the loss is at most `target`, interpolated; None if it never is."""
  first = next(
    (number for number, loss in enumerate(curve.loss) if loss <= target), None
  )
  if first is None:
    return None
  axis = getattr(curve, along)
  if not first or math.isinf(curve.loss[first - 1]):
    return float(axis[first])
  return float(
    np.interp(
      target, curve.loss[first - 1 : first + 1][::-1], axis[first - 1 : first + 1][::-1]
    )
  )


def loss_after(curve: Curve, steps: float) -> float | None:
  """The loss after so many steps, interpolated; None outside of the evaluations, infinite once a training diverges."""
  if not curve.steps or steps < curve.steps[0]:
    return None
  if steps > curve.steps[-1]:
    return math.inf if math.isinf(curve.loss[-1]) else None
  found = float(np.interp(steps, curve.steps, curve.loss))
  return found if math.isfinite(found) else math.inf


def baselines(results: Results, steps: int) -> dict[int, Curve]:
  """For each seed dense's curve, with the optimizer of lowest mean loss after `steps`.

  Of those trained from two seeds or more, if there are any.
  """
  of: dict[str, list[tuple[Curve, float]]] = {}
  for curve in results.find("curves", method=DENSE):
    loss = loss_after(curve, steps)
    if loss is not None:
      of.setdefault(curve.optimizer, []).append((curve, loss))
  enough = min(2, max(map(len, of.values()), default=0))
  mean = lambda optimizer: statistics.mean(loss for _, loss in of[optimizer])
  best = min(
    (optimizer for optimizer in of if len(of[optimizer]) >= enough),
    key=mean,
    default=None,
  )
  if best is None or math.isinf(mean(best)):
    return {}
  return {curve.seed: curve for curve, _ in of[best]}


def standings(results: Results, rate: str, target: Target) -> list[Standing]:
  """The methods, the fastest first; those that do not reach the target, or have no pace, at the end."""
  targets = target.of_seeds(results)
  seconds_of = lambda pace: pace.seconds if pace else math.nan
  groups = _groups(curve for curve in results.rows["curves"] if curve.seed in targets)
  dense = baselines(results, target.steps)
  of_dense = _crossings(dense, targets)
  dense_pace = next((results.pace_of(curve, rate) for curve in dense.values()), None)
  found = []
  for (method, optimizer), curves in groups.items():
    counts = _crossings(curves, targets)
    pace = results.pace_of(next(iter(curves.values())), rate)
    seconds = counts * seconds_of(pace)
    words = statistics.mean(curve.words for curve in curves.values())
    losses = [
      loss_after(curves[seed], target.steps) if seed in curves else None
      for seed in targets
    ]
    speed_ups = of_dense * seconds_of(dense_pace) / seconds
    spreads = map(Spread.of, (counts, losses, seconds, speed_ups, counts / of_dense))
    found.append(Standing(method, optimizer, words, pace, *spreads))
  in_all = lambda one: (
    one.seconds.mean if one.seconds and not one.seconds.missing else math.inf
  )
  return sorted(found, key=in_all)


def points(results: Results, *steps: float) -> list[Point]:
  """Each method and optimizer after so many steps, the lowest loss after the last of them first.

  Of trainings that were as long. Of a method and kind of optimizer that were trained
  from one seed only, the best rate, where none has more seeds.
  """
  dense = baselines(results, int(steps[-1]))
  if not dense:
    return []
  least = {
    seed: loss_after(curve, steps[-1]) or math.inf for seed, curve in dense.items()
  }
  hosts = results.setting["hosts"]
  # dense sends 2(P − 1)/P words for each
  entries = next(iter(dense.values())).words * hosts / (2 * (hosts - 1))
  found = []
  as_far = (
    curve
    for curve in results.rows["curves"]
    if loss_after(curve, steps[-1]) is not None
  )
  for (method, optimizer), curves in _groups(as_far).items():
    losses = [
      {seed: loss_after(curve, one) for seed, curve in curves.items()} for one in steps
    ]
    above = [
      100 * (loss / least[seed] - 1)
      for seed, loss in losses[-1].items()
      if loss and seed in least
    ]
    words, drift = (
      statistics.mean(getattr(curve, name) for curve in curves.values())
      for name in ("words", "drift")
    )
    accuracy = statistics.mean(
      np.interp(steps[-1], curve.steps, curve.accuracy) for curve in curves.values()
    )
    spreads = [Spread.of(list(one.values())) for one in losses]
    if spreads[-1]:
      key = method, optimizer, len(curves), 32 * words / entries
      found.append(
        Point(*key, spreads, spreads[-1].mean, Spread.of(above), float(accuracy), drift)
      )
  shown, seen = [], set()
  for one in sorted(found, key=lambda one: (-one.seeds, one.loss)):
    family = one.method, re.sub(r":window=\d+|:0\.\d+", "", one.optimizer)
    shown += [one] if one.seeds > 1 or family not in seen else []
    seen.add(family)
  return sorted(shown, key=lambda one: one.loss)


def _groups(curves: Iterable[Curve]) -> dict[tuple[str, str], dict[int, Curve]]:
  """The curves of each method and optimizer, by seed."""
  found: dict[tuple[str, str], dict[int, Curve]] = {}
  for curve in curves:
    found.setdefault((curve.method, curve.optimizer), {})[curve.seed] = curve
  return found


def _crossings(curves: Mapping[int, Curve], targets: Mapping[int, float]) -> np.ndarray:
  """Steps to the target of each seed; NaN where there is no curve, or it does not get there."""
  return np.array(
    [
      crossing(curves[seed], loss) if seed in curves else None
      for seed, loss in targets.items()
    ],
    float,
  )
