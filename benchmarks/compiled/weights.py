r"""How often finding and adding the differences of weights reads them: `python -m benchmarks.compiled.weights`.

The jitted programs of `benchmarks.weights` are compiled for a device that need not be
there: "find", a program that marks the patterns that differ and one that gathers
indices and differences, and "add". A row has kernels, and the bytes that kernels read
and write over the bytes of the weights: an array that is written counts as one that is
read. Prints the goal, at most 4 for each; the exit status is 1 where it is missed.

Examples:
  python -m benchmarks.compiled.weights
  .venv-accelerators/bin/python -m benchmarks.compiled.weights --on=cuda
"""

import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxsparse as js
from benchmarks import entry, report, workers
from benchmarks.compiled import hlo, toolchain
from benchmarks.weights import jitted

_PLATFORM = toolchain.define_platform()
_ENTRIES = flags.DEFINE_integer(
  "entries", 12_881_920, "Weights, of 2 bytes.", lower_bound=1
)
_SHARES = entry.define_numbers(
  "shares",
  [0.004, 0.0112, 0.0285, 0.1734],
  "Shares of the weights that change.",
  flags.FloatParser(0.0, 1.0),
)
_REPORT_DIR = entry.define_report_dir("compiled_weights_PLATFORM.json")

_MOST_READS = 4.0


class Row(NamedTuple):
  """The programs of a way, on one device."""

  program: str  # find or add
  share: float  # of the weights that change
  kernels: int  # outside of branches and loops
  in_branches: int
  in_loops: int
  reads: float  # bytes that kernels read and write / bytes of the weights
  temp: float  # bytes of temporary memory / bytes of the weights

  @property
  def cells(self) -> list[str]:
    """The row of a table."""
    counts = self.kernels, self.in_branches, self.in_loops
    ratios = f"{self.reads:.2f}", f"{self.temp:.2f}"
    return [self.program, f"{100 * self.share:.2f} %", *map(str, counts), *ratios]


HEADS = (
  "program",
  "weights that change",
  "kernels",
  "in branches",
  "in loops",
  "reads of the weights",
  "temporary",
)


def _compiled(
  function: Callable[..., Any], mesh: Mesh, *arguments: tuple[int, str]
) -> Any:
  """A program for each device of the mesh alone, of arrays of so many entries of a dtype."""
  everywhere = PartitionSpec()
  alone = jax.shard_map(
    function, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
  )
  sharding = NamedSharding(mesh, everywhere)
  shapes = [
    jax.ShapeDtypeStruct((size,), dtype, sharding=sharding) for size, dtype in arguments
  ]
  return jax.jit(alone).trace(*shapes).lower().compile()


def _row(program: str, share: float, compiled: list[Any], entries: int) -> Row:
  size = 2 * entries
  found = [hlo.summarize(one.as_text(), large=size) for one in compiled]
  total = lambda field: sum(getattr(one, field) for one in found)
  temp = max(hlo.memory_of(one).temp for one in compiled)
  return Row(
    program,
    share,
    kernels=total("kernels"),
    in_branches=total("in_branches"),
    in_loops=total("in_loops"),
    reads=total("bytes") / size,
    temp=temp / size,
  )


def rows(mesh: Mesh, entries: int, shares: list[float]) -> list[Row]:
  """Compiles the programs for each share."""
  weights = entries, "uint16"
  set_words = jax.eval_shape(
    lambda old: jitted.mark(old, old)[0], jax.ShapeDtypeStruct((entries,), jnp.uint16)
  )
  words = set_words.size, "uint32"
  mark = _compiled(jitted.mark, mesh, weights, weights)
  made = []
  for share in shares:
    capacity = jitted.capacity_of(int(share * entries))
    gather = functools.partial(jitted.gather, capacity=capacity)
    find = [mark, _compiled(gather, mesh, words, weights, weights)]
    changes = (capacity, "int32"), (capacity, "uint16")
    add = [_compiled(jitted.add, mesh, weights, *changes)]
    made.append(_row("find", share, find, entries))
    made.append(_row("add", share, add, entries))
  return made


def goals(found: list[Row]) -> list[report.Goal]:
  """At most 4 reads, of the worst share."""
  reads = lambda program: max(row.reads for row in found if row.program == program)
  return [
    report.goal(
      f"{program}: reads of the weights <= {_MOST_READS:g}",
      reads(program),
      most=_MOST_READS,
    )
    for program in ("find", "add")
  ]


def main() -> None:
  """Compiles the programs, and reports."""
  platform = _PLATFORM.value
  devices = toolchain.devices_on(platform)
  with js.traced_for(platform):
    found = rows(Mesh(np.array(devices), ("device",)), _ENTRIES.value, _SHARES.value)
  path = pathlib.Path(_REPORT_DIR.value) / f"compiled_weights_{platform}.json"
  head = {"platform": platform, "entries": _ENTRIES.value, "jax": jax.__version__}
  report.keep(path, head, {"rows": map(report.rounded, found)})
  console = workers.make_console(stderr=False)
  title = f"{_ENTRIES.value:,} weights of 2 bytes, {platform}"
  console.print(report.table(title, HEADS, [row.cells for row in found]))
  judged = goals(found)
  report.say(judged, console)
  sys.exit(any(goal.met is False for goal in judged))


if __name__ == "__main__":
  entry.run(main)
