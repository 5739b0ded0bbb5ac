"""Times updates of an algorithm with all workers in step, checks each result, and keeps and shows the rows."""

import dataclasses
import json
import math
import os
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import rich.table

import jaxsparse as js
from benchmarks import report
from benchmarks.collectives.laws import Laws
from benchmarks.specs import Shapes, Spec
from benchmarks.workers import Workers
from jaxsparse.train import timing
from jaxsparse.train.engine import engine_of, local_shard

COMMON = ("engine", "gradients", "pinned")  # of all rows of a run
SETTING = ("workers", "rate", "n", "density")  # of a row, beside its algorithm
# seconds of warm-up, and of timed steps, after which fewer have to do; a whole period
# is never cut
ENOUGH = 20.0
LEAST_STEPS = 70  # of an algorithm with a period, warm-up included


class Row(NamedTuple):
  """One measured algorithm."""

  algorithm: str  # as it was asked for
  engine: str  # where the workers ran
  workers: int  # P
  n: int  # gradient entries
  density: float  # of the entries that a sparse algorithm delivers
  rate: str  # of the links of the lab, or ""
  gradients: str  # "recorded", "normal" or "zipf"
  pinned: bool  # whether each rank had a core of its own
  seconds: float  # median of one update; of the slowest worker in each step
  mean: float  # likewise
  p90: float  # 90th percentile, likewise
  steps: int  # how many were timed: those of whole periods where the algorithm has one
  warm_up: int  # untimed steps before them
  # seconds of an update whose messages cost nothing, all workers at work at once
  arithmetic: float
  words: (
    float  # 4-byte words that the worker sent that sent most, mean over the timed steps
  )
  messages: int  # of one worker, one after the other, counted from the schedule
  # the laws that were checked after every timed step: "C" nothing is lost, "R" the same
  # bits everywhere
  checked: str
  # parts of the vector, at most 4096, that broke one of them, summed over the steps
  wrong: int
  predicted: float | None = None  # seconds by the cost model

  @property
  def wire(self) -> float:
    """Seconds that the messages add."""
    return max(0.0, self.seconds - self.arithmetic)

  @property
  def busbw(self) -> float:
    """Bus bandwidth in GB/s as nccl-tests defines it: 4n bytes / seconds · 2(P − 1)/P."""
    return 4 * self.n / self.seconds / 1e9 * 2 * (self.workers - 1) / self.workers


def plan(
  collective: js.Collective, warm_up: int, repetitions: int
) -> tuple[int, int, int]:
  """(untimed steps, timed steps, period): whole periods, whose mean counts each kind of step as a training does."""
  options = (
    dataclasses.asdict(collective) if dataclasses.is_dataclass(collective) else {}
  )
  period = math.lcm(
    *(value for name, value in options.items() if name.endswith("_period"))
  )
  timed = math.ceil(repetitions / period) * period
  return warm_up if period == 1 else max(warm_up, LEAST_STEPS - timed), timed, period


class Timed(NamedTuple):
  """The timed updates of one algorithm."""

  seconds: list[float]
  words: list[float]  # of the worker that sent most
  warm_up: int  # untimed updates before them
  checked: str  # as of `Row`
  wrong: int


class Bench:
  """The workers, and what measures them; a `watch` may measure more than the time of an update."""

  def __init__(
    self,
    workers: Workers,
    engine: str,
    n: int,
    warm_up: int,
    repetitions: int,
    gradients: Any = None,
    watch: timing.Stopwatch | None = None,
    kind: str = "recorded",
    shapes: Callable[[int], Shapes] | None = None,
  ):
    self._workers, self._name, self._n, self._warm_up, self._repetitions = (
      workers,
      engine,
      n,
      warm_up,
      repetitions,
    )
    self._engine = engine_of(workers.where, "workers")
    self._watch = watch or timing.Stopwatch(self._engine)
    self._kind = "normal" if gradients is None else kind
    self._shapes = shapes
    self._gradients = gradients or timing.gradients(self._engine, n)

  def row(
    self, spec: Spec, density: float, rate: str = "", pinned: bool = False
  ) -> Row:
    """Times and checks one algorithm."""
    collective = spec.sized(self._n, self._shapes)
    alone, _ = timing.alone(
      self._engine, self._watch, collective, self._gradients(0), self._repetitions
    )
    messages = js.costs.count(
      collective, n=self._n, workers=self._workers.size
    ).messages
    setting = (
      spec.label,
      self._name,
      self._workers.size,
      self._n,
      density,
      rate,
      self._kind,
      pinned,
    )
    timed = self.updates(spec, collective)
    return Row(
      *setting,
      seconds=statistics.median(timed.seconds),
      mean=statistics.mean(timed.seconds),
      p90=float(np.quantile(timed.seconds, 0.9)),
      steps=len(timed.seconds),
      warm_up=timed.warm_up,
      arithmetic=statistics.median(alone),
      words=statistics.mean(timed.words),
      messages=messages,
      checked=timed.checked,
      wrong=timed.wrong,
    )

  def updates(self, spec: Spec, collective: js.Collective) -> Timed:
    """Times updates, after a warm-up, and checks each."""
    update = timing.Update(self._engine, collective, self._engine.comm, self._n)
    untimed, timed, period = plan(spec.collective, self._warm_up, self._repetitions)
    # nothing grows
    warm_up = 1 if update.state.carried.residual[0] is None else untimed
    read, laws = jax.jit(self._workers.metrics), Laws(self._engine, spec, update.specs)
    state, number, wrong, warming = update.state, 0, 0, 0.0
    times: list[float] = []
    words: list[float] = []
    while number < warm_up and warming < ENOUGH:
      seconds, (_, state) = self._watch.time(
        update.program, self._gradients(number), state
      )
      # the first compiles
      warming, number = (
        warming + (seconds if number else 0.0),
        number + 1,
      )
    while len(times) < timed and (period > 1 or sum(times) < ENOUGH):
      grads = self._gradients(number + len(times))
      before = laws.before(grads, state)
      seconds, (mean, state) = self._watch.time(update.program, grads, state)
      wrong += laws.wrong(mean, state, before)
      times.append(seconds)
      words.append(float(local_shard(read(state).words_sent)))
    return Timed(times, words, number, laws.names, wrong)


class Kept:
  """The rows of one run of the benchmark in a file of JSON lines that later runs are appended to."""

  def __init__(self, path: pathlib.Path, run: str):
    self._path, self._run = path, run

  def add(self, row: Row) -> None:
    """Appends a row and waits until it is on disk."""
    self._path.parent.mkdir(parents=True, exist_ok=True)
    with self._path.open("a") as file:
      file.write(
        json.dumps({"run": self._run, **row._asdict(), "busbw": row.busbw}) + "\n"
      )
      file.flush()
      os.fsync(file.fileno())

  def read(self) -> list[Row]:
    """The rows of this run so far."""
    lines = map(
      json.loads, self._path.read_text().splitlines() if self._path.exists() else []
    )
    return [
      Row(**{name: line[name] for name in Row._fields})
      for line in lines
      if line["run"] == self._run
    ]


def line(row: Row) -> str:
  """One row in words, to print as soon as it is measured."""
  times = (
    f"{report.milliseconds(row.seconds)} ms (mean {report.milliseconds(row.mean)})"
  )
  return f"{row.algorithm}: {times}, busbw {row.busbw:.3f} GB/s, wrong {_wrong(row)}, {row.steps} steps"


def _wrong(row: Row) -> str:
  return f"{row.wrong:,}" if row.checked else "–"


def table(rows: Sequence[Row]) -> rich.table.Table:
  """All rows: what was measured, on what, how often, and how it compares with dense of the same setting."""
  several = [name for name in SETTING if len({getattr(row, name) for row in rows}) > 1]
  predicts = any(row.predicted is not None for row in rows)
  lines = []
  for row in rows:
    own = [
      f"{value:,}" if isinstance(value, int) else str(value)
      for value in (getattr(row, name) for name in several)
    ]
    times = map(
      report.milliseconds, (row.seconds, row.mean, row.p90, *[row.predicted] * predicts)
    )
    gains = [
      report.ratio(_dense(row, rows, dense), row.seconds)
      for dense in ("dense", "dense:dtype=bfloat16")
    ]
    lines.append(
      [
        row.algorithm,
        *own,
        *times,
        str(row.steps),
        *gains,
        f"{row.busbw:.3f}",
        _wrong(row),
      ]
    )
    lines[-1] += [
      f"{row.words:,.0f}",
      report.milliseconds(row.arithmetic),
      report.milliseconds(row.wire),
    ]
  heads = [
    "algorithm",
    *several,
    "ms",
    "mean",
    "p90",
    *["predicted"] * predicts,
    "steps",
    "× f32",
    "× bf16",
  ]
  same = {
    name: getattr(rows[0], name) for name in (*COMMON, *SETTING) if name not in several
  }
  title = "one update of all ranks: " + ", ".join(
    f"{name} {value}" for name, value in same.items() if value
  )
  caption = "ms: median; mean and p90 likewise over the steps, of the slowest rank; busbw: GB/s as in nccl-tests"
  heads += ["busbw", "#wrong", "words", "arithmetic", "wire"]
  return report.table(title, heads, lines, caption=caption)


def _dense(row: Row, rows: Sequence[Row], label: str) -> float | None:
  """The seconds of dense in the same setting."""
  setting = lambda row: [getattr(row, name) for name in SETTING]
  return next(
    (
      one.seconds
      for one in rows
      if one.algorithm == label and setting(one) == setting(row)
    ),
    None,
  )
