"""Types that all packages share: sparse entries, verbs, the state and result of a collective, counters, costs."""

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Tree = TypeVar("Tree")
Reduction = Literal["sum", "max", "min"]
# Types of recursive containers are beyond type checkers; the names tell readers.
ArrayTree = Any
"""A pytree of arrays, or of what stands for one: numbers, `jax.ShapeDtypeStruct`."""
SpecTree = Any
"""A pytree of a `PartitionSpec` or sharding for each array, or a prefix of one."""
# Numbers of `Counters`, of one worker or with an entry for each, and their dtypes.
Count = Annotated[Any, "int32"]
# Words need all 32 bits; other counts stay below 2³¹.
Words = Annotated[Any, "uint32"]
Ratio = Annotated[Any, "float32"]


class Sparse(NamedTuple):
  """Entries of a vector (or of the rows of a matrix) in coordinate form; two words an entry on the wire.

  Attributes:
    indices: i32[..., k], positions within the vector or row; unique within it.
    values: f32[..., k].

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> js.Sparse(indices=jnp.array([7]), values=jnp.array([0.5])).values
    Array([0.5], dtype=float32)
  """

  indices: jax.Array
  values: jax.Array


class Comm(Protocol):
  """The communication of one worker: `size`, `rank`, and verbs that send messages between workers.

  A collective uses these only, so that it runs unchanged on a mesh, under MPI and in
  the simulator. Every worker calls the same verbs in the same order. `rank` is traced
  under shard_map: do not branch on it in Python, use `jnp.where` or index with it.

  Example:
    >>> import jaxsparse as js
    >>> comm: js.Comm = js.SimComm("workers", members=4)
  """

  @property
  def size(self) -> int:
    """Number of workers, a Python int."""

  @property
  def rank(self) -> jax.Array:
    """Number of this worker, i32[] in 0 … size − 1."""

  @property
  def divisor(self) -> int:
    """The divisor of a total, for its mean: `size`, or 1 where workers give weighted values."""

  def shift(self, tree: Tree, by: int) -> Tree:
    """Sends `tree` to rank + by, modulo `size`, and returns the tree that rank − by sent: one message."""

  def all_to_all(self, rows: Tree) -> Tree:
    """Sends row d of each leaf to worker d; row w is then that of worker w: P − 1 messages, none waits for another."""

  def permute(self, tree: Tree, pairs: Sequence[tuple[int, int]]) -> Tree:
    """Sends `tree` along (source, destination) pairs: one message; returns zeros at workers that receive none."""

  def all_reduce(self, x: jax.Array, op: Reduction = "sum") -> jax.Array:
    """The sum, maximum or minimum over all workers of `x`, bitwise the same on each of them."""

  def split(self, teams: int) -> tuple["Comm", "Comm"]:
    """Two comms: this worker's team, one of `teams` equal ones, and the workers of its position in every team."""


class State(NamedTuple):
  """What a collective carries from step to step. Arrays only, the same shapes and dtypes after every step.

  Attributes:
    residual: f32[n] at this worker, the entries not yet delivered; None for a
      collective without error feedback; of a `SparseReduced` the `Pending` one. In the
      state of a transform this, `worker` and `shared` are tuples with a part for each
      group of leaves.
    worker: any pytree that differs between workers; every leaf has a leading axis (it
      is sharded along it).
    shared: any pytree that is bitwise the same on every worker.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> js.State(residual=jnp.zeros(2)).shared
    ()
  """

  residual: ArrayTree = None
  worker: ArrayTree = ()
  shared: ArrayTree = ()


class Counters(NamedTuple):
  """What one reduction did at one worker: scalars from a collective; [1] in a worker's state, [P] outside.

  A field says its dtype, how the values of several groups of leaves or transforms become
  one, and how those of all workers do. Where it does not say how, the largest counts.

  Attributes:
    words_sent: 4-byte words this worker sent, empty slots included; 2³² − 1 stands for
      that many or more. `Metrics`: of the worker that sent most; 0 in a local step.
    words_used: the part of `words_sent` that carried entries, without empty slots, with
      the same limit. `Metrics`: the mean over workers.
    selected: entries that this worker chose to send.
    delivered: entries that the total delivers.
    density: `delivered` / n.
    overflow: entries that overflowed the capacity of a message and went back to the
      residual. `Metrics`: of each worker (2³¹ − 1)/P at most are counted.
    imbalance: the largest number of entries that a worker owns over the mean, before
      balancing (Ok-Topk).
    balanced: `imbalance` after balancing (Ok-Topk).
    merged: the largest number of different indices of a block after the sum over teams
      (SparDL's B-SAG; else 0).
    threshold_age: steps since exact thresholds were last computed (Ok-Topk,
      `threshold_period`).
    skipped: whether every worker skipped the step, because of NaN or Inf at one of
      them.
    skipped_steps: how many steps have been skipped since the state was made.
    total_words: words sent since the state was made, modulo 2³². `Metrics`: not
      modulo, of the worker that sent most, rounded to float32.
    total_wraps: how often `total_words` has passed 2³².

  Example:
    >>> import jaxsparse as js
    >>> js.Counters(words_sent=760, words_used=760, delivered=227).overflow
    0
  """

  words_sent: Annotated[Words, "sum"] = 0
  words_used: Annotated[Words, "sum", "mean"] = 0
  selected: Annotated[Count, "sum", "mean"] = 0
  delivered: Annotated[Count, "sum"] = 0
  # Computed from `delivered`, where groups become one.
  density: Ratio = 0.0
  overflow: Annotated[Count, "sum", "sum"] = 0
  imbalance: Ratio = 1.0
  balanced: Ratio = 1.0
  merged: Count = 0
  threshold_age: Count = 0
  skipped: Annotated[Any, "bool"] = False
  skipped_steps: Count = 0
  total_words: Words = 0
  total_wraps: Words = 0

  @classmethod
  def zeros(cls) -> Self:
    """Counters of a worker before its first step, each [1]: outside shard_map, those of P workers are one array [P]."""
    # Fields are `Annotated[Any, dtype, ...]`: the first word of the metadata.
    kinds = cls.__annotations__.values()
    return cls(*[jnp.zeros(1, kind.__metadata__[0]) for kind in kinds])


# 16 GiB; the words of a step are u32, which needs no 64-bit mode of JAX
_MOST_WORDS = 2**32 - 1


def saturated(value: jax.Array | float, dtype: jax.typing.DTypeLike) -> jax.Array:
  """`value` as `dtype`; for an integer type at most the largest number of the type.

  Example:
    >>> saturated(10**10, jnp.uint32), saturated(jnp.float32(1e10), jnp.int32)
    (Array(4294967295, dtype=uint32), Array(2147483647, dtype=int32))
  """
  if not jnp.issubdtype(dtype, jnp.integer):
    return jnp.asarray(value, dtype)
  most = jnp.iinfo(dtype).max
  if not isinstance(value, jax.Array):
    return jnp.asarray(min(int(value), most), dtype)
  # An integer type whose largest number fits into `dtype` needs no comparison.
  if jnp.issubdtype(value.dtype, jnp.integer) and jnp.iinfo(value.dtype).max <= most:
    return value.astype(dtype)
  # `most` as a float may round up to a power of two; every float below it fits.
  return jnp.where(
    value >= jnp.asarray(most, value.dtype),
    jnp.asarray(most, dtype),
    value.astype(dtype),
  )


def saturated_sum(*counts: jax.Array | int) -> jax.Array:
  """The sum of counts, u32[], at most 2³² − 1.

  Example:
    >>> saturated_sum(1, jnp.int32(2)), saturated_sum(2**31, 2**31)
    (Array(3, dtype=uint32), Array(4294967295, dtype=uint32))
  """
  result = jnp.uint32(0)
  for count in counts:
    added = result + saturated(count, jnp.uint32)
    # A sum of u32 that wraps around is less than each of its parts.
    result = jnp.where(added < result, jnp.uint32(_MOST_WORDS), added)
  return result


def saturated_product(count: jax.Array | int, factor: int) -> jax.Array:
  """The product of a count and a static factor, u32[], at most 2³² − 1.

  Example:
    >>> saturated_product(jnp.int32(3), 2), saturated_product(jnp.int32(3), 2**31), saturated_product(jnp.int32(3), 0)
    (Array(6, dtype=uint32), Array(4294967295, dtype=uint32), Array(0, dtype=uint32))
  """
  factor = min(factor, _MOST_WORDS)
  # Counts that do not fit u32 are at its limit already.
  count = saturated(count, jnp.uint32)
  # Compared before it is multiplied, since u32 wraps around.
  limit = jnp.uint32(_MOST_WORDS // max(1, factor))
  return jnp.where(count > limit, jnp.uint32(_MOST_WORDS), count * jnp.uint32(factor))


def is_number(value: Any, kind: type) -> bool:
  """Whether a value is a number of a kind of `numbers`, and no boolean."""
  # In Python a boolean is an Integral.
  return isinstance(value, kind) and not isinstance(value, bool)


def check_fraction(name: str, field: str, value: Any) -> None:
  """Checks that the `value` of an argument is a number in (0, 1].

  Args:
    name: name of the function or class that checks, for the error.
    field: name of the argument, for the error.
    value: what the caller gave.

  Raises:
    ValueError: naming the value and the choices.
  """
  if not (is_number(value, numbers.Real) and 0 < value <= 1):
    raise ValueError(f"{name}: {field}={value!r}, choose a number in (0, 1]")


MOST_STEPS = 2**31 - 1  # steps are counted in i32


def check_whole(
  name: str, low: int, high: int | None = None, *, optional: bool = False, **values: Any
) -> None:
  """Checks that `values` are whole numbers from `low` to `high`, or None where that is `optional`.

  Args:
    name: name of the function or class that checks, for the error.
    low: the smallest allowed number.
    high: the largest allowed number; None for no limit.
    optional: whether None is allowed as a value.
    **values: the values to check, by the names of the arguments.

  Raises:
    ValueError: naming the value and the choices.
  """
  for field, value in values.items():
    if optional and value is None:
      continue
    if not (
      is_number(value, numbers.Integral)
      and low <= value
      and (high is None or value <= high)
    ):
      upper = "up" if high is None else f"to {high}"
      raise ValueError(
        f"{name}: {field}={value!r}, choose a whole number from {low} {upper}{', or None' * optional}"
      )


class Rounding(Protocol):
  """Rounds to what the dtypes of n entries hold."""

  @property
  def is_uniform(self) -> bool:
    """Whether all entries have one dtype."""

  def __call__(
    self, values: jax.Array, indices: jax.Array | None = None, /
  ) -> jax.Array:
    """Rounds f32[n], or values f32[...] of entries at flat indices i32[...]."""


Residual = jax.Array | None
Commit = Callable[[jax.Array, Residual, float], tuple[jax.Array, Residual]]


class Reduced(NamedTuple):
  """The result of a collective at one worker: a total of n entries, and what it leaves.

  A total of another form, which saves a pass over n entries, is a subclass with a
  `mean` of its own: `select.accumulator.SparseReduced` of entries, `Deferred` of
  numbers from which it is computed.

  Attributes:
    total: the estimate of the *sum* over workers, f32[n], bitwise the same on every
      worker (Law R). A subclass says what it holds instead.
    state: the next `State`; its residual, f32[n], is what `total` did not deliver
      (Law C).
    counters: the step's `Counters`, scalars.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> reduced = js.Reduced(jnp.array([4.0, 2.0]), js.State(), js.Counters())
    >>> mean, commit = reduced.mean(divisor=2, rounding=None)
    >>> commit(jnp.isfinite(mean).all(), None, 1.0)
    (Array([2., 1.], dtype=float32), None)
  """

  total: Any
  state: State
  counters: Counters

  def mean(self, divisor: int, rounding: Rounding | None) -> tuple[jax.Array, Commit]:
    """The total divided by `divisor` and rounded, and the function that ends the step.

    Returns:
      (mean, commit). `mean` is f32[n], or of a subclass other arrays, with NaN or Inf
      if an entry of the mean has. `commit(finite, before, decay)` returns the mean,
      f32[n], and the next residual, f32[n] or None: `decay` times what the total did
      not deliver and what was rounded off. If `finite`, bool[], is false, it returns
      zeros and `before`, the residual before the step.

    Raises:
      TypeError: for a total that is no array.
    """
    # Kinds of totals other than f32[n] come in subclasses of `Reduced`.
    if not isinstance(self.total, jax.Array):
      raise TypeError(
        f"js.Reduced has a total that is a {type(self.total).__name__}: give f32[n], or "
        "return a subclass that has a mean of it"
      )
    exact = self.total / divisor
    mean = rounding(exact) if rounding else exact

    def commit(
      finite: jax.Array, before: ArrayTree, decay: float
    ) -> tuple[jax.Array, Residual]:
      residual = self.state.residual
      if residual is not None:
        # Most collectives have no decay, and no multiplication is traced for them.
        if decay != 1:
          residual = decay * residual
        residual = jnp.where(finite, residual, before)
        if rounding:
          # Law C, what is not delivered stays in the residuals: each worker keeps the
          # rounding error of the mean, so that a later mean delivers it.
          residual = residual + decay * jnp.where(finite, exact - mean, 0.0)
      return jnp.where(finite, mean, 0.0), residual

    return mean, commit

  def computed(self) -> "Reduced":
    """The result with arrays only, no function of them."""
    return self

  def add_to(self, x: jax.Array) -> tuple[jax.Array, Residual]:
    """The sum f32[n] of x and the total, and the next residual before its decay; of a `computed` result."""
    return x + self.total, self.state.residual

  def mask(
    self, momentum: jax.Array, grads: jax.Array, residual: jax.Array
  ) -> jax.Array:
    """The momentum with zeros where the next residual is not `grads + residual`: where an entry was delivered.

    Momentum factor masking of Deep Gradient Compression.

    Args:
      momentum: f32[n].
      grads: f32[n], what the collective was given to reduce.
      residual: f32[n], the residual before the step.
    """
    after = self.computed().state.residual
    return jnp.where(after == grads + residual, momentum, 0.0)


class Formula(Protocol):
  """The total of a `Deferred` result."""

  @property
  def values(self) -> Any:
    """Arrays of which the total is a linear function; NaN or Inf where an entry of the total may be."""

  def finish(
    self, values: Any, finite: jax.Array, residual: jax.Array, decay: float
  ) -> tuple[jax.Array, jax.Array]:
    """The total of `values`, and `decay` times what the total does not deliver, f32[n] each.

    If not `finite`, zeros and `residual`, f32[n], the one before.
    """


class Deferred(Reduced):
  """A result whose total and residual one pass over n entries writes, once the step is known to be finite.

  Attributes:
    total: a `Formula`.
    state: the next `State`, with the residual before the step.
  """

  def mean(self, divisor: int, rounding: Rounding | None) -> tuple[Any, Commit]:
    """The formula's `values` divided by `divisor`, and its `finish`; with `rounding` the mean of the computed total."""
    if rounding:
      return self.computed().mean(divisor, rounding)
    # The total is linear in the values, so these are divided in its place, and `finish`
    # writes the mean in one pass.
    mean = jax.tree.map(lambda x: x / divisor, self.total.values)
    return mean, functools.partial(self.total.finish, mean)

  def computed(self) -> Reduced:
    """The result with the total, f32[n], and the next residual before its decay."""
    total, residual = self.total.finish(
      self.total.values, jnp.bool_(True), self.state.residual, 1.0
    )
    return Reduced(total, self.state._replace(residual=residual), self.counters)


class Cost(NamedTuple):
  """The messages and words that one worker sends for one update: the α and β terms of the α-β model.

  Attributes:
    messages: number of messages, one after the other.
    words: 4-byte words sent.
    agreements: messages, one after the other, of the all-reduces by which workers agree
      on a few numbers, sizes or boundaries: 2⌈log₂P⌉ of each all-reduce. They are not
      part of `messages`, nor their numbers of `words`.

  Example:
    >>> cost = Cost(messages=6, words=1000)
    >>> cost.bytes
    4000
    >>> round(cost.seconds(alpha=1e-4, beta=8e-9), 6)  # 0.1 ms a message, 1 Gbit/s
    0.000632
    >>> round(cost._replace(agreements=6).seconds(alpha=1e-4, beta=8e-9), 6)
    0.001232
  """

  messages: int
  words: int
  agreements: int = 0

  @property
  def bytes(self) -> int:
    """Bytes sent by one worker."""
    return 4 * self.words

  def words_per_step(self, every: int) -> float:
    """Words of a step, in the mean, where only each `every`-th step has this update (`js.local_steps`)."""
    return self.words / every

  def seconds(self, alpha: float, beta: float) -> float:
    """`(messages + agreements) · alpha + bytes · beta`: alpha in seconds a message, beta in seconds a byte."""
    return (self.messages + self.agreements) * alpha + self.bytes * beta


class Link(NamedTuple):
  """The cost of communications that may overlap: of m bytes `α + β m` seconds alone.

  Attributes:
    alpha: α, seconds of the start-up, before the first byte.
    beta: β, seconds per byte of a transfer without overlap.
    gamma: γ, contention factor: per-byte slowdown when two transfers overlap.

  Example:
    >>> float(Link(alpha=1e-3, beta=1e-9, gamma=1.5).slowdown(3))
    2.0
  """

  alpha: float
  beta: float
  gamma: float

  def seconds(self, size: float) -> float:
    """Seconds of a communication of `size` bytes without overlap."""
    return self.alpha + self.beta * size

  def slowdown(self, senders: np.ndarray | int) -> np.ndarray | float:
    """γ(s), the per-byte slowdown of s overlapping transfers."""
    return 1 + (self.gamma - 1) * (np.maximum(senders, 1) - 1)
