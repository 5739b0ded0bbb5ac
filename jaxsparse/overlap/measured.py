"""Measures the input of a planner: the backward time of each leaf.

The order of the leaves is that of their gradients in the jaxpr of the gradient. A
program that returns only the first few gradients (a cut) computes only the part of
backward that they need, so differences of cuts are backward times:

    forward                      |--------|
    the gradients of 2 leaves    |--------|--4--|--3--|
    of all                       |--------|--4--|--3--|--2--|--1--|--0--|

One compilation for each leaf would take too long. So there are a few cuts, and the
seconds between two of them are divided among their leaves in proportion to the
operations of each leaf in the jaxpr.
"""

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
from jaxsparse.train import timing
from jaxsparse.train.engine import Engine, check_batch, engine_of
from jaxsparse.types import Comm, check_whole

_WORD = 4  # bytes of an entry: float32 inside, whatever the parameters are
_CALLS = (
  "jit",
  "pjit",
  "checkpoint",
  "remat2",
  "closed_call",
  "core_call",
  "custom_jvp_call",
  "custom_vjp_call",
)


class Layers(NamedTuple):
  """The leaves of a model for `js.overlap.plan`, the one whose gradient is ready last first.

  Attributes:
    names: path of each leaf in the parameters.
    order: number of each leaf in pytree order, for `js.bucketed_transform`.
    backward_times: seconds between the gradient of the following leaf and that of this
      leaf.
    sizes: bytes of each gradient.
    forward: seconds of the forward pass.

  Example:
    >>> layers = Layers(("['b']", "['w']"), (0, 1), (0.1, 0.3), (8.0, 64.0), forward=0.2)
    >>> layers.backward_times, layers.at_the_end.backward_times  # the last layer comes first
    ((0.1, 0.3), (0.0, 0.4))
  """

  names: tuple[str, ...]
  order: tuple[int, ...]
  backward_times: tuple[float, ...]
  sizes: tuple[float, ...]
  forward: float

  @property
  def at_the_end(self) -> "Layers":
    """The same leaves, all ready at the end of backward: for a runtime that overlaps nothing with arithmetic."""
    nothing = [0.0] * (len(self.sizes) - 1)
    return self._replace(backward_times=(*nothing, sum(self.backward_times)))


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

  In a run of several processes every process must call, and all get the same numbers,
  those of the slowest process. Where a worker has several devices, the program is
  partitioned along them as that of the training step is.

  Args:
    loss_fn: as for `js.make_train_step`.
    params: the parameters; they keep their shardings inside a worker.
    batch: the batch of all workers, as for the training step.
    mesh: the workers, as for `js.init`.
    axis: of the mesh.
    has_aux: as for the training step.
    cuts: number of programs to compile and time, in addition to the forward pass; at
      most one for each leaf counts.
    repetitions: of each program, whose median counts.

  Raises:
    ValueError: for parameters without a leaf, a batch that the number of workers does
      not divide, or fewer than one cut or repetition.

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
  engine = engine_of(mesh, axis)
  check_batch(batch, engine)
  specs = PartitionSpec(), PartitionSpec(axis)
  gradients = _gradients_of(loss_fn, has_aux)
  # done[i]: operations until the first i gradients in this order are ready
  order, done = order_backward(_trace(gradients, engine, params, batch))
  # How many leaves each program computes the gradients of, in the order of backward.
  bounds = choose_cuts(done, cuts)
  arguments = engine.place((params, batch), specs)
  # Gradients keep the shardings that they are computed with.
  shardings = engine.shardings(arguments, specs), None
  # `gradients` returns the loss, result 0, and gradients, result 1 + leaf. A program
  # returns the loss and the `count` gradients that are ready first; 0: forward alone.
  results = [0, *(1 + leaf for leaf in order)]
  # specs[1]: each result has a row for each worker, as the batch has.
  programs = [
    engine.jit(
      _chosen(gradients, results[: 1 + count]), specs, specs[1], shardings=shardings
    )
    for count in (0, *bounds)
  ]
  medians = _median_seconds(engine, programs, arguments, repetitions)
  # Each program includes the work of the one before: fewer seconds would be noise.
  seconds = list(itertools.accumulate(medians, max))
  # Differences of the times at which gradients are ready. Between two cuts these times
  # are interpolated in proportion to operations.
  times = np.diff(np.interp(done, done[[0, *bounds]], seconds))
  names = [jax.tree_util.keystr(path) for path, _ in leaves]
  sizes = [float(_WORD * jnp.size(leaf)) for _, leaf in leaves]
  # From the order of backward to that of layers, the last ready gradient first.
  order = order[::-1]
  return Layers(
    tuple(names[leaf] for leaf in order),
    tuple(order),
    tuple(times[::-1].tolist()),
    tuple(sizes[leaf] for leaf in order),
    seconds[0],
  )


def _gradients_of(loss_fn: Callable, has_aux: bool) -> Callable:
  """`(params, batch) -> [loss, *gradients]` of one worker, in pytree order."""
  value_and_grad = jax.value_and_grad(loss_fn, has_aux=has_aux)

  def gradients(params: optax.Params, batch: Any) -> list[jax.Array]:
    value, grads = value_and_grad(params, batch)
    return [value[0] if has_aux else value, *jax.tree.leaves(grads)]

  return gradients


def _trace(
  gradients: Callable, engine: Engine, params: optax.Params, batch: Any
) -> core.Jaxpr:
  """The jaxpr of `gradients(params, batch)` at one worker."""
  # Shapes alone: nothing of the batch is computed. The batch has the rows of `held`
  # workers: of all or, under MPI, of one.
  rows_of_worker = lambda x: (len(x) // engine.held, *x.shape[1:])
  own_batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(rows_of_worker(x), jnp.result_type(x)), batch
  )
  axes = list(engine.axes.items())
  return jax.make_jaxpr(gradients, axis_env=axes)(params, own_batch).jaxpr


def _chosen(gradients: Callable, indices: Sequence[int]) -> Callable:
  """Some of the results of `gradients`, each as a row of a worker."""
  return lambda *arguments: [gradients(*arguments)[index][None] for index in indices]


def _median_seconds(
  engine: Engine, programs: Sequence[Callable], arguments: Any, repetitions: int
) -> list[float]:
  """The median seconds of each program, run in turn; the first round compiles and does not count."""
  # In turn, so that a disturbance of the machine hits all of them. `time` returns the
  # seconds first; `flat`, with a worker for each device, waits for all of them.
  watch = timing.Stopwatch(engine.flat)
  rounds = [
    [watch.time(program, *arguments)[0] for program in programs]
    for _ in range(repetitions + 1)
  ]
  return [statistics.median(times) for times in zip(*rounds[1:], strict=True)]


def order_backward(jaxpr: core.Jaxpr) -> tuple[list[int], np.ndarray]:
  """The order in which the jaxpr of (loss, *gradients) computes the gradients, and the operations until each of them.

  Returns:
    The numbers of the leaves in the order of their gradients; and f64[leaves + 1],
    estimated operations of backward before the first gradient, 0, and after each. To
    each its index is added, so that they increase strictly.
  """
  # Operations before each equation, and at the end; `_find_makers` appends them.
  done = [0.0]
  # the number of the equation that makes each result, −1 for an input or a constant
  loss, *makers = _find_makers(jaxpr, [-1] * len(jaxpr.invars), done)
  # If one equation makes several gradients, the later leaf comes first, as in backward.
  order = sorted(range(len(makers)), key=lambda leaf: (makers[leaf], -leaf))
  # Equations up to the loss are the forward pass: a gradient made there is ready when
  # backward begins.
  last_equations = [loss, *(max(loss, makers[leaf]) for leaf in order)]
  # Operations up to and including an equation; none for −1.
  operations = [done[equation + 1] for equation in last_equations]
  reached = np.maximum.accumulate(operations)
  return order, reached - reached[0] + np.arange(len(reached))


def _find_makers(
  jaxpr: core.Jaxpr, makers_of_inputs: Sequence[int], done: list[float]
) -> list[int]:
  """Number of the equation that makes each result, −1 for an input or a constant; calls count as if inlined.

  Args:
    jaxpr: the jaxpr of the whole function, or of a call in it.
    makers_of_inputs: number of the equation that makes each of its inputs, −1 for none.
    done: done[e] operations before equation e, done[e + 1] after it, for all equations
      so far. This function appends an element for each of its equations.
  """
  # the equation that makes each variable
  makers = dict(zip(jaxpr.invars, makers_of_inputs, strict=True))
  find = lambda var: -1 if isinstance(var, core.Literal) else makers.get(var, -1)
  for equation in jaxpr.eqns:
    inner = (
      list(inner_jaxprs(equation.params)) if equation.primitive.name in _CALLS else []
    )
    # The body of a call with the same operands: its equations are numbered in line.
    if len(inner) == 1 and len(inner[0].invars) == len(equation.invars):
      numbers = _find_makers(inner[0], list(map(find, equation.invars)), done)
    else:
      # An equation of literals alone makes a constant, as `jnp.zeros` does.
      constant = all(isinstance(var, core.Literal) for var in equation.invars)
      numbers = [-1 if constant else len(done) - 1] * len(equation.outvars)
      done.append(done[-1] + _count_operations(equation))
    makers.update(zip(equation.outvars, numbers, strict=True))
  return list(map(find, jaxpr.outvars))


def _count_operations(equation: core.JaxprEqn) -> float:
  """Estimated operations of an equation: 2 for each multiplication of a product or convolution, else 1 per entry."""
  # operations of the bodies of a loop, a branch or a call
  inner = sum(
    _count_operations(called)
    for jaxpr in inner_jaxprs(equation.params)
    for called in jaxpr.eqns
  )
  if inner:
    # A scan runs its body `length` times; the bodies of other equations count once.
    return inner * equation.params.get("length", 1)
  shape_of = lambda var: getattr(var.aval, "shape", ())
  shapes = list(map(shape_of, equation.invars))
  out = float(sum(math.prod(shape_of(var)) for var in equation.outvars))
  if equation.primitive.name == "dot_general":
    (contracted, _), _ = equation.params["dimension_numbers"]
    return 2 * out * math.prod(shapes[0][axis] for axis in contracted)
  if equation.primitive.name == "conv_general_dilated":
    kernel = shapes[1]
    numbers = equation.params["dimension_numbers"].rhs_spec
    # the multiplications of one output entry: the kernel without its output channels
    return 2 * out * math.prod(kernel) / kernel[numbers[0]]
  return out


def choose_cuts(done: np.ndarray, cuts: int) -> list[int]:
  """How many gradients each cut computes, increasing, with about the same work between consecutive cuts.

  Args:
    done: f64[leaves + 1], operations of backward before the first gradient and after
      each, strictly increasing.
    cuts: maximum number of cuts.
  """
  count = len(done) - 1
  if count <= cuts:
    return list(range(1, count + 1))
  # the last cut is that of all leaves
  even = done[-1] * np.arange(1, cuts) / cuts
  return sorted({*np.searchsorted(done, even).tolist(), count})
