r"""What a step changes of weights in a serving dtype, and what a link of `js.weights` takes to send it.

A model is trained with Adam at --warm_up_rate, and then, from there, at each of
--rates. Each step is published, and read by a subscriber, whose parameters are compared
bit for bit. With `zstandard` (pip install 'jaxsparse[zstd]') the XOR of the bit
patterns is compressed, too: as it is, and byte planes one behind the other.

Seconds are those of all threads of this process on CPUs: they depend less on what else
the machine does. "read" is one read of the patterns, a sum of the bytes as u64. The
jitted programs find and gather the same differences, or add them, on the device.

--parts=readers publishes the steps to four readers in the network lab, which needs
root, each behind a link of --link. An HTTP server serves the publisher's folder, and
all readers share its link. Seconds are those of a clock, from the call of `publish`
until the last reader has the version, in parameters that it may use, on the cores of
one machine. Beside links: full copies, where each version is an anchor; a reader that
is killed by SIGKILL in an anchor and started again, and one that comes after the chain
was pruned. Every version is compared bit for bit.

Examples:
  python -m benchmarks.weights --task=lm_medium --rates=1e-5 --steps=2
  python -m benchmarks.weights --parts=readers --rates=1e-6,1e-5,1e-4
"""

import functools
import itertools
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

import jaxsparse as js
from benchmarks import entry, report, workers
from benchmarks.tasks import registry
from benchmarks.tasks.base import model_of
from benchmarks.weights import jitted, readers
from benchmarks.weights import report as tables
from benchmarks.weights.report import Row
from jaxsparse.sparse import packing
from jaxsparse.weights.folder import Folder, Patterns

_PARTS = flags.DEFINE_list("parts", ["sizes"], "What to measure: sizes, readers.")
_LINK = flags.DEFINE_string("link", "100mbit", "Speed of each link of readers.")
_TASK = flags.DEFINE_string(
  "task", "lm_wide", "What is trained, as in benchmarks.race."
)
_RATES = entry.define_numbers(
  "rates", [1e-6, 3e-6, 1e-5, 1e-4], "Rates of Adam.", flags.FloatParser(0.0)
)
_STEPS = flags.DEFINE_integer("steps", 4, "Steps at each rate.", lower_bound=1)
_WARM_UP = flags.DEFINE_integer("warm_up", 60, "Steps before.", lower_bound=0)
_WARM_UP_RATE = flags.DEFINE_float("warm_up_rate", 1e-3, "Rate of these.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 4, "Examples in a step.", 1)
_DTYPE = flags.DEFINE_string("dtype", "bfloat16", "The serving dtype.")
_REPORT_DIR = entry.define_report_dir("weights.json")
entry.require_choices(_PARTS, ["sizes", "readers"], empty=False)


def train(rates: list[float], steps: int) -> Any:
  """(rate, parameters) after each step: the last one of the warm-up, then those of each rate, from there."""
  task = registry.make(_TASK.value)
  model = model_of(task, seed=0)
  adam = optax.scale_by_adam()
  gradient = jax.grad(model.plain_loss)

  @jax.jit
  def step(params: Any, state: Any, batch: Any, rate: Any) -> Any:
    updates, state = adam.update(gradient(params, batch), state, params)
    return jax.tree.map(lambda p, u: p - rate * u, params, updates), state

  batches = task.stream(0, 1, _BATCH_SIZE.value)
  state = model.params, adam.init(model.params)
  for batch in itertools.islice(batches, _WARM_UP.value):
    state = jax.block_until_ready(step(*state, batch, _WARM_UP_RATE.value))
  for rate in rates:
    own = state
    yield rate, own[0]
    for batch in itertools.islice(batches, steps):
      own = jax.block_until_ready(step(*own, batch, rate))
      yield rate, own[0]


def cpu_seconds(function: Callable[[], Any], repetitions: int = 3) -> float:
  """The median of several calls."""
  times = []
  for _ in range(repetitions):
    start = time.process_time()
    jax.block_until_ready(function())
    times.append(time.process_time() - start)
  return statistics.median(times)


def zstd_bytes(old: Patterns, new: Patterns) -> tuple[int | None, int | None]:
  """Bytes of the compressed XOR, and of its byte planes."""
  try:
    import zstandard  # type: ignore[import-not-found, unused-ignore]
  except ImportError:
    return None, None
  size = lambda content: len(zstandard.ZstdCompressor().compress(content))
  pairs = zip(old.arrays, new.arrays, strict=True)
  changes = [before ^ after for before, after in pairs]
  planes = [one.view(np.uint8).reshape(one.size, -1).T.tobytes() for one in changes]
  return size(b"".join(one.tobytes() for one in changes)), size(b"".join(planes))


def index_words(old: np.ndarray, new: np.ndarray) -> tuple[int, int]:
  """Words of the index set of a piece, and how many changed."""
  changed = np.flatnonzero(old != new)
  ones = np.ones(len(changed), np.uint32)
  return sum(map(len, packing.pack(changed, ones))), len(changed)


def measure(
  rate: float, old: Patterns, new: Patterns, publish: float, latest: float
) -> Row:
  """The row of one step, of patterns before and after."""
  link = packing.difference(old.arrays, new.arrays)
  pieces = packing.each_piece(index_words, old.arrays, new.arrays)
  words, counts = zip(*pieces, strict=True)
  changed = sum(counts)
  entries = sum(array.size for array in new.arrays)
  share = changed / entries
  entropy = -np.log2(share) - (1 - share) * np.log2(1 - share) / share
  index = 32 * sum(words) / changed
  flat = [jnp.asarray(np.concatenate(one.arrays)) for one in (old, new)]
  found = jax.block_until_ready(jitted.diff(*flat))
  np.testing.assert_array_equal(jitted.apply(flat[0], *found), flat[1])
  after = packing.after(old.arrays, link)
  for got, wanted in zip(after, new.arrays, strict=True):
    np.testing.assert_array_equal(got, wanted)
  read = lambda: sum(
    int(one[: one.size // 4 * 4].view(np.uint64).sum()) for one in new.arrays
  )
  return Row(
    rate,
    entries,
    changed,
    float(entropy),
    index,
    8 * link.nbytes / changed - index,
    link.nbytes,
    sum(array.nbytes for array in new.arrays),
    *zstd_bytes(old, new),
    read=cpu_seconds(read),
    diff=cpu_seconds(lambda: packing.difference(old.arrays, new.arrays)),
    digest=cpu_seconds(new.digest),
    apply=cpu_seconds(lambda: packing.after(old.arrays, link)),
    diff_jit=cpu_seconds(lambda: jitted.diff(*flat)),
    apply_jit=cpu_seconds(lambda: jitted.apply(flat[0], *found)),
    publish=publish,
    latest=latest,
  )


def measure_all(console: Any) -> list[Row]:
  """Publishes, reads and measures every step."""
  rows: list[Row] = []
  steps = train(_RATES.value, _STEPS.value)
  first = next(steps)
  old = None
  with tempfile.TemporaryDirectory() as folder:
    model = Folder(folder, first[1], _DTYPE.value)
    publisher = js.weights.Publisher(folder, first[1], _DTYPE.value)
    subscriber = js.weights.Subscriber(folder, first[1], _DTYPE.value)
    for rate, params in itertools.chain([first], steps):
      publish = cpu_seconds(functools.partial(publisher.publish, params), 1)
      latest = cpu_seconds(lambda: subscriber.latest().params, 1)
      new = model._patterns(params)
      got = model._patterns(subscriber.latest().params)
      for one, other in zip(got.arrays, new.arrays, strict=True):
        np.testing.assert_array_equal(one, other)
      # The first parameters of a rate are those of the warm-up.
      if old and old[0] == rate:
        rows.append(measure(rate, old[1], new, publish, latest))
        console.print(rows[-1])
      old = rate, new
  return rows


def versions_of_rates() -> Iterator[tuple[float, list[readers.Leaves]]]:
  """The versions of each rate in the serving dtype, all steps of one before they are published."""
  served = lambda leaf: np.asarray(jnp.asarray(leaf, _DTYPE.value))
  steps = train(_RATES.value, _STEPS.value)
  for rate, own in itertools.groupby(steps, lambda step: step[0]):
    yield rate, [list(map(served, jax.tree.leaves(params))) for _, params in own]


def _sizes(console: Any) -> list[Row]:
  rows = measure_all(console)
  title = f"{_TASK.value}, {rows[0].entries:,} weights in {_DTYPE.value}"
  console.print(report.table(title, tables.HEADS, tables.sizes(rows)))
  caption = "CPU milliseconds of a step"
  shown = tables.times(rows)
  console.print(report.table(title, tables.TIMES, shown, caption=caption))
  report.say(tables.goals(rows), console)
  return rows


def _readers(console: Any) -> list[tables.Fetch]:
  found = []
  for row in readers.measure(_LINK.value, versions_of_rates()):
    console.print(row)
    found.append(row)
  title = f"{readers.READERS} readers, links of {_LINK.value}"
  caption = "files read by HTTP from the publisher's host, whose link all share"
  shown = tables.fetches(found)
  console.print(report.table(title, tables.READERS, shown, caption=caption))
  return found


def _records(rows: list[Any]) -> list[dict[str, Any]]:
  return [report.rounded(row._asdict()) for row in rows]


def main() -> None:
  """Measures, reports and keeps the rows; those of other parts stay."""
  console = workers.make_console(stderr=False)
  setting = {
    "task": _TASK.value,
    "dtype": _DTYPE.value,
    "warm_up": _WARM_UP.value,
    "warm_up_rate": _WARM_UP_RATE.value,
    "batch_size": _BATCH_SIZE.value,
  }
  path = pathlib.Path(_REPORT_DIR.value) / "weights.json"
  kept = json.loads(path.read_text()) if path.exists() else {}
  if "sizes" in _PARTS.value:
    kept |= {"setting": setting, "rows": _records(_sizes(console))}
  if "readers" in _PARTS.value:
    of_readers = setting | {"link": _LINK.value}
    kept |= {"readers_setting": of_readers, "readers": _records(_readers(console))}
  lists = {name: kept.pop(name) for name in ("rows", "readers") if name in kept}
  report.keep(path, kept, lists)


if __name__ == "__main__":
  entry.run(main)
