"""How fast groups spread what each worker has learned: the spectral gap 1 − ρ of their mean W (§3.2, Figure 4)."""

from collections.abc import Iterable

import numpy as np

from jaxsparse.partial.controller import Group


def mixing(groups: Iterable[Group], workers: int) -> np.ndarray:
  """W̄ = 1/K Σ_k W_k: each W_k averages the models of a group, X ← X W, and leaves the others as they are (eq. 4).

  Args:
    groups: K groups, at least one.
    workers: N.

  Returns:
    f64[N, N]; column j holds the weights of all models in worker j's next model.

  Raises:
    ValueError: if there is no group.

  Example:
    >>> from jaxsparse.partial import Group
    >>> mixing([Group((0, 1), (0.5, 0.5), 1), Group((1, 2), (0.5, 0.5), 1)], workers=3)
    array([[0.75, 0.25, 0.  ],
           [0.25, 0.5 , 0.25],
           [0.  , 0.25, 0.75]])
  """
  total, count = np.zeros((workers, workers)), 0
  for group in groups:
    members = list(group.members)
    one = np.eye(workers)
    one[:, members] = 0
    one[np.ix_(members, members)] = np.array(group.weights)[:, None]
    total, count = total + one, count + 1
  if not count:
    raise ValueError("mixing: no groups, give at least one")
  return total / count


def rho(groups: Iterable[Group], workers: int) -> float:
  """`ρ = max(|λ₂|, |λ_N|)` of W̄ (eq. 6): 0 if every group has all workers, 1 if the workers are not connected.

  Args:
    groups: one or more.
    workers: N.

  Raises:
    ValueError: if there is no group.

  Example:
    >>> from jaxsparse.partial import Group
    >>> round(rho([Group(pair, (0.5, 0.5), 1) for pair in ((0, 1), (1, 2), (0, 2))], workers=3), 6)  # Figure 4(a)
    0.5
  """
  return float(sorted(np.abs(np.linalg.eigvals(mixing(groups, workers))))[-2])
