"""The communication verbs of a `Comm`, and the engines that implement them: a shard_map axis, the simulator, MPI.

`verbs` has the comms of a mesh axis, of the simulator, and of one worker alone, `mpi`
that of MPI. `schedules` says who sends to whom, and builds an all-gather and an
all-reduce from the verbs. `replication` checks on a jaxpr which values are equal on all
workers.
"""

from jaxsparse.comm.schedules import (
  agreement_messages,
  all_gather,
  all_reduce_cost,
  all_reduce_in_order,
  in_rank_order,
)
from jaxsparse.comm.verbs import (
  AxisComm,
  CommView,
  SimComm,
  SoloComm,
  axes_of,
  comm_of,
  number_of_each,
  pack,
  unpack,
)

__all__ = [
  "AxisComm",
  "CommView",
  "SimComm",
  "SoloComm",
  "agreement_messages",
  "all_gather",
  "all_reduce_cost",
  "all_reduce_in_order",
  "axes_of",
]
__all__ += ["comm_of", "in_rank_order", "number_of_each", "pack", "unpack"]
