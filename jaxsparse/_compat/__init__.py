"""Differences between the supported versions of JAX, and properties of meshes and tracers that JAX knows."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

# JAX has no public barrier with a time limit.
from jax._src import distributed
from jax.extend import core
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AxisName = str | tuple[str, ...]


def names_of(axis: AxisName) -> tuple[str, ...]:
  """The names of an axis, or of a tuple of axes."""
  return (axis,) if isinstance(axis, str) else axis


def ppermute(
  x: jax.Array, axis: AxisName, pairs: Sequence[tuple[int, int]]
) -> jax.Array:
  """`jax.lax.ppermute` along pairs of workers in the numbering of `jax.lax.axis_index`.

  Over a tuple of axes `axis_index` counts in the order of the tuple and `ppermute` in
  that of the mesh; newer versions reject tuples in another order.
  """
  inner, mesh_number = _in_mesh_order(axis)
  # Pairs number the workers in the order of the tuple, `ppermute` in that of the mesh.
  # `mesh_number` is None where both orders are the same.
  if mesh_number is not None:
    pairs = [
      (int(mesh_number[source]), int(mesh_number[destination]))
      for source, destination in pairs
    ]
  return jax.lax.ppermute(x, inner, pairs)


def all_to_all(rows: jax.Array, axis: AxisName) -> jax.Array:
  """`jax.lax.all_to_all` of rows [P, ...], in the numbering of `jax.lax.axis_index`."""
  inner, mesh_number = _in_mesh_order(axis)
  if mesh_number is None:
    return jax.lax.all_to_all(rows, inner, 0, 0, tiled=True)
  # The row for worker d has to be at index mesh_number[d], and the row from worker w
  # arrives at index mesh_number[w]. The two zeros: rows are split and joined along the
  # leading axis.
  in_mesh_order = rows[np.argsort(mesh_number)]
  return jax.lax.all_to_all(in_mesh_order, inner, 0, 0, tiled=True)[mesh_number]


def _in_mesh_order(axis: AxisName) -> tuple[AxisName, np.ndarray | None]:
  """The names of `axis` in the order of the mesh, and the number along the mesh of each worker.

  Returns:
    (names, numbers): numbers, i64[P], has at index w the number along the mesh of the
    worker whose `axis_index` is w; None where both orders are the same.
  """
  names = names_of(axis)
  order = jax.sharding.get_abstract_mesh().axis_names
  # Under `vmap` an axis is in no mesh, and its order is that of the tuple.
  is_in_mesh = set(names) <= set(order)
  inner = tuple(sorted(names, key=order.index)) if is_in_mesh else names
  if inner == names:
    return axis, None
  sizes = [jax.lax.axis_size(name) for name in inner]
  # Numbers count row by row in the order of the mesh. Transposed to the order of the
  # tuple and flattened, they are in the order of `axis_index`.
  numbers = np.arange(math.prod(sizes)).reshape(sizes)
  return inner, numbers.transpose([inner.index(name) for name in names]).ravel()


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
  """The number of constants and of carried values of a `scan` equation."""
  if "num_consts" in params:
    return params["num_consts"], params["num_carry"]
  # Newer versions of JAX keep lists of the values in place of their numbers.
  consts, carry, _ = params["ft_in"].unpack()
  return len(consts), len(carry)


def inner_jaxprs(params: Mapping[str, Any]) -> Iterator[core.Jaxpr]:
  """The jaxprs in the parameters of an equation: bodies of loops, branches, functions."""
  for value in params.values():
    # Branches of a conditional are a tuple of jaxprs.
    for item in value if isinstance(value, (tuple, list)) else (value,):
      if isinstance(item, (core.Jaxpr, core.ClosedJaxpr)):
        yield item.jaxpr if isinstance(item, core.ClosedJaxpr) else item


# Part of the key of jit's caches, so a program is traced anew for another platform.
_PLATFORM = jax.make_user_context()
_GPUS = ("gpu", "cuda", "rocm")
_PLATFORMS = ("cpu", *_GPUS, "tpu", "any")


def traced_for(platform: str) -> contextlib.AbstractContextManager[None]:
  """Context in which programs are traced for a platform, wherever they are traced.

  jaxsparse has other implementations of some computations for GPUs and TPUs, with the
  same bits. Without this context it traces those for the mesh's devices, or for JAX's
  default device where there is no mesh. They run on other platforms, too, but slower.

  Args:
    platform: "cpu", "gpu", "cuda", "rocm" or "tpu"; or "any" for a program with the
      implementations of all platforms, which takes twice as long to trace: for
      `jax.export` to several platforms.

  Raises:
    ValueError: if the platform is none of these.

  Example:
    >>> import jax, jax.numpy as jnp, jaxsparse as js
    >>> total_of = lambda grads: js.simulate("spardl", grads, density=0.1).total
    >>> with js.traced_for("any"):
    ...   exported = jax.export.export(jax.jit(total_of), platforms=["cpu", "cuda"])(jnp.ones((3, 50)))
    >>> exported.platforms
    ('cpu', 'cuda')
  """
  if platform not in _PLATFORMS:
    raise ValueError(
      f"platform={platform!r}, choose one of {', '.join(map(repr, _PLATFORMS))}"
    )
  return _PLATFORM(platform)


def by_platform(
  *,
  default: Callable[..., Any],
  gpu: Callable[..., Any] | None = None,
  **others: Any,
) -> Callable:
  """The implementation for the platform that is traced for, else `default`; with each an update has the same bits.

  Only this one is traced. Inside `traced_for("any")` the result is a function that
  traces all of them, and the compiler for a device chooses. Arguments of the
  implementations need not be arrays. The comment at each use says what the choice
  gains, mostly CPU time of an update on CPU, or kernels and bytes of an update that is
  compiled for an H100.

  Args:
    default: for platforms without an argument here.
    gpu: for CUDA and ROCm; None for `default`.
    **others: `cpu` or `tpu`.
  """
  branches = others | (dict.fromkeys(_GPUS, gpu) if gpu else {})
  platform = _PLATFORM.value or _platform_here()
  if platform != "any":
    return branches.get(platform, default)

  def choose(*args: Any) -> Any:
    # One partial function for each function, so that JAX makes one branch for CUDA and
    # ROCm.
    functions = (default, *branches.values())
    bound = {way: functools.partial(way, *args) for way in functions}
    # "cuda" and "rocm" are among the branches; JAX has no platform "gpu".
    others = {name: bound[way] for name, way in branches.items() if name != "gpu"}
    return jax.lax.platform_dependent(default=bound[default], **others)

  return choose


def _platform_here() -> str:
  """The platform of the mesh that is traced for, or of the default device."""
  mesh: Any = jax.sharding.get_abstract_mesh()
  config: Any = jax.config  # attributes that type checkers know in some versions only
  # A mesh that is traced for knows its devices; outside of one the default counts.
  device = mesh.abstract_device or config.jax_default_device or jax.default_backend()
  return device if isinstance(device, str) else device.platform


def shard_map(
  function: Callable,
  mesh: Mesh | None,
  in_specs: Any,
  out_specs: Any,
  axes: Sequence[str] = (),
) -> Callable:
  """`jax.shard_map` without its check of replication, which types a total made of ppermutes as device-varying.

  Args:
    function: the program of one device.
    mesh: None for that of the shard_map around it.
    in_specs: of the arguments.
    out_specs: of the results.
    axes: names of the axes to map over; all of them by default. The compiler partitions
      the program along the others.
  """
  return jax.shard_map(
    function,
    mesh=mesh,
    in_specs=in_specs,
    out_specs=out_specs,
    axis_names=set(axes),
    check_vma=False,
  )


def partly_mapped(
  function: Callable, mesh: Mesh, in_specs: Any, out_specs: Any, axes: Sequence[str]
) -> Callable:
  """`shard_map` over `axes` of a mesh whose other axes are Explicit, without gathering arrays at its boundary.

  JAX 0.10.2 lowers the boundary of a shard_map over a part of the axes as if arrays
  were replicated along the others: every argument and result that is sharded along an
  Explicit one is gathered. It leaves Auto axes alone. So all axes are Auto at the
  boundary and Explicit on both sides of it.

  Raises:
    ValueError: if some axes of the mesh are Auto, naming the types of all.
  """
  inside = tuple(name for name in mesh.axis_names if name not in axes)
  if AxisType.Auto in mesh.axis_types:
    types = ", ".join(
      f"{name!r} {kind}"
      for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
    )
    raise ValueError(
      f"the axes of the mesh are {types}: where a worker has several devices, give all axes one type"
    )

  def mapped(*arguments: Any) -> Any:
    explicit = shard_map(function, mesh, in_specs, out_specs, axes)
    # `auto_axes` needs the shardings of the results: a trace with Explicit axes tells.
    result_specs = jax.tree.map(
      lambda x: x.sharding.spec, jax.eval_shape(explicit, *arguments)
    )
    # Inside, arguments are sharded along the axes that are not mapped over, `inside`.
    specs = jax.tree.map(
      lambda x: without_axes(jax.typeof(x).sharding.spec, axes), arguments
    )
    body = jax.sharding.explicit_axes(function, axes=inside, in_sharding=specs)
    # None: the mesh of the context, all of whose axes `auto_axes` has made Auto.
    boundary = lambda *arguments: shard_map(body, None, in_specs, out_specs, axes)(
      *arguments
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return jax.sharding.auto_axes(boundary, out_sharding=result_specs)(*arguments)

  return mapped


def without_axes(spec: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
  """The spec without the names `axes`."""
  entries = [
    tuple(name for name in names_of(entry or ()) if name not in axes) for entry in spec
  ]
  return PartitionSpec(
    *entries
  )  # PartitionSpec stores one name as itself, and no name as None


def axes_inside(axes: Sequence[str] | None) -> dict[str, int]:
  """Names and sizes of the axes that a shard_map over `axes` leaves to the compiler; none outside such a shard_map."""
  mesh = jax.sharding.get_abstract_mesh()
  # Without `axes` the comm names none; an axis that is not manual is not mapped over.
  if not axes or not set(axes) <= set(mesh.manual_axes):
    return {}
  return {
    name: size for name, size in mesh.shape.items() if name not in mesh.manual_axes
  }


def is_explicit(axis: str) -> bool:
  """Whether types tell how arrays are sharded along an axis of the mesh of this program."""
  mesh = jax.sharding.get_abstract_mesh()
  return mesh.axis_types[mesh.axis_names.index(axis)] == AxisType.Explicit


def resharded(x: jax.Array, spec: PartitionSpec) -> jax.Array:
  """`x` with that spec in its type where axes are Explicit; elsewhere `x`, which the compiler reshards at its use."""
  sharding = jax.typeof(x).sharding
  # Equal shardings need no equation. Entries None at the end of a spec do not count.
  if AxisType.Explicit not in sharding.mesh.axis_types or trimmed(
    sharding.spec
  ) == trimmed(spec):
    return x
  return jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec))


def in_parts(x: jax.Array, parts: int) -> jax.Array:
  """[b, …] as [parts, b/parts, …]; where axes are Explicit, each part is sharded as x is, if its rows are divisible."""
  shape = (parts, x.shape[0] // parts, *x.shape[1:])
  sharding = jax.typeof(x).sharding
  if AxisType.Explicit not in sharding.mesh.axis_types:
    return x.reshape(shape)
  # The rows of a part stay sharded if the number of shards divides them, and are
  # gathered otherwise. A spec may omit dimensions at the end that are not sharded.
  first, *others = list(sharding.spec) + [None] * (x.ndim - len(sharding.spec))
  sizes = sharding.mesh.shape
  ways = math.prod(sizes[name] for name in names_of(first or ()))
  spec = PartitionSpec(None, first if shape[1] % ways == 0 else None, *others)
  return x.reshape(shape, out_sharding=NamedSharding(sharding.mesh, spec))


def trimmed(spec: PartitionSpec) -> PartitionSpec:
  """The spec without the entries at its end that are None: equal shardings then have equal specs."""
  entries = list(spec)
  while entries and not entries[-1]:
    entries.pop()
  return PartitionSpec(*entries)


def axes_of_type(x: Any) -> frozenset[str]:
  """The axes that a value, or an abstract value, varies over by its type."""
  type_of_x = x if isinstance(x, jax.core.AbstractValue) else jax.typeof(x)
  # Newer versions of JAX have varying axes in a type of their own, older ones in `vma`.
  return (
    type_of_x.manual_axis_type.varying
    if hasattr(type_of_x, "manual_axis_type")
    else getattr(type_of_x, "vma", frozenset())
  )


def equal_along(x: Any, axes: frozenset[str] | None = frozenset()) -> Any:
  """The abstract value `x`, typed as equal along `axes`: by default along no axis, None for all axes."""
  axes = axes_of_type(x) if axes is None else axes
  if not axes_of_type(x) & axes:
    return x
  if hasattr(x, "manual_axis_type"):
    return x.update(
      manual_axis_type=x.manual_axis_type.update(
        varying=x.manual_axis_type.varying - axes
      )
    )
  return x.update(vma=x.vma - axes)


def is_psum(x: jax.Array, axis: AxisName) -> bool:
  """Whether the traced x is a psum or pmean over `axis`, perhaps scaled, cast or reshaped.

  This follows the equations of an unfinished trace backwards from x. It detects
  gradients that are averaged already where the types do not show it.
  """
  while equation := _equation_of(x):
    # A psum over groups of workers has other totals in other groups.
    if equation.primitive.name.startswith("psum"):
      return (
        set(names_of(axis)) <= set(equation.params["axes"])
        and equation.params.get("axis_index_groups") is None
      )
    # Goes on with the operand of the size of x; operands of one entry only scale it.
    # `_SCALINGS`: mul, div, casts and reshapes.
    operands = [
      operand
      for operand in equation.in_tracers
      if getattr(operand, "size", 1) == x.size
    ]
    if equation.primitive.name not in _SCALINGS or len(operands) != 1:
      return False
    (x,) = operands
  return False


def _equation_of(x: jax.Array) -> Any:
  """The equation of which the traced x is a result; None for other arrays."""
  return getattr(x, "parent", None) if isinstance(x, jax.core.Tracer) else None


def is_key(x: object) -> bool:
  """Whether x is an array of typed random keys."""
  return jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key)


def is_zero(x: jax.Array) -> bool:
  """Whether the traced x is zero by its last operations, as the gradient of a leaf that a loss does not use."""
  # Back through operations of one operand that make zeros of zeros: reshapes, casts,
  # broadcasts, negations and copies. `mul` and `div` have two operands and end the
  # search.
  while equation := _equation_of(x):
    if (
      equation.primitive.name not in (*_SCALINGS, *_COPIES)
      or len(equation.in_tracers) != 1
    ):
      return False
    (x,) = equation.in_tracers
  # The first operand of the chain: `jnp.zeros` broadcasts a literal 0.
  return isinstance(value := getattr(x, "val", None), core.Literal) and not np.any(
    value.val
  )


def is_argument_of_shard_map(x: jax.Array) -> bool:
  """Whether the traced x is an argument of the program of a shard_map around it, and not checked for replication."""
  # Private attributes: in a version without them the answer is no.
  frame = getattr(getattr(x, "_trace", None), "frame", None)
  if frame is None or frame.debug_info.traced_for != "shard_map":
    return False
  return x.parent is None  # type: ignore[attr-defined]


_COPIES = (
  "neg",
  "pvary",
  "pcast",
  "copy",
  "broadcast_in_dim",
  "sharding_constraint",
  "reshard",
)
_SCALINGS = (
  "div",
  "mul",
  "convert_element_type",
  "reshape",
  "ravel",
  "squeeze",
  "expand_dims",
)


def words_of_keys(x: Any) -> Any:
  """The words of an array of random keys; anything else as it is."""
  return jax.random.key_data(x) if isinstance(x, jax.Array) and is_key(x) else x


def local_shard(x: Any) -> np.ndarray:
  """The first shard of x on this process; all of x if this process holds it. In numpy, under a trace too."""
  return np.asarray(
    x.addressable_data(0)
    if isinstance(x, jax.Array) and not x.is_fully_addressable
    else x
  )


def wait_for_processes(tree: Any, what: str, timeout: float) -> None:
  """Barrier of all processes that hold a shard of the arrays of `tree`.

  Args:
    tree: a pytree of arrays.
    what: name of the calling function, for the error.
    timeout: seconds.

  Raises:
    RuntimeError: if one of the processes does not call in time.
  """
  # Devices of arrays of which this process holds a part only; without such arrays no
  # process waits.
  devices: list[Any] = [
    device
    for x in jax.tree.leaves(tree)
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    if not x.is_fully_addressable
    for device in x.sharding.device_set
  ]
  holders = tuple(sorted({device.process_index for device in devices}))
  client = distributed.global_state.client
  if not holders or client is None:
    return
  # The number of the barrier is part of its name, since a name serves once. Processes
  # count alike, since all holders of the arrays call.
  count = _BARRIERS[what, holders] = _BARRIERS.get((what, holders), 0) + 1
  try:
    client.wait_at_barrier(
      f"{what}/{count}/{holders}", round(1000 * timeout), process_ids=list(holders)
    )
  except Exception as error:
    raise RuntimeError(
      f"{what} reads arrays of {len(holders)} processes, and not all of them called it within {timeout:g} s: call it "
      "on every process, not only where jax.process_index() == 0, and print on one. A process with fewer batches than "
      "others does not come here either: give all of them as many steps"
    ) from error


_BARRIERS: dict[
  tuple[str, tuple[int, ...]], int
] = {}  # barriers so far, by caller and processes: a barrier's name serves once
