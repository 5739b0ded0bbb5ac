"""The sync-graph of the last groups: which workers the next group needs so that all workers stay connected (§4).

The vertices are the workers; an edge joins two workers that were in one group. Progress spreads to every worker only if
the graph of recent groups is connected: here, the graph of any T consecutive groups. A group of P workers joins at most
P components into one. With

    c_j = number of components of the graph of the last j groups,        j = 0 … T

all future windows of T groups can be connected if and only if c_j ≤ 1 + (T − j)(P − 1) for every j, since T − j more
groups will be in one window with these j. For j = 0 that is T ≥ ⌈(N − 1)/(P − 1)⌉. The next group g preserves the
condition if it meets enough components of the last j groups, for every j:

    met_j(g) ≥ c_j − (T − 1 − j)(P − 1)

That restricts g only where the graph is about to fall apart. Once all workers are ready a valid g exists: the
partitions are nested, so workers in different components of a coarse one are in different components of the finer ones
too.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Need(NamedTuple):
  """A condition for the next group: it has members of at least `met` components of a partition.

  Attributes:
    component: the number of each worker's component.
    met: 2 or more.

  Example:
    >>> Need({0: 0, 1: 0, 2: 2, 3: 2}, met=2).of([0, 1])
    1
  """

  component: dict[int, int]
  met: int

  def of(self, workers: Iterable[int]) -> int:
    """The number of components that these workers are in."""
    return len({self.component[worker] for worker in workers})


def needs(workers: Iterable[int], groups: Sequence[Sequence[int]], window: int, size: int) -> list[Need]:
  """Conditions for the next group of `size` after `groups`, oldest first: any `window` groups then connect all workers.

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
      break  # and the graph with older groups is connected too
    if (met := count - (window - 1 - past) * (size - 1)) > 1:
      found.append(Need(component, met))
  return found


def usable(workers: Iterable[int], groups: Sequence[Sequence[int]], window: int, size: int) -> int:
  """How many of the last groups can be in windows that are connected; not all, if a worker joined or left since.

  Example:
    >>> usable(range(3), [(0, 1), (1,), (1,)], window=3, size=2)  # with two of them, a third could not join 0, 1, 2
    1
  """
  recent = list(reversed(groups[max(0, len(groups) - window) :]))
  for past, component in enumerate(_partitions(workers, recent)):
    if len(set(component.values())) > 1 + (window - past) * (size - 1):
      return past - 1
  return len(recent)


def first_group(queue: Sequence[int], size: int, needs: Sequence[Need]) -> list[int] | None:
  """The `size` workers that have waited longest among the groups that meet all `needs`; None if there is no such group.

  The worker at the head of the queue is always in it: the other `size` − 1 can meet as many components with it.

  Example:
    >>> first_group([0, 1, 2, 3], 2, [Need({0: 0, 1: 0, 2: 2, 3: 2}, met=2)])
    [0, 2]
  """

  def can_grow(chosen: list[int], rest: Sequence[int]) -> bool:
    """Whether `rest` can complete `chosen`: each further member can meet a new component of every partition."""
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
  """The component of each worker in the graphs of no group, of the first group, of the first two, and so on."""
  component = {worker: worker for worker in workers}
  yield component
  for group in groups:
    joined = {component[member] for member in group}
    if len(joined) > 1:
      one = min(joined)
      component = {worker: one if own in joined else own for worker, own in component.items()}
    yield component
