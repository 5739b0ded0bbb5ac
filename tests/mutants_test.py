"""The defects of mutants.toml are in step with the package, changes are drawn, and a map has the tests of a line."""

import ast
import builtins
import json
import re

import pytest

from tests import mutations, reach
from tests.children import reached
from tests.mutants import ROOT, choose_tests, find_by_name, read_mutants


def test_each_defect_can_be_made_and_names_tests_that_exist(subtests):
  for mutant in read_mutants():
    with subtests.test(f"{mutant.file}: {mutant.what}"):
      assert mutant.old != mutant.new
      ast.parse(mutant.text())  # raises unless the old text is there once
      assert mutant.tests
      for test in mutant.tests:
        path, _, function = test.partition("::")
        assert (ROOT / path).exists()
        name = function.partition("[")[0]
        assert not name or re.search(
          rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE
        )


@pytest.mark.parametrize(
  ("statement", "operator", "changed"),
  [
    ("x = a < b", "comparison", ["a <= b", "a >= b"]),
    ("x = a is b", "comparison", ["a is not b"]),
    ("x = a and b", "logic", ["a or b"]),
    ("x = a and b", "operand", ["b", "a"]),
    ("x = a - b", "operand", ["a"]),
    ("x = a - b", "sign", ["a + b"]),
    ("x = -a", "sign", ["a"]),
    ("x = not a", "sign", ["a"]),
    ("x = 3", "constant", ["4", "2"]),
    ("x = True", "constant", ["False"]),
    ("def f(x=3): pass", "constant", ["4", "2"]),
    ("x: Literal['a', 'b'] = 'a'", "choice", ["'b'"]),
    ("f(x)", "dropped", ["pass"]),
    ("x.y = z", "dropped", ["pass"]),
    ("x = f(x)", "dropped", ["pass"]),
    ("x = f(y)", "dropped", []),
    ("if a: pass", "negation", ["not a"]),
    ("x = f(a, b)", "arguments", ["f(b, a)"]),
    ("x = jnp.where(c, a, b)", "arguments", ["jnp.where(c, b, a)"]),
    ("x = jnp.asarray(a, jnp.int32)", "arguments", []),
    ("x = jnp.minimum(a, 'b')", "extreme", ["jnp.maximum"]),
  ],
)
def test_operators(statement, operator, changed):
  found = [one for one in mutations.mutations(statement) if one.operator == operator]
  assert [one.after for one in found] == changed


@pytest.mark.parametrize(
  "source",
  [
    "'Fewer than 3.'",
    "x: f[1]",
    "def f(x: g[1]) -> g[2]: ...",
    "@cache(1)\ndef f(): 'One.'",
    "def __repr__(self): return str(1)",
    "x = f'{1 + 1}'",
    "assert x, 1 + 1",
  ],
)
def test_what_stays(source):
  assert not [*mutations.mutations(source)]


def test_an_error_is_dropped_as_a_whole():
  (change,) = mutations.mutations("raise ValueError(f'{x + 1}', 2)")
  assert change.after == "pass"


def test_the_same_seed_draws_the_same_changes_and_a_larger_count_more_of_them():
  few, many, others = (
    mutations.draw(count, seed, ["select/exact", "chunks"])
    for count, seed in ((5, "a"), (20, "a"), (5, "b"))
  )
  assert many[:5] == few != others
  assert len({(change.file, change.statement) for change in many}) == 20
  for change in many:
    assert change.file in ("jaxsparse/select/exact.py", "jaxsparse/select/chunks.py")
    before, after = (ROOT / change.file).read_bytes(), change.text()
    assert ast.dump(ast.parse(before)) != ast.dump(ast.parse(after))


BLOCKS = """
def f(x):
  'A docstring.'
  if x:
    y = 1
  else:
    y = 2
  return y

class C:
  def g(self):
    return [
      1,
    ]
"""


def test_blocks_that_run_are_noted(monkeypatch):
  monkeypatch.setattr(builtins, "__reached__", bytearray(20), raising=False)
  module = {"__name__": "noted"}
  exec(compile(reached.note_blocks(BLOCKS, 10), "", "exec"), module)
  assert not any(builtins.__reached__)
  assert module["f"](1) == 1
  assert module["f"].__doc__ == "A docstring."
  names = [name for name, _ in reached.blocks(ast.parse(BLOCKS))]
  noted = [names[place - 10] for place, byte in enumerate(builtins.__reached__) if byte]
  assert sorted(noted) == ["f+1", "f+3"]


def test_the_block_of_a_line():
  lines = {2: "f+1", 3: "f+1", 4: "f+1", 5: "f+3", 7: "f+5", 10: "", 13: "C.g+1"}
  assert {line: reach.block_at(BLOCKS, line) for line in lines} == lines


def test_a_map_has_the_tests_of_a_line(tmp_path):
  path = tmp_path / "reach.jsonl"
  assert reach.read(path) == []
  file = "jaxsparse/select/chunks.py"
  name, body = next(reached.blocks(ast.parse((ROOT / file).read_text())))
  function, line = name.partition("+")[0], body[0].lineno
  tests = [
    ("old", 0.1, {file: [name]}),
    ("slow", 3.0, {file: [name]}),
    ("quick", 1.0, {file: [name, "another+1"]}),
    ("old", 0.2, {file: [f"{function}+1000"]}),
    ("elsewhere", 0.1, {file: ["another+1"]}),
  ]
  lines = [json.dumps(reach.Test(*test)._asdict()) for test in tests]
  path.write_text("\n".join(lines))
  elsewhere, old, quick, slow = reach.read(path)
  assert (elsewhere.test, old.seconds, quick.test) == ("elsewhere", 0.2, "quick")
  everything = [elsewhere, old, quick, slow]
  assert reach.reaching(everything, file, line) == ([quick, slow], "block")
  assert reach.reaching([elsewhere, old], file, line) == ([old], "function")
  assert reach.reaching([elsewhere], file, line) == ([elsewhere], "file")
  assert reach.reaching([], file, line) == ([], "file")
  change = mutations.draw(1, "", ["select/chunks"])[0]._replace(statement=line)
  assert choose_tests(change, everything, limit=3.5).tests == ["quick"]
  assert choose_tests(change, [], limit=3.5).tests == find_by_name(file)


def test_the_tests_of_a_module_by_its_name():
  local, checks = "jaxsparse/transform/local.py", "jaxsparse/transform/checks.py"
  assert find_by_name(local) == [local, "tests/transform/local_test.py"]
  assert "tests/transform/update_test.py" in find_by_name(checks)
  assert "tests/types_test.py" in find_by_name("jaxsparse/types.py")
  assert "tests/door_test.py" in find_by_name("jaxsparse/__init__.py")
