"""What a runtime overlaps: measured by programs of its own, and read from a profiler's trace of any program."""

import bisect
import gzip
import itertools
import json
import pathlib
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import jaxsparse as js
from benchmarks.workers import AXIS
from jaxsparse.train import timing
from jaxsparse.train.engine import engine_of

_CHAIN = 8  # short all-reduces one after the other, which makes the overhead of the clock and of the call small
_SIDE, _PRODUCTS = 256, 16  # side of square matrices, and number of their products: some milliseconds
_LONGEST = 2**20  # words of the longest all-reduce
_COLLECTIVE = re.compile(r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start|-done)?$")
_CONTAINERS = ("while", "conditional", "call")  # operations that contain others
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*? ([a-z][\w-]*)\(", re.MULTILINE)

_Span = tuple[str, float, float]


class Runtime(NamedTuple):
  """What a runtime overlaps."""

  # seconds of two independent short all-reduces over the seconds of one: 1 if they start at the same time; 2 if one
  # waits for the other, so that plans should have `ways=1`
  start_ups: float
  # fraction of an all-reduce that overlaps with independent arithmetic of the same duration, 0 to 1. Near 0, plan with
  # `Layers.at_the_end`
  hidden: float


def measure_runtime(mesh: Mesh | js.Comm, repetitions: int = 5) -> Runtime:
  """Measures whether all-reduces overlap with each other and with arithmetic; every process calls, with one result."""
  engine, split = engine_of(mesh, AXIS), PartitionSpec(AXIS)
  if engine.workers < 2:
    raise ValueError("measure_runtime: one worker sends nothing, give at least two workers")
  watch, comm, options = timing.Stopwatch(engine), engine.comm, js.overlap.compiler_options(engine.platform)

  def seconds(function: Callable, words: int) -> float:
    program = engine.jit(lambda x: function(x[0])[None], (split,), split, options=options)
    rows = engine.spread(np.ones(words, np.float32))
    return statistics.median([watch.time(program, rows)[0] for _ in range(repetitions + 1)][1:])

  def chain(x: jax.Array) -> jax.Array:
    own = x + comm.rank.astype(jnp.float32)  # of equal values XLA would make a multiplication
    for _ in range(_CHAIN):
      x = comm.all_reduce(own + 0.5 * x)
    return x

  start_ups = seconds(lambda x: chain(x) + chain(2 * x), 2 * engine.workers) / seconds(chain, 2 * engine.workers)
  words, arithmetic = _SIDE**2, seconds(lambda x: _multiply(x, _PRODUCTS), _SIDE**2)
  while (sending := seconds(comm.all_reduce, words)) < arithmetic and words < _LONGEST:
    words = min(_LONGEST, max(2 * words, round(words * arithmetic / sending)))
  # An all-reduce that can start after one matrix product, and a chain of products independent of it.
  both = seconds(lambda x: comm.all_reduce(x + _multiply(x, 1)[0]) + _multiply(x, _PRODUCTS), words)
  return Runtime(start_ups, min(1.0, max(0.0, (arithmetic + sending - both) / min(arithmetic, sending))))


def _multiply(x: jax.Array, products: int) -> jax.Array:
  square = x[: _SIDE**2].reshape(_SIDE, _SIDE)
  for _ in range(products):
    square = jnp.tanh(square @ square)
  return jnp.pad(square.reshape(-1), (0, x.size - _SIDE**2))


class Traced(NamedTuple):
  """One run of a program on one device."""

  seconds: float  # from its first operation to the end of its last
  sending: float  # seconds in which at least one collective ran
  hidden: float  # fraction of these in which other operations ran too
  collectives: tuple[_Span, ...]  # name, start and end of each, in seconds


def read_trace(folder: str | pathlib.Path, program: str) -> list[Traced]:
  """Reads the runs of a compiled program on this process's first device from the newest trace in a folder.

  On CPU the trace does not name the device of an operation that ends on another thread: the first such end counts.
  `program` is `step.lower(params, state, batch).compile().as_text()`, the HLO, which names the collectives. ValueError
  if the folder has no trace, or the trace has no run of the program.
  """
  files = sorted(pathlib.Path(folder).glob("**/*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
  if not files:
    raise ValueError(f"read_trace: {folder} has no trace, give the folder of jax.profiler.trace")
  name = re.search(r"HloModule ([\w.-]+)", program)
  events = json.loads(gzip.decompress(files[-1].read_bytes()))["traceEvents"]
  own = [event for event in events if name and event.get("args", {}).get("hlo_module") == name[1]]
  if not own:
    raise ValueError(f"read_trace: {files[-1]} has no run of {name[1] if name else 'a text that is no HLO'!r}")
  ends: dict[str, list[float]] = defaultdict(list)  # of operations that another thread completes: events of their own
  for event in events:
    what, _, op = event.get("name", "").partition(": ")
    if what == "end" and "ts" in event:
      bisect.insort(ends[op], event["ts"])
  device = min(event["args"].get("device_ordinal", "0") for event in own)
  runs: dict[Any, list[_Span]] = defaultdict(list)
  for event in own:
    if event["args"].get("device_ordinal", "0") == device:
      op, start = event["args"]["hlo_op"], event["ts"]
      later = ends[op][bisect.bisect_left(ends[op], start) :]
      runs[event["args"].get("run_id")].append((op, start, max([start + event["dur"], *later[:1]])))
  kinds = dict(_INSTRUCTION.findall(program))
  return [_summary(run, kinds) for run in sorted(runs.values(), key=lambda run: min(start for _, start, _ in run))]


def _summary(run: Sequence[_Span], kinds: dict[str, str]) -> Traced:
  first = min(start for _, start, _ in run)
  spans = sorted(((op, (start - first) / 1e6, (end - first) / 1e6) for op, start, end in run), key=lambda span: span[1])
  sent = [span for span in spans if _COLLECTIVE.match(kinds.get(span[0], ""))]
  computed = [span for span in spans if span not in sent and kinds.get(span[0]) not in _CONTAINERS]
  during = lambda some, time: any(start <= time < end for _, start, end in some)
  pieces = list(itertools.pairwise(sorted({time for span in spans for time in span[1:]})))
  sending = [(start, end) for start, end in pieces if during(sent, start)]
  seconds = sum(end - start for start, end in sending)
  both = sum(end - start for start, end in sending if during(computed, start))
  return Traced(pieces[-1][1], seconds, both / seconds if sending else 0.0, tuple(sent))
