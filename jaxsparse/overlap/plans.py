"""Which gradients travel together, and which travel at once: WFBP, MG-WFBP, ASC-WFBP and better ones.

Backward computes the gradients of the last layer first. While it goes on, what is there can be sent; each communication
costs a start-up, so small neighbours had better travel together (merged), or beside each other (simultaneous):

    backward      |--5--|--4--|--3--|--2--|--1--|
    single                                      |α 5 4 3 2 1 ........|
    wfbp                |α 5..|α 4..|α 3..|α 2..|α 1..|
    mg_wfbp             |α 5..|     |α 4 3....| |α 2 1....|
    asc_wfbp            |α 5..|     |α 4 3......|
                                          |α 2 1....|             beside the one before: contention γ

A plan is data, made by pure functions of numbers and priced by one simulation (`network`). "S. Shi, X. Chu, B. Li:
Exploiting Simultaneous Communications to Accelerate Data Parallel Distributed Deep Learning", INFOCOM 2021.
"""

import itertools
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from jaxsparse.collectives._base import check_whole
from jaxsparse.overlap import search
from jaxsparse.overlap.network import Link, Sent, simulate

Kind = Literal["single", "wfbp", "mg_wfbp", "asc_wfbp", "optimal"]
GroupKind = Literal["normal", "merged", "simultaneous"]

_MOST = 1e100  # of any number: so many seconds and bytes multiply without overflow


class Group(NamedTuple):
  """Layers whose gradients travel together.

  Attributes:
    layers: their numbers, the first layer first; neighbours.
    kind: "normal" is one layer and "merged" are several, which wait until everything before has been sent;
      "simultaneous" does not.
    after: how many groups must have been sent before this one starts: all before it, or those that must for no more
      than `ways` of them to be under way at once.

  Example:
    >>> plan("single", [1.0, 1.0], [8, 8], alpha=0.1, beta=0.1, gamma=2.0).groups
    (Group(layers=(0, 1), kind='merged', after=0),)
  """

  layers: tuple[int, ...]
  kind: GroupKind
  after: int


class Plan(NamedTuple):
  """What travels together, in which order, and when, if the model is right.

  Attributes:
    kind: how it was made.
    backward_times: seconds of each layer.
    sizes: bytes of each layer.
    link: what communications cost.
    groups: `Group`s in the order in which they are sent, the last layers first.
    timeline: when each group is sent, a `Sent` each, in seconds from the start of backward.

  Example:
    >>> one = plan("wfbp", [1.0, 1.0], [8, 8], alpha=0.5, beta=0.25, gamma=2.0)
    >>> [group.layers for group in one.groups], one.iteration_time
    ([(1,), (0,)], 6.0)
  """

  kind: str
  backward_times: tuple[float, ...]
  sizes: tuple[float, ...]
  link: Link
  groups: tuple[Group, ...]
  timeline: tuple[Sent, ...]

  @property
  def iteration_time(self) -> float:
    """Seconds from the start of backward to the end of the last communication."""
    return max(sent.end for sent in self.timeline)

  @property
  def backward(self) -> float:
    """Seconds of backward alone."""
    return sum(self.backward_times)

  @property
  def hidden(self) -> float:
    """Share of the time in which something is sent that backward hides."""
    busy = covered([(sent.start, sent.end) for sent in self.timeline])
    return 1.0 if not busy else min(1.0, 1 - (self.iteration_time - self.backward) / busy)

  def size_of(self, group: Group) -> float:
    """Bytes of a group."""
    return sum(self.sizes[layer] for layer in group.layers)

  def __str__(self) -> str:
    head = f"{'group':>5}  {'layers':<14}{'kind':<14}{'bytes':>14}{'ready':>10}{'start':>10}{'end':>10}"
    lines = [head]
    for number, (group, sent) in enumerate(zip(self.groups, self.timeline, strict=True)):
      first, last = group.layers[0], group.layers[-1]
      layers = str(first) if first == last else f"{first} … {last}"
      times = f"{sent.ready:>10.6f}{sent.start:>10.6f}{sent.end:>10.6f}"
      lines.append(f"{number:>5}  {layers:<14}{group.kind:<14}{self.size_of(group):>14,.0f}{times}")
    end = f"{self.kind}: {self.iteration_time:.6f} s, backward alone {self.backward:.6f} s"
    return "\n".join([*lines, f"{end}, {100 * self.hidden:.0f} % of the sending is hidden"])


def plan(
  kind: Kind,
  backward_times: Sequence[float],
  sizes: Sequence[float],
  *,
  alpha: float,
  beta: float,
  gamma: float,
  ways: int = 2,
) -> Plan:
  """Plans which gradients travel together and which at once, and predicts when each is sent.

  - "single": everything in one communication, after backward.
  - "wfbp": each layer by itself, one after the other (wait-free backpropagation).
  - "mg_wfbp": a layer joins the one before it wherever that one is ready before a communication of its own would be
    through its start-up, `ready(l − 1) < τ(l) + α`. Never slower than "wfbp" in the model.
  - "asc_wfbp": Theorem 1 of the paper decides for each layer between normal, merged and simultaneous. It takes for
    granted that two at once are faster than one after the other (γ < 2) and that the second slows only itself; where
    the simulation says that its plan is slower than that of "mg_wfbp", it is that of "mg_wfbp".
  - "optimal": with `ways=1` the fastest of all ways to merge, by exact dynamic programming. With more, the fastest that
    a search over all groups and kinds finds (`search` says what it drops); never slower than "asc_wfbp".

  Args:
    kind: one of these.
    backward_times: seconds that backward takes for each layer, index 0 the first layer, whose gradient comes last.
    sizes: bytes of the gradient of each layer.
    alpha: α, seconds to start a communication, such as one all-reduce.
    beta: β, seconds a byte of one that has the network for itself.
    gamma: γ ≥ 1, two at once take so many times as long for a byte.
    ways: how many communications may be under way at once, for "asc_wfbp" and "optimal"; the paper's two.

  Returns:
    A `Plan`.

  Raises:
    ValueError: for an unknown kind, lengths that differ, or numbers outside these, naming which.

  Example:
    >>> import jaxsparse as js
    >>> times, sizes = [0.25, 0.25, 0.25, 0.25], [1e6, 1e6, 1e6, 16e6]
    >>> for kind in ("single", "wfbp", "mg_wfbp", "optimal"):
    ...   made = js.overlap.plan(kind, times, sizes, alpha=0.5, beta=2**-24, gamma=1.5)
    ...   print(f"{kind:<8} {made.iteration_time:.2f} s, {len(made.groups)} groups")
    single   2.63 s, 1 groups
    wfbp     3.38 s, 4 groups
    mg_wfbp  2.63 s, 1 groups
    optimal  1.79 s, 2 groups
  """
  if kind not in get_args(Kind):
    raise ValueError(f"plan: kind={kind!r}, choose one of {', '.join(map(repr, get_args(Kind)))}")
  times, bytes_ = _checked("backward_times", backward_times), _checked("sizes", sizes)
  if len(times) != len(bytes_):
    raise ValueError(f"plan: {len(times)} backward_times and {len(bytes_)} sizes, give one of each for every layer")
  for name, value, least in (("alpha", alpha, 0), ("beta", beta, 0), ("gamma", gamma, 1)):
    if not _is_number(value) or not least <= value <= _MOST:
      raise ValueError(f"plan: {name}={value!r}, choose a number from {least} to {_MOST:g}")
  check_whole("plan", 1, ways=ways)
  layers = _Layers(times, bytes_, Link(float(alpha), float(beta), float(gamma)), min(int(ways), max(1, len(times))))
  groups = _KINDS[kind](layers)
  return Plan(kind, times, bytes_, layers.link, groups, layers.timeline(groups))


class _Layers(NamedTuple):
  """What a planner knows."""

  times: tuple[float, ...]
  sizes: tuple[float, ...]
  link: Link
  ways: int

  @property
  def ready(self) -> list[float]:
    """Seconds from the start of backward until the gradient of each layer is there."""
    return list(itertools.accumulate(reversed(self.times)))[::-1]

  def timeline(self, groups: Sequence[Group]) -> tuple[Sent, ...]:
    ready = self.ready
    sizes = [sum(self.sizes[layer] for layer in group.layers) for group in groups]
    return simulate([ready[group.layers[0]] for group in groups], sizes, [group.after for group in groups], self.link)

  def seconds(self, groups: Sequence[Group]) -> float:
    return max(sent.end for sent in self.timeline(groups))

  def grouped(self, firsts: Iterable[int], at_once: Callable[[int], bool] = lambda _: False) -> tuple[Group, ...]:
    """Groups that begin at these layers, in descending order; `at_once` says of a first layer whether it waits."""
    groups: list[Group] = []
    last = len(self.sizes) - 1
    for number, first in enumerate(firsts):
      after, layers = number, tuple(range(first, last + 1))
      if at_once(first):
        after = max([0, number - self.ways + 1, *(group.after for group in groups[-1:])])
      kind: GroupKind = "simultaneous" if after < number else "merged" if len(layers) > 1 else "normal"
      groups.append(Group(layers, kind, after))
      last = first - 1
    return tuple(groups)


def _single(layers: _Layers) -> tuple[Group, ...]:
  return layers.grouped([0])


def _wfbp(layers: _Layers) -> tuple[Group, ...]:
  return layers.grouped(range(len(layers.sizes))[::-1])


def _mg_wfbp(layers: _Layers) -> tuple[Group, ...]:
  """Merges l into l − 1 iff ready(l − 1) < τ(l) + α."""
  ready, link = layers.ready, layers.link
  firsts, start, end, size = [], 0.0, 0.0, 0.0
  for layer in reversed(range(len(ready))):
    start, size = max(start, end, ready[layer]), size + layers.sizes[layer]
    if layer and ready[layer - 1] < start + link.alpha:
      continue
    firsts.append(layer)
    end, size = start + link.seconds(size), 0.0
  return layers.grouped(firsts)


def _asc_wfbp(layers: _Layers) -> tuple[Group, ...]:
  plans = [_theorem_1(layers), _mg_wfbp(layers)]
  return min(plans, key=layers.seconds)


def _theorem_1(layers: _Layers) -> tuple[Group, ...]:
  """Algorithm 1 of the paper, with its errata: the type of each layer, from the last one down.

  Times are the paper's own estimates here: the penalty of Eq. 13 is that of the later one alone.
  """
  ready, (alpha, beta, _) = layers.ready, layers.link
  at_once: dict[int, bool] = {}
  start, end, size = 0.0, 0.0, 0.0
  before: tuple[float, float] | None = None  # start and bytes of the communication before
  for layer in reversed(range(len(ready))):
    size += layers.sizes[layer]
    start = max(start, end, ready[layer])  # of a normal one; a merged layer hands it on
    alone = alpha + beta * size
    penalty = 0.0 if before is None else _penalty(ready[layer], *before, layers.link)
    simultaneous = True  # the first layer, always
    if layer:
      following = ready[layer - 1]
      q1 = start + alone <= following
      q2 = following < start + alpha
      q3 = ready[layer] + alone + penalty < following
      if not q1 and q2 and not q3:
        continue
      simultaneous = not q1
    if simultaneous:
      start, alone = ready[layer], alone + penalty
    at_once[layer] = simultaneous
    before, start, end, size = (start, size), 0.0, max(end, start + alone), 0.0
  return layers.grouped(at_once, at_once.__getitem__)


def _penalty(start: float, earlier: float, size: float, link: Link) -> float:
  """Eq. 13: what a communication that starts at `start` loses to one of `size` bytes that started earlier."""
  alone = link.seconds(size)
  shared = 1 - (start - earlier) / alone if alone else 0.0
  return (link.gamma - 1) * link.beta * size * min(1.0, max(0.0, shared))


def _optimal(layers: _Layers) -> tuple[Group, ...]:
  best = _asc_wfbp(layers)
  for ways in sorted({1, layers.ways}):  # the merges alone are found in no time, and bound the search for more
    found = search.fastest(layers.ready, layers.sizes, layers.link, ways, layers.seconds(best))
    if found is not None:
      best = min(layers.grouped(found, found.__getitem__), best, key=layers.seconds)
  return best


_KINDS: dict[str, Callable[[_Layers], tuple[Group, ...]]] = {
  "single": _single,
  "wfbp": _wfbp,
  "mg_wfbp": _mg_wfbp,
  "asc_wfbp": _asc_wfbp,
  "optimal": _optimal,
}


def _checked(name: str, values: Sequence[float]) -> tuple[float, ...]:
  given = list(values) if np.iterable(values) else []
  if not given:
    raise ValueError(f"plan: {name}={values!r}, give a number for every layer, one at least")
  for layer, value in enumerate(given):
    if not _is_number(value) or not 0 <= value <= _MOST:
      raise ValueError(f"plan: {name}[{layer}]={value!r}, choose a number from 0 to {_MOST:g}")
  return tuple(map(float, given))


def _is_number(value: Any) -> bool:
  return isinstance(value, numbers.Real) and not isinstance(value, bool)


def covered(spans: Sequence[tuple[float, float]]) -> float:
  """Length of the union of spans."""
  total, reached = 0.0, -math.inf
  for start, end in sorted(spans):
    total += max(0.0, end - max(start, reached))
    reached = max(reached, end)
  return total
