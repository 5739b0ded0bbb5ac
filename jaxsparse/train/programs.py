"""Comparison of the programs of all processes, before they run for the first time.

Processes that run other programs, with another learning rate or other shapes, would train apart or wait for each other
for ever. They exchange a digest of the traced program, an array of one shape for all programs. Only where digests
differ do they exchange the text of the first line that does, so that every process raises the same error.
"""

import hashlib
import sys
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxsparse import _compat
from jaxsparse.comm.program_text import Line, ProgramText
from jaxsparse.train.engine import Engine
from jaxsparse.train.replicas import gather_numbers, listing
from jaxsparse.transform.state import is_reduce_state

_PATIENCE = 300.0  # seconds; one process may evaluate before a step
_LONGEST = 4096  # bytes of a line that are exchanged for an error


def wait_for_all(tree: Any, what: str, now: str) -> None:
  """Waits for the other processes that hold a part of a tree, before they compare a program that has run before.

  Raises:
    RuntimeError: if one of them runs the program as before, and does not compare it.
  """
  try:
    _compat.wait_for_processes(tree, what, _PATIENCE)
  except RuntimeError:
    raise RuntimeError(
      f"{what} of process {jax.process_index()} has arguments of other shapes than before, and within {_PATIENCE:g} s "
      f"another process did not come to a step that has. Give the same shapes on every process in each step; here {now}"
    ) from None  # its text and JAX's would say something else of the same


def check_traced(engine: Engine, what: str, program: Any, arguments: Sequence[Any], results: str = "") -> None:
  """`check_same` of the trace of a jitted function, and of its `results` if they have a name.

  JAX keeps the trace for the call with the same arguments.
  """
  if engine.processes > 1 and not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments)):
    traced = program.trace(*arguments)
    check_same(engine, what, described((traced.out_info,), (results,)) if results else (), traced.jaxpr)


def check_same(engine: Engine, what: str, head: Sequence[str], jaxpr: core.ClosedJaxpr | None = None) -> None:
  """Checks that all processes of an engine have the same lines and the same jaxpr; every process must call.

  Args:
    engine: the workers.
    what: the name of the program, for the error.
    head: lines that say what the program is made of.
    jaxpr: of the program.

  Raises:
    ValueError: naming the first difference, on every process.
  """
  if engine.processes == 1:
    return
  head = [f"jax {jax.__version__}, jaxsparse {sys.modules['jaxsparse'].__version__}", *head]
  text = ProgramText(jaxpr) if jaxpr else None
  whole = "\n".join([*head, text.digest if text else ""])
  digests = gather_numbers(engine, np.frombuffer(hashlib.sha256(whole.encode()).digest()[:8], np.uint32))
  if np.all(digests == digests[0]):
    return
  kind, found = "", _difference(engine, list(map(Line, head)))
  if not found:
    found = _difference(engine, text.lines() if text else [])
    kind = f" in line {found.number + 1} of the jaxpr" if found else ""
  others = found.others if found else np.flatnonzero(np.any(digests != digests[0], axis=1))
  difference = found.message if found else "not known"
  raise ValueError(
    f"{what} of {listing(others)} is not that of process 0. The first difference{kind} is {difference}. Every process "
    "must run the same code with the same options, shapes and versions; data of a process's own belongs in the batch"
  )


def described(arguments: Any, names: Sequence[str], shardings: Any = None) -> list[str]:
  """Dtypes, shapes and shardings of arguments, and the collectives of the transforms in a state among them."""
  lies = jax.tree.leaves(shardings)
  lines = []
  for number, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(arguments)):
    of = f" sharded as {lies[number].spec}" if lies else ""
    lines.append(f"{_named(path, names)} is {jnp.result_type(x).name}{list(np.shape(x))}{of}")
  for path, node in jax.tree_util.tree_leaves_with_path(arguments, is_leaf=is_reduce_state):
    if is_reduce_state(node) and node.layout.method:
      labels = ", ".join(group.collective.label for group in node.layout.method.groups)
      lines.insert(0, f"{_named(path, names)} is that of {labels}")
  return lines


def _named(path: Any, names: Sequence[str]) -> str:
  return names[path[0].idx] + jax.tree_util.keystr(path[1:])


class _Difference(NamedTuple):
  """The first line that differs between processes.

  Attributes:
    number: of the line, from 0.
    others: the processes whose line is not that of process 0.
    message: both lines.
  """

  number: int
  others: np.ndarray
  message: str


def _difference(engine: Engine, lines: Sequence[Line]) -> _Difference | None:
  """The first of these lines that differs between processes."""
  longest = int(gather_numbers(engine, [len(lines)]).max())
  rows = gather_numbers(engine, [*(zlib.crc32(line.text.encode()) for line in lines), *[0] * (longest - len(lines))])
  differs = np.any(rows != rows[0], axis=0)
  if not differs.any():
    return None
  number = int(np.argmax(differs))
  others = np.flatnonzero(rows[:, number] != rows[0, number])
  line = lines[number] if number < len(lines) else Line("nothing")
  texts, sources = _texts(engine, line.text), _texts(engine, line.where and f" ({line.where})")
  process = int(others[0])
  first, other = _excerpts(texts[0], texts[process])
  message = f"`{first}` on process 0{sources[0]}, and `{other}` on process {process}{sources[process]}"
  return _Difference(number, others, message)


def _texts(engine: Engine, text: str) -> list[str]:
  """The text of each process."""
  buffer = text.encode()[:_LONGEST].ljust(_LONGEST, b"\0")
  rows = gather_numbers(engine, np.frombuffer(buffer, np.uint32))
  return [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in rows]


def _excerpts(*texts: str) -> list[str]:
  """The parts of two texts around the first character that differs."""
  same = next((at for at, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
  begin, end = max(0, same - 100), same + 100
  return ["…" * (begin > 0) + text[begin:end] + "…" * (end < len(text)) for text in texts]
