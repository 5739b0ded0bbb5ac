"""Implementations for several platforms have results of the same shapes and dtypes, and one program can have all.

`by_platform` chooses between them when a program is traced, and one for "any" platform
has all of them, as `jax.export` needs.
"""

import ast
import functools
import importlib.util
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from jaxsparse import _compat
from jaxsparse.train import simulation
from tests.cases import CASES, Case, bits, each_case, normals, start

PACKAGE = pathlib.Path(js.__file__).parent
PLATFORMS = ("cpu", "cuda", "tpu")
WORKERS = 2
LEAVES = ((4_000,), (160, 200))
N = 36_000  # blocks of 18,000: more than are sorted
DENSITY = 0.01
TWO_WORKERS = [case for case in CASES if dict(case.options).get("teams", 2) == 2]
QUICK = ("onebit", "spardl", "topka-selector=chunked-wire=int8")
COVERING = [
  ("chunktopk",),
  ("dcttopk", (("chunk", 16),)),
  ("gaussiank",),
  ("gtopk", (("selector", "chunked"),)),
  ("onebit",),
  ("powersgd",),
  ("qsgd",),
  ("spardl",),
]
"""Collectives that between them use every implementation."""


def forks_of(path):
  """(file, first line, last line) of each call of `by_platform`."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "_compat.by_platform":
      yield (str(path), node.lineno, node.end_lineno)


def names_of(path):
  """File and name of the functions and methods that choose, as `benchmarks.compiled.forks` names them."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.FunctionDef) and "_compat.by_platform(" in ast.unparse(
      node
    ):
      yield f"{path.name} {node.name}"


FORKS = {fork for path in PACKAGE.rglob("*.py") for fork in forks_of(path)}


class Recorder:
  """`by_platform`, which traces every implementation where it is called, and compares their results."""

  def __init__(self):
    self.choose = _compat.by_platform
    self.seen = set()
    self.is_comparing = False

  def __call__(self, **ways):
    frame = sys._getframe(1)
    place = frame.f_code.co_filename, frame.f_lineno
    chosen = self.choose(**ways)

    def compare(*args):
      if not self.is_comparing:
        self.is_comparing = True
        self.seen.add(place)
        types = {name: self.types(way, args) for name, way in ways.items()}
        self.is_comparing = False
        expected = types["default"]
        assert all(found == expected for found in types.values()), (place, types)
      return chosen(*args)

    return compare

  def types(self, way, args):
    """Shapes and dtypes of the results."""
    result = jax.eval_shape(lambda: way(*args))
    return jax.tree.map(lambda x: (x.shape, x.dtype.name), result)

  def missed(self):
    """The forks that were not traced."""
    return {
      (file, first, last)
      for file, first, last in FORKS
      if not any(file == own and first <= line <= last for own, line in self.seen)
    }


@pytest.fixture
def recorder(monkeypatch):
  recorder = Recorder()
  monkeypatch.setattr(_compat, "by_platform", recorder)
  return recorder


def shapes(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def collective_of(case):
  return case.make(density=DENSITY).for_leaves(LEAVES)


def trace(case):
  """Traces one step of two workers."""
  collective = collective_of(case)
  state = jax.eval_shape(lambda: simulation.initial(collective, WORKERS, N))
  grads = jax.ShapeDtypeStruct((WORKERS, N), jnp.float32)
  reduce_all = functools.partial(simulation.reduce_all.__wrapped__, collective)
  jax.eval_shape(reduce_all, grads, state)


def trace_training():
  """Traces a training step, whose checks are forks too."""
  comm = js.SimComm("workers", members=WORKERS)
  tx = optax.chain(js.dense_transform(comm), optax.sgd(0.1, momentum=0.9))
  step, params, state = start(js.atomic(tx), comm, jnp.zeros(N))
  step.lower(params, state, jnp.zeros((WORKERS, N)))


@pytest.mark.parametrize("platform", PLATFORMS)
@each_case(TWO_WORKERS, quick=QUICK)
@pytest.mark.usefixtures("recorder")
def test_implementations_agree_in_shapes_and_dtypes(case, platform):
  """With 64-bit numbers allowed, so that a result whose dtype the implementation leaves open differs."""
  with jax.enable_x64(True), js.traced_for(platform):
    trace(case)


@pytest.mark.long
def test_every_fork_is_compared(recorder):
  for platform in PLATFORMS:
    with js.traced_for(platform):
      trace_training()
      for name in COVERING:
        trace(Case(*name))
  assert not recorder.missed()


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_results_name_implementations_that_are_there(platform):
  path = PACKAGE.parent / f"benchmarks/results/forks_{platform}.json"
  rows = json.loads(path.read_text())["forks"]
  named = {row["place"] for row in rows}
  assert named <= {name for path in PACKAGE.rglob("*.py") for name in names_of(path)}


@each_case([case for case in TWO_WORKERS if not case.options], quick=[])
@pytest.mark.long
def test_a_program_for_all_platforms_is_exported_and_runs_here(case):
  collective = collective_of(case)

  @jax.jit
  def two_steps(grads):
    state = simulation.initial(collective, WORKERS, N)
    _, state = simulation.reduce_all(collective, grads, state)
    total, state = simulation.reduce_all(collective, -0.5 * grads, state)
    return total, jax.tree.leaves(state.carried)

  grads = jnp.asarray(normals(0, WORKERS, N))
  with js.traced_for("any"):
    exported = jax.export.export(two_steps, platforms=PLATFORMS)(shapes(grads))
  if importlib.util.find_spec("flatbuffers"):  # JAX needs it to write files
    exported = jax.export.deserialize(exported.serialize(vjp_order=0))
  assert exported.platforms == PLATFORMS
  found = jax.tree.leaves(exported.call(grads))  # from the bytes of the program
  for own, direct in zip(found, jax.tree.leaves(two_steps(grads)), strict=True):
    if case.exact:
      np.testing.assert_array_equal(bits(own), bits(direct))
    else:  # XLA may fuse the arithmetic of scales in another way
      np.testing.assert_allclose(own, direct, rtol=1e-4, atol=1e-4)
