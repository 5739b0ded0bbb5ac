"""Trainings of the digits in virtual time: the methods, the environments of workers, and the rows of the tables."""

import functools
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import optax

import jaxsparse as js
from benchmarks.heterogeneous import methods
from benchmarks.heterogeneous.lab import Lab, Simulation, shared_paces
from benchmarks.tasks import data, images
from benchmarks.tasks.base import model_of
from jaxsparse.partial.net.messages import WorkerGroup

# seconds of virtual time of workers that exchange nothing: their accuracy rises no more,
# and the means of all methods of several workers are fewer
CONTROL_LIMIT = 720.0


class Method(NamedTuple):
  """What `methods.make_method` takes."""

  name: str
  options: dict[str, Any]


class Environment(NamedTuple):
  """Where workers train; the first `slow_links` have slow links, for the rest see `lab.shared_paces`."""

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
  """The values of the flags that all trainings have in common.

  `workers` is the N for which `rate` is: the rate of N′ workers is N′/N times that, so
  a gradient counts the same.
  """

  workers: int
  rate: float  # of learning
  target: float  # test accuracy to reach
  limit: float  # seconds of virtual time
  folds: int = 1  # of cross-validation
  batch_size: int = 16  # images of each worker in a step
  wire: float = 0.1  # seconds that one model takes from one worker to another
  slow_link: float = 10.0  # how many times as long a message takes on a slow link


class Row(NamedTuple):
  """One method in one environment: means over the runs, one for each seed and fold."""

  part: str
  label: str
  environment: Environment
  settings: Settings
  runs: int
  reached: int  # how many of the runs reached the target
  seconds: float | None  # of virtual time to the target; None if not all reached it
  deviation: float  # of the seconds over the runs
  updates: float  # to the target, or until the end; `gradients` likewise
  gradients: float
  per_update: float  # seconds of virtual time
  rho: float | None  # of the groups; None without groups


def theorem_1(row: Row) -> float | None:
  """The network's term of Theorem 1, without L, which is not known; None of other methods."""
  found = re.fullmatch(r"(?:constant|dynamic|initial):(\d+).*", row.label)
  if not found or row.rho is None:
    return None
  size, workers = int(found[1]), row.environment.workers
  rate = workers / row.settings.workers * row.settings.rate
  return js.partial.convergence_condition(
    row.rho, workers=workers, group_size=size, rate=rate
  )


def parse_method(label: str, workers: int) -> Method:
  """The method that a label of --methods names; ValueError for a name, a group size or an α that does not fit."""
  if label in methods.NAMES:
    # the paper's 3 of 8
    return Method(label, {"backups": 3 * workers // 8} if label == "backup" else {})
  found = re.fullmatch(r"(constant):(\d+)|(dynamic|initial):(\d+)(?::(.+))?", label)
  if not found:
    choices = f"{', '.join(methods.NAMES)}, constant:P, dynamic:P, initial:P, and with an α dynamic:P:α, initial:P:α"
    raise ValueError(f"--methods={label}, choose from {choices}")
  name: Any = found[1] or "dynamic"
  options: dict[str, Any] = {"group_size": int(found[2] or found[4])}
  try:
    options |= {"decay": float(found[5])} if found[5] else {}
    options |= {"missing": "initial"} if found[3] == "initial" else {}
    js.partial.Controller(workers, weights=name, **options)
  except ValueError as error:
    raise ValueError(f"--methods={label}: {error}") from None
  return Method(name, options)


class Bench:
  """Trains by any method in any environment from any seed, on the same task.

  Every worker has images of its own, an equal share of each class, as in the paper:
  with all images at every worker, workers that exchange nothing reach the target too.
  """

  def __init__(self, settings: Settings) -> None:
    self._settings = settings
    folds = settings.folds if settings.folds > 1 else data.FOLDS
    self._data = functools.cache(
      lambda fold: data.load("digits", fold=fold, folds=folds)
    )
    self._task = functools.cache(
      lambda fold: images.make_small("mlp", self._data(fold))
    )

  def _batches(self, workers: int, seed: int, fold: int) -> Callable[[int], Iterator]:
    """Endless batches of a worker's own images, by its number."""
    whole = self._data(fold)
    rows = data.equal_shares(seed, whole.train_labels, workers)

    def batches(worker: int) -> Iterator:
      own = rows[worker]
      stream = data.epochs(whole.train_images[own], whole.train_labels[own])
      return stream(data.seed_of(seed, worker), 1, self._settings.batch_size)

    return batches

  def simulate(
    self, method: Method, environment: Environment, seed: int, fold: int = 0
  ) -> Simulation:
    """One run."""
    task, given = self._task(fold), self._settings
    model = model_of(task, seed)
    size, level, jitter, slow_links, occupancy = environment
    lab = Lab(
      model.plain_loss,
      model.params,
      self._batches(size, seed, fold),
      shared_paces(size, level, jitter=jitter, occupancy=occupancy),
      optax.sgd(size / given.workers * given.rate, momentum=0.9),
      alpha=given.wire / 100,
      beta=given.wire / (4 * task.entries),
      links=[given.slow_link] * slow_links + [1.0] * (size - slow_links),
      seed=seed,
    )
    chosen = methods.make_method(method.name, lab, **method.options)
    limit = min(given.limit, CONTROL_LIMIT) if method.name == "alone" else given.limit
    return lab.run(chosen, limit, model.accuracy, every=0.5, target=given.target)


def rho(groups: Sequence[WorkerGroup], workers: int) -> float:
  """How slowly groups spread what a worker has learned (§3.2): `max(|λ₂|, |λ_N|)` of the mean of their W (eq. 6).

  Each W averages the models of one group, X ← X W, and leaves the others as they are. 0
  if every group has all workers, 1 if the workers are not connected.
  """
  total = np.zeros((workers, workers))
  for group in groups:
    members = list(group.members)
    one = np.eye(workers)
    one[:, members] = 0
    one[np.ix_(members, members)] = np.array(group.weights)[:, None]
    total += one
  return float(sorted(np.abs(np.linalg.eigvals(total / len(groups))))[-2])


def make_row(
  part: str,
  label: str,
  environment: Environment,
  settings: Settings,
  runs: Sequence[Simulation],
) -> Row:
  """Means over the runs of all seeds and folds."""
  seconds = [run.seconds for run in runs]
  grouped = all(run.groups for run in runs)
  return Row(
    *(part, label, environment, settings, len(runs)),
    reached=sum(run.reached for run in runs),
    seconds=statistics.mean(seconds) if all(run.reached for run in runs) else None,
    deviation=statistics.stdev(seconds) if len(runs) > 1 else 0.0,
    updates=statistics.mean(run.updates for run in runs),
    gradients=statistics.mean(run.gradients for run in runs),
    per_update=statistics.mean(run.seconds / max(1, run.updates) for run in runs),
    rho=statistics.mean(rho(run.groups, environment.workers) for run in runs)
    if grouped
    else None,
  )


def from_json(rows: Sequence[dict[str, Any]]) -> list[Row]:
  """The rows of a file."""
  nested = lambda one: {
    "environment": Environment(**one["environment"]),
    "settings": Settings(**one["settings"]),
  }
  return [Row(**one | nested(one)) for one in rows]
