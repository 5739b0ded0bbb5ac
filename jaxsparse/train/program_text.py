"""A jaxpr as lines of text that are the same in every process that traces the same program.

A line is an equation, or a constant with a hash of its bytes. Variables are numbered in
order. What a process has of its own is left out: names, source files, addresses of
functions, the order of sets, and under MPI the rank (`verbs.rank_p`) and the partners
of a message (`verbs.MESSAGE`).
"""

import dataclasses
import enum
import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from jaxsparse import _compat
from jaxsparse.comm.verbs import MESSAGE, rank_p

_Jaxpr = core.Jaxpr | core.ClosedJaxpr


class Line(NamedTuple):
  """One line of a program.

  Attributes:
    text: what processes compare.
    where: the source of an equation, for errors; "" if there is none.
  """

  text: str
  where: str = ""


class ProgramText:
  """The text of a jaxpr, of which a digest is quick to compute: a body that is used again is read once.

  Example:
    >>> import jax.numpy as jnp
    >>> scaled = lambda rate: jax.make_jaxpr(lambda x: jnp.sum(rate * x))(jnp.ones(3))
    >>> [line.text for line in ProgramText(scaled(0.1)).lines()]
    ['mul 0.1:f32[] v0 -> v1:f32[3]', 'reduce_sum axes=(0,) v1 -> v2:f32[]', 'return v2']
    >>> ProgramText(scaled(0.1)).digest == ProgramText(scaled(0.2)).digest
    False
  """

  def __init__(self, closed: core.ClosedJaxpr):
    self._bodies: dict[Any, str] = {}
    self._closed = closed
    self.digest: str = self._body(closed)

  def lines(self) -> list[Line]:
    """All lines, those of a body before the equation that runs it."""

    def lines_of(jaxpr: _Jaxpr) -> Iterator[Line]:
      # Bodies come first, so that the first line that differs is the innermost one.
      for text, equation in self._lines(jaxpr):
        for body in _compat.bodies_of(_params_of(equation)) if equation else ():
          yield from lines_of(body)
        yield Line(text, _compat.source_of(equation) if equation else "")

    return list(lines_of(self._closed))

  def _body(self, jaxpr: _Jaxpr) -> str:
    """The digest of a jaxpr."""
    # Jaxprs are equal by identity: a body that many equations run is read once.
    if jaxpr not in self._bodies:
      text = "\n".join(line for line, _ in self._lines(jaxpr))
      self._bodies[jaxpr] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return self._bodies[jaxpr]

  def _lines(self, jaxpr: _Jaxpr) -> Iterator[tuple[str, core.JaxprEqn | None]]:
    """The constants, the equations, and the results of a jaxpr, without those of the bodies of equations."""
    inner, consts = (
      (jaxpr.jaxpr, jaxpr.consts)
      if isinstance(jaxpr, core.ClosedJaxpr)
      else (jaxpr, ())
    )
    # Variables are numbered as they appear: their own names differ between processes.
    names: dict[Any, str] = {}
    name = lambda var: names.setdefault(var, f"v{len(names)}")
    value = lambda atom: self._value(atom.val, atom.aval)
    read = lambda atom: value(atom) if isinstance(atom, core.Literal) else name(atom)
    result_of = lambda var: f"{name(var)}:{_shape(var.aval)}"
    for var in inner.invars:
      name(var)
    for var, const in zip(inner.constvars, consts, strict=False):
      yield f"constant {self._value(const, var.aval)} -> {result_of(var)}", None
    for equation in inner.eqns:
      # The rank is a constant that differs by intent.
      operands = (
        ["of this rank"] if equation.primitive is rank_p else map(read, equation.invars)
      )
      results = " ".join(map(result_of, equation.outvars))
      given = _params_of(equation)
      named = [
        name for name in sorted(given) if name not in _NAMES and given[name] is not None
      ]
      params = " ".join(f"{name}={self._text(given[name])}" for name in named)
      yield (
        " ".join(
          filter(None, [equation.primitive.name, params, *operands, "->", results])
        ),
        equation,
      )
    yield " ".join(["return", *map(read, inner.outvars)]), None

  def _value(self, x: Any, aval: Any) -> str:
    """A number, or the hash of an array, with dtype and shape; these alone if other processes hold parts of it."""
    x = _compat.words_of_keys(x)
    # Other processes hold the rest of such an array, and this one cannot read it.
    in_part = (
      isinstance(x, jax.Array)
      and not x.is_fully_replicated
      and not x.is_fully_addressable
    )
    if in_part or not isinstance(
      x, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
    ):
      return _shape(aval)
    x = _compat.local_shard(x)
    if x.size == 1:  # as a float, 0.1 of float32 is 0.10000000149011612
      number = x.reshape(())[()]
      short = str(number if x.dtype == np.float32 else number.item())
    else:
      short = hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:16]
    return f"{short}:{_shape(aval)}"

  def _text(self, value: Any) -> str:
    """A parameter of an equation."""
    if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
      return f"<{self._body(value)}>"
    if value is None or isinstance(
      value, (str, bool, int, float, complex, np.dtype, enum.Enum)
    ):
      return str(value)
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
      return self._value(value, jax.typeof(value))
    if isinstance(value, (tuple, list)):
      return f"({','.join(map(self._text, value))}{',' * (len(value) == 1)})"
    # The order within a set differs between processes.
    if isinstance(value, (set, frozenset, Mapping)):
      items = value.items() if isinstance(value, Mapping) else value
      return f"{{{','.join(sorted(map(self._text, items)))}}}"
    if isinstance(value, (Mesh, AbstractMesh)):
      return self._text((dict(value.shape), value.axis_types))
    if isinstance(value, NamedSharding):
      return self._text((value.mesh, str(value.spec)))
    # The text of a function has its address.
    if isinstance(value, Sharding) or callable(value):
      return str(getattr(value, "__name__", type(value).__name__))
    if dataclasses.is_dataclass(value):
      names = [
        field.name for field in dataclasses.fields(value) if field.name not in _NAMES
      ]
      return type(value).__name__ + self._text(
        {name: getattr(value, name) for name in names}
      )
    text = repr(value)
    return type(value).__name__ if _OWN.search(text) else text


def _shape(aval: Any) -> str:
  # Weak types promote otherwise, so they count.
  return aval.str_short(short_dtypes=True) + "~" * getattr(aval, "weak_type", False)


_NAMES = (
  "name",
  "debug_info",
  "source_info",
  "src_info",
  "name_and_src_info",
  "name_stack",
)
_OWN = re.compile(r"0x[0-9a-f]|\.py\b")  # an address, a file


def _params_of(equation: core.JaxprEqn) -> dict[str, Any]:
  """The parameters of an equation that are the same on every rank."""
  return {} if equation.params.get("name") == MESSAGE else equation.params
