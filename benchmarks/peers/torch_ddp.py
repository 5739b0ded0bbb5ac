"""Updates of PyTorch's DistributedDataParallel over gloo, in a rank: `python torch_ddp.py SETTING`, a JSON object.

It imports PyTorch and nothing of this project: PyTorch has an environment of its own.
Rank 0 appends a JSON line for each method to the file `rows`. Backward gives the
gradients at once, so that nothing but their exchange is timed.
"""

import datetime
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

PATIENCE = 900.0  # seconds of a collective operation, after which it has failed
# seconds of the untimed updates of a method, and of the timed ones, after which fewer
# have to do
MOST = 20.0


class Given(torch.autograd.Function):
  """A loss whose gradients are given."""

  @staticmethod
  def forward(ctx: Any, grads: Any, *params: Any) -> Any:
    """Keeps the gradients for backward."""
    ctx.grads = grads
    return params[0].new_zeros(())

  @staticmethod
  def backward(ctx: Any, *_: Any) -> Any:
    """Gives them."""
    return None, *ctx.grads


class Model(torch.nn.Module):
  """Parameters of these shapes, whose gradients are the argument."""

  def __init__(self, shapes: list[list[int]]):
    super().__init__()
    self.weights = torch.nn.ParameterList(
      [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    )

  def forward(self, grads: Any) -> Any:
    """The loss whose gradients these are."""
    return Given.apply(grads, *self.weights)


def sent_bytes() -> int:
  """Bytes that the network interfaces of this host have sent, but for the one to itself."""
  lines = pathlib.Path("/proc/self/net/dev").read_text().splitlines()[2:]
  found = [line.partition(":") for line in lines]
  return sum(
    int(counts.split()[8]) for name, _, counts in found if name.strip() != "lo"
  )


def gradients(shapes: list[list[int]], rank: int) -> list[torch.Tensor]:
  """The gradients of a rank, the same in every step; each rank can make those of all others."""
  generator = torch.Generator().manual_seed(rank)
  return [torch.randn(shape, generator=generator) for shape in shapes]


def most(value: float) -> float:
  """The largest of all ranks."""
  found = torch.tensor([value], dtype=torch.float64)
  dist.all_reduce(found, op=dist.ReduceOp.MAX)
  return float(found)


def parallel(
  module: torch.nn.Module, label: str
) -> tuple[DistributedDataParallel, Any]:
  """The module under a method, and the state of PowerSGD's hook or None.

  A method is "dense", "fp16" or "powersgd:rank=4:start=2:batched=1", with `bucket=25`,
  the MB of a bucket; `start` is the first step that PowerSGD compresses, `batched`
  whether it works on matrices of the same shape together.
  """
  name, *pairs = label.split(":")
  options = {key: int(value) for key, value in (pair.split("=") for pair in pairs)}
  size = options.get("bucket", 1000 if name == "powersgd" else 25)
  model = DistributedDataParallel(
    module, bucket_cap_mb=size, gradient_as_bucket_view=True, init_sync=False
  )
  state = None
  if name == "powersgd":
    state = powerSGD_hook.PowerSGDState(
      None,
      matrix_approximation_rank=options.get("rank", 4),
      start_powerSGD_iter=options.get("start", 2),
      batch_tensors_with_same_shape=bool(options.get("batched", 0)),
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
  elif name == "fp16":  # that of bfloat16 needs NCCL
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
  return model, state


class Method:
  """The exchange of given gradients by a method."""

  def __init__(self, label: str, shapes: list[list[int]]):
    self.model, self.state = parallel(Model(shapes), label)
    # the first ones
    self.dense_steps = self.state.start_powerSGD_iter if self.state else 0

  def update(self, grads: list[torch.Tensor]) -> None:
    """One exchange; the parameters' `grad` are the mean."""
    self.model(grads).backward()

  def reset(self) -> None:
    """Keeps the buckets that gradients are views of."""
    self.model.zero_grad(set_to_none=False)

  def close(self) -> None:
    """Nothing is left behind."""

  def delivered(self) -> torch.Tensor:
    """The last mean, one vector."""
    return torch.cat([weight.grad.flatten() for weight in self.model.parameters()])

  def residual_norm(self, left: torch.Tensor) -> tuple[float, float]:
    """The norm of what steps have left out, `left`, without the mean of the ranks' residuals, which must be all of it.

    Parts of buckets have another order than the parameters, so that norms are compared:
    that of the residuals too.
    """
    if self.state is None:
      return float(left.norm()), 0.0
    total = torch.cat(
      [error.flatten() for _, error in sorted(self.state.error_dict.items())]
    )
    dist.all_reduce(total)
    return float(left.norm()), float((total / dist.get_world_size()).norm())


def measure(
  method: Any, setting: dict[str, Any], grads: list[torch.Tensor], mean: torch.Tensor
) -> dict[str, Any]:
  """The row of a method: seconds and bytes of each timed update, and how far the result is from the mean."""
  seconds, sent = list[float](), list[float]()
  delivered, steps, warming = torch.zeros_like(mean), 0, 0.0
  while len(seconds) < setting["repetitions"] and sum(seconds) < MOST:
    dist.barrier()
    before, start = sent_bytes(), time.perf_counter()
    method.update(grads)
    took = time.perf_counter() - start
    time.sleep(0.05)  # what is under way
    took, count = most(took), most(sent_bytes() - before)
    if steps >= setting["warm_up"] or (warming > MOST and steps > method.dense_steps):
      seconds.append(took)
      sent.append(count)
    else:
      warming += took
    delivered += method.delivered()
    steps += 1
    method.reset()
  left, kept = method.residual_norm(steps * mean - delivered)
  wrong = abs(left - kept) / float(mean.norm()) / steps
  dist.barrier()  # until all have reset
  method.close()
  return {"seconds": seconds, "bytes": sent, "wrong": wrong}


def join() -> dict[str, Any]:
  """The setting, in a rank that has joined the others."""
  setting = json.loads(sys.argv[1])
  os.environ.update(MASTER_ADDR=setting["address"], MASTER_PORT=str(setting["port"]))
  torch.set_num_threads(setting["threads"])
  limit = datetime.timedelta(seconds=PATIENCE)
  dist.init_process_group(
    "gloo", rank=setting["rank"], world_size=setting["size"], timeout=limit
  )
  return setting


def append_rows(
  setting: dict[str, Any], row_of: Callable[[str], dict[str, Any]]
) -> None:
  """Rank 0 appends the row of each method of the setting to its file; ends the rank."""
  for label in setting["methods"]:
    row = row_of(label)
    if setting["rank"] == 0:
      with open(setting["rows"], "a") as file:
        file.write(json.dumps(row) + "\n")
  dist.destroy_process_group()


def measure_all(
  setting: dict[str, Any], make: Callable[[str, list[torch.Tensor]], Any]
) -> None:
  """Measures all methods of the setting, each made from its label and the gradients of this rank."""
  grads = gradients(setting["shapes"], setting["rank"])
  mean = sum(
    torch.cat([x.flatten() for x in gradients(setting["shapes"], rank)])
    for rank in range(setting["size"])
  )
  mean /= setting["size"]
  append_rows(
    setting,
    lambda label: {"method": label} | measure(make(label, grads), setting, grads, mean),
  )


def main() -> None:
  """Measures all methods of the setting."""
  setting = join()
  measure_all(setting, lambda label, _: Method(label, setting["shapes"]))


if __name__ == "__main__":
  main()
