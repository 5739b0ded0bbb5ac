"""A plan carried out: one collective for each group, in the plan's order, inside one compiled program.

A compiler runs what does not depend on each other in any order, and merges what it can. So the order is made of data:
the messages of a group are made to follow from the totals of those groups that must have been sent before it. What it
selects before its first message is not, and neither is backward:

    backward     |--4--|--3--|--2--|--1--|--0--|
    group 0            | messages of 4, 3 |
    group 1                               | messages of 2, which follow from the total of group 0 |
    group 2, simultaneous                       | messages of 1, 0 |

Simultaneous ones do not depend on each other, so there the compiler must be told not to merge them:
`compiler_options`, which `js.make_train_step` sets by itself.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxsparse import flatten, sparse
from jaxsparse._compat import AxisName
from jaxsparse.collectives import Collective, SparseCollective, make_collective
from jaxsparse.comm import axes_of, comm_of
from jaxsparse.comm.replication import mark_total
from jaxsparse.costs import collective_of
from jaxsparse.overlap.plans import Plan
from jaxsparse.transform import state as states
from jaxsparse.transform.metrics import of_all
from jaxsparse.transform.state import ReduceState
from jaxsparse.transform.update import applied, check_local, finished, init_state, is_finite, marked
from jaxsparse.types import Comm, Counters, Reduced, Reduction, State, Tree

_WORD = 4  # bytes of an entry


def bucketed_transform(
  name: str,
  axis: AxisName | Comm,
  *,
  plan: Plan,
  order: Sequence[int] | None = None,
  special: Mapping[str, str] | None = None,
  **config: Any,
) -> optax.GradientTransformation:
  """Averages gradients over the workers group by group, as a plan says: `js.make_transform` in many communications.

  Each group has a collective and a residual of its own, so a sparse one delivers its share of every group; with `k`
  the k entries are shared out to the groups in proportion to their sizes. Laws C and R hold over the whole, and a NaN
  or Inf in one group skips the step for all. Simultaneous groups wait for the same ones before them and not for each
  other: which of them starts first is the runtime's choice.

  Like every jaxsparse transform it must be the first of its chain and run inside `jax.shard_map` over `axis` with
  `check_vma=False`; see `js.spardl_transform`. In a `jax.jit` of your own give
  `compiler_options=js.overlap.compiler_options(platform)`.

  Args:
    name: one of `js.collective_names()` whose total is the same on every worker.
    axis: the name of the shard_map axis the workers lie along, a tuple of such names, or a comm.
    plan: from `js.overlap.plan`, with a layer for each leaf of the parameters.
    order: the number in pytree order of the leaf that each layer is: `.order` of `js.overlap.measure`. By default
      layer l is leaf l.
    special: collectives for leaves that are not to go with the others, by a regular expression for their names in the
      parameters: `{"bias|scale": "dense", "embedding": "spardl:density=0.001"}`; the first that is found counts. The k
      entries of a collective with `k` are those of all leaves of its expression together. Where a group has leaves of
      several collectives it becomes several communications, one after the other.
    **config: the options of the collective.

  Returns:
    An `optax.GradientTransformation`. In its state residuals are a tuple, one for each communication.

  Raises:
    ValueError: for an unknown name, a rejected option, or a collective whose total differs between workers; when used,
      for a plan or an order that does not fit the parameters, or an expression that is found in none of their names.
    TypeError: for an option that the collective does not have, or an axis that is none.

  Example:
    >>> import jax, jax.numpy as jnp, optax, jaxsparse as js
    >>> params = {"bias": jnp.zeros(8), "w": jnp.zeros((64, 8))}
    >>> sizes = [4 * leaf.size for leaf in jax.tree.leaves(params)]
    >>> plan = js.overlap.plan("wfbp", [0.1, 0.2], sizes, alpha=1e-3, beta=1e-8, gamma=1.5)
    >>> tx = js.bucketed_transform("spardl", "workers", plan=plan, special={"bias": "dense"}, density=0.05)
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("workers",))
    >>> state = js.init(optax.chain(tx, optax.sgd(0.1)), params, mesh)
    >>> [residual.size == 512 * len(jax.devices()) for residual in jax.tree.leaves(state[0].carried.residual)]
    [True]
  """
  comm = comm_of(axis)
  kinds = _kinds(make_collective(name, **config), special or {})

  def init(params: optax.Params) -> ReduceState:
    flatten.count(params)
    buckets = _buckets(params, plan, order, kinds)
    starts = [init_state(bucket.collective, bucket.entries, comm.size).carried for bucket in buckets]
    layout = mark_total(states.Layout.of(comm.size, flatten.count(params)), axes_of(comm))
    return ReduceState(_together(starts), Counters.zeros(), layout)

  def update(
    updates: optax.Updates, state: ReduceState, params: optax.Params | None = None
  ) -> tuple[optax.Updates, ReduceState]:
    del params
    n, buckets = flatten.count(updates), _buckets(updates, plan, order, kinds)
    states.check_workers(state, comm.size)
    parts = _apart(state, buckets, comm.size)
    leaves, structure = jax.tree.flatten(updates)
    flat = [flatten.flatten([leaves[leaf] for leaf in bucket.leaves]) for bucket in buckets]
    check_local(comm, updates)
    reduced, finite = _sent(comm, buckets, [grads for grads, _ in flat], [part.carried for part in parts])
    after = []
    for bucket, one, part, (grads, unflatten) in zip(buckets, reduced, parts, flat, strict=True):
      mean, following = applied(one, finite, grads, part, divisor=comm.size)
      after.append(following)
      for leaf, new in zip(bucket.leaves, unflatten(marked(bucket.collective, comm, mean)), strict=True):
        leaves[leaf] = new
    carried, counters = _together([part.carried for part in after]), of_all([part.counters for part in after], n)
    state = finished(comm, state._replace(carried=carried, counters=counters))
    return jax.tree.unflatten(structure, leaves), state

  return optax.GradientTransformation(init, update)


def _averaging(collective: Collective) -> Collective:
  if not collective.replicates:
    raise ValueError(
      f"{collective.name}: its workers go on with gradients of their own, which cannot be done group by group: choose "
      "a collective that averages"
    )
  return collective


class _Kinds(NamedTuple):
  """Which leaves are for which collective.

  Attributes:
    collectives: the default first. Equal ones are one, so that their leaves travel together, unless each has its own k.
    patterns: expressions for names of leaves, the first that is found counts; and the number of its collective.
  """

  collectives: list[Collective]
  patterns: list[tuple[re.Pattern, int]]


def _kinds(default: Collective, special: Mapping[str, str]) -> _Kinds:
  kinds = _Kinds([_averaging(default)], [])
  for pattern, label in special.items():
    name, config = collective_of(label)
    collective = _averaging(make_collective(name, **config))
    if collective not in kinds.collectives or _k_of(collective) is not None:
      kinds.collectives.append(collective)
    number = len(kinds.collectives) - 1 - kinds.collectives[::-1].index(collective)
    kinds.patterns.append((re.compile(pattern), number))
  return kinds


def _k_of(collective: Collective) -> int | None:
  return collective.k if isinstance(collective, SparseCollective) else None


class _Bucket(NamedTuple):
  """Leaves that travel together.

  Attributes:
    leaves: their numbers.
    entries: of all of them.
    collective: what carries them.
    after: so many buckets, the first ones, must have been sent before.
    behind: and those from this number on, of the same group.
  """

  leaves: tuple[int, ...]
  entries: int
  collective: Collective
  after: int
  behind: int


def _buckets(tree: Any, plan: Plan, order: Sequence[int] | None, kinds: _Kinds) -> list[_Bucket]:
  """The communications of a plan for these leaves, in order; empty leaves have nothing to send."""
  names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
  sizes = flatten.sizes(tree)
  leaf_of, kind_of = _checked_order(plan, order, names, sizes), _kind_of(names, kinds)
  buckets: list[_Bucket] = []
  members: dict[int, list[int]] = {}  # numbers of the buckets of each kind
  firsts: list[int] = []  # the first bucket of each group
  for group in plan.groups:
    firsts.append(len(buckets))
    leaves = [leaf_of[layer] for layer in group.layers if sizes[leaf_of[layer]]]
    for kind in dict.fromkeys(kind_of[leaf] for leaf in leaves):
      own = tuple(leaf for leaf in leaves if kind_of[leaf] == kind)
      members.setdefault(kind, []).append(len(buckets))
      entries = sum(sizes[leaf] for leaf in own)
      buckets.append(_Bucket(own, entries, kinds.collectives[kind], firsts[group.after], firsts[-1]))
  for kind, numbers in members.items():
    shares = _shared_out(kinds.collectives[kind], [buckets[number].entries for number in numbers])
    for number, share in zip(numbers, shares, strict=True):
      own = buckets[number].leaves
      buckets[number] = buckets[number]._replace(collective=share.for_leaves(tuple(sizes[leaf] for leaf in own)))
  return buckets


def _kind_of(names: Sequence[str], kinds: _Kinds) -> list[int]:
  """The number of each leaf's collective."""
  for pattern, _ in kinds.patterns:
    if not any(map(pattern.search, names)):
      raise ValueError(f"special: {pattern.pattern!r} is found in none of the leaves {', '.join(names)}")
  return [next((number for pattern, number in kinds.patterns if pattern.search(name)), 0) for name in names]


def _checked_order(
  plan: Plan, order: Sequence[int] | None, names: Sequence[str], sizes: Sequence[int]
) -> Sequence[int]:
  """The leaf of each layer."""
  leaf_of = range(len(names)) if order is None else order
  if len(plan.sizes) != len(names):
    raise ValueError(
      f"the plan is for {len(plan.sizes)} layers, the gradients have {len(names)} leaves: plan for these"
    )
  if sorted(leaf_of) != list(range(len(names))):
    raise ValueError(f"order={order!r}: give the number of each of the {len(names)} leaves once, as .order of measure")
  for layer, leaf in enumerate(leaf_of):
    if plan.sizes[layer] != _WORD * sizes[leaf]:
      raise ValueError(
        f"layer {layer} of the plan has {plan.sizes[layer]:g} bytes, and its leaf {names[leaf]} {_WORD * sizes[leaf]} "
        f"({_WORD} for each entry): make the plan with sizes and order of js.overlap.measure for these parameters"
      )
  return leaf_of


def _shared_out(collective: Collective, sizes: Sequence[int]) -> list[Collective]:
  """The collective of each bucket of so many entries: of its k one each, and the rest in proportion."""
  if (k := _k_of(collective)) is None:
    return [collective] * len(sizes)
  assert isinstance(collective, SparseCollective)
  collective.entries(sum(sizes))  # raises where k does not fit
  if k < len(sizes):
    raise ValueError(f"{collective.name}: k={k}, choose at least one for each of the {len(sizes)} groups")
  reached = list(itertools.accumulate((size - 1 for size in sizes), initial=0))
  bounds = [(k - len(sizes)) * upto // max(1, reached[-1]) for upto in reached]
  return [dataclasses.replace(collective, k=1 + high - low) for low, high in itertools.pairwise(bounds)]


@dataclasses.dataclass(frozen=True)
class _Waiting:
  """A comm whose messages follow from `sent`: i32[], 0, which no compiler knows."""

  comm: Comm
  sent: jax.Array

  @property
  def size(self) -> int:
    return self.comm.size

  @property
  def rank(self) -> jax.Array:
    return self.comm.rank

  def shift(self, tree: Tree, by: int) -> Tree:
    return self.comm.shift(self._following(tree), by) if by % self.size else tree

  def permute(self, tree: Tree, pairs: Sequence[tuple[int, int]]) -> Tree:
    return self.comm.permute(self._following(tree), pairs)

  def all_reduce(self, x: jax.Array, op: Reduction = "sum") -> jax.Array:
    return self.comm.all_reduce(self._following(x), op)

  def split(self, teams: int) -> "tuple[_Waiting, _Waiting]":
    team, member = self.comm.split(teams)
    return _Waiting(team, self.sent), _Waiting(member, self.sent)

  def _following(self, tree: Tree) -> Tree:
    """`tree`, one entry of which is not there before `sent` is; the same bits."""
    leaves, structure = jax.tree.flatten(tree)
    number = max(range(len(leaves)), key=lambda leaf: leaves[leaf].size)
    flat = leaves[number].reshape(-1)
    first = jnp.where(self.sent >= 0, flat[0], jnp.zeros((), flat.dtype))
    leaves[number] = flat.at[0].set(first).reshape(leaves[number].shape)
    return jax.tree.unflatten(structure, leaves)


def _sent(
  comm: Comm, buckets: Sequence[_Bucket], grads: Sequence[jax.Array], carried: Sequence[State]
) -> tuple[list[Reduced], jax.Array]:
  """Reduces every bucket after those that it waits for; and whether all totals are finite."""
  reduced: list[Reduced] = []
  finite: list[jax.Array] = []
  ends: list[jax.Array] = []  # 0, but not before each has been sent
  done = [jnp.int32(0)]  # likewise, before the first so many have been
  for number, (bucket, flat, state) in enumerate(zip(buckets, grads, carried, strict=True)):
    before = [done[bucket.after], *ends[bucket.behind : number]] if bucket.after or bucket.behind < number else []
    waiting = _Waiting(comm, jnp.array(before).min()) if before else comm
    reduced.append(bucket.collective.reduce(waiting, flat, state))
    finite.append(is_finite(comm, reduced[-1]))  # reads all of the total, so all that was sent
    ends.append(sparse.after(finite[-1], jnp.int32(0)))
    done.append(jnp.minimum(done[-1], ends[-1]))
  return reduced, jnp.array(finite).all()


def _together(states_of: Sequence[State]) -> State:
  """The states of all groups as one; the `due` of collectives that average is None."""
  return State(*(tuple(getattr(one, part) for one in states_of) for part in ("residual", "worker", "shared")))


def _apart(state: ReduceState, buckets: Sequence[_Bucket], workers: int) -> list[ReduceState]:
  """The state of each group; each has the counters of the whole, for what they count on from step to step."""
  carried = state.carried
  if not isinstance(carried.residual, tuple) or len(carried.residual) != len(buckets):
    raise ValueError(
      f"the optimizer state is not one of {len(buckets)} groups: make a new one with js.init for this plan"
    )
  parts = [state._replace(carried=State(*one)) for one in zip(*carried[:3], strict=True)]
  for number, (part, bucket) in enumerate(zip(parts, buckets, strict=True)):
    states.check_entries(part, bucket.entries)
    start = functools.partial(bucket.collective.init, bucket.entries, workers)
    states.check_kind(part, start, f"group {number} with {bucket.collective.name}")
  return parts
