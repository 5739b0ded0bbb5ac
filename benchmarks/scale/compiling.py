"""Traces, lowers and compiles programs of all workers for forced CPU devices, and shows the seconds of each phase."""

import math
import re
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.table
from jax.sharding import Mesh, PartitionSpec

import jaxsparse as js
from benchmarks import report, specs

PHASES = ("trace", "lower", "compile")

_AXIS = "workers"
_DEVICES_OF_A_PROCESS = 2048
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # the event by which JAX tells how long lowering took
_COLLECTIVE = re.compile(
  r" (?:collective-permute|all-reduce|all-gather|all-to-all|reduce-scatter|collective-broadcast)(?:-start)?\("
)

ProgramOf = Callable[[specs.Spec, int, Mesh], Callable[[], jax.stages.Lowered]]

_LOWERINGS: list[float] = []  # seconds of each lowering since it was cleared


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


def make(program_of: ProgramOf, spec: specs.Spec, n: int, mesh: Mesh) -> Program:
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


def make_all(
  program_of: ProgramOf, chosen: Mapping[int, Sequence[specs.Spec]], n: int, repeats: int, on_program: Callable
) -> list[Program]:
  """The programs of every algorithm for every P; all once, then all again, so a busy moment spoils one run of each."""
  devices = np.array(cpu_devices(max(chosen)))
  meshes = [Mesh(devices[:workers], (_AXIS,)) for workers in chosen]
  make(program_of, next(iter(chosen.values()))[0], n, meshes[0])  # the first of a process also loads the compiler
  runs: dict[tuple[str, int], list[Program]] = {}
  for _ in range(repeats):
    for of_one in zip(*chosen.values(), strict=True):
      for mesh, spec in zip(meshes, of_one, strict=True):
        runs.setdefault((spec.label, mesh.size), []).append(make(program_of, spec, n, mesh))
        on_program()
  found = []
  for made in runs.values():
    medians = {name: statistics.median(getattr(one, name) for one in made) for name in (*PHASES, "cpu")}
    found.append(made[0]._replace(**medians, runs=len(made)))
  return found


def program_table(rows: Sequence[Program], title: str) -> rich.table.Table:
  """Seconds of each phase, a row for each algorithm and P."""
  heads = ("algorithm", "P", "messages", "collectives", *PHASES, "total", "total / log₂P", "cpu", "runs")
  lines = []
  for row in rows:
    counts = row.algorithm, str(row.workers), f"{row.messages:,}", f"{row.collectives:,}"
    seconds = row.trace, row.lower, row.compile, row.total, row.total / math.log2(row.workers), row.cpu
    lines.append([*counts, *(f"{value:.3f}" for value in seconds), str(row.runs)])
  return report.table(title, heads, lines)
