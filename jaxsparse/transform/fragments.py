"""Leaves shared out to fragments, which local steps exchange in turn."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from jaxsparse.transform.wrapped import PLACEHOLDER
from jaxsparse.types import ArrayTree


@dataclasses.dataclass(frozen=True)
class Fragments:
  """The leaves of a pytree in `count` fragments, each leaf whole in one, of about equally many entries.

  Fragments are numbered from 0; a pytree of a fragment has `optax.MaskedNode` in place
  of the leaves of others.

  Example:
    >>> tree = {"a": jnp.zeros(6), "b": jnp.zeros((4, 5)), "c": jnp.zeros(9)}
    >>> Fragments(2).numbers(tree), Fragments(2).part(tree, 0)["a"]
    ({'a': 1, 'b': 0, 'c': 1}, MaskedNode())
  """

  count: int

  def numbers(self, tree: ArrayTree) -> ArrayTree:
    """The number of the fragment of each leaf: the largest leaf first, each to the fragment with the fewest entries.

    Raises:
      ValueError: for fewer leaves than fragments.
    """
    leaves, structure = jax.tree.flatten(tree)
    if 1 < self.count > len(leaves):
      raise ValueError(
        f"local_steps: fragments={self.count}, choose at most the number of leaves, {len(leaves)}"
      )
    sizes = list(map(jnp.size, leaves))
    # Entries of each fragment so far, and the fragment of each leaf.
    entries = [0] * self.count
    numbers = [0] * len(leaves)
    # Greedy: the sizes of two fragments differ by at most the largest leaf.
    for leaf in sorted(range(len(leaves)), key=lambda leaf: -sizes[leaf]):
      numbers[leaf] = min(range(self.count), key=entries.__getitem__)
      # An empty leaf counts as 1 entry, so that every fragment gets a leaf.
      entries[numbers[leaf]] += max(1, sizes[leaf])
    return jax.tree.unflatten(structure, numbers)

  def has_entries(self, tree: ArrayTree, fragment: int) -> bool:
    """Whether a leaf of a fragment has an entry."""
    return any(map(jnp.size, jax.tree.leaves(self.part(tree, fragment))))

  def part(self, tree: ArrayTree, fragment: int) -> ArrayTree:
    """The leaves of a fragment, with `optax.MaskedNode` in place of the others."""
    # The other leaves stay in the structure, so names and order are those of the whole.
    choose = lambda leaf, index: leaf if index == fragment else optax.MaskedNode()
    # optax.tree_map_params gives a placeholder in place of parameters: it stays whole.
    return (
      tree
      if self.count == 1 or isinstance(tree, PLACEHOLDER)
      else jax.tree.map(choose, tree, self.numbers(tree))
    )


def fill_zeros(tree: ArrayTree, masked: ArrayTree) -> ArrayTree:
  """The leaves of `masked`, a fragment of a pytree, with zeros like those of the pytree in place of the others."""
  fill = lambda like, leaf: (
    jnp.zeros_like(like) if isinstance(leaf, optax.MaskedNode) else leaf
  )
  return jax.tree.map(fill, tree, masked)
