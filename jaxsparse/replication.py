"""Which values are the same on every worker, read off the jaxpr of a program before it runs.

JAX types the values of a `jax.shard_map` as varying over axes or not, but a total that is built of ppermutes is typed
as varying although Law R makes it the same everywhere, so its check is off (`check_vma=False`). This module has the
check instead. It follows two sets of axes through the equations of one worker's program:

    varies     axes along which workers may hold different values: those of a sharded input, plus `axis_index`;
               a psum over whole axes removes them; any other operation has the union of its operands
    reduced    axes that a psum on the way has summed over, to recognize gradients that are averaged already

and it trusts the marks that transforms leave: `mark_total` for what a law makes the same on every worker,
`mark_gradients` for what must still differ.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from jaxsparse._compat import AxisName, names_of, scan_counts

_PSUMS = ("psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant")
_SENDS = ("ppermute", "all_to_all", "reduce_scatter", "psum_scatter")
_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")

_mark = core.Primitive("jaxsparse_mark")  # the identity: `axes` of the comm, or None where it does not name them
_mark.def_impl(lambda x, **_: x)
_mark.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_mark, lambda _, x, **__: [x])
ad.deflinear2(_mark, lambda cotangent, *_, **__: [cotangent])
batching.primitive_batchers[_mark] = lambda args, dims, **params: (_mark.bind(*args, **params), dims[0])


def mark_total(tree: Any, axes: Sequence[str] | None) -> Any:
  """`tree`, marked as the same on all workers of `axes`, by a law of what made it.

  Example:
    >>> import jax.numpy as jnp
    >>> mark_total(jnp.ones(2), ("workers",))
    Array([1., 1.], dtype=float32)
  """
  return jax.tree.map(lambda x: _mark.bind(x, what="total", axes=_frozen(axes)), tree)


def mark_gradients(grads: jax.Array, axes: Sequence[str] | None) -> jax.Array:
  """f32[n], marked as what a transform takes for the local gradients of one worker of `axes`."""
  return _mark.bind(grads, what="gradients", axes=_frozen(axes))


class Flow(NamedTuple):
  """What is known of a value: the axes that it varies over, and those that it was summed over."""

  varies: frozenset[str] = frozenset()
  reduced: frozenset[str] = frozenset()


class Mark(NamedTuple):
  """A mark of a transform, and what was known of the value there."""

  what: str
  axes: frozenset[str] | None
  flow: Flow


def checked(function: Callable, in_specs: Any, out_specs: Any, axis: AxisName, results: Mapping[str, str]) -> Callable:
  """`function` of one worker, which when it is traced raises if workers would come to differ where they must not.

  Args:
    function: the program of one worker, to be mapped over the workers of `axis`.
    in_specs: a prefix of its arguments; those of an empty PartitionSpec are the same on every worker.
    out_specs: likewise of its results, a tuple.
    axis: the axis, or tuple of axes, that the workers lie along.
    results: the name of each result, with the likely mistake where it comes to differ, for the error.

  Raises:
    ValueError: when traced: if a transform is over other axes, if gradients are averaged before a transform gets them,
      or if a result that should be the same on every worker depends on the data of one, naming the first leaf.
  """
  axes = frozenset(names_of(axis))

  def traced(*arguments: Any) -> Any:
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    inputs = [Flow(axes if spec else frozenset()) for spec in _spec_of_each(arguments, in_specs)]
    marks: dict[Mark, None] = {}
    outputs = _through(closed.jaxpr, inputs, marks)
    _check_marks(list(marks), axes)
    for flow, spec, (path, _) in zip(
      outputs, _spec_of_each(shapes, out_specs), jax.tree_util.tree_leaves_with_path(shapes), strict=True
    ):
      if not spec and flow.varies & axes:
        name, why = list(results.items())[path[0].idx]
        leaf = name + jax.tree_util.keystr(path[1:])
        raise ValueError(f"{leaf} would differ between the workers of axis {_listed(axes)}: {why}")
    leaves = core.jaxpr_as_fun(closed)(*jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

  return traced


def check_axes(function: Callable, arguments: Sequence[Any], axis: AxisName) -> None:
  """Raises ValueError if a transform within `function`, a program of one worker, is over other axes than `axis`."""
  marks: dict[Mark, None] = {}
  jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
  _through(jaxpr, [Flow()] * len(jaxpr.invars), marks)
  _check_marks(list(marks), frozenset(names_of(axis)))


def _check_marks(marks: Sequence[Mark], axes: frozenset[str]) -> None:
  for mark in marks:
    if mark.axes is not None and mark.axes != axes:
      raise ValueError(
        f"the jaxsparse transform is over the axis {_listed(mark.axes)}, and js.init and the training step are over "
        f"{_listed(axes)}: give all of them the same axis"
      )
  for mark in marks:
    if mark.what == "gradients" and not mark.flow.varies & axes and axes <= mark.flow.reduced:
      raise ValueError(
        f"the gradients are summed or averaged over {_listed(axes)} before the jaxsparse transform, which takes the "
        "local gradients of one worker: leave out the pmean or psum"
      )


def _through(jaxpr: core.Jaxpr, inputs: Sequence[Flow], marks: dict[Mark, None]) -> list[Flow]:
  """What is known of the results of a jaxpr, from what is known of its inputs; collects the marks within."""
  known = dict(zip(jaxpr.invars, inputs, strict=True)) | dict.fromkeys(jaxpr.constvars, Flow())
  read = lambda atom: Flow() if isinstance(atom, core.Literal) else known[atom]
  for equation in jaxpr.eqns:
    results = _through_equation(equation, [read(atom) for atom in equation.invars], marks)
    known.update(zip(equation.outvars, results, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def _through_equation(equation: core.JaxprEqn, inputs: list[Flow], marks: dict[Mark, None]) -> list[Flow]:
  name, params = equation.primitive.name, equation.params
  if name in _LOOPS:
    return _LOOPS[name](params, inputs, marks)
  body = next((_open(params[key]) for key in _BODIES if key in params), None)
  if body is not None and len(body.invars) == len(inputs) and len(body.outvars) == len(equation.outvars):
    return _through(body, inputs, marks)
  flow = _union(inputs)
  axes = frozenset(_axes_of(params))
  if equation.primitive is _mark:
    marks[Mark(params["what"], params["axes"], flow)] = None
    if params["what"] == "total":
      flow = flow._replace(varies=frozenset() if params["axes"] is None else flow.varies - params["axes"])
  elif name in _PSUMS and params.get("axis_index_groups") is None:
    flow = Flow(flow.varies - axes, flow.reduced | axes)
  elif name in _SENDS or name == "axis_index":
    flow = flow._replace(varies=flow.varies | axes)
  return [flow] * len(equation.outvars)


def _through_cond(params: Any, inputs: list[Flow], marks: dict[Mark, None]) -> list[Flow]:
  index, *operands = inputs
  branches = [_through(_open(branch), operands, marks) for branch in params["branches"]]
  return [_union([index, *results]) for results in zip(*branches, strict=True)]


def _through_scan(params: Any, inputs: list[Flow], marks: dict[Mark, None]) -> list[Flow]:
  start, count = scan_counts(params)
  consts, carry, scanned = inputs[:start], inputs[start : start + count], inputs[start + count :]
  step = lambda carry: _through(_open(params["jaxpr"]), [*consts, *carry, *scanned], marks)
  return step(_fixed_point(lambda carry: step(carry)[:count], carry))


def _through_while(params: Any, inputs: list[Flow], marks: dict[Mark, None]) -> list[Flow]:
  first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
  cond_consts, body_consts, carry = inputs[:first], inputs[first:second], inputs[second:]

  def step(carry: list[Flow]) -> list[Flow]:
    (more,) = _through(_open(params["cond_jaxpr"]), [*cond_consts, *carry], marks)
    results = _through(_open(params["body_jaxpr"]), [*body_consts, *carry], marks)
    return [_union([more, result]) for result in results]

  return _fixed_point(step, carry)


_LOOPS: dict[str, Callable[[Any, list[Flow], dict[Mark, None]], list[Flow]]] = {
  "cond": _through_cond,
  "scan": _through_scan,
  "while": _through_while,
}


def _fixed_point(step: Callable[[list[Flow]], list[Flow]], carry: list[Flow]) -> list[Flow]:
  """The carry of a loop after any number of steps; sets only grow, so few steps are enough."""
  while (after := [_union(pair) for pair in zip(carry, step(carry), strict=True)]) != carry:
    carry = after
  return carry


def _axes_of(params: Any) -> tuple[str, ...]:
  axes = params.get("axes", params.get("axis_name", ()))
  named = axes if isinstance(axes, (tuple, list)) else (axes,)
  return tuple(axis for axis in named if isinstance(axis, str))


def _union(flows: Sequence[Flow]) -> Flow:
  return functools.reduce(lambda a, b: Flow(a.varies | b.varies, a.reduced | b.reduced), flows, Flow())


def _open(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> core.Jaxpr:
  return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def _spec_of_each(tree: Any, specs: Any) -> list[PartitionSpec]:
  is_spec = lambda x: isinstance(x, PartitionSpec)
  return jax.tree.leaves(jax.tree.broadcast(specs, tree, is_leaf=is_spec), is_leaf=is_spec)


def _frozen(axes: Sequence[str] | None) -> frozenset[str] | None:
  return None if axes is None else frozenset(axes)


def _listed(axes: frozenset[str]) -> str:
  return " and ".join(map(repr, sorted(axes))) or "none"
