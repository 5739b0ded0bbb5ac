"""Base classes of the algorithms: frozen dataclasses whose fields are options, checked when an instance is made."""

import abc
import ast
import copy
import dataclasses
import inspect
import itertools
import math
import numbers
import typing
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.types import (
  Comm,
  Cost,
  Counters,
  Reduced,
  State,
  check_fraction,
  check_whole,
  is_number,
)

# indices are i32; those of padding and of empty slots of a message are up to 2¹⁷ beyond
# a vector
_MOST = 2**31 - 2**17

_Kind = TypeVar("_Kind", bound="Collective")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
  """What a collective guarantees, and what it asks of the code around it.

  A wrapper has the traits of the collective inside, with the fields replaced that it
  changes.

  Attributes:
    conserves: Law C holds: the totals so far and the residuals add up to all gradients
      so far.
    replicates: Law R holds: the total is the same on every worker. If not, the
      collective belongs inside `js.local_steps`.
    rounds: the total is rounded, and no residual has what is lost.
    moves_zeros: an entry that is zero at all workers may be delivered as another
      number.
    scaled: values are sent as multiples of a scale, or in another basis, so that small
      whole numbers change.
    differentiable: derivatives of the total with respect to gradients are right; others
      are refused.
    sizes_vary: the sizes of messages change from step to step; `cost` is then an upper
      bound.
    needs_shapes: words depend on the shapes of leaves, which `for_leaves` has still to
      give.
    mixes_entries: coefficients of another basis are delivered: `js.momentum_corrected`
      cannot mask momentum by entries.
    has_k: a fixed number of entries, k, is shared out among groups of leaves.
    has_momentum: momentum of each worker's own is reduced in place of gradients.
    tracks_workers: what all workers share adds up what each of them has given, so that
      it is wrong once one is not there. `js.partial.Rounds`, where `shared` goes on
      while workers come and go, refuses it. Nothing else needs it: for another number
      of workers or another method `js.resize` and `js.convert` start `worker` and
      `shared` of every collective anew and pass on residuals alone, which are owed;
      `js.flush` delivers residuals and leaves the rest.
    decay: β: of what a step does not deliver, β times as much enters the next one.
  """

  conserves: bool = True
  replicates: bool = True
  rounds: bool = False
  moves_zeros: bool = False
  scaled: bool = False
  differentiable: bool = False
  sizes_vary: bool = False
  needs_shapes: bool = False
  mixes_entries: bool = False
  has_k: bool = False
  has_momentum: bool = False
  tracks_workers: bool = False
  decay: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective(abc.ABC):
  """An all-reduce algorithm: pure functions of arrays that communicate by the verbs of `Comm`.

  Fields are options. A value of a field typed `Literal[...]` is checked against the
  choices of its type, and that of a field in `ranges` against its range.

  Example:
    A new algorithm, a ring: each gradient passes through all workers in P − 1 messages,
    and each worker adds them in rank order, so that the totals have the same bits:

    >>> import dataclasses, jax, jax.numpy as jnp, jaxsparse as js
    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Ring(js.Collective):
    ...   def cost(self, n, size):
    ...     return js.Cost(messages=size - 1, words=n * (size - 1))
    ...   def reduce(self, comm, grads, state):
    ...     rows = [grads]  # row i is the gradient of worker rank − i
    ...     for _ in range(comm.size - 1):
    ...       rows.append(comm.shift(rows[-1], 1))
    ...     by_rank = jnp.stack(rows)[(comm.rank - jnp.arange(comm.size)) % comm.size]
    ...     return js.Reduced(by_rank.sum(axis=0), state, js.Counters(delivered=grads.size))
    >>> worker = lambda grads: Ring().reduce(js.SimComm("w"), grads, js.State()).total
    >>> jax.vmap(worker, axis_name="w")(jnp.array([[1.0], [2.0], [4.0]])).ravel()
    Array([7., 7., 7.], dtype=float32)
  """

  ranges: ClassVar[tuple[tuple[str, int, int | None], ...]] = ()
  """(option, smallest value, largest value or None) of each option that is a whole number."""

  name: ClassVar[str]
  """The name by which users choose the collective: that of its module, or of its package in jaxsparse/collectives."""

  def __init_subclass__(cls) -> None:
    # `name` is "gtopk" in jaxsparse.collectives.baselines.gtopk, "spardl" in
    # jaxsparse.collectives.spardl.algorithm, and "ring" in a user's module mine.ring.
    inside = cls.__module__.removeprefix(f"{__package__}.").removeprefix("baselines.")
    cls.name = (
      inside.partition(".")[0]
      if inside != cls.__module__
      else inside.rpartition(".")[2]
    )
    fields = {field.name for field in dataclasses.fields(Traits)}
    # An annotated attribute is an option, which may have the name of a trait: `decay`.
    options = inspect.get_annotations(cls)
    # A class attribute without annotation, as `rounds = True`, would be ignored.
    if unread := sorted((fields & vars(cls).keys()) - options.keys()):
      raise TypeError(
        f"{cls.__name__}: {', '.join(unread)} is a field of `traits`, and nothing reads it here: override the property "
        f"`traits`, and return dataclasses.replace(super().traits, {unread[0]}=...)"
      )

  def __post_init__(self) -> None:
    if arrays := [
      field for field, value in vars(self).items() if isinstance(value, jax.Array)
    ]:
      raise TypeError(
        f"{self.name}: {', '.join(arrays)} must be plain Python values, they are part of the program that is compiled. "
        "optax.inject_hyperparams makes arrays of all numbers, of defaults too, but of those in its static_args: give "
        f"static_args={tuple(inspect.signature(type(self)).parameters)!r}"
      )
    # Numbers of numpy could overflow, and their dtypes could promote results.
    for field, value in vars(self).items():
      if isinstance(value, np.generic):
        object.__setattr__(self, field, value.item())
    for field, choices in choices_of(type(self)).items():
      if (value := getattr(self, field)) not in choices:
        raise ValueError(
          f"{self.name}: {field}={value!r}, choose one of {', '.join(map(repr, choices))}"
        )
      # The choice itself, since 4.0 equals 4.
      object.__setattr__(self, field, choices[choices.index(value)])
    for field, low, high in self.ranges:
      check_whole(self.name, low, high, **{field: getattr(self, field)})
    # `traits.decay` is the option `decay` (β), or 1 where a collective lacks it.
    check_fraction(self.name, "decay", self.traits.decay)

  @property
  def label(self) -> str:
    """The name with the options that differ from their defaults: "spardl:teams=2:density=0.01"."""
    options = inspect.signature(type(self)).parameters
    changed = {
      name: getattr(self, name)
      for name in options
      if getattr(self, name) != options[name].default
    }
    return label_of(self.name, changed)

  @property
  def traits(self) -> Traits:
    """Override it by `dataclasses.replace(super().traits, ...)`; the value may depend on options, not on sizes."""
    return Traits(decay=getattr(self, "decay", 1.0))

  def entries(self, n: int) -> int:
    """The number of entries to deliver of n."""
    return n

  def is_partial(self, n: int, state: State) -> bool | jax.Array:
    """Whether a step delivers some of n entries and keeps the others as they are; not with a density of 1.

    `js.momentum_corrected` masks momentum unless it is False. Override it where a step
    may deliver fewer than `entries(n)`, e.g. those above a given threshold.
    """
    return self.entries(n) < n

  def slots(self, n: int, size: int) -> int:
    """An upper bound on the flat indices of a step, i32, also of those that padding reaches."""
    # `rounded_all_reduce` pads to a multiple of 2 P, others to one of P.
    return n + 2 * size

  def check_size(self, n: int, size: int) -> None:
    """Checks, before anything is computed, that the arrays of a step are short enough for i32 indices.

    Raises:
      ValueError: if they are not, naming the limit.
    """
    # _MOST is 2³¹ − 2¹⁷: the rest is for indices of padding and of empty slots.
    if (slots := self.slots(n, size)) > _MOST:
      raise ValueError(
        f"{self.name}: {n} gradient entries at each of {size} workers take {slots} indices, which have 31 bits: choose "
        f"at most {_MOST}, by groups of leaves (js.bucketed_transform) or a smaller density or k; or choose 'dense'"
      )

  def for_leaves(self, shapes: tuple[tuple[int, ...], ...]) -> Self:
    """The collective for gradients that consist of leaves of these shapes; most collectives ignore the shapes."""
    return self

  def for_groups(self, sizes: Sequence[int]) -> list[Self]:
    """The collective of each group of leaves; `sizes` are the numbers of entries of the groups."""
    return [self] * len(sizes)

  def for_devices(self, devices: int) -> Self:
    """The collective of each of `devices` devices that share a gradient out among themselves."""
    return self

  def init(self, n: int, size: int) -> State:
    """The state of one worker before the first step, for n entries and `size` workers.

    Raises:
      ValueError: if the options do not fit n or `size`.
    """
    return State()

  @abc.abstractmethod
  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    """Estimates the sum of the f32[n] `grads` of all workers of `comm`, and returns it with the next state.

    Where a gradient has NaN or Inf, the total must have one too, whichever entries it
    delivers: all workers then skip the step.
    """

  @abc.abstractmethod
  def cost(self, n: int, size: int) -> Cost:
    """Messages and words of one step by a closed formula; an upper bound where message sizes vary.

    The formulas are those of the papers, rounded up where a size does not divide. Ours
    are those of Ok-Topk, of the messages of TopkDSA, and of the words of Gaussian-k (a
    capacity of 5k/4 entries) and QSGD (levels of fixed width).
    """

  def count(
    self,
    comm: Comm,
    n: int,
    selected: jax.Array | int,
    delivered: jax.Array | int,
    slots: int = 0,
  ) -> Counters:
    """The counters of a step that sends the words of `cost`.

    `selected` entries are chosen by this worker, `delivered` ones are in the total.
    Messages have `slots` slots for the selected entries; by default none is empty.
    """
    words = self.cost(n, comm.size).words
    used = words_used(words, selected, slots) if slots else words
    return Counters(words, used, selected=selected, delivered=delivered)


def words_used(
  words: jax.Array | int, selected: jax.Array | int, slots: int
) -> jax.Array | int:
  """The words that carry an entry, of `words` in messages where `selected` of `slots` slots are filled."""
  if isinstance(selected, int) and selected == slots:
    return words
  # in float32, since a product of u32 may overflow
  return jnp.float32(words) * jnp.float32(selected) / slots


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByLeaf(Collective):
  """A collective whose words depend on the shapes of leaves.

  Attributes:
    leaves: the shapes of the leaves that the flat gradient consists of, in its order;
      () before `for_leaves` gives them: the gradient is then one vector.
  """

  leaves: tuple[tuple[int, ...], ...] = dataclasses.field(default=(), init=False)

  @property
  def traits(self) -> Traits:
    return dataclasses.replace(super().traits, needs_shapes=not self.leaves)

  def for_leaves(self, shapes: tuple[tuple[int, ...], ...]) -> Self:
    return replace_fields(self, leaves=shapes)

  def init(self, n: int, size: int) -> State:
    check_shapes(self.name, self.shapes(n), n)
    return State(residual=jnp.zeros(n, jnp.float32))

  def shapes(self, n: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of the leaves."""
    return self.leaves or ((n,),)


def check_shapes(
  name: str,
  shapes: tuple[tuple[int, ...], ...],
  n: int,
) -> None:
  """Raises ValueError unless leaves of these shapes have n entries in all; `name` is that of the collective."""
  if (entries := sum(map(math.prod, shapes))) != n:
    raise ValueError(
      f"{name}: n={n} entries, its leaves of shapes {shapes} have {entries}"
    )


def replace_fields(collective: _Kind, /, **fields: Any) -> _Kind:
  """The collective with other values of some fields, also of those that are no options."""
  # Not `dataclasses.replace`, which refuses fields with `init=False`, as `leaves`.
  changed = copy.copy(collective)
  for name, value in fields.items():
    object.__setattr__(changed, name, value)
  changed.__post_init__()  # checks the new values
  return changed


def label_of(name: str, config: Mapping[str, Any]) -> str:
  """The label of a collective with these options, name:option=value:…; the density comes last.

  Example:
    >>> label_of("spardl", {"density": 0.01, "teams": 2})
    'spardl:teams=2:density=0.01'
  """
  options = [f"{key}={value}" for key, value in config.items() if key != "density"]
  return ":".join(
    [name, *options, *([f"density={config['density']}"] if "density" in config else [])]
  )


def collective_of(label: str) -> tuple[str, dict[str, Any]]:
  """The name and the options of a label.

  Raises:
    ValueError: for an option that is not of the form option=value, or given twice.

  Example:
    >>> collective_of("spardl:teams=2:density=0.01")
    ('spardl', {'teams': 2, 'density': 0.01})
  """
  name, *options = (word.strip() for word in label.split(":"))
  config: dict[str, Any] = {}
  for option in options:
    key, separator, text = (word.strip() for word in option.partition("="))
    if not separator:
      raise ValueError(f"{label}: {option!r} is not of the form option=value")
    if key in config:
      raise ValueError(f"{label}: {key} is given twice")
    # A text that is no literal of Python is itself the value, as in "spardl:wire=int8".
    try:
      config[key] = ast.literal_eval(text)
    except (ValueError, SyntaxError):
      config[key] = text
  return name, config


def choices_of(kind: type[Collective]) -> dict[str, tuple[Any, ...]]:
  """The `Literal` fields of a collective, each with its choices."""
  options = inspect.signature(kind).parameters
  # annotations of other modules may be strings
  hints = typing.get_type_hints(kind)
  return {
    name: get_args(hints[name])
    for name in options
    if get_origin(hints[name]) is Literal
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseCollective(Collective):
  """A collective that delivers k of n entries and keeps the others in a residual, its state: f32[n] at each worker.

  The options that sparse collectives share: `density`, `k` and `decay` are fields of
  this class, `wire` of collectives whose messages have entries
  (`_messages.EncodingCollective`), `selector` of those that choose the entries they
  send (`_messages.SelectingCollective`).

  Args:
    density: ρ in (0, 1]; k = ⌈ρ n⌉, where ρ is the decimal number that Python prints,
      so that 0.07 of 100 is 7, not 8.
    k: the number of entries instead, 1 … n: those that are delivered, or those that
      each worker sends; the most of them, where a threshold selects.
    decay: β in (0, 1]: each worker reduces `gradient + β · (what it has not
      delivered)`, and the residual holds the product. Less than 1 forgets old gradients
      (SparseLoCo: 0.95); 1 loses nothing. A skipped step does not decay it.
    selector: how the largest entries of a block are selected. "exact" selects those of
      largest magnitude. "chunked" divides a block into as many interleaved chunks as it
      sends entries, and selects the largest entry of each, which needs less arithmetic,
      and one or two bytes for an index. "reuse" is "exact" restricted to entries that
      reach a threshold reused from the last step. The threshold rises as residuals
      grow, and falls while fewer entries reach it; if far more of them reach it, or
      fewer than half did in the last step, "exact" is used.
    wire: the format of entries. "coo" sends indices and values unchanged, 64 bits.
      All others send indices as a set, in about 8.6 bits each at a density of 1 %:
      "f32" with unchanged values, "bf16" with values rounded to 8 significant bits,
      "int8" with multiples of 1/127 of the largest magnitude of a block, rounded up or
      down at random, so that rounding is unbiased, "int4" with a sign and one of 7
      magnitudes of a block. With selector="chunked" positions in chunks take the
      place of indices, and "coo" is "f32". Rounding errors stay in the residual of the
      worker that rounds.

  Example:
    >>> import jaxsparse as js
    >>> js.make_collective("spardl", density=0.01).entries(14_728_266)
    147283
  """

  density: float | None = None
  k: int | None = None
  decay: float = 1.0

  def __post_init__(self) -> None:
    super().__post_init__()
    density = self.density
    k = self.k
    if (density is None) == (k is None):
      raise ValueError(
        f"{self.name}: give exactly one of density and k, got density={density!r} and k={k!r}"
      )
    if density is not None:
      check_fraction(self.name, "density", density)
    if k is not None and not (is_number(k, numbers.Integral) and k >= 1):
      raise ValueError(
        f"{self.name}: k={k!r}, choose a whole number from 1 up to the number of gradient entries"
      )

  @property
  def traits(self) -> Traits:
    return dataclasses.replace(super().traits, has_k=self.k is not None)

  def for_groups(self, sizes: Sequence[int]) -> list[Self]:
    """The collective of each group of leaves: k is divided in proportion to the `sizes`, at least 1 for each group.

    `sizes` are the numbers of entries of the groups.

    Raises:
      ValueError: if k exceeds the number of all entries, or is less than the number of
        groups.
    """
    k = self.k
    if k is None:
      return [self] * len(sizes)
    self.entries(sum(sizes))  # raises where k does not fit
    if k < len(sizes):
      raise ValueError(
        f"{self.name}: k={k}, choose at least one for each of the {len(sizes)} groups"
      )
    # Each group gets 1, and a part of the other k − groups in proportion to size − 1.
    # So no group gets more than its entries.
    reached = list(itertools.accumulate((size - 1 for size in sizes), initial=0))
    more = k - len(sizes)
    # The first i groups get bounds[i] of `more`: floors of running sums, so that the
    # differences add up to `more`. `max`, as all groups may have one entry.
    bounds = [more * upto // max(1, reached[-1]) for upto in reached]
    return [
      replace_fields(self, k=1 + high - low) for low, high in itertools.pairwise(bounds)
    ]

  def for_devices(self, devices: int) -> Self:
    # Each device has about 1/d of the entries, and so of k.
    return self if self.k is None else replace_fields(self, k=-(-self.k // devices))

  def init(self, n: int, size: int) -> State:
    self.entries(n)  # raises if k > n
    return State(residual=jnp.zeros(n, jnp.float32))

  def slots(self, n: int, size: int) -> int:
    # the last chunk or region may reach so far beyond
    return n + 2 * (size + self.entries(n))

  def entries(self, n: int) -> int:
    """The number k of entries to deliver of n.

    Raises:
      ValueError: if k is more than n.
    """
    if self.density is not None:
      # The float 0.07 is a little more than 0.07, and would round 7 up to 8.
      return math.ceil(Fraction(repr(float(self.density))) * n)
    k = int(typing.cast(int, self.k))
    if k > n:
      raise ValueError(
        f"{self.name}: k={k}, choose at most the number of gradient entries, {n}"
      )
    return k
