"""How much there is to read: `python -m tests.sizes` prints lines, words, names, and what an update passes through."""

import ast
import io
import os
import pathlib
import re
import sys
import tokenize

ROOT = pathlib.Path(__file__).parents[1]
MODULES = ("costs", "doctor", "launch", "overlap", "partial", "select")
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<module>"}  # frames in Python 3.11 only
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
  """Lines without docstrings, comments and blank ones."""
  texts = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
  left_out = {line for n in texts if isinstance(n.value.value, str) for line in range(n.lineno, n.end_lineno + 1)}
  tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in LAYOUT]
  return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - left_out)


def words(*patterns: str) -> int:
  """Words of pages, without tables, blocks of code and front matter."""
  count = 0
  for page in {page for pattern in patterns for page in ROOT.glob(pattern)}:
    text = re.sub(r"\A---\n.*?\n---\n|^```.*?^```|<!--.*?-->", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    count += sum(len(line.split()) for line in text.splitlines() if not line.lstrip().startswith("|"))
  return count


def entered(make: str) -> tuple[int, int]:
  """Files and functions of the package that are entered while `init` and `update` of a transform are traced."""
  import jax
  import jax.numpy as jnp
  import optax
  from jax.sharding import PartitionSpec as P

  import jaxsparse as js
  from jaxsparse import _compat

  tx = eval(make, {"js": js, "optax": optax})
  mesh, package = jax.make_mesh((4,), ("workers",)), str(pathlib.Path(js.__file__).parent)
  params = {"w": jax.ShapeDtypeStruct((4096, 800), jnp.float32), "b": jax.ShapeDtypeStruct((800,), jnp.float32)}
  seen = set()

  def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(package) and code.co_name not in COMPREHENSIONS:
      seen.add((code.co_filename, code.co_name, code.co_firstlineno))

  worker = lambda params, grads: tx.update(grads, tx.init(params), params)[0]
  program = jax.jit(_compat.shard_map(worker, mesh, (P(), P()), P()))
  sys.setprofile(note)
  try:
    program.trace(params, params)
  finally:
    sys.setprofile(None)
  return len({file for file, _, _ in seen}), len(seen)


def main() -> None:
  for folder in ("jaxsparse", "tests", "benchmarks"):
    sources = [path.read_text() for path in (ROOT / folder).rglob("*.py")]
    print(
      f"{folder}: {sum(map(code_lines, sources)):,} lines of code, {sum(s.count(chr(10)) for s in sources):,} lines"
    )
  os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
  import jaxsparse as js

  names = {*js.__all__} | {f"{m}.{name}" for m in MODULES for name in __import__(f"jaxsparse.{m}").__dict__[m].__all__}
  print(f"public names: {len(names)}")
  for name, make in (
    ("SparDL", "optax.chain(js.spardl_transform('workers', density=0.01), optax.sgd(0.1))"),
    ("signs", "js.local_steps(optax.adam(0.1), optax.chain(js.onebit_transform('workers'), optax.sgd(1.0)), every=4)"),
  ):
    print("{}, init and update: {} files, {} functions".format(name, *entered(make)))
  print(
    f"words of README, docs and the benchmarks' pages: {words('README.md', 'docs/**/*.md', 'benchmarks/**/*.md'):,}"
  )
  print(f"of these the benchmarks' pages: {words('benchmarks/**/*.md'):,}")


if __name__ == "__main__":
  main()
