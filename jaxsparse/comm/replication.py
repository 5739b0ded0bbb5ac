"""Checks on the jaxpr of a program which values are equal on all workers, and splits it where they become so.

JAX types a value inside `jax.shard_map` as varying or not over each axis, and so tells
that a result differs, but not which leaf and why, and only on a mesh. It also refuses
losses that are right: a scan over the batch whose carry begins with zeros. So in the
library's own steps that check is off (`check_vma=False`), and for every value of one
worker's program this module computes the set of axes that the value may vary over:

    sharded inputs, axis_index         the axes of their PartitionSpec, of their name
    psum and the like over whole axes  without these axes
    a shard_map within the program     without the axes that only this one maps over
    callbacks, references              all axes, since their results are unknown
    any other operation                the union over its operands

Transforms mark with `mark_total` the values that a law makes equal on all workers. This
check trusts these marks, as do the types of JAX in a shard_map of the user's own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.sharding import PartitionSpec

from jaxsparse._compat import AxisName, inner_jaxprs, names_of, scan_counts
from jaxsparse.comm.verbs import list_axes, mark_total, other_axes_error, total_p

__all__ = ["axes_of_spec", "check_axes", "checked", "mark_total"]

Axes = frozenset[str]

_PSUMS = (
  "psum",
  "psum2",
  "psum_invariant",
  "pmax",
  "pmin",
  "all_gather",
  "all_gather_invariant",
)
_SENDS = (
  "ppermute",
  "all_to_all",
  "ragged_all_to_all",
  "reduce_scatter",
  "psum_scatter",
  "collective_broadcast",
)
_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def checked(
  function: Callable,
  in_specs: Any,
  out_specs: Any,
  axis: AxisName,
  results: Mapping[str, str],
  others: Iterable[str] = (),
  rewrite: Callable[[core.ClosedJaxpr], core.ClosedJaxpr] = lambda closed: closed,
  instead: Callable[[TypeError], Callable] | None = None,
) -> Callable:
  """`function`, which raises when it is traced if a replicated result would differ between workers.

  Args:
    function: the program of one worker, to be mapped over the workers along `axis`.
    in_specs: PartitionSpecs, a prefix of its arguments: arguments vary over the axes of
      their specs.
    out_specs: PartitionSpecs, a prefix of its results, a tuple: results may vary over
      the axes of their specs only.
    axis: the axis, or tuple of axes, of the workers.
    results: for the error, the name of each result and the likely mistake where it
      would differ.
    others: further axes that the program is mapped over; a result whose spec does not
      name them must be equal along them, too.
    rewrite: from the jaxpr that was checked to the jaxpr that runs.
    instead: called with the TypeError that a trace of `function` raises. It returns the
      program to trace in place of `function`, for a `tx` that does not take all
      arguments, or raises an error that says what the user should change. None: the
      TypeError is raised.

  Raises:
    ValueError: when traced: if a transform is over other axes, or if a result that
      should be equal on all workers depends on the data of one worker, naming the first
      such leaf.
  """
  axes = frozenset(names_of(axis))

  def traced(*arguments: Any) -> Any:
    try:
      closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    except TypeError as error:
      if instead is None:
        raise
      closed, shapes = jax.make_jaxpr(instead(error), return_shape=True)(*arguments)
    axes_of_values = _AxesOfValues(axes, axes.union(others))
    # Along axes of a spec that the program is not mapped over, the compiler partitions
    # the array: there is one value, which does not vary.
    varying = [
      axes_of_spec(spec) & axes_of_values.every
      for spec in jax.tree.leaves(jax.tree.broadcast(in_specs, arguments))
    ]
    outputs = axes_of_values.find_axes(closed.jaxpr, varying)
    allowed = jax.tree.leaves(jax.tree.broadcast(out_specs, shapes))
    for varies, spec, (path, _) in zip(
      outputs, allowed, jax.tree_util.tree_leaves_with_path(shapes), strict=True
    ):
      if differs := varies - axes_of_spec(spec):
        # The first key of a path is the index in the tuple of results.
        name, why = list(results.items())[path[0].idx]
        leaf = name + jax.tree_util.keystr(path[1:])
        raise ValueError(
          f"{leaf} would differ between the workers along axis {list_axes(differs)}: {why}"
        )
    # The program that was checked runs: tracing `function` again would take as long.
    leaves = core.jaxpr_as_fun(rewrite(closed))(*jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

  return traced


def check_axes(function: Callable, arguments: Sequence[Any], axis: AxisName) -> None:
  """Raises ValueError if a transform inside `function`, the program of one worker, is over other axes than `axis`."""
  jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
  # `find_axes` raises for a mark over other axes, whatever the axes of the inputs are.
  axes = frozenset(names_of(axis))
  _AxesOfValues(axes, axes).find_axes(jaxpr, [frozenset()] * len(jaxpr.invars))


class Halves(NamedTuple):
  """A program of one worker in two: the first one ends with all messages, the second one is the same on all workers.

      first:  arguments             -> totals, results that vary
      second: totals, arguments     -> results that are equal

  Attributes:
    first: the jaxpr.
    second: the jaxpr; of arguments that are equal alone.
    totals: how many there are.
    equal: of each result, whether it is equal on all workers.
  """

  first: core.ClosedJaxpr
  second: core.ClosedJaxpr
  totals: int
  equal: list[bool]


def halve(closed: core.ClosedJaxpr, varying: Sequence[Axes], axis: AxisName) -> Halves:
  """Splits a checked program of one worker in two, where its totals are known.

  The second half computes the results that are equal on all workers, from the totals
  and from inputs that are equal on all workers. So a worker that was absent can repeat
  it, once it has the totals.

  Args:
    closed: the program.
    varying: the axes that each of its inputs may vary over.
    axis: name of the axis, or axes, of the workers.
  """
  jaxpr = closed.jaxpr
  axes = frozenset(names_of(axis))
  # From a value to the axes that it varies over: none for a value that is equal.
  varies = _AxesOfValues(axes, axes).follow(jaxpr, varying)
  results = [atom for atom in jaxpr.outvars if not varies(atom)]
  needed = {atom for atom in results if isinstance(atom, core.Var)}
  # From the end back: an equation whose inputs are equal on all workers has equal
  # results, so it belongs to the second half.
  after = []
  for equation in reversed(jaxpr.eqns):
    if needed.isdisjoint(equation.outvars) or any(map(varies, equation.invars)):
      continue
    after.append(equation)
    needed.update(atom for atom in equation.invars if isinstance(atom, core.Var))
  known = {*jaxpr.invars, *jaxpr.constvars}
  known.update(variable for equation in after for variable in equation.outvars)
  # Values that the second half reads and does not compute: equal on all workers, from
  # operands that are not.
  totals = [
    variable
    for equation in jaxpr.eqns
    for variable in equation.outvars
    if variable in needed - known
  ]
  rest = [atom for atom in jaxpr.outvars if varies(atom)]
  # The first half keeps all equations: the compiler drops those whose results only the
  # second half needs.
  first = jaxpr.replace(outvars=[*totals, *rest])
  # Results of messages and callbacks vary, so none of them is an equation of `after`.
  second = jaxpr.replace(
    invars=[*totals, *jaxpr.invars],
    outvars=results,
    eqns=after[::-1],
    effects=core.no_effects,
  )
  equal = [not varies(atom) for atom in jaxpr.outvars]
  close = lambda half: core.ClosedJaxpr(half, closed.consts)
  return Halves(close(first), close(second), len(totals), equal)


class _AxesOfValues:
  """Computes the axes that each value of a jaxpr may vary over.

  Args:
    axes: the axes of the workers, which all marks must have.
    every: all axes that the program is mapped over. Along other axes of the mesh the
      compiler partitions the program; a shard_map inside it may map a part over them.
  """

  def __init__(self, axes: Axes, every: Axes):
    self.axes = axes
    self.every = every
    self._loops = {"cond": self._cond, "scan": self._scan, "while": self._while}

  def find_axes(self, jaxpr: core.Jaxpr, inputs: Sequence[Axes]) -> list[Axes]:
    """The axes that each result of a jaxpr may vary over.

    Args:
      jaxpr: of one worker's program, or of a function that it calls.
      inputs: the axes that each of its inputs may vary over.

    Raises:
      ValueError: for a mark over other axes than those of the workers.
    """
    read = self.follow(jaxpr, inputs)
    return [read(atom) for atom in jaxpr.outvars]

  def follow(
    self, jaxpr: core.Jaxpr, inputs: Sequence[Axes]
  ) -> Callable[[core.Var | core.Literal], Axes]:
    """A function from a value of a jaxpr to its axes; arguments as in `find_axes`."""
    # constants of a program are equal on all workers
    known = dict(zip(jaxpr.invars, inputs, strict=True)) | dict.fromkeys(
      jaxpr.constvars, frozenset()
    )
    read = lambda atom: frozenset() if isinstance(atom, core.Literal) else known[atom]
    for equation in jaxpr.eqns:
      results = self._equation(equation, [read(atom) for atom in equation.invars])
      known.update(zip(equation.outvars, results, strict=True))
    return read

  def _equation(self, equation: core.JaxprEqn, inputs: list[Axes]) -> list[Axes]:
    """The axes that each result of an equation may vary over, from those of its operands."""
    name = equation.primitive.name
    params = equation.params
    # Axes of loops and branches depend on iterations and on the index of the branch.
    if name in self._loops:
      return self._loops[name](params, inputs)
    body = next(
      inner_jaxprs({key: params[key] for key in _BODIES if key in params}), None
    )
    # A call, such as jit, whose body has the same operands and results: the body tells
    # the axes of each result. Axes that only an inner shard_map maps over end with it.
    if (
      body is not None
      and len(body.invars) == len(inputs)
      and len(body.outvars) == len(equation.outvars)
    ):
      results = self.find_axes(body, inputs)
      return [axes & self.every for axes in results] if name == "shard_map" else results
    varies: Axes = frozenset().union(*inputs)
    # A value that `mark_total` marks as equal on all workers.
    if equation.primitive is total_p:
      if params["axes"] not in (None, self.axes):
        raise other_axes_error(params["axes"], self.axes)
      # None: the comm does not name its axes, and the value is equal on all workers.
      varies = varies - self.axes if params["axes"] else frozenset()
    elif name in _PSUMS:
      varies = (
        varies - _axis_names(params)
        # A sum over groups differs between groups.
        if params.get("axis_index_groups") is None
        else varies
      )
    # A worker's results depend on its place along these axes.
    elif name in _SENDS or name == "axis_index":
      varies = varies | _axis_names(params)
    elif equation.effects or "callback" in name:
      # What a callback or a reference returns may be anything.
      varies = self.every
    else:  # an unknown operation may apply its bodies to any of its operands
      bodies = [
        self.find_axes(inner, [varies] * len(inner.invars))
        for inner in inner_jaxprs(params)
      ]
      varies = varies.union(*(axes for results in bodies for axes in results))
    return [varies] * len(equation.outvars)

  def _cond(self, params: Any, inputs: list[Axes]) -> list[Axes]:
    """The axes of each result of a `cond` with these parameters, from those of its operands."""
    index, *operands = inputs
    branches = [self.find_axes(branch.jaxpr, operands) for branch in params["branches"]]
    # Workers that take different branches have different results.
    return [index.union(*results) for results in zip(*branches, strict=True)]

  def _scan(self, params: Any, inputs: list[Axes]) -> list[Axes]:
    """The axes of each result of a `scan` with these parameters, from those of its operands."""
    # Operands: `start` constants, `count` carried values, arrays to scan row by row.
    start, count = scan_counts(params)
    consts = inputs[:start]
    carry = inputs[start : start + count]
    scanned = inputs[start + count :]
    step = lambda carry: self.find_axes(
      params["jaxpr"].jaxpr, [*consts, *carry, *scanned]
    )
    # First the axes of the carry after any number of steps. One more step from these
    # also gives the axes of the stacked results.
    return step(_fixed_point(lambda carry: step(carry)[:count], carry))

  def _while(self, params: Any, inputs: list[Axes]) -> list[Axes]:
    """The axes of each result of a `while` with these parameters, from those of its operands."""
    # Operands: constants of the condition, constants of the body, the carry.
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]
    cond_consts = inputs[:first]
    body_consts = inputs[first:second]
    carry = inputs[second:]

    def step(carry: list[Axes]) -> list[Axes]:
      (more,) = self.find_axes(params["cond_jaxpr"].jaxpr, [*cond_consts, *carry])
      results = self.find_axes(params["body_jaxpr"].jaxpr, [*body_consts, *carry])
      # A condition that differs between workers ends their loops after different steps.
      return [more | result for result in results]

    return _fixed_point(step, carry)


def _fixed_point(
  step: Callable[[list[Axes]], list[Axes]], carry: list[Axes]
) -> list[Axes]:
  """Axes of the carry of a loop after any number of steps; the sets only grow, so the iteration ends."""
  while (
    after := [old | new for old, new in zip(carry, step(carry), strict=True)]
  ) != carry:
    carry = after
  return carry


def _axis_names(params: Any) -> Axes:
  """Names of the axes of a collective operation."""
  # psum and the like say `axes`, the others `axis_name`; positional axes are numbers.
  axes = params.get("axes", params.get("axis_name", ()))
  return frozenset(
    axis
    for axis in (axes if isinstance(axes, (tuple, list)) else (axes,))
    if isinstance(axis, str)
  )


def axes_of_spec(spec: PartitionSpec) -> Axes:
  """Names of the axes that a spec splits an array along."""
  return frozenset(
    name for entry in spec if entry is not None for name in names_of(entry)
  )
