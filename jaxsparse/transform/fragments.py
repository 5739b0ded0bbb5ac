"""Leaves shared out to fragments, which local steps exchange in turn."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxsparse import flatten


@dataclasses.dataclass(frozen=True)
class Fragments:
  """The leaves of a pytree in `count` fragments, whole, of about equally many entries.

  Example:
    >>> tree = {"a": jnp.zeros(6), "b": jnp.zeros((4, 5)), "c": jnp.zeros(9)}
    >>> Fragments(2).numbers(tree), Fragments(2).part(tree, 0)["a"]
    ([1, 0, 1], MaskedNode())
  """

  count: int

  def numbers(self, tree: Any) -> list[int]:
    """The number of the fragment of each leaf: the largest leaf first, each to the fragment with the fewest entries.

    Raises:
      ValueError: for fewer leaves than fragments.
    """
    sizes = flatten.sizes(tree)
    if len(sizes) < self.count:
      raise ValueError(f"local_steps: fragments={self.count}, choose at most the number of leaves, {len(sizes)}")
    entries, numbers = [0] * self.count, [0] * len(sizes)
    for leaf in sorted(range(len(sizes)), key=lambda leaf: -sizes[leaf]):
      numbers[leaf] = min(range(self.count), key=entries.__getitem__)
      entries[numbers[leaf]] += max(1, sizes[leaf])  # every fragment has a leaf
    return numbers

  def part(self, tree: Any, number: int) -> Any:
    """The leaves of a fragment, with `optax.MaskedNode` in place of the others."""
    if self.count == 1:
      return tree
    leaves, structure = jax.tree.flatten(tree)
    found = zip(leaves, self.numbers(tree), strict=True)
    return jax.tree.unflatten(structure, [leaf if one == number else optax.MaskedNode() for leaf, one in found])

  def with_zeros(self, tree: Any, part: Any, number: int) -> Any:
    """The leaves of `part`, the fragment of this number, with zeros like those of `tree` in place of the others."""
    leaves, structure = jax.tree.flatten(tree)
    own, found = iter(jax.tree.leaves(part)), zip(leaves, self.numbers(tree), strict=True)
    return jax.tree.unflatten(structure, [next(own) if one == number else jnp.zeros_like(leaf) for leaf, one in found])
