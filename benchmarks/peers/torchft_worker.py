"""A worker of `benchmarks.rounds` by torchft's DiLoCo over gloo: `python torchft_worker.py SETTINGS`, a JSON object.

It imports torchft and nothing of this project but `torchft_diloco`, the program beside it. It writes the events that
worker.py of benchmarks/rounds does. Its parameters are a vector that moves by a number in each step.
"""

import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torchft_diloco
from torch import nn
from torchft import Manager
from torchft.local_sgd import DiLoCo


class Vector(nn.Module):
  """A module with as many entries."""

  def __init__(self, n: int):
    super().__init__()
    self.entries = nn.Parameter(torch.zeros(n))


def train(one: dict[str, Any], manager: Manager, module: Vector, say: Callable[..., None]) -> None:
  """Trains until SIGTERM, and says what each step and each exchange was."""
  ends = list[int]()
  signal.signal(signal.SIGTERM, lambda number, _: ends.append(number))
  inner = torch.optim.SGD(module.parameters(), lr=1e-3)
  outer = torch.optim.SGD(module.parameters(), lr=1.0)
  gradient, behind = torch.tensor(-1.0 - one["number"]), 0
  with DiLoCo(manager, [module], inner, outer, sync_every=one["every"]):
    while not ends:
      start = time.monotonic()
      module.entries.grad = gradient.expand_as(module.entries)
      time.sleep(max(0.0, one["pace"] + start - time.monotonic()))
      trained = time.monotonic() - start
      behind, before, start = behind + 1, manager.current_step(), time.monotonic()
      inner.step()  # which exchanges after each H
      say("step", loss=0.0, trained=trained, waited=time.monotonic() - start, flying=0)
      if behind == one["every"]:
        number, took_part = manager.current_step(), manager.is_participating()
        if number > before:
          members = list(range(manager.num_participants()))
          digest = float(module.entries[0])
          facts = {"members": members, "skipped": not took_part or number > before + 1, "stand": [number, number]}
          say("round", number=number, steps=behind, digest=digest, **facts)
        behind = 0


def main() -> None:
  """Joins the others and trains."""
  one = json.loads(sys.argv[1])
  torch.set_num_threads(1)
  with pathlib.Path(one["folder"], f"worker{one['number']}.{one['life']}").open("a", buffering=1) as log:

    def say(event: str, **facts: Any) -> None:
      facts = {"event": event, "worker": one["number"], "life": one["life"], "time": time.monotonic()} | facts
      log.write(json.dumps(facts) + "\n")

    say("imported")
    module = Vector(int(one["task"]))
    say("compiled")
    states = {"load_state_dict": module.load_state_dict, "state_dict": module.state_dict}
    name = f"{one['number']}.{one['life']}"
    manager, _store = torchft_diloco.make_manager(one["server"], name, one["quorum"], **states)
    say("joined", address=one["address"])
    while not (pathlib.Path(one["folder"]) / "begin").exists():
      time.sleep(0.05)
    train(one, manager, module, say)
    say("end", loss=0.0, accuracy=0.0)
  os._exit(0)  # its threads wait for others


if __name__ == "__main__":
  main()
