"""What a member of a round that leaves for good has not delivered: it passes to another member with the result."""

import logging

import jax
import numpy as np

from jaxsparse.comm.peers import Send
from jaxsparse.partial.net.messages import Group
from jaxsparse.partial.rounds.outer_step import OuterStep, Result

_LOG = logging.getLogger(__name__)
# times 1 + the largest parameter: the largest entry of a residual that is taken over
_MOST_RESIDUAL = 1e6


def pass_residuals(
  outer: OuterStep, result: Result, group: Group, rank: int, send: Send
) -> Result:
  """`result` after each member that leaves has given its residual of the fragment to one that stays.

  The round counts for all members or for none, and so does this: a residual belongs to
  one worker at any time, whatever is lost. Where all members leave they keep theirs,
  and of a round that is skipped.

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
  for number, leaver in enumerate(group.leaving):
    heir = group.members.index(staying[number % len(staying)])
    source = group.members.index(leaver)
    own = outer.residual(anchor, result.fragment)
    destination = heir if rank == source else None
    sender = source if rank == heir else None
    (words,) = send([(own.view(np.uint32), destination, sender)])
    if rank == source:
      anchor = outer.add_residual(anchor, -own, result.fragment)
    elif rank == heir:
      residual = words.view(np.float32)
      if _is_sound(residual, anchor.params):
        anchor = outer.add_residual(anchor, residual, result.fragment)
      else:
        _LOG.warning(
          f"the residual of worker {leaver}, which leaves, is lost: it is not finite, or huge"
        )
  return result._replace(anchor=anchor)


def _is_sound(residual: np.ndarray, params: object) -> bool:
  magnitudes = [np.abs(leaf).max(initial=0) for leaf in jax.tree.leaves(params)]
  most = _MOST_RESIDUAL * (1 + max(magnitudes, default=0))
  return bool((np.abs(residual) <= most).all())
