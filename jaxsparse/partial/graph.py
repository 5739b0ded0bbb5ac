"""The sync-graph of the last groups, and which members the next one needs so that it stays connected (§4).

Workers are joined by an edge if some group had both. A group of P joins at most P components into one, so with

    c_j  components of the graph of the last j groups,         j = 0 … T

a graph over the last T groups can be kept connected for ever exactly if c_j ≤ 1 + (T − j)(P − 1) at every j: T − j
groups are still to come before these j are the oldest of T. At j = 0 that is T ≥ ⌈(N − 1)/(P − 1)⌉. The next group g
keeps it if for every j it meets enough components of the last j groups:

    met_j(g) ≥ c_j − (T − 1 − j)(P − 1)

which asks something of g only where the graph is about to fall apart, and can always be done once every worker is
ready: partitions are nested, so members of different coarse components are in different fine ones too.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Need(NamedTuple):
  """What the next group has to do: meet at least `met` of the components.

  Attributes:
    component: of each worker, a number.
    met: how many different ones the group must have members of, 2 or more.

  Example:
    >>> Need({0: 0, 1: 0, 2: 2, 3: 2}, met=2).of([0, 1])
    1
  """

  component: dict[int, int]
  met: int

  def of(self, workers: Iterable[int]) -> int:
    """How many components these workers are in."""
    return len({self.component[worker] for worker in workers})


def is_connected(workers: Iterable[int], groups: Iterable[Sequence[int]]) -> bool:
  """Whether the groups join all of the workers.

  Example:
    >>> is_connected(range(4), [(0, 1), (2, 3)]), is_connected(range(4), [(0, 1), (2, 3), (1, 2)])
    (False, True)
  """
  *_, component = _partitions(workers, groups)
  return len(set(component.values())) <= 1


def needs(workers: Iterable[int], groups: Sequence[Sequence[int]], window: int, size: int) -> list[Need]:
  """What the next group of `size` must do, after `groups`, oldest first, so that any `window` groups are connected.

  Example:
    >>> [need.met for need in needs(range(4), [(0, 1), (2, 3)], window=3, size=2)]  # the third must join the pairs
    [2, 2, 2]
    >>> needs(range(4), [(0, 1), (2, 3)], window=10, size=2)
    []
  """
  found = []
  for past, component in enumerate(_partitions(workers, reversed(groups[max(0, len(groups) - window + 1) :]))):
    count = len(set(component.values()))
    if count == 1:
      break  # and so with every older group
    if (met := count - (window - 1 - past) * (size - 1)) > 1:
      found.append(Need(component, met))
  return found


def usable(workers: Iterable[int], groups: Sequence[Sequence[int]], window: int, size: int) -> int:
  """How many of the last groups can be part of connected windows to come: after workers came or went, maybe not all.

  Example:
    >>> usable(range(3), [(0, 1), (1,), (1,)], window=3, size=2)  # two more would leave 0 and 2 out
    1
  """
  recent = list(reversed(groups[max(0, len(groups) - window) :]))
  for past, component in enumerate(_partitions(workers, recent)):
    if len(set(component.values())) > 1 + (window - past) * (size - 1):
      return past - 1
  return len(recent)


def first_group(queue: Sequence[int], size: int, needs: Sequence[Need]) -> list[int] | None:
  """The `size` workers that have waited longest among those groups that do all that is needed; None if none does.

  Whoever waits longest is in it, since the other `size` − 1 can meet what the best group meets.

  Example:
    >>> first_group([0, 1, 2, 3], 2, [Need({0: 0, 1: 0, 2: 2, 3: 2}, met=2)])
    [0, 2]
  """

  def can_grow(chosen: list[int], rest: Sequence[int]) -> bool:
    """Each further member meets one more component of all partitions at once, while there is one to meet."""
    free = size - len(chosen)
    return all(min(need.of([*chosen, *rest]), need.of(chosen) + free) >= need.met for need in needs)

  if len(queue) < size or not can_grow([], queue):
    return None
  chosen: list[int] = []
  for position, worker in enumerate(queue):
    if len(chosen) < size and can_grow([*chosen, worker], queue[position + 1 :]):
      chosen.append(worker)
  return chosen


def _partitions(workers: Iterable[int], groups: Iterable[Sequence[int]]) -> Iterator[dict[int, int]]:
  """The component of each worker: without any group, with the first, with the first two and so on."""
  component = {worker: worker for worker in workers}
  yield component
  for group in groups:
    joined = {component[member] for member in group}
    if len(joined) > 1:
      one = min(joined)
      component = {worker: one if own in joined else own for worker, own in component.items()}
    yield component
