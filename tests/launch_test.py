"""A run never hangs: a rank that dies, fails or does not come ends it in stated time, by name."""

import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from jaxsparse import launch
from jaxsparse.launch import guard, rank, watch
from jaxsparse.launch import start as launch_start
from tests.cases import quick_of, row
from tests.environment_test import outside

RANKS = pathlib.Path(__file__).with_name("ranks.py")
# `make test` takes `mpirun` where it is ended itself.
ENGINES = pytest.mark.parametrize(
  "engine", quick_of(["processes", "mpi"], quick=["processes"])
)
# A shell's way to tell the launcher that the rank has joined.
JOINED = "echo '{\"arrived\": true}' >> $JAXSPARSE_RECORDS/${JAXSPARSE_RANK-$OMPI_COMM_WORLD_RANK}; "


def ends(engine, folder, statement, others="step()"):
  """The program in which rank 1 runs a statement after a step of all, and the others another one."""
  return [sys.executable, str(RANKS), "ends", engine, str(folder), statement, others]


def command(*arguments):
  # With the default signals: who started the tests in the background had them ignored.
  return [
    "env",
    "--default-signal",
    sys.executable,
    "-m",
    "jaxsparse.launch",
    *arguments,
  ]


def launched(*arguments, **options):
  return subprocess.run(
    command(*arguments),
    capture_output=True,
    text=True,
    timeout=290,
    check=False,
    **options,
  )


def as_rank(program, folder, rank, ranks):
  """Runs a program of Python as a rank that records to a folder."""
  own = {
    "JAXSPARSE_RECORDS": str(folder),
    "JAXSPARSE_RANK": str(rank),
    "JAXSPARSE_RANKS": str(ranks),
  }
  # of a fork, in Python 3.12
  arguments = [
    sys.executable,
    "-W",
    "ignore::DeprecationWarning",
    "-c",
    program,
  ]
  return subprocess.run(
    arguments,
    env=outside() | own,
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )


def gone(pid):
  """Whether a process has ended (or is only waited for)."""
  try:
    return (
      pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    )
  except FileNotFoundError:
    return True


def soon(holds):
  """Whether something comes true within some seconds."""
  end = time.monotonic() + 60
  while not holds() and time.monotonic() < end:
    time.sleep(0.05)
  return holds()


ENDS = [  # whether it is quick with processes and with MPI
  (
    "killed",
    "os.kill(os.getpid(), 9)",
    "was ended by SIGKILL; the other 1 of 2 ranks were ended",
    True,
    False,
  ),
  (
    "raises",
    "raise ValueError('enough')",
    "failed: ValueError: enough; the other 1 of 2 ranks",
    False,
    False,
  ),
  (
    "exits",
    "sys.exit('disk is full')",
    "failed: SystemExit: disk is full; the other 1 of 2 ranks",
    False,
    False,
  ),
  ("vanishes", "os._exit(0)", "ended with status 0 ", False, False),
  ("stops", f"os.kill(os.getpid(), {signal.SIGSTOP:d})", "is stopped ", False, False),
  ("leaves", "sys.exit()", "left the run after 1 training steps, and ", True, False),
]


@pytest.mark.parametrize(
  ("statement", "message", "engine"),
  [
    row(statement, message, engine, quick=quick, id=f"{name}-{engine}")
    for name, statement, message, *both in ENDS
    for engine, quick in zip(("processes", "mpi"), both, strict=True)
  ],
)
def test_a_rank_that_ends_before_the_others_is_named(
  tmp_path, capfd, statement, message, engine
):
  with pytest.raises(launch.RunFailed) as error:
    launch.run(ends(engine, tmp_path, statement), 2, engine, limit=150)
  assert str(error.value).startswith(f"rank 1 {message}")
  noted = [(tmp_path / str(rank)).read_text().split() for rank in range(2)]
  assert time.monotonic() - float(noted[1][1]) < 60
  assert all(gone(pid) for pid, _ in noted)
  printed = capfd.readouterr()
  assert "[Gloo] Rank" not in printed.out + printed.err
  if "enough" in message:
    assert "[rank 1] ValueError: enough\n" in printed.err
  if "disk" in message:
    assert "[rank 1] disk is full\n" in printed.err


@pytest.mark.long
@pytest.mark.parametrize("engine", ["processes", "mpi"])
def test_ranks_that_go_on_without_a_step_get_the_grace(tmp_path, engine):
  program = ends(
    engine,
    tmp_path,
    "sys.exit()",
    others=f"open({str(tmp_path / 'end')!r}, 'w'); time.sleep(2)",
  )
  launch.run(program, 2, engine, limit=150)


@ENGINES
def test_a_rank_that_does_not_join_is_named(tmp_path, engine):
  program = [
    "sh",
    "-c",
    'test ${JAXSPARSE_RANK-$OMPI_COMM_WORLD_RANK} = 2 && sleep 600; exec "$@"',
    "sh",
  ]
  for limit in (5, 20, 80):  # on a loaded machine the others need more time to join
    begin = time.monotonic()
    with pytest.raises(
      launch.RunFailed, match=f"^ranks? .* did not join within {limit} s"
    ) as error:
      launch.run(
        [*program, *ends(engine, tmp_path, "pass")], 3, engine, start_timeout=limit
      )
    assert limit < time.monotonic() - begin < limit + 30
    if error.value.lost == {2}:
      break
  assert str(error.value).startswith("rank 2 did not join")


NOT_JOINED = r"^ranks? .*without having joined.*launch.join\(\).*MpiComm\(\)"
CLONE = (
  "from mpi4py import MPI; import jaxsparse as js; js.MpiComm(MPI.COMM_WORLD.Clone())"
)
ALONE = r"^rank \d failed: RuntimeError: js.MpiComm\(\) in rank \d of 2, .*--engine=mpi --ranks=2"
EXITS_FIRST = 'test "$JAXSPARSE_RANK" = 0 && sleep 60; echo why >&2; exit 7'


@pytest.mark.parametrize(
  ("program", "message", "options"),
  [
    row(
      ["sleep", "60"],
      r"more than 0.5 s and ranks 0, 1 still ran",
      {"limit": 0.5},
      quick=True,
    ),
    row(
      ["sleep", "60"], r"more than 0.5 s", {"limit": 0.5, "restarts": 3}, quick=True
    ),  # nothing is lost
    row(["true"], NOT_JOINED, {"restarts": 3}, quick=True),
    row(["true"], NOT_JOINED, {"engine": "mpi"}),
    row([sys.executable, "-c", CLONE], ALONE, {}, quick=True),
    row(
      ["sh", "-c", EXITS_FIRST],
      r"^rank 1 exited with status 7: why; the other 1 of 2 ranks",
      {},
      quick=True,
    ),
  ],
)
def test_runs_that_fail(program, message, options):
  with pytest.raises(launch.RunFailed, match=message):
    launch.run(program, 2, **options)


@pytest.mark.parametrize(
  "program", quick_of([["true"], [sys.executable, "-c", CLONE]], quick=[["true"]])
)
def test_a_rank_may_be_alone(program):
  launch.run(program, 1)


GLOO = "JaxRuntimeError: UNKNOWN: Gloo all-reduce failed: Connection closed by peer"


def failed(ended, said):
  return {"ended": ended, "status": 1, "said": said}


@pytest.mark.parametrize(
  ("lives", "cause"),
  [
    # The exception of a rank that lost another one is recorded before the end of that
    # one.
    ([failed(1.0, GLOO), {"ended": 1.1, "status": -9}], "rank 1 was ended by SIGKILL"),
    (
      [{"ended": 1.0, "status": -6}, failed(1.1, "ValueError: no")],
      "rank 1 failed: ValueError: no",
    ),
    ([failed(1.2, "E: a"), failed(1.1, "E: b")], "rank 1 failed: E: b"),
    ([failed(9.0, "E: a"), {"left": 1.0, "ended": 1.0}], "rank 0 failed: E: a"),
    (
      [failed(1.0, GLOO), {"left": 1.1, "ended": 1.1}],
      f"rank 1 ended with status 0 before the others, then rank 0 failed: {GLOO}",
    ),
    ([{"ended": 12.0, "status": -6}, {"stopped": 1.0}], "rank 1 is stopped (SIGSTOP)"),
    ([{"ended": 1.0, "status": -40}, {}], "rank 0 was ended by signal 40"),
    ([failed(1.0, GLOO), {}], f"rank 0 failed: {GLOO}"),
    ([failed(1.0, ""), {}], "rank 0 exited with status 1"),
  ],
)
def test_the_first_cause(lives, cause):
  failure = watch.find_failure(
    [watch.Life(rank, **facts) for rank, facts in enumerate(lives)], [None, None]
  )
  assert str(failure) == f"{cause}; the other 1 of 2 ranks were ended"
  assert failure.lost == ({0, 1} if "E: b" in cause else {int(cause[5])})


@pytest.mark.parametrize(
  ("lives", "problem"),
  [
    ([{"left": 7.0}, {}], None),
    ([{"left": 4.0}, {}], "rank 0 left the run and rank 1 still ran 5 s later"),
    (
      [{"left": 9.0, "steps": 3}, {"steps": 4}],
      "rank 0 left the run after 3 training steps, and rank 1 still ran: ",
    ),
    ([{"left": 9.0, "steps": 4}, {"steps": 4}], None),
    (
      [{"left": 3.0, "ended": 3.0}, {"left": 4.0}],
      "rank 1 did not end within 5 s after the last rank",
    ),
    (
      [{"ended": 3.0}, {"ended": 4.0}],
      "mpirun did not end within 5 s after the last rank",
    ),
    ([{"ended": 3.0}, {"ended": 7.0}], None),
    ([{}, {"stopped": 1.0}], None),
    ([{}, {"stopped": -1.0}], "rank 1 is stopped (SIGSTOP), for more than 10 s"),
  ],
)
def test_ranks_that_end_before_others_or_do_not_end(lives, problem):
  lives = [watch.Life(rank, arrived=True, **facts) for rank, facts in enumerate(lives)]
  found = watch.find_overdue(
    lives, 10.0, 10.0, start=5.0, grace=5.0, limit=math.inf, begun=0.0
  )
  assert found is None if problem is None else str(found).startswith(problem)


@pytest.mark.parametrize(
  ("said", "lost"),
  [
    (GLOO, True),
    (
      "jax.errors.JaxRuntimeError: UNAVAILABLE: failed to connect to all addresses",
      True,
    ),
    ("XlaRuntimeError: INTERNAL: CoordinationServiceAgent is in error state", True),
    (
      "ValueError: UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection",
      True,
    ),
    ("Exception: MPI_ERR_PROC_FAILED: process failure", True),
    ("mpi4py.MPI.Exception: MPI_ERR_OTHER: known error not in list", True),
    (
      "[node7:00000] *** MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort,",
      True,
    ),
    ("[node7:4711] PMIX ERROR: PMIX_ERR_UNREACH in file client.c", True),
    ("HTTPError: 503 Service Unavailable", False),
    ("HTTPError: 503 UNAVAILABLE", False),
    ("ValueError: coordinates and coordination of the heartbeat", False),
    ("KeyError: 'PMIX_RANK'", False),
    ("SystemExit: no heartbeat from the data loader", False),
    ("JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory", False),
  ],
)
def test_only_exceptions_of_the_runtime_are_those_of_a_rank_that_has_lost_another(
  said, lost
):
  assert watch.lost_another(said) == lost


@pytest.mark.parametrize("known", [True, False])
def test_a_rank_that_has_lost_another_prints_a_traceback_only_without_the_cause(
  tmp_path, known
):
  if known:
    (tmp_path / "1").write_text('{"ended": 1.0, "status": -9}\n')
  kind, _, message = GLOO.partition(": ")
  first = "import jax; from jaxsparse import launch; launch.fail_on_exceptions()"
  done = as_rank(f"{first}; raise jax.errors.{kind}({message!r})", tmp_path, 0, 2)
  assert done.returncode == 1
  assert watch.read_life(tmp_path, 0).said == GLOO
  assert ("Traceback" in done.stderr) != known
  assert (f"this rank has lost another one: {GLOO}\n" in done.stderr) == known


EXITS = """
import atexit, os, sys, threading
from jaxsparse import launch

rank, how, status = os.getpid(), HOW, STATUS
atexit.register(lambda: os.getpid() == rank and os._exit(99))  # as a handler that waits for other ranks
if how == "asks first":
  launch.fail_on_exceptions()

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
  if how == "in main":
    sys.exit(status)
  return status

try:
  sys.exit(main())
finally:
  if os.getpid() == rank:
    print("cleaned up")
"""


@pytest.mark.parametrize(
  ("how", "code", "status", "printed", "said"),
  [
    row(
      "in main",
      "disk is full",
      1,
      "disk is full\n",
      "SystemExit: disk is full",
      quick=True,
    ),
    row("in main", 3, 3, "", "SystemExit: 3"),
    row("in main", True, 1, "", "SystemExit: True"),
    row("in main", 0, 99, "", ""),
    row("asks first", "disk is full", 1, "disk is full\n", "SystemExit: disk is full"),
    row("", 3, 99, "", ""),  # Python has looked up `sys.exit` before `main` joins
  ],
)
def test_sys_exit_with_a_status_ends_a_rank_at_once(
  tmp_path, how, code, status, printed, said
):
  """Unless it is caught, or in a thread or a child."""
  done = as_rank(
    EXITS.replace("HOW", repr(how)).replace("STATUS", repr(code)), tmp_path, 0, 2
  )
  assert (done.returncode, done.stderr, done.stdout) == (
    status,
    printed,
    "cleaned up\n",
  )
  life = watch.read_life(tmp_path, 0)
  assert life.said == said
  assert math.isinf(life.left) == bool(said)


GLOO_LINE = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n"


@ENGINES
def test_lines_are_marked_with_their_rank(engine):
  """All lines of the program, and none of gloo's, wherever these begin."""
  own = ["first", "[Gloo] Rank 0 is connected to a printer", "50%", "second"]
  printed = f"{own[0]}\n{GLOO_LINE}{own[1]}\n{own[2]}{GLOO_LINE}\n{own[3]}".replace(
    "%", "%%"
  )
  program = ["sh", "-c", f"{JOINED}echo out; printf '{printed}' >&2"]
  done = launched("--ranks=2", f"--engine={engine}", "--", *program)
  assert (done.returncode, done.stdout.split()) == (0, ["out"])
  lines = [f"[rank {rank}] {line}" for rank in (0, 1) for line in own]
  assert sorted(done.stderr.splitlines()) == sorted([*lines, "[rank 1] out"])
  done = launched("--ranks=2", f"--engine={engine}", "--no-prefix", "--", *program)
  assert done.stdout.split() == ["out"]
  assert sorted(done.stderr.splitlines()) == sorted([*own, *own, "out"])


def test_long_lines_of_several_ranks_are_not_mixed():
  """A pipe takes more than 4,096 bytes in pieces."""
  line = "i=0; while [ $i -lt 100 ]; do printf '%09000d\\n' $JAXSPARSE_RANK >&2; i=$((i + 1)); done"
  done = launched("--ranks=3", "--", "sh", "-c", JOINED + line)
  expected = [f"[rank {rank}] {rank:09000d}" for rank in range(3) for _ in range(100)]
  assert sorted(done.stderr.splitlines()) == expected


def test_lines_of_gloo_from_several_threads():
  """As two devices of a process write them at once, before a line of the program that looks alike."""
  mixed = "[Gloo] Rank [Gloo] Rank 1 is connected to 01 is connected to  peer ranks. 1Expected number of connected peer"
  mixed += (
    " ranks is :  peer ranks. 1Expected number of connected peer ranks is : \n1\n"
  )
  late = f"{GLOO_LINE[:-2]}{GLOO_LINE[:-2]}11\n\n"
  end = " peer ranks. Expected number of connected peer ranks is : 1\n5\n"
  for written, kept in (
    (f"a\n{mixed}7\n{GLOO_LINE}{late}{mixed}8\n\nb", "a\n7\n8\n\nb"),
    (end, "5\n"),
  ):
    assert "".join(guard.drop_gloo_lines(written.splitlines(keepends=True))) == kept


@pytest.mark.long
@ENGINES
def test_a_quiet_program_leaves_standard_error_empty(engine, monkeypatch):
  """Without warnings of Python about the launcher, and without gloo's lines."""
  # JAX for Python 3.12 may be newer than it knows
  monkeypatch.setenv("MPI4JAX_NO_WARN_JAX_VERSION", "1")
  done = launched(
    "--ranks=2",
    f"--engine={engine}",
    "--",
    sys.executable,
    str(RANKS),
    "quiet",
    engine,
    "none",
  )
  assert (done.returncode, done.stdout, done.stderr) == (0, "2.0\n", "")


# Ignores what it can, starts a process in a session of its own, and writes down both.
STUBBORN = (
  "trap '' TERM INT HUP; setsid sleep 300 & echo $$ $! >> $PIDS; sleep 300; sleep 300"
)


def in_memory(names):
  """The folders with these names in shared memory."""
  memory = pathlib.Path("/dev/shm")
  return [path for name in names for path in memory.glob(f"**/{name}")]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_in_a_rank_of_another_one_leaves_no_folder(tmp_path, number):
  files, noted = tmp_path / "files", tmp_path / "pids"
  files.mkdir()
  environment = os.environ | {"TMPDIR": str(files), "PIDS": str(noted)}
  inner = command("--ranks=1", "--", "sh", "-c", STUBBORN)
  with subprocess.Popen(
    command("--ranks=1", "--", *inner), env=environment, start_new_session=True
  ) as launcher:
    try:
      assert soon(lambda: noted.exists() and len(noted.read_text().split()) == 2)
      names = [path.name for path in files.rglob("jaxsparse-*") if path.is_dir()]
      assert len(names) == len(in_memory(names)) == 2
      launcher.send_signal(number)
      launcher.wait(60)
    finally:
      launcher.kill()
  pids = noted.read_text().split()
  assert soon(lambda: all(gone(int(pid)) for pid in pids))
  assert soon(lambda: not os.listdir(files))
  assert soon(lambda: not in_memory(names))


@pytest.mark.parametrize(
  ("signals", "engine"),
  [
    row(signals, engine, quick=(signals, engine) in quick)
    for quick in [(("KILL", "mpi"), ("TERM", "processes"))]
    for signals in ("TERM", "INT-INT", "TERM-TERM", "HUP", "KILL")
    for engine in ("processes", "mpi")
  ],
)
def test_a_launcher_that_ends_leaves_nobody(tmp_path, signals, engine):
  files, noted = tmp_path / "files", tmp_path / "pids"
  files.mkdir()
  environment = os.environ | {"TMPDIR": str(files), "PIDS": str(noted)}
  arguments = command(
    "--ranks=2", f"--engine={engine}", "--restarts=9", "--", "sh", "-c", STUBBORN
  )
  pipe = {"stderr": subprocess.PIPE, "text": True}
  with subprocess.Popen(
    arguments, env=environment, start_new_session=True, **pipe
  ) as launcher:
    try:
      assert soon(lambda: noted.exists() and len(noted.read_text().split()) == 4)
      for number in [signal.Signals[f"SIG{name}"] for name in signals.split("-")]:
        launcher.send_signal(number)
        time.sleep(0.2)  # the second one comes while the ranks get their grace
      status = launcher.wait(60)
    finally:
      launcher.kill()
    said = launcher.stderr.read()
  if number != signal.SIGKILL:
    first = f"SIG{signals.partition('-')[0]}"
    line = f"jaxsparse.launch: {first}, the run of sh -c {STUBBORN} has ended, no rank is left running\n"
    assert said == line
  assert status == (-number if number == signal.SIGKILL else 128 + number)
  pids = noted.read_text().split()
  assert len(pids) == 4  # it has not started again
  assert soon(lambda: all(gone(int(pid)) for pid in pids))
  assert soon(lambda: not os.listdir(files))


def test_without_proc_a_guard_ends_its_child_and_the_launcher_the_group(
  tmp_path, monkeypatch
):
  """As where the system is not Linux: the child gets its grace, and what it leaves in its group is killed."""
  noted, grace, folder = (
    tmp_path / "pids",
    tmp_path / "grace",
    pathlib.Path(launch.__file__).parent,
  )
  program = f"import sys; sys.path.append({str(folder)!r}); import guard; guard.HAS_PROC = False; guard._main()"
  monkeypatch.setattr(
    launch_start,
    "_guard",
    lambda kind, launcher: [sys.executable, "-c", program, str(launcher), kind],
  )
  child = f"trap 'touch {grace}; exit' TERM; sleep 300 & echo $$ $! > {noted}; wait"
  with pytest.raises(launch.RunFailed, match="more than 3 s"):
    launch.run(["sh", "-c", child], 1, limit=3)
  assert grace.exists()
  own, orphan = map(int, noted.read_text().split())
  assert soon(lambda: gone(own) and gone(orphan))


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"command": []}, r"command=\[\], give a program"),
    ({"ranks": 0}, "ranks=0, choose at least 1"),
    ({"engine": "smoke"}, "engine='smoke', choose 'processes' or 'mpi'"),
    ({"devices": 0}, "devices=0, choose at least 1"),
    (
      {"devices": 2, "engine": "mpi"},
      "devices=2, choose 1, a rank of MPI is one device",
    ),
    (
      {"min_ranks": 2},
      "restarts=0, min_ranks=2: choose at least 0, and from 1 to ranks=1",
    ),
  ],
)
def test_bad_arguments(options, message):
  with pytest.raises(ValueError, match=message):
    launch.run(**{"command": ["true"], "ranks": 1} | options)


def test_an_empty_list_of_hosts_is_this_machine(monkeypatch):
  monkeypatch.setenv(launch_start.HOSTS, "")
  assert launch_start._hosts_here() == []


def test_each_rank_sees_gpus_of_its_own(monkeypatch):
  for visible, expected in (("0,1,2,3", ["0,1", "2,3"]), ("0,1,2", [None, None])):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    commands = launch_start._ranks(["true"], ranks=2, devices=2, hosts=[])
    assert [own.get("CUDA_VISIBLE_DEVICES") for _, own in commands] == expected
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")  # hides all
  assert launch_start.list_gpus() == []


def test_ranks_reach_their_coordinator_without_a_proxy(monkeypatch):
  """JAX warns of every variable of proxies, so there is none without a proxy."""
  for name in ("no_grpc_proxy", "grpc_proxy", "https_proxy"):
    monkeypatch.delenv(name, raising=False)
  for proxy, others, expected in (
    ("", "", None),
    ("http://proxy:1", "", "127.0.0.1"),
    ("http://proxy:1", ".internal", ".internal,127.0.0.1"),
  ):
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.setenv("no_proxy", others)
    ((_, own),) = launch_start._ranks(["true"], ranks=1, devices=1, hosts=[])
    assert own.get("no_grpc_proxy") == expected


def test_steps_are_counted_without_space_on_the_disk(monkeypatch, tmp_path):
  """A step must not fail where the folder of temporary files is full: a byte written would need a block of the disk."""
  for name, value in (
    (guard.RECORDS, str(tmp_path)),
    (guard.RANK, "0"),
    (guard.RANKS, "1"),
  ):
    monkeypatch.setenv(name, value)
  file = rank._open_steps.__wrapped__()
  monkeypatch.setattr(rank, "_open_steps", lambda: file)
  with file:
    for _ in range(3):
      rank.count_step(1)
  assert watch.read_life(tmp_path, 0).steps == 3
  assert not (tmp_path / "0.steps").stat().st_blocks


@pytest.mark.long
def test_the_number_of_ranks_has_a_short_name():
  for option in (["-n", "2"], ["-n2"], ["--ranks=2"]):
    done = launched(
      *option, "--no-prefix", "--", "sh", "-c", f"{JOINED}echo of $JAXSPARSE_RANKS"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "of 2\n", "of 2\n")


def test_the_command_line_says_what_is_wrong():
  failed = launched("--ranks=2", "--", "no-such-program")
  assert (failed.returncode, "no-such-program" in failed.stderr) == (1, True)
  assert failed.stderr.startswith("error: ")


# Rank 1 dies in the first attempt, in which the others wait.
DIES = f"""{JOINED}case ${{JAXSPARSE_RANK-$OMPI_COMM_WORLD_RANK}}$JAXSPARSE_ATTEMPT in
10) kill -9 $$;;
?0) sleep 60;;
esac
echo attempt $JAXSPARSE_ATTEMPT of $JAXSPARSE_RANKS"""


@ENGINES
def test_the_ranks_that_are_left_start_again(engine):
  arguments = (
    "--ranks=3",
    "--no-prefix",
    "--min_ranks=2",
    f"--engine={engine}",
    "--",
    "sh",
    "-c",
    DIES,
  )
  done = launched("--restarts=2", *arguments)
  assert (done.returncode, done.stdout) == (0, "attempt 1 of 2\n")
  told = "rank 1 was ended by SIGKILL; the other 2 of 3 ranks were ended; 2 of 3 start again, 1 restarts remain"
  assert f"jaxsparse.launch: {told}\n" in done.stderr
  done = launched("--restarts=2", arguments[0], "--min_ranks=3", *arguments[3:])
  assert done.returncode == 1
  assert "ranks were ended; 2 of 3 are left, fewer than min_ranks=3\n" in done.stderr
