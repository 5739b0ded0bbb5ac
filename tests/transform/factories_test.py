"""`js.NAME_transform` of a collective: its signature and documentation. contributing_test.py adds a collective."""

import dataclasses
import inspect
import pickle
import re
import typing

import pytest

import jaxsparse as js
from jaxsparse.collectives import _kinds, baselines

NAMES = [
  name
  for name, kind in sorted(_kinds().items())
  if not kind.__module__.startswith(baselines.__name__)
]


@pytest.mark.parametrize("name", NAMES)
def test_signature_and_defaults_are_those_of_the_dataclass(name):
  function, kind = getattr(js, f"{name}_transform"), _kinds()[name]
  signature, hints = inspect.signature(function), typing.get_type_hints(kind)
  options = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
  fields = [field for field in dataclasses.fields(kind) if field.init]
  assert [(p.name, p.default, p.annotation) for p in options] == [
    (f.name, f.default, hints[f.name]) for f in fields
  ]
  assert function.__annotations__ == {
    p.name: p.annotation for p in signature.parameters.values()
  } | {"return": signature.return_annotation}
  assert next(iter(signature.parameters)) == "axis"
  assert function.__name__ == function.__qualname__ == f"{name}_transform"
  assert pickle.loads(pickle.dumps(function)) is function


@pytest.mark.parametrize("name", NAMES)
def test_the_documentation_is_that_of_the_dataclass_and_lists_each_argument_once(name):
  """An option that collectives share is described where the base class lists it."""
  function, kind = getattr(js, f"{name}_transform"), _kinds()[name]
  documentation = inspect.getdoc(function)
  assert set(inspect.getdoc(kind).splitlines()) <= set(documentation.splitlines())
  for argument in inspect.signature(function).parameters:
    assert (
      len(
        re.findall(
          rf"^  (\w+, )*{argument}(, \w+)*: ", documentation, flags=re.MULTILINE
        )
      )
      == 1
    ), argument
  for section in ("Args", "Returns", "Raises", "Example"):
    assert documentation.count(f"\n{section}:\n") == 1
