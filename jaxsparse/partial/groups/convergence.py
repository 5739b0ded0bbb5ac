"""The condition under which partial reduce converges (Miao et al., SIGMOD 2021, Theorem 1)."""

import math

from jaxsparse.types import check_whole


def convergence_condition(
  rho: float,
  *,
  workers: int,
  group_size: int,
  rate: float,
  smoothness: float = 0.0,
) -> float:
  """`η L + 2 N³ η² ρ̄ / P²`: Theorem 1 bounds the gradient if this is at most 1.

  Here ρ̄ = ρ / (1 − ρ) + 2 √ρ / (1 − √ρ)², and η = P/N · γ; the paper prints ρ/N · γ by
  mistake.

  Args:
    rho: ρ, the second largest magnitude of the eigenvalues of the mean of the groups'
      matrices: 0 where all workers average, 1 where groups do not connect them.
    workers: N.
    group_size: P, the workers of a group.
    rate: γ, the learning rate of a worker.
    smoothness: L, the Lipschitz constant of the gradient, which is rarely known. With 0
      the result is the second term alone: if that is above 1, the condition is violated
      for every L.

  Returns:
    The left side of the condition; infinite for ρ = 1.

  Raises:
    ValueError: for ρ outside 0 … 1, numbers of workers that do not fit, or a negative
      rate or smoothness.

  Example:
    >>> import jaxsparse as js
    >>> round(js.partial.convergence_condition(0.5, workers=3, group_size=2, rate=0.01), 4)
    0.0105
  """
  check_whole("convergence_condition", 1, workers=workers, group_size=group_size)
  if group_size > workers:
    raise ValueError(f"group_size={group_size} of {workers} workers")
  if not 0 <= rho <= 1:
    raise ValueError(f"rho={rho}, choose 0 to 1")
  for name, value in {"rate": rate, "smoothness": smoothness}.items():
    if not 0 <= value < math.inf:
      raise ValueError(f"{name}={value}, choose a number of at least 0")
  eta = group_size / workers * rate
  # Where groups do not connect the workers, ρ is 1 but for rounding errors.
  if rho > 1 - 1e-9:
    return math.inf
  root = math.sqrt(rho)
  spread = rho / (1 - rho) + 2 * root / (1 - root) ** 2
  return eta * smoothness + 2 * workers**3 * eta**2 * spread / group_size**2
