"""The words the library speaks: what travels, the verbs that carry it, what is kept, what it costs."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp

Tree = TypeVar("Tree")
Reduction = Literal["sum", "max", "min"]


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
  """The five verbs, and all that an algorithm knows of the engine that carries its messages.

  `rank` is traced under shard_map and may be an int elsewhere: never branch on it in Python; take, where, roll.

  Example:
    >>> import jaxsparse as js
    >>> comm: js.Comm = js.AxisComm("workers")
  """

  @property
  def size(self) -> int:
    """Number of workers, a Python int."""
    ...

  @property
  def rank(self) -> jax.Array:
    """Number of this worker, i32[] in 0 … size − 1."""
    ...

  def shift(self, tree: Tree, by: int) -> Tree:
    """Sends `tree` to rank + by and returns what rank − by sent, modulo `size`: one message."""
    ...

  def permute(self, tree: Tree, pairs: Sequence[tuple[int, int]]) -> Tree:
    """Sends `tree` along (source, destination) pairs: one message; zeros where none arrives."""
    ...

  def all_reduce(self, x: jax.Array, op: Reduction = "sum") -> jax.Array:
    """Combines `x` of all workers, the same bits on each of them."""
    ...

  def split(self, teams: int) -> tuple["Comm", "Comm"]:
    """Views (team, member): the workers of my team, and those of my position in every team."""
    ...


class State(NamedTuple):
  """What a collective carries from step to step. Arrays only, the same shapes and dtypes after every step.

  Attributes:
    residual: f32[n] at this worker, the mass not yet delivered; None for a collective that leaves none. With `special=`
      and for `js.bucketed_transform` this, `worker` and `shared` are tuples with a part for each communication.
    worker: any pytree that differs between workers; every leaf has a leading axis (it is sharded along it).
    shared: any pytree that is bitwise the same on every worker.
    due: bool[] for a collective whose total differs between workers, whether their parameters are to be averaged after
      this step; None for all others.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> js.State(residual=jnp.zeros(2)).shared
    ()
  """

  residual: Any = None
  worker: Any = ()
  shared: Any = ()
  due: Any = None


class Counters(NamedTuple):
  """What one reduction did at one worker: scalars, or [workers] outside shard_map.

  Attributes:
    words_sent: 4-byte words this worker sent, empty slots included; 2³² − 1 stands for that many or more.
    words_used: those of them that carried an entry; likewise.
    selected: entries that this worker chose to send.
    delivered: entries of the total that are not left out.
    density: `delivered` as a share of all entries; filled in for every collective.
    overflow: entries that overflowed the capacity of a message and went back to the residual.
    imbalance: entries of the fullest worker over the mean, before they are balanced (Ok-Topk).
    balanced: the same afterwards.
    merged: different indices in the fullest block after the sum over teams (SparDL's B-SAG).
    threshold_age: steps since `threshold_period` last made thresholds exact (Ok-Topk).
    skipped: whether this step saw NaN or Inf and was skipped on every worker.
    skipped_steps: how many steps have been skipped since the state was made.
    total_words: words sent since the state was made, modulo 2³².
    total_wraps: how often `total_words` has passed 2³².

  Example:
    >>> import jaxsparse as js
    >>> js.Counters(words_sent=760, words_used=760, delivered=227).overflow
    0
  """

  words_sent: Any = 0
  words_used: Any = 0
  selected: Any = 0
  delivered: Any = 0
  density: Any = 0.0
  overflow: Any = 0
  imbalance: Any = 1.0
  balanced: Any = 1.0
  merged: Any = 0
  threshold_age: Any = 0
  skipped: Any = False
  skipped_steps: Any = 0
  total_words: Any = 0
  total_wraps: Any = 0

  @classmethod
  def zeros(cls) -> Self:
    """Counters of a worker before its first step, one entry each: the leading axis is the worker's."""
    dtypes = {int: jnp.int32, float: jnp.float32, bool: jnp.bool_}
    zeros = {name: jnp.zeros(1, dtypes[type(value)]) for name, value in cls._field_defaults.items()}
    words = ("words_sent", "words_used", "total_words", "total_wraps")
    return cls(**zeros | {name: jnp.zeros(1, jnp.uint32) for name in words})


class Pending(NamedTuple):
  """A residual that is still to be written: gradient + old residual, except at some entries.

  Attributes:
    grads: f32[n], the gradient, or its buffer after received values were added in place.
    residual: f32[n], the old residual.
    entries: entries of the new residual that replace that sum; each index once, or at least n.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> pending = js.types.Pending(jnp.ones(2), jnp.zeros(2), js.Sparse(jnp.array([1]), jnp.array([0.0])))
    >>> pending.entries.indices
    Array([1], dtype=int32)
  """

  grads: jax.Array
  residual: jax.Array
  entries: Sparse


class Reduced(NamedTuple):
  """The result of a collective at one worker.

  Attributes:
    total: f32[n], the estimate of the *sum* over workers, bitwise the same on every worker (Law R). Or its `Sparse`
      entries, each index once, indices from n on dropped: the caller then writes the vector, once.
    state: the next `State`; its residual holds what `total` did not deliver (Law C): f32[n], or `Pending`.
    counters: the step's `Counters`, scalars.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> js.Reduced(jnp.ones(2), js.State(), js.Counters()).total
    Array([1., 1.], dtype=float32)
  """

  total: jax.Array | Sparse
  state: State
  counters: Counters


class Cost(NamedTuple):
  """What one worker sends for one update: the α and β terms of the alpha-beta model.

  Attributes:
    messages: number of messages one after the other.
    words: 4-byte words sent.
    agreements: words that all workers agree on (a size, a boundary) in all-reduces of their own, listed apart.

  Example:
    >>> cost = Cost(messages=6, words=1000)
    >>> cost.bytes
    4000
    >>> round(cost.seconds(alpha=1e-4, beta=8e-9), 6)  # 0.1 ms a message, 1 Gbit/s
    0.000632
  """

  messages: int
  words: int
  agreements: int = 0

  @property
  def bytes(self) -> int:
    """Bytes sent by one worker."""
    return 4 * self.words

  def seconds(self, alpha: float, beta: float) -> float:
    """`messages · alpha + bytes · beta`, with alpha in seconds a message and beta in seconds a byte."""
    return self.messages * alpha + self.bytes * beta
