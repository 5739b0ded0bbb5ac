"""Five communication verbs, and the engines that carry them: a shard_map axis, the simulator, MPI.

`topology` says who sends to whom, `axis` and `mpi` carry the messages, `all_reduce` builds gathers, exchanges and an
all-reduce from `shift` alone, and `replication` follows through a jaxpr which values are the same on every worker.
"""

from jaxsparse.comm.all_reduce import (
  all_gather,
  all_reduce_cost,
  all_reduce_in_order,
  combined,
  exchange,
  in_rank_order,
)
from jaxsparse.comm.axis import AxisComm, SimComm, SoloComm, axes_of, comm_of, is_message
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
  "is_message",
  "pack",
  "unpack",
]
