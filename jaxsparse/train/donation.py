"""Arguments of a step whose buffers XLA may overwrite."""

import jax
import jax.numpy as jnp

from jaxsparse._compat import is_key
from jaxsparse.types import ArrayTree


def without_aliases(
  arguments: tuple[ArrayTree, ...], by_buffer: bool
) -> tuple[ArrayTree, ...]:
  """The arguments of a step, with a copy of each array that shares memory with a donated one.

  The first two arguments are donated: XLA overwrites their buffers, which no other
  argument may use.

  Args:
    arguments: pytrees of arrays.
    by_buffer: whether arrays that share a buffer count as aliases, too. False suffices
      for arrays that a step has returned, which never share buffers.
  """
  leaves, structure = jax.tree.flatten(arguments)
  # Parameters and state come first, and are donated.
  donated_count = len(jax.tree.leaves(arguments[:2]))
  # `id`s of donated arrays and addresses of their buffers; both are integers.
  donated = set[int]()
  for index, leaf in enumerate(leaves):
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
      continue
    addresses = {id(leaf)}
    # Two arrays may share a buffer, as after `device_put`. Typed keys show no pointer.
    if by_buffer and not is_key(leaf):
      addresses.update(
        shard.data.unsafe_buffer_pointer()
        for shard in leaf.addressable_shards
        if shard.data.size
      )
    if not donated.isdisjoint(addresses):
      leaves[index] = jnp.copy(leaf)
    if index < donated_count:
      donated |= addresses
  return jax.tree.unflatten(structure, leaves)
