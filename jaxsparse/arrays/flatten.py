"""Gradient pytree <-> one flat f32[n]: float32 inside, the caller's dtypes outside."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax

from jaxsparse import _compat
from jaxsparse._compat import varying
from jaxsparse.types import ArrayTree


def flatten(
  tree: ArrayTree,
) -> tuple[jax.Array, Callable[[jax.Array], ArrayTree]]:
  """All leaves as one f32[n], in pytree order, and the inverse function, from f32[n] to their shapes and dtypes.

  Args:
    tree: a pytree of floating-point arrays with at least one entry, as checked by
      `check_leaves` and `check_entries`.

  Example:
    >>> import jax.numpy as jnp
    >>> flat, unflatten = flatten({"b": jnp.ones(1, jnp.bfloat16), "w": jnp.zeros((2, 2))})
    >>> flat.tolist(), flat.dtype.name
    ([1.0, 0.0, 0.0, 0.0, 0.0], 'float32')
    >>> unflatten(2 * flat)["b"]
    Array([2], dtype=bfloat16)
  """
  # Else `ravel_pytree` chooses the widest dtype of the leaves.
  wide = optax.tree.cast(tree, jnp.float32)
  flat, unflatten = jax.flatten_util.ravel_pytree(wide)
  return flat, lambda new: optax.tree.cast_like(unflatten(new), tree)


def without_arrays(tree: ArrayTree) -> ArrayTree:
  """The pytree with `jax.ShapeDtypeStruct` in place of each array, number, or shape: without values and shardings."""
  shape_of = lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
  return jax.tree.map(shape_of, tree)


class Pair(NamedTuple):
  """A complex leaf as `optax.contrib.split_real_and_imaginary` names its parts."""

  real: jax.Array
  imaginary: jax.Array


def split_complex(tree: ArrayTree) -> ArrayTree:
  """The pytree with a `Pair` in place of each complex leaf."""
  pair = lambda x: Pair(jnp.real(x), jnp.imag(x)) if jnp.iscomplexobj(x) else x
  return jax.tree.map(pair, tree)


def join_complex(tree: ArrayTree, split: ArrayTree) -> ArrayTree:
  """Undoes `split_complex(tree)`, of which `split` has the structure."""
  join = lambda _, leaf: jax.lax.complex(*leaf) if isinstance(leaf, Pair) else leaf
  return jax.tree.map(join, tree, split)


def wide_dtype(x: Any) -> jnp.dtype:
  """The dtype in which numbers like x are summed and averaged: float32 in place of 16 bits, else that of x.

  Example:
    >>> [wide_dtype(jnp.zeros(1, name)).name for name in ("bfloat16", "float32", "complex64")]
    ['float32', 'float32', 'complex64']
  """
  dtype = jnp.result_type(x)
  # complex dtypes have no narrow one
  is_narrow = jnp.issubdtype(dtype, jnp.floating) and _is_narrow(dtype)
  return jnp.dtype(jnp.float32) if is_narrow else dtype


@dataclasses.dataclass(frozen=True)
class LeafRounding:
  """Rounds f32 values to what leaves of these sizes and dtypes hold.

  Attributes:
    sizes: entries of each leaf, n in all.
    dtypes: dtype of each leaf.
  """

  sizes: Sequence[int]
  dtypes: Sequence[jnp.dtype]

  @property
  def is_uniform(self) -> bool:
    """Whether all leaves have one dtype."""
    return len(set(self.dtypes)) == 1

  def __call__(
    self, values: jax.Array, indices: jax.Array | None = None, /
  ) -> jax.Array:
    """Rounds f32[n], or the values f32[...] at flat `indices` i32[...], of which n and more are empty slots."""
    if self.is_uniform:
      return _rounded(values, self.dtypes[0])
    if indices is None:
      split = zip(parts(values, self.sizes), self.dtypes, strict=True)
      return jnp.concatenate([_rounded(leaf, dtype) for leaf, dtype in split])
    ends = jnp.asarray(np.cumsum(self.sizes), jnp.int32)
    # The number of the leaf of each flat index, beyond the last leaf for an empty slot.
    # Each narrow dtype rounds the entries of its leaves only.
    leaf = jnp.searchsorted(ends, indices, side="right")
    for dtype in filter(_is_narrow, dict.fromkeys(self.dtypes)):
      has_dtype = jnp.asarray([of_leaf == dtype for of_leaf in self.dtypes])
      is_narrow = has_dtype.at[leaf].get(mode="fill", fill_value=False)
      values = jnp.where(is_narrow, _rounded(values, dtype), values)
    return values


def rounding(sizes: Sequence[int], dtypes: Sequence[Any]) -> LeafRounding | None:
  """The `LeafRounding` of leaves of these sizes and dtypes; None if they hold each float32.

  Example:
    >>> import jax.numpy as jnp
    >>> to = rounding([1, 1], [jnp.dtype(jnp.float32), jnp.dtype(jnp.float16)])
    >>> to(jnp.array([84000.1, 84000.1])), to(jnp.array([0.1]), jnp.array([1]))
    (Array([84000.1,     inf], dtype=float32), Array([0.09997559], dtype=float32))
  """
  return LeafRounding(sizes, dtypes) if any(map(_is_narrow, dtypes)) else None


def _is_narrow(dtype: jax.typing.DTypeLike) -> bool:
  return jnp.finfo(dtype).bits < 32


def representable(
  values: jax.Array,
  dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
  """Values rounded to what `dtype` holds, but 0 for finite numbers beyond its range; and values less the rounded ones.

  Example:
    >>> import jax.numpy as jnp
    >>> representable(jnp.array([0.125, 84000.0]), jnp.dtype(jnp.float16))
    (Array([0.125, 0.   ], dtype=float32), Array([    0., 84000.], dtype=float32))
  """
  rounded = _rounded(values, dtype)
  if rounded is values:
    return values, jnp.zeros_like(values)
  # Finite numbers beyond the range stay whole in the second result.
  held = jnp.where(jnp.isinf(rounded) & jnp.isfinite(values), 0.0, rounded)
  return held, values - held


def _rounded(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """f32 values rounded to what `dtype` holds. XLA may drop a conversion to `dtype` and back, but not this rounding."""
  limits = jnp.finfo(dtype)
  # Nothing to round: float32 holds the values, or they have the dtype already.
  if limits.bits >= 32 or values.dtype == dtype:
    return values
  normal = jax.lax.reduce_precision(values, limits.nexp, limits.nmant)
  # bfloat16, whose exponents are those of float32
  if limits.nexp == jnp.finfo(jnp.float32).nexp:
    return normal
  # `reduce_precision` flushes the subnormal numbers of float16 to 0. They are the
  # multiples of the smallest one.
  steps = 1 / float(limits.smallest_subnormal)
  return jnp.where(
    jnp.abs(values) < float(limits.smallest_normal),
    jnp.round(values * steps) / steps,
    normal,
  )


def check_are_arrays(tree: ArrayTree, what: str) -> None:
  """Raises TypeError for a leaf that is neither array nor number, such as a function; `what` names the tree."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    is_number = isinstance(leaf, int | float | complex)
    has_type = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    # the class of an array has dtype and shape, too
    if not is_number and (not has_type or isinstance(leaf, type)):
      raise TypeError(
        f"{what}{jax.tree_util.keystr(path)} is {leaf!r}, no array: give the arrays of a model alone, of Equinox "
        "params, static = eqx.partition(model, eqx.is_inexact_array), of Flax graph, params, others = "
        "nnx.split(model, nnx.Param, ...), and put the model together in loss_fn, by eqx.combine(params, static) or "
        "nnx.merge(graph, params, others)"
      )


OVERWRITTEN = "_overwrite_with_gradient"
"""The collection of Flax, or type of its variables, whose "gradients" are the next values: the scales of fp8."""


def check_not_overwritten(tree: ArrayTree, what: str) -> None:
  """Raises TypeError for a leaf whose "gradient" is its next value (`OVERWRITTEN`); `what` names the tree."""
  is_variable = lambda leaf: type(leaf).__name__ == OVERWRITTEN
  # The collection is a key of Flax's dictionaries, and a type of nnx's variables.
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_variable):
    name = jax.tree_util.keystr(path)
    if OVERWRITTEN in name or is_variable(leaf):
      raise TypeError(
        f"{what}{name} belongs to Flax's {OVERWRITTEN}, scales of fp8, whose gradient is the next value and is neither "
        "averaged nor subtracted: give tx and its update the rest, tree['params'], assign the maximum over workers, as "
        "js.make_train_step and js.stacked(...).value_and_grad do for "
        f"{{'params': ..., '{OVERWRITTEN}': ...}}"
      )


def check_leaves(tree: ArrayTree) -> None:
  """Checks that gradients are floating-point numbers of at least 16 bits, and none is a next value (`OVERWRITTEN`).

  Raises:
    TypeError: for another leaf, naming its path.
  """
  check_are_arrays(tree, "gradients")
  check_not_overwritten(tree, "gradients")
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    dtype = jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jnp.complexfloating):
      raise TypeError(
        f"gradients{jax.tree_util.keystr(path)} has dtype {dtype.name}: put optax.contrib.split_real_and_imaginary "
        "around the chain, and before it optax.stateless(lambda updates, _: jax.tree.map(jnp.conj, updates)), since "
        "complex gradients of JAX are conjugate to the direction of ascent"
      )
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 16:
      raise TypeError(
        f"gradients{jax.tree_util.keystr(path)} has dtype {dtype.name}, choose a floating-point one of 16 bits or more "
        "(what is not trained belongs in step(..., shared=); optax.masked keeps other leaves out of a transform)"
      )


def check_entries(tree: ArrayTree) -> None:
  """Raises ValueError if a pytree has no entry."""
  if not any(math.prod(shape) for shape in leaf_shapes(tree).values()):
    raise ValueError(
      f"{tree!r} hold no entry: give a pytree with at least one non-empty array"
    )


def all_finite(tree: ArrayTree) -> jax.Array:
  """Whether no leaf of floating-point or complex numbers has NaN or Inf, bool[].

  x − x is NaN for NaN and Inf, and its sum takes one pass; with `jnp.isfinite` XLA on
  CPU stores a boolean for each entry. The sum must be finite, not 0: where x is a
  product, a fused multiply-add makes x − x the rounding error.

  Example:
    >>> import jax.numpy as jnp
    >>> all_finite([jnp.ones(2), jnp.arange(3)]), all_finite([jnp.array([1.0, jnp.inf])])
    (Array(True, dtype=bool), Array(False, dtype=bool))
  """
  leaves = map(jnp.asarray, jax.tree.leaves(tree))
  # integers are always finite
  inexact = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
  sums = [jnp.sum(leaf - leaf) for leaf in inexact]
  are_finite = jnp.array([jnp.isfinite(leaf_sum) for leaf_sum in sums], jnp.bool_)
  # Without a barrier XLA on CPU computes the flags anew, from all leaves, in each loop
  # that uses them: a program that skips the update of 100 leaves compiles 5 times as
  # long. GPUs have no such loops; there a barrier costs 40 kernels and half a byte a
  # parameter in a step.
  once = _compat.by_platform(
    cpu=jax.lax.optimization_barrier, default=lambda flags: flags
  )
  return jnp.all(once(are_finite))


def stays_finite(before: ArrayTree, after: ArrayTree) -> jax.Array:
  """Whether each leaf without NaN and Inf in `before` has neither in `after`, bool[].

  A leaf that is not finite in `before` is not checked: the best loss so far of a
  schedule, for example, begins with Inf.

  Args:
    before: a pytree of arrays.
    after: a pytree of the same structure.
  """
  stays = lambda old, new: all_finite(new) | ~all_finite(old)

  def compare() -> jax.Array:
    leaves_stay = jax.tree.leaves(jax.tree.map(stays, before, after))
    return jnp.all(jnp.array(leaves_stay, jnp.bool_))

  # If all of `after` is finite, `before` need not be read: on CPU that saves a tenth of
  # the time of a local step of Adam. On a GPU a conditional waits for the host.
  look = lambda: varying.cond(all_finite(after), lambda: jnp.bool_(True), compare)
  return _compat.by_platform(cpu=look, default=compare)()


def parts(
  array: jax.Array,
  sizes: Sequence[int],
  axis: int = 0,
) -> list[jax.Array]:
  """Parts of these sizes, which add up to that of the axis, one after the other.

  Example:
    >>> import jax.numpy as jnp
    >>> [part.tolist() for part in parts(jnp.arange(3), [1, 2])]
    [[0], [1, 2]]
  """
  ends = list(itertools.accumulate(sizes))
  # `jnp.split` takes where to cut: not the end of the last part
  return jnp.split(array, ends[:-1], axis=axis)


VALUE = ".value"  # ends the path of the array in a `flax.nnx.Variable`


def leaves_by_name(tree: ArrayTree) -> dict[str, Any]:
  """Each leaf, in the order of `flatten`, by its name: its path, as errors and `special=` write it.

  Leaves are known by their names and not by the structure of a pytree: a restored one
  may have other containers, and need not compare or pickle. A `flax.nnx.Variable` has
  the name of the array that it holds: `nnx.Optimizer` inits a transformation with
  variables and updates it with arrays.

  Example:
    >>> leaves_by_name({"b": {"c": 0.5}, "w": 1.0})
    {"['b']['c']": 0.5, "['w']": 1.0}
  """
  return {
    jax.tree_util.keystr(path).removesuffix(VALUE): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def leaf_shapes(tree: ArrayTree) -> dict[str, tuple[int, ...]]:
  """The shape of each leaf by its name, in the order of `flatten`."""
  return {name: np.shape(leaf) for name, leaf in leaves_by_name(tree).items()}
