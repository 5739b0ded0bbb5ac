"""Carries out a plan: one collective for each group of leaves, in the plan's order, inside one compiled program.

A compiler runs operations that do not depend on each other in any order, and merges
collectives where it can. So the first message of a group depends on the totals of the
groups that must have been sent before it (`comm.ordering`). Selection before that
message does not, and neither does backward:

    backward     |--4--|--3--|--2--|--1--|--0--|
    group 0            | messages of 4, 3 |
    group 1                               | messages of 2, which depend on the total of group 0 |
    group 2, simultaneous                       | messages of 1, 0 |

Simultaneous groups do not depend on each other, so the compiler must be told not to
merge them: by `compiler_options`, which `js.make_train_step` sets by itself.
"""

import math
from collections.abc import Sequence
from typing import Any

import optax

from jaxsparse._compat import AxisName
from jaxsparse.collectives import Collective, make_collective
from jaxsparse.overlap.plans import Plan
from jaxsparse.transform.groups import (
  Bundle,
  Group,
  Shapes,
  Special,
  assign_collectives,
  groups_of,
)
from jaxsparse.transform.update import grouped_transform
from jaxsparse.types import Comm

_WORD = 4  # bytes of an entry


def bucketed_transform(
  name: str | Collective,
  axis: AxisName | Comm,
  *,
  plan: Plan,
  order: Sequence[int] | None = None,
  special: Special | None = None,
  shardings: Any = None,
  **config: Any,
) -> optax.GradientTransformation:
  """Averages gradients over the workers group by group, as a plan says: `js.make_transform` in many communications.

  Each group has a collective and a residual of its own, so a sparse one delivers its
  share of every group; with `k` the k entries are shared out to the groups in
  proportion to their sizes. Laws C and R hold over the whole, and a NaN or Inf in one
  group skips the step for all. A simultaneous group does not wait for the groups that
  it overlaps with: the runtime chooses which of them starts first.

  Like every jaxsparse transform it stands before the optimizer in its chain, and runs
  inside `jax.shard_map` over `axis`; see `js.make_transform`. In a `jax.jit` of your
  own give `compiler_options=js.overlap.compiler_options(platform)`.

  Args:
    name: one of `js.collective_names()`, with options as "spardl:density=0.01", or a
      collective of your own, whose total is the same on every worker.
    axis: the name of the shard_map axis the workers lie along, a tuple of such names,
      or a comm.
    plan: from `js.overlap.plan`, with a layer for each leaf of the parameters.
    order: layer l of the plan is leaf `order[l]` in pytree order: `.order` of
      `js.overlap.measure`. By default layer l is leaf l.
    special: collectives of leaves by their names, as in `js.make_transform`. The k
      entries of a collective with `k` are those of all leaves of its expression
      together. A group with leaves of several collectives becomes several
      communications, one after the other.
    shardings: of the parameters inside a worker, as in `js.make_transform`.
    **config: the options of the collective.

  Returns:
    An `optax.GradientTransformation`. In its state residuals are a tuple, one for each
    communication.

  Raises:
    ValueError: for an unknown name, a rejected option, or a collective whose total
      differs between workers; when used, for a plan or an order that does not fit the
      parameters, or an expression that matches none of their names.
    TypeError: for an option that the collective does not have, or an `axis` that is
      neither a name nor a comm.

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
  assignment = assign_collectives(make_collective(name, **config), special or {})

  def groups(shapes: Shapes) -> list[Group]:
    return groups_of(shapes, assignment, _bundles(shapes, plan, order))

  return grouped_transform(groups, assignment.collectives, axis, shardings, special)


def _bundles(
  shapes: Shapes,
  plan: Plan,
  order: Sequence[int] | None,
) -> list[Bundle]:
  """For each group of a plan, its leaves of the gradient and the groups that it is sent after.

  Args:
    shapes: the shape of each leaf by its name, in pytree order.
    plan: the plan.
    order: layer l of the plan is leaf `order[l]` in pytree order; None: leaf l.

  Raises:
    ValueError: for a plan or an order that does not fit.
  """
  names = list(shapes)
  sizes = [_WORD * math.prod(shape) for shape in shapes.values()]
  leaf_of = range(len(names)) if order is None else order
  if len(plan.sizes) != len(names):
    raise ValueError(
      f"the plan is for {len(plan.sizes)} layers, the gradients have {len(names)} leaves: plan again"
    )
  if sorted(leaf_of) != list(range(len(names))):
    raise ValueError(
      f"order={order!r}: give the number of each of the {len(names)} leaves once, as .order of measure"
    )
  # Gradients are reduced in float32, whatever the dtypes of the parameters are.
  for layer, leaf in enumerate(leaf_of):
    if plan.sizes[layer] != sizes[leaf]:
      raise ValueError(
        f"layer {layer} of the plan has {plan.sizes[layer]:g} bytes, and its leaf {names[leaf]} {sizes[leaf]} "
        f"({_WORD} for each entry): make the plan with sizes and order of js.overlap.measure for these parameters"
      )
  # A bundle: numbers of leaves in pytree order, and the bundles to wait for.
  return [
    Bundle(tuple(leaf_of[layer] for layer in group.layers), group.after)
    for group in plan.groups
  ]
