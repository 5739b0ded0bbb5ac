"""Starts the ranks of `torch_ddp`, in the environment of PyTorch."""

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


def in_buckets(methods: Sequence[str], sizes: Sequence[int]) -> list[str]:
  """Labels of methods with every size of buckets.

  Over gloo PowerSGD takes one bucket: the all-reduces of several begin in another order on each rank, and hang.
  """
  buckets = lambda method: [_ALL] if method.startswith("powersgd") else sizes
  return [f"{method}:bucket={size}" for method in methods for size in buckets(method)]


def run(hosts: Sequence[Host], python: str, setting: dict[str, Any], program: str = "torch_ddp.py") -> None:
  """Runs PyTorch's ranks, which append their rows; raises RuntimeError if one fails."""
  threads = max(1, len(os.sched_getaffinity(0)) // len(hosts))
  own = {"address": hosts[0].address, "port": _PORT, "threads": threads}
  command = lambda rank: [
    python,
    str(pathlib.Path(__file__).with_name(program)),
    json.dumps(setting | own | {"rank": rank}),
  ]
  ranks = [subprocess.Popen([*host.enter, *command(rank)]) for rank, host in enumerate(hosts)]
  try:
    statuses = [rank.wait(_PATIENCE) for rank in ranks]
  finally:
    for rank in ranks:
      rank.kill()
  if any(statuses):
    raise RuntimeError(f"PyTorch's ranks ended with {statuses}")
