"""The engine of a mesh whose workers have several devices: arrays keep the shardings inside that they come with.

A program is mapped over the axis of the workers, and the compiler partitions it along the other axes. Arguments that
lie on the mesh keep their shardings, and so do the results that replace them; others are replicated inside.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxsparse import _compat
from jaxsparse._compat import AxisName, names_of
from jaxsparse.train.engine import Engine, _OnMesh, engine_of, is_spec
from jaxsparse.types import Comm

_ARGUMENTS = ("params", "state", "batch", "argument ")  # of a step


def training_engine(where: Mesh | Comm, axis: AxisName) -> Engine:
  """The engine of `js.init` and of training steps: that of `engine_of`, where a worker has devices `_ShardedMesh`.

  Raises: as `engine_of`.
  """
  engine = engine_of(where, axis)
  if isinstance(where, Mesh) and math.prod(where.shape[name] for name in engine.others) > 1:
    return _ShardedMesh(where, axis)
  return engine


class _ShardedMesh(_OnMesh):
  """Workers along an axis of a mesh, with devices along the other axes.

  Attributes:
    inside: names of the axes inside a worker.
  """

  def __init__(self, mesh: Mesh, axis: AxisName):
    super().__init__(mesh, axis)
    self.inside, self.others = self.others, ()
    self.axes = {name: mesh.shape[name] for name in names_of(axis)}
    self._alike: dict[Any, bool] = {mesh: True}
    self._known: dict[Any, NamedSharding] = {}

  @property
  def flat(self) -> Engine:
    return _OnMesh(self._mesh, self.axis)

  @contextlib.contextmanager
  def typed(self) -> Iterator[Engine]:
    devices = self._mesh.devices
    explicit = Mesh(devices, self._mesh.axis_names, axis_types=(AxisType.Explicit,) * devices.ndim)
    with jax.set_mesh(explicit):
      yield _ShardedMesh(explicit, self.axis)

  def map(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    specs = (self._of_workers(in_specs), self._of_workers(out_specs))
    partly = _compat.partly_mapped if _compat.has_explicit_axes(self._mesh) else _compat.shard_map
    return partly(function, self._mesh, *specs, names_of(self.axis))

  def jit(
    self, worker: Callable, in_specs: Any, out_specs: Any, donate: Any = (), options: Any = None, shardings: Any = None
  ) -> Any:
    mapped = self.map(worker, in_specs, out_specs)
    arguments, results = shardings or (self._shardings(in_specs), self._shardings(out_specs))
    return jax.jit(
      mapped, in_shardings=arguments, out_shardings=results, donate_argnums=donate, compiler_options=options
    )

  def shardings(self, tree: Any, specs: Any) -> Any:
    every = jax.tree.broadcast(specs, tree, is_leaf=is_spec)
    known = self._known

    def sharding_of(path: Any, leaf: Any, spec: PartitionSpec) -> NamedSharding:
      key = getattr(leaf, "sharding", None), spec, np.ndim(leaf)
      if isinstance(leaf, jax.core.Tracer):
        return self._sharding(path, leaf, spec)
      if key not in known:  # runs in every step, for every leaf
        known[key] = self._sharding(path, leaf, spec)
      return known[key]

    return jax.tree_util.tree_map_with_path(sharding_of, tree, every)

  def place(self, tree: Any, specs: Any) -> Any:
    return self._put(tree, jax.tree.leaves(self.shardings(tree, specs)))

  def _sharding(self, path: Any, leaf: Any, spec: PartitionSpec) -> NamedSharding:
    """The sharding of `spec`, and where that says nothing of the axes inside, along these that of the leaf itself."""
    own, workers = self._spec_of(leaf), self._of_workers(spec)
    if own is not None and spec == workers:
      mine = self._of_workers(own)
      if not spec and _compat.trimmed(mine):
        raise ValueError(
          f"{_ARGUMENTS[path[0].idx]}{jax.tree_util.keystr(path[1:])} of shape {leaf.shape} is sharded as {own}, along "
          f"{self.axis!r}, the axis of the workers, each of which needs all of it: choose shards along {self.inside}"
        )
      if _compat.trimmed(mine) == spec:
        spec = own
    if _compat.has_explicit_axes(self._mesh):  # as in the types of results, or the next step would compile again
      spec = PartitionSpec(*spec, *[None] * (np.ndim(leaf) - len(spec)))
    return NamedSharding(self._mesh, spec)

  def _spec_of(self, leaf: Any) -> PartitionSpec | None:
    """The spec of a leaf on this mesh; None for one that lies elsewhere."""
    sharding = jax.typeof(leaf).sharding if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
      return None
    if sharding.mesh not in self._alike:
      alike = sharding.mesh.shape == self._mesh.shape
      if alike and isinstance(sharding.mesh, Mesh):  # not an abstract one, as under a trace
        alike = bool((sharding.mesh.devices == self._mesh.devices).all())
      self._alike[sharding.mesh] = alike
    return sharding.spec if self._alike[sharding.mesh] else None

  def _of_workers(self, specs: Any) -> Any:
    """Specs without the names of the axes inside."""
    return jax.tree.map(lambda spec: _compat.without_axes(spec, self.inside), specs, is_leaf=is_spec)
