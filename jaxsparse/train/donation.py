"""Arguments of a step whose buffers XLA may overwrite."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def without_aliases(arguments: tuple[Any, ...], by_buffer: bool) -> tuple[Any, ...]:
  """The arguments of a step, with a copy of each array that shares memory with a donated one.

  The first two arguments are donated: XLA overwrites their buffers, which no other argument may use.

  Args:
    arguments: pytrees of arrays.
    by_buffer: whether to compare buffers, too. The arrays that a step returns never share buffers, so for them it is
      enough to compare the arrays.
  """
  donated: set[Any] = set()

  def keys(leaf: jax.Array) -> set[Any]:
    if not by_buffer or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      return {id(leaf)}
    return {id(leaf), *(shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards if shard.data.size)}

  def own(leaf: Any, is_donated: bool) -> Any:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
      return leaf
    shared = not donated.isdisjoint(mine := keys(leaf))
    if is_donated:
      donated.update(mine)
    return jnp.copy(leaf) if shared else leaf

  first = jax.tree.map(functools.partial(own, is_donated=True), arguments[:2])
  return first + jax.tree.map(functools.partial(own, is_donated=False), arguments[2:])
