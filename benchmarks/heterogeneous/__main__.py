r"""Partial reduce beside seven other ways to train workers of different speeds, in virtual time: the paper's Table 1.

Eight workers train an MLP on the digits. Gradients are real; a step of a worker takes a second of virtual time, give or
take --jitter, and HL times as long for each of HL workers that share one accelerator (§5.2), or less with --occupancy.
The run time is the virtual time until the mean of the models first has the --target accuracy on the test set, evaluated
every half second. Everything is deterministic by seed; the tables show means over the seeds, and over the folds of
cross-validation with --folds.

"per update" is an average of a group or of all, or one step of the one model, as in the paper. "initial" is dynamic
partial reduce as the paper describes it, where the weight of iterations that no worker is in goes to the initial model.

--parts chooses what is measured:

    levels    Table 1 at --levels; ρ of the groups against Figure 4; Figure 3 as a timeline of each worker's work,
              waiting and averaging; Figure 8, partial reduce over P at the lowest level (heterogeneous.png,
              timeline.png, group_size.png)
    tail      Figure 9: --tail_workers workers whose step times have a heavy tail, that of a cluster shared with others
    scale     Figure 11: the same step times, --scale workers, speed-ups over one worker (scale.png)
    decay     --decays as the α of dynamic weights, P = 3, at the highest level (decay.png)
    links     --slow_links workers whose messages take --slow_link times as long, alone and beside slow workers

Rows are added to --results; --parts=none makes the tables of that file, and the figures scale.png and decay.png.

Examples:
  python -m benchmarks.heterogeneous
  python -m benchmarks.heterogeneous --levels=3 --methods=allreduce,dynamic:3,dynamic:5,dynamic:3:0.9 --seed=0
  python -m benchmarks.heterogeneous --parts=tail,scale --limit=4000
  python -m benchmarks.heterogeneous --parts=decay --folds=5 --seed=0
  python -m benchmarks.heterogeneous --parts=none --results=benchmarks/results/heterogeneous.json
  python -m benchmarks.heterogeneous --json | jq '.rows[] | [.environment.level, .label, .seconds]'
"""

import itertools
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import rich.console
import rich.progress
from absl import flags

from benchmarks import entry, papers, report, workers
from benchmarks.heterogeneous import figures, methods, virtual
from benchmarks.heterogeneous import report as tables
from benchmarks.heterogeneous.lab import Simulation
from benchmarks.heterogeneous.virtual import Bench, Environment, Method, Row

_ALL = [*methods.NAMES, "constant:3", "dynamic:3", "initial:3", "constant:5", "dynamic:5"]
PARTS = {
  "levels": "heterogeneity levels",
  "sweep": "Figure 8",
  "tail": "Figure 9",
  "scale": "Figure 11",
  "decay": "α of dynamic weights",
  "links": "slow links",
}

_PARTS = flags.DEFINE_list("parts", ["levels"], "What to measure: levels, tail, scale, decay, links, or none.")
_METHODS = flags.DEFINE_list(
  "methods", _ALL, "Methods of levels; constant, dynamic and initial with a group size behind a colon, then an α."
)
_WORKERS = flags.DEFINE_integer("workers", 8, "Number of workers.")
_LEVELS = flags.DEFINE_list(
  "levels", ["1", "2", "3"], "Heterogeneity levels HL: how many workers share an accelerator."
)
_OCCUPANCY = flags.DEFINE_float("occupancy", 1.0, "Fraction of a step in which an accelerator is busy.")
_SWEEP = flags.DEFINE_list("sweep", ["2", "3", "4", "5", "6", "7", "8"], "Group sizes for Figure 8; none with --sweep=")
_TAIL = flags.DEFINE_float("tail", 1.2, "Jitter of tail and scale: log-normal step times with a heavy tail.")
_TAIL_WORKERS = flags.DEFINE_integer("tail_workers", 16, "Number of workers for tail.")
_SCALE = flags.DEFINE_list("scale", ["1", "4", "8", "16", "32"], "Numbers of workers for scale, 1 or at least 4.")
_DECAYS = flags.DEFINE_list("decays", ["0.1", "0.3", "0.5", "0.7", "0.9"], "Values of α for decay.")
_SLOW_LINKS = flags.DEFINE_integer("slow_links", 2, "Workers with slow links, for links.")
_SLOW_LINK = flags.DEFINE_float("slow_link", 10, "How many times as long a model takes on a slow link.")
_TARGET = flags.DEFINE_float("target", 0.97, "Test accuracy to reach.")
_LIMIT = flags.DEFINE_float("limit", 600, "Seconds of virtual time after which a method counts as not reaching it.")
_JITTER = flags.DEFINE_float("jitter", 0.1, "Standard deviation of the logarithm of a step's time.")
_WIRE = flags.DEFINE_float("wire", 0.1, "Seconds that one model takes from one worker to another, in virtual time.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Images of each worker in each step.")
_LEARNING_RATE = flags.DEFINE_float(
  "learning_rate", 0.02, "Of SGD with momentum 0.9, for --workers; another number has it in proportion."
)
_SEED = flags.DEFINE_multi_integer("seed", [0, 1, 2], "Of parameters, batches and step times. Repeat it.")
_FOLDS = flags.DEFINE_integer("folds", 1, "Folds of cross-validation, each tested from each seed; 1 for one of five.")
_RESULTS = flags.DEFINE_string("results", None, "A file to which rows are added, and from which the tables are made.")
_REPORT_DIR = flags.DEFINE_string("report_dir", "out", "Folder for the figures.")
_JSON = flags.DEFINE_bool(
  "json", False, "Print the result as JSON on standard output, everything else on standard error."
)


Key = tuple[str, str, Environment]  # of a row: its part, the label of its method, and its environment


class Case(NamedTuple):
  """What to measure, and for which part."""

  part: str
  environment: Environment
  method: Method


def _check_flags() -> None:
  for flag, least in ((_WORKERS, 2), (_BATCH_SIZE, 1), (_FOLDS, 1), (_TAIL_WORKERS, 4), (_JITTER, 0), (_TAIL, 0)):
    if not flag.value >= least:
      raise ValueError(f"--{flag.name}={flag.value:g}, choose at least {least}")
  for positive in (_LIMIT, _WIRE, _SLOW_LINK):
    if not positive.value > 0:
      raise ValueError(f"--{positive.name}={positive.value:g}, choose more than 0")
  if not 0 <= _OCCUPANCY.value <= 1:
    raise ValueError(f"--occupancy={_OCCUPANCY.value:g}, choose 0 … 1")
  for name, values in (("slow_links", [str(_SLOW_LINKS.value)]), ("levels", _LEVELS.value)):
    for value in values:
      if not value.isdecimal() or not 1 <= int(value) <= _WORKERS.value:
        raise ValueError(f"--{name}={value}, choose 1 … {_WORKERS.value}, the number of workers")
  for size in _SCALE.value:
    if not size.isdecimal() or int(size) in (0, 2, 3):
      raise ValueError(f"--scale={size}, choose 1, or at least 4: groups are of 4")
  if unknown := [part for part in _PARTS.value if part not in (*_MAKERS, "none")]:
    raise ValueError(f"--parts={unknown[0]}, choose from {', '.join(_MAKERS)}, or none")


def _at(level: int, slow_links: int = 0) -> Environment:
  return Environment(_WORKERS.value, level, _JITTER.value, slow_links, _OCCUPANCY.value)


def _cases(part: str, where: Environment, labels: Iterable[str]) -> list[Case]:
  return [Case(part, where, virtual.parse_method(label, where.workers)) for label in dict.fromkeys(labels)]


def _levels() -> list[Case]:
  levels = [int(level) for level in _LEVELS.value]
  cases = [case for level in levels for case in _cases("levels", _at(level), _METHODS.value)]
  return cases + _cases("sweep", _at(min(levels)), [f"constant:{size}" for size in _SWEEP.value])


def _tail() -> list[Case]:
  labels = "allreduce", "backup", "adpsgd", "asp", "constant:4", "dynamic:4"
  return _cases("tail", Environment(_TAIL_WORKERS.value, jitter=_TAIL.value), labels)


def _scale() -> list[Case]:
  cases = []
  for size in map(int, dict.fromkeys(_SCALE.value)):
    where = Environment(size, jitter=_TAIL.value)
    cases += _cases("scale", where, ["allreduce"])
    if size > 1:
      cases.append(Case("scale", where, Method("backup", "backup", {"backups": size // 4})))  # as in the paper
      cases += _cases("scale", where, ["constant:4", "dynamic:4"])
  return cases


def _decay() -> list[Case]:
  labels = [f"{name}:3:{alpha}" for name in ("dynamic", "initial") for alpha in _DECAYS.value]
  return _cases("decay", _at(max(map(int, _LEVELS.value))), labels)


def _links() -> list[Case]:
  places = [_at(level, _SLOW_LINKS.value) for level in (1, max(map(int, _LEVELS.value)))]
  labels = "allreduce", "backup", "adpsgd", "asp", "constant:3", "dynamic:3"
  return [case for where in places for case in _cases("links", where, labels)]


_MAKERS = {"levels": _levels, "tail": _tail, "scale": _scale, "decay": _decay, "links": _links}


def _measure(cases: Sequence[Case], kept: dict[Key, Row], console: rich.console.Console) -> figures.Runs:
  """Adds the rows of cases to those that are kept; returns the runs of each method and environment.

  There is one run for each seed and fold; what several parts ask for is run once.
  """
  rates = (_LEARNING_RATE.value, _TARGET.value, _LIMIT.value, _WIRE.value, _SLOW_LINK.value)
  settings = virtual.Settings(_WORKERS.value, _BATCH_SIZE.value, *rates, _FOLDS.value)
  seeds, bench = list(itertools.product(dict.fromkeys(_SEED.value), range(settings.folds))), Bench(settings)
  runs: dict[tuple[str, Environment], list[Simulation]] = {}
  for part, where, method in rich.progress.track(cases, "simulating", console=console):
    key = method.label, where
    if key not in runs:
      runs[key] = [bench.simulate(method, where, seed, fold) for seed, fold in seeds]
    kept[part, method.label, where] = virtual.make_row(part, method, where, settings, runs[key])
    if _RESULTS.value:
      lines = map(json.dumps, virtual.to_json(kept.values()))
      report.replace(pathlib.Path(_RESULTS.value), '{"rows": [\n' + ",\n".join(lines) + "\n]}\n")
  return runs


def main() -> None:
  """Simulates what the flags ask for and reports."""
  console = workers.make_console(stderr=_JSON.value)
  _check_flags()
  cases = [case for part in _PARTS.value if part != "none" for case in _MAKERS[part]()]
  path = pathlib.Path(_RESULTS.value or "")
  former = virtual.from_json(json.loads(path.read_text())["rows"]) if path.is_file() else []
  kept = {(one.part, one.label, one.environment): one for one in former}
  runs = _measure(cases, kept, console) if cases else {}
  shown = {(case.part, case.method.label, case.environment) for case in cases}
  rows = [one for key, one in kept.items() if _RESULTS.value or key in shown]
  if not rows:
    raise ValueError("--parts=none needs --results, a file with rows")
  _report(rows, runs, {case.part for case in cases}, console)


def _report(rows: Sequence[Row], runs: figures.Runs, parts: set[str], console: rich.console.Console) -> None:
  for part, title in PARTS.items():
    for own in tables.group_by_environment(one for one in rows if one.part == part):
      console.print(tables.table(own, title))
  rhos = tables.figure_4() if "levels" in parts else []
  for one in rhos:
    shares = f"the slowest is in {one.share:.2f} of the groups ({one.paper_share:.2f})"
    console.print(f"Figure 4, {one.what}: ρ is {one.rho:.3f} (there {one.paper:g}), {shares}", highlight=False)
  drawn = _draw(rows, runs, parts, console)
  now = {one.what: one.rho for one in rhos} | tables.paper_cells(rows)
  console.print(papers.beside(papers.of("heterogeneous"), now))
  console.print(f"figures in {_REPORT_DIR.value}: {', '.join(drawn)}")
  reached = tables.goals(rows)
  report.say(reached, console)
  if _JSON.value:
    given = {"rows": virtual.to_json(rows), "figure_4": [one._asdict() for one in rhos]}
    print(json.dumps(given | {"goals": [goal._asdict() for goal in reached]}))


def _draw(rows: Sequence[Row], runs: figures.Runs, parts: set[str], console: rich.console.Console) -> list[str]:
  """Draws the figures of the rows, and of the runs those of the levels; their names."""
  folder, drawn = pathlib.Path(_REPORT_DIR.value), []
  found = {part: [one for one in rows if one.part == part] for part in PARTS}
  if "levels" in parts:
    worst = _at(max(map(int, _LEVELS.value)))
    shown = {label: own[0] for (label, where), own in runs.items() if where == worst and label in _METHODS.value}
    figures.draw_curves(shown, worst, _TARGET.value, folder / "heterogeneous.png")
    chosen = {label: run for label, run in shown.items() if label in ("allreduce", "eager", "constant:3")}
    figures.draw_timeline(chosen or dict([*shown.items()][:1]), worst, folder / "timeline.png")
    drawn += ["heterogeneous.png", "timeline.png"]
  if found["sweep"]:
    figures.draw_sweep(found["sweep"], folder / "group_size.png")
    drawn.append("group_size.png")
  if speed_ups := tables.speed_ups(found["scale"]):
    console.print(tables.scale_table(speed_ups))
    figures.draw_scale(speed_ups, folder / "scale.png")
    drawn.append("scale.png")
  if found["decay"]:
    figures.draw_decays(found["decay"], folder / "decay.png")
    drawn.append("decay.png")
  return drawn


if __name__ == "__main__":
  entry.run(main)
