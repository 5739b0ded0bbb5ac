"""How much there is to read: `python -m tests.sizes` prints lines, words, names, and what an update passes through."""

import ast
import io
import itertools
import os
import pathlib
import re
import sys
import tokenize

ROOT = pathlib.Path(__file__).parents[1]
MODULES = ("costs", "doctor", "launch", "overlap", "partial", "select")
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<module>"}  # frames in Python 3.11 only
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
  """Lines without docstrings, comments and blank ones."""
  texts = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
  left_out = {line for n in texts if isinstance(n.value.value, str) for line in range(n.lineno, n.end_lineno + 1)}
  tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in LAYOUT]
  return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - left_out)


def parts() -> dict[str, list[str]]:
  """The sources of each module and folder of the package, by its name."""
  paths = sorted((ROOT / "jaxsparse").rglob("*.py"))
  first = lambda path: path.relative_to(ROOT / "jaxsparse").parts[0].removesuffix(".py")
  return {part: [path.read_text() for path in group] for part, group in itertools.groupby(paths, first)}


def counts(sources: list[str]) -> dict[str, int]:
  """What there is of each kind: nested are lambdas and functions in functions, packed are `a, b = x, y`."""
  nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
  functions = [node for node in nodes if isinstance(node, FUNCTIONS)]
  inner = {id(node) for one in functions for node in ast.walk(one) if node is not one and isinstance(node, FUNCTIONS)}
  documented = sum(isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None for node in nodes)
  assigned = [(node.targets[0], node.value) for node in nodes if isinstance(node, ast.Assign)]
  return {
    "statements": sum(isinstance(node, ast.stmt) for node in nodes) - documented,
    "functions": len(functions),
    "nested": len(inner) + sum(isinstance(node, ast.Lambda) for node in nodes),
    "packed": sum(isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) for target, value in assigned),
    "Any": sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes),
  }


def words(*patterns: str) -> int:
  """Words of pages, without tables, blocks of code and front matter."""
  count = 0
  for page in {page for pattern in patterns for page in ROOT.glob(pattern)}:
    text = re.sub(r"\A---\n.*?\n---\n|^```.*?^```|<!--.*?-->", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    count += sum(len(line.split()) for line in text.splitlines() if not line.lstrip().startswith("|"))
  return count


def entered(make: str) -> tuple[int, int, int, int]:
  """Files, functions, most open calls of the package while `init` and `update` of n = 320,000 are traced; equations."""
  import jax
  import jax.numpy as jnp
  import optax
  from jax.sharding import PartitionSpec as P

  import jaxsparse as js
  from jaxsparse import _compat

  tx = eval(make, {"js": js, "optax": optax})
  mesh, package = jax.make_mesh((4,), ("workers",)), str(pathlib.Path(js.__file__).parent)
  params = {"w": jax.ShapeDtypeStruct((399, 800), jnp.float32), "b": jax.ShapeDtypeStruct((800,), jnp.float32)}
  seen, calls = set(), {"open": 0, "most": 0}

  def note(frame, event, _):
    code = frame.f_code
    if event in ("call", "return") and code.co_filename.startswith(package) and code.co_name not in COMPREHENSIONS:
      seen.add((code.co_filename, code.co_name, code.co_firstlineno))
      calls["open"] += 1 if event == "call" else -1
      calls["most"] = max(calls.values())

  equations = lambda jaxpr: sum(1 + sum(map(equations, _compat.inner_jaxprs(one.params))) for one in jaxpr.eqns)
  worker = lambda params, grads: tx.update(grads, tx.init(params), params)[0]
  program = jax.jit(_compat.shard_map(worker, mesh, (P(), P()), P()))
  sys.setprofile(note)
  try:
    jaxpr = program.trace(params, params).jaxpr.jaxpr
  finally:
    sys.setprofile(None)
  return len({file for file, _, _ in seen}), len(seen), calls["most"], equations(jaxpr)


def main() -> None:
  for folder in ("jaxsparse", "tests", "benchmarks"):
    sources = [path.read_text() for path in (ROOT / folder).rglob("*.py")]
    print(
      f"{folder}: {sum(map(code_lines, sources)):,} lines of code, {sum(s.count(chr(10)) for s in sources):,} lines"
    )
  for part, sources in parts().items():  # lines of sizes.toml
    print(f"{part} = {{ {', '.join(f'{name} = {number}' for name, number in counts(sources).items())} }}")
  whole = counts([source for sources in parts().values() for source in sources])
  print(f"nested functions and lambdas: {1000 * whole['nested'] / whole['statements']:.0f} a thousand statements")
  os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
  import jaxsparse as js

  names = {*js.__all__} | {f"{m}.{name}" for m in MODULES for name in __import__(f"jaxsparse.{m}").__dict__[m].__all__}
  print(f"public names: {len(names)}")
  for name, make in (
    ("SparDL", "optax.chain(js.spardl_transform('workers', density=0.01), optax.sgd(0.1))"),
    ("signs", "js.local_steps(optax.adam(0.1), optax.chain(js.onebit_transform('workers'), optax.sgd(1.0)), every=4)"),
  ):
    print("{}, init and update: {} files, {} functions, {} calls deep, {:,} equations".format(name, *entered(make)))
  print(
    f"words of README, docs and the benchmarks' pages: {words('README.md', 'docs/**/*.md', 'benchmarks/**/*.md'):,}"
  )
  print(f"of these the benchmarks' pages: {words('benchmarks/**/*.md'):,}")


if __name__ == "__main__":
  main()
