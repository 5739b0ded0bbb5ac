"""Ok-Topk in numpy, written from Algorithms 1 and 2 of the paper: P workers as a plain loop, entries in dictionaries.

The sizes of messages are an argument: the smallest entries that do not fit stay with their senders. Thresholds follow
as `nudge` says: "none" is the paper's Algorithm 1. Where a threshold is 0 it is exact in the next step too.
"""

import numpy as np

from tests.reference import added, dense, largest


class OkTopk:
  """All workers; `reduce` is one step."""

  def __init__(self, ranks, n, k, sizes, threshold_period=32, region_period=64, balanced_regions=True, nudge="none"):
    self.ranks, self.n, self.k, self.sizes = ranks, n, k, sizes
    self.threshold_period, self.region_period, self.balanced_regions = threshold_period, region_period, balanced_regions
    self.step = 0
    self.local, self.threshold = [np.float32(0)] * ranks, np.float32(0)
    self.bounds = [n * region // ranks for region in range(ranks + 1)]
    self.residuals = np.zeros((ranks, n), np.float32)
    self.was_balanced, self.nudge = False, nudge

  def reduce(self, gradients):
    """Total f32[n]; the residuals are an attribute."""
    home = gradients + self.residuals
    exact = self.step % self.threshold_period == 0
    kth = lambda row: np.sort(np.abs(row))[-self.k]
    self.local = [kth(row) if exact or a == 0 else a for row, a in zip(home, self.local, strict=True)]
    reach = [
      {i: row[i] for i in range(self.n) if abs(row[i]) >= a and row[i] != 0}
      for row, a in zip(home, self.local, strict=True)
    ]
    chosen = [sorted(largest(entries, 2 * self.k)) for entries in reach]
    if self.balanced_regions and (self.step % self.region_period == 0 or self.threshold == 0):
      self.bounds = self.consensus(chosen)

    sent = [[{} for _ in range(self.ranks)] for _ in range(self.ranks)]
    for rank in range(self.ranks):
      for region in range(self.ranks):
        inside = {i: home[rank, i] for i in chosen[rank] if self.bounds[region] <= i < self.bounds[region + 1]}
        sent[rank][region] = largest(inside, self.sizes.most)
    owned = [added(*[sent[rank][region] for rank in range(self.ranks)]) for region in range(self.ranks)]

    if exact or self.threshold == 0:
      magnitudes = sorted((abs(value) for entries in owned for value in entries.values()), reverse=True)
      self.threshold = magnitudes[self.k - 1] if len(magnitudes) >= self.k else np.float32(0)
    elif self.nudge == "search":
      for octave in (8, 256):
        candidates = self.threshold * np.array([2 ** (step / octave) for step in range(-16, 17)], np.float32)
        counts = [sum(abs(value) >= t for entries in owned for value in entries.values()) for t in candidates]
        self.threshold = candidates[np.argmin([abs(count - self.k) for count in counts])]
    owned = [{i: value for i, value in entries.items() if abs(value) >= self.threshold} for entries in owned]
    count = sum(map(len, owned))
    total = dense(added(*self.gathered(owned)), self.n)

    self.residuals = home.copy()
    for rank in range(self.ranks):
      for message in sent[rank]:
        for i in message:
          if total[i] != 0:
            self.residuals[rank, i] = 0
    self.local = [self.nudged(a, len(mine)) for a, mine in zip(self.local, reach, strict=True)]
    self.threshold = self.nudged(self.threshold, count) if self.nudge == "fixed" else self.threshold
    self.step += 1
    return total

  def consensus(self, chosen):
    """Lines 5-7: each worker's boundaries balance its own entries; the mean of them is taken."""
    proposals = []
    for mine in chosen:
      if len(mine) < self.ranks:
        proposals.append([self.n * cut // self.ranks for cut in range(1, self.ranks)])
      else:
        proposals.append([mine[cut * len(mine) // self.ranks] for cut in range(1, self.ranks)])
    return [0, *(sum(cuts) // self.ranks for cuts in zip(*proposals, strict=True)), self.n]

  def gathered(self, owned):
    """What arrives everywhere: directly, or after surplus entries went to those with room."""
    fullest, count = max(map(len, owned)), sum(map(len, owned))
    self.was_balanced = self.ranks > 1 and (fullest > 4 * count / self.ranks or fullest > self.sizes.direct)
    lines = [list(largest(entries, len(entries)).items()) for entries in owned]
    if not self.was_balanced:
      return [dict(line[: self.sizes.direct]) for line in lines]
    share = min(-(-count // self.ranks), self.sizes.even)
    places = [rank for level in range(share) for rank in range(self.ranks) if level < share - len(lines[rank])]
    surplus = [(rank, entry) for rank in range(self.ranks) for entry in lines[rank][share:]]
    kept, messages = [dict(line[:share]) for line in lines], {}
    for (source, (i, value)), destination in zip(surplus, places, strict=False):
      message = messages.setdefault((source, destination), {})
      if len(message) < self.sizes.surplus:
        message[i] = value
    return [*kept, *messages.values()]

  def nudged(self, threshold, count):
    if self.nudge == "none":
      return threshold
    if self.nudge == "search":
      return np.float32(threshold * min(np.float32(0.9) + np.float32(count) / np.float32(10 * self.k), np.float32(2)))
    if count > 5 * self.k / 4:
      return np.float32(threshold * np.float32(1.012))
    if count < 2 * self.k / 3:
      return np.float32(threshold * np.float32(1 / 1.012))
    return threshold
