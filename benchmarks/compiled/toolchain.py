"""The devices to compile for, on a machine that has none."""

import importlib.util
import os
import pathlib
from typing import Any

import jax
from absl import flags
from jax.experimental import topologies

# what is defined here is a flag of the benchmark that asks for it
flags.disclaim_key_flags()

_H100 = pathlib.Path(__file__).with_name("h100.txtpb")
TOPOLOGIES = {"cuda": "1x1x8", "tpu": "v5e:2x4"}  # of CUDA slices x hosts x devices


def prepare() -> None:
  """Sets the environment in which XLA compiles for CUDA and TPU, before JAX has devices."""
  jax.config.update("jax_platforms", "cpu")
  os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
  try:
    spec = importlib.util.find_spec("nvidia.cuda_nvcc")
  except ModuleNotFoundError:
    spec = None
  if spec and spec.submodule_search_locations:
    toolkit = spec.submodule_search_locations[0]
    os.environ["PATH"] = f"{toolkit}/bin:{os.environ['PATH']}"  # of ptxas
    # kernels are tuned on a device only
    flags = f"--xla_gpu_cuda_data_dir={toolkit} --xla_gpu_autotune_level=0"
    os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}"


def define_platform() -> flags.FlagHolder[str]:
  """The flag --on: the CPUs of this machine, or a platform that need not be there."""
  choices = ["cpu", *TOPOLOGIES]
  return flags.DEFINE_enum("on", "cpu", choices, "Where the programs would run.")


def devices_on(platform: str, cpus: int = 1) -> list[Any]:
  """So many CPUs of this machine, or the devices of a platform's topology; before JAX has devices."""
  if platform == "cpu":
    jax.config.update("jax_num_cpu_devices", cpus)
    return jax.devices()
  prepare()
  return devices(platform, TOPOLOGIES[platform])


def devices(platform: str, topology: str) -> list[Any]:
  """The devices of a topology.

  Raises:
    RuntimeError: where JAX's compiler for the platform is not installed.
  """
  options = {
    "cuda": {"target_config": _H100.read_text(), "topology": topology},
    "tpu": {"topology_name": topology},
  }
  try:
    return list(
      topologies.get_topology_desc(platform=platform, **options[platform]).devices
    )
  except (NotImplementedError, RuntimeError, ValueError) as error:
    raise RuntimeError(
      f"no devices {topology} of {platform} to compile for, run `make accelerators`: {error}"
    ) from error
