"""SparDL in numpy, written from Algorithm 1 of the paper: all workers in a loop, dense blocks, entries in dictionaries.

`reduce_scatter` and `spardl` are the algorithm. `spardl_options` has teams, selectors
and ablations.
"""

import numpy as np

from tests.reference import largest


def spardl(gradients, residuals, k):
  """Total f32[n] and residuals f32[P, n] after one step, of gradients and residuals f32[P, n]."""
  workers, n = gradients.shape
  accumulators = gradients + residuals
  held, sums, _ = reduce_scatter(accumulators, -(-k // workers))
  # All-gather: every worker gets the sum of every block. Its residual is its
  # accumulator where nothing is delivered, and what it dropped on the way where
  # something is.
  length = held.shape[2]
  total = {
    block * length + i: value
    for block, entries in enumerate(sums)
    for i, value in entries.items()
  }
  result, kept = np.zeros(n, np.float32), accumulators.copy()
  for i, value in total.items():
    if i < n:  # the last block is padded
      result[i], kept[:, i] = value, held.reshape(workers, -1)[:, i]
  return result, kept


def reduce_scatter(
  accumulators,
  share,
  choose=None,
  rounded=lambda value: value,
  received=lambda *_: None,
):
  """Spar-Reduce-Scatter: what each worker holds afterwards, and the sum of block w that worker w has.

  Args:
    accumulators: f32[P, n], the gradient plus the residual of each worker.
    share: L, the number of entries that are sent of a block.
    choose: chooses the entries {i: value} of a block, by (worker, block, values); the L
      largest by default.
    rounded: what a value becomes on its way.
    received: is told of (worker, block, entries, values), when entries have been added
      to the values of a block.

  Returns:
    held f32[P, P, length], the entries of each block that worker w has not sent; sums,
    a dictionary for each worker; sent, the set of flat indices that each worker has
    sent.
  """
  workers, n = accumulators.shape
  length = -(-n // workers)
  held = np.zeros((workers, workers * length), np.float32)
  held[:, :n] = accumulators
  held, sent = held.reshape(workers, workers, length), [set() for _ in range(workers)]

  def take(worker, block):
    """The largest entries leave the block of a worker: line 7, just before it is sent."""
    values = held[worker, block]
    chosen = (
      choose(worker, block, values)
      if choose
      else largest(dict(enumerate(values)), share)
    )
    for i, value in chosen.items():
      held[worker, block, i] = value - rounded(value)  # rounding errors stay
      sent[worker].add(block * length + i)
    return {i: rounded(value) for i, value in chosen.items()}

  # …, 4, 2, 1
  strides = [1 << bit for bit in reversed(range(workers)) if 1 << bit < workers]
  for stride in strides:
    # worker w sends the blocks of the workers at distance s … 2s − 1 to worker w + s
    bags = {
      (worker, (worker + distance) % workers): take(
        worker, (worker + distance) % workers
      )
      for worker in range(workers)
      for distance in range(stride, min(2 * stride, workers))
    }
    for (worker, block), entries in bags.items():
      receiver = (worker + stride) % workers
      for i, value in entries.items():
        held[receiver, block, i] += value
      received(receiver, block, entries, held[receiver, block])
  return held, [take(worker, worker) for worker in range(workers)], sent
