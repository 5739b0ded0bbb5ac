"""SparDL in numpy, written from Algorithm 1 of the paper: P ranks as a plain loop, blocks in dictionaries, no library.

Every rank holds its blocks by number. A bag of step i holds the blocks of the destinations at distance [s, 2s) from the
rank, where s is the step's stride, and travels s ranks on.
"""

import numpy as np


def largest(block, count):
  """Places of the `count` largest magnitudes of a block: NaN first, ties to the lowest place."""
  magnitude = np.where(np.isnan(block), np.inf, np.abs(block))
  order = sorted(range(len(block)), key=lambda i: (not np.isnan(block[i]), -magnitude[i], i))
  return order[:count]


def spardl(gradients, residuals, k, residual_kind="global"):
  """Totals f32[P, n] as each rank ends up with, and residuals f32[P, n]."""
  ranks, n = gradients.shape
  length = -(-n // ranks)
  share = max(1, -(-k // ranks))
  home = gradients + residuals
  padded = np.zeros((ranks, ranks * length), np.float32)
  padded[:, :n] = home
  blocks = [{b: padded[r, b * length : (b + 1) * length].copy() for b in range(ranks)} for r in range(ranks)]
  sent = [set() for _ in range(ranks)]

  def cut(rank, block):
    """Line 7: keeps the largest entries of a block for sending and leaves the rest at this rank."""
    chosen = {}
    for i in largest(blocks[rank][block], share):
      chosen[i] = blocks[rank][block][i]
      blocks[rank][block][i] = 0
      sent[rank].add(block * length + i)
    return chosen

  stride = 1
  while stride < ranks:
    stride *= 2
  while stride > 1:
    stride //= 2
    mail = []
    for rank in range(ranks):
      far = [distance for distance in range(stride, 2 * stride) if distance < ranks]
      mail.append({(rank + distance) % ranks: cut(rank, (rank + distance) % ranks) for distance in far})
    for rank in range(ranks):
      for block, entries in mail[(rank - stride) % ranks].items():
        for i, value in entries.items():
          blocks[rank][block][i] += value

  final = {}
  for rank in range(ranks):
    for i, value in cut(rank, rank).items():
      final[rank * length + i] = value
  total = np.zeros(n, np.float32)
  for place, value in final.items():
    if place < n:
      total[place] = value

  kept = home.copy()
  for rank in range(ranks):
    for place in range(n):
      dropped = blocks[rank][place // length][place % length]
      if residual_kind == "local":
        kept[rank, place] = 0 if place in sent[rank] else home[rank, place]
      elif place in final:  # lines 12-14: in-procedure residuals stay with the rank that dropped them
        kept[rank, place] = dropped if residual_kind == "global" else 0
  return np.broadcast_to(total, (ranks, n)), kept
