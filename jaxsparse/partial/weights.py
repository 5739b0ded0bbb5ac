"""The weight of each model in the average of a group (partial reduce, §3.1 and §3.3).

Constant weights are 1/P. Dynamic weights decay with the staleness of a model. For a group whose members have done 9, 8
and 5 iterations, with α = 1/2:

    iterations     9     8     7     6     5
    k̂              1     2     3     4     5 = K
    weight       16/31  8/31  4/31  2/31  1/31      (1 − α) α^(k̂ − 1) / (1 − α^K), with sum 1
    goes to        9     8     ?     ?     5        "initial": to the initial model; "closest": 7 to 8, 6 to 5
"""

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

Missing = Literal["initial", "closest"]


class Weights(NamedTuple):
  """The weights of an average; their sum is 1.

  Attributes:
    members: of the members' models, in the order of the members.
    initial: of the model that training started from.

  Example:
    >>> Weights((0.5, 0.5), 0.0).members
    (0.5, 0.5)
  """

  members: tuple[float, ...]
  initial: float


def constant(members: int) -> Weights:
  """The plain mean: 1/P each. It keeps the sum of all models, and a model that all members have is a fixed point.

  Example:
    >>> constant(4)
    Weights(members=(0.25, 0.25, 0.25, 0.25), initial=0.0)
  """
  return Weights((1 / members,) * members, 0.0)


def dynamic(iterations: Sequence[int], decay: float, missing: Missing) -> Weights:
  """Weights that decay with staleness (§3.3): (1 − α) α^(k̂ − 1) / (1 − α^K) at rank k̂ = max k − k + 1, of K = max k̂.

  Members of one rank share its weight equally. The weight of a rank without a member goes to the initial model (the
  paper's choice: it moves even members with equal models towards the initial one), or to the closest rank with a
  member, the newer one of two. Equal iterations give 1/P each.

  Args:
    iterations: of the members.
    decay: α in [0, 1).
    missing: "initial" or "closest".

  Example:
    >>> dynamic([9, 8, 8], 0.5, "closest").members
    (0.6666666666666666, 0.16666666666666666, 0.16666666666666666)
    >>> [round(31 * weight) for weight in dynamic([9, 8, 5], 0.5, "closest").members]
    [16, 12, 3]
    >>> round(31 * dynamic([9, 8, 5], 0.5, "initial").initial)
    6
  """
  newest = max(iterations)
  ranks = [newest - iteration + 1 for iteration in iterations]
  present = sorted(set(ranks))
  whole = 1 - decay ** present[-1]
  # Each present rank gets the weights of ranks first … last: its own, or all up to half-way to its neighbours.
  if missing == "closest":
    lasts = [*(newer + (older - newer) // 2 for newer, older in itertools.pairwise(present)), present[-1]]
    firsts = [1, *(last + 1 for last in lasts[:-1])]
  else:
    firsts = lasts = present
  # Σ_{r=first…last} (1 − α) α^(r−1) = α^(first−1) − α^last; no loop, a worker may be a million iterations behind.
  share = {
    rank: (decay ** (first - 1) - decay**last) / whole / ranks.count(rank)
    for rank, first, last in zip(present, firsts, lasts, strict=True)
  }
  members = tuple(share[rank] for rank in ranks)
  return Weights(members, max(0.0, 1 - sum(members)) if missing == "initial" and len(present) < present[-1] else 0.0)
