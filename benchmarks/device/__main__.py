r"""What this machine's accelerator computes and how fast: small enough for a machine that is lent for minutes.

Runs on the first of `jax.devices()`, ends by itself, and keeps each row of
device_NAME.json as soon as it is measured:

  right     three updates of each collective, simulated, beside those of this machine's CPU; top-k beside a stable sort
  speed     one update of one worker without its messages, beside a read, a copy and top-k of as many entries
  step      forward and backward of a transformer of 124 M parameters; with dense Adam; with signs of Muon and of Adam
  worth     a profile for `js.costs.advise`, profile_NAME.json, and the advice for two hosts of eight such devices
  launches  kernels of each update, by the profiler

A row that fails has the error, one whose turn comes too late says so, and the run goes
on. The exit status is 1 where a row failed or a result is wrong. After an interruption,
--parts measures what is missing and keeps the other rows. The part `worth` only reads
rows: it also runs on another machine, with --name and the folder of the file.

Examples:
  python -m benchmarks.device --report_dir=benchmarks/results python -m
  benchmarks.device --report_dir=benchmarks/results --parts=step,launches --seconds=200
  python -m benchmarks.device --report_dir=benchmarks/results --parts=worth
  --name=nvidia_h100_80gb_hbm3 python -m benchmarks.device --small
"""

import faulthandler
import importlib.metadata
import pathlib
import platform
import re
import sys

import jax
import rich.console
from absl import flags

from benchmarks import entry, report, specs, workers
from benchmarks.device import right, speed, step, worth
from benchmarks.device.running import Run
from benchmarks.device.setting import SMALL, WHOLE, Setting

PARTS = (right.PART, speed.PART, step.PART, worth.PART, speed.LAUNCHES)

_SMALL = flags.DEFINE_bool("small", False, "Few and small programs: a minute on a CPU.")
_PARTS = flags.DEFINE_list(
  "parts", list(PARTS), f"Parts to measure: {', '.join(PARTS)}."
)
_ALGORITHMS = flags.DEFINE_multi_string(
  "algorithms", None, f"{specs.HELP} By default all, or two with --small."
)
_N = flags.DEFINE_multi_integer(
  "n",
  None,
  "Entries of the gradients whose updates are timed, and of which the top-k are selected.",
  lower_bound=1,
)
_SECONDS = flags.DEFINE_float(
  "seconds", 480, "After which the run ends, with whatever it has.", lower_bound=1
)
_NAME = flags.DEFINE_string(
  "name", None, "Of the device, in the names of files; by default as JAX calls it."
)
_REPORT_DIR = entry.define_report_dir("device_NAME.json and profile_NAME.json")

entry.require_choices(_PARTS, PARTS, empty=False)


def _setting() -> Setting:
  setting = SMALL if _SMALL.value else WHOLE
  if _ALGORITHMS.value:
    setting = setting._replace(algorithms=tuple(specs.labels_of(_ALGORITHMS.value)))
  if _N.value:
    setting = setting._replace(sizes=tuple(sorted(set(_N.value))))
  # refuses what is no collective before anything is measured
  setting.parse_algorithms()
  return setting


def _measure(run: Run, setting: Setting, profile: pathlib.Path) -> None:
  """Measures the parts; larger updates after the step, whose memory would not be the largest so far otherwise.

  Each part has a share of the time that is left when it begins, so that later ones have
  a turn in any case.
  """
  smallest, *larger = setting.sizes
  measures = [
    (right.PART, lambda: right.measure(run, setting, run.share(0.4))),
    (speed.PART, lambda: speed.measure(run, setting, [smallest], run.share(0.45))),
    (step.PART, lambda: step.measure(run, setting, run.share(0.5))),
    (speed.PART, lambda: speed.measure(run, setting, larger, run.share(0.7))),
    (worth.PART, lambda: worth.measure(run, setting, run.share(1), profile)),
    (speed.LAUNCHES, lambda: speed.measure_launches(run, setting, run.share(1))),
  ]
  for part, measure in measures:
    if part in _PARTS.value:
      run.attempt(part, measure)


def _report(run: Run, console: rich.console.Console, name: str) -> list[report.Goal]:
  """Prints tables, advice, what is missing, and goals."""
  if rows := run.measured(speed.PART):
    console.print(
      speed.table(
        rows, run.measured(speed.LAUNCHES), f"one update of one worker alone, {name}"
      )
    )
  if rows := run.measured(step.PART):
    console.print(
      step.table(rows, f"a step of {rows[0]['parameters']:,} parameters, {name}")
    )
  if rows := [row for row in run.measured(worth.PART) if "predictions" in row]:
    console.print(worth.table(rows))
  for line in (*worth.lines(rows), *(f"missing: {line}" for line in run.missing())):
    console.print(line, highlight=False, markup=False, soft_wrap=True)
  goals = right.goals(run.measured(right.PART))
  report.say(goals, console)
  return goals


def main() -> None:
  """Measures the parts, keeps and reports them."""
  setting = _setting()
  # also out of a compiler or a kernel that hangs
  faulthandler.dump_traceback_later(_SECONDS.value, exit=True)
  console = workers.make_console()
  device = jax.devices()[0]
  name = _NAME.value or re.sub(r"\W+", "_", device.device_kind.lower())
  folder = pathlib.Path(_REPORT_DIR.value)
  head = {
    "device": device.device_kind,
    "platform": device.platform,
    "jax": importlib.metadata.version("jax"),
    "python": platform.python_version(),
    "setting": report.plain(setting),
  }
  parts = {part: part in _PARTS.value for part in PARTS}
  same = [] if _PARTS.value == [worth.PART] else ["device", "jax"]
  run = Run(folder / f"device_{name}.json", head, parts, _SECONDS.value, console, same)
  run.keep()
  _measure(run, setting, folder / f"profile_{name}.json")
  goals = _report(run, console, run.head["device"])
  console.print(f"rows: {folder / f'device_{name}.json'}", soft_wrap=True)
  faulthandler.cancel_dump_traceback_later()
  sys.exit(run.failed or any(goal.met is False for goal in goals))


if __name__ == "__main__":
  entry.run(main)
