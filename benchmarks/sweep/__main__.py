r"""Trains the recipes of training.toml on small tasks, each with the same multiples of a rate, on simulated workers.

A method's program is compiled once for all rates and seeds. The curves are those of
`benchmarks.race`, in a file for each task and kind of optimizer in --report_dir; a
training that a file has is not repeated. `benchmarks.evidence` reads the files.

Example:
  python -m benchmarks.sweep --task=flow,letters --recipe=dense,bits_4
"""

import itertools
import pathlib

from absl import flags

from benchmarks import entry, workers
from benchmarks.race import report as tables
from benchmarks.race.results import Results
from benchmarks.sweep.training import (
  FOLDER,
  MULTIPLES,
  RECIPES,
  TASKS,
  Setting,
  curves,
  parsed,
)
from benchmarks.tasks import registry

_TASK = flags.DEFINE_list("task", list(TASKS), "Tasks of training.toml.")
_RECIPE = flags.DEFINE_list("recipe", list(RECIPES), "Recipes of training.toml.")
_HOSTS = flags.DEFINE_integer("hosts", 4, "Workers, which share a batch.", 1)
_SEED = entry.define_seeds([0, 1, 2])
_MULTIPLE = entry.define_numbers(
  "multiple",
  MULTIPLES,
  "Multiples of the task's rate.",
  flags.FloatParser(lower_bound=0.0),
)
_REPORT_DIR = flags.DEFINE_string("report_dir", str(FOLDER), "Folder of the files.")


def main() -> None:
  """Trains what the files lack."""
  console = workers.make_console()
  for name, recipe in itertools.product(_TASK.value, _RECIPE.value):
    given, family = TASKS[name], RECIPES[recipe]["family"]
    if family not in given or not name.startswith(RECIPES[recipe].get("task", "")):
      continue
    # the batch of all workers together is the same for any number of them
    size = given["batch_size"] * 4 // _HOSTS.value
    setting = Setting(registry.make(name), _HOSTS.value, size, given["steps"])
    file = f"{name}_{family}" + f"_{_HOSTS.value}" * (_HOSTS.value != 4)
    path = pathlib.Path(_REPORT_DIR.value) / f"{file}.json"
    results = Results(path, setting.fields)
    method, optimizer = parsed(RECIPES[recipe], _HOSTS.value)
    rates = [given[family] * multiple for multiple in _MULTIPLE.value]
    is_known = lambda label, seed, results=results, method=method: bool(
      results.find("curves", method=method.label, optimizer=label, seed=seed)
    )
    for curve in curves(setting, method, optimizer, rates, _SEED.value, is_known):
      results.add(curve)
      console.print(f"{name}: {tables.line(curve)}", highlight=False, soft_wrap=True)


entry.require_choices(_TASK, list(TASKS))
entry.require_choices(_RECIPE, list(RECIPES))

if __name__ == "__main__":
  entry.run(main)
