"""The structure of the package: layers, tokens of code, and a library that knows no benchmark."""

import ast
import collections
import pathlib
import re
import tomllib

import pytest

import jaxsparse
from tests import sizes

PACKAGE = pathlib.Path(jaxsparse.__file__).parent
LAYERS = [
  "_compat",
  "types",
  "arrays",
  "launch",
  "comm",
  "low_bit",
  "sparse",
  "select",
  "collectives",
  "transform",
  "train",
]
# the last two: the door, and the command that uses it
LAYERS += [
  "costs",
  "overlap",
  "racing",
  "weights",
  "partial",
  "__init__",
  "doctor",
]
MODULES = {
  ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
  for path in PACKAGE.rglob("*.py")
}
EVERY_MODULE = pytest.mark.parametrize("module", sorted(MODULES))


def tree(module):
  return ast.parse(MODULES[module].read_text())


def imported(tree, package=()):
  """Absolute names of what a module of a package imports anywhere, in functions too: modules, or names within them."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      start = package[: len(package) - node.level + 1] if node.level else []
      yield from (
        ".".join([*start, *filter(None, [node.module]), alias.name])
        for alias in node.names
      )


def layer_of(name):
  """Number of the layer of a module `jaxsparse.LAYER…`; other names are public ones of the door."""
  first = [*name.split("."), ""][1]
  return LAYERS.index(first if first in LAYERS else "__init__")


@EVERY_MODULE
def test_no_import_runs_upwards(module):
  package = module.split(".")[: None if MODULES[module].name == "__init__.py" else -1]
  ours = [
    name
    for name in imported(tree(module), package)
    if name.split(".")[0] == "jaxsparse"
  ]
  assert [name for name in ours if layer_of(name) > layer_of(module)] == []


def test_every_module_is_in_a_layer():
  tops = {module.split(".")[1] for module in MODULES}
  assert tops == set(LAYERS)
  assert len(LAYERS) <= 18  # 17 modules and packages, and the door


def test_contributing_has_the_layers_in_their_order():
  page = (sizes.ROOT / "CONTRIBUTING.md").read_text()
  table = page.partition("| package | holds |")[2].partition("\n\n")[0]
  assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == LAYERS
  (most,) = re.findall(r"at most (\d+) modules and packages", page)
  assert int(most) == len(LAYERS) - 1


@EVERY_MODULE
def test_the_library_does_not_know_the_benchmarks(module):
  assert "benchmarks" not in MODULES[module].read_text()


def test_a_name_is_that_of_one_class():
  nodes = [node for module in MODULES for node in ast.walk(tree(module))]
  names = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
  assert [name for name, n in collections.Counter(names).items() if n > 1] == []


CONTROL_FLOW = {"cond", "switch", "while_loop", "fori_loop"}


def control_flow(tree):
  """(name, line) of each use of control flow of JAX, by whatever way its name is imported."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute) and node.attr in CONTROL_FLOW:
      if ast.unparse(node.value).split(".")[-1] == "lax":
        yield node.attr, node.lineno
    elif isinstance(node, ast.ImportFrom) and node.module in ("jax.lax", "lax"):
      names = {alias.name for alias in node.names}
      yield from ((name, node.lineno) for name in sorted(names & CONTROL_FLOW))


@EVERY_MODULE
def test_control_flow_is_that_of_varying(module):
  """Its branches and carries have one type in a shard_map that checks replication; those of jax.lax may have two."""
  found = list(control_flow(tree(module)))
  assert bool(found) == (module == "jaxsparse._compat.varying"), found


def test_control_flow_is_found_by_any_name():
  for text in (
    "jax.lax.cond(a, b, c)",
    "from jax import lax\nlax.switch(a, b)",
    "from jax.lax import cond",
    "from jax.lax import while_loop as loop",
    "step = functools.partial(jax.lax.fori_loop, 0, 3)",
  ):
    assert list(control_flow(ast.parse(text)))
  for text in ("varying.cond(a, b, c)", "jax.lax.scan(a, b, c)", "jnp.switch"):
    assert not list(control_flow(ast.parse(text)))


def test_nothing_grows_unnoticed():
  """A change that raises a number raises it in sizes.toml: `python -m tests.sizes` prints its lines."""
  most = tomllib.loads((sizes.ROOT / "tests" / "sizes.toml").read_text())
  found = {part: sizes.counts(sources) for part, sources in sizes.parts().items()}
  assert found.keys() == most.keys()
  more = {
    (part, name): n
    for part in found
    for name, n in found[part].items()
    if n > most[part][name]
  }
  assert not more, (
    "give these numbers, of `python -m tests.sizes`, to tests/sizes.toml, and the reason to the commit"
  )


def test_pages_stay_short():
  assert sizes.words("benchmarks/**/*.md") <= 4_600
  assert sizes.words("README.md", "docs/**/*.md", "benchmarks/**/*.md") <= 14_800
