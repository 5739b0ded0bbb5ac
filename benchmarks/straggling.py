r"""Partial reduce really run beside all-reduce: processes on this machine, some of them slowed by sleeping, one killed.

Every worker is a process that trains an MLP on the digits. A step takes 0.05 seconds of sleep on top of its
arithmetic, which stands for the accelerator that this machine does not have, and three times as long at the --slow
slowest. Three runs, one after the other:

    all-reduce         js.make_train_step with dense gradients, processes of JAX over gloo
    partial reduce     js.partial.Worker, each at its own pace
    one killed         the same; a fast worker is killed after half of the time that the run before took

Each counts seconds from when all workers have compiled and are ready, until worker 0's model has an accuracy of 0.96
on the test set, which it looks at after each step.

Examples:
  python -m benchmarks.straggling
  python -m benchmarks.straggling --slow=1 --group_size=3 --weights=constant
  python -m benchmarks.straggling --json | jq .runs
"""

import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from absl import flags
from jax.experimental import multihost_utils

import jaxsparse as js
from benchmarks import entry, report, workers
from benchmarks.tasks import data, images
from benchmarks.tasks.base import Batch, model_of
from jaxsparse import launch
from jaxsparse.launch.rank import START_TIMEOUT

_WORKERS = flags.DEFINE_integer("workers", 6, "Number of workers.")
_SLOW = flags.DEFINE_integer("slow", 2, "How many of them are slow.")
_GROUP_SIZE = flags.DEFINE_integer("group_size", 2, "Workers in a group of partial reduce.")
_WEIGHTS = flags.DEFINE_enum("weights", "dynamic", ["constant", "dynamic"], "Of partial reduce.")
_ROLE = flags.DEFINE_string("role", None, "Internal: the role of a process that this program starts.")
_FOLDER = flags.DEFINE_string("folder", None, "Internal: where the processes of a run meet.")
_JSON = entry.define_json()

_FACTOR = 3  # times as long a step of a slow worker takes
_PACE, _LIMIT = 0.05, 120.0  # seconds: of a step beside its arithmetic, and that a run may take to the target
_TARGET = 0.96  # test accuracy to reach
_BATCH_SIZE, _LEARNING_RATE, _SEED = 16, 0.02, 0  # of each worker in each step; of SGD with momentum 0.9


class Outcome(NamedTuple):
  """Worker 0's run until the target."""

  run: str  # which
  seconds: float | None  # until then; None if it did not
  accuracy: float  # at the end
  iterations: int  # of worker 0's model


class _Task:
  """The task of one worker, and the time it takes for a step."""

  def __init__(self, number: int):
    self._task = images.make_small("mlp", data.load("digits"))
    self.model = model_of(self._task, _SEED)
    self.tx = optax.sgd(_LEARNING_RATE, momentum=0.9)
    slow = number >= _WORKERS.value - _SLOW.value
    self.pace = _PACE * (_FACTOR if slow else 1)

  def batches(self, workers: int, number: int = 0) -> Iterator[Batch]:
    """Endless batches of so many workers, others for each number."""
    return self._task.stream(data.seed_of(_SEED, number), workers, _BATCH_SIZE)


class _Finish:
  """Tells when worker 0 has reached the target, and everyone when that has happened."""

  def __init__(self, folder: pathlib.Path, run: str, accuracy: Any):
    self._file, self._run, self._accuracy = folder / "outcome", run, accuracy
    self._start = time.perf_counter()

  def reached(self, params: Any, iterations: int) -> bool:
    """Whether the target is reached, or the time is up."""
    accuracy, seconds = self._accuracy(params), time.perf_counter() - self._start
    if accuracy < _TARGET and seconds < _LIMIT:
      return False
    outcome = Outcome(self._run, seconds if accuracy >= _TARGET else None, accuracy, iterations)
    report.replace(self._file, json.dumps(outcome))
    return True


def _all_reduce(folder: pathlib.Path) -> None:
  """A rank of the all-reduce: all workers wait for the slowest in every step."""
  place = workers.here("processes", _WORKERS.value)
  own = _Task(place.number)
  tx = optax.chain(js.make_transform("dense", place.axis), own.tx)
  params = own.model.params
  state, step = js.init(tx, params, place.where), js.make_train_step(own.model.plain_loss, tx, place.where)
  batches = own.batches(place.size)
  params, state, _ = step(params, state, next(batches))  # compiles
  own.model.accuracy(params)
  finish, done, iterations = _Finish(folder, "all-reduce", own.model.accuracy), False, 1
  while not done:
    time.sleep(own.pace)
    params, state, _ = step(params, state, next(batches))
    iterations += 1
    done = place.reports and finish.reached(params, iterations)
    done = bool(multihost_utils.broadcast_one_to_all(np.asarray(done)))


def _partial(folder: pathlib.Path, number: int, address: str, run: str) -> None:
  """A worker of partial reduce: a step of its own, then the average of its group."""
  own = _Task(number)

  @jax.jit
  def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
    updates, state = own.tx.update(jax.grad(own.model.plain_loss)(params, batch), state, params)
    return optax.apply_updates(params, updates), state

  batches = own.batches(1, number)
  params, state = own.model.params, own.tx.init(own.model.params)
  jax.block_until_ready(step(params, state, next(batches)))  # compiles
  own.model.accuracy(params)
  with js.partial.Worker(address, number, params) as worker:
    (folder / f"ready{number}").touch()
    while not (folder / "go").exists():
      time.sleep(0.005)
    finish, done = _Finish(folder, run, own.model.accuracy), False
    params, iteration = worker.params, worker.iteration
    while not done:
      time.sleep(own.pace)
      params, state = step(params, state, next(batches))
      params, iteration = worker.reduce(params, iteration + 1)
      done = finish.reached(params, iteration) if number == 0 else (folder / "outcome").exists()


def run_all_reduce() -> Outcome:
  """The whole run, every rank a process."""
  with tempfile.TemporaryDirectory(prefix="jaxsparse-") as folder:
    launch.run(_command(folder, "all-reduce"), _WORKERS.value, limit=_LIMIT + 60)
    return Outcome(*json.loads(pathlib.Path(folder, "outcome").read_text()))


def run_partial(run: str, kill_after: float | None = None) -> Outcome:
  """The whole run, every worker a process; worker 1 is killed after so many seconds."""
  weights: Any = _WEIGHTS.value
  controller = js.partial.Controller(_WORKERS.value, _GROUP_SIZE.value, weights)
  with tempfile.TemporaryDirectory(prefix="jaxsparse-") as name, contextlib.ExitStack() as stack:
    folder = pathlib.Path(name)
    server = js.partial.Server(controller)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    processes = []
    for number in range(_WORKERS.value):
      processes.append(subprocess.Popen(_command(name, f"{number},{server.address},{run}")))
      stack.callback(processes[-1].wait)
      stack.callback(processes[-1].kill)
    all_ready = lambda: len(list(folder.glob("ready*"))) == _WORKERS.value
    _wait_for("starting", all_ready, processes, START_TIMEOUT)
    (folder / "go").touch()
    if kill_after is not None:
      time.sleep(kill_after)
      processes[1].kill()
    _wait_for("training", (folder / "outcome").exists, processes[:1], _LIMIT + 30)
    for process in processes:
      process.wait(30)
    return Outcome(*json.loads((folder / "outcome").read_text()))


def _wait_for(what: str, condition: Callable[[], bool], processes: list[subprocess.Popen], limit: float) -> None:
  """Returns when the condition holds; RuntimeError if a process fails before, or it takes too long."""
  end = time.monotonic() + limit
  while not condition():
    if failed := {number: process.returncode for number, process in enumerate(processes) if process.poll()}:
      raise RuntimeError(f"partial reduce, {what}: workers ended with status {failed}; their messages are above")
    if time.monotonic() > end:
      raise RuntimeError(f"partial reduce, {what}: took more than {limit:g} s")
    time.sleep(0.02)


def _command(folder: str, role: str) -> list[str]:
  return [sys.executable, "-m", "benchmarks.straggling", *sys.argv[1:], f"--folder={folder}", f"--role={role}"]


def goals(outcomes: list[Outcome]) -> list[report.Goal]:
  """How much faster partial reduce is, and whether it gets there without a worker that died."""
  base, partial, killed = (outcome.seconds for outcome in outcomes)
  ratio = base / partial if base and partial else None
  reached = f"with a worker killed half-way the target of {_TARGET:g} is reached, accuracy"
  return [
    report.goal("partial reduce ≥ 1.5 × as fast to the target as all-reduce", ratio, least=1.5),
    report.Goal(reached, outcomes[2].accuracy, killed is not None),
  ]


def main() -> None:
  """Runs all three and reports."""
  if _ROLE.value and _FOLDER.value:
    folder, (role, *details) = pathlib.Path(_FOLDER.value), _ROLE.value.split(",")
    if role == "all-reduce":
      _all_reduce(folder)
    else:
      _partial(folder, int(role), *details)
    return
  console = workers.make_console(stderr=_JSON.value)
  if not 0 <= _SLOW.value <= _WORKERS.value - 2:
    raise ValueError(f"--slow={_SLOW.value}, choose 0 … {_WORKERS.value - 2}: two workers at least are fast")
  js.partial.Controller(_WORKERS.value, _GROUP_SIZE.value)  # raises ValueError for wrong flags
  outcomes = [run_all_reduce(), run_partial("partial reduce")]
  outcomes.append(run_partial("one killed", (outcomes[1].seconds or _LIMIT) / 2))
  kind = f"groups of {_GROUP_SIZE.value}, {_WEIGHTS.value} weights"
  lines = [[one.run, report.number(one.seconds, ".1f"), f"{one.accuracy:.4f}", str(one.iterations)] for one in outcomes]
  heads = "run", f"seconds to {_TARGET:g}", "accuracy", "iterations of worker 0"
  title = f"{_WORKERS.value} processes, {_SLOW.value} of them {_FACTOR:g} × as slow, {kind}"
  console.print(report.table(title, heads, lines))
  reached = goals(outcomes)
  report.say(reached, console)
  if _JSON.value:
    report.print_json({"runs": outcomes, "goals": reached})


if __name__ == "__main__":
  entry.run(main)
