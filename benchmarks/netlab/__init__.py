"""A network lab on one machine: hosts with a network of their own, joined by a switch, over links of any speed.

`lab` makes one for a block of a program, `python -m benchmarks.netlab`, which explains
it, for a command.
"""

import contextlib
import os
import pathlib
import re
import shutil
import threading
from collections.abc import Iterator

from benchmarks.netlab.namespaces import (
  ETC,
  batch,
  remove_leftovers,
  removed_behind,
  started,
)
from jaxsparse.launch.start import Host

SUBNET = "10.77.0.0/16"
MOST_HOSTS = 250
UNSHAPED = "none"  # the rate of links that are not shaped

# mpirun starts ranks by an agent in place of ssh, and they talk over the lab alone
_MPI = [
  "OMPI_MCA_pml=ob1",
  "OMPI_MCA_btl=tcp,self",
  f"OMPI_MCA_btl_tcp_if_include={SUBNET}",
  f"PRTE_MCA_prte_if_include={SUBNET}",
  "PRTE_MCA_plm=ssh",
  f"PRTE_MCA_plm_ssh_agent={pathlib.Path(__file__).with_name('agent.sh')}",
]
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(?:([kmgt]i?)?(bit|bps))?", re.IGNORECASE)
_LAB = threading.Lock()
# of the network namespace of this process
_INTERFACES = pathlib.Path("/proc/self/net/dev")


class LabUnavailable(RuntimeError):
  """No lab on this machine, or for this user; the message says why, and how to get one."""


@contextlib.contextmanager
def lab(hosts: int, rate: str | None) -> Iterator[list[Host]]:
  """Makes a lab, and removes it with all processes in it when the block ends, whatever ends it.

  Inside the block SIGTERM and SIGHUP raise `SystemExit`, unless the program has
  handlers of its own.
  """
  check(hosts, rate)
  shape = None if rate is None or rate == UNSHAPED else _shape(rate)
  if not _LAB.acquire(blocking=False):
    raise RuntimeError("this process has a lab already: leave its block first")
  owner = f"jslab-{os.getpid()}-{started(os.getpid())}"
  switch, team = f"{owner}-switch", []
  for number in range(hosts):
    # The host name is the host's own as well: a program that binds what its name
    # resolves to binds the lab's address.
    own_name = [
      "unshare",
      "--uts",
      "sh",
      "-c",
      f'hostname {owner}-{number} && exec "$@"',
      "sh",
    ]
    enter = ["ip", "netns", "exec", f"{owner}-{number}", "env", *_MPI, *own_name]
    team.append(Host(f"{owner}-{number}", f"10.77.0.{number + 1}", enter))
  try:
    with removed_behind([switch, *(host.name for host in team)]):
      remove_leftovers()
      _build(switch, team, shape)
      yield team
  finally:
    _LAB.release()


def set_download(host: Host, rate: str) -> None:
  """Has a host of a lab whose links are shaped receive at this rate; it sends at that of the lab."""
  switch, port = port_of(host)
  _tell(["tc", "-n", switch], [f"qdisc replace dev {port} {_shape(rate)[0]}"])


def port_of(host: Host) -> tuple[str, str]:
  """The namespace of the switch that a host of a lab is joined to, and its port there."""
  owner, _, number = host.name.rpartition("-")
  return f"{owner}-switch", f"port{number}"


def check(hosts: int, rate: str | None) -> None:
  """Raises what `lab` does with these arguments, or on this machine, without making one."""
  if not 1 <= hosts <= MOST_HOSTS:
    raise ValueError(f"hosts={hosts}, choose from 1 to {MOST_HOSTS}")
  if rate is not None and rate != UNSHAPED:
    bits(rate)
  if os.geteuid():
    raise LabUnavailable("network namespaces need root: run it with sudo")
  if missing := [
    tool for tool in ("ip", "tc", "unshare", "hostname") if not shutil.which(tool)
  ]:
    names = ", ".join(missing)
    raise LabUnavailable(
      f"{names} not found: install iproute2, util-linux and hostname (/usr/sbin on PATH)"
    )


def sent_bytes() -> int:
  """Bytes that the network interfaces of this host have sent, but for the one to itself; 0 where it has no others."""
  lines = _INTERFACES.read_text().splitlines()[2:] if _INTERFACES.exists() else []
  found = [line.partition(":") for line in lines]
  return sum(
    int(counts.split()[8]) for name, _, counts in found if name.strip() != "lo"
  )


def bits(rate: str) -> float:
  """What a rate in the notation of `tc` is in bits a second."""
  form = _RATE.fullmatch(rate)
  found = 0.0
  if form:
    number, prefix, unit = form[1], (form[2] or "").lower(), (form[3] or "bit").lower()
    found = float(number) * (1024 if prefix.endswith("i") else 1000) ** " kmgt".index(
      prefix[:1] or " "
    )
    found *= {"bit": 1, "bps": 8}[unit]
  if not 1e3 <= found <= 1e11:
    raise ValueError(
      f"rate={rate!r}, choose from 1kbit to 100gbit, for example 10mbit, 2.5gbit or 125mbps (bytes)"
    )
  return found


def _shape(rate: str) -> tuple[str, int]:
  """The token bucket of a rate, as `tc` takes it, and the largest packet.

  The bucket is full whenever a link was idle, so it has to be small beside a message,
  yet outlast a late timer. With 16 kB and 0.3 ms of the rate, TCP reaches 95.7 % of
  10mbit, 100mbit and 1gbit, all that headers leave, and a message of 200 kB is 1 to 9 %
  faster. Larger packets would be cut into frames, too slow at 1gbit: hosts make half a
  bucket. The queue has room for 0.1 s, and 1 MB at least: with loss, time-outs would be
  measured instead of the rate.
  """
  speed = bits(rate) / 8
  burst = int(16_000 + 0.3e-3 * speed)
  return (
    f"root tbf rate {rate} burst {burst} limit {burst + int(max(1e6, 0.1 * speed))}",
    min(burst // 2, 65_536),
  )


def _build(switch: str, team: list[Host], shape: tuple[str, int] | None) -> None:
  """Makes what `remove` removes: namespaces with all in them, and the files of hosts."""
  _tell(
    ["ip"], [f"netns add {name}" for name in (switch, *(host.name for host in team))]
  )
  names = "127.0.0.1 localhost\n" + "".join(
    f"{host.address} {host.name}\n" for host in team
  )
  try:
    for host in team:
      (ETC / host.name).mkdir(parents=True)
      (ETC / host.name / "hosts").write_text(names)
  except OSError as error:
    raise LabUnavailable(
      f"{error}: the names of the hosts lie in {ETC}, make it writable"
    ) from error
  _build_links(switch, team, [f"gso_max_size {shape[1]}"] if shape else [])
  if shape:
    bucket = shape[0]
    _tell(
      ["tc", "-n", switch],
      [f"qdisc add dev port{number} {bucket}" for number in range(len(team))],
    )
    for host in team:
      _tell(["tc", "-n", host.name], [f"qdisc add dev eth0 {bucket}"])


def _build_links(switch: str, team: list[Host], settings: list[str]) -> None:
  """From the eth0 of each host to a port of the bridge."""
  # Without IPv6 addresses nobody speaks on an idle link.
  quiet = ["addrgenmode none"] if os.path.exists("/proc/sys/net/ipv6") else []
  macs = [f"02:00:0a:4d:00:{number + 1:02x}" for number in range(len(team))]
  ports = ["link add bridge type bridge", *_up("bridge", quiet)]
  for number, host in enumerate(team):
    ports.append(
      f"link add port{number} type veth peer name eth0 address {macs[number]} netns {host.name}"
    )
    ports += _up(f"port{number}", ["master bridge", *quiet])
  _tell(["ip", "-n", switch], ports)
  # Known neighbours instead of ARP: its table has room for 1024 on the whole machine,
  # 32 hosts that all talk.
  neighbours = [
    f"neighbour add {host.address} lladdr {macs[number]} dev eth0"
    for number, host in enumerate(team)
  ]
  for host in team:
    lines = [
      *_up("lo", []),
      f"address add {host.address}/16 dev eth0",
      *_up("eth0", quiet + settings),
      *neighbours,
    ]
    # The usual congestion control, whatever this machine prefers: BBR leaves a tenth of
    # a shared link unused.
    lines.append(f"route replace {SUBNET} dev eth0 src {host.address} congctl cubic")
    _tell(["ip", "-n", host.name], lines)


def _up(device: str, settings: list[str]) -> list[str]:
  return [f"link set {device} {setting}" for setting in (*settings, "up")]


def _tell(tool: list[str], lines: list[str]) -> None:
  """Has `ip` or `tc` carry out all lines in one process."""
  done = batch(tool, lines)
  if done.returncode:
    reason = "; ".join(line.strip() for line in done.stderr.splitlines())
    raise LabUnavailable(
      f"`{' '.join(tool)}` refused a part of the lab ({reason}): it takes the capabilities CAP_SYS_ADMIN and "
      "CAP_NET_ADMIN (in docker --privileged), and a kernel with network namespaces, veth, bridge and tbf"
    )
