"""A rank trains with as many ranks as its launcher has started, or not at all."""

import os
import pathlib
import subprocess
import sys

import pytest

from jaxsparse import launch
from jaxsparse.launch import environment, launchers
from jaxsparse.launch.start import free_port
from tests.cases import row

RANKS = pathlib.Path(__file__).with_name("ranks.py")
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}


def outside():
  """The environment without variables of launchers."""
  prefixes = (
    "JAXSPARSE_",
    "OMPI_",
    "PMIX_",
    "PMI_",
    "SLURM_",
    "TORCHELASTIC_",
    "TPU_",
    "MEGASCALE_",
    "KUBERNETES_",
  )
  names = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "JOB_COMPLETION_INDEX",
  )
  own = os.environ.items()
  return {
    name: value
    for name, value in own
    if not name.startswith(prefixes) and name not in names
  }


def run_two(arguments, variables):
  """(status, output, error) of two ranks that this launcher has not started; "{rank}" in a variable is the number."""
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
  own = [
    outside() | {name: value.format(rank=rank) for name, value in variables.items()}
    for rank in range(2)
  ]
  ranks = [
    subprocess.Popen([sys.executable, *arguments], env=environment, **pipes)
    for environment in own
  ]
  printed = [rank.communicate(timeout=120) for rank in ranks]
  return [(rank.returncode, *texts) for rank, texts in zip(ranks, printed, strict=True)]


ALONE = "states 2 ranks, but MPI.COMM_WORLD has size 1. mpi4py was built for Open MPI"
ADVICE = f"Without MPI, call {environment.JOIN} and start it by python -m jaxsparse.launch --ranks=N\n"
PMI = {"PMI_RANK": "{rank}", "PMI_SIZE": "2"}


LAUNCHER = {"JAXSPARSE_RANK": "{rank}", "JAXSPARSE_RANKS": "2"}


@pytest.mark.parametrize(
  ("call", "variables", "says"),
  [
    row(environment.JOIN, PMI, f"PMI_SIZE=2 {ALONE}"),
    row("js.MpiComm()", STEP, f"SLURM_STEP_NUM_TASKS=2 {ALONE}", quick=True),
  ],
)
def test_ranks_that_would_train_alone_are_refused(call, variables, says):
  """Processes that another launcher has started, of which MPI knows nothing; it gives each rank a world of its own."""
  program = f"import jaxsparse as js, jaxsparse.launch; {call}; print('trains')"
  for status, printed, error in run_two(["-c", program], variables):
    assert (status, printed) == (1, "")
    assert f"RuntimeError: {call.partition('(')[0]}(): {says}" in error
    assert ADVICE in error


@pytest.mark.parametrize(
  "variables",
  [
    # Slurm has also set variables of PMI and PMIx, and MPI would count one rank.
    row(
      STEP
      | {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "PMI_SIZE": "2"}
      | dict.fromkeys(
        ("SLURM_PROCID", "SLURM_LOCALID", "PMI_RANK", "PMIX_RANK"), "{rank}"
      ),
      quick=True,
      id="srun",
    ),
    row(LAUNCHER, id="launcher"),
  ],
)
def test_ranks_join_without_mpi_and_without_a_guard(variables):
  """No guard reads what the ranks write; gloo's lines go to standard error."""
  port = str(free_port())
  named = {"JAXSPARSE_COORDINATOR": f"127.0.0.1:{port}"}
  place = named if "JAXSPARSE_RANK" in variables else {"JAX_COORDINATOR_PORT": port}
  ranks = run_two(
    [str(RANKS), "quiet", "processes", "none"],
    variables | place | {"JAX_PLATFORMS": "cpu"},
  )
  assert [(status, printed) for status, printed, _ in ranks] == [(0, "2.0\n"), (0, "")]
  assert all(
    line.startswith("[Gloo] Rank ")
    for *_, error in ranks
    for line in error.splitlines()
  )


def of(prefix, rank, size):
  return {f"{prefix}_RANK": str(rank), f"{prefix}_SIZE": str(size)}


def step(tasks):
  return {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(tasks)}


OPEN_MPI, RUN = (
  "OMPI_COMM_WORLD",
  {"JAXSPARSE_RANK": "0", "JAXSPARSE_RANKS": "3", "JAXSPARSE_COORDINATOR": "a:1"},
)


@pytest.mark.parametrize(
  ("variables", "found"),
  [
    ({}, []),
    ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, []),  # a batch script
    (
      step(1) | {"SLURM_NTASKS": "1", "PMIX_RANK": "0"} | of("PMI", 0, 1),
      [],
    ),  # srun --pty
    (step(8) | {"SLURM_NTASKS": "8", "PMIX_RANK": "7"}, ["SLURM_STEP_NUM_TASKS=8"]),
    (step(8) | of("PMI", 7, 8), ["SLURM_STEP_NUM_TASKS=8"]),
    (
      step(8) | of("PMI", 0, 1),
      ["SLURM_STEP_NUM_TASKS=8"],
    ),  # srun in a shell that PMI has started
    (
      step(2) | of(OPEN_MPI, 5, 60) | {"PMIX_RANK": "5"},
      ["OMPI_COMM_WORLD_SIZE=60", "PMIX_RANK=5"],
    ),  # daemons by srun
    (step(2) | of("PMI", 5, 60), ["PMI_SIZE=60"]),
    (step(8) | of(OPEN_MPI, 5, 8), ["OMPI_COMM_WORLD_SIZE=8"]),
    (of(OPEN_MPI, 0, 1), ["OMPI_COMM_WORLD_SIZE=1"]),
    (of(OPEN_MPI, 0, 4) | of("PMI", 0, 1), ["OMPI_COMM_WORLD_SIZE=4"]),
    (step(1) | {"SLURM_NTASKS": "8"}, []),  # the shell of salloc
    (step("") | {"SLURM_NTASKS": "8"}, ["SLURM_NTASKS=8"]),
    ({"PMI_SIZE": "2"}, []),
    (of("PMI", "", ""), []),
    (of("PMI", 3, ""), ["PMI_RANK=3"]),
    ({"PMIX_RANK": "3"}, ["PMIX_RANK=3"]),
    (RUN | of(OPEN_MPI, 1, 2) | step(8), ["JAXSPARSE_RANKS=3"]),
    (
      {"JAXSPARSE_RANKS": "3"} | of(OPEN_MPI, 1, 3),
      ["JAXSPARSE_RANKS=3", "OMPI_COMM_WORLD_SIZE=3"],
    ),
  ],
)
def test_the_inner_launcher_states_the_number_of_ranks(monkeypatch, variables, found):
  monkeypatch.setattr(os, "environ", outside() | variables)
  stated = launchers.read_counts()
  assert [str(one).split()[0] for one in stated] == found
  assert launch.is_rank() == bool(found)
  environment.check(
    "a rank", stated, max((one.ranks for one in stated), default=1), "it counts", ""
  )


@pytest.mark.parametrize(
  ("variables", "message"),
  [
    (
      of(OPEN_MPI, 0, 4) | of("PMI", 0, 2),
      "a rank: OMPI_.*=4 states 4 ranks, but it counts 2. Unset OMPI_COMM_WORLD_",
    ),
    (
      of("PMI", 0, 2) | {"PMIX_RANK": "2"},
      "a rank: PMIX_RANK=2 states at least 3 ranks, but it counts 2. Unset PMIX_",
    ),
    (of("PMI", "0", "two"), "PMI_SIZE='two' is not a number, .*: unset it$"),
    (of("PMI", "-1", ""), "PMI_RANK='-1' is not a number, .*: unset it$"),
  ],
)
def test_variables_that_cannot_be_right_are_refused(monkeypatch, variables, message):
  monkeypatch.setattr(os, "environ", outside() | variables)
  with pytest.raises((RuntimeError, ValueError), match=f"^{message}"):
    environment.check("a rank", launchers.read_counts(), 2, "it counts", "")
