r"""Seconds of selecting k of n float32 on one device, beside `lax.top_k` of the magnitudes and one read of the vector.

`js.select.top_k` finds the k largest, "threshold" all entries of at least the exact
k-th magnitude. Each result is checked bit for bit against `lax.top_k`. Programs take
turns, with a read after each. Then one SparDL update of one of --update workers alone,
whose messages are copies of its own (`benchmarks.collectives` checks its laws).

Example: python -m benchmarks.selection --inputs=normal,gradients --n=1000000
--density=0.001
"""

import collections
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress
from absl import flags

import jaxsparse as js
from benchmarks import entry, report, workers
from benchmarks.tasks import data, images
from benchmarks.tasks.base import model_of
from jaxsparse.arrays import flatten
from jaxsparse.comm import SoloComm
from jaxsparse.select import exact, threshold
from jaxsparse.select.blocks import LazySum
from jaxsparse.sparse import bitset

READ = jax.jit(lambda x: jnp.abs(x).sum())
_WARM_UP = 10  # steps of SGD before gradients are taken


def _gradients(random: np.random.Generator, n: int) -> np.ndarray:
  """Gradients of one batch after the other, at the parameters after a few steps, as the library flattens them."""
  seed = int(random.integers(2**31))
  task = images.make_small("cnn", data.load("digits"))
  model, batches = model_of(task, seed), task.stream(seed, 1, 16)
  gradient, params = jax.jit(jax.grad(model.plain_loss)), model.params
  for batch in itertools.islice(batches, _WARM_UP):
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient(params, batch))
  parts = itertools.islice(batches, math.ceil(n / task.entries))
  return np.concatenate(
    [flatten.flatten(gradient(params, batch))[0] for batch in parts]
  )[:n]


INPUTS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
  "normal": lambda random, n: random.standard_normal(n),
  "student-t": lambda random, n: random.standard_t(2, n),
  "heavy-tail": lambda random, n: random.permutation(
    random.choice([-1, 1], n) / np.arange(1, n + 1)
  ),
  "gradients": _gradients,
  "sorted": lambda random, n: np.sort(random.standard_normal(n)),
  "equal": lambda _, n: np.ones(n),
  "few": lambda random, n: np.round(random.standard_normal(n)),
  "zeros": lambda random, n: np.where(
    random.random(n) < 0.005, random.standard_normal(n), 0
  ),
}

_INPUTS = flags.DEFINE_list(
  "inputs",
  list(INPUTS),
  f"What to select from: {', '.join(INPUTS)}; none with --inputs=.",
)
_N = flags.DEFINE_integer(
  "n", 14_728_266, "Entries; VGG-16's gradient by default.", lower_bound=1
)
_DENSITY = flags.DEFINE_float("density", 0.01, "Fraction of the entries to select.")
_REPETITIONS = flags.DEFINE_integer(
  "repetitions", 9, "How often to time each program; the median counts.", 1
)
_UPDATE = flags.DEFINE_integer(
  "update", 6, "Workers of the update of which one is timed alone; 0: none.", 0
)
_JSON = entry.define_json()

entry.require_choices(_INPUTS, list(INPUTS))
entry.require(_DENSITY, lambda share: 0 < share <= 1, "a share above 0, up to 1")


class Row(NamedTuple):
  """Selection from one input, medians in seconds."""

  input: str  # its name
  lax_top_k: float  # `lax.top_k` of the magnitudes
  top_k: float  # `js.select.top_k`
  # indices and values of the entries that reach the k-th magnitude, up to about k of
  # them
  threshold: float
  read: float  # the sum of the magnitudes
  method: str  # the one that `js.select.top_k` chose


class Update(NamedTuple):
  """One update of one worker alone."""

  workers: int  # P
  seconds: float  # median of one update
  read: float  # of one read of the gradient in the same run
  # memory it takes at its peak beyond gradient and state, its own mean included, in
  # arrays of n float32
  buffers: float


def _by_threshold(
  x: jax.Array, bound: jax.Array, k: int
) -> tuple[js.Sparse, jax.Array]:
  """The first entries that reach `bound`, up to about k, and how many do."""
  home = LazySum((x,))
  members = threshold.select_reaching(home, bound)
  return threshold.read_first(home, members, bitset.align(k)), bitset.count(members)


def measure(name: str, n: int, k: int, repetitions: int) -> Row:
  """Checks and times selection of k entries from one input; raises RuntimeError for one that `lax.top_k` does not."""
  x = jnp.asarray(INPUTS[name](np.random.default_rng(0), n), jnp.float32)
  top_k = functools.partial(js.select.top_k, k=k)
  programs: dict[str, Callable[..., Any]] = {
    "lax_top_k": jax.jit(lambda x: jax.lax.top_k(jnp.abs(x), k)),
    "top_k": jax.jit(top_k),
    "threshold": jax.jit(functools.partial(_by_threshold, k=k)),
  }
  magnitudes, largest = jax.device_get(programs["lax_top_k"](x))
  bound = jnp.float32(magnitudes[-1])
  programs["threshold"] = functools.partial(programs["threshold"], bound=bound)
  # every program has run once then
  found = {name: jax.device_get(program(x)) for name, program in programs.items()}
  _check(name, np.asarray(x), largest, bound, found)
  jax.block_until_ready(READ(x))
  times: dict[str, list[float]] = collections.defaultdict(list)
  for _ in range(repetitions):
    for program_name, program in programs.items():
      times[program_name].append(seconds_of(functools.partial(program, x)))
      # it is short, so it takes more of them to tell
      times["read"].append(seconds_of(functools.partial(READ, x)))
  medians = {name: statistics.median(seconds) for name, seconds in times.items()}
  return Row(name, **medians, method=exact.method_for(n, k))


def _check(
  name: str, x: np.ndarray, largest: np.ndarray, bound: jax.Array, found: dict[str, Any]
) -> None:
  """Raises RuntimeError if a result is not what `lax.top_k`, or numpy, says, in the order of the indices."""
  reach = np.flatnonzero((np.abs(x) >= bound) & (x != 0))
  some, count = found["threshold"]
  if count != len(reach):
    raise RuntimeError(
      f"{name}: {count} entries reach the threshold, numpy counts {len(reach)}"
    )
  found["threshold"] = js.Sparse(some.indices[:count], some.values[:count])
  for program, indices in (
    ("top_k", np.sort(largest)),
    ("threshold", reach[: bitset.align(len(largest))]),
  ):
    if not np.array_equal(found[program].indices, indices):
      raise RuntimeError(f"{name}: {program} selects other indices than lax.top_k")
    if not np.array_equal(
      found[program].values.view(np.int32), x[indices].view(np.int32)
    ):
      raise RuntimeError(
        f"{name}: {program} gives values that are not those of its indices, bit for bit"
      )


def seconds_of(program: Callable[[], Any]) -> float:
  """Seconds until the result of one call is there."""
  start = time.perf_counter()
  jax.block_until_ready(program())
  return time.perf_counter() - start


def update_alone(size: int, n: int, density: float, repetitions: int) -> Update:
  """One SparDL update of one of `size` workers, whose messages are copies."""
  tx = js.make_transform("spardl", SoloComm(size), density=density)
  several = [
    jax.random.normal(jax.random.key(seed), (n,), jnp.float32) for seed in range(3)
  ]
  state = tx.init(several[0])
  # A training step has no use for its gradients afterwards: they give their buffer to
  # the mean.
  compiled: Any = (
    jax.jit(tx.update, donate_argnums=(0, 1)).lower(several[0], state).compile()
  )
  times: dict[str, list[float]] = {"seconds": [], "read": []}
  for step in range(3 + repetitions):  # the first of them have an empty residual
    grads = jax.block_until_ready(jnp.copy(several[step % 3]))
    times["read"].append(seconds_of(functools.partial(READ, grads)))
    start = time.perf_counter()
    mean, state = jax.block_until_ready(compiled(grads, state))
    times["seconds"].append(time.perf_counter() - start)
  medians = {name: statistics.median(seconds[3:]) for name, seconds in times.items()}
  residual = state.carried.residual[0]
  if not mean.shape == residual.shape == (n,) or not bool(
    jnp.isfinite(mean).all() & jnp.isfinite(residual).all()
  ):
    raise RuntimeError(
      f"the update of one of {size} workers is not finite, or not of {n} entries"
    )
  memory = compiled.memory_analysis()
  beyond = (
    memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
  )
  return Update(size, **medians, buffers=beyond / (4 * n))


def report_rows(
  rows: Sequence[Row], update: Update | None, console: rich.console.Console
) -> None:
  """Prints the inputs, one program beside the other, then time and memory of the update."""
  ms, lines = report.milliseconds, []
  for row in rows:
    lines.append(
      [row.input, row.method, ms(row.read), ms(row.lax_top_k), ms(row.top_k)]
    )
    lines[-1] += [f"{row.lax_top_k / row.top_k:.1f}", f"{row.top_k / row.read:.1f}"]
    lines[-1] += [ms(row.threshold), f"{row.lax_top_k / row.threshold:.1f}"]
  if lines:
    title = f"{_DENSITY.value:g} of n = {_N.value:,} entries, {jax.default_backend()}"
    heads = (
      "input",
      "method",
      "read",
      "lax.top_k",
      "top_k",
      "× faster",
      "× read",
      "threshold",
      "× faster",
    )
    caption = "ms; × faster is than lax.top_k, × read as long as one read takes"
    console.print(report.table(title, heads, lines, text=2, caption=caption))
  if update:
    title = "one SparDL update of one worker, alone; memory beyond gradient and state in arrays of n float32"
    times = ms(update.seconds), ms(update.read), f"{update.seconds / update.read:.1f}"
    line = [str(update.workers), *times, f"{update.buffers:.2f}"]
    console.print(report.table(title, ("P", "ms", "read", "× read", "memory"), [line]))


def main() -> None:
  """Checks, times and reports."""
  console = workers.make_console(stderr=_JSON.value)
  work: Any = rich.progress.track(
    _INPUTS.value, "selecting", console=console, transient=True
  )
  rows = [
    measure(name, _N.value, math.ceil(_DENSITY.value * _N.value), _REPETITIONS.value)
    for name in work
  ]
  update = (
    update_alone(_UPDATE.value, _N.value, _DENSITY.value, _REPETITIONS.value)
    if _UPDATE.value
    else None
  )
  report_rows(rows, update, console)
  if _JSON.value:
    settings = {
      "n": _N.value,
      "density": _DENSITY.value,
      "repetitions": _REPETITIONS.value,
    }
    report.print_json({**settings, "selection": rows, "update": update})


if __name__ == "__main__":
  entry.run(main)
