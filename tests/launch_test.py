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
from jaxsparse.launch import guard, records, watch
from jaxsparse.launch import start as launch_start
from tests.cases import quick_of, row
from tests.environment_test import outside

RANKS = pathlib.Path(__file__).with_name("ranks.py")
# `make test` takes `mpirun` where a rank is killed, where it passes lines on, and where it is ended itself.
ENGINES = pytest.mark.parametrize("engine", quick_of(["processes", "mpi"], quick=["processes"]))


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


def soon(holds):
  """Whether something comes true within some seconds."""
  end = time.monotonic() + 30
  while not holds() and time.monotonic() < end:
    time.sleep(0.05)
  return holds()


def meanwhile(folder, act):
  """Calls `act` with the process ids of the ranks, in a thread, once all of them step; when it did, and the ids."""
  acted = []

  def wait_and_act():
    found = pids(folder)
    acted.append((time.monotonic(), found))
    act(found)

  thread = threading.Thread(target=wait_and_act)
  thread.start()
  return thread, acted


QUICK_ENDS = ("killed", "raise", "leave")


@pytest.mark.parametrize(
  ("how", "message", "engine"),
  [
    row(
      how, message, engine, quick=how in QUICK_ENDS and (how == "killed" or engine == "processes"), id=f"{how}-{engine}"
    )
    for how, message in (
      ("killed", "rank 1 was ended by SIGKILL; the other 2 of 3 ranks were ended"),
      ("raise", "rank 1 failed: ValueError: rank 1 has had enough; the other 2 of 3 ranks were ended"),
      ("vanish", "rank 1 ended with status 0 "),
      ("stopped", "rank 1 is stopped "),
      ("leave", "rank 1 left the run after"),
    )
    for engine in ("processes", "mpi")
  ],
)
def test_a_rank_that_ends_before_the_others_is_named(tmp_path, capfd, how, message, engine):
  signals = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}

  def end_rank_1(found):
    if how in signals:
      os.kill(found[1], signals[how])
    else:
      (tmp_path / how).touch()

  thread, acted = meanwhile(tmp_path, end_rank_1)
  with pytest.raises(launch.RunFailed) as error:
    start("forever", engine, tmp_path, limit=150)
  thread.join()
  when, found = acted[0]
  assert time.monotonic() - when < 60
  assert all(map(gone, found))
  assert str(error.value).startswith(message)
  printed = capfd.readouterr()
  assert "[Gloo] Rank" not in printed.out + printed.err
  if how == "raise":
    assert "[rank 1] ValueError: rank 1 has had enough\n" in printed.err


@ENGINES
def test_ranks_that_go_on_without_a_step_get_the_grace(tmp_path, capfd, monkeypatch, engine):
  def notice(*arguments):
    if found := actual(*arguments):
      (tmp_path / "end").touch()  # the others go on until then
    return found

  actual = watch._notice
  with monkeypatch.context() as patch:
    patch.setattr(watch, "_notice", notice)
    start("waits", engine, tmp_path, limit=150)
  said = "jaxsparse.launch: rank 1 left the run, ranks 0, 2 still run and get 60 s to end (--grace)"
  assert said in capfd.readouterr().err
  (tmp_path / "end").unlink()
  with pytest.raises(launch.RunFailed, match=r"^rank 1 left the run and ranks 0, 2 still ran 3 s later"):
    start("waits", engine, tmp_path, limit=150, grace=3)


@ENGINES
def test_ranks_that_do_not_join_are_refused(tmp_path, engine):
  with pytest.raises(
    launch.RunFailed, match=r"^ranks? .*without having joined.*jaxsparse.launch.join\(\).*MpiComm\(\)"
  ):
    start("alone", engine, tmp_path, limit=150)
  launch.run([sys.executable, str(RANKS), "alone", engine, str(tmp_path)], 1, engine, limit=150)


@pytest.mark.parametrize("what", ["other_engine", "own_communicator"])
def test_a_comm_of_mpi_under_the_other_engine_is_refused(tmp_path, what):
  message = r"^rank \d failed: RuntimeError: js.MpiComm\(\) in rank \d of 3, .*--engine=mpi --ranks=3"
  with pytest.raises(launch.RunFailed, match=message):
    start(what, "processes", tmp_path, limit=150)


@pytest.mark.parametrize("communicator", ["", "MPI.COMM_WORLD.Clone()"])
def test_another_mpi_than_that_of_mpirun_is_refused(tmp_path, communicator):
  """It gives each rank a world of its own; so does an MPI that nobody has started."""
  environment = outside() | {"JAXSPARSE_RECORDS": str(tmp_path), "JAXSPARSE_RANK": "1", "JAXSPARSE_RANKS": "3"}
  program = f"from mpi4py import MPI; import jaxsparse as js; js.MpiComm({communicator})"
  done = subprocess.run(
    [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
  )
  assert done.returncode == 1
  assert "RuntimeError: js.MpiComm(): JAXSPARSE_RANKS=3 states 3 ranks, but MPI.COMM_WORLD has size 1. " in done.stderr
  assert "MPI.COMM_WORLD has size 1" in records.read(tmp_path, 1).said


@ENGINES
def test_a_rank_that_does_not_join_is_named(tmp_path, monkeypatch, engine):
  def overdue(lives, _, now, limits):
    """As if no time passed before ranks 0 and 1 have joined, which takes long on a loaded machine."""
    both = sum(life.arrived for life in lives) == 2
    joined.extend([now] if both and not joined else [])
    return actual(lives, now - joined[0] if both else 0.0, now, limits)

  actual, joined = watch._overdue, []
  monkeypatch.setattr(watch, "_overdue", overdue)
  with pytest.raises(launch.RunFailed, match=r"^rank 2 did not join within 1 s"):
    start("late", engine, tmp_path, start_timeout=1)
  assert 1 < time.monotonic() - joined[0] < 30


def test_a_run_that_takes_too_long_is_ended():
  with pytest.raises(launch.RunFailed, match="more than 0.5 s; ranks 0, 1 still ran"):
    launch.run(["sleep", "60"], 2, limit=0.5)


def test_the_status_of_a_rank_is_told():
  with pytest.raises(launch.RunFailed, match=r"^rank 1 exited with status 7: why; the other 1 of 2 ranks were ended"):
    launch.run(["sh", "-c", 'test "$JAXSPARSE_RANK" = 0 && sleep 60; echo why >&2; exit 7'], 2)


GLOO = "JaxRuntimeError: UNKNOWN: Gloo all-reduce failed: Connection closed by peer"


@pytest.mark.parametrize(
  ("lives", "cause"),
  [
    # The exception of a rank that lost another one is recorded before the end of that one.
    ([{"raised": 1.0, "said": GLOO}, {"ended": 1.1, "status": -9}], "rank 1 was ended by SIGKILL"),
    ([{"ended": 1.0, "status": -6}, {"raised": 1.1, "said": "ValueError: no"}], "rank 1 failed: ValueError: no"),
    (
      [{"raised": 1.2, "said": "ValueError: no"}, {"raised": 1.1, "said": "OSError: full"}],
      "rank 1 failed: OSError: full",
    ),
    (
      [{"raised": 9.0, "said": "OSError: full"}, {"over": 1.0, "ended": 1.0, "status": 0}],
      "rank 0 failed: OSError: full",
    ),
    (
      [{"raised": 1.0, "said": GLOO}, {"over": 1.1, "ended": 1.1, "status": 0}],
      f"rank 1 ended with status 0 before the others, then rank 0 failed: {GLOO}",
    ),
    ([{"ended": 12.0, "status": -6}, {"stopped": 1.0}], "rank 1 is stopped (SIGSTOP)"),
    (
      [{"ended": 1.2, "status": -15, "told": True}, {"ended": 1.1, "status": -9, "told": True}],
      "rank 1 was ended by SIGKILL",
    ),
    ([{"raised": 1.0, "said": GLOO}, {}], f"rank 0 failed: {GLOO}"),
    ([{"ended": 1.0, "status": 3}, {}], "rank 0 exited with status 3"),
  ],
)
def test_the_first_cause(lives, cause):
  lives = [records.Life(rank, **facts) for rank, facts in enumerate(lives)]
  assert records.first_cause(lives) == f"{cause}; the other 1 of 2 ranks were ended"


@pytest.mark.parametrize(
  ("said", "lost"),
  [
    (GLOO, True),
    ("jax.errors.JaxRuntimeError: UNAVAILABLE: failed to connect to all addresses", True),
    ("XlaRuntimeError: INTERNAL: CoordinationServiceAgent is in error state", True),
    ("ValueError: UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection", True),
    ("Exception: MPI_ERR_PROC_FAILED: process failure", True),
    ("mpi4py.MPI.Exception: MPI_ERR_OTHER: known error not in list", True),
    ("[node7:00000] *** MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort,", True),
    ("[node7:4711] PMIX ERROR: PMIX_ERR_UNREACH in file client.c", True),
    ("HTTPError: 503 Service Unavailable", False),
    ("HTTPError: 503 UNAVAILABLE", False),
    ("ValueError: coordinates and coordination of the heartbeat", False),
    ("KeyError: 'PMIX_RANK'", False),
    ("SystemExit: no heartbeat from the data loader", False),
    ("JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory", False),
  ],
)
def test_only_exceptions_of_the_runtime_are_those_of_a_rank_that_has_lost_another(said, lost):
  assert records.lost_another(said) == lost


@pytest.mark.parametrize("known", [True, False])
def test_a_rank_that_has_lost_another_prints_a_traceback_only_without_the_cause(tmp_path, known):
  if known:
    (tmp_path / "1").write_text('{"event": "ended", "time": 1.0, "status": -9, "said": "", "told": false}\n')
  environment = os.environ | {"JAXSPARSE_RECORDS": str(tmp_path), "JAXSPARSE_RANK": "0", "JAXSPARSE_RANKS": "2"}
  kind, _, message = GLOO.partition(": ")
  program = (
    f"import jax; from jaxsparse import launch; launch.fail_on_exceptions(); raise jax.errors.{kind}({message!r})"
  )
  done = subprocess.run(
    [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
  )
  assert done.returncode == 1
  assert records.read(tmp_path, 0).said == GLOO
  assert ("Traceback" in done.stderr) != known
  assert (f"this rank has lost another one: {GLOO}\n" in done.stderr) == known


EXITS = """
import atexit, os, sys, threading
from jaxsparse import launch

rank = os.getpid()
atexit.register(lambda: os.getpid() == rank and os._exit(99))  # as a handler that waits for other ranks
FIRST

def main():
  launch.fail_on_exceptions()  # as `join` does
  try:
    sys.exit("caught")
  except SystemExit as error:
    assert error.code == "caught"
  thread = threading.Thread(target=lambda: sys.exit(4))
  thread.start()
  thread.join()
  if os.fork() == 0:
    sys.exit(5)
  assert os.waitstatus_to_exitcode(os.wait()[1]) == 5
  END

try:
  CALL
finally:
  if os.getpid() == rank:
    print("cleaned up")
"""
IN_MAIN = {"FIRST": "", "END": "sys.exit(STATUS)", "CALL": "main()"}
RETURNS = {"FIRST": "", "END": "return STATUS", "CALL": "sys.exit(main())"}
ASKS_FIRST = RETURNS | {"FIRST": "launch.fail_on_exceptions()"}


@pytest.mark.parametrize(
  ("program", "code", "status", "printed", "said"),
  [
    (IN_MAIN, "'disk is full'", 1, "disk is full\n", "SystemExit: disk is full"),
    (IN_MAIN, "3", 3, "", "SystemExit: 3"),
    (IN_MAIN, "True", 1, "", "SystemExit: True"),
    (IN_MAIN, "0", 99, "", ""),
    (IN_MAIN, "None", 99, "", ""),
    (ASKS_FIRST, "'disk is full'", 1, "disk is full\n", "SystemExit: disk is full"),
    (ASKS_FIRST, "3", 3, "", "SystemExit: 3"),
    (ASKS_FIRST, "0", 99, "", ""),
    (RETURNS, "3", 99, "", ""),  # Python has looked up `sys.exit` before `main` joins
  ],
)
def test_sys_exit_with_a_status_ends_a_rank_at_once(tmp_path, program, code, status, printed, said):
  """Unless it is caught, or in a thread or a child."""
  environment = os.environ | {"JAXSPARSE_RECORDS": str(tmp_path), "JAXSPARSE_RANK": "0", "JAXSPARSE_RANKS": "2"}
  text = EXITS
  for name, line in program.items():
    text = text.replace(name, line.replace("STATUS", code))
  command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", text]  # Python 3.12, of the fork
  done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
  assert (done.returncode, done.stderr, done.stdout) == (status, printed, "cleaned up\n")
  life = records.read(tmp_path, 0)
  assert life.said == said
  assert (life.over is None) == bool(said)


@ENGINES
def test_a_rank_that_exits_with_a_message_is_named(tmp_path, capfd, engine):
  (tmp_path / "status").write_text('"disk is full"')
  with pytest.raises(launch.RunFailed, match="^rank 1 failed: SystemExit: disk is full; the other 2 of 3 ranks"):
    start("exits", engine, tmp_path, limit=150)
  assert "[rank 1] disk is full\n" in capfd.readouterr().err


# Tells the launcher that the rank has joined.
JOINED = f"""{sys.executable} -c '
from jaxsparse import launch
from jaxsparse.launch import records
launch.arrived()' && """


def command(*arguments):
  # With the default signals: who started the tests in the background had them ignored.
  return ["env", "--default-signal", sys.executable, "-m", "jaxsparse.launch", *arguments]


def launched(*arguments, **settings):
  return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120, check=False, **settings)


GLOO_LINE = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n"


@pytest.mark.parametrize("engine", ["processes", "mpi"])
def test_lines_are_marked_with_their_rank(engine):
  """All lines of the program, and none of gloo's, wherever these begin."""
  own = ["first", "[Gloo] Rank 0 is connected to a printer", "50%", "second"]
  printed = f"{own[0]}\n{GLOO_LINE}{own[1]}\n{own[2]}{GLOO_LINE}\n{own[3]}".replace("%", "%%")
  program = ["sh", "-c", f"{JOINED} echo out; printf '{printed}' >&2"]
  done = launched("--ranks=2", f"--engine={engine}", "--", *program)
  assert (done.returncode, done.stdout.split()) == (0, ["out"])
  lines = [f"[rank {rank}] {line}" for rank in (0, 1) for line in own]
  assert sorted(done.stderr.splitlines()) == sorted([*lines, "[rank 1] out"])
  done = launched("--ranks=2", f"--engine={engine}", "--no-prefix", "--", *program)
  assert done.stdout.split() == ["out"]
  assert sorted(done.stderr.splitlines()) == sorted([*own, *own, "out"])


def test_lines_of_gloo_from_several_threads():
  """As two devices of a process write them at once, before a line of the program that looks alike."""
  mixed = "[Gloo] Rank [Gloo] Rank 1 is connected to 01 is connected to  peer ranks. 1Expected number of connected peer"
  mixed += " ranks is :  peer ranks. 1Expected number of connected peer ranks is : \n1\n"
  assert guard.without_gloo_lines(f"a\n{mixed}7\n{GLOO_LINE}{mixed}8\n\nb".encode()) == b"a\n7\n8\n\nb"
  assert guard.without_gloo_lines(b" peer ranks. Expected number of connected peer ranks is : 1\n5\n") == b"5\n"


@ENGINES
def test_a_quiet_program_leaves_standard_error_empty(engine, monkeypatch):
  """Without warnings of Python about the launcher, and without gloo's lines."""
  monkeypatch.setenv("MPI4JAX_NO_WARN_JAX_VERSION", "1")  # JAX for Python 3.12 may be newer than it knows
  done = launched("--ranks=2", f"--engine={engine}", "--", sys.executable, str(RANKS), "quiet", engine, "none")
  assert (done.returncode, done.stdout, done.stderr) == (0, "2.0\n", "")


def test_without_a_launcher_gloo_is_quiet_too():
  """As under srun: no guard reads what the ranks write."""
  settings = {
    "JAXSPARSE_COORDINATOR": f"127.0.0.1:{launch.free_port()}",
    "JAXSPARSE_RANKS": "2",
    "JAX_PLATFORMS": "cpu",
  }
  program = [sys.executable, str(RANKS), "quiet", "processes", "none"]
  environments = [os.environ | settings | {"JAXSPARSE_RANK": str(rank)} for rank in range(2)]
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
  ranks = [subprocess.Popen(program, env=environment, **pipes) for environment in environments]
  assert [rank.communicate(timeout=120) for rank in ranks] == [("2.0\n", ""), ("", "")]


def test_the_command_line():
  failed = launched("--ranks=2", "--", "no-such-program")
  assert failed.returncode == 1
  assert failed.stderr.startswith("error: ")
  assert "no-such-program" in failed.stderr
  limited = launched("--ranks=2", "--limit=0.5", "--", "sleep", "60")
  assert limited.returncode == 1
  assert limited.stderr.startswith("error: the run has taken more than 0.5 s; ranks 0, 1 still ran")


# Ignores what it can, starts a process in a session of its own, and writes down both.
STUBBORN = "trap '' TERM INT HUP; setsid sleep 300 & echo $$ $! >> $PIDS; sleep 300; sleep 300"


@pytest.mark.parametrize(
  ("signals", "engine"),
  [
    row(signals, engine, quick=signals == (signal.SIGKILL,) or (engine == "processes" and signals == (signal.SIGTERM,)))
    for signals in (
      (signal.SIGTERM,),
      (signal.SIGINT, signal.SIGINT),
      (signal.SIGTERM, signal.SIGTERM),
      (signal.SIGHUP,),
      (signal.SIGKILL,),
    )
    for engine in ("processes", "mpi")
  ],
  ids=lambda value: value if isinstance(value, str) else "-".join(number.name for number in value),
)
def test_a_launcher_that_ends_leaves_nobody(tmp_path, signals, engine):
  files, noted = tmp_path / "files", tmp_path / "pids"
  files.mkdir()
  environment = os.environ | {"TMPDIR": str(files), "PIDS": str(noted)}
  arguments = command("--ranks=2", f"--engine={engine}", "--", "sh", "-c", STUBBORN)
  with subprocess.Popen(arguments, env=environment, start_new_session=True) as launcher:
    try:
      assert soon(lambda: noted.exists() and len(noted.read_text().split()) == 4)
      for number in signals:
        launcher.send_signal(number)
        time.sleep(0.2)  # the second one comes while the ranks get their grace
      status = launcher.wait(60)
    finally:
      launcher.kill()
  assert status == (-number if number == signal.SIGKILL else 128 + number)
  assert soon(lambda: all(gone(int(pid)) for pid in noted.read_text().split()))
  assert soon(lambda: not os.listdir(files))


def test_without_proc_a_guard_ends_its_child_and_the_launcher_the_group(tmp_path, monkeypatch):
  """As where the system is not Linux: the child gets its grace, and what it leaves in its group is killed."""
  noted, grace, folder = tmp_path / "pids", tmp_path / "grace", pathlib.Path(launch.__file__).parent
  program = f"import sys; sys.path.append({str(folder)!r}); import guard; guard.HAS_PROC = False; guard._main()"
  monkeypatch.setattr(watch, "HAS_PROC", False)
  monkeypatch.setattr(
    launch_start, "_guard", lambda kind, launcher: [sys.executable, "-c", program, str(launcher), kind]
  )
  child = f"trap 'touch {grace}; exit' TERM; sleep 300 & echo $$ $! > {noted}; wait"
  with pytest.raises(launch.RunFailed, match="more than 3 s"):
    launch.run(["sh", "-c", child], 1, limit=3)
  assert grace.exists()
  own, orphan = map(int, noted.read_text().split())
  assert soon(lambda: gone(own) and gone(orphan))


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ((["true"], 0), "ranks=0, choose at least 1"),
    ((["true"], 1, "smoke"), "engine='smoke', choose 'processes' or 'mpi'"),
    ((["true"], 1, "processes", 0), "devices=0, choose at least 1"),
    ((["true"], 1, "mpi", 2), "devices=2, choose 1, a rank of MPI is one device"),
  ],
)
def test_bad_arguments(arguments, message):
  *arguments, devices = arguments if len(arguments) > 3 else (*arguments, 1)
  with pytest.raises(ValueError, match=message):
    launch.run(*arguments, devices=devices)


# Rank 1 dies in the first attempt, in which the others wait.
DIES = f"""{JOINED} case ${{JAXSPARSE_RANK-$OMPI_COMM_WORLD_RANK}}$JAXSPARSE_ATTEMPT in
10) kill -9 $$;;
?0) sleep 60;;
esac
echo attempt $JAXSPARSE_ATTEMPT of $JAXSPARSE_RANKS"""


@ENGINES
def test_the_ranks_that_are_left_start_again(engine):
  arguments = ("--ranks=3", "--no-prefix", "--min_ranks=2", f"--engine={engine}", "--", "sh", "-c", DIES)
  done = launched("--restarts=2", *arguments)
  assert (done.returncode, done.stdout) == (0, "attempt 1 of 2\n")
  told = "rank 1 was ended by SIGKILL; the other 2 of 3 ranks were ended; 2 of 3 start again, 1 restarts remain"
  assert f"jaxsparse.launch: {told}\n" in done.stderr
  done = launched("--restarts=2", *[arguments[0], "--min_ranks=3", *arguments[3:]])
  assert done.returncode == 1
  assert "ranks were ended; 2 of 3 are left, fewer than min_ranks=3\n" in done.stderr


def test_what_is_no_loss_of_a_rank_does_not_start_again():
  with pytest.raises(launch.RunFailed, match="more than 0.5 s"):
    launch.run(["sleep", "60"], 2, limit=0.5, restarts=3)
  with pytest.raises(launch.RunFailed, match=r"without having joined the run"):
    launch.run(["true"], 2, restarts=3)


def test_a_signal_ends_a_run_that_could_start_again(tmp_path):
  started = tmp_path / "started"
  program = f"echo $JAXSPARSE_ATTEMPT >> {started}; sleep 60"
  with subprocess.Popen(command("--ranks=2", "--restarts=9", "--", "sh", "-c", program)) as launcher:
    assert soon(lambda: started.exists() and len(started.read_text().split()) == 2)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 128 + signal.SIGTERM
  assert started.read_text().split() == ["0", "0"]
