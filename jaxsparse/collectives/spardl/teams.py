"""Spar-All-Gather: the sum of a block over teams, by R-SAG (§3.3.1) or B-SAG (§3.3.2, with Algorithm 2).

d is the number of teams, L the number of entries of a block that are kept, h the number
that a team sends by B-SAG, and N the number of different indices of the sum of these.
"""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.collectives._messages import Writer, switch
from jaxsparse.comm import in_rank_order, schedules
from jaxsparse.select.exact import top_k_of_entries
from jaxsparse.types import Comm, Sparse, saturated

# the first message number of sums over teams; those of the reduce-scatter are its
# strides
_FIRST_MESSAGE = 1 << 30


class Summed(NamedTuple):
  """The sum of a block over teams, at one worker.

  Attributes:
    block: [1, L] entries, the largest of the sum.
    returned: dropped entries and rounding errors that this worker adds back to its
      accumulator.
    merged: i32[], of B-SAG N, the number of different indices of the sum before it is
      cut to L entries; else None.
    words: u32[], words sent.
  """

  block: Sparse
  returned: list[Sparse]
  merged: jax.Array | None
  words: jax.Array


def r_sag(same_block: Comm, block: Sparse, writer: Writer) -> Summed:
  """Sums one block over 2^j teams by recursive doubling and keeps the L largest entries of the sum after each step.

  After step t = 0, 1, … groups of 2^(t + 1) workers have the same sum and drop the same
  entries, so each worker returns 1/2^(t + 1) of the dropped entries. (The paper's
  "half" is right for the first step only.) Before step t, groups of 2^t workers send
  the same message, so each returns 1/2^t of its rounding errors.

  Args:
    same_block: the workers that own this block, one in each team.
    block: [1, L] entries, the sum of the block inside this worker's team.
    writer: encodes messages.
  """
  (k_block,) = block.indices.shape[1:]
  length = writer.codec.length
  strides = schedules.strides(same_block.size)
  returned = []
  for step, stride in enumerate(reversed(strides)):
    # Message numbers seed random rounding. These are above all strides, which are the
    # numbers of the reduce-scatter's messages.
    message, errors = writer.encode(block, _FIRST_MESSAGE + step)
    received = same_block.permute(
      message, [(worker, worker ^ stride) for worker in range(same_block.size)]
    )
    # The own message is decoded, too, so that both workers add the same rounded values.
    both = sparse.concatenate(
      [writer.codec.decode(message), writer.codec.decode(received)]
    )
    kept, rest = top_k_of_entries(sparse.merge(both, length), k_block, k_block, length)
    block = sparse.as_row(kept)
    rest = sparse.as_row(rest)
    # 2^(t + 1) workers drop the same entries, so that each returns its share
    returned.append(rest._replace(values=rest.values / 2 ** (step + 1)))
    if writer.codec.rounds:
      returned.append(errors._replace(values=errors.values / 2**step))
  words = saturated(writer.codec.words(1, k_block) * len(strides), jnp.uint32)
  # None: only B-SAG has an N, to adapt h
  return Summed(block, returned, None, words)


def b_sag(
  same_block: Comm,
  block: Sparse,
  h: jax.Array,
  capacities: tuple[int, ...],
  writer: Writer,
) -> Summed:
  """Sums the h largest entries of a block of each team, in team order, for any number of teams.

  The L largest entries of the sum are kept. No team delivers the indices of the others,
  so every worker keeps gradient + old residual there, and nothing is returned.
  Entries of `block` beyond its h largest are returned to this worker's accumulator,
  since other teams may deliver their indices.

  Args:
    same_block: the workers that own this block, one in each team.
    block: [1, L] entries, the sum of the block inside this worker's team.
    h: i32[], the number of entries that each team sends.
    capacities: the message sizes that are compiled, up to L.
    writer: encodes messages.
  """
  (k_block,) = block.indices.shape[1:]
  length = writer.codec.length
  # In `js.partial.Rounds` h goes on while workers come and go, and L changes with P: h
  # may be more than L.
  h = jnp.minimum(h, k_block)
  head, tail = map(
    sparse.as_row, top_k_of_entries(sparse.only_row(block), h, k_block, length)
  )

  def gather(
    capacity: int,
  ) -> tuple[Sparse, list[Sparse], jax.Array, jax.Array]:
    """(the L largest entries of the sum [1, L], rounding errors, N, words), by messages of `capacity` slots."""
    # [1, L] slots with h entries, cut to the smallest sufficient capacity
    rows, lost, words = writer.gather_rows(
      same_block, sparse.resize(head, capacity, length), _FIRST_MESSAGE, k_block
    )
    merged = sparse.merge(in_rank_order(same_block, rows), length)
    kept, _ = top_k_of_entries(merged, k_block, k_block, length)
    return sparse.as_row(kept), lost, sparse.count(merged, length), words

  kept, errors, merged, words = switch(capacities, h, gather)
  return Summed(kept, [tail, *errors], merged, words)


class Adaptive(NamedTuple):
  """The state of Algorithm 2, the same on every worker.

  Attributes:
    h: i32[], the number of entries of a block that each team sends, ⌈L/d⌉ … L.
    step: i32[], the last change of h.
    right: bool[], whether that change was in the right direction (see `adapt`) and was
      not a doubled one.
  """

  h: jax.Array
  step: jax.Array
  right: jax.Array

  @classmethod
  def start(cls, low: int, k_block: int) -> Self:
    """The state before the first update: h = ⌈L/d⌉, to be changed by 1 % of its range."""
    step = max(1, round(0.01 * (k_block - low)))
    return cls(jnp.int32(low), jnp.int32(step), jnp.bool_(False))


def adapt(state: Adaptive, merged: jax.Array, low: int, k_block: int) -> Adaptive:
  """Algorithm 2: changes h, the entries of a block that a team sends, so that their union has about L indices.

  The direction of a step is right if h grows while N ≤ L, or shrinks while N > L, as in
  the paper's pseudocode. After two steps in the right direction the step is doubled;
  after one in the wrong direction it is halved and reversed.

  Args:
    state: the state of this step.
    merged: i32[], N, the largest number of different indices of any block, the same on
      every worker.
    low: ⌈L/d⌉, the minimum of h.
    k_block: L, the maximum of h.
  """
  # N > L and h shrinks, or N ≤ L and h grows
  right_way = (merged > k_block) ^ (state.step > 0)
  doubled = jnp.clip(2 * state.step, -k_block, k_block)
  half = jnp.maximum(1, jnp.abs(state.step) // 2)
  turned = -jnp.sign(state.step) * half
  onward = jnp.where(state.right, doubled, state.step)
  step = jnp.where(right_way, onward, turned)
  h = jnp.clip(state.h + step, low, k_block)
  # `right` becomes False after a doubled step, so that the step after it is not
  # doubled.
  return Adaptive(h, step, right_way & ~state.right)
