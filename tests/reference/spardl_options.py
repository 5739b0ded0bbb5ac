"""Options of SparDL in numpy: teams with R-SAG, B-SAG and Algorithm 2, the other selectors, the paper's ablations."""

import numpy as np

from tests.reference import added, largest
from tests.reference.spardl import reduce_scatter


class Reusing:
  """Chooses the largest entries of a block, if they reach the bound of their worker and block.

  A full block's next bound is its least entry, times the root of its growth since the
  last step if that was full too.
  """

  def __init__(self, share, workers):
    self.share = share
    self.bounds, self.levels = np.zeros((2, workers, workers), np.float32)

  def __call__(self, worker, block, values):
    at = worker, block
    chosen = largest(dict(enumerate(values)), self.share)
    chosen = {i: value for i, value in chosen.items() if abs(value) >= self.bounds[at]}
    if len(chosen) == self.share:
      least = min(abs(value) for value in chosen.values())
      growth = (
        min(max(least / self.levels[at], np.float32(1)), np.float32(2))
        if self.levels[at] > 0
        else np.float32(1)
      )
      self.bounds[at], self.levels[at] = least * np.sqrt(growth), least
    else:
      few = 2 * len(chosen) < self.share  # too few to tell how far down the entries are
      self.bounds[at] *= 0 if few else 0.75 + len(chosen) / self.share / 4
      self.levels[at] = 0
    return chosen


class Chunked:
  """Chooses one entry of each chunk: the largest at the start, or what was received since and is larger.

  Of a magnitude only those bits count that a word has room for beside the number of a
  row.

  Args:
    share: number of chunks of a block.
    accumulators: f32[P, n], before anything is received.
    blocks: number of blocks.
  """

  def __init__(self, share, accumulators, blocks):
    length = -(-accumulators.shape[1] // blocks)
    self.share, self.spent, self.best = share, (-(-length // share)).bit_length(), {}
    for worker, row in enumerate(accumulators):
      for block in range(blocks):
        values = row[block * length : (block + 1) * length]
        chunks = [range(chunk, len(values), share) for chunk in range(share)]
        key = lambda i, values=values: (self.rank(values[i]), -i)
        self.best[worker, block] = [
          max(chunk, key=key, default=None) for chunk in chunks
        ]

  def rank(self, value):
    return int(np.float32(abs(value)).view(np.int32)) >> self.spent

  def choose(self, worker, block, values):
    return {i: values[i] for i in self.best[worker, block] if i is not None}

  def received(self, worker, block, entries, values):
    best = self.best[worker, block]
    for i in entries:
      if self.rank(values[i]) > self.rank(values[best[i % self.share]]):
        best[i % self.share] = i


def spardl(
  gradients,
  residuals,
  k,
  kind="global",
  choose=None,
  rounded=lambda value: value,
  received=lambda *_: None,
):
  """Total f32[n] and residuals f32[P, n] of one team; `kind` is the option `residual`, an ablation (§4.1.3)."""
  workers, n = gradients.shape
  accumulators = gradients + residuals
  held, sums, sent = reduce_scatter(
    accumulators, -(-k // workers), choose, rounded, received
  )
  # The all-gather rounds the sum of a block once more, which the worker that has it
  # keeps.
  total, kept, length, delivered = (
    np.zeros(n, np.float32),
    accumulators.copy(),
    held.shape[2],
    set(),
  )
  for block, entries in enumerate(sums):
    for i, value in entries.items():
      if (flat := block * length + i) < n:
        total[flat] = value
        if kind == "global":
          kept[:, flat] = held[:, block, i]
        delivered.add(flat)
  # partial: what others have sent, and was dropped on the way, is lost
  if kind != "global":
    for worker, flat in enumerate(map(list, sent)):
      kept[
        worker, [i for i in flat if i < n and (kind == "local" or i in delivered)]
      ] = 0
  return total, kept


def teams(gradients, residuals, k, count, bruck, adaptive):
  """Totals f32[P, n] as each worker ends up with, residuals f32[P, n], and the next (h, step, flag) of Algorithm 2."""
  workers, n = gradients.shape
  size, share, accumulators = (
    workers // count,
    -(-k * count // workers),
    gradients + residuals,
  )
  groups = [range(first, first + size) for first in range(0, workers, size)]
  parts = [reduce_scatter(accumulators[list(group)], share) for group in groups]
  held, own = (
    np.concatenate([part[0] for part in parts]),
    [entries for part in parts for entries in part[1]],
  )

  def give_back(worker, entries, weight=1.0):
    for i, value in entries.items():
      held[worker, worker % size, i] += np.float32(weight) * value

  most = share
  if bruck:
    for worker, entries in enumerate(own):
      give_back(worker, dict(list(entries.items())[adaptive[0] :]))
    heads = [dict(list(entries.items())[: adaptive[0]]) for entries in own]
    sums = [added(*heads[worker % size :: size]) for worker in range(workers)]
    most = max(map(len, sums))
    own = [largest(entries, share) for entries in sums]
  else:
    # R-SAG: 2^(step + 1) workers have dropped the same entries
    for step in range(count.bit_length() - 1):
      sums = [
        added(own[worker], own[(worker // size ^ 1 << step) * size + worker % size])
        for worker in range(workers)
      ]
      own = [largest(entries, share) for entries in sums]
      for worker, entries in enumerate(sums):
        give_back(
          worker,
          {i: value for i, value in entries.items() if i not in own[worker]},
          1 / 2 ** (step + 1),
        )

  totals, kept, length = (
    np.zeros((workers, n), np.float32),
    accumulators.copy(),
    held.shape[2],
  )
  for group in groups:
    for worker in group:
      for block, peer in enumerate(group):
        for i, value in own[peer].items():
          if (flat := block * length + i) < n:
            totals[worker, flat], kept[worker, flat] = value, held[worker, block, i]
  return totals, kept, adapted(adaptive, most, share, count) if bruck else None


def first_h(k, workers, count):
  """Algorithm 2, its initial values."""
  share = -(-k * count // workers)
  low = -(-share // count)
  return low, max(1, round(0.01 * (share - low))), False


def adapted(adaptive, most, share, count):
  """Algorithm 2, one step."""
  h, step, flag = adaptive
  if (most > share) != (step > 0):
    if flag:
      step, flag = max(-share, min(share, 2 * step)), False
    else:
      flag = True
  else:
    step, flag = (-1 if step > 0 else 1) * max(1, abs(step) // 2), False
  return max(-(-share // count), min(share, h + step)), step, flag
