"""Ok-Topk in numpy, written from Algorithms 1 and 2 of the paper: P workers in a loop, entries in dictionaries.

The sizes of messages are an argument: the smallest entries that do not fit stay with
their senders. Thresholds follow as `nudge` says: "none" is the paper's Algorithm 1. A
threshold of 0 is computed again in the next step.
"""

import numpy as np

from tests.reference import added, dense, largest


class OkTopk:
  """All workers; `reduce` is one step."""

  balance = True  # owners, as the paper does if one has more than 4 times the mean

  def __init__(
    self,
    workers,
    n,
    k,
    sizes,
    threshold_period=32,
    region_period=64,
    balanced_regions=True,
    nudge="none",
  ):
    self.workers, self.n, self.k, self.sizes, self.nudge, self.step = (
      workers,
      n,
      k,
      sizes,
      nudge,
      0,
    )
    self.threshold_period, self.region_period, self.balanced_regions = (
      threshold_period,
      region_period,
      balanced_regions,
    )
    self.local, self.threshold = [np.float32(0)] * workers, np.float32(0)
    self.bounds = [n * region // workers for region in range(workers + 1)]
    self.residuals = np.zeros((workers, n), np.float32)

  def reduce(self, gradients):
    """Total f32[n] of gradients f32[P, n]; the residuals are an attribute."""
    accumulators = gradients + self.residuals
    exact = self.step % self.threshold_period == 0
    # Select by the local thresholds, at most 2k entries; regions contain about equally
    # many of them.
    rows = list(zip(accumulators, self.local, strict=True))
    self.local = [
      np.sort(np.abs(row))[-self.k] if exact or a == 0 else a for row, a in rows
    ]
    rows = list(zip(accumulators, self.local, strict=True))
    reach = [
      {i: value for i, value in enumerate(row) if abs(value) >= a and value != 0}
      for row, a in rows
    ]
    chosen = [largest(entries, 2 * self.k) for entries in reach]
    if self.balanced_regions and (
      self.step % self.region_period == 0 or self.threshold == 0
    ):
      self.bounds = self.consensus([sorted(entries) for entries in chosen])
    # Split: every worker sends the entries of a region to its owner, who adds them up
    # in the order of the workers.
    regions = list(zip(self.bounds[:-1], self.bounds[1:], strict=True))
    inside = lambda entries, start, end: {
      i: value for i, value in entries.items() if start <= i < end
    }
    sent = [
      [largest(inside(own, *region), self.sizes.most) for region in regions]
      for own in chosen
    ]
    owned = [added(*messages) for messages in zip(*sent, strict=True)]
    # Owners select sums by the global threshold, and all of them gather the selected
    # sums.
    magnitudes = sorted(
      (abs(value) for entries in owned for value in entries.values()), reverse=True
    )
    self.threshold = self.global_threshold(exact, magnitudes)
    owned = [
      {i: value for i, value in entries.items() if abs(value) >= self.threshold}
      for entries in owned
    ]
    total = dense(added(*self.gathered(owned)), self.n)
    # Senders keep what is not in the total.
    self.residuals = accumulators.copy()
    for row, messages in zip(self.residuals, sent, strict=True):
      for i in added(*messages):
        row[i] = 0 if total[i] != 0 else row[i]
    self.local = [
      self.nudged(a, len(entries)) for a, entries in zip(self.local, reach, strict=True)
    ]
    if self.nudge == "fixed":
      self.threshold = self.nudged(self.threshold, sum(map(len, owned)))
    self.step += 1
    return total

  def consensus(self, chosen):
    """Lines 5-7: each worker's boundaries balance its own entries; the mean of them is taken."""
    cuts = range(1, self.workers)
    even = [self.n * cut // self.workers for cut in cuts]
    own = [
      [i[cut * len(i) // self.workers] for cut in cuts]
      if len(i) >= self.workers
      else even
      for i in chosen
    ]
    return [
      0,
      *(sum(places) // self.workers for places in zip(*own, strict=True)),
      self.n,
    ]

  def global_threshold(self, exact, magnitudes):
    """The k-th largest magnitude in an exact step, 0 if there are fewer; in between the last one, or one near it."""
    if exact or self.threshold == 0:
      return magnitudes[self.k - 1] if len(magnitudes) >= self.k else np.float32(0)
    threshold = self.threshold
    for octave in (8, 256) if self.nudge == "search" else ():
      candidates = threshold * np.array(
        [2 ** (step / octave) for step in range(-16, 17)], np.float32
      )
      counts = [
        sum(value >= candidate for value in magnitudes) for candidate in candidates
      ]
      threshold = candidates[np.argmin([abs(count - self.k) for count in counts])]
    return threshold

  def gathered(self, owned):
    """What arrives everywhere: directly, or after surplus entries went to those with room."""
    fullest, count = max(map(len, owned)), sum(map(len, owned))
    lines = [list(largest(entries, len(entries)).items()) for entries in owned]
    # Blocks no larger than the two messages of `even` entries that balance and gather
    # cost no more words directly.
    block = next(
      (slots for slots in self.sizes.blocks if slots >= fullest), self.sizes.direct
    )
    self.was_balanced = (
      self.balance
      and fullest > 4 * count / self.workers
      and block > 2 * self.sizes.even
    )
    if not self.was_balanced:
      return [dict(line[: self.sizes.direct]) for line in lines]
    share = min(-(-count // self.workers), self.sizes.even)
    free = [
      owner
      for level in range(share)
      for owner in range(self.workers)
      if level < share - len(lines[owner])
    ]
    surplus = [
      (owner, entry) for owner in range(self.workers) for entry in lines[owner][share:]
    ]
    messages = {}
    for (source, (i, value)), destination in zip(surplus, free, strict=False):
      messages.setdefault((source, destination), {})[i] = value
    assert all(len(message) <= self.sizes.even for message in messages.values())
    return [*(dict(line[:share]) for line in lines), *messages.values()]

  def nudged(self, threshold, count):
    """A threshold in the next step, after `count` entries reached it."""
    if self.nudge == "search":
      return np.float32(
        threshold
        * min(
          np.float32(0.9) + np.float32(count) / np.float32(10 * self.k), np.float32(2)
        )
      )
    factor = (
      1.012 if count > 5 * self.k / 4 else 1 / 1.012 if count < 2 * self.k / 3 else 1
    )
    return (
      threshold if self.nudge == "none" else np.float32(threshold * np.float32(factor))
    )
