"""Averages of hivemind, in a rank of `torch_ddp`: `python hivemind_averager.py SETTING`.

hivemind finds a group for some seconds before each average. Only the exchange behind
that is timed, from a barrier on.
"""

import socket
import time

import hivemind
import torch
import torch.distributed as dist
import torch_ddp
from hivemind import compression
from hivemind.averaging.control import AveragingStage

COMPRESSIONS = {
  "none": compression.NoCompression,
  "float16": compression.Float16Compression,
  "uniform8": compression.Uniform8BitQuantization,
  "quantile8": compression.Quantile8BitQuantization,
}
_MATCHMAKING = 4.0  # seconds, more than a request may take


class Average:
  """The average of a vector by a compression, "hivemind:float16"."""

  dense_steps = 0

  def __init__(self, label: str, dht: hivemind.DHT, grads: list[torch.Tensor]):
    self._vector = torch.cat([grad.flatten() for grad in grads])
    size = dist.get_world_size()
    self._averager = hivemind.averaging.DecentralizedAverager(
      averaged_tensors=[torch.zeros_like(self._vector)],
      dht=dht,
      prefix=label.replace(":", "_"),
      target_group_size=size,
      min_group_size=size,
      min_matchmaking_time=_MATCHMAKING,
      compression=COMPRESSIONS[label.partition(":")[2]](),
      allreduce_timeout=torch_ddp.PATIENCE,
      bandwidth=1.0,  # of each: parts of one size
      allow_state_sharing=False,
      start=True,
    )
    self.reset()

  def reset(self) -> None:
    """Gives the vector again, and finds the group."""
    with self._averager.get_tensors() as (held,):
      held.copy_(self._vector)
    self._step = self._averager.step(
      wait=False, require_trigger=True, timeout=torch_ddp.PATIENCE
    )
    while self._step.stage != AveragingStage.AWAITING_TRIGGER:
      if self._step.done():
        raise RuntimeError(f"hivemind found no group: {self._step.exception()}")
      time.sleep(0.01)

  def update(self, _: list[torch.Tensor]) -> None:
    """The exchange."""
    self._step.allow_allreduce()
    self._step.result(torch_ddp.PATIENCE)

  def delivered(self) -> torch.Tensor:
    """The last mean."""
    with self._averager.get_tensors() as (held,):
      return held.clone()

  def residual_norm(self, left: torch.Tensor) -> tuple[float, float]:
    """The norm of what the averages have left out; nothing is kept."""
    return float(left.norm()), 0.0

  def close(self) -> None:
    """Ends the process that averages."""
    self._step.cancel()
    self._averager.shutdown()


def _join_dht() -> hivemind.DHT:
  """The network of all ranks, of which rank 0 is the first peer."""
  address = socket.gethostbyname(socket.gethostname())
  make = lambda peers: hivemind.DHT(
    host_maddrs=[f"/ip4/{address}/tcp/0"], initial_peers=peers, start=True
  )
  dht = make([]) if dist.get_rank() == 0 else None
  known = [list(map(str, dht.get_visible_maddrs())) if dht else None]
  dist.broadcast_object_list(known)
  return dht or make(known[0])


def main() -> None:
  """Measures all compressions of the setting."""
  setting = torch_ddp.join()
  dht = _join_dht()
  torch_ddp.measure_all(setting, lambda label, grads: Average(label, dht, grads))
  dht.shutdown()


if __name__ == "__main__":
  main()
