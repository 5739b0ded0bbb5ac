"""Starts the ranks of the peers' programs, in the environment of PyTorch."""

import json
import os
import pathlib
import subprocess
from collections.abc import Sequence
from typing import Any

from jaxsparse.launch.start import Host

_PORT = 29533  # of the store of PyTorch's ranks, in a lab of their own
_PATIENCE = 3600.0  # seconds that PyTorch's ranks may take
_ALL = 1000  # MB of a bucket for all gradients
# the programs that measure updates
UPDATES = {
  "ddp": "torch_ddp.py",
  "hivemind": "hivemind_averager.py",
}


def library(method: str) -> str:
  """Whose a method is: of updates a key of UPDATES."""
  return {"hivemind": "hivemind", "diloco": "torchft"}.get(
    method.partition(":")[0], "ddp"
  )


def named(method: str) -> str:
  """A method with the name of its library."""
  return {"ddp": "DDP, ", "torchft": "torchft, ", "hivemind": ""}[
    library(method)
  ] + method


def is_named_peer(name: str) -> bool:
  """Whether a name is one of `named` rather than ours."""
  return name.startswith(("DDP, ", "torchft, "))


def in_buckets(methods: Sequence[str], sizes: Sequence[int]) -> list[str]:
  """Labels of methods of DistributedDataParallel with every size of buckets.

  Over gloo PowerSGD takes one bucket: the all-reduces of several begin in another order
  on each rank, and hang.
  """
  buckets = lambda method: [_ALL] if method.startswith("powersgd") else sizes
  return [f"{method}:bucket={size}" for method in methods for size in buckets(method)]


def run(
  hosts: Sequence[Host], python: str, setting: dict[str, Any], program: str
) -> None:
  """Runs PyTorch's ranks, which append their rows; raises RuntimeError if one fails."""
  threads = max(1, len(os.sched_getaffinity(0)) // len(hosts))
  own = {"address": hosts[0].address, "port": _PORT, "threads": threads}
  command = lambda rank: [
    python,
    str(pathlib.Path(__file__).with_name(program)),
    json.dumps(setting | own | {"rank": rank}),
  ]
  ranks = [
    subprocess.Popen([*host.enter, *command(rank)]) for rank, host in enumerate(hosts)
  ]
  try:
    statuses = [rank.wait(_PATIENCE) for rank in ranks]
  finally:
    for rank in ranks:
      rank.kill()
  if any(statuses):
    raise RuntimeError(f"PyTorch's ranks ended with {statuses}")
