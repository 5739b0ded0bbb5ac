r"""Training that loses a worker and gains two, 6 -> 5 -> 7, beside an undisturbed one: accuracy, mass, time to recover.

Hosts of the network lab, a rank on each, train the digits CNN with SparDL and SGD, and
checkpoint by Orbax. At a fixed step one rank kills itself with SIGKILL: the launcher
ends the others and starts again as many as are left. Later the run ends its phase, and
more ranks go on. Batches have the same examples for every number of workers. Needs
root.

Simulated workers go on without going back to a checkpoint, with the residual of the
lost worker and without. benchmarks/pages/faults.md explains the numbers.

Example:
  python -m benchmarks.elastic --rate=100mbit --seed=0 --workers=4 --joining=1
  --batch_size=60
"""

import contextlib
import json
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import jaxsparse as js
from benchmarks import entry, netlab, report, tables, workers
from benchmarks.elastic import phases
from benchmarks.elastic.phases import DYING, Phase, Recovery, Training
from jaxsparse import launch
from jaxsparse.launch.start import Host

_WORKERS = flags.DEFINE_integer(
  "workers", 6, "Workers at first; one is killed.", lower_bound=3
)
_JOINING = flags.DEFINE_integer("joining", 2, "Workers that join later.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 600, "Training steps.")
_KILL_AT = flags.DEFINE_integer(
  "kill_at", 240, "The step after which a worker is killed."
)
_JOIN_AT = flags.DEFINE_integer("join_at", 400, "The step after which workers join.")
_SAVE_EVERY = flags.DEFINE_integer(
  "save_every", 50, "Steps between two checkpoints.", lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer(
  "batch_size", 210, "Images in a step, for any number of workers, which divides it."
)
_DENSITY = flags.DEFINE_float(
  "density", 0.01, "Fraction of the entries that SparDL delivers."
)
_SEED = entry.define_seeds([0, 1, 2])
_RATE = flags.DEFINE_string(
  "rate", "1gbit", "Speed of the links, as tc writes it; none for any speed."
)
_LAB = flags.DEFINE_bool(
  "lab", True, "Measure in the lab; otherwise only what a lost residual changes."
)
_REPORT_DIR = entry.define_report_dir("elastic.json")
_PHASE = flags.DEFINE_string("phase", None, "Internal: the phase of a rank, as JSON.")

_ROUNDING = 1e-3  # a larger fraction of the gradient than rounding loses is a mistake


class Run(NamedTuple):
  """A run and its outcome, whose last three numbers `Training.outcome` explains."""

  run: str  # the numbers of workers, or what became of the residual of the lost one
  seed: int
  accuracy: float
  delivered: float
  lost: float


class Lost(NamedTuple):
  """The residual of the lost worker, r/P, as a multiple of the update that one step delivers: ratios of ℓ₂ norms."""

  seed: int
  all: float  # of r
  since: float  # of what r has changed by since the last checkpoint


def settings(seed: int) -> Phase:
  """The settings of a run from this seed, as the flags say."""
  return Phase(seed, _STEPS.value, _BATCH_SIZE.value, _DENSITY.value, _SAVE_EVERY.value)


def sizes() -> tuple[int, int, int]:
  """The number of workers at first, after the kill, and in the end."""
  return _WORKERS.value, _WORKERS.value - 1, _WORKERS.value - 1 + _JOINING.value


def in_lab(
  seed: int, hosts: Sequence[Host], folder: pathlib.Path
) -> tuple[list[Run], list[Recovery]]:
  """A run that nobody disturbs, and one that loses a worker and gains others."""
  first, left, last = sizes()

  def start(run: str, ranks: int, until: int, kill_at: int = 0) -> None:
    (folder / run).mkdir(exist_ok=True)
    phase = json.dumps(
      settings(seed)._replace(folder=str(folder / run), until=until, kill_at=kill_at)
    )
    command = [
      sys.executable,
      "-m",
      "benchmarks.elastic",
      *sys.argv[1:],
      f"--phase={phase}",
    ]
    restarts, least = (1, ranks - 1) if kill_at else (0, ranks)
    launch.run(command, ranks, hosts=hosts[:ranks], restarts=restarts, min_ranks=least)

  start("undisturbed", first, _STEPS.value)
  start("disturbed", first, _JOIN_AT.value, _KILL_AT.value)
  start("disturbed", last, _STEPS.value)
  names = {"undisturbed": f"{first}", "disturbed": f"{first} -> {left} -> {last}"}
  outcome = lambda run: json.loads((folder / run / "outcome").read_text())
  return [
    Run(name, seed, *outcome(run)) for run, name in names.items()
  ], phases.recoveries(folder / "disturbed", seed)


def simulated(seed: int) -> tuple[list[Run], Lost]:
  """Runs that lose a worker and go on at once, with its residual and without, and one that loses none."""
  own = {size: Training(workers.here("sim", size), settings(seed)) for size in sizes()}
  first, left, last = sizes()
  copies: dict[int, tuple[np.ndarray, np.ndarray]] = {}

  def copy(number: int, params: Any, state: Any, gradients: Any) -> None:
    del params, gradients
    if number in (
      _KILL_AT.value // _SAVE_EVERY.value * _SAVE_EVERY.value,
      _KILL_AT.value - 1,
      _KILL_AT.value,
    ):
      copies[number] = (
        np.asarray(state[0].carried.residual[0]).reshape(first, -1)[DYING],
        phases.delivered(state),
      )

  start = own[first].train(
    *own[first].first(), np.zeros(1), range(_KILL_AT.value), copy
  )

  def finished(dropped: bool) -> tuple[float, float, float]:
    params, state, gradients = jax.tree.map(jnp.copy, start[:2]) + start[2:]
    if dropped:
      node = state[0]
      rows = node.carried.residual[0].reshape(first, -1).at[DYING].set(0.0)
      state = (
        node._replace(carried=node.carried._replace(residual=(rows.ravel(),))),
        *state[1:],
      )
    for size, steps in (
      (left, range(_KILL_AT.value, _JOIN_AT.value)),
      (last, range(_JOIN_AT.value, _STEPS.value)),
    ):
      state = js.resize(state, params, own[size].place.where)
      params, state, gradients = own[size].train(params, state, gradients, steps)
    return own[last].outcome(params, state, gradients)

  runs = [
    Run(f"{name} its residual", seed, *finished(name == "without"))
    for name in ("with", "without")
  ]
  ends = own[first].train(*start, range(_KILL_AT.value, _STEPS.value))
  (residual, now), (_, was) = copies[_KILL_AT.value], copies[_KILL_AT.value - 1]
  saved = copies[min(copies)][0]
  of_step = lambda r: float(np.linalg.norm(r / first) / np.linalg.norm(now - was))
  undisturbed = Run("no worker lost", seed, *own[first].outcome(*ends))
  return [undisturbed, *runs], Lost(seed, of_step(residual), of_step(residual - saved))


def main() -> None:
  """Runs all seeds, and reports."""
  if any(_BATCH_SIZE.value % size for size in sizes()):
    raise ValueError(
      f"--batch_size={_BATCH_SIZE.value}, choose a multiple of {', '.join(map(str, sizes()))}"
    )
  order = (_SAVE_EVERY, _KILL_AT, _JOIN_AT, _STEPS)
  if sorted({flag.value for flag in order}) != [flag.value for flag in order]:
    given = ", ".join(f"--{flag.name}={flag.value}" for flag in order)
    raise ValueError(
      f"{given}: choose them in this order, each larger than the one before"
    )
  if _PHASE.value:
    phases.run(Phase(*json.loads(_PHASE.value)))
    return
  result: dict[str, list[Any]] = {
    "runs": [],
    "recoveries": [],
    "simulated": [],
    "lost": [],
  }
  with contextlib.ExitStack() as stack:
    hosts = (
      stack.enter_context(netlab.lab(max(sizes()), _RATE.value)) if _LAB.value else []
    )
    for seed in _SEED.value:
      if hosts:
        with tempfile.TemporaryDirectory(prefix="jaxsparse-") as folder:
          runs, found = in_lab(seed, hosts, pathlib.Path(folder))
        result["runs"] += runs
        result["recoveries"] += found
      runs, lost = simulated(seed)
      result["simulated"] += runs
      result["lost"].append(lost)
      report.keep(pathlib.Path(_REPORT_DIR.value) / "elastic.json", {}, result)
  _report(result)


def _report(result: dict[str, list[Any]]) -> None:
  """Prints the tables, and raises RuntimeError if gradients were lost where none should be."""
  for part in result:
    if result[part]:
      print(f"{part}:\n{tables.elastic(part, _REPORT_DIR.value)}\n")
  complete = [
    run
    for run in (*result["runs"], *result["simulated"])
    if not run.run.startswith("without")
  ]
  if bad := [run for run in complete if run.lost > _ROUNDING]:
    raise RuntimeError(
      f"{bad[0].run}, seed {bad[0].seed}: {bad[0].lost:.1e} of the gradient is lost"
    )


if __name__ == "__main__":
  entry.run(main)
