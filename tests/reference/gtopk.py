"""gTopk in numpy: a binary tree with missing leaves, and residuals that lose nothing."""

import numpy as np

from tests.reference import added, dense, largest


def gtopk(gradients, residuals, k):
  """Total f32[n] and residuals f32[P, n]."""
  ranks, n = gradients.shape
  home = gradients + residuals
  held = [largest(dict(enumerate(row)), k) for row in home]
  dropped = [{i: value for i, value in enumerate(row) if i not in held[rank]} for rank, row in enumerate(home)]
  alive, apart = list(range(ranks)), 1
  while len(alive) > 1:
    for left, right in zip(alive[::2], alive[1::2], strict=False):
      assert right - left == apart
      both = added(held[left], held[right])
      held[left] = largest(both, k)
      lost = {i: value for i, value in both.items() if i not in held[left]}
      dropped[left] = added(dropped[left], lost)
    alive, apart = alive[::2], 2 * apart
  kept = home.copy()
  for rank in range(ranks):
    for i in held[0]:
      kept[rank, i] = dropped[rank].get(i, 0)
  return dense(held[0], n), kept.astype(np.float32)
