r"""What Ok-Topk selects, delivers and leaves out in a training of the digits: §5.1 and §5.2 of its paper.

Rules are the paper's Algorithm 1 with messages of any length, the same with the
capacities that this library's messages have, of a worker, of a region, or both, and the
library's own: `nudge="none"` (Algorithm 1 again), "fixed" and "search".

    rules   entries that a worker selects and that are delivered, / k: mean, and mean of |count / k − 1|
    seen    of the paper's rule: density of the sum of all workers' top-k, entries that Gaussian-k's threshold
            selects / k, and ξ (Assumption 1) of gradients recorded with the library's rule

The first tenth of the steps counts for Gaussian-k and ξ alone.

Examples:
  python -m benchmarks.oktopk
  python -m benchmarks.oktopk --batch_size=64 --seed=0 --rules=paper,search --json | jq .rules
"""

import math
import statistics
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import jaxsparse as js
from benchmarks import entry, report
from benchmarks.oktopk.rules import LIMITS, OURS, Rule, library, rule_of
from benchmarks.tasks import data, images
from benchmarks.tasks.base import Model, model_of
from benchmarks.workers import make_console
from jaxsparse.arrays.flatten import flatten

_RULES = [*LIMITS, *OURS]

_CHOSEN = flags.DEFINE_list("rules", _RULES, "Rules.")
_WORKERS = flags.DEFINE_integer("workers", 16, "Number of workers.", lower_bound=2)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Images of each worker in a step.")
_STEPS = flags.DEFINE_integer("steps", 240, "Steps of a training.", lower_bound=20)
_DENSITIES = flags.DEFINE_list("densities", ["0.01", "0.02", "0.05"], "Of ξ.")
_SEED = entry.define_seeds([0, 1, 2])
_JSON = entry.define_json()
entry.require_choices(_CHOSEN, _RULES)

_DENSITY, _RATE = 0.01, 0.1


class Training:
  """The MLP of the digits, whose gradients a rule reduces."""

  def __init__(self, workers: int, batch_size: int, seed: int):
    task = images.make_small("mlp", data.load("digits"))
    model: Model = model_of(task, seed)
    self.workers, self._size = workers, batch_size
    self.params, self._unflatten = flatten(model.params)
    loss = lambda params, batch: model.plain_loss(self._unflatten(params), batch)
    self._grads = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))
    self._batches = task.stream(seed, workers, batch_size)
    self._loss = lambda params: model.evaluate(
      self._unflatten(params), model.statistics, task.train
    )[0]

  @property
  def loss(self) -> float:
    """The loss on the training set."""
    return self._loss(self.params)

  def gradients(self) -> np.ndarray:
    """f32[P, n], times the rate, of the next batches."""
    shape = self.workers, self._size
    split = lambda x: x.reshape(*shape, *x.shape[1:])
    batches = jax.tree.map(split, next(self._batches))
    return _RATE * np.asarray(self._grads(self.params, batches))

  def apply(self, total: np.ndarray) -> None:
    """One step with the mean of the gradients."""
    self.params = self.params - total / self.workers


class Selected(NamedTuple):
  """Entries of a rule behind the first tenth of the steps: means and standard deviations over seeds."""

  rule: str
  selected: list[float]  # / k
  selected_deviation: list[float]  # mean of |count / k − 1|
  delivered: list[float]
  delivered_deviation: list[float]
  words: list[float]  # that used slots take, / k(P − 1)/P
  within: list[
    float
  ]  # fraction of steps with at most 6 of these, the paper's most (Eq. 3)
  loss: list[float]  # of the training set at the end


class Seen(NamedTuple):
  """What does not depend on a rule's messages; means and standard deviations over seeds."""

  density: float  # of the top-k
  xi: list[float]  # mean over the last half of the steps
  xi_most: list[float]  # the largest
  fill_in: list[float] | None = None  # density of the sum of all workers' top-k
  gaussian: list[float] | None = None  # entries of Gaussian-k / k, in the first tenth
  gaussian_late: list[float] | None = None  # in the last half


def _spread(rows: list[list[float]]) -> list[list[float]]:
  """Mean and standard deviation of each column."""
  return [
    [statistics.mean(column), statistics.stdev(column) if len(column) > 1 else 0.0]
    for column in zip(*rows, strict=True)
  ]


def follow(name: str, seed: int) -> list[float]:
  """A training with a rule: the numbers of `Selected`."""
  training = Training(_WORKERS.value, _BATCH_SIZE.value, seed)
  n = training.params.size
  k = math.ceil(_DENSITY * n)
  reduce = rule_of(name, training.workers, n, k)
  rows = []
  for _ in range(_STEPS.value):
    total, (selected, delivered) = reduce(training.gradients())
    training.apply(total)
    own, given = selected / k, delivered / k
    # an index and a value, of what is selected and of what is gathered
    words = 2 * (own.mean() + given)
    deviations = np.abs(own - 1).mean(), abs(given - 1)
    rows.append([own.mean(), deviations[0], given, deviations[1], words, words <= 6])
  counted = np.array(rows[_STEPS.value // 10 :])
  return [*map(float, counted.mean(0)), training.loss]


def see(seed: int) -> list[float]:
  """A training with the paper's rule: density of the sum, and Gaussian-k's entries / k, early and late."""
  training = Training(_WORKERS.value, _BATCH_SIZE.value, seed)
  n = training.params.size
  k = math.ceil(_DENSITY * n)
  rule = Rule(training.workers, n, k, *LIMITS["paper"])
  tail = abs(statistics.NormalDist().inv_cdf(k / n / 2))
  densities, counts = [], []
  for _ in range(_STEPS.value):
    training.apply(rule(training.gradients())[0])
    acc = rule.accumulated
    least = np.partition(np.abs(acc), -k, axis=1)[:, -k]
    densities.append((np.abs(acc) >= least[:, None]).any(0).mean())
    # the quantile of a normal distribution of the same mean and deviation
    bound = np.abs(acc.mean(1)) + tail * acc.std(1)
    counts.append((np.abs(acc) >= bound[:, None]).sum(1).mean() / k)
  tenth, half = _STEPS.value // 10, _STEPS.value // 2
  means = np.mean(densities), np.mean(counts[:tenth]), np.mean(counts[half:])
  return [float(mean) for mean in means]


def xi_of(density: float, seed: int) -> list[float]:
  """ξ of a training with the library's rule: mean over the last half of the steps, and the most."""
  training = Training(_WORKERS.value, _BATCH_SIZE.value, seed)
  k = math.ceil(density * training.params.size)
  reduce = library(training.workers, k, "search")
  grads = []
  for _ in range(_STEPS.value):
    grads.append(training.gradients())
    training.apply(reduce(grads[-1])[0])
  found = js.costs.contraction(
    "oktopk", jnp.asarray(np.stack(grads)), density=density
  ).xi
  return [float(found[_STEPS.value // 2 :].mean()), float(found.max())]


def _text(pair: list[float] | None) -> str:
  return "–" if pair is None else f"{pair[0]:.3g} ± {pair[1]:.2g}"


def main() -> None:
  """Trains, and reports."""
  console = make_console(stderr=_JSON.value)
  where = f"{_WORKERS.value} workers, {_BATCH_SIZE.value} images each"
  rules, seen = [], []
  for name in _CHOSEN.value:
    rules.append(Selected(name, *_spread([follow(name, one) for one in _SEED.value])))
  counts = "selected / k", "deviation", "delivered / k", "deviation"
  heads: tuple[str, ...] = ("rule", *counts, "words / k(P−1)/P", "≤ 6", "loss")
  lines = [[row.rule, *map(_text, row[1:])] for row in rules]
  if rules:
    console.print(report.table(f"{where}, density {_DENSITY:g}", heads, lines))
  for density in map(float, _DENSITIES.value):
    own = [see(seed) for seed in _SEED.value] if density == _DENSITY else []
    xi = _spread([xi_of(density, seed) for seed in _SEED.value])
    seen.append(Seen(density, *xi, *_spread(own)))
  heads = "density", "ξ", "most", "of the sum", "Gaussian-k / k, early", "late"
  lines = [[f"{row.density:g}", *map(_text, row[1:])] for row in seen]
  if seen:
    console.print(report.table(where, heads, lines))
  if _JSON.value:
    report.print_json({"rules": rules, "seen": seen})


if __name__ == "__main__":
  entry.run(main)
