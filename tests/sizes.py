"""How much there is to read: `python -m tests.sizes` prints tokens, words, names, and what an update passes through."""

import ast
import collections
import io
import itertools
import os
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).parents[1]
MODULES = ("costs", "doctor", "launch", "overlap", "partial", "select")
# frames in Python 3.11 only
COMPREHENSIONS = {
  "<listcomp>",
  "<setcomp>",
  "<dictcomp>",
  "<genexpr>",
  "<module>",
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LAYOUT = {
  tokenize.COMMENT,
  tokenize.NL,
  tokenize.NEWLINE,
  tokenize.INDENT,
  tokenize.DEDENT,
  tokenize.ENDMARKER,
}


def code_tokens(source: str) -> list[tokenize.TokenInfo]:
  """The tokens of a file without docstrings, comments and layout."""
  texts = [n for n in ast.walk(ast.parse(source)) if is_text(n)]
  left_out = {line for n in texts for line in range(n.lineno, n.end_lineno + 1)}
  tokens = tokenize.generate_tokens(io.StringIO(source).readline)
  return [
    token
    for token in whole_strings(tokens)
    if token.type not in LAYOUT and token.start[0] not in left_out
  ]


def whole_strings(
  tokens: Iterable[tokenize.TokenInfo],
) -> Iterator[tokenize.TokenInfo]:
  """The tokens, an f-string as one, as Python 3.11 has them; newer versions cut it."""
  depth = 0
  for token in tokens:
    name = tokenize.tok_name[token.type]
    if depth == 0:
      yield token
    depth += (name == "FSTRING_START") - (name == "FSTRING_END")


def is_text(node: ast.AST) -> bool:
  """Whether a node is a docstring."""
  constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
  return constant and isinstance(node.value.value, str)


def comments(source: str) -> int:
  """The number of comments; consecutive lines are one."""
  tokens = tokenize.generate_tokens(io.StringIO(source).readline)
  lines = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
  return sum(line - 1 not in lines for line in lines)


def parts() -> dict[str, list[str]]:
  """The sources of each module and folder of the package, by its name."""
  paths = sorted((ROOT / "jaxsparse").rglob("*.py"))
  first = lambda path: path.relative_to(ROOT / "jaxsparse").parts[0].removesuffix(".py")
  return {
    part: [path.read_text() for path in group]
    for part, group in itertools.groupby(paths, first)
  }


def counts(sources: list[str]) -> dict[str, int]:
  """Tokens of code, lines of more than 25 tokens, functions of more than 400, and uses of `Any`."""
  tokens = [code_tokens(source) for source in sources]
  on_lines = [collections.Counter(t.start[0] for t in one) for one in tokens]
  nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
  return {
    "tokens": sum(map(len, tokens)),
    "dense_lines": sum(n > 25 for lines in on_lines for n in lines.values()),
    "long_functions": sum(n > 400 for source in sources for n in functions(source)),
    "Any": sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes),
  }


def functions(source: str) -> list[int]:
  """Tokens of each function, with those nested in it."""
  starts = [token.start[0] for token in code_tokens(source)]
  nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, FUNCTIONS)]
  return [
    sum(node.lineno <= line <= node.end_lineno for line in starts) for node in nodes
  ]


def summary(sources: list[str]) -> str:
  """One line about the code of a folder."""
  number = counts(sources)
  lines = sum(len({t.start[0] for t in code_tokens(source)}) for source in sources)
  lengths = [n for source in sources for n in functions(source)]
  return (
    f"{number['tokens']:,} tokens of code, {number['tokens'] / lines:.1f} a line; "
    f"of 1,000 lines {1000 * number['dense_lines'] / lines:.0f} have more than 25, "
    f"and {1000 * number['Any'] / lines:.0f} Any; "
    f"{number['long_functions']} functions above 400, the longest {max(lengths)}; "
    f"{10_000 * sum(map(comments, sources)) / number['tokens']:.0f} comments for 10,000 tokens"
  )


def words(*patterns: str) -> int:
  """Words of pages, without tables, blocks of code and front matter."""
  count = 0
  for page in {page for pattern in patterns for page in ROOT.glob(pattern)}:
    text = re.sub(
      r"\A---\n.*?\n---\n|^```.*?^```|<!--.*?-->",
      "",
      page.read_text(),
      flags=re.DOTALL | re.MULTILINE,
    )
    count += sum(
      len(line.split())
      for line in text.splitlines()
      if not line.lstrip().startswith("|")
    )
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
  mesh, package = (
    jax.make_mesh((4,), ("workers",)),
    str(pathlib.Path(js.__file__).parent),
  )
  params = {
    "w": jax.ShapeDtypeStruct((399, 800), jnp.float32),
    "b": jax.ShapeDtypeStruct((800,), jnp.float32),
  }
  seen, calls = set(), {"open": 0, "most": 0}

  def note(frame, event, _):
    code = frame.f_code
    if (
      event in ("call", "return")
      and code.co_filename.startswith(package)
      and code.co_name not in COMPREHENSIONS
    ):
      seen.add((code.co_filename, code.co_name, code.co_firstlineno))
      calls["open"] += 1 if event == "call" else -1
      calls["most"] = max(calls.values())

  equations = lambda jaxpr: sum(
    1 + sum(map(equations, _compat.inner_jaxprs(one.params))) for one in jaxpr.eqns
  )
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
    sources = [path.read_text() for path in sorted((ROOT / folder).rglob("*.py"))]
    print(f"{folder}: {summary(sources)}")
  for part, sources in parts().items():  # lines of sizes.toml
    numbers = ", ".join(f"{name} = {n}" for name, n in counts(sources).items())
    print(f"{part} = {{ {numbers} }}")
  os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
  import jaxsparse as js

  names = {*js.__all__} | {
    f"{m}.{name}"
    for m in MODULES
    for name in __import__(f"jaxsparse.{m}").__dict__[m].__all__
  }
  print(f"public names: {len(names)}")
  for name, make in (
    (
      "SparDL",
      "optax.chain(js.spardl_transform('workers', density=0.01), optax.sgd(0.1))",
    ),
    (
      "signs",
      "js.local_steps(optax.adam(0.1), optax.chain(js.onebit_transform('workers'), optax.sgd(1.0)), every=4)",
    ),
  ):
    print(
      "{}, init and update: {} files, {} functions, {} calls deep, {:,} equations".format(
        name, *entered(make)
      )
    )
  print(
    f"words of README, docs and the benchmarks' pages: {words('README.md', 'docs/**/*.md', 'benchmarks/**/*.md'):,}"
  )
  print(f"of these the benchmarks' pages: {words('benchmarks/**/*.md'):,}")


if __name__ == "__main__":
  main()
