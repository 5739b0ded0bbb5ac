"""`js.NAME_transform` and `js.make_transform`: optax transformations of a collective by its name and options.

The dataclass of a collective is the only place that lists its options.
`transform_function` derives from it the signature, the annotations and the
documentation of the function that users call.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, cast

import optax

from jaxsparse._compat import AxisName
from jaxsparse.collectives import Collective, make_collective, make_instance
from jaxsparse.transform.groups import Special
from jaxsparse.transform.update import collective_transform
from jaxsparse.types import Comm, SpecTree

Options = ParamSpec("Options")


class TransformFunction(Protocol[Options]):
  """The type of `js.NAME_transform`: type checkers and editors know the options of the collective."""

  __name__: str

  def __call__(
    self,
    axis: AxisName | Comm,
    special: Special | None = None,
    shardings: SpecTree = None,
    *args: Options.args,
    **options: Options.kwargs,
  ) -> optax.GradientTransformation:
    """The transform that averages gradients over the workers of `axis`."""


def transform_function(
  kind: Callable[Options, Collective],
) -> TransformFunction[Options]:
  """The function `NAME_transform(axis, special, shardings, *, ...)` of a collective: its fields are keyword-only.

  Args:
    kind: a frozen dataclass, whose docstring has the sections "Args:", "Raises:" and
      "Example:".

  Example:
    >>> from jaxsparse.collectives.dense import Dense
    >>> dense_transform = transform_function(Dense)
    >>> dense_transform.__name__, inspect.signature(dense_transform).parameters["dtype"].default
    ('dense_transform', 'float32')
    >>> tx = dense_transform("workers", dtype="bfloat16")
  """
  # Type checkers know `kind` as a callable with options, and its class is needed here.
  cls = cast(type[Collective], kind)

  def transform(
    axis: AxisName | Comm,
    special: Special | None = None,
    shardings: SpecTree = None,
    **options: Any,
  ) -> optax.GradientTransformation:
    return collective_transform(make_instance(cls, options), axis, special, shardings)

  # The signature that users see has the keyword-only fields of the collective in place
  # of `**options`.
  generic = inspect.signature(transform)
  *common, _ = generic.parameters.values()
  signature = generic.replace(
    parameters=[*common, *inspect.signature(cls).parameters.values()]
  )
  transform.__name__ = transform.__qualname__ = f"{cls.name}_transform"
  transform.__module__ = __name__.partition(".")[0]  # where users find it
  transform.__doc__ = _documentation(cls)
  # `typing.get_type_hints` reads these, and not the signature, which `help` shows.
  annotations = {
    name: parameter.annotation for name, parameter in signature.parameters.items()
  }
  transform.__annotations__ = annotations | {"return": generic.return_annotation}
  transform.__signature__ = signature  # type: ignore[attr-defined]
  return cast(TransformFunction[Options], transform)


def _documentation(kind: type[Collective]) -> str:
  """The docstring of `NAME_transform`: that of the collective, with what all transforms share added to its sections.

  `kind` is the class of the collective.
  """
  # [summary, name, text, name, text, …]: a group in the pattern keeps the names.
  summary, *sections = re.split(
    r"^(Args|Raises|Example):\n", inspect.getdoc(kind) or "", flags=re.MULTILINE
  )
  texts = dict(zip(sections[::2], sections[1::2], strict=True))
  args, raises, example = (
    texts.get(name, "").rstrip() for name in ("Args", "Raises", "Example")
  )
  # Options without a description in the docstring: those of a base class.
  shared = [
    option
    for option in inspect.signature(kind).parameters
    if f"  {option}: " not in args
  ]
  if shared:
    args = f"  {', '.join(shared)}: as in `js.SparseCollective`.\n{args}".rstrip()
  common = "  axis, special, shardings: as in `js.make_transform`, which says where in a chain the transform belongs."
  completed = {
    "Args": f"{common}\n{args}",
    "Returns": "  An `optax.GradientTransformation` whose state is a `ReduceState`.",
    "Raises": f"{raises}\n  ValueError, TypeError: as `js.make_transform`.".lstrip(
      "\n"
    ),
    "Example": f"{example}\n",
  }
  return "\n\n".join(
    [summary.strip(), *(f"{name}:\n{text}" for name, text in completed.items())]
  )


def make_transform(
  name: str | Collective,
  axis: AxisName | Comm,
  special: Special | None = None,
  shardings: SpecTree = None,
  **config: Any,
) -> optax.GradientTransformation:
  r"""The transform of the collective of that name: `make_transform("spardl", axis, density=0.01)`.

  The transform reduces the gradients of the P workers of `axis`; its update is `total /
  P`. It takes the local, un-averaged gradients of one worker: inside `jax.shard_map`
  over `axis`, at `js.own_params(params, state)`; `js.make_train_step` and `js.stacked`
  take them so. It is the **first** of its chain but for stateless scaling, such as the
  unscaling of a loss, which belongs before it; the transformations after it see its
  update.

  Args:
    name: one of `js.collective_names()`, with options as "spardl:density=0.01", or a
      collective of your own.
    axis: the name of the shard_map axis of the workers, a tuple of such names, or a
      comm.
    special: other collectives for some leaves, by regular expressions: `{"bias|scale":
      "dense", "embedding": "spardl:density=0.001"}`, or instances. An expression is
      searched for in the name of a leaf, its path in the parameters as
      `jax.tree_util.keystr` writes it, as `['w']['kernel']` of `{"w": {"kernel": …}}`,
      which `r"\['w'\]"` matches. The first match counts. The leaves of one collective
      are reduced together, and the collectives run one after the other.
    shardings: where a worker has several devices along Auto axes, and the state is not
      made with `js.init`: how the parameters lie along these, as a pytree like them of
      `PartitionSpec` or `NamedSharding`.
    **config: the options of the collective; those of `js.spardl_transform` for
      "spardl", and so on.

  Returns:
    An `optax.GradientTransformation` whose state is a `ReduceState`.

  Raises:
    ValueError: for an unknown name, a rejected option or a label in `special`, with the
      choices; with `special`, for a collective whose total differs between workers.
      When used: outside shard_map over `axis`, with a state of other sizes, or for an
      expression of `special` that matches no name.
    TypeError: for an option that the collective does not have, an axis that is none of
      these, or gradients that are not floating point.

  Example:
    >>> import jaxsparse as js
    >>> tx = js.make_transform("spardl", "workers", density=0.01)
    >>> js.make_transform("sparse", "workers")
    Traceback (most recent call last):
    ValueError: unknown collective 'sparse', choose one of ...
  """
  return collective_transform(make_collective(name, **config), axis, special, shardings)
