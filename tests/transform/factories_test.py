"""`js.NAME_transform` of a collective: its signature and documentation, and a new collective in one new file."""

import dataclasses
import doctest
import inspect
import pickle
import re
import sys
import typing

import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse import collectives
from jaxsparse.collectives import _kinds
from jaxsparse.train import simulation
from jaxsparse.transform.factories import transform_function
from tests.cases import bits, normals

NAMES = js.collective_names()

RING = '''
"""An all-reduce that passes gradients around a ring."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsparse.collectives import Collective
from jaxsparse.types import Comm, Cost, Counters, Reduced, State


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring(Collective):
  """Passes each gradient on P − 1 times; each worker adds them in rank order, so that totals have the same bits.

  Args:
    step: the distance to the next worker, prime to P.
  """

  step: int = 1

  def cost(self, n: int, size: int) -> Cost:
    return Cost(size - 1, n * (size - 1))

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    rows = [grads]  # row i is the gradient of worker rank − i · step
    for _ in range(comm.size - 1):
      rows.append(comm.shift(rows[-1], self.step))
    order = jnp.argsort((comm.rank - self.step * jnp.arange(comm.size)) % comm.size)
    return Reduced(jnp.stack(rows)[order].sum(axis=0), state, Counters(delivered=grads.size))
'''


@pytest.mark.parametrize("name", NAMES)
def test_signature_and_defaults_are_those_of_the_dataclass(name):
  function, kind = getattr(js, f"{name}_transform"), _kinds()[name]
  signature, hints = inspect.signature(function), typing.get_type_hints(kind)
  options = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
  fields = [field for field in dataclasses.fields(kind) if field.init]
  assert [(p.name, p.default, p.annotation) for p in options] == [(f.name, f.default, hints[f.name]) for f in fields]
  assert function.__kwdefaults__ == {field.name: field.default for field in fields}
  assert function.__annotations__ == {p.name: p.annotation for p in signature.parameters.values()} | {
    "return": signature.return_annotation
  }
  assert next(iter(signature.parameters)) == "axis"


@pytest.mark.parametrize("name", NAMES)
def test_the_function_is_found_where_it_says(name):
  function = getattr(js, f"{name}_transform")
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
  assert any(test.examples for test in doctest.DocTestFinder(recurse=False).find(kind))


@pytest.fixture(params=["module", "package"])
def ring(request, monkeypatch, tmp_path):
  """A new file, or folder, among the collectives."""
  if request.param == "module":
    (tmp_path / "ring.py").write_text(RING)
  else:
    (tmp_path / "ring").mkdir()
    (tmp_path / "ring" / "algorithm.py").write_text(RING)
    (tmp_path / "ring" / "__init__.py").write_text("from jaxsparse.collectives.ring.algorithm import Ring\n")
  monkeypatch.setattr(collectives, "__path__", [*collectives.__path__, str(tmp_path)])
  _kinds.cache_clear()
  yield "ring"
  _kinds.cache_clear()
  for module in [name for name in sys.modules if name.startswith("jaxsparse.collectives.ring")]:
    del sys.modules[module]
  vars(collectives).pop("ring", None)


def test_a_new_collective_is_one_new_file(ring):
  assert ring in js.collective_names()
  assert js.collective_options(ring) == ("step",)
  assert js.make_collective(ring).name == ring
  np.testing.assert_array_equal(js.simulate(ring, jnp.array([[1.0], [2.0], [4.0]]), step=2).total, [7.0])
  grads = jnp.asarray(normals(0, 5, 40))
  collective = js.make_collective(ring, step=2)
  totals, _ = simulation.reduce_all(collective, grads, simulation.initial(collective, 5, 40))
  np.testing.assert_array_equal(bits(totals), bits(np.broadcast_to(totals[0], totals.shape)))  # law R
  js.make_transform(ring, "workers", step=2)
  with pytest.raises(TypeError, match="ring: unknown option hop, choose from step"):
    js.make_transform(ring, "workers", hop=2)
  function = transform_function(_kinds()[ring])
  assert function.__name__ == "ring_transform"
  assert inspect.signature(function).parameters["step"].default == 1


def test_a_collective_of_ones_own_has_the_name_of_its_module():
  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Half(_kinds()["dense"]):
    """Half the sum."""

    def reduce(self, comm, grads, state):
      return super().reduce(comm, grads / 2, state)

  assert Half().name == __name__.rpartition(".")[2]
  assert transform_function(Half).__name__ == f"{Half().name}_transform"
