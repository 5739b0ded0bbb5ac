"""The fastest plan, by dynamic programming from the last layer to the first.

A partial plan groups the layers i … L − 1. Its communications affect the groups of the layers 0 … i − 1 only by the
times at which its last `ways` communications end if nothing else starts, and ends before layer i − 1 is ready count as
equal, since nothing starts before. These `ways` times are the state of the dynamic program. The search drops a partial
plan if another one is no later in all of them, and keeps a fixed number of the others, the earliest.

With `ways=1` the state is one time, an earlier end is never worse for the remaining layers, and the result is optimal.
With more it is a heuristic: a communication that starts earlier may slow another one down. Compared with all plans of
up to seven layers it was optimal in most cases, and at most 1 % slower.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from jaxsparse.overlap.network import Flows, Link

_Rows = TypeVar("_Rows")
_MOST = 24  # partial plans kept at each layer, the earliest ones


class _Partial(NamedTuple):
  """r partial plans of the same layers.

  Attributes:
    flows: the last `ways` communications of each.
    layer: i64[r], the layer after those of the last group of each: its predecessor is a partial plan from there on.
    row: i64[r], the row of the predecessor.
    at_once: bool[r], whether the last group starts without waiting for the communications before it.
  """

  flows: Flows
  layer: np.ndarray
  row: np.ndarray
  at_once: np.ndarray


def find_fastest(
  ready: Sequence[float], sizes: Sequence[float], link: Link, ways: int, limit: float = np.inf
) -> dict[int, bool] | None:
  """The first layer of each group of the fastest plan, in the order of sending, and whether the group starts at once.

  Args:
    ready: seconds from the start of backward until the gradient of each layer is ready, descending.
    sizes: bytes of each layer.
    link: α, β, γ of communications.
    ways: maximum number of communications at the same time.
    limit: seconds of a known plan; the search drops slower ones.

  Returns:
    None if no plan is within the limit.

  Example:
    >>> find_fastest([2.0, 1.9, 1.0], [4.0, 4.0, 1.0], Link(alpha=0.5, beta=0.1, gamma=1.5), ways=1)
    {2: False, 0: False}
  """
  count, nothing = len(ready), np.zeros(1, int)
  waiting = {count: [_Partial(Flows.empty(1, ways), nothing, nothing, nothing.astype(bool))]}
  best: dict[int, _Partial] = {}
  for layer in range(count, -1, -1):
    if layer not in waiting:
      continue
    together = jax.tree.map(lambda *parts: np.concatenate(parts), *waiting.pop(layer))
    best[layer] = _prune(together, ready[layer - 1] if layer else None, link)
    for first, grown in _extend(best[layer], layer, np.array(ready), np.array(sizes), link, limit) if layer else ():
      waiting.setdefault(first, []).append(grown)
  if 0 not in best:
    return None
  firsts, layer, row = dict[int, bool](), 0, 0  # read back, from the first layer to the last
  while layer < count:
    chosen = best[layer]
    firsts = {layer: bool(chosen.at_once[row])} | firsts
    layer, row = int(chosen.layer[row]), int(chosen.row[row])
  return firsts


def _extend(
  partial: _Partial, layer: int, ready: np.ndarray, sizes: np.ndarray, link: Link, limit: float
) -> list[tuple]:
  """Extends partial plans by one group of the layers j … `layer` − 1, for every j: pairs of j and partial plans."""
  ends = partial.flows.finish(link.gamma).ends
  free = np.stack([ends.max(1), np.maximum(partial.flows.now, ends[:, 0])], 1)  # if the group waits, if it does not
  size = np.cumsum(sizes[:layer][::-1])[::-1]
  starts = np.maximum(free[:, :, None], ready[None, None, :layer])  # [row, at once, first]
  # Lower bound on the end of any complete plan: all remaining bytes at the highest total speed of the network.
  speed = max(senders / float(link.slowdown(senders)) for senders in range(1, partial.flows.left.shape[1] + 1))
  promising = starts + link.alpha + link.beta * size[0] / speed <= limit * (1 + 1e-9)
  promising[:, 1] &= starts[:, 1] < free[:, :1]
  first, row, at_once = np.nonzero(promising.transpose(2, 0, 1))
  flows = _take(partial.flows, row).start(starts[row, at_once, first], size[first], link)
  grown = _Partial(flows, np.full(row.size, layer), row, at_once.astype(bool))
  bounds = np.searchsorted(first, np.arange(layer + 1)).tolist()
  return [(j, _take(grown, slice(a, b))) for j, (a, b) in enumerate(itertools.pairwise(bounds)) if a < b]


def _prune(partial: _Partial, before: float | None, link: Link) -> _Partial:
  """The partial plans that no other one dominates, at most `_MOST`.

  Args:
    partial: partial plans of the same layers.
    before: seconds until the next layer is ready; None if there is none.
    link: α, β, γ of communications.
  """
  ends = partial.flows.finish(link.gamma).ends
  ends[:, 0] = np.maximum(ends[:, 0], partial.flows.now)
  ends = ends.max(1, keepdims=True) if before is None else np.maximum(ends, before)
  left = np.lexsort((ends.sum(1), ends.max(1)))
  kept: list[int] = []
  while left.size and len(kept) < _MOST:
    kept.append(left[0])
    left = left[np.any(ends[left] < ends[left[0]], axis=1)]
  return _take(partial, np.array(kept))


def _take(rows: _Rows, which: np.ndarray | slice) -> _Rows:
  return jax.tree.map(lambda x: x[which], rows)
