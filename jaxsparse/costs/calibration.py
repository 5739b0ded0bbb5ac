"""Measures the parameters of the cost model, on the workers and the network of the training run."""

import dataclasses
import functools
import json
import math
import numbers
import pathlib
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxsparse._compat import AxisName
from jaxsparse.collectives import Collective, collective_names, collective_options, make_collective, make_plain
from jaxsparse.collectives._base import collective_of, label_of
from jaxsparse.comm import all_reduce_cost
from jaxsparse.costs.counting import count_agreements, entries_of, predict, reduces, schedule, shaped
from jaxsparse.train import timing
from jaxsparse.train.engine import Engine, engine_of, rows_of
from jaxsparse.train.simulation import simulate
from jaxsparse.types import Comm

_LONG = 0.3  # seconds of a message that is long enough to measure β
_SHORTEST = 2**18  # words; the longest message of a measurement of β has at least so many
_CHAIN = 8  # messages of a chain, which makes the overhead of the clock and of the call small
_SHAPE = 2**16  # entries of the simulated gradients that `fill` is measured with


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """Measurements of one algorithm at one density.

  Attributes:
    arithmetic: seconds per gradient entry of an update without its messages: residual, selection, sums and the total,
      while all workers compute.
    fill: measured words / predicted words, for normally distributed gradients; below 1 where message sizes vary, since
      the formula is an upper bound there.
    reduces: whether it sends by the platform's all-reduce.
    slowdown: seconds per byte of its all-reduce / `Profile.reduce_beta`, that of float32; 2 where the platform sends
      bfloat16 as float32, as XLA does on CPU.
    agreements: number of all-reduces of a few integers in one update.

  Example:
    >>> Algorithm(arithmetic=1e-8).fill
    1.0
  """

  arithmetic: float
  fill: float = 1.0
  reduces: bool = False
  agreements: int = 0
  slowdown: float = 1.0


@dataclasses.dataclass(frozen=True)
class Profile:
  """Measurements of a machine and its network, by `fit` for `advise`.

  Attributes:
    workers: number of workers P.
    alpha: α, latency of a message, in seconds.
    beta: β, seconds per byte of a message.
    gamma: γ, contention factor: per-byte slowdown when two transfers overlap. 1 is no contention, 2 a shared link.
    reduce_alpha: seconds of each of the 2⌈log₂P⌉ messages of the platform's all-reduce.
    reduce_beta: seconds per byte that a worker sends in the platform's all-reduce.
    entries: n of the gradients whose arithmetic was timed.
    algorithms: measurements of each algorithm, by label.
    devices: number of devices S of a worker, all of which send to other workers at once while α and β are measured.
    inside_alpha: latency of a message between devices of a worker, in seconds.
    inside_beta: seconds per byte of a message between devices of a worker.

  Example:
    >>> Profile(workers=2, alpha=1e-4, beta=8e-9).seconds(6, 1000)
    0.000608
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

  def seconds(self, messages: float, size: float) -> float:
    """Seconds of `messages` messages one after the other, with `size` bytes in total."""
    return messages * self.alpha + size * self.beta

  def save(self, path: str | pathlib.Path) -> None:
    """Writes the profile as JSON."""
    pathlib.Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2))

  @classmethod
  def load(cls, path: str | pathlib.Path) -> Self:
    """Reads a profile that `save` wrote."""
    read = json.loads(pathlib.Path(path).read_text())
    return cls(**read | {"algorithms": {label: Algorithm(**one) for label, one in read["algorithms"].items()}})


def fit(
  mesh: Mesh | Comm,
  *,
  axis: AxisName = "workers",
  n: Any = 2**22,
  densities: Sequence[float] = (0.01,),
  algorithms: Sequence[str] | None = None,
  repetitions: int = 5,
  seconds: float = 120.0,
  progress: Callable[[str], object] | None = None,
) -> Profile:
  """Measures α, β, γ, the platform's all-reduce, and the arithmetic of every algorithm, on all workers at once.

  Takes a minute or two, most of it compilation, and at most about `seconds`: measurements are repeated as often as
  their share of what is left allows, at least once, and an algorithm whose turn comes after that time is left out of
  the profile, with a warning. In a run of several processes every process must call.

  Args:
    mesh: the workers, as for `js.init`. Its other axes lie inside a worker: their links are measured too.
    axis: of the mesh.
    n: number of gradient entries whose arithmetic is timed, and words of the longest message. The model scales both
      linearly: choose an n close to that of your model. Or the parameters, as for `js.costs.count`.
    densities: the densities that `advise` compares.
    algorithms: names, with options as in "spardl:teams=2"; by default all that average gradients, and SparDL with every
      number of teams. Those whose words depend on the shapes of leaves need the parameters as n.
    repetitions: the most of each measurement, whose median counts.
    seconds: after which no further algorithm is begun, so that the call takes as much longer as one of them does;
      math.inf for all of them.
    progress: called with a line of text for each algorithm that is measured, `print` for instance, in one process.

  Raises:
    ValueError: for one worker, which sends nothing, or an algorithm that does not fit the number of workers.

  Example:
    >>> import jax, jaxsparse as js
    >>> mesh = jax.make_mesh((2,), ("workers",), devices=jax.devices()[:2])
    >>> profile = js.costs.fit(mesh, n=2**12, algorithms=["dense", "spardl"], repetitions=2)
    >>> profile.alpha > 0 and profile.beta > 0 and profile.algorithms["spardl:density=0.01"].arithmetic > 0
    True
  """
  engine = engine_of(mesh, axis)
  if engine.workers < 2:
    raise ValueError("fit: one worker sends nothing, give at least two workers")
  if not seconds > 0:
    raise ValueError(f"fit: seconds={seconds!r}, give more than 0, math.inf for no limit")
  start = time.monotonic()
  names = candidates(engine.workers, densities, n) if algorithms is None else _with_densities(algorithms, densities)
  collectives = {label: _collective(label, n) for label in names}
  n = entries_of(n)
  measure = _Measure(engine, axis, repetitions)
  alpha, beta, gamma = _links(measure, n)
  reduce_alpha, reduce_beta = _all_reduce(measure, n)
  inside_alpha, inside_beta, devices = 0.0, 0.0, math.prod(engine.axes[name] for name in engine.others)
  if devices > 1:
    inside_alpha, inside_beta, _ = _links(_Measure(engine_of(mesh, engine.others), engine.others, repetitions), n)
  left = lambda: seconds - measure.latest(time.monotonic() - start)
  measured = _algorithms(collectives, measure, n, reduce_beta, left, progress)
  return Profile(
    engine.workers, alpha, beta, gamma, reduce_alpha, reduce_beta, n, measured, devices, inside_alpha, inside_beta
  )


def _collective(label: str, n: Any) -> Collective:
  name, options = collective_of(label)
  return shaped(make_collective(name, **options), n)


def candidates(workers: int, densities: Sequence[float], n: Any = 1) -> list[str]:
  """Every algorithm that averages gradients, dense first, SparDL with every number of teams, at every density.

  A2SGD is not among them: its workers apply different totals, which is not an average of gradients. Nor is PowerSGD
  where n is a number, for its words depend on the shapes of leaves.

  Example:
    >>> candidates(4, [0.01])[-3:]
    ['spardl:teams=2:density=0.01', 'spardl:teams=4:density=0.01', 'dense:dtype=bfloat16']
  """
  known = {name: make_plain(name) for name in collective_names()}
  fits = lambda one: one.replicates and not (one.needs_shapes and isinstance(n, numbers.Integral))
  averaging = sorted((name for name, one in known.items() if fits(one)), key=lambda name: name != "dense")
  teams = [f"spardl:teams={teams}" for teams in range(2, workers + 1) if workers % teams == 0]
  return _with_densities([*averaging, *teams, "dense:dtype=bfloat16"], densities)


def _with_densities(labels: Sequence[str], densities: Sequence[float]) -> list[str]:
  result = []
  for label in labels:
    name, config = collective_of(label)
    lacks = "density" in collective_options(name) and not {"density", "k"} & set(config)
    result += [label_of(name, config | {"density": density}) for density in densities] if lacks else [label]
  return result


class _Measure:
  """Times programs that all workers run at once."""

  def __init__(self, engine: Engine, axis: AxisName, repetitions: int):
    self.engine, self.repetitions = engine, repetitions
    self._axis, self._split = axis, PartitionSpec(axis)
    self._watch = timing.Stopwatch(engine, axis)

  def messages(self, function: Callable[[Comm, jax.Array], Any], words: int) -> float:
    """Median seconds of `function(comm, u32[words])`."""
    run = lambda x: function(self.engine.comm, x[0])[None]
    program = self.engine.jit(run, (self._split,), self._split)
    return self._median(program, self.engine.spread(np.arange(words, dtype=np.uint32)))

  def gradients(self, n: int) -> jax.Array:
    """Gradients of n entries for each worker."""
    return timing.gradients(self.engine, n, self._axis)(0)

  def arithmetic(self, collective: Collective, grads: jax.Array, n: int, budget: float) -> float:
    """Seconds of one update of n entries without its messages, while all workers compute."""
    return timing.alone(self.engine, self._watch, collective, grads, n, self.repetitions, self._axis, budget)[0]

  def latest(self, seconds: float) -> float:
    """The most of the `seconds` of all processes, so that they decide alike."""
    return float(self._watch.gather(seconds).max())

  def most(self, values: np.ndarray) -> np.ndarray:
    """Element-wise maximum of f32[m] over all processes."""
    rows = rows_of(self.engine, lambda x: x[0], (self._split,))
    return rows(self.engine.spread(values)).max(0)

  def _median(self, program: Callable, *arguments: Any) -> float:
    """Median seconds of a program, of few runs where each takes long."""
    first, _ = self._watch.time(program, *arguments)  # compiles
    times = [self._watch.time(program, *arguments)[0]]
    while len(times) < self.repetitions and sum(times) < 4 * _LONG:
      times.append(self._watch.time(program, *arguments)[0])
    return min(first, statistics.median(times))


def _links(measure: _Measure, n: int) -> tuple[float, float, float]:
  """(α, β, γ) of messages from each worker to its successor."""

  def chain(comm: Comm, x: jax.Array) -> jax.Array:
    for _ in range(_CHAIN):
      x = comm.shift(x, 1)
    return x

  alpha = measure.messages(chain, 4) / _CHAIN
  one = lambda comm, x: comm.shift(x, 1)
  words, seconds = _growing(lambda words: measure.messages(one, words), n)
  both = lambda comm, x: jnp.concatenate([comm.shift(x, 1), comm.shift(x + jnp.uint32(1), 1)])
  gamma = measure.messages(both, words) / seconds
  return alpha, _beyond(alpha, seconds) / (4 * words), gamma


def _all_reduce(measure: _Measure, n: int, dtype: jax.typing.DTypeLike = jnp.float32) -> tuple[float, float]:
  """(α, β) of the platform's all-reduce, per message and per byte of `all_reduce_cost`."""
  workers = measure.engine.workers
  reduce = lambda comm, x: comm.all_reduce(x.astype(dtype))
  latency = measure.messages(functools.partial(_reduced_again, dtype), 2 * workers) / _CHAIN
  entries, seconds = _growing(lambda words: measure.messages(reduce, words), n)
  cost = all_reduce_cost(entries, workers, jnp.dtype(dtype).itemsize)
  return latency / cost.messages, _beyond(latency, seconds) / cost.bytes


def _reduced_again(dtype: jax.typing.DTypeLike, comm: Comm, x: jax.Array) -> jax.Array:
  """A chain of all-reduces of values that differ between workers: of equal ones XLA would make a multiplication."""
  own = x.astype(dtype) + comm.rank.astype(dtype)
  total = own
  for _ in range(_CHAIN):
    total = comm.all_reduce(own + total * jnp.asarray(0.5, dtype))
  return total


def _beyond(latency: float, seconds: float) -> float:
  """Seconds of a long message minus the latency, at least 1 % of its seconds, since clocks are inexact."""
  return max(seconds - latency, 0.01 * seconds)


def _growing(seconds_of: Callable[[int], float], most: int) -> tuple[int, float]:
  """The first size up to `most` words, growing at most fourfold, that takes `_LONG` seconds; and its seconds."""
  words, most = 2**14, max(most, _SHORTEST)
  while (seconds := seconds_of(words)) < _LONG and words < most:
    # On a slow network the next size is the one that should take `_LONG`: four times as many words could take minutes.
    words = min(most, words * 4, max(2 * words, round(words * _LONG / seconds)))
  return words, seconds


def _algorithms(
  collectives: dict[str, Collective],
  measure: _Measure,
  n: int,
  reduce_beta: float,
  left: Callable[[], float],
  progress: Callable[[str], object] | None,
) -> dict[str, Algorithm]:
  """Measurements of each algorithm, by label, of as many as begin while seconds are `left`, and of at least one."""
  engine, labels = measure.engine, list(collectives)
  grads, fills, measured = measure.gradients(n), list[float](), dict[str, Algorithm]()
  remaining = left()
  for number, (label, collective) in enumerate(collectives.items()):
    if measured and remaining <= 0:
      warnings.warn(
        f"js.costs.fit: no time was left for {', '.join(labels[number:])}: they are not in the profile; give more "
        "seconds=, or those algorithms= that you choose among",
        stacklevel=3,
      )
      break
    if number == len(fills):  # simulations need no network, so as many processes do one each
      fills += _fills(labels[number : number + engine.processes], measure)
    jaxpr = schedule(collective, n, engine.workers)
    reducing, dtype = reduces(jaxpr, engine.workers), collective_of(label)[1].get("dtype")
    slowdown = _all_reduce(measure, n, dtype)[1] / reduce_beta if reducing and dtype else 1.0
    arithmetic = measure.arithmetic(collective, grads, n, budget=remaining / (len(labels) - number)) / n
    measured[label] = Algorithm(arithmetic, fills[number], reducing, count_agreements(jaxpr), slowdown)
    remaining = left()
    if progress and engine.process == 0:
      spent = f"{1e9 * arithmetic:.3g} ns an entry, {max(0.0, remaining):.0f} s left"
      progress(f"{number + 1} of {len(labels)}: {label}, {spent}")
  return measured


def _fills(labels: Sequence[str], measure: _Measure) -> list[float]:
  """`_fill` of at most as many algorithms as there are processes, each of which simulates one of them."""
  engine = measure.engine
  mine = [_fill(label, engine.workers) if number == engine.process else 0.0 for number, label in enumerate(labels)]
  return measure.most(np.array(mine, np.float32)).tolist()


def _fill(label: str, workers: int) -> float:
  """Measured words / predicted words for normally distributed gradients; 1 where message sizes are constant."""
  name, options = collective_of(label)
  collective = make_collective(name, **options)
  if not collective.sizes_vary or collective.needs_shapes:  # or they vary by leaves alone, and the larger ones count
    return 1.0
  grads = jax.random.normal(jax.random.key(0), (workers, _SHAPE), jnp.float32)
  state, words = None, 0.0
  for _ in range(2):  # the first step may differ: it computes new thresholds and regions
    done = simulate(name, grads, state=state, **options)
    state, words = done.state, float(done.metrics.words_sent)
  return words / max(1, predict(name, n=_SHAPE, workers=workers, **options).words)
