"""The network lab: what runs in it, how fast its links are, and that nothing of it stays behind."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from benchmarks import netlab
from benchmarks.netlab.namespaces import started
from tests.benchmarks.commands import ROOT
from tests.cases import quick_of

# Starts a sleeper in the first host, says who is who, and waits.
IDLE = """
import json, os, subprocess, time
host, = json.loads(os.environ["JAXSPARSE_HOSTS"])
sleeper = subprocess.Popen([*host["enter"], "sh", "-c", "echo; exec sleep 600"], stdout=subprocess.PIPE)
sleeper.stdout.readline()  # it is in the host
print(os.getpid(), sleeper.pid, flush=True)
time.sleep(600)
"""

# Binds what the host's own name resolves to, and times a transfer from the first byte
# to the last.
RECEIVE = """
import socket, time
with socket.create_server((socket.gethostname(), 7000)) as server:
  print(server.getsockname()[0], flush=True)
  connection, _ = server.accept()
  size, start = len(connection.recv(1)), time.monotonic()
  while chunk := connection.recv(1 << 20):
    size += len(chunk)
  print(size, time.monotonic() - start)
"""

SEND = """
import socket, sys
from tests.cases import quick_of
socket.create_connection((sys.argv[1], 7000), timeout=60).sendall(bytes(1_000_000))
"""


@pytest.fixture(scope="module")
def machine():
  """Skips where there can be no lab."""
  try:
    with netlab.lab(1, "10mbit"):
      pass
  except netlab.LabUnavailable as error:
    pytest.skip(str(error))


needs_lab = pytest.mark.usefixtures("machine")


def command(*arguments):
  # With the default signals: who started the tests in the background had them ignored.
  return [
    "env",
    "--default-signal",
    sys.executable,
    "-m",
    "benchmarks.netlab",
    *arguments,
  ]


def run(*arguments, prefix=()):
  full = [*prefix, *command(*arguments)]
  return subprocess.run(
    full, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
  )


@contextlib.contextmanager
def idle_lab():
  """A lab in a process of its own, the process ids of its command and of a sleeper in its only host."""
  arguments = command("--hosts=1", "--rate=10mbit", "--", sys.executable, "-c", IDLE)
  with subprocess.Popen(
    arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
  ) as process:
    try:
      outside, inside = map(int, process.stdout.readline().split())
      yield process, outside, inside
    finally:
      process.kill()


def remains(pid):
  """Namespaces and folders of the labs of one process."""
  listed = subprocess.run(
    ["ip", "netns", "list"], capture_output=True, text=True, check=True
  ).stdout.split()
  etc = pathlib.Path("/etc/netns")
  names = {*listed, *(os.listdir(etc) if etc.exists() else [])}
  return sorted(name for name in names if name.startswith(f"jslab-{pid}-"))


def ends(pid):
  """Whether a process ends within a few seconds."""
  deadline = time.monotonic() + 10
  while started(pid) and time.monotonic() < deadline:
    time.sleep(0.01)
  return not started(pid)


@needs_lab
def test_hosts_meet_by_name_at_the_rate():
  with netlab.lab(3, "20mbit") as hosts:
    assert [host.address for host in hosts] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    receive = [*hosts[2].enter, sys.executable, "-c", RECEIVE]
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
      assert receiver.stdout.readline().strip() == hosts[2].address
      subprocess.run(
        [*hosts[0].enter, sys.executable, "-c", SEND, hosts[2].name],
        timeout=60,
        check=True,
      )
      size, seconds = receiver.stdout.read().split()
  assert int(size) == 1_000_000
  # 0.4 s and headers, less a bucket of 17 kB; the upper end is for a busy machine
  assert 0.38 < float(seconds) < 4
  assert remains(os.getpid()) == []


@needs_lab
@pytest.mark.parametrize(
  "rate", ["10mbit", "10MBIT", "0.01gbit", "1.25mbps", "10000000"]
)
def test_both_ends_of_a_link_have_the_rate(rate):
  with netlab.lab(1, rate) as (host,):
    for name, device in [
      (host.name, "eth0"),
      (host.name.removesuffix("0") + "switch", "port0"),
    ]:
      show = ["tc", "-n", name, "-j", "qdisc", "show", "dev", device]
      (shape,) = json.loads(
        subprocess.run(show, capture_output=True, text=True, check=True).stdout
      )
      assert shape["kind"] == "tbf"
      assert shape["options"]["rate"] == 1_250_000
      assert 15_900 < shape["options"]["burst"] < 17_000


@needs_lab
def test_the_command_finds_the_hosts():
  show = 'echo "$JAXSPARSE_HOSTS"; exit 7'
  done = run("--hosts=2", "--rate=none", "--", "sh", "-c", show)
  assert (done.returncode, done.stderr) == (7, "")
  first, second = json.loads(done.stdout)
  assert second["address"] == "10.77.0.2"
  assert first["enter"][:4] == ["ip", "netns", "exec", first["name"]]
  assert run("--hosts=1", "--rate=none", "--", "no-such-program").returncode == 127


SIGNALS = [
  (signal.SIGINT, True),
  (signal.SIGINT, False),
  (signal.SIGTERM, False),
  (signal.SIGHUP, False),
]


@needs_lab
@pytest.mark.parametrize(("number", "terminal"), quick_of(SIGNALS, quick=SIGNALS[:1]))
def test_signals_leave_nothing(number, terminal):
  with idle_lab() as (process, outside, inside):
    assert len(remains(process.pid)) == 2
    # Ctrl-C goes to all its programs; a second one comes into the clean-up
    if terminal:
      os.killpg(process.pid, number)
      time.sleep(0.05)
      os.killpg(process.pid, number)
    else:
      process.send_signal(number)
    assert process.wait(30) == 128 + number
    assert remains(process.pid) == []
    assert ends(inside)  # the kernel ends what was killed a little later
    assert ends(outside)


@pytest.mark.long
@needs_lab
def test_what_a_killed_lab_left_is_removed_by_the_next():
  with idle_lab() as (process, outside, inside):
    assert len(remains(process.pid)) == 2
    assert started(inside)
    # our process id, but of a process that started with the machine
    reused = f"jslab-{os.getpid()}-1-0"
    subprocess.run(["ip", "netns", "add", reused], check=True)
    process.kill()  # and not waited for: a zombie owns nothing
    assert ends(process.pid)
    with netlab.lab(1, None):
      assert remains(process.pid) == []
      assert reused not in remains(os.getpid())
      assert not started(inside)
    assert ends(outside)


@needs_lab
def test_labs_of_two_processes_and_an_error():
  with idle_lab() as (process, _, inside):
    with netlab.lab(2, "10mbit") as hosts:
      assert len(remains(os.getpid())) == 3
      with pytest.raises(RuntimeError, match="has a lab already"), netlab.lab(1, None):
        pass
      subprocess.run([*hosts[0].enter, "true"], check=True)
    assert remains(os.getpid()) == []
    assert len(remains(process.pid)) == 2
    assert started(inside)
    # a stubborn process ends with an error's lab
    with (
      contextlib.suppress(KeyError),
      netlab.lab(1, None) as (host,),
    ):
      wait = [*host.enter, "sh", "-c", "trap '' TERM; echo; exec sleep 600"]
      stubborn = subprocess.Popen(wait, stdout=subprocess.PIPE)
      stubborn.stdout.readline()
      raise KeyError
    with stubborn:
      assert stubborn.wait(10) == -signal.SIGKILL
    assert remains(os.getpid()) == []
    process.terminate()
    process.wait(30)


@needs_lab
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv")
def test_a_kernel_that_refuses():
  done = run("--", "true", prefix=["setpriv", "--bounding-set=-net_admin"])
  assert done.returncode == 1
  assert "CAP_NET_ADMIN" in done.stderr
  # its namespaces were there by then
  owner = re.search(r"-n jslab-(\d+)-\d+-switch", done.stderr)[1]
  assert remains(owner) == []


def test_without_tools(monkeypatch):
  monkeypatch.setenv("PATH", "/nowhere")
  with (
    pytest.raises(
      netlab.LabUnavailable, match=r"sudo|ip, tc, unshare, hostname not found"
    ),
    netlab.lab(1, None),
  ):
    pass
