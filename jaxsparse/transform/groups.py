"""Groups of leaves of a gradient: which leaves are reduced together, by which collective, and after which groups.

A group is one communication with a collective and a state of its own. The plain transform has one group of all leaves.
`special=` gives leaves a collective by their names, and a plan (`js.bucketed_transform`) bundles of leaves, which it
sends one after the other or at once; a bundle whose leaves have several collectives becomes one group for each.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

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
    after: numbers of the groups whose totals must be complete before the first message of this one.
  """

  leaves: tuple[int, ...]
  entries: int
  collective: Collective
  after: tuple[int, ...] = ()


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Method:
  """The leaves that a transform covers, and the groups in which it reduces them: a part of a state, no array.

  A state can be made again from it, for another number of workers, and says to which leaf each residual belongs.

  Attributes:
    names: of the leaves in the parameters, in pytree order.
    shapes: of the leaves.
    groups: of the leaves, in the order in which they are sent.
    alone: whether the state is that of the only group, and not a tuple with a part for each.

  Example:
    >>> params = {"bias": jnp.zeros(3), "w": jnp.zeros((4, 2))}
    >>> group = Group((0, 1), 11, make_collective("spardl", k=2))
    >>> method = Method.of(params, [group], alone=True)
    >>> method.names, method.sizes
    (("['bias']", "['w']"), (3, 8))
  """

  names: tuple[str, ...]
  shapes: tuple[tuple[int, ...], ...]
  groups: tuple[Group, ...]
  alone: bool

  @classmethod
  def of(cls, tree: Any, groups: Sequence[Group], alone: bool) -> Self:
    """The method of a transform that reduces the leaves of a pytree in these groups."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = tuple(jax.tree_util.keystr(path) for path, _ in leaves)
    return cls(names, tuple(jnp.shape(leaf) for _, leaf in leaves), tuple(groups), alone)

  @property
  def sizes(self) -> tuple[int, ...]:
    """Entries of each leaf."""
    return tuple(map(math.prod, self.shapes))


class Bundle(NamedTuple):
  """Leaves that a plan sends together.

  Attributes:
    leaves: the numbers of the leaves in pytree order.
    after: this bundle is sent after the first `after` bundles of the plan.
  """

  leaves: tuple[int, ...]
  after: int = 0


class Assignment(NamedTuple):
  """The collective of each leaf, by its name.

  Attributes:
    collectives: the default first. Leaves of equal collectives are reduced together, unless each has its own k.
    patterns: regular expressions for names of leaves, each with the number of its collective; the first match counts.
  """

  collectives: list[Collective]
  patterns: list[tuple[re.Pattern, int]]

  def numbers(self, names: Sequence[str]) -> list[int]:
    """The number of the collective of each leaf.

    Raises:
      ValueError: for an expression that matches no name.
    """
    for pattern, _ in self.patterns:
      if not any(map(pattern.search, names)):
        raise ValueError(f"special: {pattern.pattern!r} is found in none of the leaves {', '.join(names)}")
    return [next((number for pattern, number in self.patterns if pattern.search(name)), 0) for name in names]


def assigned(default: Collective, special: Special) -> Assignment:
  """The collectives of `special`, by their labels, and the default for all other leaves.

  Raises:
    ValueError: for a rejected label, or a collective whose total differs between workers.
    TypeError: for an option that a collective does not have.

  Example:
    >>> made = assigned(make_collective("spardl", density=0.1), {"bias|scale": "dense", "embedding": "topka:k=9"})
    >>> [made.collectives[number].name for number in made.numbers(["['bias']", "['embedding']", "['w']"])]
    ['dense', 'topka', 'spardl']
  """
  found = Assignment([_averaging(default)], [])
  for pattern, label in special.items():
    name, config = collective_of(label)
    collective = _averaging(make_collective(name, **config))
    if collective not in found.collectives or _k_of(collective) is not None:
      found.collectives.append(collective)
    number = len(found.collectives) - 1 - found.collectives[::-1].index(collective)
    found.patterns.append((re.compile(pattern), number))
  return found


def groups_of(tree: Any, assignment: Assignment, bundles: Sequence[Bundle] | None = None) -> list[Group]:
  """The groups of a pytree of gradients, in the order in which they are sent; empty leaves are in no group.

  Args:
    tree: the gradients, or the parameters.
    assignment: the collective of each leaf.
    bundles: the leaves that are sent together; all of them by default.

  Raises:
    ValueError: for an expression that matches no name, or a k that does not fit the entries of its leaves.
  """
  names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
  shapes, sizes, kind_of = flatten.shapes(tree), flatten.sizes(tree), assignment.numbers(names)
  groups: list[Group] = []
  members: dict[int, list[int]] = {}  # the groups of each collective
  firsts: list[int] = []  # the first group of each bundle
  for bundle in [Bundle(tuple(range(len(names))))] if bundles is None else bundles:
    firsts.append(len(groups))
    leaves = [leaf for leaf in bundle.leaves if sizes[leaf]]
    for kind in dict.fromkeys(kind_of[leaf] for leaf in leaves):
      own = tuple(leaf for leaf in leaves if kind_of[leaf] == kind)
      members.setdefault(kind, []).append(len(groups))
      after = (*range(firsts[bundle.after]), *range(firsts[-1], len(groups)))
      groups.append(Group(own, sum(sizes[leaf] for leaf in own), assignment.collectives[kind], after))
  for kind, numbers in members.items():
    shares = shared_out(assignment.collectives[kind], [groups[number].entries for number in numbers])
    for number, share in zip(numbers, shares, strict=True):
      own = groups[number].leaves
      groups[number] = groups[number]._replace(collective=share.for_leaves(tuple(shapes[leaf] for leaf in own)))
  return _without_implied(groups)


def shared_out(collective: Collective, sizes: Sequence[int]) -> list[Collective]:
  """The collective of each group, given the sizes of the groups: k is divided in proportion, at least 1 for each.

  Raises:
    ValueError: if k exceeds the number of all entries, or is less than the number of groups.
  """
  if (k := _k_of(collective)) is None or len(sizes) == 1:
    return [collective] * len(sizes)
  assert isinstance(collective, SparseCollective)
  collective.entries(sum(sizes))  # raises where k does not fit
  if k < len(sizes):
    raise ValueError(f"{collective.name}: k={k}, choose at least one for each of the {len(sizes)} groups")
  reached = list(itertools.accumulate((size - 1 for size in sizes), initial=0))
  bounds = [(k - len(sizes)) * upto // max(1, reached[-1]) for upto in reached]
  return [dataclasses.replace(collective, k=1 + high - low) for low, high in itertools.pairwise(bounds)]


def _without_implied(groups: Sequence[Group]) -> list[Group]:
  """The same order with fewer dependencies: a group need not follow one that it follows through another."""
  implied = [set().union(*(groups[number].after for number in group.after)) for group in groups]
  return [
    group._replace(after=tuple(number for number in group.after if number not in through))
    for group, through in zip(groups, implied, strict=True)
  ]


def _averaging(collective: Collective) -> Collective:
  if not collective.replicates:
    raise ValueError(
      f"{collective.name}: its workers go on with gradients of their own, which groups of leaves do not support: "
      "choose a collective that averages"
    )
  return collective


def _k_of(collective: Collective) -> int | None:
  return collective.k if isinstance(collective, SparseCollective) else None
