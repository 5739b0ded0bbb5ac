"""Five communication verbs, and the engines that implement them: a shard_map axis, the simulator, MPI.

`topology` makes the (source, destination) pairs of each round, `view` has what the comms of all engines share, `axis`
and `mpi` send the messages, `all_reduce` builds an all-gather, a personalized exchange and an all-reduce from `shift`
alone, `markers` are primitives that mark values in a jaxpr, and `replication` checks on a jaxpr which values are equal
on all workers.
"""

from jaxsparse.comm.all_reduce import (
  all_gather,
  all_reduce_cost,
  all_reduce_in_order,
  combined,
  exchange,
  in_rank_order,
)
from jaxsparse.comm.axis import AxisComm, SimComm, SoloComm, axes_of, comm_of, number_of_each
from jaxsparse.comm.markers import message_p
from jaxsparse.comm.view import View, pack, unpack

__all__ = [
  "AxisComm",
  "SimComm",
  "SoloComm",
  "View",
  "all_gather",
  "all_reduce_cost",
  "all_reduce_in_order",
  "axes_of",
  "combined",
  "comm_of",
  "exchange",
  "in_rank_order",
  "message_p",
  "number_of_each",
  "pack",
  "unpack",
]
