"""The controller of partial reduce: who averages with whom (§3.1, §4, Figure 6). It never sees a model.

A pure state machine, without clock or network. Ready signals come in, groups go out:

    ready(2, 7) ─> signal queue ─> group filter ─> weights ─> Group((0, 2, 5), (1/3, 1/3, 1/3), iteration 7)
                   0 5 2             ^      │
                                  history of the last T groups

Groups are formed of whoever waits longest; any number of them may average at once. For an evaluation, and at the end,
all of them average (Algorithm 2, line 8): those who are ready for that wait for all others.
"""

from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from jaxsparse.partial import graph
from jaxsparse.partial.weights import Missing, Weights, constant, dynamic

PATIENCE = 10  # how many times as slow as the others a worker may be before they wait for it
MAX_ITERATION = 2**63 - 1


class Rejected(ValueError):
  """A message that the controller does not take, and why; nothing has changed.

  Example:
    >>> raise Rejected("worker 9 is unknown")
    Traceback (most recent call last):
    ...
    jaxsparse.partial.controller.Rejected: worker 9 is unknown
  """


class Group(NamedTuple):
  """Workers that average their models now.

  Attributes:
    members: their numbers, ascending.
    weights: of their models, in this order.
    iteration: what every member goes on from, the largest of theirs.
    initial: weight of the model that training started from; 0 but for dynamic weights with `missing="initial"`.
    number: 1 for the first group, and one more for each.

  Example:
    >>> Group((0, 2), (0.5, 0.5), 7).members
    (0, 2)
  """

  members: tuple[int, ...]
  weights: tuple[float, ...]
  iteration: int
  initial: float = 0.0
  number: int = 0


class Controller:
  """Forms groups of workers that are ready.

  Laws, whatever comes in which order:

  - A group has exactly P different members, all of them ready; P is `group_size`, or all who are left if fewer are.
  - Who waits longest is in the next group, and a group is formed at the latest when all are ready.
  - Any T consecutive groups connect all workers (`jaxsparse.partial.graph`), T groups after somebody came, left or
    failed at the latest. If no group that does is among those ready, they wait for one that can.
  - Weights sum to 1, with the initial model's.

  Args:
    workers: N, how many there are, numbered from 0; all of them are expected to signal until they `leave`.
    group_size: P, 2 … N.
    weights: "constant", 1/P each, or "dynamic", less for the stale (`jaxsparse.partial.weights`).
    decay: α of dynamic weights, in [0, 1).
    missing: where dynamic weights put those of iterations that nobody is at: "closest" or "initial" (the paper's).
    history: T, at least ⌈(N − 1)/(P − 1)⌉. By default 10 times that, so that a worker up to about 10 times as slow as
      the others does not hold them up.

  Raises:
    ValueError: for arguments outside their choices.

  Example:
    >>> import jaxsparse as js
    >>> controller = js.partial.Controller(4, group_size=2)
    >>> controller.ready(3, iteration=1)
    []
    >>> controller.ready(0, iteration=2)
    [Group(members=(0, 3), weights=(0.5, 0.5), iteration=2, initial=0.0, number=1)]

  The paper's §3 and §4.
  """

  def __init__(
    self,
    workers: int,
    group_size: int,
    weights: Literal["constant", "dynamic"] = "constant",
    *,
    decay: float = 0.5,
    missing: Missing = "closest",
    history: int | None = None,
  ):
    if not _is_count(workers) or workers < 2:
      raise ValueError(f"workers={workers!r}, choose a whole number of at least 2")
    if not _is_count(group_size) or not 2 <= group_size <= workers:
      raise ValueError(f"group_size={group_size!r}, choose a whole number in 2 … {workers}, the number of workers")
    if weights not in ("constant", "dynamic"):
      raise ValueError(f"weights={weights!r}, choose 'constant' or 'dynamic'")
    if missing not in ("initial", "closest"):
      raise ValueError(f"missing={missing!r}, choose 'initial' or 'closest'")
    if not isinstance(decay, int | float) or not 0 <= decay < 1:
      raise ValueError(f"decay={decay!r}, choose a number in [0, 1)")
    least = -(-(workers - 1) // (group_size - 1))
    if history is not None and (not _is_count(history) or history < least):
      raise ValueError(f"history={history!r}: {least} groups or more are needed to connect {workers} workers")
    self.workers, self.group_size = workers, group_size
    self.window = PATIENCE * least if history is None else history
    self._weights, self._decay, self._missing = weights, float(decay), missing
    self._alive = dict.fromkeys(range(workers))  # a set that keeps its order
    self._queue: dict[int, int] = {}  # who waits, first come first, with its iteration
    self._for_all: dict[int, int] = {}  # who waits for the average of all, likewise
    self._last = dict.fromkeys(range(workers), -1)  # the iteration that each signalled last
    self._group: dict[int, Group] = {}  # that each was put in and has not signalled since
    self._history: deque[Group] = deque(maxlen=self.window)
    self._formed = 0

  @property
  def alive(self) -> tuple[int, ...]:
    """The workers that have not left, ascending."""
    return tuple(sorted(self._alive))

  @property
  def waiting(self) -> tuple[int, ...]:
    """The workers that are ready and in no group yet, who waits longest first."""
    return tuple(self._queue)

  @property
  def history(self) -> tuple[Group, ...]:
    """The last groups that count for the sync-graph, oldest first, at most `window` of them."""
    return tuple(self._history)

  @property
  def size(self) -> int:
    """Members of the next group: P, or all who are left and do not wait for the average of all."""
    return min(self.group_size, len(self._active))

  def ready(self, worker: int, iteration: int) -> list[Group]:
    """A worker has done `iteration` iterations and wants to average; the groups that can be formed now.

    Raises:
      Rejected: from an unknown worker, one that left or waits already, or for an iteration it has signalled before.
    """
    self._check(worker)
    self._check_iteration(worker, iteration, self._last[worker])
    self._last[worker] = self._queue[worker] = iteration
    self._group.pop(worker, None)
    return self._form()

  def synchronize(self, worker: int, iteration: int) -> list[Group]:
    """A worker wants the average of all, and is in no other group until then: 1/N of each, whoever has left excepted.

    It may follow a group without an iteration between.

    Raises:
      Rejected: as `ready`.
    """
    self._check(worker)
    self._check_iteration(worker, iteration, self._last[worker] - (worker in self._group))
    self._last[worker] = self._for_all[worker] = iteration
    self._group.pop(worker, None)
    return self._changed(self._without(worker))

  def failed(self, worker: int, number: int) -> list[Group]:
    """A worker could not average with its group `number`: it does not count, and the worker may signal once more.

    Raises:
      Rejected: if that is not the group that the worker was put in last, or the worker has signalled since.
    """
    self._check(worker)
    group = self._group.get(worker)
    if group is None or group.number != number:
      raise Rejected(f"stale: worker {worker} is not in group {number!r}")
    del self._group[worker]
    self._last[worker] -= 1
    return self._changed([past for past in self._history if past.number != number])

  def replaced(self, worker: int) -> None:
    """A worker has the model of another one in place of its own: its next signal may be of any iteration.

    Raises:
      Rejected: from an unknown worker, or one that is ready.
    """
    self._check(worker)
    self._check_not_ready(worker)
    self._last[worker] = -1
    self._group.pop(worker, None)

  def leave(self, worker: int) -> list[Group]:
    """A worker ends, or is dead: the others go on without it.

    Raises:
      Rejected: for an unknown worker, or one that has left already.
    """
    self._check(worker)
    del self._alive[worker], self._last[worker]
    for kept in (self._queue, self._for_all, self._group):
      kept.pop(worker, None)
    return self._changed(self._without(worker))

  def join(self, worker: int) -> list[Group]:
    """A worker that left takes part again.

    Raises:
      Rejected: for an unknown worker, or one that has not left.
    """
    self._check(worker, known_as="left")
    self._alive[worker] = None
    self._last[worker] = -1
    return self._changed(list(self._history))

  def _check(self, worker: int, known_as: Literal["alive", "left"] = "alive") -> None:
    if not _is_count(worker) or not 0 <= worker < self.workers:
      raise Rejected(f"unknown: worker {worker!r}, there are 0 … {self.workers - 1}")
    if known_as == "alive" and worker not in self._alive:
      raise Rejected(f"unknown: worker {worker} has left, it has to join again")
    if known_as == "left" and worker in self._alive:
      raise Rejected(f"duplicate: worker {worker} is here already")

  def _check_iteration(self, worker: int, iteration: int, last: int) -> None:
    if not _is_count(iteration) or not 0 <= iteration <= MAX_ITERATION:
      raise Rejected(f"iteration {iteration!r} of worker {worker} is malformed, send a whole number in 0 … 2^63 − 1")
    self._check_not_ready(worker)
    if iteration <= last:
      raise Rejected(
        f"stale: iteration {iteration} of worker {worker}, which has signalled {self._last[worker]} before"
      )

  def _check_not_ready(self, worker: int) -> None:
    for kept in (self._queue, self._for_all):
      if worker in kept:
        raise Rejected(f"duplicate: worker {worker} is ready already, with iteration {kept[worker]}")

  @property
  def _active(self) -> list[int]:
    """Those who form groups."""
    return [worker for worker in self._alive if worker not in self._for_all]

  def _without(self, worker: int) -> list[Group]:
    """The history, had a worker not been there."""
    without = lambda group: group._replace(members=tuple(member for member in group.members if member != worker))
    return [without(group) for group in self._history]

  def _changed(self, history: Sequence[Group]) -> list[Group]:
    """Goes on with another history, or as much of it as connected windows can still be made of."""
    count = graph.usable(self._active, [group.members for group in history], self.window, self.size)
    self._history = deque(history[len(history) - count :], maxlen=self.window)
    return self._form()

  def _form(self) -> list[Group]:
    formed = []
    while self._queue and (members := self._next()):
      iterations = {member: self._queue.pop(member) for member in sorted(members)}
      formed.append(self._group_of(iterations, self._weigh(list(iterations.values()))))
      self._history.append(formed[-1])
    if self._for_all and not self._active:
      iterations, self._for_all = dict(sorted(self._for_all.items())), {}
      formed.append(self._group_of(iterations, constant(len(iterations))))
      self._history.clear()  # all agree now
    return formed

  def _group_of(self, iterations: dict[int, int], weights: Weights) -> Group:
    self._formed += 1
    group = Group(tuple(iterations), weights.members, max(iterations.values()), weights.initial, self._formed)
    self._group.update(dict.fromkeys(iterations, group))
    return group

  def _next(self) -> list[int] | None:
    if len(self._queue) < self.size:
      return None
    needs = graph.needs(self._active, [group.members for group in self._history], self.window, self.size)
    return graph.first_group(list(self._queue), self.size, needs)

  def _weigh(self, iterations: list[int]) -> Weights:
    if self._weights == "constant":
      return constant(len(iterations))
    return dynamic(iterations, self._decay, self._missing)


def _is_count(value: object) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)
