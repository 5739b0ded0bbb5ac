r"""Partial reduce beside seven other ways to train workers of different speeds, in virtual time: the paper's Table 1.

Workers train an MLP on images of digits of their own; the control is `alone`, without
an exchange. Gradients are real, time is virtual: a run ends when
the mean of the models, evaluated every half second, has the --target accuracy on the
test set. All is deterministic by seed; the tables show means over seeds and folds, and
benchmarks/pages/stragglers.md explains them. --parts chooses what is measured:

    levels    Table 1 at --levels; ρ of the groups against Figure 4; Figure 8, partial reduce over P at the lowest level
    tail      Figure 9: --tail_workers workers whose step times have a heavy tail, that of a cluster shared with others:
              its deviation fitted to the paper's ratio of run times, then to that of seconds an update
    scale     Figure 11: step times fitted to the run times, --scale workers, speed-ups over one worker
    decay     --decays as the α of dynamic weights, P = 3, at the highest level
    links     two workers whose messages take ten times as long, alone and beside slow workers

Rows are added to --results; --parts=none makes the tables of that file.

Examples:
  python -m benchmarks.heterogeneous --levels=3 --methods=allreduce,dynamic:3,dynamic:5,dynamic:3:0.9 --seed=0
  python -m benchmarks.heterogeneous --parts=tail,scale --limit=4000
  python -m benchmarks.heterogeneous --parts=none --results=benchmarks/results/heterogeneous.json
  python -m benchmarks.heterogeneous --json | jq '.rows[] | [.environment.level, .label, .seconds]'
"""

import itertools
import json
import pathlib
from collections.abc import Iterable

import rich.console
import rich.progress
from absl import flags

from benchmarks import entry, papers, report, workers
from benchmarks.heterogeneous import methods, virtual
from benchmarks.heterogeneous import report as tables
from benchmarks.heterogeneous.lab import Simulation
from benchmarks.heterogeneous.virtual import Bench, Environment, Method, Row

_ALL = [
  *methods.NAMES,
  "constant:3",
  "dynamic:3",
  "initial:3",
  "constant:5",
  "dynamic:5",
]
_METHODS_HELP = "Methods of levels; constant, dynamic and initial with a group size behind a colon, then an α."
_RATE_HELP = (
  "Of SGD with momentum 0.9, for --workers; another number has it in proportion."
)
_PARTS = flags.DEFINE_list(
  "parts", ["levels"], "What to measure: levels, tail, scale, decay, links, or none."
)
_METHODS = flags.DEFINE_list("methods", _ALL, _METHODS_HELP)
_WORKERS = flags.DEFINE_integer("workers", 8, "Number of workers.", lower_bound=2)
_LEVELS = entry.define_numbers(
  "levels", [1, 2, 3], "Heterogeneity levels HL: how many workers share an accelerator."
)
_OCCUPANCY = flags.DEFINE_float(
  "occupancy", 1.0, "Fraction of a step in which an accelerator is busy.", 0, 1
)
_SWEEP = flags.DEFINE_list(
  "sweep",
  ["2", "3", "4", "5", "6", "7", "8"],
  "Group sizes for Figure 8; none with --sweep=",
)
_TAIL_WORKERS = flags.DEFINE_integer(
  "tail_workers", 16, "Number of workers for tail.", lower_bound=4
)
_SCALE = entry.define_numbers(
  "scale", [1, 4, 8, 16, 32], "Numbers of workers for scale, 1 or at least 4."
)
_DECAYS = flags.DEFINE_list(
  "decays", ["0.1", "0.3", "0.5", "0.7", "0.9"], "Values of α for decay."
)
_TARGET = flags.DEFINE_float("target", 0.97, "Test accuracy to reach.")
_LIMIT = flags.DEFINE_float(
  "limit",
  600,
  "Seconds of virtual time after which a method counts as not reaching it.",
)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 0.02, _RATE_HELP)
_SEED = entry.define_seeds([0, 1, 2])
_FOLDS = flags.DEFINE_integer(
  "folds", 1, "Folds of cross-validation, tested from each seed; 1 for one of five.", 1
)
_RESULTS = flags.DEFINE_string(
  "results", None, "A file to which rows are added, and from which the tables are made."
)
_JSON = entry.define_json()

# jitters: all-reduce takes 2 times as long as partial reduce as in Figure 9, or 16.6
# times as long for an update
_OF_RUN_TIMES, _OF_UPDATES = 0.45, 1.2

entry.require(
  _SCALE, lambda sizes: not {2, 3} & set(sizes), "1, or at least 4: groups are of 4"
)
entry.require(_LIMIT, lambda limit: limit > 0, "more than 0")


# by part, label and where: the key of a row
Cases = dict[tuple[str, str, Environment], Method]


def _environment(level: int, slow_links: int = 0) -> Environment:
  return Environment(
    _WORKERS.value, level, slow_links=slow_links, occupancy=_OCCUPANCY.value
  )


def _cases(part: str, where: Environment, labels: Iterable[str]) -> Cases:
  return {
    (part, label, where): virtual.parse_method(label, where.workers) for label in labels
  }


def _levels() -> Cases:
  cases = _cases(
    "sweep",
    _environment(min(_LEVELS.value)),
    [f"constant:{size}" for size in _SWEEP.value],
  )
  for level in _LEVELS.value:
    cases |= _cases("levels", _environment(level), _METHODS.value)
  return cases


def _tail() -> Cases:
  labels = "alone", "allreduce", "backup", "adpsgd", "asp", "constant:4", "dynamic:4"
  cases: Cases = {}
  for jitter in (_OF_RUN_TIMES, _OF_UPDATES):
    cases |= _cases("tail", Environment(_TAIL_WORKERS.value, jitter=jitter), labels)
  return cases


def _scale() -> Cases:
  cases: Cases = {}
  for size in _SCALE.value:
    where = Environment(size, jitter=_OF_RUN_TIMES)
    cases |= _cases("scale", where, ["allreduce"])
    if size > 1:
      cases |= _cases("scale", where, ["alone"])
      # as in the paper
      cases["scale", "backup", where] = Method("backup", {"backups": size // 4})
      cases |= _cases("scale", where, ["constant:4", "dynamic:4"])
  return cases


def _decay() -> Cases:
  labels = [
    f"{name}:3:{alpha}" for name in ("dynamic", "initial") for alpha in _DECAYS.value
  ]
  return _cases("decay", _environment(max(_LEVELS.value)), labels)


def _links() -> Cases:
  labels = "alone", "allreduce", "backup", "adpsgd", "asp", "constant:3", "dynamic:3"
  alone, beside = (
    _environment(level, slow_links=2) for level in (1, max(_LEVELS.value))
  )
  return _cases("links", alone, labels) | _cases("links", beside, labels)


_MAKERS = {
  "levels": _levels,
  "tail": _tail,
  "scale": _scale,
  "decay": _decay,
  "links": _links,
}
entry.require(
  _PARTS,
  lambda parts: set(parts) <= {*_MAKERS, "none"},
  f"from {', '.join(_MAKERS)}, or none",
)


def _measure(
  cases: Cases, kept: dict[tuple, Row], console: rich.console.Console
) -> None:
  """Adds the rows of cases to those that are kept; what several parts ask for is run once for each seed and fold."""
  settings = virtual.Settings(
    _WORKERS.value, _LEARNING_RATE.value, _TARGET.value, _LIMIT.value, _FOLDS.value
  )
  seeds, bench = (
    list(itertools.product(_SEED.value, range(settings.folds))),
    Bench(settings),
  )
  runs: dict[tuple[str, Environment], list[Simulation]] = {}
  for key in rich.progress.track(cases, "simulating", console=console):
    part, label, where = key
    if (label, where) not in runs:
      runs[label, where] = [
        bench.simulate(cases[key], where, seed, fold) for seed, fold in seeds
      ]
    kept[key] = virtual.make_row(part, label, where, settings, runs[label, where])
    if _RESULTS.value:
      report.keep(
        pathlib.Path(_RESULTS.value), {}, {"rows": report.rounded(list(kept.values()))}
      )


def main() -> None:
  """Simulates what the flags ask for and reports."""
  console = workers.make_console(stderr=_JSON.value)
  if max(_LEVELS.value) > _WORKERS.value:
    raise ValueError(
      f"--levels={max(_LEVELS.value)}, choose 1 … {_WORKERS.value}, the number of workers"
    )
  cases: Cases = {}
  for part in _PARTS.value:
    cases |= _MAKERS[part]() if part != "none" else {}
  path = pathlib.Path(_RESULTS.value or "")
  former = (
    virtual.from_json(json.loads(path.read_text())["rows"]) if path.is_file() else []
  )
  kept: dict[tuple, Row] = {
    (one.part, one.label, one.environment): one for one in former
  }
  if cases:
    _measure(cases, kept, console)
  rows = list(kept.values())
  if not rows:
    raise ValueError("--parts=none needs --results, a file with rows")
  for part, title in tables.PARTS.items():
    for own in tables.group_by_environment(one for one in rows if one.part == part):
      console.print(tables.table(own, title))
  rhos = tables.figure_4() if "levels" in _PARTS.value else {}
  if speed_ups := tables.speed_ups(rows):
    console.print(tables.scale_table(speed_ups))
  ours = {name: one.ratio for name, one in tables.paper_cells(rows).items()}
  console.print(papers.beside(papers.of("heterogeneous"), rhos | ours))
  reached = tables.goals(rows)
  report.say(reached, console)
  if _JSON.value:
    report.print_json(
      {"rows": report.rounded(rows), "figure_4": rhos, "goals": reached}
    )


if __name__ == "__main__":
  entry.run(main)
