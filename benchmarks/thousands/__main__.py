r"""How many workers rounds hold: thousands on paper, 200 at a real server, 32 in real processes.

--parts chooses what is measured:

    simulated   --workers with the real protocol in virtual time, beside lockstep: goodput, messages, CPU of the server
    windows     where workers differ: the window that chooses itself beside fixed ones, by scenario and delay
    state       of the server of so many: its memory, CPU time, and the messages that begin a round
    levels      the first in groups of √P, each with a server of its own, and rounds among groups, of their links
    server      200 real connections that join at once, then rounds of 64 while workers come and go
    processes   32 processes of `js.partial.Rounds`

Links of 10 to 1000 Mbit/s and latencies of 1 to 200 ms are drawn for each worker, and
failures at --failures a worker and hour, a tenth of them of all workers of a site.
benchmarks/pages/far.md explains the numbers.

Examples:
  python -m benchmarks.thousands --parts=simulated --workers=100,1000 --failures=0.1,1
  --seconds=1800 python -m benchmarks.thousands --parts=server --churn=60

One level of 10,000 workers takes hours and 4 GB: each failure makes 40,000 messages,
all of which are handled.
"""

import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

from absl import flags, logging

from benchmarks import entry, report, tables, workers
from benchmarks.thousands import (
  levels,
  load,
  processes,
  simulation,
  state,
  windows,
)
from benchmarks.thousands.members import Setting

_ALL = ["simulated", "windows", "state", "levels", "server", "processes"]
_GOAL = 0.9  # goodput of 1,000 workers of which each fails once an hour
_PARTS = flags.DEFINE_list("parts", _ALL, f"What to measure: {', '.join(_ALL)}.")
_WORKERS = entry.define_numbers(
  "workers", [100, 1000], "P of simulated, state and levels."
)
_FAILURES = entry.define_numbers(
  "failures", [1.0], "Failures of a worker in an hour.", flags.FloatParser(0.0)
)
_SECONDS = flags.DEFINE_float(
  "seconds", 1800, "Virtual seconds that are measured.", lower_bound=1
)
_INTERVAL = flags.DEFINE_float(
  "interval",
  60,
  "Virtual seconds from a round to the next one: H steps.",
  lower_bound=1,
)
_QUORUM = flags.DEFINE_float("quorum", 0.5, "K / P.", lower_bound=0.0, upper_bound=1.0)
_GRACE = entry.define_grace()
_SEEDS = flags.DEFINE_integer("seeds", 3, "Of each row of windows.", lower_bound=1)
_COLLECTIVE = flags.DEFINE_string(
  "collective", "onebit", "Of the rounds that are simulated."
)
_ENTRIES = flags.DEFINE_integer(
  "n", 10_000_000, "Entries of their model.", lower_bound=1
)
_JOINING = flags.DEFINE_integer(
  "joining", 200, "Workers that join a real server at once.", lower_bound=2
)
_MEMBERS = flags.DEFINE_integer(
  "members", 64, "Workers in a round while others come and go.", lower_bound=2
)
_CHURN = flags.DEFINE_float(
  "churn", 300, "Seconds in which workers of a real server come and go.", lower_bound=1
)
_PROCESSES = flags.DEFINE_integer("processes", 32, "Real processes.", lower_bound=2)
_GROUPS = flags.DEFINE_integer(
  "groups", 1, "Groups of them, with a link each if there are several.", lower_bound=1
)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds that they have.", lower_bound=2)
_SEED = flags.DEFINE_integer(
  "seed", 0, "Of links, failures, and of who comes and goes."
)
_REPORT_DIR = entry.define_report_dir("thousands.json")
_JSON = entry.define_json()

entry.require_choices(_PARTS, _ALL, empty=False)


def _settings() -> Iterator[Setting]:
  for size in _WORKERS.value:
    for failures in _FAILURES.value:
      options: dict[str, Any] = {
        "entries": _ENTRIES.value,
        "collective": _COLLECTIVE.value,
        "seed": _SEED.value,
      }
      grace = entry.read_grace(_GRACE)
      options |= {"quorum": _QUORUM.value, "grace": grace}
      yield Setting(size, failures, _SECONDS.value, _INTERVAL.value, **options)


def _simulated() -> Iterator[Any]:
  for setting in _settings():
    begin = time.process_time()
    found = simulation.simulate(setting)
    beside = {"lockstep": simulation.lockstep(setting)}
    yield (
      setting._asdict()
      | found._asdict()
      | beside
      | {"simulating": time.process_time() - begin}
    )


def _windows() -> Iterator[Any]:
  for setting in _settings():
    for scenario in windows.SCENARIOS:
      for delay in (0.5, 0.0):
        # few heartbeats, which would take most of the time
        chosen = setting._replace(
          scenario=scenario, delay=delay, straggle=0.0, limit=20.0
        )
        found = windows.compare(chosen, seeds=_SEEDS.value)
        yield chosen._asdict() | found


def _state() -> Iterator[Any]:
  for size in _WORKERS.value:
    yield state.measure(size)._asdict()


def _levels() -> Iterator[Any]:
  for setting in _settings():
    begin = time.process_time()
    found = levels.simulate(setting)
    yield (
      setting._asdict() | found._asdict() | {"simulating": time.process_time() - begin}
    )


def _server() -> Iterator[Any]:
  yield load.measure(
    _JOINING.value, _MEMBERS.value, _CHURN.value, interval=2.0, seed=_SEED.value
  )._asdict()


def _processes() -> Iterator[Any]:
  yield processes.measure(_PROCESSES.value, _ROUNDS.value, _GROUPS.value)._asdict()


def main() -> None:
  """Measures the parts, keeps the rows, each in place of one of the same setting, and reports."""
  logging.set_verbosity(logging.ERROR)  # the protocols warn of each failure
  console = workers.make_console(stderr=_JSON.value)
  path = pathlib.Path(_REPORT_DIR.value, "thousands.json")
  result: dict[str, list[Any]] = json.loads(path.read_text()) if path.exists() else {}
  key = lambda row: [
    row.get(name) or None for name in (*Setting._fields, "groups") if name != "seconds"
  ]
  makers = _simulated, _windows, _state, _levels, _server, _processes
  for part, make in zip(_ALL, makers, strict=True):
    for row in make() if part in _PARTS.value else ():
      row = json.loads(json.dumps(report.rounded(report.plain(row))))
      result[part] = [
        other for other in result.get(part, []) if key(other) != key(row)
      ] + [row]
      report.keep(path, {}, result)
      console.print(row, highlight=False)
  goodput = [
    row["goodput"]
    for row in result.get("simulated", [])
    if (row["workers"], row["failures"]) == (1000, 1)
  ]
  what = f"goodput of 1,000 workers, each of which fails once an hour, at least {_GOAL}"
  report.say([report.goal(what, min(goodput, default=None), least=_GOAL)], console)
  for part in result:
    console.print(
      f"{part}:\n{tables.thousands(part, _REPORT_DIR.value)}\n", highlight=False
    )
  if _JSON.value:
    report.print_json(result)


if __name__ == "__main__":
  entry.run(main)
