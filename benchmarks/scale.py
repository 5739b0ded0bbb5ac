r"""Scale on paper: the predicted time of an update on the wire for 8 … 4096 workers, and the making of its program.

Predicted is the wire alone, `messages · α + bytes · β` by each algorithm's formula, an upper bound where sizes vary.
Selection and sums come on top: a worker selects among the same n entries whatever P is, and what it adds up grows with
the words that arrive, so with P only where those do; `benchmarks.collectives` measures both. Left out too are what
workers agree on (`benchmarks.costs` lists it) and A2SGD's averaging of the parameters every `sync_every` steps; its
workers go on with totals of their own, so it does not compete for the fastest. In `spardl:teams=best` the number of
teams is the fastest divisor of P in that network.

Measured are the seconds to trace, lower and compile it for P forced CPU devices: nothing runs, and n hardly matters.
SparDL has 2⌈log₂P⌉ rounds, so they should grow as a + b log₂P: the fit is printed, and how much longer the largest P
takes than the smallest, beside the same ratio of log₂P. The figure is scale.png in --report_dir.

Examples:
  python -m benchmarks.scale
  python -m benchmarks.scale --network=25GbE --network=wifi:alpha=2e-3:beta=4e-8 --workers=6,14,30 --schedule_of=
  python -m benchmarks.scale --schedule_of=spardl,spardl:teams=4,gtopk,oktopk --workers=8,16,32,64
  python -m benchmarks.scale --json | jq '.predicted[] | select(.workers == 4096 and .algorithm == "spardl")'
"""

import itertools
import json
import math
import pathlib
import re
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress
import rich.table
from absl import flags
from jax.sharding import Mesh, PartitionSpec
from matplotlib import axes
from matplotlib import colors as mcolors

import jaxsparse as js
from benchmarks import entry, report, specs


class Network(NamedTuple):
  """What a message costs.

  Attributes:
    name: as the user wrote it.
    alpha: seconds a message.
    beta: seconds a byte.
  """

  name: str
  alpha: float
  beta: float


PRESETS = {
  network.name: network
  for network in (
    Network("1GbE", alpha=50e-6, beta=8e-9),  # TCP, 1 Gbit/s
    Network("25GbE", alpha=30e-6, beta=0.32e-9),  # TCP, 25 Gbit/s
    Network("400Gb", alpha=5e-6, beta=0.02e-9),  # RDMA, 400 Gbit/s
  )
}
PHASES = ("trace", "lower", "compile")

_BEST = "teams=best"
_AXIS = "workers"
_DEVICES_OF_A_PROCESS = 2048
_COLLECTIVE = re.compile(
  r" (?:collective-permute|all-reduce|all-gather|all-to-all|reduce-scatter|collective-broadcast)(?:-start)?\("
)

_ALGORITHM = flags.DEFINE_multi_string("algorithm", ["all"], specs.HELP)
_WORKERS = flags.DEFINE_list("workers", [str(2**bit) for bit in range(3, 13)], "Numbers of workers.")
_N = flags.DEFINE_integer("n", 14_728_266, "Gradient entries; VGG-16 by default.")
_DENSITY = flags.DEFINE_float("density", 0.01, "Share of the entries to deliver.")
_NETWORK = flags.DEFINE_multi_string(
  "network",
  list(PRESETS),
  f"Networks to predict for: {', '.join(PRESETS)}, or your own as name:alpha=seconds a message:beta=seconds a byte.",
)
_SCHEDULE_OF = flags.DEFINE_list(
  "schedule_of",
  ["spardl"],
  "Algorithms to trace, lower and compile; none with --schedule_of=. Making more than 4096 devices takes minutes.",
)
_REPEATS = flags.DEFINE_integer("repeats", 3, "How often to make each program; the median counts.")
_PATIENCE = flags.DEFINE_float("patience", 15, "No larger P for an algorithm once a program took so many seconds.")
_REPORT_DIR = flags.DEFINE_string("report_dir", "out", "Folder for the figure scale.png.")
_JSON = flags.DEFINE_bool(
  "json", False, "Print the result as JSON on standard output, everything else on standard error."
)


class Predicted(NamedTuple):
  """One algorithm at one number of workers in one network.

  Attributes:
    network: its name.
    workers: P.
    algorithm: as it was asked for.
    teams: what `teams=best` stands for here; None without it.
    messages: a worker.
    words: 4-byte words a worker.
    seconds: on the wire.
    replicates: whether the total is the same on every worker.
  """

  network: str
  workers: int
  algorithm: str
  teams: int | None
  messages: int
  words: int
  seconds: float
  replicates: bool


class Program(NamedTuple):
  """What it took to make the program of one update, medians in seconds.

  Attributes:
    algorithm: as it was asked for.
    workers: P.
    messages: of one update, counted from its jaxpr; where sizes vary, in the branches with the most words.
    collectives: operations between workers in the compiled program, all branches and agreements included.
    trace: from Python to a jaxpr.
    lower: from the jaxpr to StableHLO.
    compile: from StableHLO to machine code.
    cpu: processor seconds of all three, over all threads: a busy machine stretches them less.
    runs: how often it was made.
  """

  algorithm: str
  workers: int
  messages: int
  collectives: int
  trace: float
  lower: float
  compile: float
  cpu: float
  runs: int = 1

  @property
  def total(self) -> float:
    """All three."""
    return self.trace + self.lower + self.compile


class Growth(NamedTuple):
  """How the seconds of one phase grow: the line a + b log₂P nearest to them.

  Attributes:
    algorithm: as it was asked for.
    phase: one of `PHASES`, their "total", or "cpu".
    a: seconds.
    b: seconds for twice as many workers.
    residual: what a measurement is at most away from the line, in seconds.
    ratio: how many times longer the largest P takes than the smallest.
    log_ratio: the same of log₂P.
  """

  algorithm: str
  phase: str
  a: float
  b: float
  residual: float
  ratio: float
  log_ratio: float


def parse_network(text: str) -> Network:
  """A network from the flag.

  Raises:
    ValueError: for an unknown name, or anything but two positive numbers.

  Example:
    >>> parse_network("wifi:alpha=2e-3:beta=4e-8")
    Network(name='wifi', alpha=0.002, beta=4e-08)
  """
  name, *options = text.split(":")
  if not options and name in PRESETS:
    return PRESETS[name]
  try:
    values = {key: float(value) for key, _, value in (option.partition("=") for option in options)}
    if len(options) == 2 and values.keys() == {"alpha", "beta"} and all(0 < v < math.inf for v in values.values()):
      return Network(name, **values)
  except ValueError:
    pass
  raise ValueError(
    f"--network={text}, choose from {', '.join(PRESETS)}, or write name:alpha=seconds:beta=seconds, both above 0"
  )


def predict(label: str, workers: int, networks: Sequence[Network], n: int, density: float) -> list[Predicted]:
  """One algorithm in every network.

  Raises:
    ValueError: for an unknown name, or options that are rejected.
  """
  teams: list[int | None] = [None]
  if _BEST in label.split(":"):
    teams = [d for d in range(1, workers + 1) if workers % d == 0]
  choices = []
  for d in teams:
    (spec,) = specs.parse([label.replace(_BEST, f"teams={d}")], workers, density=density)
    choices.append((d, spec, js.costs.predict(spec.name, n=n, workers=workers, **spec.config)))
  rows = []
  for network in networks:
    seconds = [cost.seconds(network.alpha, network.beta) for _, _, cost in choices]
    d, spec, cost = choices[seconds.index(min(seconds))]
    replicates = spec.collective.replicates
    rows.append(Predicted(network.name, workers, label, d, cost.messages, cost.words, min(seconds), replicates))
  return rows


def cpu_devices(number: int) -> list[jax.Device]:
  """`number` forced CPU devices; call it before anything else makes devices.

  XLA's CPU client takes more than 2048 of them for those of several processes, and compiles for these only in a
  distributed run; one of a single process will do.
  """
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", number)
  jax.config.update("jax_enable_compilation_cache", False)
  if number > _DEVICES_OF_A_PROCESS:
    with socket.socket() as free:
      free.bind(("localhost", 0))
      address = f"localhost:{free.getsockname()[1]}"
    jax.distributed.initialize(address, num_processes=1, process_id=0)
  return jax.devices()


def update_of(spec: specs.Spec, mesh: Mesh) -> Any:
  """One update of every worker, jitted: gradients to averages and the next state."""
  tx = js.make_transform(spec.name, _AXIS, **spec.config)

  def worker(grads: jax.Array) -> Any:
    state = jax.lax.optimization_barrier(tx.init(grads))  # else the compiler sees that the residual is zero
    return jax.tree.map(jnp.atleast_1d, tx.update(grads, state))

  split = PartitionSpec(_AXIS)
  return jax.jit(jax.shard_map(worker, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))


def make(spec: specs.Spec, n: int, mesh: Mesh) -> Program:
  """Traces, lowers and compiles the update, without what an earlier program left in caches."""
  jax.clear_caches()
  grads = jax.ShapeDtypeStruct((mesh.size * n,), jnp.float32)
  update, busy, ticks = update_of(spec, mesh), time.process_time(), [time.perf_counter()]
  traced = update.trace(grads)
  ticks.append(time.perf_counter())
  lowered = traced.lower()
  ticks.append(time.perf_counter())
  compiled = lowered.compile()
  ticks.append(time.perf_counter())
  cpu = time.process_time() - busy
  messages = js.costs.count_jaxpr(traced.jaxpr.jaxpr, mesh.size).messages
  collectives = len(_COLLECTIVE.findall(compiled.as_text()))
  trace, lower, compile_ = (after - before for before, after in itertools.pairwise(ticks))
  return Program(spec.label, mesh.size, messages, collectives, trace, lower, compile_, cpu)


def make_all(labels: Sequence[str], sizes: Sequence[int], on_program: Callable[[], None]) -> list[Program]:
  """The programs of every algorithm, from the smallest P upwards until one takes too long.

  All of them once, then all of them again: a moment in which the machine is busy spoils one run of each at most.
  """
  chosen = [specs.parse(list(labels), workers, density=_DENSITY.value) for workers in sizes]
  devices = np.array(cpu_devices(max(sizes)))
  mesh_of = lambda workers: Mesh(devices[:workers], (_AXIS,))
  make(chosen[0][0], _N.value, mesh_of(sizes[0]))  # the first of a process also loads the compiler
  runs: dict[tuple[str, int], list[Program]] = {}
  for _ in range(_REPEATS.value):
    for of_one in zip(*chosen, strict=True):
      for workers, spec in zip(sizes, of_one, strict=True):
        made = runs.setdefault((spec.label, workers), [])
        if not made or made[0].total <= _PATIENCE.value:
          made.append(make(spec, _N.value, mesh_of(workers)))
        on_program()
        if made[0].total > _PATIENCE.value:
          break
  return [_median(made) for made in runs.values()]


def _median(made: Sequence[Program]) -> Program:
  phases = {phase: statistics.median(getattr(program, phase) for program in made) for phase in (*PHASES, "cpu")}
  return made[0]._replace(**phases, runs=len(made))


def growths(programs: Sequence[Program]) -> list[Growth]:
  """The growth of every algorithm and phase, where there are two numbers of workers at least."""
  result = []
  for label in dict.fromkeys(row.algorithm for row in programs):
    rows = [row for row in programs if row.algorithm == label]
    logs = np.log2([row.workers for row in rows])
    for phase in (*PHASES, "total", "cpu") if len(rows) > 1 else ():
      seconds = np.array([getattr(row, phase) for row in rows])
      b, a = np.polyfit(logs, seconds, 1)
      residual = np.abs(a + b * logs - seconds).max()
      fit = map(float, (a, b, residual, seconds[-1] / seconds[0], logs[-1] / logs[0]))
      result.append(Growth(label, phase, *fit))
  return result


def speed_table(rows: Sequence[Predicted], title: str) -> rich.table.Table:
  """What is fastest in each network at each P, beside dense and SparDL."""
  result = rich.table.Table(title=title, caption="ms an update; fastest of those whose total is the same everywhere")
  for head in ("network", "P", "fastest", "next", "ms", "dense", "spardl", "dense / spardl", f"spardl:{_BEST}", "d"):
    result.add_column(head, justify="left" if head in ("network", "fastest", "next") else "right", no_wrap=True)
  places = list(dict.fromkeys((row.network, row.workers) for row in rows))
  for place, after in itertools.zip_longest(places, places[1:], fillvalue=("", 0)):
    here = {row.algorithm: row for row in rows if (row.network, row.workers) == place}
    ranked = sorted((row for row in here.values() if row.replicates), key=lambda row: row.seconds)
    names = [row.algorithm for row in ranked]
    dense, spardl, best = (here.get(label) for label in ("dense", "spardl", f"spardl:{_BEST}"))
    result.add_row(
      *(place[0], str(place[1]), *[*names, "–", "–"][:2]),
      *map(_ms, (ranked[0] if ranked else None, dense, spardl)),
      f"{dense.seconds / spardl.seconds:,.1f}" if dense and spardl else "–",
      *(_ms(best), str(best.teams) if best else "–"),
      end_section=place[0] != after[0],
    )
  return result


def _ms(row: Predicted | None) -> str:
  if row is None:
    return "–"
  ms = 1e3 * row.seconds
  return f"{ms:,.0f}" if ms >= 100 else f"{ms:#.3g}"


def program_table(rows: Sequence[Program], title: str) -> rich.table.Table:
  """The seconds that each program took."""
  result = rich.table.Table(title=title)
  for head in ("algorithm", "P", "messages", "collectives", *PHASES, "total", "total / log₂P", "cpu", "runs"):
    result.add_column(head, justify="left" if head == "algorithm" else "right", no_wrap=True)
  for number, row in enumerate(rows):
    last = number + 1 == len(rows) or rows[number + 1].algorithm != row.algorithm
    seconds = (row.trace, row.lower, row.compile, row.total, row.total / math.log2(row.workers), row.cpu)
    counts = (str(row.workers), f"{row.messages:,}", f"{row.collectives:,}")
    result.add_row(row.algorithm, *counts, *(f"{s:.3f}" for s in seconds), str(row.runs), end_section=last)
  return result


def growth_table(rows: Sequence[Growth]) -> rich.table.Table:
  """How the seconds grow."""
  result = rich.table.Table(title="seconds = a + b log₂P, and how much more the largest P takes than the smallest")
  for head in ("algorithm", "phase", "a", "b", "farthest off", "largest / smallest", "of log₂P"):
    result.add_column(head, justify="left" if head in ("algorithm", "phase") else "right", no_wrap=True)
  for row in rows:
    line, ratios = (row.a, row.b, row.residual), (row.ratio, row.log_ratio)
    result.add_row(
      row.algorithm,
      row.phase,
      *(f"{value:.3f}" for value in line),
      *(f"{value:.2f}" for value in ratios),
      end_section=row.phase == "cpu",
    )
  return result


def figure(
  predicted: Sequence[Predicted],
  programs: Sequence[Program],
  networks: Sequence[Network],
  title: str,
  path: pathlib.Path,
) -> None:
  """A panel for each network, and one for the making of the programs."""
  count = len(networks) + bool(programs)
  columns = min(2, count)
  rows = math.ceil(count / columns)
  plot, grid = report.pyplot.subplots(
    rows, columns, figsize=(5.2 * columns + 2, 4.2 * rows), squeeze=False, layout="constrained"
  )
  for panel in grid.flat[count:]:
    panel.remove()
  colors = _colors([row.algorithm for row in predicted] + [row.algorithm for row in programs])
  for panel, network in zip(grid.flat, networks, strict=False):
    _draw_network(panel, [row for row in predicted if row.network == network.name], colors)
    panel.set_title(f"{network.name}: α = {1e6 * network.alpha:g} µs, β = {1e9 * network.beta:g} ns/byte")
  if programs:
    _draw_programs(grid.flat[count - 1], programs, colors)
  for panel in grid.flat[:count]:
    _label_workers(panel, sorted({row.workers for row in predicted}))
  plot.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
  report.save(plot, title, path)


def _draw_network(panel: axes.Axes, rows: Sequence[Predicted], colors: Mapping[str, str]) -> None:
  for label in dict.fromkeys(row.algorithm for row in rows):
    line = [row for row in rows if row.algorithm == label]
    panel.plot(
      [row.workers for row in line],
      [row.seconds for row in line],
      linestyle="--" if ":" in label else "-",
      color=colors[label],
      linewidth=2.5 if label in ("dense", "spardl") else 1.5,
      marker=".",
      label=label,
    )
  panel.set(yscale="log", ylabel="seconds an update on the wire")


def _draw_programs(panel: axes.Axes, rows: Sequence[Program], colors: Mapping[str, str]) -> None:
  """A line for each phase: straight over log₂P where it grows no faster."""
  for label in dict.fromkeys(row.algorithm for row in rows):
    line = [row for row in rows if row.algorithm == label]
    for phase, dashes in zip(PHASES, (":", "--", "-"), strict=True):
      panel.plot(
        [row.workers for row in line],
        [getattr(row, phase) for row in line],
        linestyle=dashes,
        color=colors[label],
        marker=".",
        label=f"{label}, {phase}",
      )
  panel.set(title="making the program", ylabel="seconds", ylim=(0, None))
  panel.legend(fontsize="small")


def _colors(labels: Iterable[str]) -> dict[str, str]:
  """One for each algorithm; dense and SparDL have theirs."""
  fixed = {"dense": "black", "spardl": "tab:red"}
  others = itertools.cycle(name for name in mcolors.TABLEAU_COLORS if name not in fixed.values())
  return {label: fixed.get(label) or next(others) for label in dict.fromkeys(labels)}


def _label_workers(panel: axes.Axes, sizes: Sequence[int]) -> None:
  panel.set_xscale("log", base=2)
  panel.set_xticks(sizes, list(map(str, sizes)), fontsize="small")
  panel.minorticks_off()
  panel.set_xlabel("workers P")
  panel.title.set_fontsize("medium")
  panel.grid(alpha=0.3)


def _labels() -> list[str]:
  """The algorithms to predict, with "all" written out."""
  every = [*js.collective_names(), f"spardl:{_BEST}"]
  given = [label for value in _ALGORITHM.value for label in value.split(",")]
  return list(dict.fromkeys(name for label in given for name in (every if label == "all" else [label])))


def _sizes() -> list[int]:
  """The numbers of workers, increasing."""
  for text in _WORKERS.value:
    if not text.strip().isdecimal() or int(text) < 2:
      raise ValueError(f"--workers={text}, choose whole numbers of at least 2")
  if not _WORKERS.value:
    raise ValueError("--workers is empty, choose at least one number")
  return sorted(set(map(int, _WORKERS.value)))


def _checked() -> tuple[list[int], list[Network]]:
  """Numbers of workers and networks; raises ValueError before anything is done."""
  for flag in (_N, _REPEATS):
    if flag.value < 1:
      raise ValueError(f"--{flag.name}={flag.value}, choose at least 1")
  networks = [parse_network(text) for value in _NETWORK.value for text in value.split(",")]
  if len({network.name for network in networks}) < len(networks):
    raise ValueError(f"--network={','.join(_NETWORK.value)}, choose each name once")
  return _sizes(), networks


def _run(console: rich.console.Console) -> tuple[list[Network], list[Predicted], list[Program]]:
  """Predicts, then measures behind a progress bar."""
  sizes, networks = _checked()
  of_place = [(workers, label) for workers in sizes for label in _labels()]
  found = [predict(label, workers, networks, _N.value, _DENSITY.value) for workers, label in of_place]
  predicted = [row for rows in zip(*found, strict=True) for row in rows]  # a network after the other
  programs: list[Program] = []
  if _SCHEDULE_OF.value:
    with rich.progress.Progress(console=console, transient=True) as progress:
      bar = progress.add_task("compiling", total=_REPEATS.value * len(_SCHEDULE_OF.value) * len(sizes))
      programs = make_all(_SCHEDULE_OF.value, sizes, lambda: progress.advance(bar))
  return networks, predicted, programs


def main() -> None:
  """Predicts, measures and reports."""
  console = rich.console.Console(stderr=_JSON.value, width=None if sys.stdout.isatty() else 130)
  networks, predicted, programs = _run(console)
  title = f"one update of n = {_N.value:,} entries, density {_DENSITY.value:g}"
  grown, path = growths(programs), pathlib.Path(_REPORT_DIR.value) / "scale.png"
  figure(predicted, programs, networks, title, path)
  console.print(speed_table(predicted, f"{title}: predicted on the wire"))
  if programs:
    console.print(program_table(programs, f"{title}: seconds to make the program"), growth_table(grown))
  console.print(f"figure: {path}")
  if _JSON.value:
    tables: dict[str, Sequence[Any]] = {
      "networks": networks,
      "predicted": predicted,
      "compiled": programs,
      "growth": grown,
    }
    plain = {name: [row._asdict() for row in rows] for name, rows in tables.items()}
    print(json.dumps({"n": _N.value, "density": _DENSITY.value, **plain}))


if __name__ == "__main__":
  entry.run(main)
