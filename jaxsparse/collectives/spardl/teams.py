"""Spar-All-Gather: the sum of a block over teams, by R-SAG (§3.3.1) or B-SAG (§3.3.2)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.collectives._messages import Writer
from jaxsparse.comm import in_rank_order, schedules
from jaxsparse.select.exact import top_k_of_entries
from jaxsparse.sparse import saturating
from jaxsparse.sparse.capacities import switch
from jaxsparse.types import Comm, Sparse

MESSAGES = 1 << 30
"""The first message number of sums over teams; the message numbers of the reduce-scatter are its strides."""


class Summed(NamedTuple):
  """The sum of a block over teams, at one worker.

  Attributes:
    own: [1, L] entries, the largest of the sum.
    lost: dropped entries and rounding errors that this worker adds back to its accumulator.
    merged: i32[], N, the number of different indices of the sum before it is cut to L entries.
    words: u32[], words sent.
  """

  own: Sparse
  lost: list[Sparse]
  merged: jax.Array
  words: jax.Array


def r_sag(member: Comm, own: Sparse, writer: Writer) -> Summed:
  """Sums one block over 2^j teams by recursive doubling and keeps the L largest entries of the sum after each step.

  After step t = 0, 1, … groups of 2^(t + 1) workers have the same sum and drop the same entries, so each worker adds
  1/2^(t + 1) of the dropped entries to its residual. (The paper's "half" is right for the first step only.) Before step
  t, groups of 2^t workers send the same message, so each adds 1/2^t of its rounding errors.

  Args:
    member: the workers with this block, one of each team.
    own: [1, L] entries, the sum of the block inside this worker's team.
    writer: encodes and decodes messages.
  """
  share, lost = own.indices.size, []
  strides = schedules.strides(member.size)
  for step, stride in enumerate(reversed(strides)):
    message, errors = writer.encode(own, MESSAGES + step)
    got = member.permute(message, [(worker, worker ^ stride) for worker in range(member.size)])
    mine, theirs = writer.decode(message), writer.decode(got)
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), mine, theirs)
    kept, rest = top_k_of_entries(sparse.merge(both, writer.length), share, share, writer.length)
    own, rest = sparse.as_row(kept), sparse.as_row(rest)
    lost += divided([rest], 2 ** (step + 1)) + divided([errors] if writer.rounds else [], 2**step)
  words = saturating.total(writer.codec.words(1, share) * len(strides))
  return Summed(own, lost, jnp.int32(share), words)


def b_sag(member: Comm, own: Sparse, h: jax.Array, capacities: tuple[int, ...], writer: Writer) -> Summed:
  """Sums the h largest entries of a block of each team, in team order, for any number of teams.

  The L largest entries of the sum are kept. The others are in no total, so the accumulators they come from still have
  them, and nothing is added back.

  Args:
    member: the workers with this block, one of each team.
    own: [1, L] entries, the sum of the block inside this worker's team.
    h: i32[], the number of entries that each team sends.
    capacities: the message sizes that are compiled, up to L.
    writer: encodes and decodes messages.
  """
  share, length = own.indices.size, writer.length
  head, tail = map(sparse.as_row, top_k_of_entries(sparse.only_row(own), h, share, length))

  def gather(capacity: int) -> tuple[Sparse, list[Sparse], jax.Array, jax.Array]:
    message, errors = writer.encode(sparse.narrowed(head, capacity), MESSAGES)
    merged = sparse.merge(in_rank_order(member, writer.gather(member, message)), length)
    kept, _ = top_k_of_entries(merged, share, share, length)
    words = saturating.total(writer.words(member.size, capacity))
    return sparse.as_row(kept), writer.lost(errors, share), sparse.count(merged, length), words

  kept, lost, merged, words = switch(capacities, h, gather)
  return Summed(kept, [tail, *lost], merged, words)


def divided(lost: list[Sparse], by: int) -> list[Sparse]:
  """The part of lost entries that each of `by` workers adds back if all of them lose the same."""
  return [entries._replace(values=entries.values / by) for entries in lost]
