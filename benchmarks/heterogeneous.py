r"""Partial reduce beside seven other ways to train workers of different speeds, in virtual time: the paper's Table 1.

Eight workers train an MLP on the digits. Gradients are real; a step of a worker takes a second of virtual time, give or
take --jitter, and HL times as long for each of HL workers that share one accelerator (§5.2). The run time is the
virtual time until the mean of the models first has the --target accuracy on the test set, evaluated every half second.
Everything is deterministic by seed; the tables show means over the seeds.

"per update" is an average of a group or of all, or one step of the one model, as in the paper. "initial" is dynamic
partial reduce as the paper describes it, where the weight of iterations that no worker is in goes to the initial model.

Then ρ of the groups against the paper's Figure 4; its Figure 3 as a timeline of each worker's work, waiting and
averaging; and its Figure 8, partial reduce over P at the lowest level. Figures go to --report_dir: heterogeneous.png,
timeline.png, group_size.png.

Examples:
  python -m benchmarks.heterogeneous
  python -m benchmarks.heterogeneous --levels=3 --methods=allreduce,dynamic:3,dynamic:5 --seed=0
  python -m benchmarks.heterogeneous --json | jq '.rows[] | [.level, .label, .seconds]'
"""

import functools
import itertools
import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import rich.console
import rich.progress
import rich.table
from absl import flags

import jaxsparse as js
from benchmarks import data, entry, papers, report, training, workers
from benchmarks.heterogeneous_figures import Row, Runs, draw_curves, draw_sweep, draw_timeline
from jaxsparse.partial.simulation import METHODS

_ALL = [*METHODS[:-2], "constant:3", "dynamic:3", "initial:3", "constant:5", "dynamic:5"]

_METHODS = flags.DEFINE_list(
  "methods", _ALL, "Methods; constant, dynamic and initial with a group size behind a colon."
)
_WORKERS = flags.DEFINE_integer("workers", 8, "Number of workers.")
_LEVELS = flags.DEFINE_list(
  "levels", ["1", "2", "3"], "Heterogeneity levels HL: how many workers share an accelerator."
)
_SWEEP = flags.DEFINE_list("sweep", ["2", "3", "4", "5", "6", "7", "8"], "Group sizes for Figure 8; none with --sweep=")
_TARGET = flags.DEFINE_float("target", 0.97, "Test accuracy to reach.")
_LIMIT = flags.DEFINE_float("limit", 600, "Seconds of virtual time after which a method counts as not reaching it.")
_JITTER = flags.DEFINE_float("jitter", 0.1, "Standard deviation of the logarithm of a step's time.")
_WIRE = flags.DEFINE_float("wire", 0.1, "Seconds that one model takes from one worker to another, in virtual time.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Images of each worker in each step.")
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 0.02, "Of SGD with momentum 0.9.")
_SEED = flags.DEFINE_multi_integer("seed", [0, 1, 2], "Of parameters, batches and step times. Repeat it.")
_REPORT_DIR = flags.DEFINE_string("report_dir", "out", "Folder for the figures.")
_JSON = flags.DEFINE_bool(
  "json", False, "Print the result as JSON on standard output, everything else on standard error."
)


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


class Spread(NamedTuple):
  """One environment of the paper's Figure 4.

  Attributes:
    what: in words.
    paper: ρ there.
    rho: of the groups that were formed.
    paper_share: of the groups, that the slowest worker is in there.
    share: here.
  """

  what: str
  paper: float
  rho: float
  paper_share: float
  share: float


def parse(label: str, workers: int) -> Method:
  """What a label of --methods names.

  Raises:
    ValueError: for an unknown name, or a group size that does not fit.

  Example:
    >>> parse("initial:3", workers=8)
    Method(label='initial:3', name='dynamic', options={'missing': 'initial', 'group_size': 3})
  """
  name, colon, size = label.partition(":")
  grouped = name in ("constant", "dynamic", "initial")
  if not grouped and (colon or name not in METHODS):
    raise ValueError(f"--methods={label}, choose from {', '.join(METHODS[:-2])}, constant:P, dynamic:P, initial:P")
  if not grouped:
    return Method(label, name, {})
  if not size.isdecimal() or not 2 <= int(size) <= workers:
    raise ValueError(f"--methods={label}: give a group size of 2 … {workers} behind a colon")
  missing = {"missing": "initial"} if name == "initial" else {}
  return Method(label, "dynamic" if missing else name, {**missing, "group_size": int(size)})


class Bench:
  """Simulates any method at any level from any seed, on the same task."""

  def __init__(self) -> None:
    self._dataset = data.load("digits")
    place = workers.here("sim", 1)
    self._task = functools.cache(lambda seed: training.make_task("mlp", self._dataset, place, _BATCH_SIZE.value, seed))

  def simulate(self, method: Method, level: int, seed: int) -> js.partial.Simulation:
    """One run."""
    task = self._task(seed)
    images, labels = self._dataset.train_images, self._dataset.train_labels
    return js.partial.simulate(
      method.name,
      task.loss,
      task.params,
      lambda worker: data.batches(images, labels, _BATCH_SIZE.value, _stream(seed, worker)),
      js.partial.sharing(_WORKERS.value, level, jitter=_JITTER.value),
      tx=optax.sgd(_LEARNING_RATE.value, momentum=0.9),
      seconds=_LIMIT.value,
      alpha=_WIRE.value / 100,
      beta=_WIRE.value / (4 * task.entries),
      evaluate=task.accuracy,
      every=0.5,
      target=_TARGET.value,
      seed=seed,
      **method.options,
    )


def _stream(seed: int, worker: int) -> int:
  """A seed of a worker's own."""
  return int(np.random.SeedSequence([seed, worker]).generate_state(1)[0])


def row(method: Method, level: int, runs: Sequence[js.partial.Simulation], size: int) -> Row:
  """Means over the runs of all seeds."""
  mean = lambda value: statistics.mean(map(value, runs))
  reached = sum(run.reached for run in runs)
  seconds = [run.seconds for run in runs]
  return Row(
    method.label,
    level,
    reached,
    statistics.mean(seconds) if reached == len(runs) else None,
    statistics.stdev(seconds) if len(runs) > 1 else 0.0,
    mean(lambda run: run.updates),
    mean(lambda run: run.gradients),
    mean(lambda run: run.seconds_per_update),
    mean(lambda run: js.partial.rho(run.groups, size)) if all(run.groups for run in runs) else None,
  )


def table(rows: Sequence[Row], level: int, seeds: int) -> rich.table.Table:
  """One heterogeneity level."""
  rows = [one for one in rows if one.level == level]
  base = next((one.seconds for one in rows if one.label == "allreduce"), None)
  result = rich.table.Table(title=f"HL = {level}, seconds of virtual time to {_TARGET.value:g}, {seeds} seeds")
  result.add_column("method", no_wrap=True)
  for head in ("run time", "× all-reduce", "updates", "per update", "gradients", "ρ"):
    result.add_column(head, justify="right", no_wrap=True)
  for one in rows:
    reached = one.seconds is not None
    result.add_row(
      one.label,
      f"{one.seconds:.0f} ± {one.deviation:.0f}" if reached else f"N/A ({one.reached} of {seeds} reach it)",
      f"{base / one.seconds:.2f}" if base and one.seconds else "–",
      f"{one.updates:,.0f}" if reached else "–",
      f"{one.per_update:.3f}",
      f"{one.gradients:,.0f}" if reached else "–",
      "–" if one.rho is None else f"{one.rho:.3f}",
    )
  return result


def figure_4(groups: int = 1000) -> list[Spread]:
  """The two environments of Figure 4, N = 3 and P = 2, with step times drawn."""
  found = []
  for what, slow, share in (("homogeneous", 1.0, 2 / 3), ("one twice as slow", 2.0, 1 / 2)):
    paces = [*js.partial.sharing(2, 1), *js.partial.sharing(1, 1, seconds=slow)]
    run = js.partial.simulate(
      "constant",
      lambda x, batch: jnp.sum(x * batch),
      jnp.zeros(1),
      lambda _: itertools.repeat(jnp.zeros(1)),
      paces,
      tx=optax.identity(),
      seconds=groups * 2 / sum(1 / s for s in (1, 1, slow)),
      group_size=2,
    )
    slow_ones = sum(2 in group.members for group in run.groups) / len(run.groups)
    found.append(
      Spread(what, papers.number("Partial Reduce", "Figure 4", what), js.partial.rho(run.groups, 3), share, slow_ones)
    )
  return found


def goals(rows: Sequence[Row]) -> list[report.Goal]:
  """The goal of the simulation."""
  seconds = {(one.label, one.level): one.seconds for one in rows}
  base, dynamic = seconds.get(("allreduce", 3)), seconds.get(("dynamic:3", 3))
  ratio = base / dynamic if base and dynamic else None
  return [
    report.Goal(
      "dynamic partial reduce (P = 3) ≥ 1.48 × as fast as all-reduce at HL = 3, simulated",
      ratio,
      None if ratio is None else ratio >= 1.48,
    ),
  ]


def _check_flags() -> tuple[list[Method], list[int], list[Method]]:
  """Methods, levels, and the methods of the sweep; raises ValueError before anything is trained."""
  for flag, least in ((_WORKERS, 2), (_BATCH_SIZE, 1)):
    if flag.value < least:
      raise ValueError(f"--{flag.name}={flag.value}, choose at least {least}")
  for positive in (_LIMIT, _WIRE):
    if not positive.value > 0:
      raise ValueError(f"--{positive.name}={positive.value:g}, choose more than 0")
  for level in _LEVELS.value:
    if not level.isdecimal() or not 1 <= int(level) <= _WORKERS.value:
      raise ValueError(f"--levels={level}, choose 1 … {_WORKERS.value}, the number of workers")
  methods = [parse(label, _WORKERS.value) for label in dict.fromkeys(_METHODS.value)]
  sweep = [parse(f"constant:{size}", _WORKERS.value) for size in _SWEEP.value]
  return methods, [int(level) for level in _LEVELS.value], sweep


def _measure(cases: Sequence[tuple[int, Method]], console: rich.console.Console) -> Runs:
  """The runs of each method and level, one a seed; a method and level that is asked for twice is run once."""
  cases = list({(method.label, level): (level, method) for level, method in cases}.values())
  bench, seeds = Bench(), list(dict.fromkeys(_SEED.value))
  columns = [
    rich.progress.TextColumn("{task.description:>24}"),
    rich.progress.BarColumn(),
    rich.progress.MofNCompleteColumn(),
    rich.progress.TimeRemainingColumn(),
  ]
  runs: dict[tuple[str, int], list[js.partial.Simulation]] = {}
  with rich.progress.Progress(*columns, console=console) as progress:
    bar = progress.add_task("", total=len(cases) * len(seeds))
    for (level, method), seed in itertools.product(cases, seeds):
      progress.update(bar, description=f"HL {level}, {method.label}, seed {seed}")
      runs.setdefault((method.label, level), []).append(bench.simulate(method, level, seed))
      progress.advance(bar)
  return runs


def main() -> None:
  """Simulates and reports."""
  console = workers.make_console(stderr=_JSON.value)
  methods, levels, sweep = _check_flags()
  cases = [(level, method) for level in levels for method in methods] + [(min(levels), method) for method in sweep]
  runs = _measure(cases, console)
  _report(methods, sweep, levels, runs, console)


def _report(
  methods: Sequence[Method],
  sweep: Sequence[Method],
  levels: Sequence[int],
  runs: Runs,
  console: rich.console.Console,
) -> None:
  row_of = lambda method, level: row(method, level, runs[method.label, level], _WORKERS.value)
  rows = [row_of(method, level) for level in levels for method in methods]
  swept = [row_of(method, min(levels)) for method in sweep]
  worst, folder = max(levels), pathlib.Path(_REPORT_DIR.value)
  for level in levels:
    console.print(table(rows, level, len(set(_SEED.value))))
  rhos = figure_4()
  for one in rhos:
    shares = f"the slowest is in {one.share:.2f} of the groups ({one.paper_share:.2f})"
    console.print(f"Figure 4, {one.what}: ρ is {one.rho:.3f} (there {one.paper:g}), {shares}", highlight=False)
  console.print(papers.beside(papers.of("heterogeneous"), {one.what: one.rho for one in rhos}))
  shown = {key: found for key, found in runs.items() if key[0] in {method.label for method in methods}}
  draw_curves(shown, worst, _WORKERS.value, _TARGET.value, folder / "heterogeneous.png")
  timelines = [(label, found[0]) for (label, level), found in shown.items() if level == worst]
  chosen = [one for one in timelines if one[0] in ("allreduce", "eager", "constant:3")] or timelines[:1]
  draw_timeline(chosen, worst, _WORKERS.value, folder / "timeline.png")
  drawn = ["heterogeneous.png", "timeline.png"]
  if swept:
    draw_sweep(swept, _WORKERS.value, folder / "group_size.png")
    drawn.append("group_size.png")
  console.print(f"figures in {folder}: {', '.join(drawn)}")
  reached = goals(rows)
  report.say(reached, console)
  if _JSON.value:
    plain = lambda values: [value._asdict() for value in values]
    print(json.dumps({"rows": plain(rows), "sweep": plain(swept), "figure_4": plain(rhos), "goals": plain(reached)}))


if __name__ == "__main__":
  entry.run(main)
