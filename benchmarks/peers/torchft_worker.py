"""A worker of `benchmarks.rounds` by torchft's DiLoCo over gloo: `python torchft_worker.py SETTINGS`, a JSON object.

Of this project it imports `torchft_diloco` and `torch_training`, the programs beside
it. It writes the events that worker.py of benchmarks/rounds does. Its parameters are a
vector that moves by a number in each step, or those of the model in data.npz in the
folder of the workers, which Adam trains.
"""

import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torchft_diloco
from torch import nn
from torch_training import MODELS, loss_of
from torchft import Manager
from torchft.local_sgd import DiLoCo

# puts the gradient of a batch into the parameters and returns the loss
Gradient = Callable[[], float]


class Vector(nn.Module):
  """A module with as many entries."""

  def __init__(self, n: int):
    super().__init__()
    self.entries = nn.Parameter(torch.zeros(n))


def make_vector(
  one: dict[str, Any],
) -> tuple[nn.Module, Gradient, torch.optim.Optimizer]:
  """A vector, with a gradient that is the same in each step."""
  module, step = Vector(int(one["task"])), torch.tensor(-1.0 - one["number"])

  def gradient() -> float:
    module.entries.grad = step.expand_as(module.entries)
    return 0.0

  return module, gradient, torch.optim.SGD(module.parameters(), lr=1e-3)


def make_model(
  one: dict[str, Any], path: pathlib.Path
) -> tuple[nn.Module, Gradient, torch.optim.Optimizer]:
  """A model from the start that a file has, on batches that are drawn from its windows."""
  with np.load(path) as file:
    data = {name.removeprefix("start."): values for name, values in file.items()}
  inputs, labels = (
    torch.from_numpy(data.pop(name)).flatten(0, 1) for name in ("input", "label")
  )
  start = {
    name: torch.from_numpy(values)
    for name, values in data.items()
    if not name.startswith("held_out.")
  }
  model = MODELS[one["task"]](data)
  model.load_state_dict(start)
  draws = np.random.default_rng([one["number"], one["life"]])

  def gradient() -> float:
    rows = draws.integers(len(inputs), size=one["batch"])
    model.zero_grad()
    loss = loss_of(model, inputs[rows], labels[rows])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return float(loss)

  rate = float(one["optimizer"].removeprefix("adam:"))
  return model, gradient, torch.optim.Adam(model.parameters(), lr=rate)


def train(
  one: dict[str, Any],
  manager: Manager,
  module: nn.Module,
  gradient: Gradient,
  inner: torch.optim.Optimizer,
  say: Callable[..., None],
) -> None:
  """Trains until SIGTERM, and says what each step and each exchange was."""
  ends = list[int]()
  signal.signal(signal.SIGTERM, lambda number, _: ends.append(number))
  outer = torch.optim.SGD(module.parameters(), lr=1.0)
  behind = 0
  with DiLoCo(manager, [module], inner, outer, sync_every=one["every"]):
    while not ends:
      start = time.monotonic()
      loss = gradient()
      time.sleep(max(0.0, one["pace"] + start - time.monotonic()))
      trained = time.monotonic() - start
      behind, before, start = behind + 1, manager.current_step(), time.monotonic()
      inner.step()  # which exchanges after each H
      say("step", loss=loss, trained=trained, waited=time.monotonic() - start, flying=0)
      if behind == one["every"]:
        number, took_part = manager.current_step(), manager.is_participating()
        if number > before:
          members = list(range(manager.num_participants()))
          digest = float(next(module.parameters()).flatten()[0])
          facts = {
            "members": members,
            "skipped": not took_part or number > before + 1,
            "stand": [number, number],
          }
          say("round", number=number, steps=behind, digest=digest, **facts)
        behind = 0


def main() -> None:
  """Joins the others and trains."""
  one = json.loads(sys.argv[1])
  torch.set_num_threads(1)
  with pathlib.Path(one["folder"], f"worker{one['number']}.{one['life']}").open(
    "a", buffering=1
  ) as log:

    def say(event: str, **facts: Any) -> None:
      facts = {
        "event": event,
        "worker": one["number"],
        "life": one["life"],
        "time": time.monotonic(),
      } | facts
      log.write(json.dumps(facts) + "\n")

    say("imported")
    path = pathlib.Path(one["folder"], "data.npz")
    module, gradient, inner = (
      make_model(one, path) if path.exists() else make_vector(one)
    )
    say("compiled")
    states = {
      "load_state_dict": module.load_state_dict,
      "state_dict": module.state_dict,
    }
    name = f"{one['number']}.{one['life']}"
    manager, _store = torchft_diloco.make_manager(
      one["server"], name, one["quorum"], **states
    )
    say("joined", address=one["address"])
    while not (pathlib.Path(one["folder"]) / "begin").exists():
      time.sleep(0.05)
    train(one, manager, module, gradient, inner, say)
    say("end", loss=0.0, accuracy=0.0)
  os._exit(0)  # its threads wait for others


if __name__ == "__main__":
  main()
