"""The launchers whose ranks `join` connects: how each is recognized, and what JAX is told about the run.

What JAX detects is left to it: Slurm, Open MPI before 5, mpi4py, TPUs, Kubernetes. A
launcher may run inside another one: `LAUNCHERS` has the inner ones first.
"""

import functools
import importlib
import importlib.util
import os
import socket
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxsparse.launch import environment, guard
from jaxsparse.launch.environment import JOIN, RankCount, read

# the variables that torchrun sets, and other launchers like it
_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# the variables that JAX needs to find a run of Slurm
_SLURM = (
  "SLURM_JOB_ID",
  "SLURM_STEP_NODELIST",
  "SLURM_NTASKS",
  "SLURM_PROCID",
  "SLURM_LOCALID",
)
# comma-separated hosts of a TPU slice; JAX prefers the first
_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
# variables of Open MPI before 5, and of JAX, from which JAX knows where rank 0 is
_URI = "OMPI_MCA_orte_hnp_uri"
_ADDRESS = "JAX_COORDINATOR_ADDRESS"


class Launcher(NamedTuple):
  """A way to start ranks.

  Attributes:
    name: for people.
    read: the numbers of ranks that it states, perhaps none; None in a process that it
      has not started.
    options: from what `find` has returned to arguments of `jax.distributed.initialize`;
      raises RuntimeError where variables are missing or do not fit, ImportError where a
      package is missing.
    rank: its variable for the number of this rank, which must agree with RANK; "" for
      no check.
    is_inner: whether RANK and WORLD_SIZE may be those of an outer launcher, and need
      not agree with it.
  """

  name: str
  read: Callable[[], list[RankCount] | None]
  options: Callable[[Sequence[RankCount]], dict[str, Any]]
  rank: str = ""
  is_inner: bool = False


def find() -> tuple[Launcher, list[RankCount]] | None:
  """The innermost launcher that started this process, and all numbers of ranks that are stated; None without one."""
  # innermost first
  for launcher in LAUNCHERS:
    # RANK and WORLD_SIZE are added, to be compared with the launcher's numbers; around
    # an inner launcher they may belong to an outer run.
    if (counts := launcher.read()) is not None:
      return launcher, counts if launcher.is_inner else list(
        dict.fromkeys([*counts, *read(*_TORCH[:2])])
      )
  return None


def read_counts() -> list[RankCount]:
  """Numbers of ranks that the variables of launchers state for this process; [] if there are none."""
  launcher_and_counts = find()
  return launcher_and_counts[1] if launcher_and_counts else []


def check_agreement(launcher: Launcher, counts: Sequence[RankCount]) -> None:
  """Raises RuntimeError where the variables of two launchers contradict each other.

  Args:
    launcher: the launcher that `find` has found.
    counts: all numbers of ranks that are stated. One that is not `exact` is the number
      of this rank plus 1, and allows more ranks.
  """
  # All counts must allow the first exact number.
  if stated := next((count for count in counts if count.exact), None):
    environment.check(
      JOIN,
      counts,
      stated.ranks,
      f"{stated.variable} states",
      "A process is a rank of one run only",
    )
  # The number of this rank, by the launcher's variable, if it has one, and by RANK.
  rank = os.environ.get(launcher.rank)
  other = os.environ.get("RANK")
  if rank and other and rank != other:
    raise RuntimeError(f"{JOIN}: {launcher.rank}={rank}, but RANK={other}: unset RANK")


def _need(
  counts: Sequence[RankCount],
  names: Sequence[str],
  advice: str,
) -> list[str]:
  """The values of the variables `names`; raises RuntimeError that lists the missing ones.

  Args:
    counts: what the launcher states; the first one begins the message.
    names: variables of the environment.
    advice: ends the message.
  """
  if missing := [name for name in names if not os.environ.get(name)]:
    raise RuntimeError(f"{JOIN}: {counts[0]}, without {', '.join(missing)}. {advice}")
  return [os.environ[name] for name in names]


def _connect(
  address: str, ranks: int | str, rank: int | str, gpu: str = ""
) -> dict[str, Any]:
  """Arguments of `jax.distributed.initialize` that state the whole run.

  Args:
    address: HOST:PORT of rank 0.
    ranks: number of ranks.
    rank: number of this rank.
    gpu: the variable that has the number of this rank on its host, which is the number
      of its one GPU; "" for a rank that uses all GPUs that it sees.
  """
  # "deactivate": JAX would otherwise look for a cluster, and might find an outer one.
  told: dict[str, Any] = {
    "cluster_detection_method": "deactivate",
    "coordinator_address": address,
  }
  # By default JAX listens on all interfaces, also for a run on loopback.
  if environment.is_loopback(address.rpartition(":")[0]):
    told["coordinator_bind_address"] = address
  # JAX_LOCAL_DEVICE_IDS: the user has chosen the GPUs.
  if gpu in os.environ and "JAX_LOCAL_DEVICE_IDS" not in os.environ:
    told["local_device_ids"] = int(os.environ[gpu])
  return told | {"num_processes": int(ranks), "process_id": int(rank)}


@functools.cache
def claim_port(address: str) -> socket.socket | None:
  """Claims the port of an address until this process ends; RuntimeError if another process here has claimed it.

  Several coordinators of JAX may listen on one port (SO_REUSEPORT): ranks of two runs
  would then train together.

  Args:
    address: HOST:PORT of the coordinator, in rank 0.

  Returns:
    The claim, which the cache keeps open until this process ends; None on other systems
    than Linux.
  """
  if sys.platform != "linux":
    return None
  claim = socket.socket(socket.AF_UNIX)
  try:
    # "\0" begins an abstract name, which the kernel frees when the process ends.
    claim.bind(f"\0{JOIN} {address.rpartition(':')[2]}")
  except OSError as error:
    claim.close()
    raise RuntimeError(
      f"{JOIN}: rank 0 of another run on this machine listens on the port of {address}: give each run a port of its own"
    ) from error
  return claim


def _join_own(_: Sequence[RankCount]) -> dict[str, Any]:
  """Arguments of `jax.distributed.initialize` in a rank of `jaxsparse.launch`."""
  return _connect(
    *(os.environ[name] for name in (guard.COORDINATOR, guard.RANKS, guard.RANK))
  )


def _read_torch() -> list[RankCount] | None:
  """What RANK and WORLD_SIZE state; None if they are not set, or not by a launcher."""
  counts = read(*_TORCH[:2])
  # WORLD_SIZE=1 without an address is no launcher's: the process trains alone.
  is_alone = counts == [RankCount("WORLD_SIZE", 1)]
  if is_alone and "MASTER_ADDR" not in os.environ:
    return None
  return counts or None


def _read_torchrun() -> list[RankCount] | None:
  """What torchrun states; None where it has not started this process."""
  return _read_torch() if "TORCHELASTIC_RUN_ID" in os.environ else None


def _join_torch(counts: Sequence[RankCount]) -> dict[str, Any]:
  """Arguments of `jax.distributed.initialize` by the variables `_TORCH`; raises RuntimeError where they do not fit."""
  advice = (
    f"Set all of {', '.join(_TORCH)} for each rank, or unset {counts[0].variable}"
  )
  rank, ranks, host, port = _need(counts, _TORCH, advice)
  if not (rank.isdecimal() and int(rank) < int(ranks) and port.isdecimal()):
    raise RuntimeError(
      f"{JOIN}: RANK={rank}, WORLD_SIZE={ranks}, MASTER_PORT={port}: no rank of {ranks}, or no port"
    )
  # True, added as 1, if torchrun itself listens on MASTER_PORT: JAX gets the next port.
  taken = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
  # brackets around an address of IPv6
  host = f"[{host}]" if ":" in host and not host.startswith("[") else host
  # Several ranks on one host have a GPU each; a rank alone has all of them.
  shared = int(os.environ.get("LOCAL_WORLD_SIZE") or 1) > 1
  return _connect(
    f"{host}:{int(port) + taken}", ranks, rank, "LOCAL_RANK" if shared else ""
  )


def _read_ray() -> list[RankCount] | None:
  """What Ray Train states; None in a process that is not one of its workers."""
  # A worker of Ray Train has imported `ray.train`. Elsewhere `get_context` raises
  # RuntimeError, or the size is None.
  try:
    size = sys.modules["ray.train"].get_context().get_world_size()
  except (KeyError, RuntimeError):
    return None
  return [RankCount("ray.train.get_context().get_world_size()", size)] if size else None


def _join_ray(_: Sequence[RankCount]) -> dict[str, Any]:
  """Arguments of `jax.distributed.initialize`; all workers call, and get the address that rank 0 has chosen."""
  # Imported by name, since Ray is optional; its workers have imported `ray.train`.
  ray = importlib.import_module("ray")
  collective = importlib.import_module("ray.train.collective")
  context = sys.modules["ray.train"].get_context()
  address = (
    f"{ray.util.get_node_ip_address()}:{environment.free_port()}"
    if context.get_world_rank() == 0
    else None
  )
  return _connect(
    collective.broadcast_from_rank_zero(address),
    context.get_world_size(),
    context.get_world_rank(),
  )


def _join_mpi(counts: Sequence[RankCount]) -> dict[str, Any]:
  """Arguments of `jax.distributed.initialize`: JAX finds Open MPI before 5; else variables, or mpi4py, tell of the run.

  Raises:
    ImportError: where only mpi4py could tell, and it does not load.
  """
  size, rank, here = (
    os.environ.get(f"OMPI_COMM_WORLD_{name}", "")
    for name in ("SIZE", "RANK", "LOCAL_SIZE")
  )
  # `_URI`: a variable of Open MPI before 5, by which JAX finds rank 0.
  if rank and _URI in os.environ:
    return {"cluster_detection_method": "ompi"}
  # Open MPI 5 gives no address of rank 0, but a name of the run, from which all ranks
  # derive a port. If all ranks are on this host, which has `here` of them, the address
  # is loopback.
  port = 61_440 + zlib.crc32(os.environ.get("PMIX_NAMESPACE", "").encode()) % 4_096
  address = os.environ.get(_ADDRESS) or (f"127.0.0.1:{port}" if size == here else None)
  if size and rank and address:
    return _connect(address, size, rank, "OMPI_COMM_WORLD_LOCAL_RANK")
  try:
    from mpi4py import MPI
  except (ImportError, RuntimeError) as error:
    advice = f"Install it for the MPI of the launcher, or give all ranks of Open MPI {_ADDRESS}=HOST:PORT of rank 0"
    raise ImportError(
      f"{JOIN}: {counts[0]}, but mpi4py does not load: {error}. {advice}"
    ) from error
  environment.check_mpi(JOIN, counts, MPI)
  return {"cluster_detection_method": "mpi4py"}


def _join_slurm(counts: Sequence[RankCount]) -> dict[str, Any]:
  """Arguments of `jax.distributed.initialize`, which finds the rest in the variables of srun."""
  _need(counts, _SLURM, "srun sets them for each task")
  # By default JAX takes SLURM_NTASKS, which may be the tasks of the whole job.
  return {"cluster_detection_method": "slurm", "num_processes": counts[0].ranks}


def _read_tpus() -> list[RankCount] | None:
  """The number of hosts of a run on TPUs of GKE, hosts of a slice times slices; None for one host."""
  # `_HOSTS`: variables that list the hosts of a slice, separated by commas
  name = next((name for name in _HOSTS if os.environ.get(name)), "")
  hosts = len(os.environ.get(name, "").split(",")) * int(
    os.environ.get("MEGASCALE_NUM_SLICES") or 1
  )
  return [RankCount(name, hosts)] if hosts > 1 else None


def _join_tpus(counts: Sequence[RankCount]) -> dict[str, Any]:
  """Arguments of `jax.distributed.initialize`, which finds the hosts; raises RuntimeError where it would not."""
  _need(counts, ["TPU_WORKER_ID"], "GKE sets it in each pod with TPUs")
  _need(
    counts,
    ["TPU_ML_PLATFORM"],
    "JAX sets it where it finds TPUs: install jax[tpu], and request google.com/tpu",
  )
  return {"cluster_detection_method": "gketpu"}


def _read_metadata() -> list[RankCount] | None:
  """[] on a host of a Cloud TPU, whose variables state no number of ranks; None elsewhere."""
  # JAX sets TPU_ML_PLATFORM on a machine with TPUs. Where it is the only one of these,
  # the machine's metadata server, which JAX asks, names the other hosts.
  names = {"TPU_ML_PLATFORM", "TPU_SKIP_MDS_QUERY", *_HOSTS}
  return [] if names & os.environ.keys() == {"TPU_ML_PLATFORM"} else None


def _read_pods() -> list[RankCount] | None:
  """What a Job of Kubernetes states: the number of this pod, from 0; None outside of one."""
  return (
    read("JOB_COMPLETION_INDEX", "") or None
    if "KUBERNETES_SERVICE_HOST" in os.environ
    else None
  )


def _join_pods(counts: Sequence[RankCount]) -> dict[str, Any]:
  """No arguments of `jax.distributed.initialize`; raises ImportError without the package with which JAX finds pods."""
  if importlib.util.find_spec("kubernetes") is None:
    raise ImportError(
      f"{JOIN}: {counts[0]}, but the package kubernetes is missing. Install jax[k8s], which asks the cluster for the "
      f"other pods, or set {', '.join(_TORCH)}; unset it in a pod that trains alone"
    )
  return {}  # JAX finds the other pods by itself


LAUNCHERS = (
  Launcher("jaxsparse.launch", environment.read_launched, _join_own, is_inner=True),
  Launcher("torchrun", _read_torchrun, _join_torch, is_inner=True),
  Launcher("Ray Train", _read_ray, _join_ray),
  Launcher("MPI", environment.read_mpi, _join_mpi, "OMPI_COMM_WORLD_RANK"),
  Launcher("Slurm", environment.read_slurm, _join_slurm, "SLURM_PROCID"),
  Launcher("GKE with TPUs", _read_tpus, _join_tpus),
  Launcher("RANK and WORLD_SIZE", _read_torch, _join_torch),
  Launcher("a Job of Kubernetes", _read_pods, _join_pods),
  Launcher(
    "Cloud TPU", _read_metadata, lambda _: {"cluster_detection_method": "gcetpu"}
  ),
)
