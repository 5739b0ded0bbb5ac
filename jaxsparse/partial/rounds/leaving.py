"""What a member of a round that leaves for good has not delivered: it passes to another member with the result.

    owner before   event                                                 owner after
    leaver i       the round counts, and members stay                    staying member i mod (how many stay)
    leaver i       the round counts for nobody, or is skipped            leaver i
    leaver i       all members leave                                     leaver i, whose `state` has it
    leaver i       the round counts; it is not finite, or huge           nobody, with a warning

So a residual belongs to one worker at any time, whatever is lost.
"""

import logging

import jax
import numpy as np

from jaxsparse.comm.peers import Send
from jaxsparse.partial.net.messages import WorkerGroup
from jaxsparse.partial.rounds.outer_step import OuterStep, Result

_LOG = logging.getLogger(__name__)
# times 1 + the largest parameter: the largest entry of a residual that is taken over
_MOST_RESIDUAL = 1e6


def pass_residuals(
  outer: OuterStep, result: Result, group: WorkerGroup, rank: int, send: Send
) -> Result:
  """`result` after each member that leaves has given its residual of the fragment to one that stays.

  The round counts for all members or for none, and so does this: a residual belongs to
  one worker at any time, whatever is lost.

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
  magnitudes = [np.abs(leaf).max(initial=0) for leaf in jax.tree.leaves(anchor.params)]
  most = _MOST_RESIDUAL * (1 + max(magnitudes))
  for index, leaver in enumerate(group.leaving):
    successor = group.members.index(staying[index % len(staying)])
    source = group.members.index(leaver)
    residual = outer.residual(anchor, result.fragment)
    destination = successor if rank == source else None
    sender = source if rank == successor else None
    (words,) = send([(residual.view(np.uint32), destination, sender)])
    if rank == source:
      anchor = outer.add_residual(anchor, -residual, result.fragment)
    elif rank == successor:
      received = words.view(np.float32)
      if (np.abs(received) <= most).all():
        anchor = outer.add_residual(anchor, received, result.fragment)
      else:
        _LOG.warning(
          f"the residual of worker {leaver}, which leaves, is lost: it is not finite, or huge"
        )
  return result._replace(anchor=anchor)
