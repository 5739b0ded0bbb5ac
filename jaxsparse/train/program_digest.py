"""The digest of a jaxpr: the same in every process that traces the same program.

It covers equations, constants and results. Variables are numbered in order. What a
process has of its own is left out: names, source files, addresses of functions, the
order of sets, and under MPI the rank (`verbs.rank_p`) and the partners of a message
(`verbs.MESSAGE`).
"""

import dataclasses
import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import NamedSharding, Sharding

from jaxsparse import _compat
from jaxsparse.comm.verbs import MESSAGE, rank_p

_Jaxpr = core.Jaxpr | core.ClosedJaxpr

_NAMES = (
  "name",
  "debug_info",
  "source_info",
  "src_info",
  "name_and_src_info",
  "name_stack",
)
_OWN = re.compile(r"0x[0-9a-f]|\.py\b")  # an address, a file


def program_digest(closed: core.ClosedJaxpr) -> str:
  """The digest of a program, 16 hexadecimal digits.

  Example:
    >>> import jax.numpy as jnp
    >>> scaled = lambda rate: jax.make_jaxpr(lambda x: jnp.sum(rate * x))(jnp.ones(3))
    >>> program_digest(scaled(0.1)) == program_digest(scaled(0.2))
    False
  """
  return _Digests().digest_of(closed)


class _Digests:
  """The digests of jaxprs, each read once: many equations may run one body.

  The text that is hashed leaves out what `_NAMES` lists: the keys of an equation's
  parameters that hold names, source files and the like.
  """

  def __init__(self) -> None:
    # Jaxprs are equal by identity.
    self._known: dict[_Jaxpr, str] = {}

  def digest_of(self, jaxpr: _Jaxpr) -> str:
    """The digest of a jaxpr and of the bodies in it."""
    if jaxpr not in self._known:
      self._known[jaxpr] = _hashed("\n".join(self._lines(jaxpr)).encode())
    return self._known[jaxpr]

  def _lines(self, jaxpr: _Jaxpr) -> Iterator[str]:
    """A jaxpr as text: one line for each constant, one for each equation, and one for the results."""
    inner, consts = (
      (jaxpr.jaxpr, jaxpr.consts)
      if isinstance(jaxpr, core.ClosedJaxpr)
      else (jaxpr, ())
    )
    # Variables are numbered as they appear: their own names differ between processes.
    names: dict[Any, str] = {}
    name = lambda var: names.setdefault(var, f"v{len(names)}")
    value = lambda atom: _value(atom.val, atom.aval)
    read = lambda atom: value(atom) if isinstance(atom, core.Literal) else name(atom)
    result_of = lambda var: f"{name(var)}:{_shape(var.aval)}"
    # Called for its effect: the arguments get the first numbers.
    for var in inner.invars:
      name(var)
    # An open jaxpr has no values of constants; its caller has them.
    for var, const in zip(inner.constvars, consts, strict=False):
      yield f"{_value(const, var.aval)} {result_of(var)}"
    for equation in inner.eqns:
      # Under MPI the rank is a constant, which may differ between processes.
      is_rank = equation.primitive is rank_p
      operands = [] if is_rank else list(map(read, equation.invars))
      results = list(map(result_of, equation.outvars))
      # The parameters of a message name its partners, which may differ, too.
      is_message = equation.params.get("name") == MESSAGE
      params = "" if is_message else self._text(equation.params)
      yield f"{equation.primitive.name} {params} {operands} {results}"
    yield str(list(map(read, inner.outvars)))

  def _text(self, value: Any) -> str:
    """The text of a parameter of an equation, or of a mapping of all of them, without what a process has of its own."""
    if isinstance(value, _Jaxpr):
      return self.digest_of(value)
    if isinstance(value, str):
      return value
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
      return _value(value, jax.typeof(value))
    if isinstance(value, (tuple, list)):
      return str(list(map(self._text, value)))
    if isinstance(value, Mapping):
      # Names, source files and the like differ between processes.
      items = [(key, x) for key, x in value.items() if key not in _NAMES]
      return str(sorted(map(self._text, items)))
    # The order within a set differs between processes.
    if isinstance(value, (set, frozenset)):
      return str(sorted(map(self._text, value)))
    # Devices differ between processes, and the text of a function has its address.
    is_on_devices = isinstance(value, Sharding) and not isinstance(value, NamedSharding)
    if callable(value) or is_on_devices:
      return str(getattr(value, "__name__", type(value).__name__))
    if dataclasses.is_dataclass(value):
      fields = {
        field.name: getattr(value, field.name) for field in dataclasses.fields(value)
      }
      return type(value).__name__ + self._text(fields)
    # A text with an address or a file differs between processes: only the type counts.
    text = repr(value)
    return type(value).__name__ if _OWN.search(text) else text


def _value(x: Any, aval: Any) -> str:
  """The hash of an array or number, with dtype and shape; only dtype and shape if other processes hold parts of it.

  `aval` is its abstract value, which has dtype and shape.
  """
  x = _compat.words_of_keys(x)
  # This process cannot read the parts of an array that others hold.
  in_part = (
    isinstance(x, jax.Array)
    and not x.is_fully_replicated
    and not x.is_fully_addressable
  )
  # Of a constant that numpy cannot read only dtype and shape count.
  is_known = hasattr(x, "__array__") or isinstance(x, (int, float, complex))
  if in_part or not is_known:
    return _shape(aval)
  return f"{_hashed(_compat.local_shard(x).tobytes())}:{_shape(aval)}"


def _hashed(data: bytes) -> str:
  return hashlib.sha256(data).hexdigest()[:16]


def _shape(aval: Any) -> str:
  """Dtype and shape, as "f32[3]", with "~" for a weak type."""
  # A weak type promotes to other dtypes, so it counts.
  return aval.str_short(short_dtypes=True) + "~" * getattr(aval, "weak_type", False)
