"""A run never hangs: a rank that dies, fails or does not come ends it in stated time, by name."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxsparse import launch

RANKS = pathlib.Path(__file__).with_name("ranks.py")
ENGINES = pytest.mark.parametrize("engine", ["processes", "mpi"])


def start(what, engine, folder, **limits):
  launch.run([sys.executable, str(RANKS), what, engine, str(folder)], 3, engine, **limits)


def pids(folder):
  """Process ids of the three ranks, once all of them step."""
  end = time.monotonic() + 90
  while time.monotonic() < end:
    files = [folder / str(rank) for rank in range(3)]
    if all(file.exists() and file.read_text() for file in files):
      return [int(file.read_text()) for file in files]
    time.sleep(0.05)
  raise TimeoutError("the ranks did not start")


def gone(pid):
  """Whether a process has ended (or is only waited for)."""
  try:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
  except FileNotFoundError:
    return True


@ENGINES
@pytest.mark.parametrize("how", ["killed", "raised"])
def test_a_rank_that_dies_ends_the_run(tmp_path, capfd, engine, how):
  died = []

  def let_die():
    found = pids(tmp_path)
    died.append((time.monotonic(), found))
    if how == "killed":
      os.kill(found[1], signal.SIGKILL)
    else:
      (tmp_path / "raise").touch()

  thread = threading.Thread(target=let_die)
  thread.start()
  with pytest.raises(launch.RunFailed) as error:
    start("forever", engine, tmp_path, limit=150)
  thread.join()
  when, found = died[0]
  assert time.monotonic() - when < 10
  assert all(map(gone, found))
  said = str(error.value) + capfd.readouterr().err
  assert "rank 1" in said
  assert ("SIGKILL" in said or "signal 9" in said) if how == "killed" else "rank 1 has had enough" in said


@ENGINES
def test_a_rank_that_does_not_come_is_named(tmp_path, engine):
  begin = time.monotonic()
  with pytest.raises(launch.RunFailed, match=r"^rank 2 did not come within 15 s"):
    start("late", engine, tmp_path, start_timeout=15, limit=100)
  assert time.monotonic() - begin < 30


def test_a_run_that_takes_too_long_is_ended():
  with pytest.raises(launch.RunFailed, match="more than 0.5 s"):
    launch.run(["sleep", "60"], 2, limit=0.5)


def test_a_rank_that_does_not_end_is_ended(monkeypatch):
  monkeypatch.setattr(launch, "GRACE", 0.3)
  with pytest.raises(launch.RunFailed, match="rank 1 still runs 0.3 s after another rank ended"):
    launch.run(["sh", "-c", 'test "$JAXSPARSE_RANK" = 0 || sleep 60'], 2)


def test_the_status_of_a_rank_is_told():
  with pytest.raises(launch.RunFailed, match=r"rank 1 exited with status 7; the other 1 of 2 ranks were ended"):
    launch.run(["sh", "-c", 'test "$JAXSPARSE_RANK" = 0 && sleep 60; exit 7'], 2)


def test_the_command_line(tmp_path):
  out = tmp_path / "out"
  command = [sys.executable, "-m", "jaxsparse.launch", "--ranks=2", "--", "sh", "-c", f"echo $JAXSPARSE_RANK >> {out}"]
  assert subprocess.run(command, timeout=60, check=False).returncode == 0
  assert sorted(out.read_text().split()) == ["0", "1"]
  failed = subprocess.run([*command[:5], "no-such-program"], capture_output=True, text=True, timeout=60, check=False)
  assert failed.returncode == 1
  assert "error: " in failed.stderr
  assert "no-such-program" in failed.stderr


def test_an_interrupted_launcher_leaves_nobody(tmp_path):
  command = [
    sys.executable,
    "-m",
    "jaxsparse.launch",
    "--ranks=2",
    "--",
    "sh",
    "-c",
    f"echo $$ >> {tmp_path}/p; sleep 99",
  ]
  launcher = subprocess.Popen(command)
  while not (tmp_path / "p").exists() or len((tmp_path / "p").read_text().split()) < 2:
    time.sleep(0.05)
  launcher.send_signal(signal.SIGTERM)
  assert launcher.wait(20) != 0
  assert all(gone(int(pid)) for pid in (tmp_path / "p").read_text().split())


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ((["true"], 0), "ranks=0, choose at least 1"),
    ((["true"], 1, "smoke"), "engine='smoke', choose 'processes' or 'mpi'"),
  ],
)
def test_bad_arguments(arguments, message):
  with pytest.raises(ValueError, match=message):
    launch.run(*arguments)
