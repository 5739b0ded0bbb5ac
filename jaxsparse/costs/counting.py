"""The messages and words of an update, counted from its jaxpr and predicted by the paper's formula.

The jaxpr of a collective *is* its schedule. It is traced on an abstract mesh of any
number of workers, without arrays or devices.
"""

import math
import numbers
import re
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from jaxsparse._compat import inner_jaxprs
from jaxsparse.arrays.flatten import without_arrays
from jaxsparse.collectives import Collective, make_collective, make_plain
from jaxsparse.collectives._base import collective_of
from jaxsparse.comm import AxisComm, agreement_messages, all_reduce_cost
from jaxsparse.transform.shards import share_of
from jaxsparse.transform.update import init_state, reduce_step
from jaxsparse.types import ArrayTree, Cost, check_whole

Branch = Literal["most", "least", "every"]

Entries = int | ArrayTree
"""A number of gradient entries, or the parameters that have as many."""

# The name of an axis without devices, for tracing.
_AXIS = "workers"
# Names of all-reduces in several versions of JAX, and under a checked shard_map.
_ALL_REDUCES = ("psum", "psum2", "psum_invariant", "pmax", "pmin")


def count(
  name: str | Collective,
  *,
  n: Entries,
  workers: int,
  devices: int = 1,
  **config: Any,
) -> Cost:
  """The messages and words that one worker sends for one update, counted from the jaxpr.

  Args:
    name: one of `js.collective_names()`, or a collective of your own.
    n: number of gradient entries; or the parameters, a pytree of arrays or of
      `jax.ShapeDtypeStruct`, for a collective whose words depend on the shapes of
      leaves. The devices of a worker then divide each leaf.
    workers: number of workers P.
    devices: number of devices S of a worker. Each of them sends the messages of ⌈n/S⌉
      entries to other workers, and the cost is that of one device; `count_inside`
      counts its messages to the other devices of its worker.
    **config: the options of the collective.

  Raises:
    ValueError: for sizes below 1, a number n where shapes are needed, or a
      configuration that is rejected.

  Example:
    >>> import jaxsparse as js
    >>> js.costs.count("spardl", n=2**27, workers=8, density=0.001)
    Cost(messages=6, words=469784, agreements=0)
    >>> params = {"bias": jnp.zeros(100), "w": jnp.zeros((300, 100))}
    >>> js.costs.count("powersgd", n=params, workers=2, rank=1)
    Cost(messages=4, words=500, agreements=0)
    >>> js.costs.count("spardl", n=2**27, workers=8, devices=8, density=0.001)
    Cost(messages=6, words=58744, agreements=0)
  """
  # `entries` are those of one device, after the devices of a worker have divided n.
  collective, entries = make_sized(name, n, workers, devices, **config)
  return count_jaxpr(schedule(collective, entries, workers), workers)


def predict(
  name: str | Collective,
  *,
  n: Entries,
  workers: int,
  devices: int = 1,
  **config: Any,
) -> Cost:
  """The messages and words of one update by the formula of `Collective.cost`; arguments as for `count`.

  Example:
    >>> import jaxsparse as js
    >>> js.costs.predict("dense", n=1000, workers=8)
    Cost(messages=6, words=1750, agreements=0)
  """
  collective, entries = make_sized(name, n, workers, devices, **config)
  return collective.cost(entries, workers)


def count_update(
  tx: optax.GradientTransformation,
  params: ArrayTree,
  *,
  workers: int,
  axis: str = "workers",
) -> Cost:
  """The messages and words that one worker sends for one update of any chain, counted from the jaxpr.

  For local steps (`js.local_steps`) it is the cost of one exchange, for fragments
  (`js.streaming_diloco`) the cost of the exchanges of all fragments.
  `Cost.words_per_step` divides the words among the steps.

  Args:
    tx: any optax chain with jaxsparse transforms over `axis`.
    params: arrays, or `jax.ShapeDtypeStruct`.
    workers: number of workers P.
    axis: the name of the axis of the workers.

  Raises:
    TypeError: for an axis that is no name of a single axis.

  Example:
    >>> import optax, jaxsparse as js
    >>> params = {"w": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}
    >>> cost = count_update(js.diloco(optax.sgd(0.1), "workers", every=500), params, workers=8)
    >>> cost.words, cost.words_per_step(every=500)
    (1750000, 3500.0)
  """
  check_whole("count_update", 1, workers=workers)
  if not isinstance(axis, str):
    raise TypeError(
      f"count_update: axis={axis!r}, give the name of one axis, over which tx and workers= count"
    )

  # Without shardings: a worker sends the same words however parameters lie on a mesh.
  params = without_arrays(params)

  def counted(**extra: Any) -> Cost:
    def worker(params: optax.Params) -> optax.Updates:
      update = optax.with_extra_args_support(tx).update
      # Parameters stand for the gradients; some optax transforms need a loss, `value`.
      # The state is made inside, where the axis exists.
      return update(params, tx.init(params), params, value=jnp.float32(0), **extra)[0]

    return count_jaxpr(
      jax.make_jaxpr(worker, axis_env=[(axis, workers)])(params).jaxpr, workers
    )

  # With fragments a step exchanges one of them, and `synchronize=True` all. With
  # `every=1` a step exchanges, and `synchronize=True` nothing. The larger cost counts.
  return max(counted(), counted(synchronize=True), key=lambda cost: cost.words)


def lacks_shapes(label: str, n: Entries) -> bool:
  """Whether the words of an algorithm depend on the shapes of leaves, and n is a number of entries."""
  return (
    isinstance(n, numbers.Integral)
    and make_plain(collective_of(label)[0]).traits.needs_shapes
  )


def count_inside(params: Entries, *, devices: int) -> Cost:
  """The messages and words that a device sends to the other devices of its worker for one update.

  After the exchange between workers each device has 1/S of each leaf. The devices
  gather the leaves that are replicated inside the worker, and agree on one number,
  whether the step is skipped. Sharded leaves cost nothing.

  Args:
    params: the parameters with their shardings, or their number, for sharded ones.
    devices: number of devices S of a worker.

  Example:
    >>> count_inside({"w": jnp.zeros((10, 100))}, devices=8)
    Cost(messages=3, words=875, agreements=6)
  """
  check_whole("count_inside", 1, devices=devices)
  # Entries, of a word each, that a device gathers; it sends as many.
  received = 0
  # A number of entries tells no shardings: nothing counts as gathered.
  for leaf in [] if isinstance(params, numbers.Integral) else jax.tree.leaves(params):
    sharding = getattr(leaf, "sharding", None)
    # A leaf without a sharding is replicated: each device holds all of it.
    held = sharding.shard_shape(leaf.shape) if sharding else leaf.shape
    # What a device holds beyond its own part came from the others.
    own = -(-math.prod(leaf.shape) // devices)
    # 0 for a leaf that is sharded over more devices than these.
    received += max(0, math.prod(held) - own)
  # An all-gather of ⌈log₂ S⌉ rounds.
  messages = (devices - 1).bit_length() if received else 0
  return Cost(messages, received, agreements=agreement_messages(devices))


def schedule(collective: Collective, n: int, workers: int) -> core.Jaxpr:
  """The jaxpr of one update of one of `workers` workers, traced without devices.

  Example:
    >>> import jaxsparse as js
    >>> jaxpr = schedule(js.make_collective("spardl", k=8), n=64, workers=4)
    >>> str(jaxpr).count("ppermute[")
    4
  """

  def worker(grads: jax.Array) -> jax.Array:
    return reduce_step(
      collective, AxisComm(_AXIS), grads, init_state(collective, n, workers)
    )[0]

  return jax.make_jaxpr(worker, axis_env=[(_AXIS, workers)])(
    jax.ShapeDtypeStruct((n,), jnp.float32)
  ).jaxpr


def count_jaxpr(jaxpr: core.Jaxpr, workers: int, branch: Branch = "most") -> Cost:
  """Total cost of the collectives in a jaxpr and in its inner jaxprs.

  Args:
    jaxpr: of one worker's program.
    workers: number of workers P.
    branch: which branch of a switch to count: the one with the "most" words or the
      "least", and of equally many the most or fewest messages. Of branches that differ
      in agreements alone the one with the fewest counts: few steps run the others,
      those that compute exact thresholds. "every" counts each collective of the program
      text once: all branches, and the body of a loop once instead of `length` times.

  Raises:
    NotImplementedError: for a collective of unknown cost, and for a collective in a
      loop of unknown length.

  Example:
    >>> import jaxsparse as js
    >>> count_jaxpr(schedule(js.make_collective("spardl", k=8), n=64, workers=4), workers=4)
    Cost(messages=4, words=24, agreements=0)
  """
  return _sum(_cost_of(equation, workers, branch) for equation in jaxpr.eqns)


def uses_all_reduce(jaxpr: core.Jaxpr, workers: int) -> bool:
  """Whether a program sends gradients only by the all-reduce of XLA, without messages of its own.

  Example:
    >>> import jaxsparse as js
    >>> uses_all_reduce(schedule(js.make_collective("dense"), n=64, workers=4), workers=4)
    True
  """
  # All verbs of a comm but the all-reduce send by these two primitives.
  return (
    not re.search("ppermute|all_to_all", str(jaxpr))
    and count_jaxpr(jaxpr, workers).messages > 0
  )


def _cost_of(equation: core.JaxprEqn, workers: int, branch: Branch) -> Cost:
  """Cost of one equation with the jaxprs inside it; zeros where it sends nothing.

  `branch` says which branch of a `cond` counts: that with the "most" or the "least"
  words; "every" adds up all branches, and counts the body of a loop once.
  """
  primitive = equation.primitive.name
  params = equation.params
  # Costs of bodies of loops, of branches and of functions, each of one run.
  inner = [count_jaxpr(jaxpr, workers, branch) for jaxpr in inner_jaxprs(params)]
  operands: list[Any] = [var.aval for var in equation.invars]
  # 4-byte words, of entries of the first operand's dtype
  words = lambda entries: math.ceil(entries * operands[0].dtype.itemsize / 4)
  if primitive == "ppermute":
    return Cost(1, words(operands[0].size))
  if primitive == "all_to_all":
    # A worker's own row goes nowhere.
    size = operands[0].shape[params["split_axis"]]
    return Cost(size - 1, (size - 1) * words(operands[0].size // size))
  if primitive in _ALL_REDUCES:
    # After `comm.split` the sum is over a team, one of equal groups of the workers.
    groups = params.get("axis_index_groups")
    size = len(groups[0]) if groups else workers
    return _sum(_all_reduced(aval, size) for aval in operands)
  if primitive == "cond" and branch != "every":
    # Words take most of the time, so they decide, then messages; the sign turns the
    # minimum into a maximum. Of equal branches the one with the fewest agreements
    # counts: those with more compute exact thresholds, which few steps do.
    sign = 1 if branch == "least" else -1
    key = lambda cost: (sign * cost.words, sign * cost.messages, cost.agreements)
    return min(inner, key=key)
  if primitive == "scan" and branch != "every":
    return Cost(*(params["length"] * count for count in inner[0]))
  if primitive == "while" and any(cost != Cost(0, 0) for cost in inner):
    raise NotImplementedError(
      "a collective inside a loop of unknown length has no static cost"
    )
  # A primitive with an axis communicates: an unknown one must not count as free.
  if "axis_name" in params and primitive != "axis_index" and not inner:
    raise NotImplementedError(
      f"the cost of {primitive} is not known: write it over the verbs of a comm"
    )
  return _sum(inner)


def _all_reduced(aval: Any, workers: int) -> Cost:
  """Cost of an all-reduce; one of integers is an agreement, on sizes or boundaries."""
  # Gradients are floating point: integers are sizes that workers agree on.
  if jnp.issubdtype(aval.dtype, jnp.integer):
    return Cost(0, 0, agreements=agreement_messages(workers))
  return all_reduce_cost(aval.size, workers, aval.dtype.itemsize)


def _sum(costs: Iterable[Cost]) -> Cost:
  """The sum of each field; zeros for no costs."""
  return Cost(*map(sum, zip(Cost(0, 0), *costs, strict=True)))


def count_entries(n: Entries) -> int:
  """The number of entries of a pytree of arrays; a whole number is returned unchanged.

  Raises:
    ValueError: unless `n` is a whole number or a pytree with an array at least.

  Example:
    >>> count_entries({"w": jnp.zeros((3, 2))}), count_entries(5)
    (6, 5)
  """
  if isinstance(n, numbers.Integral):
    return int(n)
  leaves = jax.tree.leaves(n)
  if not leaves or not all(hasattr(leaf, "shape") for leaf in leaves):
    raise ValueError(
      f"n={n!r}, give a whole number, or the parameters, a pytree of arrays"
    )
  return sum(math.prod(leaf.shape) for leaf in leaves)


def make_sized(
  name: str | Collective, n: Entries, workers: int, devices: int = 1, **config: Any
) -> tuple[Collective, int]:
  """The collective for one of the S devices of a worker, and the number of entries of that device.

  Args:
    name: a name, label or collective, as for `count`.
    n: number of entries of a worker's gradient, or the parameters.
    workers: P, only checked: each worker has a whole gradient, which its own devices
      divide among themselves.
    devices: number of devices S of a worker.
    **config: the options of the collective.

  Returns:
    (collective, entries): the collective with k and the shapes of leaves divided by S;
    and the entries of one device, rounded up.

  Raises:
    ValueError: for sizes below 1, or a number n if the collective needs shapes.

  Example:
    >>> collective, entries = make_sized("powersgd", {"w": jnp.zeros((8, 6))}, workers=2, devices=2)
    >>> collective.leaves, entries
    (((4, 6),), 24)
  """
  check_whole("js.costs", 1, n=count_entries(n), workers=workers, devices=devices)
  collective = make_collective(name, **config).for_devices(devices)
  # n is a pytree of parameters: every device has an equal share of each leaf, padded.
  if not isinstance(n, numbers.Integral):
    shapes = tuple(share_of(leaf.shape, devices) for leaf in jax.tree.leaves(n))
    return collective.for_leaves(shapes), sum(map(math.prod, shapes))
  if collective.traits.needs_shapes:
    raise ValueError(
      f"{collective.name}: the words of n={n} entries depend on the shapes of their leaves: give the parameters as n"
    )
  return collective, -(-int(n) // devices)
