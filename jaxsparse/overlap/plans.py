"""Plans of communication during backward: WFBP, MG-WFBP, ASC-WFBP, and faster ones.

Backward computes the gradient of the last layer first, so gradients can be sent while
it continues. Each communication costs a start-up, so small neighbouring gradients are
sent in one communication (merged) or in overlapping ones (simultaneous):

    backward      |--5--|--4--|--3--|--2--|--1--|
    single                                      |α 5 4 3 2 1 ........|
    wfbp                |α 5..|α 4..|α 3..|α 2..|α 1..|
    mg_wfbp             |α 5..|     |α 4 3....| |α 2 1....|
    asc_wfbp            |α 5..|     |α 4 3......|
                                          |α 2 1....|             overlaps with the one before: contention γ

A plan is data, made by pure functions; one simulation (`network`) predicts the times of
all. S. Shi, X. Chu, B. Li: "Exploiting Simultaneous Communications to Accelerate Data
Parallel Distributed Deep Learning", INFOCOM 2021.
"""

import functools
import itertools
import numbers
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from jaxsparse.overlap import search
from jaxsparse.overlap.network import Sent, simulate
from jaxsparse.types import Link, check_whole, is_number

Kind = Literal["single", "wfbp", "mg_wfbp", "theorem_1", "asc_wfbp", "optimal"]
GroupKind = Literal["normal", "merged", "simultaneous"]

_MOST = 1e100  # largest number of seconds or bytes: products do not overflow


class LayerGroup(NamedTuple):
  """Layers whose gradients are sent in one communication.

  Attributes:
    layers: their numbers, consecutive and increasing.
    kind: "normal", one layer, and "merged", several layers, start when all
      communications before have ended; "simultaneous" starts earlier.
    after: the groups that must have ended before this one starts: all before it, or for
      "simultaneous" all but the `ways` − 1 that are predicted to end last.

  Example:
    >>> plan("single", [1.0, 1.0], [8, 8], alpha=0.1, beta=0.1, gamma=2.0).groups
    (LayerGroup(layers=(0, 1), kind='merged', after=()),)
  """

  layers: tuple[int, ...]
  kind: GroupKind
  after: tuple[int, ...]


class Plan(NamedTuple):
  """Groups of layers in the order of sending, and their predicted times.

  Attributes:
    kind: the algorithm that made the plan.
    backward_times: seconds of backward of each layer.
    sizes: bytes of the gradient of each layer.
    link: α, β, γ of communications.
    groups: in the order of sending, the last layers first. Each has the numbers of its
      `layers`, a `kind`, and `after`, the numbers of the groups that must have ended
      before it starts.
    timeline: predicted `ready`, `start` and `end` of each group.

  Example:
    >>> one = plan("wfbp", [1.0, 1.0], [8, 8], alpha=0.5, beta=0.25, gamma=2.0)
    >>> [group.layers for group in one.groups], one.iteration_time, one.exposed
    ([(1,), (0,)], 6.0, 4.0)
  """

  kind: str
  backward_times: tuple[float, ...]
  sizes: tuple[float, ...]
  link: Link
  groups: tuple[LayerGroup, ...]
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
  def exposed(self) -> float:
    """Seconds of communication that backward does not hide (Figure 6): from its end to that of the last message."""
    return self.iteration_time - self.backward

  def size_of(self, group: LayerGroup) -> float:
    """Bytes of a group."""
    return sum(self.sizes[layer] for layer in group.layers)

  def __str__(self) -> str:
    """A table of the groups with their times in seconds, and a line of totals."""
    lines = [
      f"{'layers':<14}{'kind':<14}{'bytes':>14}{'ready':>10}{'start':>10}{'end':>10}"
    ]
    for group, sent in zip(self.groups, self.timeline, strict=True):
      layers = (
        f"{group.layers[0]} … {group.layers[-1]}"
        if len(group.layers) > 1
        else str(group.layers[0])
      )
      times = "".join(f"{time:>10.6f}" for time in sent)
      lines.append(f"{layers:<14}{group.kind:<14}{self.size_of(group):>14,.0f}{times}")
    seconds = f"{self.iteration_time:.6f} s, backward alone {self.backward:.6f} s"
    return "\n".join(
      [
        *lines,
        f"{self.kind}: {seconds}, {self.exposed:.6f} s of communication are exposed",
      ]
    )


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
  """Plans which gradients are sent in one communication and which communications overlap, and predicts their times.

  - "single": all gradients in one communication, after backward.
  - "wfbp": one communication for each layer, one after the other (wait-free
    backpropagation).
  - "mg_wfbp": merges layer l into layer l − 1 if l − 1 is ready before the start-up of
    a communication of l would end, `ready(l − 1) < τ(l) + α` if it starts at τ(l).
    Never slower than "wfbp" in the model.
  - "theorem_1": Theorem 1 of the paper chooses for each layer between normal, merged
    and simultaneous. It assumes that two overlapping communications are faster than one
    after the other (γ < 2) and that the second slows only itself down. Where that does
    not hold, the simulation may predict more seconds than for "mg_wfbp".
  - "asc_wfbp": the plan of "theorem_1", or that of "mg_wfbp" if the simulation predicts
    fewer seconds for it.
  - "optimal": with `ways=1` the fastest of all merges, by exact dynamic programming.
    With more, the fastest plan that a search over all groups and kinds finds (`search`
    describes what it drops); never slower than "asc_wfbp".

  Args:
    kind: one of these.
    backward_times: seconds of backward of each layer, index 0 the first layer, whose
      gradient is ready last.
    sizes: bytes of the gradient of each layer.
    alpha: α, seconds of the start-up of a communication, for example an all-reduce.
    beta: β, seconds per byte of a transfer without overlap.
    gamma: γ ≥ 1, contention factor: per-byte slowdown when two transfers overlap.
    ways: maximum number of overlapping communications, for "theorem_1", "asc_wfbp" and
      "optimal"; two in the paper.

  Returns:
    A `Plan`.

  Raises:
    ValueError: for an unknown kind, lengths that differ, or a number outside its range,
      which the message names.

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
    raise ValueError(
      f"plan: kind={kind!r}, choose one of {', '.join(map(repr, get_args(Kind)))}"
    )
  times = _checked_row("backward_times", backward_times)
  bytes_ = _checked_row("sizes", sizes)
  if len(times) != len(bytes_):
    raise ValueError(
      f"plan: {len(times)} backward_times and {len(bytes_)} sizes, give one of each for every layer"
    )
  link = Link(
    _checked("alpha", alpha), _checked("beta", beta), _checked("gamma", gamma, least=1)
  )
  check_whole("plan", 1, ways=ways)
  ways = min(int(ways), len(times))
  # seconds until the gradient of each layer is ready
  ready = list(itertools.accumulate(reversed(times)))[::-1]
  # `build` makes a plan from {first layer of a group: whether it starts at once},
  # in the order of sending. The plan that `build` gets has no groups and times yet.
  build = functools.partial(
    _build, Plan(kind, times, bytes_, link, (), ()), ready, ways
  )
  if kind == "single":
    return build({0: False})
  if kind == "wfbp":
    return build(dict.fromkeys(reversed(range(len(times))), False))
  if kind in ("mg_wfbp", "theorem_1"):
    return build(_merge(ready, bytes_, link, simultaneous=kind == "theorem_1"))
  merged = (
    build(_merge(ready, bytes_, link, simultaneous)) for simultaneous in (True, False)
  )
  best = min(merged, key=lambda candidate: candidate.iteration_time)
  # The search with one communication at a time is fast. Its time is a limit for the
  # search with `ways`, which drops slower plans.
  for most in sorted({1, ways}) if kind == "optimal" else ():
    if firsts := search.find_fastest(ready, bytes_, link, most, best.iteration_time):
      best = min(build(firsts), best, key=lambda candidate: candidate.iteration_time)
  return best


_Firsts = dict[int, bool]
"""The first layer of each group, in the order of sending, and whether the group starts before those before it end."""


def _build(plan: Plan, ready: Sequence[float], ways: int, firsts: _Firsts) -> Plan:
  """The plan with these groups, at most `ways` of which overlap, and their simulated times.

  Args:
    plan: a plan without groups, with its layers and link.
    ready: seconds until the gradient of each layer is ready.
    ways: maximum number of overlapping communications.
    firsts: the first layer of each group in the order of sending, and whether the group
      starts before the groups before it have ended.
  """
  groups = list[LayerGroup]()
  # a group ends where the one sent before it begins
  bounds = itertools.pairwise([len(ready), *firsts])
  layers = [tuple(range(first, end)) for end, first in bounds]
  bytes_ = [sum(plan.sizes[layer] for layer in group) for group in layers]
  # the first layer's gradient is the last of its group
  ready_groups = [ready[first] for first in firsts]
  at_once = list(firsts.values())
  after, timeline = simulate(ready_groups, bytes_, at_once, plan.link, ways)
  for index, (group, waits) in enumerate(zip(layers, after, strict=True)):
    # A group that waits for all `index` groups before it is not simultaneous.
    kind_of_group: GroupKind = (
      "simultaneous" if len(waits) < index else "merged" if len(group) > 1 else "normal"
    )
    groups.append(LayerGroup(group, kind_of_group, waits))
  return plan._replace(groups=tuple(groups), timeline=timeline)


def _merge(
  ready: Sequence[float], sizes: Sequence[float], link: Link, simultaneous: bool
) -> _Firsts:
  """Algorithm 1 of the paper, with its errata: the kind of each layer, from the last one down; or MG-WFBP.

  MG-WFBP (`simultaneous` false) has normal and merged layers only: it merges layer l
  into l − 1 iff ready(l − 1) < τ(l) + α, where τ(l) is `start`: Q2 below. Times are the
  paper's estimates, not the simulation's: Eq. 13 slows only the later of two
  communications down.
  """
  firsts = _Firsts()
  # The start and the bytes of the group that is being collected, and the time at which
  # all earlier groups have ended.
  start = 0.0
  end = 0.0
  size = 0.0
  # start and bytes of the communication before, None for the first one
  before: tuple[float, float] | None = None
  for layer in reversed(range(len(ready))):
    size += sizes[layer]
    # The start of a normal communication, or of the one that the layer is merged into.
    start = max(start, end, ready[layer])
    alone = link.seconds(size)
    # seconds of a simultaneous communication, which overlaps with the one before
    beside = alone + (_penalty(ready[layer], *before, link) if before else 0.0)
    at_once = simultaneous  # layer 0, which has no next layer, ends its group
    if layer:
      following = ready[layer - 1]
      # Q1: the communication ends before the next layer is ready, so nothing is gained
      q1 = start + alone <= following
      # Q2: the next layer is ready within its start-up, so that both can share one
      q2 = following < start + link.alpha
      # Q3: at once, beside the one before, it ends before the next layer is ready
      q3 = simultaneous and ready[layer] + beside < following
      # Merged: the next layer joins this group.
      if not q1 and q2 and not q3:
        continue
      at_once = simultaneous and not q1
    if at_once:
      start = ready[layer]
      alone = beside
    firsts[layer] = at_once
    before = start, size
    # A simultaneous communication may end before an earlier one.
    end = max(end, start + alone)
    # The next layer begins a group.
    start = 0.0
    size = 0.0
  return firsts


def _penalty(start: float, earlier: float, size: float, link: Link) -> float:
  """Eq. 13: seconds that a communication from `start` on loses to one of `size` bytes that started at `earlier`.

  The loss is (γ − 1) β for each byte that the earlier one still has to send.
  """
  alone = link.seconds(size)
  # the fraction of its bytes that is left at `start`, estimated by its seconds
  shared = 1 - (start - earlier) / alone if alone else 0.0
  shared = min(1.0, max(0.0, shared))
  return (link.gamma - 1) * link.beta * size * shared


def _checked_row(name: str, values: Sequence[float]) -> tuple[float, ...]:
  """The numbers of all layers, each checked by `_checked`; ValueError if there are none."""
  numbers_of_layers = list(values) if np.iterable(values) else []
  if not numbers_of_layers:
    raise ValueError(
      f"plan: {name}={values!r}, give a number for every layer, at least one"
    )
  return tuple(
    _checked(f"{name}[{layer}]", value) for layer, value in enumerate(numbers_of_layers)
  )


def _checked(name: str, value: Any, least: float = 0) -> float:
  """`value` as a float; ValueError unless it is a number from `least` to 10¹⁰⁰, whose products do not overflow."""
  if not is_number(value, numbers.Real) or not least <= float(value) <= _MOST:
    raise ValueError(
      f"plan: {name}={value!r}, choose a number from {least} to {_MOST:g}"
    )
  return float(value)
