"""SparDL in numpy, written from Algorithms 1 and 2 of the paper: P ranks as a plain loop, entries in dictionaries.

Every rank holds its blocks by number. A bag of step i holds the blocks of the destinations at distance [s, 2s) from the
rank, where s is the step's stride, and travels s ranks on. With teams, that happens inside each of them.
"""

import itertools

import numpy as np

from tests.reference import added, largest


class Largest:
  """Chooses the largest entries of a block, if they reach the bound of their rank and block where there are bounds.

  A full block's next bound is its least entry, times the root of its growth since the last step if that was full too.
  """

  def __init__(self, share, bounds=None):
    self.share, self.bounds = share, bounds
    self.levels = None if bounds is None else np.zeros_like(bounds)

  def full(self, at, least):
    growth = min(max(least / self.levels[at], np.float32(1)), np.float32(2)) if self.levels[at] > 0 else np.float32(1)
    self.bounds[at], self.levels[at] = least * np.sqrt(growth), least

  def choose(self, rank, block, values):
    chosen = largest(dict(enumerate(values)), self.share)
    if self.bounds is None:
      return chosen
    chosen = {i: value for i, value in chosen.items() if abs(value) >= self.bounds[rank, block]}
    if len(chosen) == self.share:
      self.full((rank, block), min(abs(value) for value in chosen.values()))
    else:
      few = 2 * len(chosen) < self.share  # too few to tell how far down the entries are
      self.bounds[rank, block] *= 0 if few else 0.75 + len(chosen) / self.share / 4
      self.levels[rank, block] = 0
    return chosen

  def told(self, rank, block, received, values):
    pass


class Chunked:
  """Chooses one entry of each chunk: the largest at the start, or what was received since and is larger.

  Of a magnitude only those bits count that a word has room for beside the number of a row.
  """

  def __init__(self, share, length):
    self.share, self.best = share, {}
    self.spent = (-(-length // share)).bit_length()

  def rank(self, value):
    return int(np.float32(abs(value)).view(np.int32)) >> self.spent

  def champions(self, rank, block, values):
    if (rank, block) not in self.best:
      chunks = [range(chunk, len(values), self.share) for chunk in range(self.share)]
      largest = lambda chunk: max(chunk, key=lambda i: (self.rank(values[i]), -i), default=None)
      self.best[rank, block] = [largest(chunk) for chunk in chunks]
    return self.best[rank, block]

  def choose(self, rank, block, values):
    return {i: values[i] for i in self.champions(rank, block, values) if i is not None}

  def told(self, rank, block, received, values):
    """After `received` was added to `values`."""
    best = self.champions(rank, block, values)
    for i in received:
      if self.rank(values[i]) > self.rank(values[best[i % self.share]]):
        best[i % self.share] = i


def spardl(
  gradients,
  residuals,
  k,
  residual_kind="global",
  teams=1,
  bruck=False,
  adaptive=None,
  selector=None,
  rounded=lambda value: value,
):
  """Totals f32[P, n] as each rank ends up with, residuals f32[P, n], and the next (h, step, flag) of Algorithm 2.

  `selector` and `rounded`, what becomes of a value that is sent, are for one team only.
  """
  ranks, n = gradients.shape
  home = gradients + residuals
  per_team = ranks // teams
  share = max(1, -(-k * teams // ranks))
  length = -(-n // per_team)
  blocks, sent, own = [], [], []
  for team in range(teams):
    part = home[team * per_team : (team + 1) * per_team]
    scattered = reduce_scatter(part, length, selector or Largest(share), rounded)
    for result, collected in zip(scattered, (blocks, sent, own), strict=True):
      collected.extend(result)

  peers = lambda rank: [team * per_team + rank % per_team for team in range(teams)]
  drop = lambda rank, entries, weight: [
    blocks[rank][rank % per_team].__setitem__(i, blocks[rank][rank % per_team][i] + np.float32(weight) * value)
    for i, value in entries.items()
  ]
  most = share
  if bruck:
    h = adaptive[0]
    for rank in range(ranks):
      drop(rank, dict(list(own[rank].items())[h:]), 1)
    heads = [dict(list(entries.items())[:h]) for entries in own]
    sums = [added(*[heads[peer] for peer in peers(rank)]) for rank in range(ranks)]
    most = max(len(entries) for entries in sums)
    own = [largest(entries, share) for entries in sums]
  else:
    for step in range(teams.bit_length() - 1):
      partner = lambda rank, step=step: peers(rank)[(rank // per_team) ^ (1 << step)]
      sums = [added(own[rank], own[partner(rank)]) for rank in range(ranks)]
      own = [largest(entries, share) for entries in sums]
      for rank in range(ranks):
        lost = {i: value for i, value in sums[rank].items() if i not in own[rank]}
        drop(rank, lost, 1 / 2 ** (step + 1))

  totals, kept = np.zeros((ranks, n), np.float32), home.copy()
  for rank in range(ranks):
    mine = range(rank // per_team * per_team, (rank // per_team + 1) * per_team)
    final = {peer % per_team * length + i: value for peer in mine for i, value in own[peer].items()}
    for place in range(n):
      block, i = divmod(place, length)
      totals[rank, place] = final.get(place, 0)
      if residual_kind == "local":
        kept[rank, place] = 0 if place in sent[rank] else home[rank, place]
      elif place in final:  # lines 12-14: in-procedure residuals stay with the rank that dropped them
        kept[rank, place] = blocks[rank][block][i] if residual_kind == "global" else 0
  return totals, kept, adapted(adaptive, most, share, teams) if bruck else None


def reduce_scatter(home, length, selector, rounded):
  """Spar-Reduce-Scatter in one team: of each rank what it dropped by block, the places it sent, and its sum."""
  ranks, n = home.shape
  padded = np.zeros((ranks, ranks * length), np.float32)
  padded[:, :n] = home
  inside = [max(0, min(length, n - b * length)) for b in range(ranks)]  # of each block
  blocks = [{b: padded[r, b * length : (b + 1) * length].copy() for b in range(ranks)} for r in range(ranks)]
  if isinstance(selector, Chunked):  # before anything is received
    for rank, block in itertools.product(range(ranks), range(ranks)):
      selector.champions(rank, block, blocks[rank][block][: inside[block]])
  sent = [set() for _ in range(ranks)]

  def cut(rank, block):
    """Line 7: keeps the largest entries of a block for sending and leaves the rest at this rank."""
    chosen = selector.choose(rank, block, blocks[rank][block])
    for i, value in chosen.items():
      blocks[rank][block][i] = value - rounded(value)
      sent[rank].add(block * length + i)
    return {i: rounded(value) for i, value in chosen.items()}

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
        selector.told(rank, block, entries, blocks[rank][block])
  own = [cut(rank, rank) for rank in range(ranks)]
  return blocks, sent, own


def first_h(k, ranks, teams):
  """Algorithm 2, its initial values."""
  share = max(1, -(-k * teams // ranks))
  low = -(-share // teams)
  return low, max(1, round(0.01 * (share - low))), False


def adapted(adaptive, most, share, teams):
  """Algorithm 2, one step."""
  h, step, flag = adaptive
  if (most > share) != (step > 0):
    if flag:
      step, flag = max(-share, min(share, 2 * step)), False
    else:
      flag = True
  else:
    step, flag = (-1 if step > 0 else 1) * max(1, abs(step) // 2), False
  return max(-(-share // teams), min(share, h + step)), step, flag
