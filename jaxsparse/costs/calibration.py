"""Measures the parameters of the cost model, on the workers and the network of the training run."""

import dataclasses
import importlib.resources
import json
import math
import pathlib
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.resources.abc import Traversable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxsparse._compat import AxisName
from jaxsparse.collectives import (
  Collective,
  collective_names,
  collective_options,
  make_collective,
  make_plain,
)
from jaxsparse.collectives._base import collective_of, label_of
from jaxsparse.comm import all_reduce_cost
from jaxsparse.costs.counting import (
  Entries,
  count_entries,
  lacks_shapes,
  make_sized,
  schedule,
  uses_all_reduce,
)
from jaxsparse.train import timing
from jaxsparse.train.engine import Engine, engine_of
from jaxsparse.transform.metrics import metrics
from jaxsparse.types import Comm, Link, check_whole

_LONG = 0.3  # seconds of a message that is long enough to measure β
# Messages grow until one takes `_LONG` seconds, or has max(n, this) words.
_MIN_LIMIT = 2**18
# messages of a chain, which makes the overhead of the clock and of the call small
_CHAIN_LENGTH = 8
# what the documents recommend; `fit` may have no time for others
_RECOMMENDED = (
  "dense",
  "onebit",
  "spardl",
  "powersgd",
)
# Variants of SparDL: less arithmetic; fewer words, without loss and with the most.
_VARIANTS = (
  "spardl:selector=chunked",
  "spardl:wire=f32",
  "spardl:selector=chunked:wire=int4",
)
_MACHINES = ("h100",)  # whose measurements are beside this module
_FILL_SIDE = 256  # rows and columns of the gradients that `fill` is measured with
_SMALL_SIDE = 64  # those that `overhead` is measured with


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """Measurements of one algorithm at one density.

  Attributes:
    arithmetic: seconds per gradient entry of an update without its messages, beyond
      `overhead`: residual, selection, sums and the total, while all workers compute.
    fill: measured words / predicted words, for normally distributed gradients; below 1
      where message sizes vary, since the formula is an upper bound there.
    reduces: whether it sends by the platform's all-reduce.
    slowdown: seconds per byte of its all-reduce / `Profile.reduce_beta`, that of
      float32; 2 where the platform sends bfloat16 as float32, as XLA does on CPU.
    overhead: seconds of an update of few entries without its messages: operations that
      start, whatever the size of a gradient.

  Example:
    >>> Algorithm(arithmetic=1e-8, overhead=1e-3).seconds(n=10**6)
    0.011
  """

  arithmetic: float
  fill: float = 1.0
  reduces: bool = False
  slowdown: float = 1.0
  overhead: float = 0.0

  def __post_init__(self) -> None:
    _check_numbers(self)

  def seconds(self, n: int) -> float:
    """Seconds of an update of n entries without its messages."""
    return self.overhead + self.arithmetic * n


@dataclasses.dataclass(frozen=True)
class Profile:
  """Measurements of a machine and its network, by `fit` for `advise`.

  `Profile.of` makes one from measurements of a GPU and a link that you give.

  Attributes:
    workers: number of workers P.
    alpha: α, latency of a message, in seconds.
    beta: β, seconds per byte of a message.
    gamma: γ, contention factor: per-byte slowdown when two transfers overlap. 1 is no
      contention, 2 a shared link.
    reduce_alpha: seconds of each of the 2⌈log₂P⌉ messages of the platform's all-reduce;
      0 if they were not measured, and then α counts.
    reduce_beta: seconds per byte that a worker sends in the platform's all-reduce; 0 if
      they were not measured, and then β counts.
    entries: n of the gradients whose arithmetic was timed.
    algorithms: measurements of each algorithm, by label: `arithmetic` is its seconds
      per entry, `fill` the words that it sends / the predicted ones.
    devices: number of devices S of a worker, all of which send to other workers at once
      while α and β are measured.
    inside_alpha: latency of a message between devices of a worker, in seconds.
    inside_beta: seconds per byte of a message between devices of a worker.

  Example:
    >>> Profile(workers=2, alpha=1e-4, beta=8e-9, algorithms={"dense": Algorithm(1e-9)}).algorithms["dense"].fill
    1.0
  """

  workers: int
  alpha: float
  beta: float
  gamma: float = 1.0
  reduce_alpha: float = 0.0
  reduce_beta: float = 0.0
  entries: int = 0
  algorithms: dict[str, Algorithm] = dataclasses.field(default_factory=dict)
  devices: int = 1
  inside_alpha: float = 0.0
  inside_beta: float = 0.0

  def __post_init__(self) -> None:
    check_whole("Profile", 1, workers=self.workers, devices=self.devices)
    _check_numbers(self)

  def save(self, path: str | pathlib.Path) -> None:
    """Writes the profile as JSON."""
    pathlib.Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2))

  @classmethod
  def load(cls, path: str | Traversable) -> Self:
    """Reads a profile that `save` wrote, also one of an earlier version, which had other fields."""
    file = pathlib.Path(path) if isinstance(path, str) else path
    read = json.loads(file.read_text())
    algorithms = {
      label: Algorithm(**_fields_of(Algorithm, algorithm))
      for label, algorithm in read["algorithms"].items()
    }
    return cls(**_fields_of(cls, read) | {"algorithms": algorithms})

  @classmethod
  def of(
    cls,
    machine: str,
    link: Link,
    *,
    workers: int,
    devices: int = 1,
  ) -> Self:
    """A profile of a GPU's measured arithmetic and of a `link` that was not measured.

    Measured on one H100, with JAX 0.11.2: updates of 14,728,266 entries of one of 8
    workers, dispatched without waiting in between, each collective at a density of
    0.01.

    Args:
      machine: "h100".
      link: α, β and γ of the messages of one device. They count for the platform's
        all-reduce, too.
      workers: number of workers P.
      devices: number of devices of a worker, S. If they share a link of b bytes a
        second, β is S/b.

    Raises:
      ValueError: for another machine, or a number of workers or devices that is not
        positive.

    Example:
      Two hosts of 8 GPUs, between them 100 Gbit/s and 5 µs a message, and 124 million
      parameters:

      >>> import jaxsparse as js
      >>> link = js.overlap.Link(alpha=5e-6, beta=8 * 8 / 100e9, gamma=1.0)
      >>> profile = js.costs.Profile.of("h100", link, workers=2, devices=8)
      >>> advice = js.costs.advise(124_373_760, profile)
      >>> {one.label: round(1000 * one.seconds, 1) for one in advice.predictions if one.label in ("dense", "onebit")}
      {'onebit': 1.5, 'dense': 40.0}
    """
    if machine not in _MACHINES:
      raise ValueError(
        f"Profile.of: machine={machine!r}, choose one of {', '.join(map(repr, _MACHINES))}"
      )
    check_whole("Profile.of", 1, workers=workers, devices=devices)
    measured = cls.load(
      importlib.resources.files("jaxsparse.costs") / f"{machine}.json"
    )
    return dataclasses.replace(measured.over(link), workers=workers, devices=devices)

  def over(self, link: Link) -> Self:
    """The profile with α, β and γ of another link, for the platform's all-reduce, too."""
    # The fields of a link, `alpha`, `beta` and `gamma`, are fields of a profile.
    return dataclasses.replace(
      self, **link._asdict(), reduce_alpha=link.alpha, reduce_beta=link.beta
    )


def fit(
  mesh: Mesh | Comm,
  *,
  axis: AxisName = "workers",
  n: Entries = 2**22,
  densities: Sequence[float] = (0.01,),
  algorithms: Sequence[str] | None = None,
  repetitions: int = 5,
  seconds: float = 120.0,
  progress: Callable[[str], object] | None = None,
) -> Profile:
  """Measures α, β, γ, the platform's all-reduce, and the arithmetic of every algorithm, on all workers at once.

  Takes a minute or two, most of it compilation, and at most about `seconds`. Each
  algorithm gets an equal part of the time that is left, and at least one repetition;
  those that are not begun in time are left out of the profile, with a warning. In a run
  of several processes every process must call.

  α is measured with messages one after the other. Workers that share cores also wait
  for each other wherever they compute between messages, which no prediction includes:
  on four CPU devices and two cores chunked SparDL of 196,864 entries takes at least
  0.5 ms more.

  Args:
    mesh: the workers, as for `js.init`. Its other axes lie inside a worker: their links
      are measured too.
    axis: of the mesh.
    n: number of gradient entries whose arithmetic is timed; or the parameters, as for
      `js.costs.count`. Messages have at most max(n, 2^18) words. Arithmetic is taken as
      linear in the entries, from few entries and n. Caches make it nonlinear: choose an
      n close to that of your model.
    densities: the densities that `advise` compares.
    algorithms: names, with options as in "spardl:teams=2"; by default all that average
      gradients, and SparDL with every number of teams. Those whose words depend on the
      shapes of leaves need the parameters as n.
    repetitions: of each measurement; more where these take less than 0.1 s together,
      fewer where they take long. Of messages the median counts, of arithmetic the
      fastest.
    seconds: no further algorithm is begun after this time, but the last one may take
      longer; math.inf measures all.
    progress: called in process 0 with a line of text for each algorithm that is
      measured, `print` for instance.

  Raises:
    ValueError: for one worker, which sends nothing, an algorithm that does not fit the
      number of workers, or one that has no label, such as a collective of your own.

  Example:
    >>> import jax, jaxsparse as js
    >>> mesh = jax.make_mesh((2,), ("workers",), devices=jax.devices()[:2])
    >>> profile = js.costs.fit(mesh, n=2**12, algorithms=["dense", "topka"], repetitions=2)
    >>> profile.alpha > 0 and profile.beta > 0 and profile.algorithms["topka:density=0.01"].arithmetic > 0
    True
  """
  # `flat`: programs run on each device of a worker, and all of them send at once.
  engine = engine_of(mesh, axis).flat
  if engine.workers < 2:
    raise ValueError("fit: one worker sends nothing, give at least two workers")
  if not seconds > 0:
    raise ValueError(
      f"fit: seconds={seconds!r}, give more than 0, math.inf for no limit"
    )
  start = time.monotonic()
  labels = (
    candidates(engine.workers, densities, n)
    if algorithms is None
    else _add_densities(algorithms, densities)
  )
  # All labels are read first: a wrong one should not cost minutes.
  collectives = {label: make_sized(label, n, engine.workers)[0] for label in labels}
  n = count_entries(n)
  for collective in collectives.values():
    collective.cost(n, engine.workers)  # ValueError for a k above n
  meter = _Meter(engine, axis, n, repetitions)
  links = meter.measure_links()  # (α, β, γ)
  reduce = meter.measure_all_reduce()  # (α, β)
  # (α, β) between the devices of a worker, measured as if each were a worker
  inside = (0.0, 0.0)
  devices = math.prod(engine.axes[name] for name in engine.others)
  if devices > 1:
    inside = _Meter(
      engine_of(mesh, engine.others).flat, engine.others, n, repetitions
    ).measure_links()[:2]
  # The slowest process decides, so that all stop at the same algorithm.
  left = lambda: seconds - meter.find_slowest(time.monotonic() - start)
  measured = _measure_algorithms(meter, collectives, reduce[1], left, progress)
  # in the order of the fields of a profile
  return Profile(engine.workers, *links, *reduce, n, measured, devices, *inside)


def _measure_algorithms(
  meter: "_Meter",
  collectives: Mapping[str, Collective],
  reduce_beta: float,
  seconds_left: Callable[[], float],
  progress: Callable[[str], object] | None,
) -> dict[str, Algorithm]:
  """Measures each collective while `seconds_left` is above 0, the first one always; returns the results by label.

  Args:
    meter: the workers and n.
    collectives: by label, in the order in which they are measured.
    reduce_beta: seconds per byte of the platform's all-reduce in float32.
    seconds_left: the seconds that `fit` has left, the same on all processes; every
      process must call it, since they exchange their clocks.
    progress: called with a line of text for each collective; None calls nothing.
  """
  # Gradients of all workers from seed 0, f32[n] each, made once for all collectives.
  grads = timing.gradients(meter.engine, meter.n)(0)
  measured = dict[str, Algorithm]()
  left = seconds_left()
  for label, collective in collectives.items():
    # labels that are still to be measured, this one included
    missing = [label for label in collectives if label not in measured]
    if measured and left <= 0:
      warnings.warn(
        f"js.costs.fit: no time was left for {', '.join(missing)}: they are not in the profile; give more "
        "seconds=, or those algorithms= that you choose among",
        stacklevel=3,
      )
      break
    # Each collective still to be measured gets an equal part of the time left.
    measured[label] = meter.measure_algorithm(
      label, collective, grads, reduce_beta, left / len(missing)
    )
    left = seconds_left()
    if progress and meter.engine.process == 0:
      spent = f"{1e9 * measured[label].arithmetic:.3g} ns an entry, {max(0.0, left):.0f} s left"
      progress(f"{len(measured)} of {len(collectives)}: {label}, {spent}")
  return measured


def _check_numbers(measured: Any) -> None:
  """Raises ValueError for a number of a `Profile` or `Algorithm` that is negative, infinite or NaN."""
  # `algorithms`, the field without a number, has values that check themselves.
  for field in dataclasses.fields(measured):
    value = getattr(measured, field.name)
    if field.name != "algorithms" and not 0 <= value < math.inf:
      kind = type(measured).__name__
      raise ValueError(f"{kind}: {field.name}={value!r}, give a number from 0 up")


def _fields_of(kind: type, values: dict[str, Any]) -> dict[str, Any]:
  """The `values` that are fields of a dataclass."""
  # Other versions may have written fields that are unknown here.
  names = {field.name for field in dataclasses.fields(kind)}
  return {name: value for name, value in values.items() if name in names}


def candidates(
  workers: int,
  densities: Sequence[float],
  n: Entries = 1,
) -> list[str]:
  """Labels of all algorithms that average gradients, at each density, recommended ones first.

  SparDL has a label for every number of teams. A2SGD is not among them: its workers
  apply different totals, which is not an average of gradients. Nor are PowerSGD and
  rows if n is a number, since their words depend on the shapes of leaves.

  Example:
    >>> candidates(4, [0.01])[-3:]
    ['spardl:teams=2:density=0.01', 'spardl:teams=4:density=0.01', 'dense:dtype=bfloat16']
  """
  # `replicates`: all workers get the same total, else it is no average.
  fits = lambda name: make_plain(name).traits.replicates and not lacks_shapes(name, n)
  recommended = [*filter(fits, _RECOMMENDED), *_VARIANTS]
  averaging = [
    name for name in collective_names() if fits(name) and name not in recommended
  ]
  teams = [
    f"spardl:teams={teams}" for teams in range(2, workers + 1) if workers % teams == 0
  ]
  return _add_densities(
    [*recommended, *averaging, *teams, "dense:dtype=bfloat16"], densities
  )


def _add_densities(labels: Sequence[str], densities: Sequence[float]) -> list[str]:
  """The labels, each once for every density where its collective takes one and the label has no density or k."""
  if isinstance(labels, str):
    raise ValueError(f"fit: algorithms={labels!r}, give a list, as [{labels!r}]")
  result = []
  for label in map(_label_of, labels):
    name, config = collective_of(label)
    lacks = "density" in collective_options(name) and not {"density", "k"} & set(config)
    result += (
      [label_of(name, config | {"density": density}) for density in densities]
      if lacks
      else [label]
    )
  return result


def _label_of(algorithm: Any) -> str:
  """The label of an algorithm: a label itself, or that of an instance of one of the library's collectives."""
  # A string has no `name`. `advise` makes the instance from its label again: if the
  # result differs, the instance is refused.
  is_known = getattr(algorithm, "name", None) in collective_names()
  if is_known and make_collective(algorithm.label) == algorithm:
    return algorithm.label
  if not isinstance(algorithm, str):
    known = f"of {', '.join(collective_names())}"
    raise ValueError(
      f"fit: {algorithm} is no label, give a name with options, 'spardl:teams=2:density=0.01', {known}"
    )
  return algorithm


class _Meter:
  """Times programs that all workers run at once, with gradients of n entries and messages of up to max(n, 2^18) words.

  Attributes:
    engine: runs a program on each device of each worker.
    n: entries of the gradients whose arithmetic is timed.

  Private: `_axis`, along which workers send; `_repetitions` of each measurement; and
  `_watch`, which times a call from a common start to the end of the slowest worker.
  """

  def __init__(self, engine: Engine, axis: AxisName, n: int, repetitions: int):
    self.engine = engine
    self._axis = axis
    self.n = n
    self._repetitions = repetitions
    self._watch = timing.Stopwatch(engine)

  def find_slowest(self, seconds: float) -> float:
    """The most of the `seconds` of all processes, so that they decide alike; a message, so every process must call."""
    return float(self._watch.gather(seconds).max())

  def measure_links(self) -> tuple[float, float, float]:
    """(α in s, β in s per byte, γ) of messages from each worker to its successor."""
    # All workers send at once, as in a round of an update.
    send = lambda comm, x: comm.shift(x, 1)
    # A message of 4 words takes the latency α alone. `seconds` is the time of a message
    # of many `words`, and `beyond` that time without α.
    alpha, words, seconds, beyond = self._measure_line(send, 4)
    # Two messages that overlap, for γ; they differ, else XLA may send one for both.
    both = lambda comm, x: jnp.concatenate([send(comm, x), send(comm, x + 1)])
    # A word has 4 bytes. γ: seconds of two long messages at once / seconds of one.
    return alpha, beyond / (4 * words), self._measure_seconds(both, words) / seconds

  def measure_all_reduce(
    self, dtype: jax.typing.DTypeLike = jnp.float32
  ) -> tuple[float, float]:
    """(α, β) of the platform's all-reduce, per message and per byte of `all_reduce_cost`."""
    workers = self.engine.workers
    # 2P entries are few, but enough to be scattered over P workers, as the formula of
    # the long message assumes.
    latency, entries, _, beyond = self._measure_line(
      lambda comm, x: comm.all_reduce(x.astype(dtype)), 2 * workers
    )
    cost = all_reduce_cost(entries, workers, jnp.dtype(dtype).itemsize)
    # The short all-reduce took 2⌈log₂P⌉ messages in a row; `beyond` is the seconds of a
    # long one without their latency.
    return latency / cost.messages, beyond / cost.bytes

  def measure_algorithm(
    self,
    label: str,
    collective: Collective,
    grads: jax.Array,
    reduce_beta: float,
    budget: float,
  ) -> Algorithm:
    """The measurements of an algorithm; repetitions of its update end after about `budget` seconds.

    Args:
      label: the name and options of the algorithm.
      collective: the collective of `label`, for gradients of n entries.
      grads: the gradients of all workers, f32[n] each.
      reduce_beta: seconds per byte of the platform's all-reduce in float32.
      budget: seconds for repetitions of the update with n and with few entries.
        Compilation and all other measurements come on top.
    """
    # The trace tells whether words go by XLA's all-reduce, which has its own α and β.
    jaxpr = schedule(collective, self.n, self.engine.workers)
    reduces = uses_all_reduce(jaxpr, self.engine.workers)
    _, options = collective_of(label)
    slowdown = (
      self.measure_all_reduce(options["dtype"])[1] / reduce_beta
      if reduces and "dtype" in options
      else 1.0
    )
    # `_measure_alone`: seconds of an update that sends no messages
    seconds = self._measure_alone(collective, grads, budget)
    # If n is as small as the gradients below, overhead counts as arithmetic.
    overhead = 0.0
    if self.n > _SMALL_SIDE**2:
      # An update of few entries mostly takes the time to start its operations: the
      # arithmetic of so few is neglected. These gradients, too, are those of seed 0.
      few = timing.gradients(self.engine, _SMALL_SIDE**2)(0)
      overhead = self._measure_alone(self._resized(label, _SMALL_SIDE), few, budget)
    # Clocks are inexact: this keeps arithmetic from falling below 0.
    overhead = min(overhead, seconds)
    fill = self._measure_fill(self._resized(label, _FILL_SIDE))
    arithmetic = (seconds - overhead) / self.n
    return Algorithm(arithmetic, fill, reduces, slowdown, overhead)

  def _measure_alone(
    self, collective: Collective, grads: jax.Array, budget: float
  ) -> float:
    """Seconds of an update without its messages; its repetitions end after about half of `budget` seconds."""
    # The update with n entries and that with few share the budget.
    times, _ = timing.alone(
      self.engine, self._watch, collective, grads, self._repetitions, budget / 2
    )
    # Other load on the cores only adds to a time: the fastest call is the least wrong.
    return min(times)

  def _resized(self, label: str, side: int) -> Collective:
    """The collective of a label for a square matrix of `side` rows, with k / n as for n entries."""
    name, options = collective_of(label)
    if "k" in options:
      options = options | {"k": math.ceil(options["k"] * side**2 / self.n)}
    # Shapes, not a number of entries, since PowerSGD and rows need them.
    matrix = jax.ShapeDtypeStruct((side, side), jnp.float32)
    return make_sized(name, matrix, self.engine.workers, **options)[0]

  def _measure_fill(self, collective: Collective) -> float:
    """Words of an update / predicted words, for normally distributed gradients; 1 where message sizes are constant."""
    # If words depend on the shapes of leaves, as with PowerSGD and rows, the formula
    # counts as exact, though it is an upper bound where sizes vary.
    if not collective.traits.sizes_vary or collective.traits.needs_shapes:
      return 1.0
    entries = _FILL_SIDE**2
    update = timing.Update(self.engine, collective, self.engine.comm, entries)
    make = timing.gradients(self.engine, entries)
    # The words of step 2 count: step 1 computes thresholds and regions, and may send
    # other words. Each step donates its gradients, so those of seed 0 are made anew.
    for _ in range(2):
      _, update.state = update.program(make(0), update.state)
    words = float(metrics(update.state).words_sent)
    return words / max(1, collective.cost(entries, self.engine.workers).words)

  def _measure_line(
    self, send: Callable[[Comm, jax.Array], jax.Array], short: int
  ) -> tuple[float, int, float, float]:
    """Times a short and a long message, which give latency and bandwidth.

    Args:
      send: sends one worker's message: (comm, f32[words]) -> an array of as many
        entries.
      short: words of the short message.

    Returns:
      (latency, words, seconds, beyond): seconds of the short message; words and seconds
      of a long one; and its seconds without the latency, above 0.
    """

    def chain(comm: Comm, x: jax.Array) -> jax.Array:
      # Workers have different values: XLA would compute a sum of equal values by a
      # multiplication, without a message.
      own_values = x + comm.rank.astype(x.dtype)
      total = own_values
      # Each message needs the one before it; halved, the values stay finite.
      for _ in range(_CHAIN_LENGTH):
        total = send(comm, own_values + total / 2).astype(x.dtype)
      return total

    latency = self._measure_seconds(chain, short) / _CHAIN_LENGTH
    words = 2**14
    limit = max(self.n, _MIN_LIMIT)
    # The message grows until it takes `_LONG` seconds, enough to measure β, or has
    # `limit` words.
    while (seconds := self._measure_seconds(send, words)) < _LONG and words < limit:
      # The next size is 4 times as large. On a slow network that could take minutes:
      # there the size aims at `_LONG` seconds, but is at least doubled.
      words = min(limit, words * 4, max(2 * words, round(words * _LONG / seconds)))
    # Clocks are inexact: the maximum keeps β above 0.
    return (
      latency,
      words,
      seconds,
      max(seconds - latency, 0.01 * seconds),
    )

  def _measure_seconds(
    self, function: Callable[[Comm, jax.Array], Any], words: int
  ) -> float:
    """Median seconds of calls of `function(comm, f32[words])` on all workers, of fewer calls if they are slow."""
    split = PartitionSpec(self._axis)
    # A worker has one row, [1, words], of the array of all workers.
    program = self.engine.jit(
      lambda x: function(self.engine.comm, x[0])[None], (split,), split
    )
    row = self.engine.spread(np.arange(words, dtype=np.float32))
    time_once = lambda: self._watch.time(program, row)[0]
    # The first call also compiles, so it is an upper bound: it counts only where the
    # median of the others is longer still.
    first = time_once()
    times = timing.repeat(time_once, self._repetitions, budget=4 * _LONG)
    return min(first, statistics.median(times))
