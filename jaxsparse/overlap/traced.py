"""The timeline of a real run, from a trace of JAX's profiler, to compare with the prediction of its plan."""

import bisect
import gzip
import json
import pathlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jaxsparse.overlap.plans import covered

_COLLECTIVE = re.compile(r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start|-done)?$")
_WITHIN = ("while", "conditional", "call")  # operations that contain others
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*? ([a-z][\w-]*)\(", re.MULTILINE)


class Traced(NamedTuple):
  """One run of a program on one device.

  Attributes:
    seconds: from its first operation to the end of its last.
    sending: seconds in which at least one collective ran.
    hidden: fraction of these in which other operations ran too.
    collectives: name, start and end of each, in seconds from the first operation.

  Example:
    >>> print(Traced(0.2, 0.1, 0.5, (("psum.1", 0.0, 0.1),)))
    collective                    start       end
    psum.1                     0.000000  0.100000
    0.200000 s, of which 0.100000 s of sending; 50 % of it is hidden
  """

  seconds: float
  sending: float
  hidden: float
  collectives: tuple[tuple[str, float, float], ...]

  def __str__(self) -> str:
    lines = [f"{'collective':<24}{'start':>11}{'end':>10}"]
    lines += [f"{name:<24}{start:>11.6f}{end:>10.6f}" for name, start, end in self.collectives]
    end = f"{self.seconds:.6f} s, of which {self.sending:.6f} s of sending; {100 * self.hidden:.0f} % of it is hidden"
    return "\n".join([*lines, end])


def traced(folder: str | pathlib.Path, program: str) -> tuple[Traced, ...]:
  """Reads the runs of a compiled program on this process's first device from the newest trace in a folder.

  Args:
    folder: the argument of `jax.profiler.trace`.
    program: `step.lower(params, state, batch).compile().as_text()`, the HLO, which names the collectives.

  Returns:
    A `Traced` for each run in the trace, in order, to compare with `str(plan)` and `plan.hidden`. On CPU the trace does
    not name the device of an operation that ends on another thread; with several devices in a process the first such
    end counts.

  Raises:
    ValueError: if the folder has no trace, or the trace has no run of the program.

  Example:
    >>> import tempfile, jax, jax.numpy as jnp, jaxsparse as js
    >>> square = jax.jit(lambda x: jnp.tanh(x @ x) @ x)
    >>> text = square.lower(jnp.ones((64, 64))).compile().as_text()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   _ = jax.block_until_ready(square(jnp.ones((64, 64))))
    ...   with jax.profiler.trace(folder):
    ...     _ = jax.block_until_ready(square(jnp.ones((64, 64))))
    ...   [one.sending for one in js.overlap.traced(folder, text)]
    [0.0]
  """
  files = sorted(pathlib.Path(folder).glob("**/*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
  if not files:
    raise ValueError(f"traced: {folder} has no trace, give the folder of jax.profiler.trace")
  name = re.search(r"HloModule ([\w.-]+)", program)
  events = json.loads(gzip.decompress(files[-1].read_bytes()))["traceEvents"]
  of_program = [event for event in events if name and event.get("args", {}).get("hlo_module") == name[1]]
  if not of_program:
    raise ValueError(f"traced: {files[-1]} has no run of {name[1] if name else 'a text that is no HLO'!r}")
  device = min(event["args"].get("device_ordinal", "0") for event in of_program)
  ends = _ends(events)
  runs: dict[Any, list[tuple[str, float, float]]] = defaultdict(list)
  for event in of_program:
    if event["args"].get("device_ordinal", "0") == device:
      op, start = event["args"]["hlo_op"], event["ts"]
      runs[event["args"].get("run_id")].append((op, start, _end(ends.get(op, []), start, start + event["dur"])))
  kinds = dict(_INSTRUCTION.findall(program))
  return tuple(_summary(run, kinds) for run in sorted(runs.values(), key=lambda run: min(start for _, start, _ in run)))


def _ends(events: Iterable[dict[str, Any]]) -> dict[str, list[float]]:
  """Ends of operations that another thread completes: on CPU these are separate events."""
  ends: dict[str, list[float]] = defaultdict(list)
  for event in events:
    what, _, op = event.get("name", "").partition(": ")
    if what == "end" and "ts" in event:
      ends[op].append(event["ts"])
  return {op: sorted(times) for op, times in ends.items()}


def _end(times: Sequence[float], start: float, end: float) -> float:
  following = bisect.bisect_left(times, start)
  return max(end, times[following]) if following < len(times) else end


def _summary(run: Sequence[tuple[str, float, float]], kinds: dict[str, str]) -> Traced:
  first = min(start for _, start, _ in run)
  second = lambda microseconds: (microseconds - first) / 1e6
  spans = sorted(((op, second(start), second(end)) for op, start, end in run), key=lambda span: span[1])
  sends = lambda op: bool(_COLLECTIVE.match(kinds.get(op, "")))
  sent = tuple(span for span in spans if sends(span[0]))
  done = [span[1:] for span in spans if not sends(span[0]) and kinds.get(span[0]) not in _WITHIN]
  sending, computing = covered([span[1:] for span in sent]), covered(done)
  both = sending + computing - covered([*(span[1:] for span in sent), *done])
  return Traced(max(end for _, _, end in spans), sending, both / sending if sending else 0.0, sent)
