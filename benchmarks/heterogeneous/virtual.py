"""Trainings of the digits in virtual time: the methods, the environments of workers, and the rows of the tables."""

import functools
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import optax

import jaxsparse as js
from benchmarks import report
from benchmarks.tasks import data, small
from benchmarks.tasks.base import model_of
from jaxsparse.partial.simulation import METHODS

GROUPED = ("constant", "dynamic", "initial")


class Method(NamedTuple):
  """One line of a table.

  Attributes:
    label: as the user wrote it.
    name: of the method for `js.partial.simulate`.
    options: for it.
  """

  label: str
  name: str
  options: dict[str, Any]


class Environment(NamedTuple):
  """Where workers train.

  Attributes:
    workers: N.
    level: HL, how many of them, the last ones, share an accelerator.
    jitter: standard deviation of the logarithm of a step's time.
    slow_links: how many workers, the first ones, have slow links.
    occupancy: fraction of a step in which an accelerator is busy (`js.partial.sharing`).
  """

  workers: int
  level: int = 1
  jitter: float = 0.1
  slow_links: int = 0
  occupancy: float = 1.0

  def __str__(self) -> str:
    occupied = f", occupancy {self.occupancy:g}" * (self.occupancy < 1)
    links = f", {self.slow_links} slow links" * (self.slow_links > 0)
    workers = f"{self.workers} worker{'s' * (self.workers > 1)}"
    return f"{workers}, HL = {self.level}{occupied}, jitter {self.jitter:g}{links}"


class Settings(NamedTuple):
  """What all trainings have in common.

  Attributes:
    workers: N for which `rate` is: the rate of N′ workers is N′/N times that, so a gradient counts the same.
    batch_size: images of each worker in each step.
    rate: of SGD with momentum 0.9.
    target: test accuracy to reach.
    limit: seconds of virtual time after which a method counts as not reaching it.
    wire: seconds of a model from one worker to another.
    slow_link: how many times as long that is on a slow link.
    folds: of cross-validation; 1 for the first of five.
  """

  workers: int
  batch_size: int
  rate: float
  target: float
  limit: float
  wire: float
  slow_link: float
  folds: int


class Row(NamedTuple):
  """One method in one environment, means over the runs.

  Attributes:
    part: what it was measured for.
    label: of the method.
    environment: of its workers.
    settings: of the training.
    runs: one for each seed and fold.
    reached: how many of them reached the target.
    seconds: of virtual time to the target; None if not all reached it.
    deviation: of the seconds over the runs.
    updates: to the target, or until the end.
    gradients: of workers, likewise.
    per_update: seconds of virtual time.
    rho: of the groups; None without groups.
  """

  part: str
  label: str
  environment: Environment
  settings: Settings
  runs: int
  reached: int
  seconds: float | None
  deviation: float
  updates: float
  gradients: float
  per_update: float
  rho: float | None


def parse(label: str, workers: int) -> Method:
  """What a label of --methods names.

  Raises:
    ValueError: for an unknown name, a group size or a decay that does not fit.

  Example:
    >>> parse("initial:3:0.9", workers=8)
    Method(label='initial:3:0.9', name='dynamic', options={'missing': 'initial', 'group_size': 3, 'decay': 0.9})
  """
  name, colon, numbers = label.partition(":")
  if name not in GROUPED and (colon or name not in METHODS):
    raise ValueError(
      f"--methods={label}, choose from {', '.join(METHODS[:-2])}, constant:P, dynamic:P, initial:P, and with an α "
      "dynamic:P:α, initial:P:α"
    )
  if name not in GROUPED:
    return Method(label, name, {})
  size, _, decay = numbers.partition(":")
  if not size.isdecimal() or not 2 <= int(size) <= workers:
    raise ValueError(f"--methods={label}: give a group size of 2 … {workers} behind a colon")
  options: dict[str, Any] = {"missing": "initial"} if name == "initial" else {}
  options["group_size"] = int(size)
  if decay:
    options["decay"] = _decay(label, name, decay)
  return Method(label, "dynamic" if name == "initial" else name, options)


def _decay(label: str, name: str, given: str) -> float:
  """α of a label, behind its group size."""
  try:
    decay = float(given)
  except ValueError:
    decay = -1.0
  if name == "constant" or not 0 <= decay < 1:
    raise ValueError(f"--methods={label}: give dynamic weights an α from 0 to 1, less than 1, behind the group size")
  return decay


class Bench:
  """Trains by any method in any environment from any seed, on the same task."""

  def __init__(self, settings: Settings) -> None:
    self._settings = settings
    folds = settings.folds if settings.folds > 1 else data.FOLDS
    self._task = functools.cache(lambda fold: small.make("mlp", data.load("digits", fold=fold, folds=folds)))

  def simulate(self, method: Method, environment: Environment, seed: int, fold: int = 0) -> js.partial.Simulation:
    """One run."""
    task, given = self._task(fold), self._settings
    model = model_of(task, seed)
    slow = [given.slow_link] * environment.slow_links
    size, level, jitter, _, occupancy = environment
    return js.partial.simulate(
      method.name,
      model.plain_loss,
      model.params,
      lambda worker: task.stream(data.seed_of(seed, worker), 1, given.batch_size),
      js.partial.sharing(size, level, jitter=jitter, occupancy=occupancy),
      tx=optax.sgd(size / given.workers * given.rate, momentum=0.9),
      seconds=given.limit,
      alpha=given.wire / 100,
      beta=given.wire / (4 * task.entries),
      links=[*slow, *[1.0] * (size - len(slow))],
      evaluate=model.accuracy,
      every=0.5,
      target=given.target,
      seed=seed,
      **method.options,
    )


def row(
  part: str, method: Method, environment: Environment, settings: Settings, runs: Sequence[js.partial.Simulation]
) -> Row:
  """Means over the runs of all seeds and folds."""
  mean = lambda value: statistics.mean(map(value, runs))
  reached = sum(run.reached for run in runs)
  seconds = [run.seconds for run in runs]
  return Row(
    part,
    method.label,
    environment,
    settings,
    len(runs),
    reached,
    statistics.mean(seconds) if reached == len(runs) else None,
    statistics.stdev(seconds) if len(runs) > 1 else 0.0,
    mean(lambda run: run.updates),
    mean(lambda run: run.gradients),
    mean(lambda run: run.seconds_per_update),
    mean(lambda run: js.partial.rho(run.groups, environment.workers)) if all(run.groups for run in runs) else None,
  )


def plain(rows: Sequence[Row]) -> list[dict[str, Any]]:
  """The rows for JSON; `read` is the inverse."""
  nested = lambda one: {"environment": one.environment._asdict(), "settings": one.settings._asdict()}
  return [report.rounded({**one._asdict(), **nested(one)}) for one in rows]


def read(rows: Sequence[dict[str, Any]]) -> list[Row]:
  """The rows of `plain`."""
  whole = lambda one: {"environment": Environment(**one["environment"]), "settings": Settings(**one["settings"])}
  return [Row(**{**one, **whole(one)}) for one in rows]
