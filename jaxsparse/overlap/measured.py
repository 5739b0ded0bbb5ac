"""Measures the input of a planner: the backward time of each leaf, and the cost of a communication.

The order of the leaves is that of their gradients in the jaxpr of the gradient. A program that returns only the first
few gradients (a cut) computes only the part of backward that they need, so differences of cuts are backward times:

    forward                      |--------|
    the gradients of 2 leaves    |--------|--4--|--3--|
    of all                       |--------|--4--|--3--|--2--|--1--|--0--|

One compilation for each leaf would take too long. So there are a few cuts, and the seconds between two of them are
divided among their leaves in proportion to the operations of each leaf in the jaxpr.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

from jaxsparse._compat import AxisName, inner_jaxprs
from jaxsparse.collectives._base import check_whole
from jaxsparse.costs import Profile, advise, label_of
from jaxsparse.overlap.network import Link
from jaxsparse.train import timing
from jaxsparse.train.compiling import compiler_options
from jaxsparse.train.engine import check_batch, engine_of
from jaxsparse.train.sharded import training_engine
from jaxsparse.types import Comm

_WORD = 4  # bytes of an entry: float32 inside, whatever the parameters are
_LINKS = 8  # short all-reduces of a chain, which makes the overhead of the clock and of the call small
_SIDE, _PRODUCTS = 256, 16  # side of square matrices, and number of their products: some milliseconds
_LONGEST = 2**20  # words of the longest all-reduce
_CALLS = ("jit", "pjit", "checkpoint", "remat2", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")


class Layers(NamedTuple):
  """The leaves of a model for `js.overlap.plan`, the one whose gradient is ready last first.

  Attributes:
    names: path of each leaf in the parameters.
    order: number of each leaf in pytree order, for `js.bucketed_transform`.
    backward_times: seconds between the gradient of the following leaf and that of this leaf.
    sizes: bytes of each gradient.
    forward: seconds of the forward pass.

  Example:
    >>> Layers(("['w']",), (0,), (0.1,), (8.0,), 0.05).backward_times
    (0.1,)
  """

  names: tuple[str, ...]
  order: tuple[int, ...]
  backward_times: tuple[float, ...]
  sizes: tuple[float, ...]
  forward: float

  @property
  def at_the_end(self) -> "Layers":
    """The same leaves, all ready at the end of backward: for a runtime that overlaps nothing with arithmetic."""
    return self._replace(backward_times=(*[0.0] * (len(self.sizes) - 1), sum(self.backward_times)))


class Runtime(NamedTuple):
  """What a runtime overlaps.

  Attributes:
    start_ups: seconds of two independent short all-reduces over the seconds of one: 1 if they start at the same time; 2
      if one waits for the other, so that plans should have `ways=1`.
    hidden: fraction of an all-reduce that overlaps with independent arithmetic of the same duration, 0 to 1. Near 0,
      plan with `Layers.at_the_end`.

  Example:
    >>> Runtime(start_ups=2.0, hidden=0.0).hidden
    0.0
  """

  start_ups: float
  hidden: float


def measure(
  loss_fn: Callable[..., Any],
  params: optax.Params,
  batch: Any,
  mesh: Mesh | Comm,
  *,
  axis: AxisName = "workers",
  has_aux: bool = False,
  cuts: int = 8,
  repetitions: int = 5,
) -> Layers:
  """Measures the backward time of each leaf, while all workers compute and none sends.

  In a run of several processes every process must call, and all get the same numbers, those of the slowest process.
  Where a worker has several devices, the program is partitioned along them as that of the training step is.

  Args:
    loss_fn: as for `js.make_train_step`.
    params: the parameters; they keep their shardings inside a worker.
    batch: the batch of all workers, as for the training step.
    mesh: the workers, as for `js.init`.
    axis: of the mesh.
    has_aux: as for the training step.
    cuts: number of programs to compile and time, in addition to the forward pass; at most one for each leaf counts.
    repetitions: of each program, whose median counts.

  Returns:
    `Layers`.

  Raises:
    ValueError: for parameters without a leaf, a batch that the number of workers does not divide, or fewer than one cut
      or repetition.

  Example:
    >>> import jax, jax.numpy as jnp, jaxsparse as js
    >>> mesh = jax.make_mesh((2,), ("workers",), devices=jax.devices()[:2])
    >>> loss = lambda params, batch: jnp.sum(jnp.tanh(batch @ params["first"]) @ params["second"])
    >>> params = {"first": jnp.ones((8, 8)), "second": jnp.ones((8, 8))}
    >>> layers = js.overlap.measure(loss, params, jnp.ones((4, 8)), mesh, repetitions=2)
    >>> layers.names, layers.sizes
    (("['first']", "['second']"), (256.0, 256.0))
  """
  check_whole("measure", 1, cuts=cuts, repetitions=repetitions)
  leaves = jax.tree_util.tree_leaves_with_path(params)
  if not leaves:
    raise ValueError(f"measure: params={params!r} have no leaf")
  engine = training_engine(mesh, axis)
  check_batch(batch, engine, axis)
  split = PartitionSpec(axis)

  def gradients(params: optax.Params, batch: Any) -> list[jax.Array]:
    """One worker's loss and gradients, in pytree order."""
    value, grads = jax.value_and_grad(loss_fn, has_aux=has_aux)(params, batch)
    return [value[0] if has_aux else value, *jax.tree.leaves(grads)]

  of_each = lambda x: jax.ShapeDtypeStruct((len(x) // engine.held, *np.shape(x)[1:]), jnp.result_type(x))
  traced = jax.make_jaxpr(gradients, axis_env=list(engine.axes.items()))
  order, work = _backward(traced(params, jax.tree.map(of_each, batch)).jaxpr)
  bounds = _cuts(work, cuts)

  specs = (PartitionSpec(), split)
  arguments = engine.place((params, batch), specs)
  shardings = engine.shardings(arguments, specs), None  # of gradients those that they are computed with

  def cut(count: int) -> Callable:
    """The program of all workers that makes the gradients of the first `count` leaves."""
    wanted = [0, *(1 + leaf for leaf in order[:count])]
    some = lambda *arguments: [gradients(*arguments)[number][None] for number in wanted]
    return engine.jit(some, specs, split, shardings=shardings)

  seconds = _medians(
    timing.Stopwatch(engine.flat, axis), [cut(count) for count in (0, *bounds)], arguments, repetitions
  )
  times = _shared_out(work, bounds, np.diff(seconds).tolist())
  names = tuple(jax.tree_util.keystr(leaves[leaf][0]) for leaf in reversed(order))
  sizes = tuple(float(_WORD * jnp.size(leaves[leaf][1])) for leaf in reversed(order))
  return Layers(names, tuple(reversed(order)), tuple(reversed(times)), sizes, seconds[0])


def runtime_of(mesh: Mesh | Comm, *, axis: AxisName = "workers", repetitions: int = 5) -> Runtime:
  """Measures whether all-reduces overlap with each other and with arithmetic.

  In a run of several processes every process must call, and all get the same numbers.

  Args:
    mesh: the workers, as for `js.init`.
    axis: of the mesh.
    repetitions: of each measurement, whose median counts.

  Returns:
    A `Runtime`.

  Raises:
    ValueError: for one worker, which sends nothing, or fewer than one repetition.

  Example:
    >>> import jax, jaxsparse as js
    >>> mesh = jax.make_mesh((2,), ("workers",), devices=jax.devices()[:2])
    >>> 0 <= js.overlap.runtime_of(mesh, repetitions=1).hidden <= 1
    True
  """
  check_whole("runtime_of", 1, repetitions=repetitions)
  engine = engine_of(mesh, axis)
  if engine.workers < 2:
    raise ValueError("runtime_of: one worker sends nothing, give at least two workers")
  split, watch = PartitionSpec(axis), timing.Stopwatch(engine, axis)
  options = compiler_options(engine.platform)

  def seconds(function: Callable, words: int) -> float:
    program = engine.jit(lambda x: function(x[0])[None], (split,), split, options=options)
    rows = engine.spread(np.ones(words, np.float32))
    return statistics.median([watch.time(program, rows)[0] for _ in range(repetitions + 1)][1:])

  once = functools.partial(_chain, engine.comm)
  twice = lambda x: once(x) + once(2 * x)
  start_ups = seconds(twice, 2 * engine.workers) / seconds(once, 2 * engine.workers)
  arithmetic, reduce = seconds(_arithmetic, _SIDE**2), lambda x: engine.comm.all_reduce(x)
  words = _SIDE**2
  while (sending := seconds(reduce, words)) < arithmetic and words < _LONGEST:
    words = min(_LONGEST, max(2 * words, round(words * arithmetic / sending)))
  both = seconds(functools.partial(_beside, reduce), words)
  return Runtime(start_ups, min(1.0, max(0.0, (arithmetic + sending - both) / min(arithmetic, sending))))


def _chain(comm: Comm, x: jax.Array) -> jax.Array:
  """A chain of short all-reduces, each of values that differ between workers."""
  own = x + comm.rank.astype(jnp.float32)
  for _ in range(_LINKS):
    x = comm.all_reduce(own + 0.5 * x)
  return x


def _arithmetic(x: jax.Array) -> jax.Array:
  """A chain of matrix products, as in backward."""
  square = x[: _SIDE**2].reshape(_SIDE, _SIDE)
  for _ in range(_PRODUCTS):
    square = jnp.tanh(square @ square)
  return jnp.pad(square.reshape(-1), (0, x.size - _SIDE**2))


def _beside(reduce: Callable, x: jax.Array) -> jax.Array:
  """An all-reduce that can start after one matrix product, and a chain of products independent of it."""
  first = jnp.tanh(x[: _SIDE**2].reshape(_SIDE, _SIDE) @ x[: _SIDE**2].reshape(_SIDE, _SIDE))
  return reduce(x + first[0, 0]) + _arithmetic(x)


def link_of(profile: Profile, name: str = "dense", **config: Any) -> Link:
  """The cost of a communication from a profile: α, β and γ of one update of a collective, arithmetic included.

  `js.costs.advise` predicts the seconds of an update of n entries, a linear function of n: α is its constant, β its
  slope per byte of the gradient.

  Args:
    profile: from `js.costs.fit`, on the workers and the network of the training run.
    name: of a collective in the profile.
    **config: its options, as in the profile.

  Returns:
    A `Link`; `**link._asdict()` are the arguments of `js.overlap.plan`.

  Raises:
    ValueError: if the profile has no such collective, naming those that it has.

  Example:
    >>> import jaxsparse as js
    >>> profile = js.costs.Profile(workers=4, alpha=1e-4, beta=8e-9, gamma=1.5, reduce_alpha=1e-4, reduce_beta=8e-9,
    ...   entries=2**20, algorithms={"dense": js.costs.Algorithm(0.0, reduces=True)})
    >>> link = js.overlap.link_of(profile)
    >>> round(link.alpha, 6), round(link.beta, 12), link.gamma  # 4 messages; 2 · 3/4 bytes sent for each byte
    (0.0004, 1.2e-08, 1.5)
  """
  label = label_of(name, config)
  if label not in profile.algorithms:
    raise ValueError(f"link_of: the profile has no {label!r}, choose one of {', '.join(profile.algorithms)}")
  n = 2**24  # so large that rounding to whole words does not matter
  once, twice = (_seconds_of(label, entries, profile) for entries in (n, 2 * n))
  beta = (twice - once) / (_WORD * n)
  return Link(max(0.0, once - _WORD * n * beta), beta, max(1.0, profile.gamma))


def _seconds_of(label: str, n: int, profile: Profile) -> float:
  return next(one.seconds for one in advise(n, profile).predictions if one.label == label)


def _backward(jaxpr: core.Jaxpr) -> tuple[list[int], list[float]]:
  """Leaves in the order of their gradients in the jaxpr of (loss, *gradients), and operations of backward for each."""
  done = [0.0]  # operations before each equation, and at the end
  loss, *places = _made(jaxpr, [-1] * len(jaxpr.invars), done)
  order = sorted(range(len(places)), key=lambda leaf: (places[leaf], -leaf))
  reached = list(itertools.accumulate((done[max(loss, places[leaf]) + 1] for leaf in order), max))
  return order, np.diff([done[loss + 1], *reached]).tolist()


def _made(jaxpr: core.Jaxpr, given: Sequence[int], done: list[float]) -> list[int]:
  """Number of the equation that makes each result, −1 for an input; equations of calls count as if inlined.

  Args:
    jaxpr: of a function, or of a call in it.
    given: number of the equation that makes each of its inputs.
    done: number of operations before each equation so far; this function appends those of its equations.
  """
  made = dict(zip(jaxpr.invars, given, strict=True))
  place = lambda var: -1 if isinstance(var, core.Literal) else made.get(var, -1)
  for equation in jaxpr.eqns:
    inner = list(inner_jaxprs(equation.params)) if equation.primitive.name in _CALLS else []
    if len(inner) == 1 and len(inner[0].invars) == len(equation.invars):
      places = _made(inner[0], list(map(place, equation.invars)), done)
    else:
      constant = all(isinstance(var, core.Literal) for var in equation.invars)  # zeros, for example
      places = [-1 if constant else len(done) - 1] * len(equation.outvars)
      done.append(done[-1] + _operations(equation))
    made.update(zip(equation.outvars, places, strict=True))
  return list(map(place, jaxpr.outvars))


def _operations(equation: core.JaxprEqn) -> float:
  """Estimated operations of an equation: 2 for each multiplication of a product or convolution, else 1 per entry."""
  inner = sum(_operations(one) for jaxpr in inner_jaxprs(equation.params) for one in jaxpr.eqns)
  if inner:
    return inner * equation.params.get("length", 1)
  shapes, outs = ([_shape(var) for var in some] for some in (equation.invars, equation.outvars))
  out = float(sum(map(math.prod, outs)))
  if equation.primitive.name == "dot_general":
    (contracted, _), _ = equation.params["dimension_numbers"]
    return 2 * out * math.prod(shapes[0][axis] for axis in contracted)
  if equation.primitive.name == "conv_general_dilated":
    kernel, numbers = shapes[1], equation.params["dimension_numbers"].rhs_spec
    return 2 * out * math.prod(kernel) / kernel[numbers[0]]
  return out


def _shape(var: Any) -> tuple[int, ...]:
  return getattr(var.aval, "shape", ())


def _cuts(work: Sequence[float], cuts: int) -> list[int]:
  """Numbers of leaves of the cuts, increasing, with about the same work between consecutive cuts."""
  count = len(work)
  if count <= cuts:
    return list(range(1, count + 1))
  done = np.cumsum(work)
  shares = np.searchsorted(done, done[-1] * np.arange(1, cuts) / cuts) + 1
  return sorted({*np.minimum(shares, count).tolist(), count})


def _medians(
  watch: timing.Stopwatch, programs: Sequence[Callable], arguments: Sequence[Any], repetitions: int
) -> list[float]:
  """Median seconds of programs, each of which includes the work of the one before; repetitions are interleaved."""
  rounds = [[watch.time(program, *arguments)[0] for program in programs] for _ in range(repetitions + 1)]
  return list(itertools.accumulate(map(statistics.median, zip(*rounds[1:], strict=True)), max))


def _shared_out(work: Sequence[float], bounds: Sequence[int], seconds: Sequence[float]) -> list[float]:
  """Divides the seconds between cuts among their leaves, in proportion to the work of each."""
  times: list[float] = []
  for (first, last), total in zip(itertools.pairwise([0, *bounds]), seconds, strict=True):
    some = sum(work[first:last])
    times += [total * one / some if some else total / (last - first) for one in work[first:last]]
  return times
