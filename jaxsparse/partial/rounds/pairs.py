"""The workers of a round that reach each other: a state machine for each pair.

    state of a pair     event                                              next state
    together            a round fails, one misses a message of the other   apart, f = 1
    apart, f failures   that happens again, or they were tried in vain     apart, f + 1
    apart               a round with both counts, or one leaves            together

Of a pair that is apart one takes part in the 2^f groups (up to 64) after its last
failure, and then both do.
"""

from collections.abc import Collection, Mapping

from jaxsparse.partial.net.messages import WorkerGroup

_MOST_DOUBLINGS = 6  # after a failure two workers are apart for 2 ** 6 groups at most


class Pairs:
  """The pairs of workers that are apart; all others are together.

  Attributes:
    _failures: by pair that is apart: f, the number of its failures, and the number of
      the group of its last failure.
    _tried: number of the group of the last call of `separate`.

  Example:
    >>> pairs = Pairs()
    >>> pairs.separate(WorkerGroup((0, 1, 2), (), 0, number=5), 0, 2)
    >>> sorted(pairs.choose([0, 1, 2], 6, {2: 4})), sorted(pairs.choose([0, 1, 2], 7, {}))
    ([0, 1], [0, 1, 2])
  """

  def __init__(self) -> None:
    # how often a pair has failed, and the number of the group in which it did last
    self._failures: dict[frozenset[int], tuple[int, int]] = {}
    # the group for whose failure all pairs in it that are apart have been counted
    self._tried = 0

  def are_apart(self, worker: int, other: int) -> bool:
    """Whether the two have missed messages of each other, and no round with both has counted since."""
    return frozenset((worker, other)) in self._failures

  def separate(self, group: WorkerGroup, worker: int, missing: int) -> None:
    """Notes that a round has failed between two members: they are apart, for twice as many groups as last time.

    Args:
      group: of the round.
      worker: the member that has missed a message.
      missing: the member whose message it is.
    """
    pairs = [frozenset((worker, missing))]
    # At the first failure in a group: its pairs that are apart were tried in vain, too.
    if self._tried != group.number:
      pairs += [pair for pair in self._failures if all(map(group.has, pair))]
    self._tried = group.number
    for pair in pairs:
      failures, last = self._failures.get(pair, (0, 0))
      # A failure counts once a group, also if both members report it.
      if last != group.number:
        self._failures[pair] = failures + 1, group.number

  def unite(self, group: WorkerGroup) -> None:
    """Puts all pairs in a group together again, since its round has counted."""
    self._failures = {
      pair: failures
      for pair, failures in self._failures.items()
      if not all(map(group.has, pair))
    }

  def forget(self, worker: int) -> None:
    """Drops the pairs of a worker that has left."""
    self._failures = {
      pair: failures for pair, failures in self._failures.items() if worker not in pair
    }

  def choose(
    self, workers: Collection[int], last_group: int, last_rounds: Mapping[int, int]
  ) -> Collection[int]:
    """The largest part of these workers that reach each other, chosen greedily.

    Workers that are apart from few come first, then those that were in a round longest
    ago.

    Args:
      workers: to choose from.
      last_group: the number of the last group.
      last_rounds: by worker, the number of the group of its last round that counted.
    """
    if not self._failures:
      return workers
    # by worker: the workers that it is apart from now, and itself if there are any
    unreached = {worker: set[int]() for worker in workers}
    for pair, (failures, failed_in) in self._failures.items():
      is_apart = last_group < failed_in + 2 ** min(failures, _MOST_DOUBLINGS)
      if is_apart and pair <= unreached.keys():
        for worker in pair:
          unreached[worker] |= pair
    chosen = set[int]()
    rank = lambda worker: (len(unreached[worker]), last_rounds.get(worker, 0))
    for worker in sorted(workers, key=rank):
      if chosen.isdisjoint(unreached[worker]):
        chosen.add(worker)
    return chosen
