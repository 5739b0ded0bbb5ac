"""TopkA, TopkDSA and gTopk in numpy: the k largest entries of each worker, gathered, by region, and along a tree.

Each returns the total f32[n] and the residuals f32[P, n] of gradients and residuals
f32[P, n].
"""

import numpy as np

from tests.reference import added, dense, largest


def topka(gradients, residuals, k, choose=None, rounded=lambda value: value):
  """Every worker sends its k largest entries to all; `choose(values)` and `rounded(value)` are options."""
  choose = choose or (lambda values: largest(dict(enumerate(values)), k))
  kept = gradients + residuals
  sent = [{i: rounded(value) for i, value in choose(row).items()} for row in kept]
  for row, entries in zip(kept, sent, strict=True):
    for i, value in entries.items():
      row[i] -= value
  return dense(added(*sent), kept.shape[1]), kept


def topkdsa(gradients, residuals, k, slots):
  """Owners of equal regions add up what they are sent; a message has room for `slots` entries, the largest go."""
  workers, n = gradients.shape
  kept, length = gradients + residuals, -(-n // workers)
  sent = [[{} for _ in range(workers)] for _ in range(workers)]
  for worker, row in enumerate(kept):
    for i, value in largest(dict(enumerate(row)), k).items():
      if len(message := sent[worker][i // length]) < slots:
        message[i] = value
  total = dense(added(*[added(*region) for region in zip(*sent, strict=True)]), n)
  for row, messages in zip(kept, sent, strict=True):
    for i in added(*messages):
      row[i] = 0 if total[i] != 0 else row[i]  # senders keep what adds up to 0
  return total, kept


def gtopk(gradients, residuals, k):
  """A binary tree, with missing leaves where P is no power of two; each merge keeps the k largest of a sum."""
  workers, n = gradients.shape
  accumulators = gradients + residuals
  held = [largest(dict(enumerate(row)), k) for row in accumulators]
  dropped = [
    {i: row[i] for i in range(n) if i not in own}
    for row, own in zip(accumulators, held, strict=True)
  ]
  alive = list(range(workers))
  while len(alive) > 1:
    for left, right in zip(alive[::2], alive[1::2], strict=False):
      both = added(held[left], held[right])
      held[left] = largest(both, k)
      dropped[left] = added(
        dropped[left], {i: value for i, value in both.items() if i not in held[left]}
      )
    alive = alive[::2]
  kept = accumulators.copy()
  for worker in range(workers):
    # if its index is delivered, an entry stays with the worker that dropped it
    for i in held[0]:
      kept[worker, i] = dropped[worker].get(i, 0)
  return dense(held[0], n), kept.astype(np.float32)
