"""What launchers set for their ranks, as recorded or documented, and what `join` makes of it."""

import http.server
import os
import pathlib
import subprocess
import sys
import threading
import types

import jax
import pytest

from jaxsparse import launch
from jaxsparse.launch import launchers
from jaxsparse.launch.start import find_program, free_port
from tests.environment_test import outside, run_two

# of task 5 of `srun -N2 -n8`, Slurm 23; without what concerns neither tasks nor nodes
SRUN = {
  "SLURM_JOB_ID": "24471977", "SLURM_JOB_NODELIST": "sh04-16n[09-10]", "SLURM_JOB_NUM_NODES": "2", "SLURM_LOCALID": "1",
  "SLURM_MPI_TYPE": "pmix", "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_NPROCS": "8", "SLURM_NTASKS": "8",
  "SLURM_PROCID": "5", "SLURM_SRUN_COMM_HOST": "10.18.0.63", "SLURM_STEPID": "0", "SLURM_STEP_ID": "0",
  "SLURM_STEP_NODELIST": "sh04-16n[09-10]", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "8",
  "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_TASK_PID": "26431", "SLURMD_NODENAME": "sh04-16n10",
  "PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.pmix.24471977.0", "PMI_SHARED_SECRET": "1",
}  # fmt: skip
OPEN_MPI_5 = {  # of rank 1 of `mpirun -n 2`, Open MPI 5.0.11
  "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1",
  "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_TOOL_NAME": "mpirun", "OMPI_UNIVERSE_SIZE": "2",
  "OMPI_VERSION": "5.0.11", "PMIX_NAMESPACE": "prterun-vm-24156@1", "PMIX_RANK": "1", "PRTE_LAUNCHED": "1",
  "PMIX_SERVER_URI41": "prterun-vm-24156@0.0;tcp4://127.0.0.1:41581",
}  # fmt: skip
OPEN_MPI_4 = {  # of rank 0 of 4 on two hosts
  "OMPI_MCA_ess": "env", "OMPI_MCA_orte_ess_num_procs": "4", "OMPI_MCA_orte_app_num": "0", "OMPI_UNIVERSE_SIZE": "4",
  "OMPI_MCA_orte_hnp_uri": "195559424.0;tcp://198.177.146.70,10.10.10.4:53997", "OMPI_MCA_orte_ess_jobid": "195559425",
  "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0",
  "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}  # fmt: skip
# of the last rank of `torchrun --nnodes=2 --nproc_per_node=4`, PyTorch 2.13
TORCHRUN = {
  "LOCAL_RANK": "3", "RANK": "7", "GROUP_RANK": "1", "ROLE_RANK": "7", "ROLE_NAME": "default", "LOCAL_WORLD_SIZE": "4",
  "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2", "ROLE_WORLD_SIZE": "8", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500",
  "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "True",
  "TORCHELASTIC_RUN_ID": "82cc045e-a1d1-42cf-959f-0abe79084961", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
  "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
}  # fmt: skip
PMIX = {  # of rank 1 of `prterun -n 2`, which states no number
  "PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-vm-24156@1", "PRTE_LAUNCHED": "1", "PMIX_VERSION": "5.0.11",
}  # fmt: skip
HYDRA = {  # of rank 1 of `mpiexec -n 2`, MPICH 5
  "HYDI_CONTROL_FD": "7", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1", "PMI_FD": "11", "PMI_HOSTNAME": "vm",
  "PMI_RANK": "1", "PMI_SIZE": "2",
}  # fmt: skip
PODS = {
  "KUBERNETES_SERVICE_HOST": "10.0.0.1",
  "KUBERNETES_PORT": "tcp://10.0.0.1:443",
  "JOB_COMPLETION_INDEX": "3",
}
# of the last host of a JobSet of two slices of two hosts; JAX itself sets the last one
GKE = PODS | {
  "TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "job-slice-1-0.job,job-slice-1-1.job", "TPU_ACCELERATOR_TYPE": "v5p-8",
  "TPU_TOPOLOGY": "2x2x2", "TPU_SKIP_MDS_QUERY": "true", "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1",
  "MEGASCALE_COORDINATOR_ADDRESS": "job-slice-0-0.job", "MEGASCALE_PORT": "8080", "TPU_ML_PLATFORM": "JAX",
}  # fmt: skip
BY_HAND = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "::1", "MASTER_PORT": "29500"}
OURS = {
  "JAXSPARSE_RANK": "1",
  "JAXSPARSE_RANKS": "3",
  "JAXSPARSE_COORDINATOR": "127.0.0.1:4000",
}


def known(address, ranks, rank, gpu=None):
  """What JAX is told where it shall detect nothing."""
  own = {} if gpu is None else {"local_device_ids": gpu}
  place = {"coordinator_address": address, "num_processes": ranks, "process_id": rank}
  if address.startswith(("127.", "[::1]")):
    place["coordinator_bind_address"] = address
  return {"cluster_detection_method": "deactivate"} | place | own


@pytest.fixture
def told(monkeypatch):
  """The launcher that `join` takes in an environment, and what it tells JAX."""

  def tell(variables):
    monkeypatch.setattr(os, "environ", outside() | variables)
    launcher, counts = launchers.find()
    launchers.check_agreement(launcher, counts)
    return launcher.name, launcher.options(counts)

  return tell


@pytest.mark.parametrize(
  ("variables", "name", "options"),
  [
    (OURS | SRUN, "jaxsparse.launch", known("127.0.0.1:4000", 3, 1)),
    (SRUN, "Slurm", {"cluster_detection_method": "slurm", "num_processes": 8}),
    (SRUN | {"WORLD_SIZE": "8", "RANK": "5"}, "Slurm", {"cluster_detection_method": "slurm", "num_processes": 8}),
    (OPEN_MPI_5, "MPI", known("127.0.0.1:65069", 2, 1, 1)),
    (OPEN_MPI_5 | {"JAX_LOCAL_DEVICE_IDS": "0"}, "MPI", known("127.0.0.1:65069", 2, 1)),
    (
      OPEN_MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "JAX_COORDINATOR_ADDRESS": "a:1"}, "MPI", known("a:1", 2, 1, 1)
    ),
    (OPEN_MPI_4, "MPI", {"cluster_detection_method": "ompi"}),
    (TORCHRUN, "torchrun", known("node-0:29501", 8, 7, 3)),
    # srun starts it once a node
    (SRUN | TORCHRUN, "torchrun", known("node-0:29501", 8, 7, 3)),
    (TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}, "torchrun", known("node-0:29500", 8, 7, 3)),
    (BY_HAND, "RANK and WORLD_SIZE", known("[::1]:29500", 4, 1)),
    (PODS | BY_HAND | {"JOB_COMPLETION_INDEX": "1"}, "RANK and WORLD_SIZE", known("[::1]:29500", 4, 1)),
    (GKE, "GKE with TPUs", {"cluster_detection_method": "gketpu"}),
    ({"TPU_ML_PLATFORM": "JAX"}, "Cloud TPU", {"cluster_detection_method": "gcetpu"}),
  ],
)  # fmt: skip
def test_each_launcher_is_recognized(told, variables, name, options):
  assert told(variables) == (name, options)


@pytest.mark.parametrize(
  "variables", [PMIX, HYDRA, OPEN_MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}]
)
def test_mpi_on_several_hosts_is_asked_for_its_ranks(told, monkeypatch, variables):
  """By mpi4py, unless that was built for another MPI or is not there."""
  world = types.SimpleNamespace(Get_size=lambda: 2)
  mpi = types.SimpleNamespace(COMM_WORLD=world, Get_library_version=lambda: "MPICH 4.2")
  monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=mpi))
  assert told(variables) == ("MPI", {"cluster_detection_method": "mpi4py"})
  world.Get_size = lambda: 1
  with pytest.raises(
    RuntimeError,
    match="2 ranks, but MPI.COMM_WORLD has size 1. .*mpi4py was built for MPICH",
  ):
    told(variables)
  monkeypatch.setitem(sys.modules, "mpi4py", None)
  with pytest.raises(
    ImportError,
    match="2 ranks, but mpi4py does not load: .*or give all ranks of Open MPI JAX_COOR",
  ):
    told(variables)


def ray_train(size, rank):
  """What a worker of Ray Train has imported."""
  context = types.SimpleNamespace(
    get_world_size=lambda: size, get_world_rank=lambda: rank
  )
  return types.SimpleNamespace(get_context=lambda: context)


def test_a_worker_of_ray_train_gets_the_address_of_the_first_one(told, monkeypatch):
  sent = []
  collective = types.SimpleNamespace(
    broadcast_from_rank_zero=lambda own: sent.append(own) or own or "10.0.0.1:4000"
  )
  ray = types.SimpleNamespace(
    util=types.SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
  )
  monkeypatch.setitem(sys.modules, "ray", ray)
  monkeypatch.setitem(sys.modules, "ray.train.collective", collective)
  monkeypatch.setitem(sys.modules, "ray.train", ray_train(2, 1))
  assert told({"RAY_JOB_ID": "01000000"}) == ("Ray Train", known("10.0.0.1:4000", 2, 1))
  monkeypatch.setitem(sys.modules, "ray.train", ray_train(2, 0))
  _, options = told({"RAY_JOB_ID": "01000000"})
  assert sent == [None, options["coordinator_address"]]
  assert options["coordinator_address"].startswith("10.0.0.1:")
  for outside_of_training in (
    ray_train(None, 0),
    types.SimpleNamespace(get_context=lambda: (_ for _ in ()).throw(RuntimeError())),
  ):
    monkeypatch.setitem(sys.modules, "ray.train", outside_of_training)
    assert launch.join() is None
  # as Ray has it on GPUs and TPUs
  monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
  assert launch.join() == "jax.distributed.initialize"


def without(variables, *names):
  return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
  ("variables", "message"),
  [
    (
      {"RANK": "3"},
      "RANK=3 states at least 4 ranks, without WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Set all of",
    ),
    (
      {"WORLD_SIZE": "2"},
      "WORLD_SIZE=2 states 2 ranks, without RANK, .*, or unset WORLD_SIZE$",
    ),
    (
      without(BY_HAND, "MASTER_PORT"),
      "WORLD_SIZE=4 states 4 ranks, without MASTER_PORT. Set all of",
    ),
    (BY_HAND | {"RANK": "4"}, "RANK=4, WORLD_SIZE=4, MASTER_PORT=29500: no rank of 4"),
    (
      SRUN | {"WORLD_SIZE": "4"},
      "WORLD_SIZE=4 states 4 ranks, but SLURM_STEP_NUM_TASKS states 8. Unset WORLD_SIZE if",
    ),
    (SRUN | {"RANK": "0"}, "SLURM_PROCID=5, but RANK=0: unset RANK$"),
    (
      OPEN_MPI_5 | {"WORLD_SIZE": "8"},
      "WORLD_SIZE=8 states 8 ranks, but OMPI_COMM_WORLD_SIZE states 2",
    ),
    (
      OPEN_MPI_5 | {"PMI_RANK": "1", "PMI_SIZE": "4"},
      "PMI_SIZE=4 states 4 ranks, but OMPI_COMM_WORLD_SIZE states 2",
    ),
    (
      GKE | {"WORLD_SIZE": "2"},
      "WORLD_SIZE=2 states 2 ranks, but TPU_WORKER_HOSTNAMES states 4",
    ),
    (
      without(SRUN, "SLURM_STEP_NODELIST"),
      "SLURM_STEP_NUM_TASKS=8 states 8 ranks, without SLURM_STEP_NODELIST",
    ),
    (
      without(GKE, "TPU_WORKER_ID"),
      "TPU_WORKER_HOSTNAMES=.* states 4 ranks, without TPU_WORKER_ID",
    ),
    (
      without(GKE, "TPU_ML_PLATFORM"),
      "TPU_.* states 4 ranks, without TPU_ML_PLATFORM. .* install jax\\[tpu\\]",
    ),
    (
      PODS,
      "JOB_COMPLETION_INDEX=3 states at least 4 ranks, but the package kubernetes is missing. Install jax\\[k8s\\]",
    ),
  ],
)
def test_what_contradicts_itself_is_refused_before_anything_starts(
  monkeypatch, variables, message
):
  monkeypatch.setattr(os, "environ", outside() | variables)
  monkeypatch.setattr(launch.rank, "_arrive", lambda: None)
  with pytest.raises(
    (RuntimeError, ImportError), match=rf"^jaxsparse.launch.join\(\): {message}"
  ):
    launch.join()


@pytest.mark.parametrize(
  "variables",
  [
    {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
    {"WORLD_SIZE": "1", "RANK": "0"},
    {"JOB_COMPLETION_INDEX": "3"},
    without(PODS, "JOB_COMPLETION_INDEX"),
    {
      "TPU_WORKER_HOSTNAMES": "localhost",
      "TPU_WORKER_ID": "0",
      "TPU_ML_PLATFORM": "JAX",
    },
    {"TPU_ML_PLATFORM": "JAX", "TPU_SKIP_MDS_QUERY": "1"},
    without(SRUN, "SLURM_STEP_ID", "PMIX_RANK"),
  ],
)
def test_a_process_that_no_launcher_started_does_not_join(monkeypatch, variables):
  monkeypatch.setattr(os, "environ", outside() | variables)
  assert launch.join() is None
  assert not launch.is_rank()


# What a rank prints: the launcher, its rank, the sum over all ranks of 1 + rank; the
# log line goes to standard error.
SUMS = """
import jax
from absl import logging
logging.set_verbosity(logging.INFO)
from jaxsparse import launch
name = launch.join(timeout=float("inf"))
rows = jax.make_array_from_process_local_data(
  jax.sharding.NamedSharding(jax.make_mesh((jax.device_count(),), ("ranks",)), jax.P("ranks")),
  jax.numpy.full(1, 1.0 + jax.process_index()))
print(name, jax.process_index(), float(jax.jit(lambda x: x.sum())(rows)), sep=", ")
"""
# Just enough of the package for JAX to find a JobSet of two pods.
PACKAGE = """
import builtins, io
from types import SimpleNamespace as New
meta = New(name="job", labels={"job-name": "job", "jobset.sigs.k8s.io/jobset-name": "set"},
           owner_references=[New(controller=True, kind="Job")])
pod, job = New(metadata=meta, spec=New(subdomain=None)), New(metadata=meta, spec=New(parallelism=2))
core = New(list_namespaced_pod=lambda **_: New(items=[pod]))
batch = New(read_namespaced_job=lambda **_: job)
client = New(CoreV1Api=lambda: core, BatchV1Api=lambda: batch, exceptions=New(ApiException=OSError))
config = New(load_incluster_config=lambda: None)
namespace, own = "/var/run/secrets/kubernetes.io/serviceaccount/namespace", builtins.open
builtins.open = lambda file, *how, **more: io.StringIO("default") if file == namespace else own(file, *how, **more)
"""


def own_port(port, taken=0):
  return {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": str(port - taken),
    "WORLD_SIZE": "2",
    "RANK": "{rank}",
  }


@pytest.mark.long
@pytest.mark.parametrize(
  "name",
  ["RANK and WORLD_SIZE", "torchrun", "GKE with TPUs", "a Job of Kubernetes"],
)
def test_ranks_of_recorded_environments_sum(name, tmp_path):
  """Two processes with the variables of a launcher, and all that it starts; on CPU."""
  port = free_port()
  slices = {
    "MEGASCALE_COORDINATOR_ADDRESS": "127.0.0.1",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "{rank}",
  }
  hosts = slices | {
    "TPU_WORKER_HOSTNAMES": "127.0.0.1",
    "TPU_WORKER_ID": "0",
    "JAX_FORCE_TPU_INIT": "1",
  }
  pods = PODS | {
    "JOB_COMPLETION_INDEX": "{rank}",
    "HOSTNAME": "localhost",
    "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
  }
  variables = {
    "RANK and WORLD_SIZE": own_port(port),
    "torchrun": own_port(port, taken=1)
    | {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"},
    "GKE with TPUs": hosts | {"JAX_COORDINATOR_PORT": str(port)},
    "a Job of Kubernetes": pods | {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}"},
  }[name]
  (tmp_path / "kubernetes.py").write_text(PACKAGE)
  for rank, (status, printed, error) in enumerate(
    run_two(["-c", SUMS], variables | {"JAX_PLATFORMS": "cpu"})
  ):
    assert (status, printed) == (0, f"{name}, {rank}, 3.0\n"), error[-3000:]
    assert f"jaxsparse.launch.join(): rank {rank} of 2, by {name} (" in error


class Metadata(http.server.BaseHTTPRequestHandler):
  """Those of hosts of a Cloud TPU: /RANK/…/attributes/NAME."""

  def do_GET(self):
    found = {
      "agent-worker-number": self.path.split("/")[1],
      "worker-network-endpoints": "127.0.0.1,127.0.0.1",
    }
    name = self.path.rpartition("/")[2]
    self.send_response(200 if name in (*found, "tpu-env") else 404)
    self.end_headers()
    self.wfile.write(found.get(name, "").encode())

  def log_message(self, *_):
    pass


@pytest.mark.parametrize("known", [True, False])
def test_hosts_of_a_cloud_tpu_ask_its_metadata(known):
  pytest.importorskip("requests")  # as JAX for TPUs has it
  # JAX forbids the question on a machine without TPUs.
  program = "import os, jax; del os.environ['TPU_SKIP_MDS_QUERY'];" + SUMS
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_port if known else free_port()
    own = {
      "JAX_FORCE_TPU_INIT": "1",
      "JAX_PLATFORMS": "cpu",
      "JAX_COORDINATOR_PORT": str(free_port()),
    }
    ranks = run_two(
      ["-c", program], own | {"GCE_METADATA_IP": f"127.0.0.1:{port}/{{rank}}"}
    )
    server.shutdown()
  for rank, (status, printed, error) in enumerate(ranks):
    if known:
      assert (status, printed) == (0, f"Cloud TPU, {rank}, 3.0\n"), error[-3000:]
      assert f"rank {rank} of 2, by Cloud TPU\n" in error
    else:
      assert status == 1
      assert (
        "RuntimeError: jaxsparse.launch.join(): JAX does not find the run of Cloud TPU: HTTPConn"
        in error
      )


@pytest.mark.skipif(sys.platform != "linux", reason="abstract names of sockets")
def test_a_second_run_on_one_port_is_refused():
  """Also coordinators of JAX that would share the port: ranks of both would train together."""
  address = f"node-0:{free_port()}"
  claim = launchers.claim_port.__wrapped__
  with (
    claim(address),
    pytest.raises(
      RuntimeError, match=rf"rank 0 of another run .* port of {address}: give each run"
    ),
  ):
    claim(address)
  claim(address).close()


@pytest.mark.long
def test_mpirun_by_itself(tmp_path):
  """Without mpi4py, and without our launcher."""
  (tmp_path / "mpi4py.py").write_text("raise ImportError('not here')")
  paths = {
    "PYTHONPATH": f"{tmp_path}:{pathlib.Path(launch.__file__).parents[2]}",
    "JAX_PLATFORMS": "cpu",
  }
  root = dict.fromkeys(
    ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1"
  )
  start = [
    find_program("mpirun"),
    "-n",
    "2",
    "--bind-to",
    "none",
    "--map-by",
    ":OVERSUBSCRIBE",
    sys.executable,
  ]
  command = {
    "capture_output": True,
    "text": True,
    "timeout": 120,
    "check": False,
    "env": outside() | paths | root,
  }
  done = subprocess.run([*start, "-c", SUMS], **command)
  assert sorted(done.stdout.splitlines()) == ["MPI, 0, 3.0", "MPI, 1, 3.0"], (
    done.stderr[-3000:]
  )
  assert (
    "rank 1 of 2, by MPI (OMPI_COMM_WORLD_SIZE=2 states 2 ranks; PMIX_RANK=1 states at least 2 ranks)"
    in done.stderr
  )
