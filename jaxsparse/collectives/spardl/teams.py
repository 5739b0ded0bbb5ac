"""Spar-All-Gather: sums of the same block over teams, R-SAG (§3.3.1) and B-SAG (§3.3.2)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.collectives.spardl.writer import Writer
from jaxsparse.comm import in_rank_order, topology
from jaxsparse.select.exact import top_k_of_entries
from jaxsparse.sparse import saturating
from jaxsparse.sparse.capacities import climb
from jaxsparse.types import Comm, Sparse

MESSAGES = 1 << 30
"""Message numbers of sums over teams begin here; those of the reduce-scatter are strides."""


class Summed(NamedTuple):
  """A block, summed over teams, at one worker.

  Attributes:
    own: [1, L] entries, the largest of the sum.
    lost: entries that this worker adds back to its accumulator.
    merged: i32[], the number N of different indices that came together.
    words: u32[], sent.
  """

  own: Sparse
  lost: list[Sparse]
  merged: jax.Array
  words: jax.Array


def r_sag(member: Comm, own: Sparse, writer: Writer) -> Summed:
  """Sums one block over 2^j teams by recursive doubling, cut to its L largest entries after each step.

  Step t = 0, 1, … drops the same entries at 2^(t + 1) workers, so each of them keeps 1/2^(t + 1) of what was dropped.
  (The paper's "half" is right for the first step only.) What step t rounds off is the same at 2^t workers.

  Args:
    member: the workers that hold this block, one of each team.
    own: [1, L] entries of the block.
    writer: of the messages.
  """
  share, lost = own.indices.size, []
  strides = topology.strides(member.size)
  for step, stride in enumerate(reversed(strides)):
    message, off = writer.encode(own, MESSAGES + step)
    got = member.permute(message, topology.partners(member.size, stride))
    mine, theirs = writer.decode(message), writer.decode(got)
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), mine, theirs)
    kept, rest = top_k_of_entries(sparse.merge(both, writer.length), share, share, writer.length)
    own, rest = _row(kept), _row(rest)
    lost += _divided(rest, 2 ** (step + 1)) + _divided(off if writer.rounds else None, 2**step)
  words = saturating.total(writer.codec.words(1, share) * len(strides))
  return Summed(own, lost, jnp.int32(share), words)


def b_sag(member: Comm, own: Sparse, h: jax.Array, capacities: tuple[int, ...], writer: Writer) -> Summed:
  """Sums the h largest entries of one block of each team, in team order, for any number of teams.

  What the last cut drops is in no team's total, so its origins keep it as it is.

  Args:
    member: the workers that hold this block, one of each team.
    own: [1, L] entries of the block.
    h: i32[], entries that are sent.
    capacities: the message sizes that are compiled, up to L.
    writer: of the messages.
  """
  share, length = own.indices.size, writer.length
  head, tail = map(_row, top_k_of_entries(jax.tree.map(lambda x: x[0], own), h, share, length))

  def gather(capacity: int) -> tuple[Sparse, Sparse | None, jax.Array, jax.Array]:
    message, off = writer.encode(sparse.narrowed(head, capacity), MESSAGES)
    merged = sparse.merge(in_rank_order(member, writer.gather(member, message)), length)
    kept, _ = top_k_of_entries(merged, share, share, length)
    lost = sparse.widened(off, share, length) if writer.rounds else None
    return _row(kept), lost, sparse.count(merged, length), saturating.total(writer.words(member.size, capacity))

  kept, lost, merged, words = climb(capacities, h, gather)
  return Summed(kept, [tail, *_divided(lost, by=1)], merged, words)


def _divided(entries: Sparse | None, by: int) -> list[Sparse]:
  """What each of `by` workers keeps of entries that all of them lose alike."""
  return [] if entries is None else [entries._replace(values=entries.values / by)]


def _row(entries: Sparse) -> Sparse:
  return jax.tree.map(lambda x: x[None], entries)
