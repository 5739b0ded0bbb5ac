"""`js.NAME_transform` of a collective: its signature and documentation. contributing_test.py adds a collective."""

import dataclasses
import inspect
import pickle
import re
import typing

import pytest

import jaxsparse as js
from jaxsparse.collectives import _kinds

NAMES = js.collective_names()


@pytest.mark.parametrize("name", NAMES)
def test_signature_and_defaults_are_those_of_the_dataclass(name):
  function, kind = getattr(js, f"{name}_transform"), _kinds()[name]
  signature, hints = inspect.signature(function), typing.get_type_hints(kind)
  options = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
  fields = [field for field in dataclasses.fields(kind) if field.init]
  assert [(p.name, p.default, p.annotation) for p in options] == [(f.name, f.default, hints[f.name]) for f in fields]
  assert function.__annotations__ == {p.name: p.annotation for p in signature.parameters.values()} | {
    "return": signature.return_annotation
  }
  assert next(iter(signature.parameters)) == "axis"
  assert function.__name__ == function.__qualname__ == f"{name}_transform"
  assert pickle.loads(pickle.dumps(function)) is function


@pytest.mark.parametrize("name", NAMES)
def test_the_documentation_is_that_of_the_dataclass_and_lists_each_argument_once(name):
  """An option that collectives share is described where the base class lists it."""
  function, kind = getattr(js, f"{name}_transform"), _kinds()[name]
  lines = inspect.getdoc(function).splitlines()
  assert set(inspect.getdoc(kind).splitlines()) <= set(lines)
  arguments = [line.strip().partition(":")[0].split(", ") for line in lines if re.match(r"  \w+(, \w+)*: ", line)]
  listed = [argument for line in arguments for argument in line]
  shared = re.findall(r"^  (\w+): ", inspect.getdoc(js.SparseCollective), flags=re.MULTILINE)
  assert set(shared) >= {"density", "k", "decay", "selector", "wire"}
  for argument in inspect.signature(function).parameters:
    assert listed.count(argument) == 1, argument
    own = any(line.startswith(f"  {argument}: ") for line in lines)
    assert own or argument in (*shared, "axis", "special", "shardings"), argument
  for section in ("Args:", "Returns:", "Raises:", "Example:"):
    assert lines.count(section) == 1
