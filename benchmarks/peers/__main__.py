r"""Milliseconds and bytes of an update: PyTorch's DistributedDataParallel, hivemind, and ours, in one run.

Both run in the hosts of the network lab (needs root), a rank on each, one after the
other and again: same links, same shapes, the seconds of the slowest rank from a barrier
on, the bytes that the interface of a host has sent, headers included, and every result
checked. PyTorch has an environment of its own, of `make peers`. DistributedDataParallel
is measured with every size of buckets, and the fastest counts. Rows go to peers.json,
in place of those of the same network; the exit status is 1 where a goal is missed.

With --race it trains instead: PyTorch, or torchft's DiLoCo, in the task of that race,
from the same parameters and on the same batches; losses before and behind the first
step must be the race's. The race's file gets its rows: losses over steps at
--rate=none, at other rates seconds to the loss that dense has after --steps.
`benchmarks.race --parts=wholes` trains ours.

Examples:
  python -m benchmarks.peers python -m benchmarks.peers --hosts=2 --rate=100mbit
  --model=gpt2 --peers=powersgd:rank=4 --algorithms=powersgd,onebit python -m
  benchmarks.race --task=lm_medium --results=out/lm.json --parts=curves --method=dense
  python -m benchmarks.peers --race=out/lm.json --rate=100mbit --seed=0
  --peers=dense,diloco:every=10:rate=0.7
"""

import itertools
import json
import math
import pathlib
import sys
import tempfile
from typing import Any

import jax
import rich.console
from absl import flags

from benchmarks import entry, netlab, recipes, report, specs, workers
from benchmarks.compiled.transformer import Transformer
from benchmarks.peers import ours, ranks, training
from benchmarks.peers import rows as rows_of
from benchmarks.race.report import line
from benchmarks.race.results import Results
from benchmarks.tasks import registry
from jaxsparse import launch

MODELS = {
  "vgg16": lambda: specs.VGG16.values(),
  "gpt2": lambda: [
    leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(Transformer().parameters))
  ],
}

_RATE = flags.DEFINE_list(
  "rate", ["1gbit", "100mbit", "10mbit"], "Rates of the lab's links, as tc writes them."
)
_HOSTS = entry.define_numbers("hosts", [2, 4], "Numbers of hosts, a rank on each.")
_MODEL = flags.DEFINE_list(
  "model", ["vgg16"], f"Whose shapes the gradients have: {', '.join(MODELS)}."
)
_PEERS = flags.DEFINE_list(
  "peers",
  [
    "dense",
    "fp16",
    *(f"powersgd:rank={rank}" for rank in (1, 4, 16)),
    "hivemind:float16",
    "hivemind:uniform8",
  ],
  "Methods of DistributedDataParallel, of hivemind, and in trainings diloco of torchft.",
)
_BUCKET = entry.define_numbers(
  "bucket", [25, 1000], "MB of the buckets of DistributedDataParallel."
)
_ALGORITHMS = flags.DEFINE_list(
  "algorithms",
  [
    *(
      "dense",
      "dense:dtype=bfloat16",
      *(f"powersgd:rank={rank}" for rank in (1, 4, 16)),
      "onebit",
    ),
    *("nbit:bits=4", "nbit:bits=8", "spardl", "spardl:selector=chunked:wire=bf16"),
  ],
  specs.HELP,
)
_ENGINE = flags.DEFINE_list(
  "engine", ["processes", "mpi"], "Of our ranks: JAX's own processes (gloo), or MPI."
)
_DENSITY = flags.DEFINE_float(
  "density", 0.01, "Of the entries that a sparse algorithm delivers."
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 2, "How often the programs alternate.", lower_bound=1
)
_REPETITIONS = flags.DEFINE_integer(
  "repetitions", 5, "Timed updates of a method in each round.", lower_bound=1
)
_PYTHON = flags.DEFINE_string(
  "python", ".venv-peers/bin/python", "The Python of PyTorch's environment."
)
_RACE = flags.DEFINE_string(
  "race", None, "The file of a race: train in its task, instead of measuring updates."
)
_OPTIMIZER = flags.DEFINE_multi_string(
  "optimizer", ["adam:0.001"], "Of trainings: adam or muon."
)
_STEPS = flags.DEFINE_integer(
  "steps", 300, "Of trainings: steps of dense whose loss is the target.", lower_bound=1
)
_MOST = flags.DEFINE_integer(
  "most", 600, "Of trainings: steps after which a method gives up.", lower_bound=1
)
_EVERY = flags.DEFINE_integer(
  "every", 20, "Of trainings: steps from one evaluation to the next.", lower_bound=1
)
_SEED = entry.define_seeds([0, 1, 2])
_CACHE_DIR = entry.define_cache_dir()
_REPORT_DIR = entry.define_report_dir("peers.json")
_SETTING = flags.DEFINE_string(
  "setting", None, "Internal: what a rank of ours measures, as JSON."
)
entry.require_choices(_MODEL, list(MODELS), empty=False)
entry.require_choices(_ENGINE, ["processes", "mpi"], empty=False)


def _measure(model: str, hosts: int, rate: str) -> list[rows_of.Row]:
  """All methods in one network."""
  shapes = [list(shape) for shape in MODELS[model]()]
  n = sum(map(math.prod, shapes))
  setting: dict[str, Any] = {
    "size": hosts,
    "n": n,
    "repetitions": _REPETITIONS.value,
    "warm_up": 3,
    "density": _DENSITY.value,
  }
  found: dict[tuple[str, str], list[dict[str, Any]]] = {}
  theirs = {
    name: [method for method in _PEERS.value if ranks.library(method) == name]
    for name in ranks.UPDATES
  }
  theirs["ddp"] = ranks.in_buckets(theirs["ddp"], _BUCKET.value)
  programs = [*filter(theirs.get, theirs), *_ENGINE.value]
  with netlab.lab(hosts, rate) as team, tempfile.TemporaryDirectory() as folder:
    for number, program in itertools.product(range(_ROUNDS.value), programs):
      rows = pathlib.Path(folder) / f"{number}_{program}.jsonl"
      given = setting | {"rows": str(rows), "cache": _CACHE_DIR.value}
      if program in theirs:  # whose matrices are (outputs, inputs)
        given |= {
          "methods": theirs[program],
          "shapes": [shape[::-1] for shape in shapes],
        }
        ranks.run(team, _PYTHON.value, given, ranks.UPDATES[program])
      else:
        given |= {"engine": program, "methods": _ALGORITHMS.value, "shapes": shapes}
        workers.start_again(
          hosts, program, f"--setting={json.dumps(given)}", hosts=team
        )
      for line in map(json.loads, rows.read_text().splitlines()):
        found.setdefault((program, line["method"]), []).append(line)
  return rows_of.fastest(
    rows_of.row_of((model, hosts, rate), *key, lines) for key, lines in found.items()
  )


def _measure_all(
  console: rich.console.Console, path: pathlib.Path
) -> list[report.Goal]:
  """All methods in every network, whose rows take the place of those that the file has."""
  for hosts in _HOSTS.value:
    specs.parse(_ALGORITHMS.value, hosts, density=_DENSITY.value)
  found, goals = (
    json.loads(path.read_text())["rows"] if path.exists() else [],
    list[report.Goal](),
  )
  rows = [rows_of.Row(**row) for row in found]
  for network in itertools.product(_MODEL.value, _HOSTS.value, _RATE.value):
    measured = _measure(*network)
    console.print(rows_of.table(measured))
    goals += rows_of.goals(measured)
    rows = [row for row in rows if rows_of.network_of(row) != network] + measured
    report.keep(path, {}, {"rows": [row._asdict() for row in rows]})
  return goals


def _train(console: rich.console.Console, path: pathlib.Path) -> list[report.Goal]:
  """Trains with every method, optimizer and seed at every rate, adds the rows to the race's, and shows all of it."""
  results = Results(path, None)
  task = registry.make(training.task_of(results))
  for optimizer in recipes.parse_optimizers(_OPTIMIZER.value, rate=0.001):
    for seed, rate in itertools.product(_SEED.value, _RATE.value):
      plan = training.Plan(
        _PYTHON.value, _PEERS.value, rate, _STEPS.value, _MOST.value, _EVERY.value
      )
      for row in training.train(results, task, plan, optimizer, seed):
        results.add(row)
        console.print(line(row), highlight=False, soft_wrap=True)
  found = rows_of.trained(results, _STEPS.value)
  if found:
    console.print(rows_of.trained_table(found))
  return rows_of.trained_goals(found)


def main() -> None:
  """Measures every network, or trains, and reports."""
  if _SETTING.value:
    ours.measure(json.loads(_SETTING.value))
    return
  if launch.is_rank():
    raise ValueError("the lab starts its own ranks: run this as one program")
  if not pathlib.Path(_PYTHON.value).exists():
    raise ValueError(
      f"--python={_PYTHON.value}: there is none, `make peers` makes an environment with PyTorch"
    )
  console, path = (
    workers.make_console(),
    pathlib.Path(_RACE.value or f"{_REPORT_DIR.value}/peers.json"),
  )
  found = _train(console, path) if _RACE.value else _measure_all(console, path)
  report.say(found, console)
  console.print(f"rows: {path}", soft_wrap=True)
  sys.exit(any(goal.met is False for goal in found))


if __name__ == "__main__":
  entry.run(main)
