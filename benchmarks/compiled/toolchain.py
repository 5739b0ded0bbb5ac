"""The devices to compile for, on a machine that has none: import this before JAX."""

import importlib.util
import os
import pathlib

_H100 = pathlib.Path(__file__).with_name("h100.txtpb")
TOPOLOGIES = {"cuda": "1x1x8", "tpu": "v5e:2x4"}  # of CUDA: slices x hosts x devices of one


def prepare() -> None:
  """Sets the environment in which JAX compiles for CUDA and TPU; JAX must not be imported yet."""
  os.environ |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "-1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # asks no metadata server of a cloud
  if spec := importlib.util.find_spec("nvidia.cuda_nvcc"):
    toolkit = next(iter(spec.submodule_search_locations))
    os.environ["PATH"] = f"{toolkit}/bin:{os.environ['PATH']}"  # ptxas
    flags = f"--xla_gpu_cuda_data_dir={toolkit} --xla_gpu_autotune_level=0"  # no device to tune kernels on
    os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}"


def devices(platform: str, topology: str) -> list:
  """The devices of a topology, which can be compiled for, but not run on."""
  from jax.experimental import topologies

  options = {"cuda": {"target_config": _H100.read_text(), "topology": topology}, "tpu": {"topology_name": topology}}
  return topologies.get_topology_desc(platform=platform, **options[platform]).devices
