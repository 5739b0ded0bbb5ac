"""The controller of partial reduce: decides which workers average with each other, and how (§3, §4, Figure 6).

A pure state machine without clock, network or models. Each call tells it what a worker
has done; it returns the groups that can be formed now:

    ready(2, 7) ──> signal queue ──> group filter ──> weights ──> WorkerGroup((0, 2, 5), (1/3, 1/3, 1/3), iteration 7)
                     2, 5, 0             ^                           │
                                         └── components ─────────────┘

Workers that are ready wait in a queue, and a group is formed of those that have waited
longest. Groups may average at the same time, since no worker is in two.

The group filter (§4) keeps the workers from splitting into sets that never average with
each other. Two workers are connected if a chain of groups leads from one to the other.
Once T groups have been formed since all workers were connected last, each group has to
join two components, and ready workers of one component wait for a worker of another.
They do not wait for long: the caller, who has a clock, calls `release`. Workers that
are not ready are absent then, and all others go on without them. The first group of a
worker that was absent has to have a member that was not.

For an evaluation, and at the end of training, all workers average (Algorithm 2, line
8): a worker that asks for it joins no other group, and waits until all workers have
asked.

The weight of each model in an average is 1/P, or less for older models. For a group
whose members have done 9, 8 and 5 iterations, with α = 1/2:

    iterations     9     8     7     6     5
    k̂              1     2     3     4     5 = K
    weight       16/31  8/31  4/31  2/31  1/31      (1 − α) α^(k̂ − 1) / (1 − α^K), with sum 1
    goes to        9     8     ?     ?     5        "initial": to the initial model; "closest": 7 to 8, 6 to 5

The state of a `Controller`, by worker; dicts are in the order of insertion:

    _queue      iterations of ready workers that wait for a group, the longest-waiting first
    _for_all    iterations of the workers that wait for the average of all
    _last       last signalled iteration of each worker that has not left, less 1 after `failed`; -1 before its
                first signal, and after `replaced`
    _group      last group of each worker, until its next signal
    _absent     workers that the group filter does not wait for, until their next group or call of `synchronize`
    _component  label of each worker's component: workers with one label are connected; `_ABSENT` for all in `_absent`
    _count      number of groups formed since the components began anew (`_begin_to_connect`)
    _formed     number of groups formed so far, which is the number of the last one
    _active     workers that groups are formed of: all that have not left, without those in `_for_all`
    size        members of the next group: P, or the number of `_active` if that is smaller
    window      T
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Literal

from jaxsparse.collectives._base import check_whole
from jaxsparse.partial.net.messages import Rejected, WorkerGroup

Missing = Literal["initial", "closest"]
# from the iterations of the members to their weights, and that of the initial model
Weigh = Callable[[Sequence[int]], tuple[tuple[float, ...], float]]
# The filter does not wait for a worker that is up to about this many times slower than
# the others.
PATIENCE = 10
MAX_ITERATION = 2**62 - 1
# iterations by which a worker may be ahead of the newest one of all workers
_MOST_AHEAD = 2**20

# label of the component of all workers that are absent; other labels are worker numbers
_ABSENT = -1


class Controller:
  """Forms groups of workers that are ready.

  Whatever the order of calls:

  - A group has exactly P different members, all of them ready. P is `group_size`, or
    the number of remaining workers if that is smaller.
  - The worker that has waited longest is in the next group. A group is formed at the
    latest when all workers are ready.
  - All workers that are not absent are connected by at most T + N − P consecutive
    groups, counted from when they were connected last, or from when a worker joined,
    failed or was absent last.
  - The weights of a group, with that of the initial model, sum to 1.

  Args:
    workers: N, the number of workers. They are numbered from 0, and each is expected to
      signal until it leaves.
    group_size: P, 2 … N.
    weights: "constant", 1/P each, or "dynamic", less for older models.
    decay: α of dynamic weights, in [0, 1).
    missing: where the dynamic weights of iterations without a member go: "closest" or
      "initial" (as in the paper).
    history: T, at least ⌈(N − 1)/(P − 1)⌉, the groups that it takes to connect all
      workers. The default is 10 times that: the filter does not wait for a straggler
      that is up to about 10 times slower than the other workers.

  Raises:
    ValueError: for arguments outside these choices.

  Example:
    >>> import jaxsparse as js
    >>> controller = js.partial.Controller(4, group_size=2)
    >>> controller.ready(3, iteration=1)
    []
    >>> controller.ready(0, iteration=2)
    [WorkerGroup(members=(0, 3), weights=(0.5, 0.5), iteration=2, initial=0.0, number=1, links=(), leaving=())]

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
    # at least 2; `group_size` at most `workers`
    check_whole("controller", 2, workers=workers)
    check_whole("controller", 2, workers, group_size=group_size)
    choices = {
      "weights": (weights, "constant", "dynamic"),
      "missing": (missing, "initial", "closest"),
    }
    for name, (value, *names) in choices.items():
      if value not in names:
        raise ValueError(f"{name}={value!r}, choose {names[0]!r} or {names[1]!r}")
    if not isinstance(decay, int | float) or not 0 <= decay < 1:
      raise ValueError(f"decay={decay!r}, choose a number in [0, 1)")
    # The least T: a group joins at most P components, so that P - 1 fewer are left.
    least = -(-(workers - 1) // (group_size - 1))
    check_whole("controller", least, optional=True, history=history)
    self.workers = workers
    self.group_size = group_size
    self.window = PATIENCE * least if history is None else history
    dynamic = functools.partial(dynamic_weights, decay=float(decay), missing=missing)
    self._weigh = dynamic if weights == "dynamic" else constant_weights
    self._queue: dict[
      int, int
    ] = {}  # iterations of the workers that are ready, first come first
    self._for_all: dict[
      int, int
    ] = {}  # iterations of the workers that wait for the average of all
    # the last signalled iteration of each worker that has not left
    self._last = dict.fromkeys(range(workers), -1)
    self._group: dict[
      int, WorkerGroup
    ] = {}  # the last group of each worker, until its next signal
    # workers that the filter does not wait for, until their next group
    self._absent: set[int] = set()
    self._formed = 0
    self._begin_to_connect()

  @property
  def alive(self) -> tuple[int, ...]:
    """The workers that have not left, ascending."""
    return tuple(sorted(self._last))

  @property
  def over(self) -> bool:
    """Whether all workers have left."""
    return not self._last

  @property
  def waiting(self) -> tuple[int, ...]:
    """The workers that are ready and in no group yet, the longest-waiting first."""
    return tuple(self._queue)

  @property
  def held(self) -> bool:
    """Whether ready workers wait for a worker of another component, although they are enough for a group."""
    # Each call forms all groups that the filter allows: if `size` workers or more are
    # left in the queue, the filter withholds them. `size` is 0 if all wait for the
    # average of all, and nobody is held then.
    return len(self._queue) >= max(1, self.size)

  @property
  def size(self) -> int:
    """The size of the next group: P, or fewer if fewer workers are left that do not wait for the average of all."""
    return min(self.group_size, len(self._active))

  def ready(self, worker: int, iteration: int) -> list[WorkerGroup]:
    """A worker has done `iteration` iterations and is ready to average; returns the groups that can be formed now.

    Raises:
      Rejected: if the worker is unknown, has left or is ready already, or if it has
        signalled this iteration before; the other calls raise it for the same reasons.
    """
    return self._wait(worker, iteration, self._queue)

  def release(self) -> list[WorkerGroup]:
    """The ready workers have waited long enough: if they are `held`, the others are absent until their next group.

    Called by `js.partial.Server` and `js.partial.Devices` when a worker has been ready
    for as long as its last step took.
    """
    if self.held:
      self._absent.update(
        worker for worker in self._active if worker not in self._queue
      )
      # Those present are to be connected anew, without the absent ones.
      self._begin_to_connect()
    return self._form_groups()

  def synchronize(self, worker: int, iteration: int) -> list[WorkerGroup]:
    """A worker waits for the average of all workers that have not left, each with the same weight.

    Until then it is in no other group. The call may follow a group without an iteration
    in between.
    """
    return self._wait(worker, iteration, self._for_all)

  def failed(self, worker: int, number: int) -> list[WorkerGroup]:
    """Takes a worker out of group `number`, which it could not average with; returns the groups that can be formed now.

    Raises:
      Rejected: if `number` is not the worker's last group, or if the worker has
        signalled since.
    """
    self._check(worker)
    group = self._group.get(worker)
    if group is None or group.number != number:
      raise Rejected(f"stale: worker {worker} is not in group {number!r}")
    del self._group[worker]
    # the same iteration may be signalled again
    self._last[worker] -= 1
    # The group has not connected this worker, and which components it joined is not
    # recorded. So all workers count as not connected, and `_count` is 0: more groups
    # are allowed.
    self._begin_to_connect()
    return self._form_groups()

  def replaced(self, worker: int) -> None:
    """A worker replaces its model by that of another worker: its next signal may be of a smaller iteration."""
    self._check(worker)
    self._check_not_ready(worker)
    self._last[worker] = -1  # less than every iteration
    self._group.pop(worker, None)

  def leave(self, worker: int) -> list[WorkerGroup]:
    """Removes a worker that ends or is dead; returns the groups that can be formed without it."""
    self._check(worker)
    del self._last[worker]
    for by_worker in (self._queue, self._for_all, self._group):
      by_worker.pop(worker, None)
    self._absent.discard(worker)
    # Groups may be smaller now, or all that are left wait for the average of all. The
    # label of the worker in `_component` stays, without effect.
    return self._form_groups()

  def join(self, worker: int) -> list[WorkerGroup]:
    """Adds a worker that has left, else raises Rejected; returns the groups that can be formed now."""
    self._check_number(worker)
    if worker in self._last:
      raise Rejected(f"duplicate: worker {worker} has joined already")
    self._last[worker] = -1
    # The worker is connected to nobody: components and `_count` begin anew.
    self._begin_to_connect()
    return self._form_groups()

  def _wait(
    self, worker: int, iteration: int, queue: dict[int, int]
  ) -> list[WorkerGroup]:
    """Lets a worker wait in `queue`, and returns the groups that can be formed now.

    Args:
      worker: the number of the worker.
      iteration: the iterations that it has done.
      queue: `_queue` for a group, `_for_all` for the average of all.

    Raises:
      Rejected: if the worker is unknown, has left or waits already, or if the iteration
        is malformed, not after the last signalled one, or too far ahead of all workers.
    """
    self._check(worker)
    if not isinstance(iteration, int) or not 0 <= iteration <= MAX_ITERATION:
      raise Rejected(
        f"iteration {iteration!r} of worker {worker} is malformed, send a whole number in 0 … 2^62 − 1"
      )
    self._check_not_ready(worker)
    last = self._last[worker]
    # `synchronize` may follow a group without an iteration in between: `last` is
    # allowed again then, since True counts as 1.
    again = queue is self._for_all and worker in self._group
    if iteration <= last - again:
      raise Rejected(
        f"stale: iteration {iteration} of worker {worker}, which has signalled {last} before"
      )
    # All members of a group go on from its largest iteration, so one wrong number would
    # spread to all workers. Before any signal (newest = -1) every iteration is allowed.
    newest = max(self._last.values())
    if newest >= 0 and iteration > newest + _MOST_AHEAD:
      raise Rejected(
        f"iteration {iteration} of worker {worker} is more than {_MOST_AHEAD} after {newest}, the newest of all workers"
      )
    self._last[worker] = queue[worker] = iteration
    # from now on `failed` rejects its last group
    self._group.pop(worker, None)
    # The average of all will connect this worker with every other one, so its absence
    # ends; `_connect`, which ends it otherwise, is not called for that average.
    if queue is self._for_all:
      self._absent.discard(worker)
    return self._form_groups()

  def _check(self, worker: int) -> None:
    self._check_number(worker)
    if worker not in self._last:
      raise Rejected(f"unknown: worker {worker} has left, it has to join again")

  def _check_number(self, worker: int) -> None:
    if worker not in range(self.workers):
      raise Rejected(f"unknown: worker {worker!r}, there are 0 … {self.workers - 1}")

  def _check_not_ready(self, worker: int) -> None:
    if worker in (waiting := self._queue | self._for_all):
      raise Rejected(
        f"duplicate: worker {worker} is ready already, with iteration {waiting[worker]}"
      )

  @property
  def _active(self) -> list[int]:
    """The workers that groups are formed of: those that do not wait for the average of all."""
    return [worker for worker in self._last if worker not in self._for_all]

  def _form_groups(self) -> list[WorkerGroup]:
    """Forms all groups that are possible now, and takes their members out of the queues."""
    formed = []
    while members := self._next_members():
      formed.append(self._make_group(members, self._queue, self._weigh))
      self._connect(members)
    # Algorithm 2, line 8 of the worker: the average of all, once all have asked for it;
    # it connects all workers.
    if self._for_all and not self._active:
      formed.append(
        self._make_group(list(self._for_all), self._for_all, constant_weights)
      )
      self._begin_to_connect()
    return formed

  def _make_group(
    self, members: list[int], waiting: dict[int, int], weigh: Weigh
  ) -> WorkerGroup:
    """The next group, of `members`, which are removed from `waiting`, the queue that holds their iterations."""
    self._formed += 1
    iterations = {member: waiting.pop(member) for member in sorted(members)}
    weights, initial = weigh(list(iterations.values()))
    group = WorkerGroup(
      tuple(iterations), weights, max(iterations.values()), initial, self._formed
    )
    self._group.update(dict.fromkeys(iterations, group))
    return group

  def _next_members(self) -> list[int]:
    """The members of the next group, with the worker that has waited longest; none if they have to wait."""
    # Before groups are formed, `held` tells no more than whether enough workers are
    # ready for a group: `size` or more.
    if not self.held:
      return []
    head, *rest = self._queue
    others = rest[: self.size - 1]
    # from workers to those of them that are in another component than `head`
    elsewhere = lambda workers: [
      worker for worker in workers if self._component[worker] != self._component[head]
    ]
    # §4: after T groups that did not connect all, or with a worker that was absent, the
    # group has to join two components.
    due = self._count >= self.window or not self._absent.isdisjoint([head, *others])
    if due and not elsewhere(others):
      # a ready worker of another component in place of the member that waited shortest
      if bridges := elsewhere(rest):
        others[-1] = bridges[0]
      # No such worker is ready: the group waits, unless all workers of other components
      # are absent.
      elif not self._absent.issuperset(elsewhere(self._active)):
        return []
    return [head, *others]

  def _connect(self, members: list[int]) -> None:
    """Joins the components of the members of a group, ends their absence, and counts the group in `_count`.

    When all of `_active` but the absent workers are connected, components and count
    begin anew.
    """
    self._component.update(
      # An absent member gets its own number as label in place of _ABSENT. No other
      # worker has this label: labels are numbers of workers that were not absent.
      {member: member for member in self._absent.intersection(members)}
    )
    self._absent.difference_update(members)
    # labels of the components to be joined; all their workers get the smallest one
    roots = {self._component[member] for member in members}
    self._component.update(
      {worker: min(roots) for worker, root in self._component.items() if root in roots}
    )
    self._count += 1
    if (
      len(
        {
          self._component[worker]
          for worker in self._active
          if worker not in self._absent
        }
      )
      == 1
    ):
      self._begin_to_connect()

  def _begin_to_connect(self) -> None:
    """Begins to count groups: each worker is a component of its own, and all absent ones are one component."""
    self._component = {
      worker: _ABSENT if worker in self._absent else worker for worker in self._last
    }
    self._count = 0


def constant_weights(iterations: Sequence[int]) -> tuple[tuple[float, ...], float]:
  """Weights of 1/P for P members, and 0.0 for the initial model.

  They keep the sum of all models, and a model that all members have is a fixed point.
  """
  return (1 / len(iterations),) * len(iterations), 0.0


def dynamic_weights(
  iterations: Sequence[int], decay: float, missing: Missing
) -> tuple[tuple[float, ...], float]:
  """The weights of the members' models and of the initial one, by staleness (§3.3), with sum 1.

  A member at rank k̂ = max k − k + 1, of K = max k̂, gets (1 − α) α^(k̂ − 1) / (1 −
  α^K); members of one rank share its weight equally. The weight of a rank without a
  member goes to the initial model (the paper's choice: it moves even members with equal
  models towards the initial one), or to the closest rank with a member, the newer one
  of two.

  Args:
    iterations: k, the number of iterations that each of the P members has done.
    decay: α, in [0, 1).
    missing: where the weights of ranks without a member go.

  Returns:
    The weights of the members, in the order of `iterations`, and of the initial model.

  Example:
    >>> dynamic_weights([9, 8, 8], 0.5, "closest")
    ((0.6666666666666666, 0.16666666666666666, 0.16666666666666666), 0.0)
    >>> [round(31 * weight) for weight in dynamic_weights([9, 8, 5], 0.5, "closest")[0]]
    [16, 12, 3]
  """
  newest = max(iterations)
  ranks = [newest - iteration + 1 for iteration in iterations]
  present = sorted(set(ranks))
  total = 1 - decay ** present[-1]
  # Each present rank gets the weights of ranks first … last: its own, or all up to
  # half-way to its neighbours. The rank in the middle goes to the newer neighbour.
  if missing == "closest":
    lasts = [
      *(newer + (older - newer) // 2 for newer, older in itertools.pairwise(present)),
      present[-1],
    ]
    firsts = [1, *(last + 1 for last in lasts[:-1])]
  else:
    firsts = lasts = present
  # Σ_{r=first…last} (1 − α) α^(r−1) = α^(first−1) − α^last; no loop, a worker may be a
  # million iterations behind.
  share = {
    rank: (decay ** (first - 1) - decay**last) / total / ranks.count(rank)
    for rank, first, last in zip(present, firsts, lasts, strict=True)
  }
  members = tuple(share[rank] for rank in ranks)
  # 0.0 also where each rank 1 … K has a member: the sum is 1 but for rounding errors.
  return members, max(0.0, 1 - sum(members)) if missing == "initial" and len(
    present
  ) < present[-1] else 0.0
