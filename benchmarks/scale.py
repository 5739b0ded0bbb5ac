r"""Scale on paper: the predicted time of an update on the wire for 8 … 4096 workers, and the making of its program.

Predicted is `messages · α + bytes · β` by each algorithm's formula, an upper bound
where the sizes of messages vary. In `spardl:teams=best` the number of teams is the
fastest divisor of P. Measured are the seconds to trace, lower and compile the update
for P forced CPU devices, without compilation caches: the update does not run, n hardly
matters. With --first_step it is the first step of `js.make_train_step` for 4 workers
and 1,000,000 parameters: at most 3 s is good.

Examples:
  python -m benchmarks.scale --first_step --schedule_of=dense,spardl,oktopk
  python -m benchmarks.scale --json | jq '.predicted[] | select(.workers == 4096 and .algorithm == "spardl")'
"""

import itertools
import socket
import statistics
import time
from collections.abc import Callable, Sequence
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
from benchmarks.workers import AXIS, make_console

BEST = "teams=best"
PHASES = ("trace", "lower", "compile")

_DEVICES_OF_A_PROCESS = 2048
# the event by which JAX tells how long lowering took
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_LOWERINGS: list[float] = []  # seconds of each lowering since it was cleared

NETWORKS = {  # (α seconds a message, β seconds a byte)
  "1GbE": (50e-6, 8e-9),  # TCP, 1 Gbit/s
  "25GbE": (30e-6, 0.32e-9),  # TCP, 25 Gbit/s
  "400Gb": (5e-6, 0.02e-9),  # RDMA, 400 Gbit/s
}

FIRST_WORKERS, FIRST_N = 4, 1_000_000  # of the first training step
_SIZES = [2**bit for bit in range(3, 13)]
_WORKERS = entry.define_numbers(
  "workers", _SIZES, "Numbers of workers.", flags.IntegerParser(lower_bound=2)
)
_N = flags.DEFINE_integer(
  "n", 14_728_266, "Gradient entries; VGG-16 by default.", lower_bound=1
)
_DENSITY = flags.DEFINE_float("density", 0.01, "Fraction of the entries to deliver.")
_SCHEDULE_OF = flags.DEFINE_list(
  "schedule_of", ["spardl"], "Algorithms to compile; none with --schedule_of=."
)
_FIRST_STEP = flags.DEFINE_bool(
  "first_step", False, "Compile the first step of a training, not one update."
)
_REPEATS = flags.DEFINE_integer(
  "repeats", 3, "How often to make each program; the median counts.", lower_bound=1
)
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


class Program(NamedTuple):
  """Seconds to make one program, medians over the runs."""

  algorithm: str  # as it was asked for
  workers: int  # P
  # of one update, counted from the schedule; where sizes vary, in the branches with the
  # most words
  messages: int
  trace: float  # from Python to a jaxpr
  lower: float  # from the jaxpr to StableHLO
  compile: float  # from StableHLO to machine code
  runs: int = 1  # how often it was made

  @property
  def total(self) -> float:
    """All three."""
    return self.trace + self.lower + self.compile


def predict(label: str, workers: int, n: int, density: float) -> list[Predicted]:
  """One algorithm in every network."""
  divisors = [d for d in range(1, workers + 1) if workers % d == 0]
  costs: dict[
    int | None, js.Cost
  ] = {}  # by the number of teams, where that is to be found
  for teams in divisors if BEST in label else [None]:
    (spec,) = specs.parse(
      [label.replace(BEST, f"teams={teams}")], workers, density=density
    )
    costs[teams] = js.costs.predict(spec.name, n=n, workers=workers, **spec.config)
  rows = []
  for network, link in NETWORKS.items():
    teams, cost = min(costs.items(), key=lambda one: one[1].seconds(*link))
    rows.append(
      Predicted(
        network, workers, label, teams, cost.messages, cost.words, cost.seconds(*link)
      )
    )
  return rows


def cpu_devices(number: int) -> list[jax.Device]:
  """`number` forced CPU devices; call it before anything else makes devices."""
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", number)
  jax.config.update("jax_enable_compilation_cache", False)
  jax.monitoring.register_event_duration_secs_listener(_note)
  # XLA takes more for those of several processes, and wants a distributed run
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
  tx = optax.chain(js.make_transform(spec.name, AXIS, **spec.config), optax.sgd(0.1))
  step = js.make_train_step(
    lambda params, batch: jnp.vdot(params, params) * batch.mean(), tx, mesh, axis=AXIS
  )
  params, batch = jnp.zeros(n), jnp.zeros(mesh.size)
  state = js.init(tx, params, mesh, axis=AXIS)
  return lambda: step.lower(params, state, batch)


def update_of(spec: specs.Spec, n: int, mesh: Mesh) -> Callable[[], jax.stages.Lowered]:
  """The lowering of one update of every worker: gradients to averages and the next state."""
  tx = js.make_transform(spec.name, AXIS, **spec.config)

  def worker(grads: jax.Array) -> Any:
    # else the compiler sees that the residual is zero
    state = jax.lax.optimization_barrier(tx.init(grads))
    return jax.tree.map(jnp.atleast_1d, tx.update(grads, state))

  split = PartitionSpec(AXIS)
  program = jax.jit(jax.shard_map(worker, mesh=mesh, in_specs=split, out_specs=split))
  return lambda: program.lower(jax.ShapeDtypeStruct((mesh.size * n,), jnp.float32))


def make_program(
  program_of: Callable[..., Any], spec: specs.Spec, n: int, mesh: Mesh
) -> Program:
  """Traces, lowers and compiles a program, with JAX's caches cleared."""
  lower = program_of(spec, n, mesh)
  jax.clear_caches()
  _LOWERINGS.clear()
  start = time.perf_counter()
  lowered = lower()
  lowering, middle = sum(_LOWERINGS), time.perf_counter()
  lowered.compile()
  end = time.perf_counter()
  messages = js.costs.count(spec.name, n=n, workers=mesh.size, **spec.config).messages
  return Program(
    spec.label, mesh.size, messages, middle - start - lowering, lowering, end - middle
  )


def make_programs(
  labels: list[str], sizes: list[int], console: rich.console.Console
) -> list[Program]:
  """The programs of every algorithm for every P; all once, then all again, so a busy moment spoils one run of each."""
  if not labels:
    return []
  program_of, n = (step_of, FIRST_N) if _FIRST_STEP.value else (update_of, _N.value)
  specs_of = [specs.parse(labels, workers, density=_DENSITY.value) for workers in sizes]
  devices = np.array(cpu_devices(max(sizes)))
  meshes = [Mesh(devices[:workers], (AXIS,)) for workers in sizes]
  # the first one also loads the compiler
  make_program(program_of, specs_of[0][0], n, meshes[0])
  each = [
    pair
    for of_one in zip(*specs_of, strict=True)
    for pair in zip(of_one, meshes, strict=True)
  ]
  runs: dict[tuple[str, int], list[Program]] = {}
  for spec, mesh in rich.progress.track(
    each * _REPEATS.value, "compiling", console=console, transient=True
  ):
    runs.setdefault((spec.label, mesh.size), []).append(
      make_program(program_of, spec, n, mesh)
    )
  medians = lambda made: {
    name: statistics.median(getattr(one, name) for one in made) for name in PHASES
  }
  return [made[0]._replace(**medians(made), runs=len(made)) for made in runs.values()]


def speed_table(rows: Sequence[Predicted], title: str) -> rich.table.Table:
  """Milliseconds of every algorithm, a row for each network and P; of SparDL also the best number of teams."""
  settings: dict[tuple[str, int], dict[str, Predicted]] = {}
  for row in rows:
    settings.setdefault((row.network, row.workers), {})[row.algorithm] = row
  ms = lambda row: report.milliseconds(row.seconds, 0 if row.seconds >= 0.1 else 3)
  text = lambda row: f"{ms(row)} ({row.teams})" if row.teams else ms(row)
  lines = [
    [network, f"{workers:,}", *map(text, of.values())]
    for (network, workers), of in settings.items()
  ]
  heads = ["network", "P", *dict.fromkeys(row.algorithm for row in rows)]
  return report.table(
    title, heads, lines, caption="ms an update; in brackets the number of teams"
  )


def program_table(rows: Sequence[Program], title: str) -> rich.table.Table:
  """Seconds of each phase, a row for each algorithm and P."""
  seconds_of = lambda row: [
    f"{value:.3f}" for value in (row.trace, row.lower, row.compile, row.total)
  ]
  lines = [
    [
      row.algorithm,
      str(row.workers),
      f"{row.messages:,}",
      *seconds_of(row),
      str(row.runs),
    ]
    for row in rows
  ]
  return report.table(
    title,
    ("algorithm", "P", "messages", *PHASES, "total", "runs"),
    lines,
    caption="medians",
  )


def main() -> None:
  """Predicts, measures and reports."""
  console, sizes = make_console(stderr=_JSON.value), sorted(_WORKERS.value)
  settings = itertools.product(sizes, [*specs.of_vectors(), f"spardl:{BEST}"])
  found = [
    predict(label, workers, _N.value, _DENSITY.value) for workers, label in settings
  ]
  # a network after the other
  predicted = [row for rows in zip(*found, strict=True) for row in rows]
  programs = make_programs(
    _SCHEDULE_OF.value, [FIRST_WORKERS] if _FIRST_STEP.value else sizes, console
  )
  title = f"one update of n = {_N.value:,} entries, density {_DENSITY.value:g}: predicted on the wire"
  console.print(speed_table(predicted, title))
  if programs:
    what = (
      f"the first training step of n = {FIRST_N:,}"
      if _FIRST_STEP.value
      else f"one update of n = {_N.value:,}"
    )
    console.print(
      program_table(programs, f"{what} entries: seconds to make the program")
    )
  if _JSON.value:
    rows = {"networks": NETWORKS, "predicted": predicted, "compiled": programs}
    report.print_json({"n": _N.value, "density": _DENSITY.value, **rows})


if __name__ == "__main__":
  entry.run(main)
