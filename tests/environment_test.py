"""A rank trains with as many ranks as its launcher has started, or not at all."""

import os
import pathlib
import subprocess
import sys
import types

import pytest

from jaxsparse import launch
from jaxsparse.launch import environment
from jaxsparse.launch.start import free_port

RANKS = pathlib.Path(__file__).with_name("ranks.py")


def outside():
  """The environment without variables of launchers."""
  prefixes = ("JAXSPARSE_", "OMPI_", "PMIX_", "PMI_", "SLURM_")
  return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
WAYS_TO_JOIN = {"join": "jaxsparse.launch.join()", "comm": "js.MpiComm()"}


@pytest.mark.parametrize(
  ("way", "variables", "says"),
  [
    ("join", {"PMI_RANK": "{rank}", "PMI_SIZE": "2"}, "PMI_SIZE=2 states 2 ranks, but MPI.COMM_WORLD has size 1."),
    ("comm", STEP, "SLURM_STEP_NUM_TASKS=2 states 2 ranks, but MPI.COMM_WORLD has size 1."),
    (
      "join",
      {"PMI_SIZE": "2", "PMI_RANK": "{rank}", "PMIX_RANK": "2"},
      "PMIX_RANK=2 states at least 3 ranks, but PMI_SIZE states 2.",
    ),
  ],
)
def test_ranks_that_would_train_alone_are_refused(way, variables, says):
  """Processes that another launcher has started, of which MPI knows nothing."""
  program = "import jaxsparse as js; from jaxsparse import launch; "
  program += {"join": "launch.join()", "comm": "js.MpiComm()"}[way] + "; print('trains')"
  ranks = [
    subprocess.Popen(
      [sys.executable, "-c", program],
      env=outside() | {name: value.format(rank=rank) for name, value in variables.items()},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for rank in range(2)
  ]
  for rank in ranks:
    printed, error = rank.communicate(timeout=120)
    assert (rank.returncode, printed) == (1, "")
    assert f"RuntimeError: {WAYS_TO_JOIN[way]}: {says} " in error


def test_ranks_of_srun_join_without_mpi():
  """Also where Slurm has set variables of PMI and PMIx, and MPI would count one rank."""
  shared = STEP | {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_NODELIST": "localhost",
    "PMI_SIZE": "2",
    "JAX_COORDINATOR_PORT": str(free_port()),
    "JAX_PLATFORMS": "cpu",
  }
  ranks = [
    subprocess.Popen(
      [sys.executable, str(RANKS), "quiet", "processes", "none"],
      env=outside() | shared | dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "PMI_RANK", "PMIX_RANK"), str(rank)),
      stdout=subprocess.PIPE,
      text=True,
    )
    for rank in range(2)
  ]
  assert [rank.communicate(timeout=120)[0] for rank in ranks] == ["2.0\n", ""]


def of(prefix, rank, size):
  return {f"{prefix}_RANK": str(rank), f"{prefix}_SIZE": str(size)}


def step(tasks):
  return {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(tasks)}


OPEN_MPI, RUN = "OMPI_COMM_WORLD", {"JAXSPARSE_RANK": "0", "JAXSPARSE_RANKS": "3", "JAXSPARSE_COORDINATOR": "a:1"}


@pytest.mark.parametrize(
  ("variables", "found"),
  [
    ({}, []),
    ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, []),  # a batch script
    (step(1) | {"SLURM_NTASKS": "1", "PMIX_RANK": "0"} | of("PMI", 0, 1), []),  # srun --pty
    (step(8) | {"SLURM_NTASKS": "8", "PMIX_RANK": "7"}, ["SLURM_STEP_NUM_TASKS=8"]),
    (step(8) | of("PMI", 7, 8), ["SLURM_STEP_NUM_TASKS=8"]),
    (step(8) | of("PMI", 0, 1), ["SLURM_STEP_NUM_TASKS=8"]),  # srun in a shell that PMI has started
    (step(2) | of(OPEN_MPI, 5, 60) | {"PMIX_RANK": "5"}, ["OMPI_COMM_WORLD_SIZE=60", "PMIX_RANK=5"]),  # daemons by srun
    (step(2) | of("PMI", 5, 60), ["PMI_SIZE=60"]),
    (of(OPEN_MPI, 0, 1), ["OMPI_COMM_WORLD_SIZE=1"]),
    (of(OPEN_MPI, 0, 4) | of("PMI", 0, 1), ["OMPI_COMM_WORLD_SIZE=4"]),
    (step(1) | {"SLURM_NTASKS": "8"}, []),  # the shell of salloc
    (step("") | {"SLURM_NTASKS": "8"}, ["SLURM_NTASKS=8"]),
    ({"PMI_SIZE": "2"}, []),
    (of("PMI", "", ""), []),
    (of("PMI", 3, ""), ["PMI_RANK=3"]),
    ({"PMIX_RANK": "3"}, ["PMIX_RANK=3"]),
    (RUN | of(OPEN_MPI, 1, 2) | step(8), ["JAXSPARSE_RANKS=3"]),
    ({"JAXSPARSE_RANKS": "3"} | of(OPEN_MPI, 1, 3), ["JAXSPARSE_RANKS=3", "OMPI_COMM_WORLD_SIZE=3"]),
  ],
)
def test_the_inner_launcher_states_the_number_of_ranks(monkeypatch, variables, found):
  monkeypatch.setattr(os, "environ", outside() | variables)
  stated = environment.read_counts()
  assert [str(one).split()[0] for one in stated] == found
  assert launch.is_rank() == bool(found)
  environment.check_consistent("a rank", stated)


@pytest.mark.parametrize(
  ("variables", "message"),
  [
    (of(OPEN_MPI, 0, 4) | of("PMI", 0, 2), "PMI_SIZE=2 states 2 ranks, but OMPI_COMM_WORLD_SIZE states 4. "),
    (of("PMI", 0, 2) | {"PMIX_RANK": "2"}, "PMIX_RANK=2 states at least 3 ranks, but PMI_SIZE states 2. "),
  ],
)
def test_launchers_that_state_different_numbers_are_refused(monkeypatch, variables, message):
  monkeypatch.setattr(os, "environ", outside() | variables)
  with pytest.raises(RuntimeError, match=f"^a rank: {message}Unset "):
    environment.check_consistent("a rank", environment.read_counts())


@pytest.mark.parametrize(("rank", "size", "named"), [("0", "two", "PMI_SIZE='two'"), ("-1", "", "PMI_RANK='-1'")])
def test_variables_without_a_number_are_named(monkeypatch, rank, size, named):
  monkeypatch.setattr(os, "environ", outside() | of("PMI", rank, size))
  with pytest.raises(ValueError, match=f"^{named} is not a number, .*: unset it$"):
    environment.read_counts()


class _Mpi:
  """An MPI that counts one rank."""

  Get_library_version = staticmethod(lambda: "MPICH Version: 4")
  COMM_WORLD = types.SimpleNamespace(Get_size=lambda: 1)


@pytest.mark.parametrize(
  ("who", "variables", "ends"),
  [
    ("js.MpiComm()", of("PMI", 1, 4), r"call jaxsparse.launch.join\(\) and start .* --ranks=4"),
    (environment.JOIN, of("PMI", 1, 4), "Without MPI, start .* --ranks=4"),
    (environment.JOIN, {"PMIX_RANK": "3"}, "Without MPI, start .* --ranks=N"),
  ],
)
def test_advice_fits_who_asks_and_what_is_known(monkeypatch, who, variables, ends):
  monkeypatch.setattr(os, "environ", outside() | variables)
  with pytest.raises(RuntimeError, match=f"{ends}$"):
    environment.check_mpi(who, environment.read_counts(), _Mpi)
