"""The axes that a value varies over by its type, where a shard_map checks replication; loops and branches of one type.

`jax.shard_map` types each value with the axes over which workers may have different
ones, unless `check_vma=False`. Then, and outside of a shard_map, types have no axes,
and everything here returns what it is given.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse._compat import axes_of_type


def checked_axes() -> frozenset[str]:
  """The axes over which a shard_map around this program checks replication."""
  manual = jax.sharding.get_abstract_mesh().manual_axes
  # Unchecked axes do not show in the types of their own indices.
  return (
    frozenset(manual)
    if manual and axes_of_type(jax.lax.axis_index(manual[0]))
    else frozenset()
  )


def as_varying(tree: Any, axes: frozenset[str]) -> Any:
  """`tree`, whose arrays are typed as varying over `axes`, in addition to the axes of their types."""

  def cast(x: Any) -> Any:
    # `pcast` rejects axes over which x varies already.
    missing = tuple(sorted(axes - axes_of_type(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(cast, tree)


def fori_loop(
  first: Any,
  end: Any,
  step: Callable,
  start: Any,
  **options: Any,
) -> Any:
  """`jax.lax.fori_loop`, whose `start` gets the axes of what `step` returns."""
  once = lambda carry: step(jnp.asarray(first), carry)
  return jax.lax.fori_loop(first, end, step, _with_axes_of(once, start), **options)


def scan(
  step: Callable,
  start: Any,
  rows: Any,
  **options: Any,
) -> tuple[Any, Any]:
  """`jax.lax.scan`, whose `start` gets the axes of what `step` returns."""
  row = lambda: jax.tree.map(lambda x: x[0], rows)
  first = lambda carry: step(carry, row())[0]
  return jax.lax.scan(step, _with_axes_of(first, start), rows, **options)


def while_loop(goes_on: Callable, step: Callable, start: Any) -> Any:
  """`jax.lax.while_loop`, whose `start` gets the axes of what `step` returns."""
  return jax.lax.while_loop(goes_on, step, _with_axes_of(step, start))


def switch(index: jax.Array, branches: Sequence[Callable], *operands: Any) -> Any:
  """`jax.lax.switch`, whose branches all return what one of them returns by its type."""
  return jax.lax.switch(index, _alike(branches, operands), *operands)


def cond(which: jax.Array, true: Callable, false: Callable, *operands: Any) -> Any:
  """`jax.lax.cond`, whose branches both return what one of them returns by its type."""
  return jax.lax.cond(which, *_alike((true, false), operands), *operands)


def _alike(branches: Sequence[Callable], operands: Sequence[Any]) -> Sequence[Callable]:
  """The branches, with each result typed as varying over all axes that it varies over in one of them."""
  # In an unchecked shard_map inside a checked one, an operand may still have axes of
  # the checked one: all branches drop them.
  if not checked_axes():
    return [
      lambda *args, branch=branch: jax.tree.map(_without_axes, branch(*args))
      for branch in branches
    ]
  results = [jax.eval_shape(branch, *operands) for branch in branches]
  # for each leaf of the results, the union over branches
  axes = jax.tree.map(
    lambda *leaves: frozenset().union(*map(axes_of_type, leaves)), *results
  )
  return [
    lambda *args, branch=branch: jax.tree.map(as_varying, branch(*args), axes)
    for branch in branches
  ]


def _with_axes_of(step: Callable, start: Any) -> Any:
  """`start`, typed as varying over the axes of `step(start)`, after any number of steps."""
  if not checked_axes():
    return jax.tree.map(_without_axes, start)
  # A step can only add axes, so this ends.
  while True:
    after = jax.tree.map(
      lambda x, result: as_varying(x, axes_of_type(result)),
      start,
      jax.eval_shape(step, start),
    )
    types = lambda tree: list(map(axes_of_type, jax.tree.leaves(tree)))
    if types(after) == types(start):
      return start
    start = after


def _without_axes(x: Any) -> Any:
  """`x` with a type that has no axes.

  In an unchecked shard_map inside a checked one, an argument keeps the axes of its type
  until the first operation. A loop that began with it would return another type, and so
  would one branch of two.
  """
  return jnp.squeeze(jnp.expand_dims(x, 0), 0) if axes_of_type(x) else x
