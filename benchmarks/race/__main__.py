r"""Seconds until a training's loss is as low as dense's: methods race on one task, in the network lab.

Every method starts from the same parameters and sees the same batches. Loss over steps does not depend on the links, so
it is computed once for each method and seed, by the simulator in this process (--parts=curves). Seconds a step are
measured at each rate, a process of JAX on each host of the lab, at least --timed_steps of them (--parts=paces; needs
root). Their product is the time to the target: dense's loss after --steps, of its best optimizer, from the same seed.
--parts=wholes trains on the clock in the lab until the target, from the first seed, which shows that the product holds.
The clock stands still while a model is evaluated. --parts=advice asks `js.costs.advise` which of the
methods reaches that loss first.

Rows are kept in --results as they are measured: a race that is interrupted goes on where it was when the command is
given again. The tables and the figures, race.png and seconds.png, are made from that file alone: --parts=none makes
only them.

A method is WAY/COLLECTIVE with options; without a way workers exchange gradients.

Examples:
  python -m benchmarks.race
  python -m benchmarks.race --task=lm_medium --rate=100mbit --method=dense,spardl:density=0.01 --optimizer=adam:0.003
  python -m benchmarks.race --parts=curves --steps=1000
  python -m benchmarks.race --parts=wholes --rate=100mbit --seed=0 --method=spardl:density=0.01
  python -m benchmarks.race --preset=spardl-fig6c
  python -m benchmarks.race --parts=none --results=benchmarks/results/race_lm.json --json | jq '.standings'
"""

import itertools
import json
import pathlib
import signal
import sys
import tempfile
from typing import Any, NamedTuple

import rich.console
from absl import flags

from benchmarks import entry, methods, netlab, papers, programs, recipes, recorded, report, workers
from benchmarks.race import measuring, presets
from benchmarks.race import report as tables
from benchmarks.race.measuring import Length, Race, Runner
from benchmarks.race.results import KINDS, Results
from benchmarks.race.standings import DENSE, Target
from benchmarks.tasks import registry
from benchmarks.tasks.base import Task
from jaxsparse import launch

_PRESET = flags.DEFINE_enum("preset", None, list(presets.PRESETS), presets.HELP)
_TASK = flags.DEFINE_enum("task", "lm", [*registry.TEXTS, *registry.IMAGES], "What to train; see benchmarks/tasks.")
_METHOD = flags.DEFINE_list("method", [DENSE, "spardl:density=0.01"], f"Methods to race, {methods.HELP}")
flags.DEFINE_alias("algorithm", "method")
_OPTIMIZER = flags.DEFINE_list(
  "optimizer",
  ["adam:0.001"],
  f"Any of {', '.join(recipes.OPTIMIZERS)}, each with its rate, and window_adam with its window, as in "
  "window_adam:0.001:window=4; every method races each.",
)
_SCHEDULE = flags.DEFINE_enum("schedule", "constant", list(recipes.SCHEDULES), "Of the rate, over --steps.")
_WARM_UP = flags.DEFINE_integer("warm_up", 0, "Steps in which the rate rises from 0.")
_CLIP = flags.DEFINE_float("clip", 1.0, "Largest norm of a gradient; 0 for any.")
_HOSTS = flags.DEFINE_integer("hosts", 4, "Hosts, a worker on each.")
_RATE = flags.DEFINE_list("rate", ["100mbit", "10mbit", "1gbit"], "Rates of the links, as tc writes them; or none.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 4, "Inputs of each worker in a step.")
_STEPS = flags.DEFINE_integer("steps", 300, "Steps of dense whose loss is the target.")
_MOST = flags.DEFINE_integer("most", None, "Steps after which a method gives up; 2 × --steps by default.")
_EVERY = flags.DEFINE_integer("every", 20, "Steps from one evaluation to the next.")
_TARGET = flags.DEFINE_float("target", None, "The loss to reach instead of dense's.")
_SECONDS = flags.DEFINE_float("seconds", None, "Seconds on the clock after which a whole training ends.")
_SEED = flags.DEFINE_list("seed", ["0", "1", "2"], "Seeds of the parameters and the batches.")
_TIMED = flags.DEFINE_integer("timed_steps", 30, "Steps to time at each rate, at least.")
_PARTS = flags.DEFINE_list("parts", ["curves", "paces"], "What to measure: curves, paces, wholes, advice, or none.")
_ENGINE = flags.DEFINE_enum("engine", "sim", ["sim", "devices"], "Where curves are computed; " + workers.ENGINE_HELP)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "For tasks on images: the folder that holds cifar-10-batches-py.")
_RESULTS = flags.DEFINE_string("results", None, "The file of the rows; race_TASK.json in --report_dir by default.")
_REPORT_DIR = flags.DEFINE_string("report_dir", "out", "Folder for the figures, race.png and seconds.png.")
_CACHE_DIR = flags.DEFINE_string("cache_dir", "out/cache", recorded.CACHE_HELP)
_JSON = flags.DEFINE_bool("json", False, "Print all rows as JSON on standard output, all else on standard error.")


class Plan(NamedTuple):
  """What the flags ask for.

  Attributes:
    runners: the methods with each optimizer, dense first.
    seeds: of the trainings.
    parts: to measure.
    length: of a training.
    task: to train; None if only tables and figure are to be made.
    setting: that all rows of a file have in common; None for that of the file.
  """

  runners: list[Runner]
  seeds: list[int]
  parts: list[str]
  length: Length
  task: Task | None
  setting: dict[str, Any] | None


def _plan() -> Plan:
  """What the flags ask for; raises ValueError before anything runs."""
  if _SECONDS.value is not None and not _SECONDS.value > 0:
    raise ValueError(f"--seconds={_SECONDS.value:g}, choose more than 0")
  for flag, least in ((_HOSTS, 1), (_BATCH_SIZE, 1), (_STEPS, 1), (_EVERY, 1), (_TIMED, 3), (_WARM_UP, 0), (_CLIP, 0)):
    if flag.value < least:
      raise ValueError(f"--{flag.name}={flag.value}, choose at least {least}")
  if _MOST.value is not None and _MOST.value < _STEPS.value:
    raise ValueError(f"--most={_MOST.value}, choose at least --steps={_STEPS.value}")
  parts = [] if _PARTS.value == ["none"] else _PARTS.value
  if unknown := [part for part in parts if part not in KINDS]:
    raise ValueError(f"--parts={unknown[0]}, choose from {', '.join(KINDS)}, or none")
  try:
    seeds = list(dict.fromkeys(int(seed) for seed in _SEED.value))
  except ValueError:
    raise ValueError(f"--seed={','.join(_SEED.value)}, give whole numbers, separated by commas") from None
  chosen = sorted(methods.parse("method", _METHOD.value, _HOSTS.value), key=lambda method: method.label != DENSE)
  optimizers = recipes.parse_optimizers(_OPTIMIZER.value, rate=0.001)
  made = [recipes.Recipe(one, _SCHEDULE.value, _WARM_UP.value, _CLIP.value, _STEPS.value) for one in optimizers]
  runners = [Runner(method, recipe) for method in chosen for recipe in made]
  length = Length(_STEPS.value, _MOST.value or 2 * _STEPS.value, _EVERY.value, _TARGET.value)
  if not parts:
    return Plan(runners, seeds, parts, length, None, None)
  task = registry.make(_TASK.value, _DATA_DIR.value)
  names = "task", "data", "hosts", "batch_size", "recipe"
  values = task.name, task.source, _HOSTS.value, _BATCH_SIZE.value, str(made[0])
  return Plan(runners, seeds, parts, length, task, dict(zip(names, values, strict=True)))


def _curves(plan: Plan, results: Results, console: rich.console.Console) -> None:
  """Loss over steps of each method from each seed, unless the file has it."""
  race = _race(plan, _ENGINE.value)
  console.print(f"{race.task}, {race.place}, {plan.runners[0].recipe}", highlight=False, soft_wrap=True)
  for seed, runner in itertools.product(plan.seeds, plan.runners):
    length = plan.length._replace(most=_STEPS.value) if runner.method.label == DENSE else plan.length
    if runner.method.label != DENSE:
      length = length._replace(target=_target().of_seed(results, seed))
    key = {"method": runner.method.label, "optimizer": runner.optimizer, "seed": seed}
    found = results.find("curves", **key)
    if found and length.is_done(found[0].steps[-1], found[0].loss):
      continue
    with tables.progress(console, f"{runner}, seed {seed}", length.most) as show:
      measuring.curve(race, runner, seed, length, results.add, show)
    console.print(tables.line(results.find("curves", **key)[0]), highlight=False, soft_wrap=True)


def _target() -> Target:
  return Target(_STEPS.value, _TARGET.value)


def _lab(part: str, rate: str, plan: Plan, results: Results) -> None:
  """Starts a rank on each host of a lab whose links are that fast, for the rows that the file lacks."""
  has = {pace.method for pace in results.find("paces", rate=rate)} if part == "paces" else set()
  missing = [label for runner in plan.runners if (label := runner.method.label) not in has]
  if not missing or (part == "advice" and results.find("advice", rate=rate)):
    return
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "rows.json"
    command = [sys.executable, "-m", "benchmarks.race", *sys.argv[1:], f"--parts={part}", f"--rate={rate}"]
    command += [f"--results={path}", f"--method={','.join(dict.fromkeys(missing))}"]
    target = _target().of_seed(results, plan.seeds[0])
    command += [f"--target={target}"] if target is not None else []
    try:
      with netlab.lab(_HOSTS.value, None if rate == "none" else rate) as hosts:
        launch.run(command, _HOSTS.value, hosts=hosts)
    finally:
      if path.exists():
        results.merge(path)


def _rank(plan: Plan) -> None:
  """Measures in a rank of the lab; the first rank keeps the rows."""
  programs.share(pathlib.Path(_CACHE_DIR.value) / "programs")
  race, rate = _race(plan, "processes"), _RATE.value[0]
  kept = Results(_path(), plan.setting) if race.place.reports else None

  def keep(row: Any) -> None:
    if kept:
      kept.add(row)
      print(tables.line(row), file=sys.stderr if _JSON.value else sys.stdout, flush=True)

  if plan.parts == ["advice"]:
    keep(measuring.advised(race, plan.runners, rate))
  if plan.parts == ["paces"]:
    for runner in {runner.method.label: runner for runner in plan.runners}.values():
      keep(measuring.pace(race, runner, rate, _TIMED.value))
  length = plan.length._replace(steps=_EVERY.value) if _TARGET.value else plan.length._replace(most=_STEPS.value)
  for runner in plan.runners if plan.parts == ["wholes"] else []:
    measuring.whole(race, runner, plan.seeds[0], rate, length, _SECONDS.value, keep)


def _path() -> pathlib.Path:
  return pathlib.Path(_RESULTS.value or pathlib.Path(_REPORT_DIR.value) / f"race_{_TASK.value}.json")


def _race(plan: Plan, engine: str) -> Race:
  if plan.task is None:
    raise ValueError("the race starts its own ranks: run this as one program")
  return Race(plan.task, workers.here(engine, _HOSTS.value), _BATCH_SIZE.value)


def _report(results: Results, preset: presets.Preset | None, console: rich.console.Console) -> None:
  """The tables and the figure of all rows."""
  target = _target()
  rates = [rate for rate in _RATE.value if results.find("paces", rate=rate)]
  curves = bool(results.rows["curves"])
  for rate in (rates or [""]) if curves else []:
    console.print(tables.table(results, rate, target))
  if not curves:
    console.print(tables.paces(results))
  if results.rows["wholes"]:
    console.print(tables.wholes(results))
  if results.setting["task"] == "lm":
    report.say(tables.goals(results, target), console)
  measured = preset.measured(results, rates[0] if rates else "", target) if preset else None
  console.print(papers.beside(papers.of("race"), measured))
  if curves:
    folder = pathlib.Path(_REPORT_DIR.value)
    tables.figure(results, rates, folder / "race.png")
    tables.bars(results, rates, target, folder / "seconds.png")
    console.print(f"figures: {folder / 'race.png'}, {folder / 'seconds.png'}")
  if _JSON.value:
    print(json.dumps(tables.as_json(results, rates, target)))


def main() -> None:
  """Measures what the results lack, and reports."""
  presets.apply(_PRESET.value)
  plan = _plan()
  if launch.is_rank():
    _rank(plan)
    return
  console = workers.make_console(stderr=_JSON.value)
  preset = presets.PRESETS.get(_PRESET.value or "")
  if preset:
    console.print(f"{preset.paper}: {preset.paper_steps:,} steps there, {_STEPS.value:,} here", highlight=False)
  results = Results(_path(), plan.setting)
  try:
    if "curves" in plan.parts:
      _curves(plan, results, console)
    for part, rate in itertools.product(("paces", "advice", "wholes"), _RATE.value):
      if part in plan.parts:
        _lab(part, rate, plan, results)
  except KeyboardInterrupt:
    sys.exit(128 + signal.SIGINT)
  finally:
    if any(results.rows.values()):
      _report(results, preset, console)


if __name__ == "__main__":
  entry.run(main)
