"""Trainings with PyTorch's DistributedDataParallel or torchft's DiLoCo, in a rank: `python torch_training.py SETTING`.

Of this project it imports `torch_ddp` and `torchft_diloco`, the programs beside it. The
file `data` of the setting, an .npz, has the parameters as PyTorch's modules name them,
the batches of all ranks, and what is held out. Rank 0 appends a JSON line for each
method to the file `rows`.
"""

import re
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_ddp
import torchft_diloco
from torch import nn

PART = 128  # inputs that are evaluated at once
REPETITIONS = 9  # of forward and backward without an exchange
Arrays = dict[str, np.ndarray]


class CNN(nn.Module):
  """`CNN` of benchmarks/tasks/images.py: images f32[batch, height, width, channels] to logits."""

  def __init__(self, start: Arrays):
    super().__init__()
    self.conv1, self.conv2 = (
      nn.Conv2d(*start[f"{name}.weight"].shape[1::-1], 3, padding=1)
      for name in ("conv1", "conv2")
    )
    self.dense, self.head = (
      nn.Linear(*start[f"{name}.weight"].shape[::-1]) for name in ("dense", "head")
    )

  def forward(self, images: torch.Tensor) -> torch.Tensor:
    """f32[batch, height, width, channels] to f32[batch, 10]."""
    x = F.max_pool2d(F.relu(self.conv1(images.permute(0, 3, 1, 2).contiguous())), 2)
    x = F.max_pool2d(F.relu(self.conv2(x)), 2)
    return self.head(F.relu(self.dense(x.permute(0, 2, 3, 1).flatten(1))))


class Block(nn.Module):
  """`Block` of benchmarks/tasks/lm.py without biases, causal."""

  def __init__(self, width: int, heads: int = 4):
    super().__init__()
    self.heads = heads
    self.norm1, self.norm2 = (nn.RMSNorm(width, eps=1e-6) for _ in range(2))
    self.qkv = nn.Linear(width, 3 * width, bias=False)
    self.out = nn.Linear(width, width, bias=False)
    self.up = nn.Linear(width, 4 * width, bias=False)
    self.down = nn.Linear(4 * width, width, bias=False)

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    """f32[batch, length, width] to the same shape."""
    q, k, v = (
      y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
      for y in self.qkv(self.norm1(x)).chunk(3, -1)
    )
    found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + self.out(found.transpose(1, 2).flatten(2))
    return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Transformer(nn.Module):
  """`Transformer` of benchmarks/tasks/lm.py without biases."""

  def __init__(self, start: Arrays):
    super().__init__()
    symbols, width = start["byte.weight"].shape
    self.byte = nn.Embedding(symbols, width)
    self.position = nn.Embedding(*start["position.weight"].shape)
    self.blocks = nn.ModuleList(
      [Block(width) for name in start if name.endswith("qkv.weight")]
    )
    self.norm = nn.RMSNorm(width, eps=1e-6, elementwise_affine=False)
    self.head = nn.Linear(width, symbols, bias=False)

  def forward(self, text: torch.Tensor) -> torch.Tensor:
    """Bytes u8[batch, length] to logits f32[batch, length, 256]."""
    x = self.byte(text.int()) + self.position.weight[: text.shape[1]]
    for block in self.blocks:
      x = block(x)
    return self.head(self.norm(x))


MODELS: dict[str, Callable[[Arrays], nn.Module]] = {
  "cnn": CNN,
  "lm": Transformer,
  "lm_medium": Transformer,
  "lm_wide": Transformer,
}


def optimizers_of(
  model: nn.Module, setting: dict[str, Any]
) -> list[torch.optim.Optimizer]:
  """Adam, or Muon for the matrices whose names match `only` and Adam for everything else."""
  muon = dict(setting["muon"] or {"only": "$."})
  chosen = re.compile(muon.pop("only"))
  sides: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
  for name, param in model.named_parameters():
    sides[param.ndim == 2 and chosen.search(name) is not None].append(param)
  adam = torch.optim.Adam(sides[0], **setting["adam"])
  return (
    [adam, torch.optim.Muon(sides[1], weight_decay=0.0, **muon)] if sides[1] else [adam]
  )


def loss_of(
  model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
  """The mean cross-entropy of a batch."""
  return F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten().long())


class Training:
  """A training of a method from the start that the data have."""

  def __init__(self, label: str, setting: dict[str, Any], data: Arrays):
    start = {
      name.removeprefix("start."): value
      for name, value in data.items()
      if name.startswith("start.")
    }
    model = MODELS[setting["task"]](start)
    model.load_state_dict(
      {name: torch.from_numpy(value) for name, value in start.items()}
    )
    self.optimizers = optimizers_of(model, setting)
    self.is_apart, self.state = label.startswith("diloco"), None
    if self.is_apart:
      self.model = torchft_diloco.Apart(model, *self.optimizers, label, setting)
    else:
      self.model, self.state = torch_ddp.parallel(model, label)
    self.clip = setting["clip"] or float("inf")
    first = setting["rank"] * setting["batch_size"]
    share = slice(first, first + setting["batch_size"])
    self.inputs, self.labels = (
      torch.from_numpy(data[name][:, share]) for name in ("input", "label")
    )
    self.held_out = [
      torch.from_numpy(data[name]) for name in ("held_out.input", "held_out.label")
    ]
    self.times = list[float]()  # of each step
    self.rest = list[float]()  # of these, clipping and optimizer

  def step(self) -> None:
    """One step, on the clock."""
    number = len(self.times)
    batch = self.inputs[number], self.labels[number]
    start = time.perf_counter()
    loss_of(self.model, *batch).backward()
    middle = time.perf_counter()
    nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
    for optimizer in self.optimizers:
      optimizer.step()
    self.model.zero_grad(set_to_none=False)
    end = time.perf_counter()
    self.times.append(end - start)
    self.rest.append(end - middle)

  def evaluate(self) -> tuple[float, float]:
    """Loss and accuracy on what is held out; a barrier too, so that no rank goes on while another one evaluates."""
    with torch.no_grad():
      logits = torch.cat(
        [self.model.module(part) for part in self.held_out[0].split(PART)]
      ).flatten(0, -2)
    labels = self.held_out[1].flatten().long()
    loss, accuracy = (
      F.cross_entropy(logits, labels),
      (logits.argmax(-1) == labels).float().mean(),
    )
    return torch_ddp.most(float(loss)), float(accuracy)

  def compute(self) -> float:
    """Median seconds of forward and backward without an exchange, all ranks at once; of the slowest rank."""
    seconds = []
    for _ in range(REPETITIONS):
      dist.barrier()
      start = time.perf_counter()
      with self.model.no_sync():
        loss_of(self.model, self.inputs[0], self.labels[0]).backward()
      seconds.append(torch_ddp.most(time.perf_counter() - start))
    return statistics.median(seconds)

  def pace(self) -> dict[str, float]:
    """Median seconds of a step, behind those that PowerSGD does not compress, and of its parts; ends the training.

    DiLoCo does not exchange in each step: its mean, and what the steps without an
    exchange take behind backward.
    """
    untimed = max(3, self.state.start_powerSGD_iter + 1 if self.state else 0)
    middle = statistics.fmean if self.is_apart else statistics.median
    of = lambda middle, times: torch_ddp.most(middle(times[untimed:] or times))
    pace = {
      "seconds": of(middle, self.times),
      "rest": of(statistics.median, self.rest),
      "compute": self.compute(),
    }
    if self.is_apart:
      self.model.close()
    return pace


def train(label: str, setting: dict[str, Any], data: Arrays) -> dict[str, Any]:
  """The row of a method: losses before and behind the first step, then each evaluation and the seconds until there.

  The clock stands still during evaluations and the first step, in which
  DistributedDataParallel begins.
  """
  training = Training(label, setting, data)
  first, steps, seconds = [training.evaluate()[0]], list[int](), list[float]()
  losses, accuracies = list[float](), list[float]()
  sent, target = 0, setting["target"]
  while not steps or (
    steps[-1] < setting["most"]
    and (steps[-1] < setting["least"] or min(losses) > target)
  ):
    before = torch_ddp.sent_bytes()
    training.step()
    sent += torch_ddp.sent_bytes() - before
    taken = len(training.times)
    if taken == 1:
      first.append(training.evaluate()[0])
    if taken % setting["every"] == 0:
      steps.append(taken)
      seconds.append(torch_ddp.most(sum(training.times[1:])))
      loss, accuracy = training.evaluate()
      losses.append(loss)
      accuracies.append(accuracy)
  row = {
    "method": label,
    "first": first,
    "steps": steps,
    "seconds": seconds,
    "loss": losses,
    "accuracy": accuracies,
  }
  return row | {
    "bytes": torch_ddp.most(sent / len(training.times)),
    "pace": training.pace(),
  }


def main() -> None:
  """Trains with all methods of the setting."""
  # those of a dimension of size 1
  warnings.filterwarnings("ignore", message="Grad strides do not match")
  setting = torch_ddp.join()
  data = dict(np.load(setting["data"]))
  torch_ddp.append_rows(setting, lambda label: train(label, setting, data))


if __name__ == "__main__":
  main()
