"""Parameters as a jaxsparse transform sees them inside wrappers of optax, which change their leaves.

    optax.lookahead                           the fast parameters, `params.fast`
    optax.contrib.split_real_and_imaginary    the real and the imaginary part of each complex leaf
    optax.flatten                             one vector of all leaves, of these parts too

A transform takes no complex leaves, so it sees parts of them always. The state of a
transform has the names and shapes of the leaves that it saw: one vector without a name
inside `optax.flatten`. Some wrappers pass no extra arguments on, so contexts tell what
is inside them: `synchronizing` has local steps exchange, `mean_dtypes` has a transform
round its means to other dtypes than those of the leaves.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax

from jaxsparse.arrays.flatten import (
  OVERWRITTEN,
  join_complex,
  leaf_shapes,
  leaves_by_name,
  parts,
  split_complex,
  without_arrays,
)
from jaxsparse.transform.state import ReduceState
from jaxsparse.types import ArrayTree

# True where local steps exchange without taking a step.
synchronizing = jax.make_user_context(False)
mean_dtypes = jax.make_user_context(())  # pairs of a leaf's name and a dtype


# The class is private to optax: a transformation gets hold of an instance.
def _placeholder() -> type:
  types: list[type] = []

  def init(params: object) -> object:
    types.append(type(params))
    return params

  optax.tree_map_params(init, lambda leaf: leaf, ())
  return types[0]


PLACEHOLDER = _placeholder()
"""The type of what `optax.tree_map_params` gives `init` in place of parameters, to find their copies in a state."""


def _concatenate(tree: ArrayTree) -> jax.Array:
  """One vector of all leaves in a dtype that holds all of theirs, as `optax.flatten` makes it."""
  with jax.numpy_dtype_promotion("standard"):
    return jnp.concatenate(list(map(jnp.ravel, jax.tree.leaves(tree))))


def _divide(tree: ArrayTree, seen: jax.Array) -> ArrayTree:
  """Undoes `_concatenate`: `seen`, one vector of all entries, in the shapes and dtypes of the leaves of `tree`."""
  leaves, structure = jax.tree.flatten(tree)
  # Leaves of several dtypes were promoted to one.
  pieces = zip(parts(seen, [leaf.size for leaf in leaves]), leaves, strict=True)
  return jax.tree.unflatten(
    structure, [piece.reshape(leaf.shape).astype(leaf.dtype) for piece, leaf in pieces]
  )


def trained(params: optax.Params) -> optax.Params:
  """The parameters at which the gradient is taken: the fast ones of `optax.lookahead`, else all."""
  return params.fast if isinstance(params, optax.LookaheadParams) else params


def overwritten(params: optax.Params) -> ArrayTree:
  """The scales of fp8 in parameters of Flax, whose "gradients" are their next values; () for parameters without any.

  They are a collection with the name `OVERWRITTEN`, a key beside "params".

  Raises:
    ValueError: for parameters with other collections than this one and "params", as
      Flax's `TrainState` has them.
  """
  if not isinstance(params, Mapping) or OVERWRITTEN not in params:
    return ()
  if set(params) != {"params", OVERWRITTEN}:
    raise ValueError(
      f"parameters with {OVERWRITTEN} have the collections {', '.join(map(repr, params))}: give 'params' and "
      f"'{OVERWRITTEN}' alone, running statistics as step(..., model_state=) or as an argument of the loss"
    )
  return params[OVERWRITTEN]


def optimized(params: optax.Params) -> optax.Params:
  """The parameters that an optimizer updates: "params" where Flax's scales of fp8 stand beside them, else all."""
  return params["params"] if jax.tree.leaves(overwritten(params)) else params


def with_optimized(
  like: optax.Params, new: optax.Params, scales: ArrayTree = None
) -> ArrayTree:
  """`like` with `new` in place of what an optimizer updates, and with `scales` of fp8; None keeps those of `like`."""
  old_scales = overwritten(like)
  # No collection, or an empty one: parameters stand alone.
  if not jax.tree.leaves(old_scales):
    return new
  both = {"params": new, OVERWRITTEN: old_scales if scales is None else scales}
  # The result is a dict or a FrozenDict, in the order of `like`.
  return type(like)({name: both[name] for name in like})


def _is_flat(states: Sequence[ReduceState], params: optax.Params) -> bool:
  """Whether the transforms with these states see one vector of all leaves, as inside `optax.flatten`.

  That is so if their leaves, by name and shape, are not those of the parameters, but
  the one vector is.
  """
  # (name, shape) of each leaf that a state was made for.
  made = {leaf for state in states for leaf in state.leaves}
  fits = lambda flat: made <= set(leaf_shapes(_shapes(flat, params)).items())
  # Where neither fits, the error comes from checks, which name the leaf.
  return not fits(False) and fits(True)


def _see(flat: bool, params: optax.Params) -> ArrayTree:
  """The parameters as a transform sees them, a pytree with parts of complex leaves; if `flat`, one vector of all."""
  pairs = split_complex(optimized(trained(params)))
  return _concatenate(pairs) if flat else pairs


def _shapes(flat: bool, params: optax.Params) -> ArrayTree:
  """`_see` of shapes, as `jax.ShapeDtypeStruct`; `params` may be arrays or shapes."""
  return jax.eval_shape(functools.partial(_see, flat), without_arrays(params))


def leaves_seen(
  states: Sequence[ReduceState], params: optax.Params
) -> dict[str, jax.Array]:
  """The leaves of parameters, by name, as the transforms with these states see them.

  Example:
    >>> leaves_seen([], {"w": jnp.array([2 + 3j])})
    {"['w'].real": Array([2.], dtype=float32), "['w'].imaginary": Array([3.], dtype=float32)}
  """
  return leaves_by_name(_see(_is_flat(states, params), params))


def shapes_seen(states: Sequence[ReduceState], params: optax.Params) -> ArrayTree:
  """The leaves that the transforms with these states see, as `jax.ShapeDtypeStruct`."""
  return _shapes(_is_flat(states, params), params)


def map_seen(
  change: Callable[[str, jax.Array], jax.Array],
  states: Sequence[ReduceState],
  tree: optax.Params,
) -> optax.Params:
  """A pytree like the parameters with `change(name, leaf)` for each leaf that the transforms with these states see.

  What transforms do not see, as slow parameters of `optax.lookahead` and Flax's scales
  of fp8, stays as in `tree`.
  """
  flat = _is_flat(states, tree)
  seen = _see(flat, tree)
  leaves = [change(name, leaf) for name, leaf in leaves_by_name(seen).items()]
  changed = jax.tree.unflatten(jax.tree.structure(seen), leaves)
  # Undo `_see`: one vector to leaves, parts to complex leaves, these into `tree`.
  params = optimized(trained(tree))
  pairs = _divide(split_complex(params), changed) if flat else changed
  joined = join_complex(params, pairs)
  if isinstance(tree, optax.LookaheadParams):
    return tree._replace(fast=joined)
  return with_optimized(tree, joined)
