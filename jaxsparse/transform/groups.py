"""Groups of leaves of a gradient: which leaves are reduced together, by which collective, and after which groups.

The plain transform has one group of all leaves. `special=` gives leaves a collective by
their names; a plan (`js.bucketed_transform`) sends bundles of leaves one after the
other or at once.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import optax

from jaxsparse.arrays.flatten import leaves_by_name
from jaxsparse.collectives import Collective, make_collective
from jaxsparse.types import ArrayTree

Special = Mapping[str, str | Collective]
Shapes = Mapping[str, tuple[int, ...]]


class Group(NamedTuple):
  """Leaves that are reduced together.

  Attributes:
    leaves: the numbers of the leaves in pytree order.
    entries: number of entries of all leaves.
    collective: the collective that reduces them.
    waits_for: numbers of the groups whose totals must be complete before the first
      message of this one.
  """

  leaves: tuple[int, ...]
  entries: int
  collective: Collective
  waits_for: tuple[int, ...] = ()


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Method:
  """The leaves that a transform covers and the groups in which it reduces them: a part of a state, no array.

  A state can be made again from it, for another number of workers, and says to which
  leaf each residual belongs.

  Attributes:
    names: of the leaves in the parameters, in pytree order.
    shapes: of the leaves.
    groups: of the leaves, in the order in which they are sent.
  """

  names: tuple[str, ...]
  shapes: tuple[tuple[int, ...], ...]
  groups: tuple[Group, ...]


class Bundle(NamedTuple):
  """Leaves that a plan sends together.

  Attributes:
    leaves: the numbers of the leaves in pytree order.
    waits_for: the numbers of the bundles that this one is sent after.
  """

  leaves: tuple[int, ...]
  waits_for: tuple[int, ...] = ()


class Assignment(NamedTuple):
  """The collective of each leaf, by its name.

  Attributes:
    collectives: the default first. Leaves of equal collectives are reduced together,
      unless each has its own k.
    patterns: regular expressions for names of leaves, each with the number of its
      collective; the first match counts.
  """

  collectives: list[Collective]
  patterns: Sequence[tuple[re.Pattern, int]] = ()


def assign_collectives(default: Collective, special: Special) -> Assignment:
  """The collectives of `special`, as `make_collective` reads them, and the default for all other leaves.

  Args:
    default: the collective of leaves that no expression matches.
    special: regular expressions for names of leaves -> a label or collective.

  Raises:
    ValueError: for a rejected expression or label, or a collective whose total differs
      between workers.
    TypeError: for an option that a collective does not have, or no collective.
  """
  collectives = [default]
  # (compiled expression, index of its collective)
  patterns = []
  for pattern, label in special.items():
    try:
      collective = make_collective(label)
    except (TypeError, ValueError) as error:
      raise type(error)(f"special: {pattern!r}: {error}") from error
    # Leaves of equal collectives are reduced together. A k is meant for the leaves of
    # its own pattern: collectives with a k stay apart.
    if collective not in collectives or collective.traits.has_k:
      collectives.append(collective)
    # The index of the last equal collective: the one just appended, if any was.
    kind = len(collectives) - 1 - collectives[::-1].index(collective)
    try:
      patterns.append((re.compile(pattern), kind))
    except re.error as error:
      raise ValueError(
        f"special: {pattern!r} is not a regular expression: {error}"
      ) from error
  for collective in collectives:
    if not collective.traits.replicates:
      raise ValueError(
        f"{collective.name}: its workers go on with gradients of their own, which groups of leaves do not support: "
        "choose a collective that averages"
      )
  return Assignment(collectives, patterns)


def check_special(special: Special, tree: ArrayTree) -> None:
  """Raises ValueError for an expression that matches the name of no leaf of `tree`, masked leaves included.

  Masked leaves count, since a transform may be given some of the leaves only
  (`optax.multi_transform`, fragments), and an expression may match none of these.
  """
  is_masked = lambda leaf: isinstance(leaf, optax.MaskedNode)
  # name -> whether the leaf, or a whole part of the tree, is an `optax.MaskedNode`
  names = leaves_by_name(jax.tree.map(is_masked, tree, is_leaf=is_masked))
  hint = (
    ", of a masked part as a whole: give a label or mask for each leaf"
    if any(names.values())
    else ""
  )
  for pattern in special:
    if not any(re.search(pattern, name) for name in names):
      raise ValueError(
        f"special: {pattern!r} is found in none of the leaves {', '.join(names)}{hint}"
      )


def groups_of(
  shapes: Shapes, assignment: Assignment, bundles: Sequence[Bundle] | None = None
) -> list[Group]:
  """The groups of a gradient, in the order in which they are sent; empty leaves are in no group.

  Args:
    shapes: of the leaves, by their names.
    assignment: the collective of each leaf.
    bundles: the leaves that are sent together; all of them by default.

  Raises:
    ValueError: for a k that does not fit the entries of its leaves.

  Example:
    >>> assignment = assign_collectives(make_collective("spardl", k=9), {"bias|scale": "dense", "embed": "topka:k=9"})
    >>> groups = groups_of({"['bias']": (3,), "['embed']": (8, 4), "['w']": (5, 5)}, assignment)
    >>> [(group.leaves, group.collective.label) for group in groups]
    [((0,), 'dense'), ((1,), 'topka:k=9'), ((2,), 'spardl:k=9')]
  """
  # The index of each leaf's collective in the assignment, its kind; 0 is the default.
  kind_of = [
    next((kind for pattern, kind in assignment.patterns if pattern.search(name)), 0)
    for name in shapes
  ]
  shape_of = list(shapes.values())
  sizes = list(map(math.prod, shape_of))
  groups: list[Group] = []
  members: dict[int, list[int]] = {}  # indices of the groups of each kind
  in_bundle: list[range] = []  # indices of the groups of each bundle
  # None: one bundle of all leaves.
  for bundle in [Bundle(tuple(range(len(sizes))))] if bundles is None else bundles:
    first = len(groups)
    bundled = [leaf for leaf in bundle.leaves if sizes[leaf]]
    for kind in dict.fromkeys(kind_of[leaf] for leaf in bundled):
      leaves = tuple(leaf for leaf in bundled if kind_of[leaf] == kind)
      members.setdefault(kind, []).append(len(groups))
      # A group waits for the groups of all bundles that its bundle waits for, and for
      # the earlier groups of its own bundle.
      before = {
        *itertools.chain(*(in_bundle[other] for other in bundle.waits_for)),
        *range(first, len(groups)),
      }
      # To wait for a group implies to wait for the groups that it waits for.
      implied = {other for group in before for other in groups[group].waits_for}
      entries = sum(sizes[leaf] for leaf in leaves)
      groups.append(
        Group(
          leaves, entries, assignment.collectives[kind], tuple(sorted(before - implied))
        )
      )
    in_bundle.append(range(first, len(groups)))
  # A k is divided among all groups of its collective, which are known only now.
  for kind, indices in members.items():
    alike = [groups[index] for index in indices]
    fitted = _fit_collective(assignment.collectives[kind], alike, shape_of)
    for index, group in zip(indices, fitted, strict=True):
      groups[index] = group
  return groups


def _fit_collective(
  collective: Collective, groups: list[Group], shapes: list[tuple[int, ...]]
) -> list[Group]:
  """The groups of a collective, each with a copy of it that is fitted to the entries and leaves of the group.

  Args:
    collective: of all these groups.
    groups: all of its groups, among which its k is shared out by their entries.
    shapes: of all leaves of the gradient, by their numbers.
  """
  shares = collective.for_groups([group.entries for group in groups])
  return [
    group._replace(
      collective=share.for_leaves(tuple(shapes[leaf] for leaf in group.leaves))
    )
    for group, share in zip(groups, shares, strict=True)
  ]
