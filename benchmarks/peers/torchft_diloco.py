"""DiLoCo of torchft over gloo, for the ranks of `torch_training`: each is a replica group of one process.

`torchft_worker` takes its manager from here.
"""

import contextlib
import datetime
import itertools
import socket
from typing import Any

import torch
import torch_ddp
from torch import nn
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

_PORTS = itertools.count(29610)  # of the lighthouse, another one for each method


def make_manager(
  lighthouse: str, name: str, replicas: int, **states: Any
) -> tuple[Manager, Any]:
  """The manager of a replica group of this process, and its store.

  Args:
    lighthouse: address of the lighthouse.
    name: of the group.
    replicas: the fewest groups that exchange.
    states: `load_state_dict` and `state_dict`, for groups that come later.
  """
  limit = datetime.timedelta(seconds=torch_ddp.PATIENCE)
  address = socket.gethostbyname(socket.gethostname())
  store = torch.distributed.TCPStore(address, 0, is_master=True, wait_for_workers=False)
  manager = Manager(
    pg=ProcessGroupGloo(timeout=limit),
    **{"load_state_dict": None, "state_dict": None} | states,
    min_replica_size=replicas,
    use_async_quorum=False,  # as DiLoCo asks
    timeout=limit,
    quorum_timeout=limit,
    rank=0,
    world_size=1,
    store_addr=address,
    store_port=store.port,
    lighthouse_addr=lighthouse,
    replica_id=name,
    init_sync=False,  # all start alike
  )
  return manager, store


class Apart(nn.Module):
  """A module that each rank trains apart; after each `every` steps the mean of their movements makes an outer step.

  A method is "diloco:every=10:rate=0.7:momentum=0.9": SGD with Nesterov's momentum is
  the outer optimizer.
  """

  no_sync = contextlib.nullcontext

  def __init__(
    self,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    label: str,
    setting: dict[str, Any],
  ):
    super().__init__()
    self.module = module
    options = {
      key: float(value)
      for key, value in (pair.split("=") for pair in label.split(":")[1:])
    }
    momentum = options.get("momentum", 0.9)
    outer = torch.optim.SGD(
      module.parameters(), options.get("rate", 0.7), momentum, nesterov=momentum > 0
    )
    port, size = next(_PORTS), setting["size"]
    self._lighthouse = setting["rank"] == 0 and LighthouseServer(
      bind=f"0.0.0.0:{port}", min_replicas=size
    )
    lighthouse = f"http://{setting['address']}:{port}"
    self._manager, self._store = make_manager(lighthouse, str(setting["rank"]), size)
    self._diloco = DiLoCo(
      self._manager, [module], optimizer, outer, sync_every=int(options["every"])
    )
    self._diloco.__enter__()

  def forward(self, inputs: torch.Tensor) -> torch.Tensor:
    """What the module makes of them."""
    return self.module(inputs)

  def close(self) -> None:
    """Ends the exchange."""
    self._diloco.__exit__(None, None, None)
    self._manager.shutdown(wait=False)
    if self._lighthouse:
      self._lighthouse.shutdown()
