r"""Scale on paper: the predicted time of an update on the wire for 8 … 4096 workers, and the making of its program.

Predicted is the wire alone, `messages · α + bytes · β` by each algorithm's formula, an upper bound where the sizes of
messages vary; selection and sums come on top. In `spardl:teams=best` the number of teams is the fastest divisor of P.

Measured are the seconds to trace, lower and compile the update for P forced CPU devices, with compilation caches off:
the update does not run, and n hardly matters. SparDL has 2⌈log₂P⌉ rounds, so the seconds should grow as log₂P.

With --first_step nothing is predicted: measured is the making of the first step of `js.make_train_step` for 1,000,000
parameters and P = 4, of all algorithms. The goal is 3 s at most for each; the exit status is 1 where one misses it.

Examples:
  python -m benchmarks.scale
  python -m benchmarks.scale --first_step
  python -m benchmarks.scale --first_step --schedule_of=spardl,oktopk --n=16000000 --repeats=1
  python -m benchmarks.scale --network=25GbE --network=wifi:alpha=2e-3:beta=4e-8 --workers=6,14,30 --schedule_of=
  python -m benchmarks.scale --json | jq '.predicted[] | select(.workers == 4096 and .algorithm == "spardl")'
"""

import math
import re
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.console
import rich.progress
import rich.table
from absl import flags
from jax.sharding import Mesh, PartitionSpec

import jaxsparse as js
from benchmarks import entry, report, specs
from benchmarks.workers import make_console

BEST = "teams=best"
PHASES = ("trace", "lower", "compile")

_AXIS = "workers"
_DEVICES_OF_A_PROCESS = 2048
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # the event by which JAX tells how long lowering took
_COLLECTIVE = re.compile(
  r" (?:collective-permute|all-reduce|all-gather|all-to-all|reduce-scatter|collective-broadcast)(?:-start)?\("
)

ProgramOf = Callable[[specs.Spec, int, Mesh], Callable[[], jax.stages.Lowered]]

_LOWERINGS: list[float] = []  # seconds of each lowering since it was cleared


class Network(NamedTuple):
  """What a message costs."""

  name: str  # as the user wrote it
  alpha: float  # seconds a message
  beta: float  # seconds a byte


PRESETS = {
  network.name: network
  for network in (
    Network("1GbE", alpha=50e-6, beta=8e-9),  # TCP, 1 Gbit/s
    Network("25GbE", alpha=30e-6, beta=0.32e-9),  # TCP, 25 Gbit/s
    Network("400Gb", alpha=5e-6, beta=0.02e-9),  # RDMA, 400 Gbit/s
  )
}

FIRST_N, FIRST_WORKERS, FIRST_SECONDS = 1_000_000, 4, 3.0
_FIRST_OF = ["dense", "spardl", "spardl:selector=chunked", "spardl:selector=reuse", "spardl:teams=2", "spardl:teams=4"]

_ALGORITHM = flags.DEFINE_multi_string("algorithm", ["all"], specs.HELP)
_WORKERS = entry.define_numbers(
  "workers", [2**bit for bit in range(3, 13)], "Numbers of workers.", flags.IntegerParser(lower_bound=2)
)
_N = flags.DEFINE_integer("n", 14_728_266, "Gradient entries; VGG-16 by default.", lower_bound=1)
_DENSITY = flags.DEFINE_float("density", 0.01, "Fraction of the entries to deliver.")
_NETWORK = flags.DEFINE_multi_string(
  "network", list(PRESETS), f"{', '.join(PRESETS)}, or name:alpha=seconds a message:beta=seconds a byte."
)
_SCHEDULE_OF = flags.DEFINE_list("schedule_of", ["spardl"], "Algorithms to compile; none with --schedule_of=.")
_FIRST_STEP = flags.DEFINE_bool("first_step", False, "Compile the first training step of many algorithms instead.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "How often to make each program; the median counts.", lower_bound=1)
_JSON = entry.define_json()


class Predicted(NamedTuple):
  """One algorithm at one number of workers in one network."""

  network: str  # its name
  workers: int  # P
  algorithm: str  # as it was asked for
  teams: int | None  # what `teams=best` stands for here; None without it
  messages: int  # a worker
  words: int  # 4-byte words a worker
  seconds: float  # on the wire
  replicates: bool  # whether the total is the same on every worker


class Program(NamedTuple):
  """Seconds to make one program, medians over the runs."""

  algorithm: str  # as it was asked for
  workers: int  # P
  messages: int  # of one update, counted from the schedule; where sizes vary, in the branches with the most words
  collectives: int  # collective operations in the compiled program, those of all branches and of agreements included
  trace: float  # from Python to a jaxpr
  lower: float  # from the jaxpr to StableHLO
  compile: float  # from StableHLO to machine code
  cpu: float  # processor seconds of all three phases, over all threads; they depend less on the machine's load
  runs: int = 1  # how often it was made

  @property
  def total(self) -> float:
    """All three."""
    return self.trace + self.lower + self.compile


def parse_network(text: str) -> Network:
  """A network from the flag."""
  if text in PRESETS:
    return PRESETS[text]
  name, *options = text.split(":")
  try:
    values = {key: float(value) for key, _, value in (option.partition("=") for option in options)}
    network = Network(name, **values)
    if 0 < network.alpha < math.inf and 0 < network.beta < math.inf:
      return network
  except (TypeError, ValueError):
    pass
  choices = f"choose from {', '.join(PRESETS)}, or write name:alpha=seconds:beta=seconds, both above 0"
  raise ValueError(f"--network={text}, {choices}")


def predict(label: str, workers: int, networks: Sequence[Network], n: int, density: float) -> list[Predicted]:
  """One algorithm in every network."""
  teams: list[int | None] = [None]
  if BEST in label.split(":"):
    teams = [d for d in range(1, workers + 1) if workers % d == 0]
  choices = []
  for d in teams:
    (spec,) = specs.parse([label.replace(BEST, f"teams={d}")], workers, density=density)
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
  jax.monitoring.register_event_duration_secs_listener(_note)
  if number > _DEVICES_OF_A_PROCESS:
    with socket.socket() as free:
      free.bind(("localhost", 0))
      address = f"localhost:{free.getsockname()[1]}"
    jax.distributed.initialize(address, num_processes=1, process_id=0)
  return jax.devices()


def _note(event: str, duration_secs: float, **_: str | int) -> None:
  if event == _LOWERED:
    _LOWERINGS.append(duration_secs)


def step_of(spec: specs.Spec, n: int, mesh: Mesh) -> Callable[[], jax.stages.Lowered]:
  """The lowering of `js.make_train_step`'s step for n parameters, SGD, and a loss that is a single product."""
  tx = optax.chain(js.make_transform(spec.name, _AXIS, **spec.config), optax.sgd(0.1))
  step = js.make_train_step(lambda params, batch: jnp.vdot(params, params) * batch.mean(), tx, mesh, axis=_AXIS)
  params, batch = jnp.zeros(n), jnp.zeros(mesh.size)
  state = js.init(tx, params, mesh, axis=_AXIS)
  return lambda: step.lower(params, state, batch)


def update_of(spec: specs.Spec, n: int, mesh: Mesh) -> Callable[[], jax.stages.Lowered]:
  """The lowering of one update of every worker: gradients to averages and the next state."""
  tx = js.make_transform(spec.name, _AXIS, **spec.config)

  def worker(grads: jax.Array) -> Any:
    state = jax.lax.optimization_barrier(tx.init(grads))  # else the compiler sees that the residual is zero
    return jax.tree.map(jnp.atleast_1d, tx.update(grads, state))

  split = PartitionSpec(_AXIS)
  program = jax.jit(jax.shard_map(worker, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))
  return lambda: program.lower(jax.ShapeDtypeStruct((mesh.size * n,), jnp.float32))


def make_program(program_of: ProgramOf, spec: specs.Spec, n: int, mesh: Mesh) -> Program:
  """Traces, lowers and compiles a program, with JAX's caches cleared."""
  lower = program_of(spec, n, mesh)
  jax.clear_caches()
  _LOWERINGS.clear()
  busy, start = time.process_time(), time.perf_counter()
  lowered = lower()
  lowering, middle = sum(_LOWERINGS), time.perf_counter()
  compiled = lowered.compile()
  end, cpu = time.perf_counter(), time.process_time() - busy
  messages = js.costs.count(spec.name, n=n, workers=mesh.size, **spec.config).messages
  collectives = len(_COLLECTIVE.findall(compiled.as_text() or ""))
  phases = (middle - start - lowering, lowering, end - middle)
  return Program(spec.label, mesh.size, messages, collectives, *phases, cpu)


def make_programs(
  program_of: ProgramOf, chosen: Mapping[int, Sequence[specs.Spec]], n: int, repeats: int, on_program: Callable
) -> list[Program]:
  """The programs of every algorithm for every P; all once, then all again, so a busy moment spoils one run of each."""
  devices = np.array(cpu_devices(max(chosen)))
  meshes = [Mesh(devices[:workers], (_AXIS,)) for workers in chosen]
  make_program(
    program_of, next(iter(chosen.values()))[0], n, meshes[0]
  )  # the first of a process also loads the compiler
  runs: dict[tuple[str, int], list[Program]] = {}
  for _ in range(repeats):
    for of_one in zip(*chosen.values(), strict=True):
      for mesh, spec in zip(meshes, of_one, strict=True):
        runs.setdefault((spec.label, mesh.size), []).append(make_program(program_of, spec, n, mesh))
        on_program()
  found = []
  for made in runs.values():
    medians = {name: statistics.median(getattr(one, name) for one in made) for name in (*PHASES, "cpu")}
    found.append(made[0]._replace(**medians, runs=len(made)))
  return found


def speed_table(rows: Sequence[Predicted], title: str) -> rich.table.Table:
  """What is fastest in each network at each P, beside dense and SparDL."""
  settings: dict[tuple[str, int], dict[str, Predicted]] = {}
  for row in rows:
    settings.setdefault((row.network, row.workers), {})[row.algorithm] = row
  lines = []
  for (network, workers), of in settings.items():
    ranked = sorted((row for row in of.values() if row.replicates), key=lambda row: row.seconds)
    names = [*(row.algorithm for row in ranked), "–", "–"][:2]
    dense, spardl, best = (of.get(label) for label in ("dense", "spardl", f"spardl:{BEST}"))
    gain = report.ratio(dense and dense.seconds, spardl and spardl.seconds, 1)
    times = map(_ms, (ranked[0] if ranked else None, dense, spardl))
    lines.append([network, *names, str(workers), *times, gain, _ms(best), str(best.teams) if best else "–"])
  heads = ("network", "fastest", "next", "P", "ms", "dense", "spardl", "dense / spardl", f"spardl:{BEST}", "d")
  caption = "ms an update; fastest of those whose total is the same everywhere"
  return report.table(title, heads, lines, text=3, caption=caption)


def program_table(rows: Sequence[Program], title: str) -> rich.table.Table:
  """Seconds of each phase, a row for each algorithm and P."""
  heads = ("algorithm", "P", "messages", "collectives", *PHASES, "total", "total / log₂P", "cpu", "runs")
  lines = []
  for row in rows:
    counts = row.algorithm, str(row.workers), f"{row.messages:,}", f"{row.collectives:,}"
    seconds = row.trace, row.lower, row.compile, row.total, row.total / math.log2(row.workers), row.cpu
    lines.append([*counts, *(f"{value:.3f}" for value in seconds), str(row.runs)])
  return report.table(title, heads, lines)


def _ms(row: Predicted | None) -> str:
  if row is None:
    return "–"
  ms = 1e3 * row.seconds
  return f"{ms:,.0f}" if ms >= 100 else f"{ms:#.3g}"


def _make(
  program_of: ProgramOf, labels: list[str], sizes: list[int], n: int, console: rich.console.Console
) -> list[Program]:
  """The programs of these algorithms, made behind a progress bar."""
  if not labels:
    return []
  with rich.progress.Progress(console=console, transient=True) as progress:
    bar = progress.add_task("compiling", total=_REPEATS.value * len(labels) * len(sizes))
    chosen = {workers: specs.parse(labels, workers, density=_DENSITY.value) for workers in sizes}
    return make_programs(program_of, chosen, n, _REPEATS.value, lambda: progress.advance(bar))


def _first_step(console: rich.console.Console) -> None:
  """Makes the first steps and checks the goal."""
  others = sorted(set(specs.of_vectors()) - set(_FIRST_OF))
  labels = _SCHEDULE_OF.value if _SCHEDULE_OF.present else [*_FIRST_OF, *others]
  sizes, n = _WORKERS.value if _WORKERS.present else [FIRST_WORKERS], _N.value if _N.present else FIRST_N
  programs = _make(step_of, labels, sizes, n, console)
  title = f"seconds to make the first training step of n = {n:,} parameters, CPU devices, median of the runs"
  console.print(program_table(programs, title))
  slowest = max(programs, key=lambda program: program.total)
  what = f"the first step of every algorithm compiles in {FIRST_SECONDS:g} s, slowest {slowest.algorithm}"
  goal = report.goal(what, slowest.total, most=FIRST_SECONDS)
  report.say([goal], console)
  if _JSON.value:
    plain = [program._asdict() | {"total": program.total} for program in programs]
    report.print_json({"n": n, "density": _DENSITY.value, "first_step": plain, "goals": [goal]})
  sys.exit(0 if goal.met else 1)


def main() -> None:
  """Predicts, measures and reports."""
  console, sizes = make_console(stderr=_JSON.value), sorted(_WORKERS.value)
  networks = [parse_network(text) for text in specs.listed(_NETWORK.value)]
  if _FIRST_STEP.value:
    _first_step(console)
  every = [*specs.of_vectors(), f"spardl:{BEST}"]
  labels = [name for label in specs.listed(_ALGORITHM.value) for name in (every if label == "all" else [label])]
  settings = [(label, workers) for workers in sizes for label in dict.fromkeys(labels)]
  found = [predict(label, workers, networks, _N.value, _DENSITY.value) for label, workers in settings]
  predicted = [row for rows in zip(*found, strict=True) for row in rows]  # a network after the other
  programs = _make(update_of, _SCHEDULE_OF.value, sizes, _N.value, console)
  title = f"one update of n = {_N.value:,} entries, density {_DENSITY.value:g}"
  console.print(speed_table(predicted, f"{title}: predicted on the wire"))
  if programs:
    console.print(program_table(programs, f"{title}: seconds to make the program"))
  if _JSON.value:
    rows = {"networks": networks, "predicted": predicted, "compiled": programs}
    report.print_json({"n": _N.value, "density": _DENSITY.value, **rows})


if __name__ == "__main__":
  entry.run(main)
