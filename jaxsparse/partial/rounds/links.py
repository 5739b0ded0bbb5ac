"""What members send in a round beside the messages of the outer step: what links have moved, and residuals.

What the links among the members have moved is added to the anchor as it is, in float32.
What a member that leaves for good has not delivered passes to another one with the
result:

    owner before   event                                                 owner after
    leaver i       the round counts, and members stay                    staying member i mod (how many stay)
    leaver i       the round counts for nobody, or is skipped            leaver i
    leaver i       all members leave                                     leaver i, whose `state` has it
    leaver i       the round counts; it is not finite, or huge           nobody, with a warning

So a residual belongs to one worker at any time, whatever is lost.

Each `send` takes messages (words, destination, source), the last two ranks or None: it
sends the words, and returns for each message as many words from the source. Messages
are matched by their numbers in the round, so all members make the same calls.
"""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxsparse.arrays.flatten import all_finite, flatten
from jaxsparse.comm.peers import Send
from jaxsparse.partial.net.messages import WorkerGroup
from jaxsparse.partial.rounds.outer_step import Anchor, OuterStep, Result
from jaxsparse.transform.fragments import fill_zeros

_LOG = logging.getLogger(__name__)
# times 1 + the largest parameter: the largest entry of a residual that is taken over
_MOST_RESIDUAL = 1e6


def add_moved(
  outer: OuterStep,
  before: Anchor,
  result: Result,
  delta: optax.Params,
  group: WorkerGroup,
  rank: int,
  send: Send,
) -> Result:
  """`result` after all links of its group have sent what they give; skipped if the sum is not finite.

  Args:
    outer: the outer step.
    before: the anchor before the round.
    result: of the outer step, the same on all members.
    delta: θ − θ_w of this member, which is sent if it is a link.
    group: of the round.
    rank: of this member.
    send: as in `PeerComm`.
  """
  # `link` is the rank of a link; all members take part in each broadcast.
  for link in () if result.skipped else map(group.members.index, group.links):
    leaves = outer.fragments.part(delta, result.fragment)
    values = np.asarray(flatten(leaves)[0])
    vector = broadcast(values, link, rank, len(group.members), send)
    anchor = subtract(outer, result.anchor, leaves, vector)
    if not all_finite(anchor.params):
      # All members add the same vector to the same anchor, so all of them skip.
      return outer.skip(before, result)
    result = result._replace(anchor=anchor, totals=(*result.totals, vector))
  return result


def subtract(
  outer: OuterStep, anchor: Anchor, leaves: optax.Params, vector: np.ndarray
) -> Anchor:
  """`anchor` minus what a link has moved.

  Args:
    outer: the outer step.
    anchor: of which the parameters move.
    leaves: of the exchanged fragment, as `Fragments.part` has them; their shapes count.
    vector: f32[n], θ − θ_w of the link w, the entries of these leaves concatenated.
  """
  movement = flatten(leaves)[1](outer.on_cpu(vector))
  # a leaf of another fragment does not move
  by = fill_zeros(anchor.params, movement)
  return anchor._replace(params=jax.tree.map(jnp.subtract, anchor.params, by))


def broadcast(
  values: np.ndarray, root: int, rank: int, size: int, send: Send
) -> np.ndarray:
  """f32[n] of the root, at all members: the root sends a slice to each of P members, and each member its slice to all.

  Args:
    values: f32[n]; at other members than the root only the size counts.
    root: rank of the root.
    rank: of this member.
    size: P.
    send: as in `PeerComm`.

  Example:
    >>> broadcast(np.ones(3, np.float32), 0, 0, 1, send=lambda messages: [words for words, *_ in messages])
    array([1., 1., 1.], dtype=float32)
  """
  slices = np.pad(values, (0, -values.size % size)).view(np.uint32).reshape(size, -1)
  to_each = [
    (words, to if rank == root else None, root if rank == to else None)
    for to, words in enumerate(slices)
  ]
  # Message `to` is the slice for member `to`: this member receives message `rank`.
  received = send(to_each)[rank]
  # All-gather: message `step` goes `step` ranks on, so that at no time all send to one.
  by_distance = send(
    [(received, (rank + step) % size, (rank - step) % size) for step in range(size)]
  )
  # The slices in order: the rank of the sender is the number of its slice.
  in_order = [by_distance[(rank - sender) % size] for sender in range(size)]
  return np.concatenate(in_order).view(np.float32)[: values.size]


def pass_residuals(
  outer: OuterStep, result: Result, group: WorkerGroup, rank: int, send: Send
) -> Result:
  """`result` after each member that leaves has given its residual of the fragment to one that stays.

  Args:
    outer: the outer step.
    result: of the outer step, at this member.
    group: of the round.
    rank: of this member.
    send: as in `PeerComm`.
  """
  staying = [member for member in group.members if member not in group.leaving]
  if result.skipped or not staying:
    return result
  anchor = result.anchor
  for index, leaver in enumerate(group.leaving):
    successor = group.members.index(staying[index % len(staying)])
    source = group.members.index(leaver)
    # Of the leaver these are the words to send, of other members only the size counts.
    residual = outer.residual(anchor, result.fragment)
    destination = successor if rank == source else None
    sender = source if rank == successor else None
    # Members with neither destination nor source also call `send`: its calls number the
    # messages.
    (words,) = send([(residual.view(np.uint32), destination, sender)])
    if rank == source:
      # the leaver's residual becomes r − r, which is exactly 0
      anchor = outer.add_residual(anchor, -residual, result.fragment)
    elif rank == successor:
      received = words.view(np.float32)
      # The residual of another worker is not trusted. NaN fails the comparison, too.
      leaves = jax.tree.leaves(anchor.params)
      largest = max(np.abs(leaf).max(initial=0) for leaf in leaves)
      if (np.abs(received) <= _MOST_RESIDUAL * (1 + largest)).all():
        anchor = outer.add_residual(anchor, received, result.fragment)
      else:
        _LOG.warning(
          f"the residual of worker {leaver}, which leaves, is lost: it is not finite, or huge"
        )
  return result._replace(anchor=anchor)
