"""`Race`, what `js.race` returns: a table, the best method on a link, a figure, and evidence for `js.costs.advise`."""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from jaxsparse.costs.advice import Evidence
from jaxsparse.train.agreement import Agreement
from jaxsparse.types import Link

DENSE = "dense"
# Workers' data differ if ρ < `_SHARE` · (ρ of shuffled rows) − `_MARGIN`, where ρ is
# the mean product of two workers' gradients over their mean square.
_SHARE = 0.6
_MARGIN = 0.05
# the most percent above dense's loss, for a method that is good enough; `notes` also
# names methods whose percent above dense's has a larger deviation over the seeds
_MAX_PERCENT = 2.0


class Row(NamedTuple):
  """One method at the best of its rates.

  Attributes:
    method: its name.
    rate: the best learning rate.
    multiple: `rate` over the user's own rate.
    tried: [multiple, mean loss over the seeds when it was last compared] of each rate,
      in ascending order.
    steps: after which the model was evaluated. They go on behind the steps of the race
      while dense's loss was not reached.
    losses: [seed][evaluation], the loss after each of `steps`; NaN behind the end of a
      seed that ended before another one, Inf where it is not finite.
    words: 4-byte words a step, of the worker that sent most.
    messages: messages a step, one after the other.
    state_bytes: bytes of optimizer state of a worker for each parameter.
    seconds: of a step of one worker without its messages, on this machine.
    collective: its label, where the chain has one; else "".
    every: steps from one exchange to the next; 0 if there was none.
  """

  method: str
  rate: float
  multiple: float
  tried: list[list[float]]
  steps: list[int]
  losses: list[list[float]]
  words: float
  messages: float
  state_bytes: float
  seconds: float
  collective: str
  every: int

  def step_seconds(self, link: Link) -> float:
    """Seconds of a step of one worker with its messages on a link."""
    # A word has 4 bytes. Messages are sent one after the other: none overlaps, so γ,
    # the slowdown of those that do, does not count.
    return self.seconds + link.alpha * self.messages + 4 * link.beta * self.words


@dataclasses.dataclass(frozen=True)
class Race:
  """The result of `js.race`; `print` it for a table.

  Attributes:
    rows: a `Row` for each method that was tried, dense first.
    steps: the steps after which losses are compared. A method whose loss is then above
      dense's trains on until dense's loss, for about half as many steps more at most.
    workers: number of workers P.
    entries: number of parameters n.
    rate: the user's own learning rate.
    links: α, β and γ of each link, by its name.
    agreements: `js.agreement` of the workers' gradients at the parameters of dense
      training before it, after a tenth of its steps, and at its end.
    left_out: methods for which `budget` had no time.

  `losses(row)` are the losses of a row after `steps` steps, and `above(row)` the
  percent by which they are above dense's; both are f64[seeds].
  """

  rows: list[Row]
  steps: int
  workers: int
  entries: int
  rate: float
  links: dict[str, Link]
  agreements: list[Agreement]
  left_out: list[str]

  def losses(self, row: Row) -> np.ndarray:
    """The loss of each seed, f64[seeds], after as many steps as dense."""
    # A method above dense has later evaluations, too.
    return np.array(row.losses)[:, row.steps.index(self.steps)]

  def above(self, row: Row) -> np.ndarray:
    """Percent of each seed's loss above that of dense from the same seed, f64[seeds]."""
    dense = self.losses(self.rows[0])
    more = self.losses(row) - dense
    # Equal losses are 0 % apart, those of 0 too, which the division would make NaN.
    return np.divide(
      100 * more, np.abs(dense), out=np.zeros_like(more), where=more != 0
    )

  def is_noise(self, row: Row) -> bool:
    """Whether the difference to dense is within two standard errors over the seeds."""
    above = self.above(row)
    return abs(float(above.mean())) <= _two_errors(above)

  def is_at_edge(self, row: Row) -> bool:
    """Whether the best of several rates is the lowest or the highest of them."""
    # Multiples of the user's rate, as `row.multiple` is.
    multiples = [multiple for multiple, _ in row.tried]
    return len(multiples) > 1 and row.multiple in (min(multiples), max(multiples))

  def steps_to_dense(self, row: Row) -> np.ndarray:
    """Steps after which each seed reaches dense's loss, f64[seeds], interpolated; NaN for a seed that never does."""
    # Each seed is compared with dense from the same seed, after the steps of the race.
    targets = self.losses(self.rows[0])
    curves = zip(row.losses, targets, strict=True)
    return np.array([_crossing(row.steps, losses, target) for losses, target in curves])

  def best(self, link: str | None = None, within: float = _MAX_PERCENT) -> Row:
    """The method with the fewest seconds per step on a link, of those whose loss is surely close to dense's.

    Args:
      link: the name of one of the race's links; None for the first one.
      within: the most percent above dense's loss that a method may have: its mean over
        the seeds plus two standard errors. With one seed the error is taken as 0.

    Raises:
      ValueError: for another link, `within` below 0, or if dense has diverged.
    """
    chosen = link or next(iter(self.links))
    if chosen not in self.links:
      raise ValueError(
        f"best: link={link!r}, choose one of {', '.join(map(repr, self.links))}"
      )
    most = lambda above: above.mean() + _two_errors(above)
    # False for NaN, of a method with a seed that diverged
    good = [row for row in self.rows if most(self.above(row)) <= within]
    # Dense is 0 % above itself, unless it has diverged.
    if not good:
      raise ValueError(
        f"best: within={within!r}, choose 0 or more, and rates at which dense does not diverge"
      )
    return min(good, key=lambda row: row.step_seconds(self.links[chosen]))

  @property
  def evidence(self) -> list[Evidence]:
    """A row for each method but dense that exchanges by one collective, for `js.costs.advise(evidence=)`."""
    # Dense, too, may have reached its final loss before its final step.
    dense = self.steps_to_dense(self.rows[0])
    evidence = []
    for row in self.rows[1:]:
      ratios = self.steps_to_dense(row) / dense
      spread = (float(ratios.mean()), _deviation(ratios))
      # None where a seed has not reached dense's loss
      steps, deviation = spread if np.isfinite(ratios).all() else (None, None)
      optimizer = f"rate {row.rate:g}"
      task = f"{self.entries:,} parameters"
      # the first fields of `Evidence`, in their order
      key = row.method, row.collective, row.every, optimizer, task, self.workers
      if row.collective and row.every:
        evidence.append(Evidence(*key, steps, deviation, len(ratios)))
    return evidence

  def __str__(self) -> str:
    title = (
      f"{self.entries:,} parameters, {self.workers} workers, {self.steps} steps, "
      f"seeds: {len(self.rows[0].losses)}, rates in multiples of {self.rate:g}"
    )
    heads = ["method", "rate", "loss", "% above", "bits", "bytes"]
    for link in self.links:
      heads += [link, "s"]
    table = [heads, *map(self._cells, self.rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    # The first column is text, to the left; the others are numbers.
    lines = [
      "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
      for row in table
    ]
    legend = (
      "% above dense; bits a parameter and step; bytes of optimizer state a parameter\n"
      f"{', '.join(self.links)}: ms a step, of a worker here and its messages; s: seconds to dense's loss"
    )
    return "\n".join([title, *lines, legend, *self.notes()])

  def _cells(self, row: Row) -> list[str]:
    """The cells of a row of the table: one for each of its heads, so two for each link."""
    losses = self.losses(row)
    above = self.above(row)
    # * marks a best rate that is the lowest or the highest one tried
    cells = [row.method, f"{row.multiple:g}" + "*" * self.is_at_edge(row)]
    cells += [f"{losses.mean():.4g} ± {_deviation(losses):.1g}"]
    cells += [f"{above.mean():+.1f} ± {_deviation(above):.1f}"]
    # A word has 32 bits.
    cells += [f"{32 * row.words / self.entries:.2f}", f"{row.state_bytes:.1f}"]
    # NaN if a seed has not reached dense's loss
    steps = self.steps_to_dense(row).mean()
    for link in self.links.values():
      seconds = row.step_seconds(link)
      total = "never" if math.isnan(steps) else f"{steps * seconds:.3g}"
      cells += [f"{1e3 * seconds:.3g}", total]
    return cells

  def notes(self) -> list[str]:
    """Sentences on rates at the edge, differences within noise, workers whose data differ, and methods left out."""
    names = lambda rows: "; ".join(row.method for row in rows)
    notes = []
    if rows := [row for row in self.rows if self.is_at_edge(row)]:
      notes.append(
        f"* the best rate is at the edge of those tried, try more: {names(rows)}"
      )
    if len(self.rows[0].losses) == 1:
      notes.append("one seed: nothing is known of the noise")
    elif rows := [row for row in self.rows[1:] if self.is_noise(row)]:
      notes.append(f"within the noise of the seeds of dense: {names(rows)}")
    # Where seeds differ so much, their mean says little.
    wide = lambda row: _deviation(self.above(row)) > _MAX_PERCENT
    if rows := list(filter(wide, self.rows[1:])):
      notes.append(
        f"seeds differ by more than {_MAX_PERCENT:g} %, race longer or with more: {names(rows)}"
      )
    pairs = [f"{pair.own:.2f} / {pair.shuffled:.2f}" for pair in self.agreements]
    if any(_differs(pair, self.workers) for pair in self.agreements):
      notes.append(
        f"the workers' data differ: agreement of gradients / of shuffled rows {', '.join(pairs)}; "
        "see docs/how_to/different_data.md"
      )
    if self.left_out:
      notes.append(f"no time was left for {'; '.join(self.left_out)}")
    return notes

  def plot(self, link: str | None = None) -> Any:
    """A matplotlib figure of the loss over steps, bits, and seconds on a link, by default the race's first link."""
    # an optional dependency, for figures alone
    from matplotlib import pyplot

    chosen = link or next(iter(self.links))
    figure, axes = pyplot.subplots(
      1, 3, figsize=(12, 3.5), sharey=True, layout="constrained"
    )
    for row in self.rows:
      # units of a step on the x axes of the panels: steps, bits a parameter, seconds
      scales = 1, 32 * row.words / self.entries, row.step_seconds(self.links[chosen])
      for ax, scale in zip(axes, scales, strict=True):
        # After the end of any seed the mean is NaN, which is not drawn.
        losses = np.mean(row.losses, axis=0)
        ax.plot(np.multiply(row.steps, scale), losses, label=row.method)
    for ax, name in zip(
      axes, ("steps", "bits a parameter", f"seconds, {chosen}"), strict=True
    ):
      ax.set_xlabel(name)
    # Signs send 1/32 of the bits of dense: a linear axis would squeeze their curve.
    axes[1].set_xscale("log")
    axes[0].set_ylabel("loss")
    axes[0].legend()
    return figure


def _differs(agreement: Agreement, workers: int) -> bool:
  """Whether the workers' data differ: ρ of their own rows is well below ρ of rows that were shuffled among them.

  ρ is the mean product of two workers' gradients over their mean square. It follows
  from the agreement (1 + (P − 1) ρ) / P, and does not depend on P as that does.
  """
  # P ≥ 2, as `js.race` checks. An agreement is the pair (own, shuffled).
  own, shuffled = ((workers * x - 1) / (workers - 1) for x in agreement)
  return own < _SHARE * shuffled - _MARGIN


def _deviation(values: np.ndarray) -> float:
  """Standard deviation over the seeds; 0 for one, NaN where a value is not finite."""
  if not np.isfinite(values).all():
    return math.nan
  return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def _two_errors(above: np.ndarray) -> float:
  """Two standard errors of the mean over the seeds; 0 for one seed, NaN where a value is not finite."""
  return 2 * _deviation(above) / math.sqrt(len(above))


def _crossing(steps: list[int], losses: list[float], target: float) -> float:
  """The step at which the loss is first at most `target`, interpolated; NaN if it never is."""
  # index of the first evaluation at or below the target
  first = next((i for i, loss in enumerate(losses) if loss <= target), None)
  if first is None:
    return math.nan
  # Interpolation needs a finite loss before this one.
  before = losses[first - 1] if first else math.inf
  if not math.isfinite(before):
    return float(steps[first])
  share = (before - target) / (before - losses[first])
  return steps[first - 1] + share * (steps[first] - steps[first - 1])
