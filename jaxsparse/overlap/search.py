"""The fastest plan, by dynamic programming from the last layer to the first.

What is still to come depends on what has been sent only through when the network will be free. After the layers
i … L − 1 have been put into groups, a partial plan is therefore described by when its last `ways` communications end if
nothing else starts, but no earlier than layer i − 1 is ready, for nothing starts before that. A partial plan that is no
earlier than another one in any of these is dropped, and of what is left the latest beyond a fixed number.

With one communication at a time that is one number, an earlier end is never worse for the rest, and the result is the
fastest plan there is. With more it is a rule of thumb: who is early may slow somebody down. Beside every plan that
there is, of up to seven layers, it was at most 1 % off, and mostly not at all.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from jaxsparse.overlap.network import Flows, Link

_MOST = 24  # partial plans that are followed from a layer on; the earliest, where there are more


class _Partial(NamedTuple):
  """Partial plans that have grouped the same layers.

  Attributes:
    flows: their communications, the last `ways` of them.
    layer: i64[r], where the last group of each was added, one above its layers.
    row: i64[r], the partial plan there that it was added to.
    at_once: bool[r], whether that group does not wait.
  """

  flows: Flows
  layer: np.ndarray
  row: np.ndarray
  at_once: np.ndarray

  def take(self, rows: np.ndarray | slice) -> Self:
    return type(self)(self.flows.take(rows), self.layer[rows], self.row[rows], self.at_once[rows])


def fastest(
  ready: Sequence[float], sizes: Sequence[float], link: Link, ways: int, limit: float = np.inf
) -> dict[int, bool] | None:
  """The first layer of each group of the fastest plan, in the order of sending, and whether the group does not wait.

  Args:
    ready: seconds until the gradient of each layer is there, descending.
    sizes: bytes of each layer.
    link: what communications cost.
    ways: how many may be under way at once.
    limit: seconds of a plan that is known; only those that are not slower are looked for.

  Returns:
    None where there is no such plan.

  Example:
    >>> fastest([2.0, 1.9, 1.0], [4.0, 4.0, 1.0], Link(alpha=0.5, beta=0.1, gamma=1.5), ways=1)
    {2: False, 0: False}
  """
  count = len(ready)
  nothing = np.zeros(1, int)
  start = _Partial(Flows.none(1, ways), nothing, nothing, nothing.astype(bool))
  waiting: list[list[_Partial]] = [[] for _ in range(count)] + [[start]]
  best: dict[int, _Partial] = {}
  for layer in range(count, -1, -1):
    if not waiting[layer]:
      continue
    best[layer] = _earliest(_joined(waiting[layer]), ready[layer - 1] if layer else None, link)
    for first, grown in _grown(best[layer], layer, np.array(ready), np.array(sizes), link, limit):
      waiting[first].append(grown)
  return _traced(best, count) if 0 in best else None


def _grown(
  partial: _Partial, layer: int, ready: np.ndarray, sizes: np.ndarray, link: Link, limit: float
) -> list[tuple]:
  """Every partial plan with one group more, by its first layer: those layers up to `layer` − 1."""
  if not layer:
    return []
  ends = partial.flows.projected(link.gamma).ends
  free = np.stack([ends.max(1), np.maximum(partial.flows.now, ends[:, 0])], 1)  # where it waits, where it does not
  size = np.cumsum(sizes[:layer][::-1])[::-1]
  starts = np.maximum(free[:, :, None], ready[None, None, :layer])  # [row, at once, first]
  # The rest takes its seconds at the network's best, which is a bound that no continuation goes below.
  speed = max(senders / float(link.slowdown(senders)) for senders in range(1, partial.flows.left.shape[1] + 1))
  promising = starts + link.alpha + link.beta * size[0] / speed <= limit * (1 + 1e-9)
  promising[:, 1] &= starts[:, 1] < free[:, :1]
  first, row, at_once = np.nonzero(promising.transpose(2, 0, 1))
  flows = partial.flows.take(row).started(starts[row, at_once, first], size[first], link)
  grown = _Partial(flows, np.full(row.size, layer), row, at_once.astype(bool))
  bounds = np.searchsorted(first, np.arange(layer + 1)).tolist()
  return [(j, grown.take(slice(a, b))) for j, (a, b) in enumerate(itertools.pairwise(bounds)) if a < b]


def _earliest(partial: _Partial, before: float | None, link: Link) -> _Partial:
  """Those that no other one is as early as in every respect; nothing more starts before `before`, or None at all."""
  ends = partial.flows.projected(link.gamma).ends
  ends[:, 0] = np.maximum(ends[:, 0], partial.flows.now)
  ends = ends.max(1, keepdims=True) if before is None else np.maximum(ends, before)
  left = np.lexsort((ends.sum(1), ends.max(1)))
  kept: list[int] = []
  while left.size and len(kept) < _MOST:
    kept.append(left[0])
    left = left[np.any(ends[left] < ends[left[0]], axis=1)]
  return partial.take(np.array(kept))


def _joined(parts: list[_Partial]) -> _Partial:
  flows = Flows(*(np.concatenate(column) for column in zip(*(part.flows for part in parts), strict=True)))
  rest = (np.concatenate(column) for column in list(zip(*parts, strict=True))[1:])
  return _Partial(flows, *rest)


def _traced(best: dict[int, _Partial], count: int) -> dict[int, bool]:
  """The groups of the one that ended first, from the last layer on."""
  result: list[tuple[int, bool]] = []
  layer, row = 0, 0
  while layer < count:
    partial = best[layer]
    result.append((layer, bool(partial.at_once[row])))
    layer, row = int(partial.layer[row]), int(partial.row[row])
  return dict(reversed(result))
