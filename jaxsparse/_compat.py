"""Every difference between the JAX versions we support, and nothing else."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

AxisName = str | tuple[str, ...]


def auto_mesh(mesh: Mesh) -> Mesh:
  """`mesh` with Auto axes: `jax.make_mesh` makes Explicit ones by default, which shard_map rejects for plain inputs."""
  return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def abstract_mesh(axis: str, size: int) -> AbstractMesh:
  """A mesh of `size` workers that are not there: enough to trace."""
  return AbstractMesh((size,), (axis,), axis_types=(AxisType.Auto,))


def shard_map(function: Callable, mesh: Mesh | AbstractMesh, in_specs: Any, out_specs: Any) -> Callable:
  """`jax.shard_map` without replication checks: a total made of ppermutes is typed device-varying, though it is not."""
  return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def is_summed_over(axis: AxisName, x: jax.Array) -> bool:
  """Whether x, inside a shard_map that checks replication, is typed as the same on all workers of `axis`."""
  axes = {axis} if isinstance(axis, str) else set(axis)
  return axes <= _varying(jax.lax.axis_index(axis)) and not axes & _varying(x)


def _varying(x: jax.Array) -> frozenset[str]:
  """The axes that x is typed as varying over: `.vma` of a type in older versions, `.manual_axis_type` since."""
  kind = jax.typeof(x)
  return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma
