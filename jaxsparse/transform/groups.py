"""Groups of leaves of a gradient: which leaves are reduced together, by which collective, and after which groups.

The plain transform has one group of all leaves. `special=` gives leaves a collective by their names; a plan
(`js.bucketed_transform`) sends bundles of leaves one after the other or at once.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax

from jaxsparse import flatten
from jaxsparse.collectives import Collective, SparseCollective, make_collective
from jaxsparse.collectives._base import collective_of

Special = Mapping[str, str]


class Group(NamedTuple):
  """Leaves that are reduced together.

  Attributes:
    leaves: the numbers of the leaves in pytree order.
    entries: number of entries of all leaves.
    collective: the collective that reduces them.
    waits_for: numbers of the groups whose totals must be complete before the first message of this one.
  """

  leaves: tuple[int, ...]
  entries: int
  collective: Collective
  waits_for: tuple[int, ...] = ()


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Method:
  """The leaves that a transform covers and the groups in which it reduces them: a part of a state, no array.

  A state can be made again from it, for another number of workers, and says to which leaf each residual belongs.

  Attributes:
    names: of the leaves in the parameters, in pytree order.
    shapes: of the leaves.
    groups: of the leaves, in the order in which they are sent.
    alone: whether the state is that of the only group, and not a tuple with a part for each.

  Example:
    >>> import jax.numpy as jnp
    >>> params = {"bias": jnp.zeros(3), "w": jnp.zeros((4, 2))}
    >>> group = Group((0, 1), 11, make_collective("spardl", k=2))
    >>> method = Method.from_leaves(params, [group], alone=True)
    >>> method.names, method.sizes
    (("['bias']", "['w']"), (3, 8))
  """

  names: tuple[str, ...]
  shapes: tuple[tuple[int, ...], ...]
  groups: tuple[Group, ...]
  alone: bool

  @classmethod
  def from_leaves(cls, tree: Any, groups: Sequence[Group], alone: bool) -> Self:
    """The method of a transform that reduces the leaves of a pytree in these groups."""
    return cls(tuple(leaf_names(tree)), flatten.shapes(tree), tuple(groups), alone)

  @property
  def sizes(self) -> tuple[int, ...]:
    """Entries of each leaf."""
    return tuple(map(math.prod, self.shapes))


def leaf_names(tree: Any) -> list[str]:
  """The path of each leaf as text, as errors and `special=` name it."""
  return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def leaf_numbers(names: Sequence[str], tree: Any) -> list[int]:
  """The numbers of the leaves of these names: a transform may cover a part of a pytree, as under `optax.masked`.

  Not by the structure of the pytree: a restored one may have other containers, and need not compare or pickle.

  Example:
    >>> leaf_numbers(["['a']", "['e']"], {"a": 0.0, "b": {"c": 0.0, "d": 0.0}, "e": 0.0})
    [0, 3]
  """
  numbers = {name: number for number, name in enumerate(leaf_names(tree))}
  return [numbers[name] for name in names]


class Bundle(NamedTuple):
  """Leaves that a plan sends together.

  Attributes:
    leaves: the numbers of the leaves in pytree order.
    waits_for_first: this bundle is sent after the first so many bundles of the plan.
  """

  leaves: tuple[int, ...]
  waits_for_first: int = 0


class Assignment(NamedTuple):
  """The collective of each leaf, by its name.

  Attributes:
    collectives: the default first. Leaves of equal collectives are reduced together, unless each has its own k.
    patterns: regular expressions for names of leaves, each with the number of its collective; the first match counts.
  """

  collectives: list[Collective]
  patterns: Sequence[tuple[re.Pattern, int]] = ()

  def numbers(self, names: Sequence[str]) -> list[int]:
    """The number of the collective of each leaf; raises ValueError for an expression that matches no name."""
    for pattern, _ in self.patterns:
      if not any(map(pattern.search, names)):
        raise ValueError(f"special: {pattern.pattern!r} is found in none of the leaves {', '.join(names)}")
    return [next((number for pattern, number in self.patterns if pattern.search(name)), 0) for name in names]


def assign_collectives(default: Collective, special: Special) -> Assignment:
  """The collectives of `special`, by their labels, and the default for all other leaves.

  Raises:
    ValueError: for a rejected label, or a collective whose total differs between workers.
    TypeError: for an option that a collective does not have.

  Example:
    >>> assignment = assign_collectives(make_collective("spardl", k=9), {"bias|scale": "dense", "embed": "topka:k=9"})
    >>> [assignment.collectives[number].name for number in assignment.numbers(["['bias']", "['embed']", "['w']"])]
    ['dense', 'topka', 'spardl']
  """
  collectives, patterns = [_check_replicates(default)], []
  for pattern, label in special.items():
    name, config = collective_of(label)
    collective = _check_replicates(make_collective(name, **config))
    if collective not in collectives or getattr(collective, "k", None) is not None:
      collectives.append(collective)
    number = len(collectives) - 1 - collectives[::-1].index(collective)
    patterns.append((re.compile(pattern), number))
  return Assignment(collectives, patterns)


def groups_of(tree: Any, assignment: Assignment, bundles: Sequence[Bundle] | None = None) -> list[Group]:
  """The groups of a pytree of gradients, in the order in which they are sent; empty leaves are in no group.

  Args:
    tree: the gradients, or the parameters.
    assignment: the collective of each leaf.
    bundles: the leaves that are sent together; all of them by default.

  Raises:
    ValueError: for an expression that matches no name, or a k that does not fit the entries of its leaves.
  """
  shapes, kind_of = flatten.shapes(tree), assignment.numbers(leaf_names(tree))
  sizes = list(map(math.prod, shapes))
  groups: list[Group] = []
  members: dict[int, list[int]] = {}  # the groups of each collective
  firsts: list[int] = []  # the first group of each bundle
  for bundle in [Bundle(tuple(range(len(shapes))))] if bundles is None else bundles:
    firsts.append(len(groups))
    leaves = [leaf for leaf in bundle.leaves if sizes[leaf]]
    for kind in dict.fromkeys(kind_of[leaf] for leaf in leaves):
      own = tuple(leaf for leaf in leaves if kind_of[leaf] == kind)
      members.setdefault(kind, []).append(len(groups))
      earlier = {*range(firsts[bundle.waits_for_first]), *range(firsts[-1], len(groups))}
      implied = {other for number in earlier for other in groups[number].waits_for}  # through another one
      entries = sum(sizes[leaf] for leaf in own)
      groups.append(Group(own, entries, assignment.collectives[kind], tuple(sorted(earlier - implied))))
  for kind, numbers in members.items():
    collectives = split_k(assignment.collectives[kind], [groups[number].entries for number in numbers])
    for number, collective in zip(numbers, collectives, strict=True):
      fitted = collective.for_leaves(tuple(shapes[leaf] for leaf in groups[number].leaves))
      groups[number] = groups[number]._replace(collective=fitted)
  return groups


def split_k(collective: Collective, sizes: Sequence[int]) -> list[Collective]:
  """The collective of each group, given the sizes of the groups: k is divided in proportion, at least 1 for each.

  Raises:
    ValueError: if k exceeds the number of all entries, or is less than the number of groups.
  """
  if not isinstance(collective, SparseCollective) or (k := collective.k) is None or len(sizes) == 1:
    return [collective] * len(sizes)
  collective.entries(sum(sizes))  # raises where k does not fit
  if k < len(sizes):
    raise ValueError(f"{collective.name}: k={k}, choose at least one for each of the {len(sizes)} groups")
  # 1 each, the rest in proportion to size − 1, so that no group gets more than its entries.
  reached = list(itertools.accumulate((size - 1 for size in sizes), initial=0))
  bounds = [(k - len(sizes)) * upto // max(1, reached[-1]) for upto in reached]
  return [dataclasses.replace(collective, k=1 + high - low) for low, high in itertools.pairwise(bounds)]


def _check_replicates(collective: Collective) -> Collective:
  if not collective.replicates:
    raise ValueError(
      f"{collective.name}: its workers go on with gradients of their own, which groups of leaves do not support: "
      "choose a collective that averages"
    )
  return collective
