r"""Seconds until a training's loss is as low as dense's: methods race on one task, in the network lab.

Every method starts from the same parameters and sees the same batches. Steps to the
target, dense's loss after --steps with its best optimizer, are those of the part
`curves`; seconds a step of `paces`, with the first --optimizer; `wholes` trains from
the first seed in the lab (benchmarks/pages/training.md). Evaluated are the parameters
of the last exchange. Rows are kept in --results as they are measured; given again, the
command measures what is missing, and a curve that was interrupted goes on from its last
evaluation, with what --cache_dir has of it.

Examples:
  python -m benchmarks.race python -m benchmarks.race --parts=wholes --rate=100mbit
  --seed=0 --method=spardl:density=0.01 python -m benchmarks.race --preset=spardl-fig6c
"""

import hashlib
import itertools
import math
import pathlib
import signal
import sys
from typing import Any, NamedTuple

import rich.console
from absl import flags

from benchmarks import entry, methods, netlab, papers, recipes, report, specs, workers
from benchmarks.one_training import Trainer
from benchmarks.race import measuring, presets
from benchmarks.race import report as tables
from benchmarks.race.measuring import Length, Program, Runner
from benchmarks.race.results import KINDS, Curve, Results
from benchmarks.race.standings import DENSE, Target, points, standings
from benchmarks.tasks import registry
from benchmarks.tasks.base import Task
from jaxsparse import launch

_PRESET = flags.DEFINE_enum("preset", None, list(presets.PRESETS), presets.HELP)
_TASK = flags.DEFINE_enum(
  "task",
  "lm",
  registry.NAMES,
  "What to train; see benchmarks/tasks.",
)
_METHOD = flags.DEFINE_multi_string(
  "method", [DENSE, "spardl:density=0.01"], f"Methods to race, {methods.HELP}"
)
flags.DEFINE_alias("algorithm", "method")
_OPTIMIZER = flags.DEFINE_multi_string(
  "optimizer", ["adam:0.001"], f"{recipes.HELP} Every method races each."
)
_SCHEDULE = flags.DEFINE_enum(
  "schedule", "constant", list(recipes.SCHEDULES), "Of the rate, over --steps."
)
_WARM_UP = flags.DEFINE_integer(
  "warm_up", 0, "Steps in which the rate rises from 0.", lower_bound=0
)
_CLIP = flags.DEFINE_float("clip", 1.0, "Largest norm of a gradient; 0 for any.")
_HOSTS = flags.DEFINE_integer("hosts", 4, "Hosts, a worker on each.", lower_bound=1)
_RATE = flags.DEFINE_multi_string(
  "rate", ["100mbit", "10mbit", "1gbit"], "Rates of the links, or none for any speed."
)
_BATCH_SIZE = flags.DEFINE_integer(
  "batch_size", 4, "Inputs of each worker in a step.", lower_bound=1
)
_STEPS = flags.DEFINE_integer(
  "steps", 300, "Steps of dense whose loss is the target.", lower_bound=1
)
_MOST = flags.DEFINE_integer(
  "most", None, "Steps after which a method gives up; 2 × --steps by default."
)
_EVERY = flags.DEFINE_integer(
  "every", 20, "Steps from one evaluation to the next.", lower_bound=1
)
_TARGET = flags.DEFINE_float("target", None, "The loss to reach instead of dense's.")
_SEED = entry.define_seeds([0, 1, 2])
_TIMED = flags.DEFINE_integer(
  "timed_steps", 30, "Steps to time at each rate, at least.", lower_bound=3
)
_PARTS = flags.DEFINE_multi_string(
  "parts", ["curves", "paces"], f"What to measure: {', '.join(KINDS)}, or none."
)
_DATA_DIR = flags.DEFINE_string(
  "data_dir", None, "For tasks on images: the folder that holds cifar-10-batches-bin."
)
_RESULTS = flags.DEFINE_string(
  "results", None, "The file of the rows; race_TASK.json in --report_dir by default."
)
_REPORT_DIR = entry.define_report_dir(
  "the figures, race.png, seconds.png and frontier.png"
)
_CACHE_DIR = entry.define_cache_dir()
_JSON = entry.define_json()
_RANK = flags.DEFINE_list(
  "rank", [], "Internal: the part and the rate that a rank of the lab measures."
)

entry.require(_CLIP, lambda norm: 0 <= norm < math.inf, "at least 0")
entry.require(_TARGET, lambda loss: 0 < loss < math.inf, "more than 0")


class Plan(NamedTuple):
  """What the flags ask for."""

  runners: list[Runner]  # the methods with each optimizer, dense first
  parts: list[str]  # to measure
  rates: list[str]  # of the links
  length: Length  # of a training
  task: Task | None  # to train; None if only tables and figures are to be made
  # that all rows of a file have in common; None for that of the file
  setting: dict[str, Any] | None

  def start(self, runner: Runner, place: workers.Workers, seed: int = 0) -> Trainer:
    """A training of a method."""
    assert self.task is not None
    return Trainer(
      self.task, runner.method, runner.recipe, place, _BATCH_SIZE.value, seed
    )


def _plan(preset: presets.Preset | None) -> Plan:
  """What the flags ask for; raises ValueError before anything runs."""
  if _MOST.value is not None and _MOST.value < _STEPS.value:
    raise ValueError(f"--most={_MOST.value}, choose at least --steps={_STEPS.value}")
  if _WARM_UP.value > _STEPS.value:
    raise ValueError(
      f"--warm_up={_WARM_UP.value}, choose at most --steps={_STEPS.value}"
    )
  parts, rates = specs.listed(_PARTS.value), specs.listed(_RATE.value)
  parts = [] if parts == ["none"] else parts
  if unknown := [part for part in parts if part not in KINDS]:
    raise ValueError(
      f"--parts={unknown[0]}, choose from {', '.join(KINDS)}, or none alone"
    )
  if preset and _TASK.value != preset.flags["task"]:
    raise ValueError(
      f"--task={_TASK.value}: --preset={_PRESET.value} trains {preset.flags['task']}"
    )
  for rate in rates:
    if set(parts) - {"curves"}:
      netlab.check(_HOSTS.value, rate)
    elif rate != netlab.UNSHAPED:
      netlab.bits(rate)
  chosen = sorted(
    methods.parse("method", _METHOD.value, _HOSTS.value),
    key=lambda method: method.label != DENSE,
  )
  if "paces" in parts and (
    changing := [
      one.label for one in chosen if {"doubles", "ending"} & set(one.options)
    ]
  ):
    raise ValueError(
      f"--method={changing[0]}: its pace changes, choose --parts=curves or wholes"
    )
  optimizers = recipes.parse_optimizers(_OPTIMIZER.value, rate=0.001)
  made = [
    recipes.Recipe(one, _SCHEDULE.value, _WARM_UP.value, _CLIP.value, _STEPS.value)
    for one in optimizers
  ]
  runners = [Runner(method, recipe) for method in chosen for recipe in made]
  length = Length(
    _STEPS.value, _MOST.value or 2 * _STEPS.value, _EVERY.value, _TARGET.value
  )
  if not parts:
    return Plan(runners, parts, rates, length, None, None)
  task = registry.make(_TASK.value, _DATA_DIR.value)
  setting = {
    "task": task.name,
    "data": task.source,
    "hosts": _HOSTS.value,
    "batch_size": _BATCH_SIZE.value,
  }
  return Plan(runners, parts, rates, length, task, setting | {"recipe": str(made[0])})


def _path() -> pathlib.Path:
  return pathlib.Path(
    _RESULTS.value or pathlib.Path(_REPORT_DIR.value) / f"race_{_TASK.value}.json"
  )


def _length_of(
  kind: str, plan: Plan, results: Results, seed: int, runner: Runner
) -> Length:
  """How long a method trains: dense as long as its loss is the target, others until they reach it."""
  length = plan.length
  if length.target is None and runner.method.label != DENSE:
    length = length._replace(target=Target(length.steps).of_seeds(results).get(seed))
  elif length.target is None:
    length = length._replace(most=length.steps)
  # the clock stops at the target, or without one after the steps of dense
  if kind == "wholes":
    length = (
      length._replace(most=length.steps)
      if length.target is None
      else length._replace(steps=length.every)
    )
  return length


def _is_trained(
  kind: str, plan: Plan, results: Results, seed: int, runner: Runner, **rate: str
) -> bool:
  """Whether the file has a training of this kind that is long enough."""
  length = _length_of(kind, plan, results, seed, runner)
  found = results.find(kind, **runner.key, seed=seed, **rate)
  return any(length.is_done(one.steps[-1], one.loss) for one in found)


def _curves(plan: Plan, results: Results, console: rich.console.Console) -> None:
  """Loss over steps of each method from each seed, unless the file has it."""
  assert plan.task is not None
  place = workers.here("sim", _HOSTS.value)
  console.print(
    f"{plan.task}, {place}, {plan.runners[0].recipe}", highlight=False, soft_wrap=True
  )
  # Dense from every seed first: the others train until the loss of its best optimizer,
  # which is known then.
  in_order = sorted(
    itertools.product(_SEED.value, plan.runners),
    key=lambda one: one[1].method.label != DENSE,
  )
  programs: dict[str, Program] = {}
  for seed, runner in in_order:
    if _is_trained("curves", plan, results, seed, runner):
      continue
    length = _length_of("curves", plan, results, seed, runner)
    digest = hashlib.sha256(
      repr((results.setting, runner.key, seed, length.every)).encode()
    ).hexdigest()
    folder = pathlib.Path(_CACHE_DIR.value) / "curves" / digest[:16]
    # One program for all rates and seeds.
    family = runner.at(1.0)
    name = str(family)
    if name not in programs:
      programs[name] = Program(plan.task, family, _HOSTS.value)
    rate = runner.recipe.optimizer.rate
    training = programs[name].begin(rate, seed, _BATCH_SIZE.value)
    with report.progress(console, f"{runner}, seed {seed}", length.most) as show:

      def keep(curve: Curve) -> None:
        results.add(curve)
        show(curve.steps[-1], curve.loss[-1])

      measuring.curve(training, runner.curve(seed), length, keep, folder)
    (row,) = results.find("curves", **runner.key, seed=seed)
    console.print(tables.line(row), highlight=False, soft_wrap=True)


def _missing(part: str, rate: str, plan: Plan, results: Results) -> list[Runner]:
  """The methods whose rows of a part the file lacks."""
  if part == "wholes":
    seed = _SEED.value[0]
    return [
      one
      for one in plan.runners
      if not _is_trained("wholes", plan, results, seed, one, rate=rate)
    ]
  paces = [
    pace for pace in results.find("paces", rate=rate) if pace.steps >= _TIMED.value
  ]
  has = {(pace.method, pace.optimizer) for pace in paces}
  first = [runner for runner in plan.runners if runner.recipe == plan.runners[0].recipe]
  return [
    one for one in first if not {tuple(one.key.values()), (one.method.label, "")} & has
  ]


def _lab(part: str, rate: str, plan: Plan, results: Results) -> None:
  """Starts a rank on each host of a lab whose links are that fast, for the rows that the file lacks."""
  if not _missing(part, rate, plan, results):
    return
  try:
    with netlab.lab(_HOSTS.value, rate) as hosts:
      workers.start_again(
        _HOSTS.value, "processes", f"--rank={part},{rate}", hosts=hosts
      )
  finally:
    results.refresh()


def _rank(plan: Plan) -> None:
  """Measures in a rank of the lab; the first rank keeps the rows."""
  part, rate = _RANK.value
  workers.share_programs(pathlib.Path(_CACHE_DIR.value) / "programs")
  results = Results(_path(), plan.setting)
  # every rank sees the same, for no row is added before all have joined
  missing = _missing(part, rate, plan, results)
  place, seed = workers.here("processes", _HOSTS.value), _SEED.value[0]

  def keep(row: Any) -> None:
    if place.reports:
      results.add(row)
      print(
        tables.line(row), file=sys.stderr if _JSON.value else sys.stdout, flush=True
      )

  for runner in missing:
    if part == "paces":
      keep(measuring.pace(plan.start(runner, place), rate, _TIMED.value))
    else:
      length = _length_of("wholes", plan, results, seed, runner)
      measuring.whole(plan.start(runner, place, seed), rate, length, keep)


def _report(
  plan: Plan,
  results: Results,
  preset: presets.Preset | None,
  console: rich.console.Console,
) -> None:
  """The tables and the figures of all rows."""
  target = Target(plan.length.steps, plan.length.target)
  if not plan.parts and not _STEPS.present:
    whole = [
      one for one in results.find("curves", method=DENSE) if math.isfinite(one.loss[-1])
    ]
    target = target._replace(steps=max((one.steps[-1] for one in whole), default=1))
  asked = (
    plan.rates
    if plan.parts or _RATE.present
    else [one.rate for one in results.rows["paces"]]
  )
  rates = [rate for rate in dict.fromkeys(asked) if results.find("paces", rate=rate)]
  if not results.rows["curves"]:
    console.print(tables.paces(results))
  elif target.of_seeds(results):
    for rate in rates or [""]:
      console.print(tables.table(results, rate, target))
  else:
    what = f"no finite loss of {DENSE} after {target.steps} steps, so nothing to reach"
    console.print(f"{results.path} has {what}", highlight=False, soft_wrap=True)
  if results.rows["wholes"]:
    console.print(tables.wholes(results))
  if measured := preset.measured(results, target) if preset else {}:
    console.print(
      papers.beside(
        [cell for cell in papers.of("race") if cell.name in measured], measured
      )
    )
  if results.rows["curves"]:
    folder = pathlib.Path(_REPORT_DIR.value)
    tables.draw_curves(results, rates, target, folder / "race.png")
    tables.draw_bars(results, rates, target, folder / "seconds.png")
    if points(results, target.steps):
      console.print(tables.losses(results, target.steps))
      tables.draw_frontier(results, target.steps, folder / "frontier.png")
    console.print(f"figures in {folder}: race.png, seconds.png, frontier.png")
  if _JSON.value:
    ranked = {rate: standings(results, rate, target) for rate in rates or [""]}
    report.print_json({"setting": results.setting, **results.rows, "standings": ranked})


def main() -> None:
  """Measures what the results lack, and reports."""
  preset = presets.apply(_PRESET.value)
  plan = _plan(preset)
  if launch.is_rank():
    _rank(plan)
    return
  console = workers.make_console(stderr=_JSON.value)
  results = Results(_path(), plan.setting)
  if preset:
    console.print(
      f"{preset.paper}: {preset.paper_steps:,} steps there, {_STEPS.value:,} here",
      highlight=False,
    )
  # rather now than when all is measured
  for folder in (
    pathlib.Path(_REPORT_DIR.value),
    _path().parent,
  ):
    folder.mkdir(parents=True, exist_ok=True)
  try:
    if "curves" in plan.parts:
      _curves(plan, results, console)
    for part, rate in itertools.product(("paces", "wholes"), plan.rates):
      if part in plan.parts:
        _lab(part, rate, plan, results)
  except KeyboardInterrupt:
    sys.exit(128 + signal.SIGINT)
  finally:
    if any(results.rows.values()):
      _report(plan, results, preset, console)


if __name__ == "__main__":
  entry.run(main)
