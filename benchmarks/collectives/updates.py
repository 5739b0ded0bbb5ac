"""Times updates of an algorithm with all workers in step, checks each result, and keeps and shows the rows."""

import dataclasses
import functools
import json
import math
import os
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.table
from jax.extend import core
from jax.sharding import PartitionSpec

import jaxsparse as js
from benchmarks import report
from benchmarks.collectives.laws import Laws
from benchmarks.specs import Spec
from benchmarks.workers import Workers
from jaxsparse.comm.verbs import message_p
from jaxsparse.train import timing
from jaxsparse.train.engine import engine_of, local_shard

SETTING = ("workers", "rate", "n", "density")  # of a row, beside its algorithm
ENOUGH = 20.0  # seconds of warm-up, and of timed steps, after which fewer have to do; a whole period is never cut
LEAST_STEPS = 70  # of an algorithm with a period, warm-up included


class Row(NamedTuple):
  """One measured algorithm."""

  algorithm: str  # as it was asked for
  engine: str  # where the workers ran
  workers: int  # P
  n: int  # gradient entries
  density: float  # of the entries that a sparse algorithm delivers
  rate: str  # of the links of the lab, or ""
  gradients: str  # "recorded" or "normal"
  pinned: bool  # whether each rank had a core of its own
  seconds: float  # median of one update; of the slowest worker in each step
  mean: float  # likewise
  p90: float  # 90th percentile, likewise
  steps: int  # how many were timed: those of whole periods where the algorithm has one
  warm_up: int  # untimed steps before them
  arithmetic: float  # seconds of an update whose messages cost nothing, all workers at work at once
  selection: float  # seconds of that until the first message
  words: float  # 4-byte words that the worker sent that sent most, mean over the timed steps
  messages: int  # of one worker, one after the other, counted from the schedule
  checked: str  # the laws that were checked after every timed step: "C" nothing is lost, "R" the same bits everywhere
  wrong: int  # entries that broke one of them, summed over the steps
  predicted: float | None = None  # seconds by the cost model

  def as_dict(self) -> dict[str, Any]:
    """The fields, and both bandwidths."""
    return self._asdict() | dict(zip(("algbw", "busbw"), self.bandwidths, strict=True))

  @property
  def wire(self) -> float:
    """Seconds that the messages add."""
    return max(0.0, self.seconds - self.arithmetic)

  @property
  def merge(self) -> float:
    """Seconds of arithmetic after the first message."""
    return max(0.0, self.arithmetic - self.selection)

  @property
  def bandwidths(self) -> tuple[float, float]:
    """(algbw, busbw) in GB/s as nccl-tests defines them: 4n bytes / seconds, and that times 2(P − 1)/P."""
    algorithm = 4 * self.n / self.seconds / 1e9
    return algorithm, 2 * (self.workers - 1) / self.workers * algorithm


def plan(collective: js.Collective, warm_up: int, repetitions: int) -> tuple[int, int, int]:
  """(untimed steps, timed steps, period): whole periods, where the mean counts each kind of step as often as training.

  A period is the least common multiple of the options `*_period`: Ok-Topk takes exact thresholds every 32 steps and
  draws regions every 64.
  """
  options = dataclasses.asdict(collective) if dataclasses.is_dataclass(collective) else {}
  period = math.lcm(*(value for name, value in options.items() if name.endswith("_period")))
  timed = math.ceil(repetitions / period) * period
  return warm_up if period == 1 else max(warm_up, LEAST_STEPS - timed), timed, period


class Bench:
  """The workers, and what measures them."""

  def __init__(self, workers: Workers, engine: str, n: int, warm_up: int, repetitions: int, gradients: Any = None):
    self._workers, self._name, self._n, self._warm_up, self._repetitions = workers, engine, n, warm_up, repetitions
    self._engine = engine_of(workers.where, "workers")
    self._watch = timing.Stopwatch(self._engine)
    self._kind = "normal" if gradients is None else "recorded"
    self._gradients = gradients or timing.gradients(self._engine, n)

  def row(self, spec: Spec, density: float, rate: str = "", pinned: bool = False) -> Row:
    """Times and checks one algorithm."""
    arithmetic, selection = self._alone(spec.collective)
    messages = js.costs.count(spec.name, n=self._n, workers=self._workers.size, **spec.config).messages
    setting = (spec.label, self._name, self._workers.size, self._n, density, rate, self._kind, pinned)
    return Row(*setting, arithmetic=arithmetic, selection=selection, messages=messages, **self._updates(spec))

  def _updates(self, spec: Spec) -> dict[str, Any]:
    """What the warm-up and the timed steps say of a row."""
    update = timing.Update(self._engine, spec.collective, self._engine.comm, self._n)
    untimed, timed, period = plan(spec.collective, self._warm_up, self._repetitions)
    warm_up = 1 if update.state.carried.residual is None else untimed  # nothing grows
    read, laws = jax.jit(self._workers.metrics), Laws(self._engine, spec, update.specs)
    state, number, wrong, warming = update.state, 0, 0, 0.0
    times: list[float] = []
    words: list[float] = []
    while number < warm_up and warming < ENOUGH:
      seconds, (_, state) = self._watch.time(update.program, self._gradients(number), state)
      warming, number = warming + (seconds if number else 0.0), number + 1  # the first compiles
    while len(times) < timed and (period > 1 or sum(times) < ENOUGH):
      again = functools.partial(self._gradients, number + len(times))
      grads = again()
      before = laws.before(grads, state)
      seconds, (mean, state) = self._watch.time(update.program, grads, state)
      wrong += laws.wrong(mean, state, before, again)
      times.append(seconds)
      words.append(float(local_shard(read(state).words_sent)))
    return {
      "seconds": statistics.median(times),
      "mean": statistics.mean(times),
      "p90": float(np.quantile(times, 0.9)),
      "steps": len(times),
      "warm_up": number,
      "words": statistics.mean(words),
      "checked": laws.names,
      "wrong": wrong,
    }

  def _alone(self, collective: js.Collective) -> tuple[float, float]:
    """(arithmetic, selection): seconds without any message, and until the first one."""
    grads = self._gradients(0)
    arithmetic, update = timing.alone(self._engine, self._watch, collective, grads, self._n, self._repetitions)
    first = self._engine.jit(until_first_message(update.function), update.specs, PartitionSpec("workers"))
    starts = [self._watch.time(first, grads, update.state)[0] for _ in range(self._repetitions + 1)]
    return arithmetic, min(arithmetic, statistics.median(starts[1:]))


def until_first_message(function: Callable) -> Callable:
  """The part of a worker's program that must be done before its first message: what that message is made of."""

  def start(*arguments: Any) -> Any:
    closed = jax.make_jaxpr(function)(*arguments)
    equations = closed.jaxpr.eqns
    sends = [number for number, equation in enumerate(equations) if _sends(equation)]
    if not sends:
      return ()
    made = {id(var) for equation in equations[: sends[0]] for var in equation.outvars}
    wanted = [var for var in equations[sends[0]].invars if id(var) in made]
    names = closed.jaxpr.debug_info._replace(result_paths=None)
    head = closed.jaxpr.replace(eqns=equations[: sends[0]], outvars=wanted, debug_info=names)
    made_of = core.jaxpr_as_fun(core.ClosedJaxpr(head, closed.consts))(*jax.tree.leaves(arguments))
    return [jnp.atleast_1d(part) for part in made_of]  # so that those of all workers can lie side by side

  return start


def _sends(equation: core.JaxprEqn) -> bool:
  return equation.primitive is message_p or any(
    _sends(inner) for jaxpr in js.costs.counting.inner_jaxprs(equation.params) for inner in jaxpr.eqns
  )


class Kept:
  """The rows of one run of the benchmark in a file of JSON lines that later runs are appended to."""

  def __init__(self, path: pathlib.Path, run: str):
    self._path, self._run = path, run

  def add(self, line: dict[str, Any]) -> None:
    """Appends a line and waits until it is on disk."""
    self._path.parent.mkdir(parents=True, exist_ok=True)
    with self._path.open("a") as file:
      file.write(json.dumps({"run": self._run, **line}) + "\n")
      file.flush()
      os.fsync(file.fileno())

  def read(self) -> list[Row]:
    """The rows of this run so far."""
    lines = map(json.loads, self._path.read_text().splitlines() if self._path.exists() else [])
    return [Row(**{name: line[name] for name in Row._fields}) for line in lines if line["run"] == self._run]


def heading(predicts: bool) -> str:
  """The heading of `line`s, in the columns and terms of nccl-tests."""
  heads = f"{'ms':>9} {'mean':>9} {'p90':>9} {'algbw':>7} {'busbw':>7} {'#wrong':>7} {'steps':>6}"
  return f"# {'algorithm':<34} {heads}{' predicted' if predicts else ''}"


def line(row: Row) -> str:
  """One row as text of fixed width, to print as soon as it is measured."""
  times = " ".join(f"{report.milliseconds(seconds):>9}" for seconds in (row.seconds, row.mean, row.p90))
  counts = " ".join(f"{width:>7.3f}" for width in row.bandwidths) + f" {_wrong(row):>7} {row.steps:>6}"
  predicted = "" if row.predicted is None else f" {report.milliseconds(row.predicted):>9}"
  return f"  {row.algorithm:<34} {times} {counts}{predicted}"


def _wrong(row: Row) -> str:
  return f"{row.wrong:,}" if row.checked else "–"


def table(rows: Sequence[Row]) -> rich.table.Table:
  """All rows: what was measured, on what, how often, and how it compares with dense of the same setting."""
  several = [name for name in SETTING if len({getattr(row, name) for row in rows}) > 1]
  predicts = any(row.predicted is not None for row in rows)
  lines = []
  for row in rows:
    own = [f"{value:,}" if isinstance(value, int) else str(value) for value in (getattr(row, name) for name in several)]
    gains = [report.ratio(_dense(row, rows, dense), row.seconds) for dense in ("dense", "dense:dtype=bfloat16")]
    bandwidths = [f"{width:.3f}" for width in row.bandwidths]
    times = map(report.milliseconds, (row.seconds, row.mean, row.p90))
    parts = [f"{100 * part / row.seconds:.0f} %" for part in (row.selection, row.wire, row.merge)]
    counts = _wrong(row), f"{row.words:,.0f}"
    predicted = [report.milliseconds(row.predicted)] * predicts
    lines.append([row.algorithm, *own, *times, *predicted, str(row.steps), *gains, *bandwidths, *counts, *parts])
  heads = ["algorithm", *several, "ms", "mean", "p90", *["predicted"] * predicts, "steps", "× f32", "× bf16"]
  heads += ["algbw", "busbw", "#wrong", "words", "select", "wire", "merge"]
  caption = "ms: median; mean and p90 likewise over the steps, of the slowest rank; algbw, busbw: GB/s as in nccl-tests"
  return report.table(f"one update of all ranks, {_setting(rows, several)}", heads, lines, caption=caption)


def _dense(row: Row, rows: Sequence[Row], label: str) -> float | None:
  """The seconds of dense in the same setting."""
  setting = lambda row: [getattr(row, name) for name in SETTING]
  return next((one.seconds for one in rows if one.algorithm == label and setting(one) == setting(row)), None)


def _setting(rows: Sequence[Row], besides: Sequence[str]) -> str:
  """The setting that all rows have in common."""
  same = [f"{name} {getattr(rows[0], name):,}" for name in ("workers", "n") if name not in besides]
  same += [f"density {rows[0].density:g}"] if "density" not in besides else []
  same += [f"{rows[0].rate} links"] if rows[0].rate and "rate" not in besides else []
  pinned = ", a core a rank" if rows[0].pinned else ""
  return f"engine {rows[0].engine}, {', '.join(same)}, {rows[0].gradients} gradients{pinned}"
