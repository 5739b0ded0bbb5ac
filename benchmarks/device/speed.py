"""How fast? One update of one worker without its messages, beside one read, a copy and top-k of as many entries."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.table

import jaxsparse as js
from benchmarks import report
from benchmarks.compiled import hlo
from benchmarks.device import timing
from benchmarks.device.running import Row, Run, make_ahead
from benchmarks.device.setting import Setting
from benchmarks.specs import Spec
from jaxsparse.comm import SoloComm
from jaxsparse.transform.update import init_state, reduce_step

PART = "speed"
LAUNCHES = "launches"
_INPUTS = 3  # different gradients, which take turns


class Program(NamedTuple):
  """A compiled program of one f32[n] and a state, and how its results are checked."""

  compiled: Any
  seconds: float  # of tracing, lowering and compiling
  start: Callable[[], Any]  # gives the first state
  # (last input, result, last state) -> more of the row, or RuntimeError
  check: Callable[[np.ndarray, Any, Any], Row]


@functools.cache
def _gradients(n: int) -> list[jax.Array]:
  make = jax.jit(
    lambda seed: jax.random.normal(jax.random.key(seed), (n,), jnp.float32)
  )
  return [make(np.int32(seed)) for seed in range(_INPUTS)]


def _fresh(n: int, number: int) -> jax.Array:
  return jnp.copy(_gradients(n)[number % _INPUTS])


def _last(n: int, times: timing.Times) -> np.ndarray:
  """The input of the last call of `timing.times_of`."""
  return np.asarray(_gradients(n)[(times.in_queue - 1) % _INPUTS])


def _stateless(
  function: Callable[[jax.Array], Any], n: int, check: Callable[[np.ndarray, Any], Row]
) -> Program:
  start = time.perf_counter()
  compiled = (
    jax.jit(lambda x, state: (function(x), state))
    .lower(jax.ShapeDtypeStruct((n,), jnp.float32), ())
    .compile()
  )
  return Program(
    compiled, time.perf_counter() - start, tuple, lambda x, result, _: check(x, result)
  )


def _check_sum(x: np.ndarray, result: jax.Array) -> Row:
  if not np.isclose(float(result), np.abs(x).sum(dtype=np.float64), rtol=1e-3):
    raise RuntimeError(
      f"the sum of the magnitudes is {result}, numpy says {np.abs(x).sum(dtype=np.float64)}"
    )
  return {}


def _check_copy(x: np.ndarray, result: jax.Array) -> Row:
  if not np.array_equal(x, result):
    raise RuntimeError("a copy is not equal to its source")
  return {}


def _check_selection(x: np.ndarray, indices: jax.Array, is_exact: bool = True) -> Row:
  """Raises RuntimeError for entries that are not the largest; of an approximate selection the share that are."""
  k = indices.size
  magnitudes = np.abs(x)
  least = np.partition(magnitudes, -k)[-k]
  right = int((magnitudes[np.unique(np.asarray(indices))] >= least).sum())
  if is_exact and right != k:
    raise RuntimeError(
      f"{k - right} of the {k} selected entries are not among the largest"
    )
  return {} if is_exact else {"recall": right / k}


def baselines(n: int, density: float) -> dict[str, Callable[[], Program]]:
  """What updates are compared with, by name; each is compiled when it is called."""
  k = int(np.ceil(density * n))
  exact = lambda x, result: _check_selection(x, result[1])
  some = lambda x, result: _check_selection(x, result[1], is_exact=False)
  ours = lambda x, result: _check_selection(x, result.indices)
  return {
    "read": functools.partial(_stateless, lambda x: jnp.abs(x).sum(), n, _check_sum),
    "copy": functools.partial(_stateless, jnp.copy, n, _check_copy),
    "lax.top_k": functools.partial(
      _stateless, lambda x: jax.lax.top_k(jnp.abs(x), k), n, exact
    ),
    "lax.approx_max_k": functools.partial(
      _stateless, lambda x: jax.lax.approx_max_k(jnp.abs(x), k), n, some
    ),
    "js.select.top_k": functools.partial(
      _stateless, functools.partial(js.select.top_k, k=k), n, ours
    ),
  }


def update(spec: Spec, n: int, setting: Setting) -> Program:
  """The update of one worker, whose messages are copies of its own; it donates gradient and state."""
  collective = setting.collective(spec, n)
  workers = setting.workers
  make = functools.partial(init_state, collective, n, workers)
  program = lambda grads, state: reduce_step(
    collective, SoloComm(workers), grads, state, workers
  )
  start = time.perf_counter()
  shapes = jax.ShapeDtypeStruct((n,), jnp.float32), jax.eval_shape(make)
  compiled = jax.jit(program, donate_argnums=(0, 1)).lower(*shapes).compile()

  def check(_: np.ndarray, mean: jax.Array, state: Any) -> Row:
    for x in (mean, state.carried.residual[0]):
      if x is not None and not (x.shape == (n,) and bool(jnp.isfinite(x).all())):
        raise RuntimeError(
          f"the update of one of {workers} workers is not finite, or not of {n} entries"
        )
    return {}

  return Program(compiled, time.perf_counter() - start, make, check)


@functools.cache
def programs(setting: Setting, n: int) -> dict[str, Callable[[], Program]]:
  """The programs of n entries by name; each is compiled once, when it is called first."""
  updates = {
    spec.label: functools.partial(update, spec, n, setting)
    for spec in setting.parse_algorithms()
  }
  return {
    name: functools.cache(make)
    for name, make in (baselines(n, setting.density) | updates).items()
  }


def _time(make: Callable[[], Program], n: int, repetitions: int) -> Row:
  program = make()
  times, result, state = timing.times_of(
    program.compiled, functools.partial(_fresh, n), program.start(), repetitions
  )
  checked = program.check(_last(n, times), result, state)
  memory = hlo.memory_of(program.compiled)
  return {
    "n": n,
    "compile": program.seconds,
    **times._asdict(),
    "temp": memory.temp / n,
    **checked,
  }


def measure(run: Run, setting: Setting, sizes: Sequence[int], until: float) -> None:
  """The rows of gradients of these sizes."""
  for n in sizes:
    make_ahead(programs(setting, n).values(), run.left(until) / 2)
    for name, make in programs(setting, n).items():
      run.measure(
        PART, name, until, functools.partial(_time, make, n, setting.repetitions)
      )
    _gradients.cache_clear()  # the memory peak of later parts is theirs


def measure_launches(run: Run, setting: Setting, until: float) -> None:
  """What the profiler sees of one call of each program that was timed.

  It comes after everything else: a profiler may slow down what runs after it, or crash.
  """
  for row in run.measured(PART):
    make = programs(setting, row["n"])[row["row"]]
    run.measure(
      LAUNCHES, row["row"], until, functools.partial(_profile, make, row["n"])
    )


def _profile(make: Callable[[], Program], n: int) -> Row:
  program = make()
  _, state = program.compiled(_fresh(n, 0), program.start())
  x = jax.block_until_ready(_fresh(n, 1))
  found = timing.launches_of(lambda: program.compiled(x, state))
  return {"n": n, **(found._asdict() if found else {"kernels": None})}


def table(rows: Sequence[Row], launches: Sequence[Row], title: str) -> rich.table.Table:
  """Milliseconds, and ratios to what else is done with as many entries: of the kernels' seconds where they are known.

  Kernels of a short program take less time than the host needs to start it, which calls
  in a queue show.
  """
  ms = report.milliseconds
  profiled = {
    (row["n"], row["row"]): row for row in launches if row["kernels"] is not None
  }
  lines = []
  for row in rows:
    seen = profiled.get((row["n"], row["row"]), {})
    seconds = {one["row"]: one["queued"] for one in rows if one["n"] == row["n"]}
    if seen:
      seconds = {
        name: one["busy"] for (n, name), one in profiled.items() if n == row["n"]
      }
    over = [
      report.ratio(seconds[row["row"]], seconds.get(name), 1)
      for name in ("read", "copy", "lax.top_k")
    ]
    lines.append(
      [
        f"{row['n']:,}",
        row["row"],
        *(ms(row[name], 3) for name in ("seconds", "p90", "queued")),
      ]
    )
    lines[-1] += [
      report.number(seen.get("kernels"), "d"),
      ms(seen.get("busy"), 3),
      *over,
    ]
    lines[-1] += [f"{row['temp']:.2f}", f"{row['compile']:.1f}"]
  times = ("ms", "p90", "queued", "kernels", "their ms")
  heads = (
    "n",
    "program",
    *times,
    "× read",
    "× copy",
    "× lax.top_k",
    "temp",
    "compile s",
  )
  caption = "ms: median of blocked calls; temp: bytes an entry, by the compiler; × of the kernels' ms, else of queued"
  return report.table(title, heads, lines, text=2, caption=caption)
