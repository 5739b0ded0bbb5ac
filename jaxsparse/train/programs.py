"""Comparison of the programs of all processes, before they run for the first time.

Processes that run other programs, with another learning rate or other shapes, would train apart or wait for each other
for ever. They exchange a digest of the traced program. Only where digests differ do they exchange its text, so that
every process finds the same first difference and raises the same error.
"""

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxsparse import _compat
from jaxsparse.comm.program_text import Line, ProgramText
from jaxsparse.train.engine import Engine
from jaxsparse.train.replicas import gather_where_different, listing, unlike_first
from jaxsparse.transform.state import is_reduce_state

_PATIENCE = 300.0  # seconds; one process may evaluate before a step


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
  lines = lambda: [list(map(Line, head)), text.lines() if text else []]
  every = gather_where_different(engine, [head, text and text.digest], lines)
  for part, parts in enumerate(zip(*every, strict=True)):
    for number, row in enumerate(itertools.zip_longest(*parts, fillvalue=Line("nothing")), 1):
      texts, sources = zip(*row, strict=True)
      if others := unlike_first(texts):
        process, where = others[0], [f" ({source})" if source else "" for source in sources]
        first, other = _excerpts(texts[0], texts[process])
        raise ValueError(
          f"{what} of {listing(others)} is not that of process 0. The first difference"
          f"{f' in line {number} of the jaxpr' if part else ''} is `{first}` on process 0{where[0]}, and `{other}` on "
          f"process {process}{where[process]}. Every process must run the same code with the same options, shapes and "
          "versions; data of a process's own belongs in the batch"
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


def _excerpts(*texts: str) -> list[str]:
  """The parts of two texts around the first character that differs."""
  same = next((at for at, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
  begin, end = max(0, same - 100), same + 100
  return ["…" * (begin > 0) + text[begin:end] + "…" * (end < len(text)) for text in texts]
