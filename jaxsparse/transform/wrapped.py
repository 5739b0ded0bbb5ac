"""Parameters as a jaxsparse transform sees them inside wrappers of optax, which change their leaves.

    optax.lookahead                           the fast parameters, `params.fast`
    optax.contrib.split_real_and_imaginary    the real and the imaginary part of each complex leaf
    optax.flatten                             one vector of all leaves

The state of a transform has the names and shapes of the leaves that it saw, which tell
the wrappers around it. Some wrappers pass no extra arguments on, so contexts tell what
is inside them: `synchronizing` has local steps exchange, `mean_dtypes` has a transform
round its means to other dtypes than those of the leaves.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxsparse.arrays.flatten import OVERWRITTEN, leaf_shapes, leaves_by_name, parts
from jaxsparse.transform.state import ReduceState
from jaxsparse.types import ArrayTree

synchronizing = jax.make_user_context(False)
mean_dtypes = jax.make_user_context(())  # pairs of a leaf's name and a dtype


# The class is private to optax: a transformation gets hold of an instance.
def _placeholder() -> type:
  found: list[type] = []

  def init(params: object) -> object:
    found.append(type(params))
    return params

  optax.tree_map_params(init, lambda leaf: leaf, ())
  return found[0]


PLACEHOLDER = _placeholder()
"""The type of what `optax.tree_map_params` gives `init` in place of parameters, to find their copies in a state."""


class _Wrapper(NamedTuple):
  """A change of leaves: `see(tree)`, and `restore(tree, see(tree))`, which is like `tree`."""

  see: Callable[[ArrayTree], ArrayTree]
  restore: Callable[[ArrayTree, ArrayTree], ArrayTree]


class _Pair(NamedTuple):
  """A complex leaf, with the names of optax's."""

  real: jax.Array
  imaginary: jax.Array


def _join_pairs(tree: ArrayTree, seen: ArrayTree) -> ArrayTree:
  join = lambda _, leaf: jax.lax.complex(*leaf) if isinstance(leaf, _Pair) else leaf
  return jax.tree.map(join, tree, seen)


def _concatenate(tree: ArrayTree) -> jax.Array:
  """One vector of all leaves in a dtype that holds all of theirs, as `optax.flatten` makes it."""
  with jax.numpy_dtype_promotion("standard"):
    return jnp.concatenate(list(map(jnp.ravel, jax.tree.leaves(tree))))


def _divide(tree: ArrayTree, seen: jax.Array) -> ArrayTree:
  leaves, structure = jax.tree.flatten(tree)
  # Leaves of several dtypes were promoted to one.
  pieces = zip(parts(seen, [leaf.size for leaf in leaves]), leaves, strict=True)
  return jax.tree.unflatten(
    structure, [piece.reshape(leaf.shape).astype(leaf.dtype) for piece, leaf in pieces]
  )


def _split_pairs(tree: ArrayTree) -> ArrayTree:
  pair = lambda x: _Pair(jnp.real(x), jnp.imag(x))
  return jax.tree.map(lambda x: pair(x) if jnp.iscomplexobj(x) else x, tree)


_SPLIT = _Wrapper(_split_pairs, _join_pairs)
_FLAT = _Wrapper(_concatenate, _divide)


class View(NamedTuple):
  """How the wrappers around a transform change the leaves of parameters.

  Attributes:
    wrappers: from the outermost to the innermost.

  Example:
    >>> view = View((_SPLIT, _FLAT))
    >>> view.see({"b": jnp.ones(1), "w": jnp.array([2 + 3j])})
    Array([1., 2., 3.], dtype=float32)
  """

  wrappers: tuple[_Wrapper, ...] = ()

  def see(self, tree: ArrayTree) -> ArrayTree:
    """A pytree like the parameters as the transform sees it."""
    tree = optimized(trained(tree))
    for wrapper in self.wrappers:
      tree = wrapper.see(tree)
    return tree

  def restore(self, like: ArrayTree, seen: ArrayTree) -> ArrayTree:
    """`like`, a pytree like the parameters, with the leaves that the transform sees replaced by `seen`."""
    for depth in reversed(range(len(self.wrappers))):
      # What the wrapper at this depth was given: a pytree as all outer ones leave it.
      given = View(self.wrappers[:depth]).see(like)
      seen = self.wrappers[depth].restore(given, seen)
    if isinstance(like, optax.LookaheadParams):
      return like._replace(fast=seen)
    return with_optimized(like, seen)


# The plainest first: `view_of` takes the first one that fits.
_VIEWS = [
  View(),
  View((_SPLIT,)),
  View((_FLAT,)),
  View((_SPLIT, _FLAT)),
  View((_FLAT, _SPLIT)),
]


def trained(params: optax.Params) -> optax.Params:
  """The parameters at which the gradient is taken: the fast ones of `optax.lookahead`, else all."""
  return params.fast if isinstance(params, optax.LookaheadParams) else params


def overwritten(params: optax.Params) -> ArrayTree:
  """Flax's collection of scales of fp8, whose "gradients" are the next values; () of parameters without one.

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
  """`like` with `new` in place of what an optimizer updates, and other `scales` of fp8, if some are given."""
  own = overwritten(like)
  # No collection, or an empty one: parameters stand alone.
  if not jax.tree.leaves(own):
    return new
  both = {"params": new, OVERWRITTEN: own if scales is None else scales}
  # The result is a dict or a FrozenDict, in the order of `like`.
  return type(like)({name: both[name] for name in like})


def view_of(nodes: Sequence[ReduceState], params: optax.Params) -> View:
  """How the transforms with these states see the parameters; as they are, if the states fit none of the wrappers."""
  made = [leaf for node in nodes for leaf in node.leaves]
  for view in _VIEWS:
    shapes = leaf_shapes(_shapes_seen(view, params))
    if all(shapes.get(name) == shape for name, shape in made):
      return view
  # Errors about parameters come from checks, which name the leaf.
  return View()


def map_seen(
  change: Callable[[str, jax.Array], jax.Array],
  nodes: Sequence[ReduceState],
  tree: optax.Params,
) -> optax.Params:
  """A pytree like the parameters with `change(name, leaf)` for each leaf that the transforms with these states see."""
  view = view_of(nodes, tree)
  seen = view.see(tree)
  leaves = [change(name, leaf) for name, leaf in leaves_by_name(seen).items()]
  return view.restore(tree, jax.tree.unflatten(jax.tree.structure(seen), leaves))


def shapes_seen(nodes: Sequence[ReduceState], params: optax.Params) -> ArrayTree:
  """The leaves that the transforms with these states see, as `jax.ShapeDtypeStruct`."""
  return _shapes_seen(view_of(nodes, params), params)


def _shapes_seen(view: View, params: optax.Params) -> ArrayTree:
  dtype_of = lambda x: x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(np.shape(x), dtype_of(x)), params
  )
  # The identity needs no trace.
  return jax.eval_shape(view.see, shapes) if view.wrappers else view.see(shapes)
