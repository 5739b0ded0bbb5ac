r"""What each computation that differs by platform gains there: `python -m benchmarks.compiled.forks`.

jaxsparse writes some computations anew for GPUs, TPUs or CPUs, with the same bits
(`_compat.by_platform`). Each such place is compiled twice for a platform: as it is, and
with the way of another platform at this place alone, in the update of the first
collective that comes by. On CPU both programs run in turn, and a row has the CPU time
of the other way over that of its own; for H100 and TPU, which need not be there, it has
kernels and bytes of the two programs.

Examples:
  python -m benchmarks.compiled.forks
  .venv-accelerators/bin/python -m benchmarks.compiled.forks --on=cuda
"""

import pathlib
import resource
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from absl import flags

from benchmarks import entry, report, specs
from benchmarks.compiled import hlo, programs, toolchain
from jaxsparse import _compat

_PLATFORM = toolchain.define_platform()
_LABELS = flags.DEFINE_list(
  "updates",
  [
    "spardl",
    "spardl:wire=bf16",
    "spardl:selector=chunked",
    "spardl:selector=reuse",
    "onebit",
    "nbit",
    "chunktopk",
    "powersgd",
    "qsgd",
    "dcttopk",
    "oktopk",
    "gaussiank",
    "dense",
  ],
  "Collectives whose updates are compiled, in this order.",
)
_N = flags.DEFINE_integer(
  # no multiple of the 256 entries of a group of words, as few gradients are
  "gradient_entries",
  4_200_100,
  "Entries of a gradient.",
  lower_bound=1,
)
_RUNS = flags.DEFINE_integer("runs", 9, "Runs of each program.", lower_bound=1)
_REPORT_DIR = entry.define_report_dir("forks_PLATFORM.json")


class Fork(NamedTuple):
  """A place where `by_platform` chooses, and the platforms whose ways differ from the own one."""

  place: str  # file and function, which stay where lines move
  others: tuple[str, ...]


class Row(NamedTuple):
  """A fork with the way of another platform, over its own."""

  place: str
  other: str
  update: str
  own: float  # CPU milliseconds; kernels
  ratio: float
  arrays_own: float = 0.0
  arrays_ratio: float = 0.0


class _Choice:
  """Takes the place of `by_platform`: keeps the forks of a program, and takes another way at one of them."""

  def __init__(self, platform: str):
    self.platform = platform
    self.forks: dict[str, Fork] = {}
    self.changed: tuple[str, str] | None = None

  def __call__(self, *, default: Callable, **ways: Callable) -> Callable:
    frame = sys._getframe(1)
    name_of_file = pathlib.Path(frame.f_code.co_filename).name
    place = f"{name_of_file} {frame.f_code.co_name}"
    name = {"cuda": "gpu"}.get(self.platform, self.platform)
    own = ways.get(name, default)
    others = {"default": default} | ways
    self.forks[place] = Fork(
      place, tuple(key for key, way in others.items() if way is not own)
    )
    if self.changed and self.changed[0] == place:
      return others[self.changed[1]]
    return own


def _compiled(spec: specs.Spec, devices: list[Any], n: int) -> Any:
  jax.clear_caches()
  return programs.traced(spec, devices, n).lower().compile()


def _cpu_seconds() -> float:
  used = resource.getrusage(resource.RUSAGE_SELF)
  return used.ru_utime + used.ru_stime


def _run(program: Any, arguments: Callable[[], Any]) -> float:
  given = jax.block_until_ready(arguments())
  start = _cpu_seconds()
  jax.block_until_ready(program(*given))
  return 1e3 * (_cpu_seconds() - start)


def _on_cpu(own: Any, other: Any) -> tuple[float, float]:
  """CPU milliseconds of the two programs, medians of runs in turn."""

  def arguments() -> Any:
    shapes, shardings = own.in_avals[0], own.input_shardings[0]
    keys = iter(jax.random.split(jax.random.key(0), 1000))
    draw = lambda x, sharding: jax.device_put(
      jax.random.normal(next(keys), x.shape, x.dtype)
      if x.dtype == "float32" and x.ndim == 1
      else jax.numpy.zeros(x.shape, x.dtype),
      sharding,
    )
    return jax.tree.map(draw, shapes, shardings)

  times: tuple[list[float], list[float]] = ([], [])
  for _ in range(_RUNS.value + 1):
    for kept, program in zip(times, (own, other), strict=True):
      kept.append(_run(program, arguments))
  first, second = (statistics.median(kept[1:]) for kept in times)
  return first, second


def _on_accelerator(own: Any, other: Any, n: int) -> tuple[float, ...]:
  found = [hlo.summarize(p.as_text(), large=3 * n) for p in (own, other)]
  kernels = [one.kernels + one.in_branches + one.in_loops for one in found]
  return (*kernels, *(one.bytes / (4 * n) for one in found))


def main() -> None:
  """Measures every fork once, and reports."""
  platform, n = _PLATFORM.value, _N.value
  devices = toolchain.devices_on(platform, 2)
  choice = _Choice(platform)
  _compat.by_platform = choice  # type: ignore[assignment]
  rows, done = list[Row](), set[str]()
  path = pathlib.Path(_REPORT_DIR.value) / f"forks_{platform}.json"
  head = {"platform": platform, "entries": n, "jax": jax.__version__}
  for spec in specs.parse(_LABELS.value, len(devices), density=0.01):
    choice.forks = {}
    choice.changed = None
    entries = programs.entries(spec, n)
    own = _compiled(spec, devices, n)
    for fork in choice.forks.copy().values():
      if fork.place in done:
        continue
      done.add(fork.place)
      for way in fork.others:
        choice.changed = fork.place, way
        try:
          other = _compiled(spec, devices, n)
        except Exception as error:  # a way that this platform cannot compile
          print(fork.place, way, type(error).__name__, error, file=sys.stderr)
          continue
        if platform == "cpu":
          first, second = _on_cpu(own, other)
          row = Row(fork.place, way, spec.label, first, second / first)
        else:
          first, second, bytes_own, bytes_other = _on_accelerator(own, other, entries)
          ratios = second / first, bytes_own, bytes_other / bytes_own
          row = Row(fork.place, way, spec.label, first, *ratios)
        rows.append(row)
        print(*row, flush=True)
    # after each update, since all of them take long
    report.keep(path, head, {"forks": map(report.rounded, rows)})
  print(f"rows: {path}")


if __name__ == "__main__":
  entry.run(main)
