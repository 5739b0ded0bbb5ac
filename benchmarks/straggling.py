r"""Partial reduce really run beside all-reduce: processes on this machine, some of them slowed by sleeping, one killed.

Every worker is a process that trains an MLP on the digits. A step takes 0.05 seconds of
sleep on top of its arithmetic, which stands for an accelerator, and three times as long
at the --slow slowest. Three runs:

    all-reduce         js.make_train_step with dense gradients, processes of JAX over gloo
    partial reduce     js.partial.Worker, each at its own pace
    one killed         partial reduce; a fast worker is killed after half of the time that the run before took

Seconds are from when all workers are ready, until worker 0's model has an accuracy of
0.96 on the test set.

Examples:
  python -m benchmarks.straggling
  python -m benchmarks.straggling --slow=1 --json | jq .runs
"""

import contextlib
import json
import multiprocessing
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
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
_ROWS = flags.DEFINE_string(
  "rows",
  None,
  "Write the outcome here and print nothing: how ranks tell who started them.",
)
_JSON = entry.define_json()

_FACTOR = 3  # times as long a step of a slow worker takes
# seconds: of a step beside its arithmetic, and that a run may take to the target
_PACE, _LIMIT = (
  0.05,
  120.0,
)
_TARGET = 0.96  # test accuracy to reach
# of each worker in each step; of SGD with momentum 0.9
_BATCH_SIZE, _LEARNING_RATE, _SEED = (
  16,
  0.02,
  0,
)


class Outcome(NamedTuple):
  """Worker 0's run until the target."""

  run: str  # which
  seconds: float | None  # until then; None if it did not
  accuracy: float  # at the end
  iterations: int  # of worker 0's model


class _Task:
  """The task of one worker, and the time it takes for a step."""

  def __init__(self, slow: bool):
    self._task = images.make_small("mlp", data.load("digits"))
    self.model = model_of(self._task, _SEED)
    self.tx = optax.sgd(_LEARNING_RATE, momentum=0.9)
    self.pace = _PACE * (_FACTOR if slow else 1)

  def batches(self, workers: int, number: int = 0) -> Iterator[Batch]:
    """Endless batches of so many workers, others for each number."""
    return self._task.stream(data.seed_of(_SEED, number), workers, _BATCH_SIZE)

  def finish(
    self, run: str, start: float, params: Any, iterations: int
  ) -> Outcome | None:
    """The outcome, if the target is reached or the time is up."""
    accuracy, seconds = self.model.accuracy(params), time.perf_counter() - start
    if accuracy < _TARGET and seconds < _LIMIT:
      return None
    return Outcome(run, seconds if accuracy >= _TARGET else None, accuracy, iterations)


def _all_reduce(path: pathlib.Path) -> None:
  """A rank of the all-reduce: all workers wait for the slowest in every step."""
  place = workers.here("processes", _WORKERS.value)
  own = _Task(_is_slow(place.number))
  tx = optax.chain(js.make_transform("dense", place.axis), own.tx)
  params = own.model.params
  state, step = (
    js.init(tx, params, place.where),
    js.make_train_step(own.model.plain_loss, tx, place.where),
  )
  batches = own.batches(place.size)
  params, state, _ = step(params, state, next(batches))  # compiles
  own.model.accuracy(params)
  start, outcome, done, iterations = time.perf_counter(), None, False, 1
  while not done:
    time.sleep(own.pace)
    params, state, _ = step(params, state, next(batches))
    iterations += 1
    outcome = (
      own.finish("all-reduce", start, params, iterations) if place.reports else None
    )
    done = bool(multihost_utils.broadcast_one_to_all(np.asarray(outcome is not None)))
  if outcome:
    path.write_text(json.dumps(outcome))


def _partial(
  number: int,
  slow: bool,
  address: str,
  run: str,
  ready: Any,
  ended: Any,
  pipe: Connection | None,
) -> None:
  """A worker of partial reduce: a step of its own, then the average of its group; one of them has the pipe."""
  own = _Task(slow)

  @jax.jit
  def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
    updates, state = own.tx.update(
      jax.grad(own.model.plain_loss)(params, batch), state, params
    )
    return optax.apply_updates(params, updates), state

  batches = own.batches(1, number)
  params, state = own.model.params, own.tx.init(own.model.params)
  jax.block_until_ready(step(params, state, next(batches)))  # compiles
  own.model.accuracy(params)
  with js.partial.Worker(address, number, params) as worker:
    ready.wait(START_TIMEOUT)
    start, params, iteration = time.perf_counter(), worker.params, worker.iteration
    while not ended.value:
      time.sleep(own.pace)
      params, state = step(params, state, next(batches))
      params, iteration = worker.reduce(params, iteration + 1)
      if pipe and (outcome := own.finish(run, start, params, iteration)):
        pipe.send(outcome)
        ended.value = True


def _is_slow(number: int) -> bool:
  return number >= _WORKERS.value - _SLOW.value


def run_all_reduce() -> Outcome:
  """The whole run, every rank a process."""
  with tempfile.TemporaryDirectory(prefix="jaxsparse-") as folder:
    path = pathlib.Path(folder, "outcome")
    command = [
      sys.executable,
      "-m",
      "benchmarks.straggling",
      *sys.argv[1:],
      f"--rows={path}",
    ]
    launch.run(command, _WORKERS.value, limit=_LIMIT + 60)
    return Outcome(*json.loads(path.read_text()))


def run_partial(run: str, kill_after: float | None = None) -> Outcome:
  """The whole run, every worker a process; worker 1 is killed after so many seconds."""
  server = js.partial.Server(js.partial.Controller(_WORKERS.value, 2, "dynamic"))
  threading.Thread(target=server.serve, daemon=True).start()
  context = multiprocessing.get_context("spawn")
  ready, ended = context.Barrier(_WORKERS.value + 1), context.RawValue("b", 0)
  outcome, pipe = context.Pipe(duplex=False)
  with contextlib.ExitStack() as stack:
    processes = []
    for number in range(_WORKERS.value):
      shared = server.address, run, ready, ended, None if number else pipe
      processes.append(
        context.Process(target=_partial, args=(number, _is_slow(number), *shared))
      )
      processes[-1].start()
      stack.callback(processes[-1].join)
      stack.callback(processes[-1].kill)
    pipe.close()  # so that `poll` returns if worker 0 fails
    stage, found = "starting", None
    with contextlib.suppress(threading.BrokenBarrierError, EOFError):
      ready.wait(START_TIMEOUT)
      stage = "training"
      if kill_after is not None:
        time.sleep(kill_after)
        processes[1].kill()
      found = outcome.recv() if outcome.poll(_LIMIT + 30) else None
    if not found:
      raise RuntimeError(
        f"{run}, {stage}: a worker failed, or took too long; the messages of workers are above"
      )
    for process in processes:
      process.join(30)
    return found


def goals(outcomes: list[Outcome]) -> list[report.Goal]:
  """How much faster partial reduce is, and whether it gets there without a worker that died."""
  base, partial, killed = (outcome.seconds for outcome in outcomes)
  ratio = base / partial if base and partial else None
  reached = (
    f"with a worker killed half-way the target of {_TARGET:g} is reached, accuracy"
  )
  return [
    report.goal(
      "partial reduce ≥ 1.5 × as fast to the target as all-reduce", ratio, least=1.5
    ),
    report.Goal(reached, outcomes[2].accuracy, killed is not None),
  ]


def main() -> None:
  """Runs all three and reports."""
  if launch.is_rank():
    if not _ROWS.value:
      raise ValueError("the benchmark starts its own ranks: run this as one program")
    _all_reduce(pathlib.Path(_ROWS.value))
    return
  console = workers.make_console(stderr=_JSON.value)
  if not 0 <= _SLOW.value <= _WORKERS.value - 2:
    raise ValueError(
      f"--slow={_SLOW.value}, choose 0 … {_WORKERS.value - 2}: two workers at least are fast"
    )
  outcomes = [run_all_reduce(), run_partial("partial reduce")]
  outcomes.append(run_partial("one killed", (outcomes[1].seconds or _LIMIT) / 2))
  lines = [
    [
      one.run,
      report.number(one.seconds, ".1f"),
      f"{one.accuracy:.4f}",
      str(one.iterations),
    ]
    for one in outcomes
  ]
  heads = "run", f"seconds to {_TARGET:g}", "accuracy", "iterations of worker 0"
  title = f"{_WORKERS.value} processes, {_SLOW.value} of them {_FACTOR:g} × as slow, groups of 2, dynamic weights"
  console.print(report.table(title, heads, lines))
  reached = goals(outcomes)
  report.say(reached, console)
  if _JSON.value:
    report.print_json({"runs": outcomes, "goals": reached})


if __name__ == "__main__":
  entry.run(main)
