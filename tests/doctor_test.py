"""The doctor finds what works, ends what hangs, and names a fix for whatever is wrong."""

import json
import os
import subprocess
import sys

import pytest

from jaxsparse import doctor

KEPT = "glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=17179869184:glibc.malloc.arena_max=1"


def examined(*arguments, **environment):
  command = [sys.executable, "-m", "jaxsparse.doctor", *arguments]
  return subprocess.run(
    command,
    env=os.environ | environment,
    capture_output=True,
    text=True,
    timeout=280,
    check=False,
  )


@pytest.mark.long
def test_this_machine():
  done = examined(
    "--json", GLIBC_TUNABLES=f"{KEPT}:glibc.malloc.mmap_threshold=0x10000000"
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert not done.stderr
  found = {finding["what"]: finding for finding in json.loads(done.stdout)}
  for engine in ("devices", "sim", "processes", "mpi"):
    assert "2 workers on" in found[f"engine {engine}"]["detail"]
  assert (
    "4 devices of 2 processes have the sums of psum_scatter"
    in found["reduce-scatter"]["detail"]
  )
  assert {
    "versions",
    "JAX",
    "MPI",
    "mpirun",
    "MPI and GPUs",
    "memory of this process",
  } <= set(found)
  assert all(finding["status"] == "ok" or finding["fix"] for finding in found.values())
  assert found["memory of this process"]["status"] == "ok"


@pytest.mark.long
def test_what_hangs_is_ended():
  done = examined("--timeout=0.5")  # less than any probe takes
  assert done.returncode == 1
  assert not done.stderr
  found = done.stdout.replace("\n     ", "\t").splitlines()
  for engine, said, fix in (
    (
      "JAX",
      "finds no devices: ended after 0.5 s",
      "test without the accelerator: JAX_PLATFORMS=cpu",
    ),
    (
      "engine sim",
      "ended after 0.5 s",
      "--timeout=2 on a slow machine; or unset JAX_PLATFORMS and XLA_FLAGS; ",
    ),
    (
      "engine processes",
      "exit status 1\terror: ",
      "--timeout=2 on a slow machine; or let processes of this host meet",
    ),
    (
      "MPI",
      "mpi4jax is installed and cannot be loaded: ended after 0.5 s",
      "build mpi4jax for the JAX and the MPI",
    ),
  ):
    (line,) = [line for line in found if line.startswith(f"FAIL {engine}: {said}")]
    assert f"\tfix: {fix}" in line
    assert ("ranks 0, 1" in line) == ("processes" in engine)


def test_a_probe_that_fails_is_shown_by_its_last_lines(monkeypatch, tmp_path):
  monkeypatch.setenv("JAX_PLATFORMS", "nonsense")
  (found,) = doctor.check_devices(60)
  assert (found.status, found.what, found.fix) == (
    "FAIL",
    "JAX",
    "unset JAX_PLATFORMS, which is 'nonsense'",
  )
  assert found.detail.startswith("finds no devices: exit status 1\n")
  assert (
    "RuntimeError: Unable to initialize backend 'nonsense'"
    in found.detail.splitlines()[-1]
  )
  assert len(found.detail.splitlines()) < 20
  (tmp_path / "mpi4jax.py").write_text(
    "raise ImportError('libmpi.so.40: cannot open shared object file')"
  )
  monkeypatch.setenv(
    "PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
  )
  (found,) = doctor.check_mpi(60)
  assert found.status == "FAIL"
  assert found.detail.endswith(
    "ImportError: libmpi.so.40: cannot open shared object file"
  )
  assert "pip cache remove mpi4jax" in found.fix


@pytest.mark.parametrize(
  ("tunables", "fix"),
  [
    (
      "",
      "export GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=17179869184:glibc.malloc.trim_",
    ),
    (
      "glibc.malloc.check=1:glibc.malloc.hugetlb=0",
      "GLIBC_TUNABLES=glibc.malloc.check=1:glibc.malloc.hugetlb=1:",
    ),
    (
      f"{KEPT}:glibc.malloc.mmap_threshold=0",
      f"{KEPT}:glibc.malloc.mmap_threshold=17179869184 ",
    ),
  ],
)
def test_settings_of_glibc_that_are_missing(monkeypatch, tunables, fix):
  monkeypatch.setenv("GLIBC_TUNABLES", tunables)
  *_, found = doctor.check_memory()
  assert found.status == "warn"
  assert fix in found.fix


@pytest.mark.parametrize(
  ("forced", "cuda", "aware", "status", "said"),
  [
    ("1", True, True, "ok", "MPI4JAX_USE_CUDA_MPI lets it"),
    ("1", True, False, "FAIL", "it would crash"),
    ("1", False, None, "warn", "may not read it"),
    ("", True, True, "ok", "export MPI4JAX_USE_CUDA_MPI=1"),
    ("", True, False, "ok", "mpi4jax copies"),
    ("", False, True, "ok", "host staging"),
  ],
)
def test_messages_of_gpus(monkeypatch, forced, cuda, aware, status, said):
  monkeypatch.setenv("MPI4JAX_USE_CUDA_MPI", forced)
  found = doctor.check_gpu_messages(cuda, aware)
  assert found.status == status
  assert said in found.detail
  assert found.fix == ("" if status == "ok" else "unset MPI4JAX_USE_CUDA_MPI")


def test_a_rank_is_no_patient(monkeypatch, capsys):
  for name, value in {"RANK": "0", "SIZE": "2"}.items():
    monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
  monkeypatch.setattr(sys, "argv", ["jaxsparse.doctor"])
  with pytest.raises(SystemExit, match="2"):
    doctor.main()
  assert "start the doctor by itself" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("wanted", "fix"), [("cpu", "unset JAX_PLATFORMS, which is 'cpu'"), ("", "cuda13")]
)
def test_gpus_that_jax_does_not_use(wanted, fix, monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", wanted)
  answer = {"platform": "cpu", "devices": "2 CPUs"}
  monkeypatch.setattr(doctor, "_run_probe", lambda *_: answer)
  monkeypatch.setattr(doctor, "list_gpus", lambda: ["H100", "A100"])
  (finding,) = doctor.check_devices(timeout=1.0)
  assert finding.status == "warn"
  assert finding.detail == "2 CPUs, though NVIDIA GPUs are here: H100, A100"
  assert fix in finding.fix


@pytest.mark.parametrize("option", ["--json", "--timeout=7"])
@pytest.mark.parametrize(("status", "code"), [("warn", 0), ("FAIL", 1)])
def test_all_findings_are_printed_and_a_failure_is_the_exit_status(
  option, status, code, monkeypatch, capsys
):
  findings = [
    doctor.Finding("ok", "versions", "all"),
    doctor.Finding(status, "MPI", "none", "install it"),
  ]
  monkeypatch.setattr(doctor, "_find", lambda _: iter(findings))
  monkeypatch.setattr(sys, "argv", ["doctor", option])
  with pytest.raises(SystemExit) as ended:
    doctor.main()
  assert int(ended.value.code) == code
  said = capsys.readouterr().out
  if option == "--json":
    assert json.loads(said) == [finding._asdict() for finding in findings]
  else:
    assert said == "".join(f"{finding}\n" for finding in findings)
