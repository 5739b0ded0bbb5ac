"""Measures what the cost model needs, on the workers and the network that will be used."""

import dataclasses
import functools
import json
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxsparse._compat import AxisName
from jaxsparse.collectives import Collective, collective_names, collective_options, make_collective
from jaxsparse.collectives._labels import collective_of, label_of
from jaxsparse.comm import all_reduce_cost
from jaxsparse.costs.counting import count_agreements, predict, reduces, schedule
from jaxsparse.train import timing
from jaxsparse.train.engine import Engine, engine_of, rows_of
from jaxsparse.train.simulation import simulate
from jaxsparse.types import Comm

_LONG = 0.3  # seconds: a message that takes this long shows its bandwidth
_SHORTEST = 2**18  # words that a message may always grow to: less shows no bandwidth
_CHAIN = 8  # messages one after the other, so that the clock and the call count little
_SHAPE = 2**16  # entries of the simulated gradients that show how full messages are


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """What `fit` measured of one algorithm at one density.

  Attributes:
    arithmetic: seconds per gradient entry of an update without its messages: residual, selection, sums and the total,
      with all workers at work at once.
    fill: words that normal gradients fill, as a share of the formula's words, which are an upper bound where the sizes
      of messages vary.
    reduces: whether the platform's all-reduce carries it.
    agreements: all-reduces of a few integers before or between its messages.

  Example:
    >>> Algorithm(arithmetic=1e-8).fill
    1.0
  """

  arithmetic: float
  fill: float = 1.0
  reduces: bool = False
  agreements: int = 0


@dataclasses.dataclass(frozen=True)
class Profile:
  """What `fit` measured: all that `advise` needs to know of a machine and its network.

  Attributes:
    workers: number of workers P.
    alpha: seconds of one message, however short.
    beta: seconds of each byte of a message.
    gamma: two messages at once take so many times as long as one, 1 to 2 (or more, where they hinder each other).
    reduce_alpha: seconds of each of the 2⌈log₂P⌉ messages of the platform's all-reduce.
    reduce_beta: seconds of each byte that a worker sends in it.
    entries: n of the gradients that the arithmetic was timed with.
    algorithms: what was measured of each, by label.

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

  def seconds(self, messages: float, size: float) -> float:
    """Seconds of so many messages one after the other, with `size` bytes in all."""
    return messages * self.alpha + size * self.beta

  def save(self, path: str | pathlib.Path) -> None:
    """Writes it as JSON."""
    pathlib.Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2))

  @classmethod
  def load(cls, path: str | pathlib.Path) -> Self:
    """Reads what `save` wrote."""
    read = json.loads(pathlib.Path(path).read_text())
    return cls(**read | {"algorithms": {label: Algorithm(**one) for label, one in read["algorithms"].items()}})


def fit(
  mesh: Mesh | Comm,
  *,
  axis: AxisName = "workers",
  n: int = 2**22,
  densities: Sequence[float] = (0.01,),
  algorithms: Sequence[str] | None = None,
  repetitions: int = 5,
) -> Profile:
  """Measures α, β, γ, the all-reduce, and the arithmetic of every algorithm, with all workers in step.

  Takes about a minute or two, most of it to compile. In a run of many processes each of them calls it.

  Args:
    mesh: the workers, as for `js.init`.
    axis: of the mesh.
    n: gradient entries to time the arithmetic with, and words of the longest message. Both are taken to grow in
      proportion: the closer to your model's, the better.
    densities: the densities that `advise` is to choose among.
    algorithms: names, with options as in "spardl:teams=2"; by default all that average gradients, SparDL with every
      number of teams.
    repetitions: of each measurement; medians count.

  Raises:
    ValueError: for one worker alone, which has no wire, or an algorithm that does not fit the workers.

  Example:
    >>> import jax, jaxsparse as js
    >>> mesh = jax.make_mesh((2,), ("workers",), devices=jax.devices()[:2])
    >>> profile = js.costs.fit(mesh, n=2**12, algorithms=["dense", "spardl"], repetitions=2)
    >>> profile.alpha > 0 and profile.beta > 0 and profile.algorithms["spardl:density=0.01"].arithmetic > 0
    True
  """
  engine = engine_of(mesh, axis)
  if engine.workers < 2:
    raise ValueError("fit: one worker alone has no wire to measure, give at least two")
  names = candidates(engine.workers, densities) if algorithms is None else _with_densities(algorithms, densities)
  measure = _Measure(engine, axis, repetitions)
  alpha, beta, gamma = _links(measure, n)
  reduce_alpha, reduce_beta = _all_reduce(measure, n)
  measured = _algorithms(names, measure, n, reduce_beta)
  return Profile(engine.workers, alpha, beta, gamma, reduce_alpha, reduce_beta, n, measured)


def candidates(workers: int, densities: Sequence[float]) -> list[str]:
  """Every algorithm that averages gradients, SparDL with every number of teams, at every density.

  A2SGD is not among them: its workers go on with gradients of their own, which is another way to train.

  Example:
    >>> candidates(4, [0.01])[-3:]
    ['spardl:teams=2:density=0.01', 'spardl:teams=4:density=0.01', 'dense:dtype=bfloat16']
  """
  averaging = [name for name in collective_names() if make_collective(name, **_least(name)).replicates]
  teams = [f"spardl:teams={teams}" for teams in range(2, workers + 1) if workers % teams == 0]
  return _with_densities([*averaging, *teams, "dense:dtype=bfloat16"], densities)


def _least(name: str) -> dict[str, Any]:
  return {"density": 1.0} if "density" in collective_options(name) else {}


def _with_densities(labels: Sequence[str], densities: Sequence[float]) -> list[str]:
  result = []
  for label in labels:
    name, config = collective_of(label)
    lacks = "density" in collective_options(name) and not {"density", "k"} & set(config)
    result += [label_of(name, config | {"density": density}) for density in densities] if lacks else [label]
  return result


class _Measure:
  """Medians of programs of all workers."""

  def __init__(self, engine: Engine, axis: AxisName, repetitions: int):
    self.engine, self.repetitions = engine, repetitions
    self._axis, self._split = axis, PartitionSpec(axis)
    self._watch = timing.Stopwatch(engine, axis)

  def messages(self, function: Callable[[Comm, jax.Array], Any], words: int) -> float:
    """Seconds of `function` of a comm and a u32[words]; a message that takes long is timed once."""
    run = lambda x: function(self.engine.comm, x[0])[None]
    program = self.engine.jit(run, (self._split,), self._split)
    return self._median(program, self.engine.spread(np.arange(words, dtype=np.uint32)))

  def gradients(self, n: int) -> jax.Array:
    """Gradients of n entries at each worker."""
    return timing.gradients(self.engine, n, self._axis)(0)

  def arithmetic(self, collective: Collective, grads: jax.Array, n: int) -> float:
    """Seconds of one update of n entries, all workers at work at once, none of them sending."""
    return timing.alone(self.engine, self._watch, collective, grads, n, self.repetitions, self._axis)[0]

  def most(self, values: np.ndarray) -> np.ndarray:
    """The largest of what the processes have at each place of f32[m]."""
    rows = rows_of(self.engine, lambda x: x[0], (self._split,))
    return rows(self.engine.spread(values)).max(0)

  def _median(self, program: Callable, *arguments: Any) -> float:
    first, _ = self._watch.time(program, *arguments)  # compiles
    times = [self._watch.time(program, *arguments)[0]]
    while len(times) < self.repetitions and sum(times) < 4 * _LONG:
      times.append(self._watch.time(program, *arguments)[0])
    return min(first, statistics.median(times))


def _links(measure: _Measure, n: int) -> tuple[float, float, float]:
  """(α, β, γ) of messages from each worker to the next."""

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
  """(α, β) of the platform's all-reduce, to go with the messages and words that formulas say of it."""
  workers = measure.engine.workers
  reduce = lambda comm, x: comm.all_reduce(x.astype(dtype))
  latency = measure.messages(functools.partial(_reduced_again, dtype), 2 * workers) / _CHAIN
  entries, seconds = _growing(lambda words: measure.messages(reduce, words), n)
  cost = all_reduce_cost(entries, workers, jnp.dtype(dtype).itemsize)
  return latency / cost.messages, _beyond(latency, seconds) / cost.bytes


def _reduced_again(dtype: jax.typing.DTypeLike, comm: Comm, x: jax.Array) -> jax.Array:
  """All-reduces one after the other, each of something that differs between workers: else compilers just multiply."""
  own = x.astype(dtype) + comm.rank.astype(dtype)
  total = own
  for _ in range(_CHAIN):
    total = comm.all_reduce(own + total * jnp.asarray(0.5, dtype))
  return total


def _beyond(latency: float, seconds: float) -> float:
  """What a long message takes beyond a short one; a little at least, for the clock may see nothing."""
  return max(seconds - latency, 0.01 * seconds)


def _growing(seconds_of: Callable[[int], float], most: int) -> tuple[int, float]:
  """The first size, growing fourfold up to `most` words, that takes long enough to show its bandwidth; its seconds."""
  words, most = 2**14, max(most, _SHORTEST)
  while (seconds := seconds_of(words)) < _LONG and words < most:
    # Not beyond what takes about as long as wanted: on a slow network four times as much would take four times as long.
    words = min(most, words * 4, max(2 * words, round(words * _LONG / seconds)))
  return words, seconds


def _algorithms(labels: Sequence[str], measure: _Measure, n: int, reduce_beta: float) -> dict[str, Algorithm]:
  engine = measure.engine
  # Simulations need no network, so each process does some of them for all.
  turn = lambda number: number % engine.processes == engine.process
  mine = [_fill(label, engine.workers) if turn(number) else 0.0 for number, label in enumerate(labels)]
  fills = measure.most(np.array(mine, np.float32))
  grads, measured = measure.gradients(n), {}
  for label, fill in zip(labels, fills.tolist(), strict=True):
    name, options = collective_of(label)
    collective = make_collective(name, **options)
    jaxpr = schedule(collective, _SHAPE, engine.workers)
    reducing = reduces(jaxpr, engine.workers)
    if reducing and (dtype := options.get("dtype")):  # a platform may send more than the type says: XLA on CPU does
      fill = _all_reduce(measure, n, dtype)[1] / reduce_beta
    measured[label] = Algorithm(measure.arithmetic(collective, grads, n) / n, fill, reducing, count_agreements(jaxpr))
  return measured


def _fill(label: str, workers: int) -> float:
  """The share of the formula's words that normal gradients fill, where the sizes of messages vary from step to step."""
  name, options = collective_of(label)
  if not make_collective(name, **options).sizes_vary:
    return 1.0
  grads = jax.random.normal(jax.random.key(0), (workers, _SHAPE), jnp.float32)
  state, words = None, 0.0
  for _ in range(2):  # the first step may be a special one: thresholds and regions are new
    done = simulate(name, grads, state=state, **options)
    state, words = done.state, float(done.metrics.words_sent)
  return words / max(1, predict(name, n=_SHAPE, workers=workers, **options).words)
