"""Every public name is documented, with an example; doctest runs them."""

import inspect

import pytest

import jaxsparse as js

MODULES = {
  "costs": js.costs.__all__,
  "overlap": js.overlap.__all__,
  "partial": js.partial.__all__,
  "select": ("top_k",),
  "weights": js.weights.__all__,
}
NAMES = [(name, getattr(js, name)) for name in js.__all__ if name not in MODULES]
NAMES += [
  (f"{module}.{name}", getattr(getattr(js, module), name))
  for module in MODULES
  for name in MODULES[module]
]


@pytest.mark.parametrize(("name", "value"), NAMES, ids=[name for name, _ in NAMES])
def test_documented_with_an_example(name, value):
  assert ">>>" in (inspect.getdoc(value) or ""), name


def test_the_list_of_names_is_sorted_and_whole():
  assert sorted(js.__all__) == js.__all__
  public = {
    name
    for name, value in vars(js).items()
    if not name.startswith("_") and not inspect.ismodule(value)
  }
  assert public <= set(js.__all__)
