"""Topologies: the (source, destination) pairs of each round, static Python data that is equal on all workers.

A route is a tuple of such pairs over workers 0 … P − 1, the messages of one round.
"""

import collections
from collections.abc import Iterable

Pairs = tuple[tuple[int, int], ...]


def strides(size: int) -> tuple[int, ...]:
  """The ⌈log₂ size⌉ strides of a recursive-halving schedule for any number of workers, largest first.

  Example:
    >>> strides(6), strides(8), strides(1)
    ((4, 2, 1), (4, 2, 1), ())
  """
  return tuple(1 << bit for bit in reversed(range((size - 1).bit_length())))


def team_size(size: int, teams: int) -> int:
  """Number of workers in each of `teams` equal teams of `size` workers.

  Raises:
    ValueError: if `teams` does not divide `size`, naming the divisors.

  Example:
    >>> team_size(6, teams=2)
    3
  """
  if teams < 1 or size % teams:
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    raise ValueError(f"teams={teams} does not divide the {size} workers, choose one of {divisors}")
  return size // teams


def rotation(size: int, by: int) -> Pairs:
  """The route from every worker r to worker (r + by) mod size.

  Example:
    >>> rotation(3, 1)
    ((0, 1), (1, 2), (2, 0))
  """
  return tuple((source, (source + by) % size) for source in range(size))


def checked(pairs: Iterable[tuple[int, int]], size: int) -> Pairs:
  """`pairs` as a route, in which each worker sends at most once and receives at most once.

  Raises:
    ValueError: naming the pair that is out of range, or the worker that appears twice.

  Example:
    >>> checked([(0, 1), (2, 1)], size=3)
    Traceback (most recent call last):
    ValueError: route: worker 1 receives more than once in one round of ((0, 1), (2, 1))
  """
  pairs = tuple((int(source), int(destination)) for source, destination in pairs)
  for verb, ends in zip(("sends", "receives"), zip(*pairs, strict=True), strict=False):
    if min(ends) < 0 or max(ends) >= size:
      pair = next(pair for pair in pairs if not all(0 <= worker < size for worker in pair))
      raise ValueError(f"route {pair}: workers are numbered 0 … {size - 1}")
    if len(set(ends)) < len(ends):
      worker = collections.Counter(ends).most_common(1)[0][0]
      raise ValueError(f"route: worker {worker} {verb} more than once in one round of {pairs}")
  return pairs


def tree(size: int) -> tuple[Pairs, ...]:
  """The rounds of a binomial tree that reduces to worker 0, as (child, parent) pairs, for any number of workers.

  Example:
    >>> tree(6)
    (((1, 0), (3, 2), (5, 4)), ((2, 0),), ((4, 0),))
  """
  rounds = []
  for stride in reversed(strides(size)):
    parents = range(0, size - stride, 2 * stride)
    rounds.append(tuple((parent + stride, parent) for parent in parents))
  return tuple(rounds)


def partners(size: int, stride: int) -> Pairs:
  """The route from every worker r to worker r XOR stride; `size` and `stride` are powers of two.

  Example:
    >>> partners(4, 2)
    ((0, 2), (1, 3), (2, 0), (3, 1))
  """
  return tuple((worker, worker ^ stride) for worker in range(size))
