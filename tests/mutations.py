"""Small changes of the package, drawn at random: what `python -m tests.mutants --draw` tests.

An operator yields what may stand in place of a node of the syntax tree. Docstrings,
annotations, strings, errors' messages, decorators and `__repr__` stay as they are.
"""

import ast
import collections
import copy
import itertools
import pathlib
import random
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]

_COMPARISONS: dict[type, list[type]] = {
  ast.Lt: [ast.LtE, ast.GtE],
  ast.LtE: [ast.Lt, ast.Gt],
  ast.Gt: [ast.GtE, ast.LtE],
  ast.GtE: [ast.Gt, ast.Lt],
  ast.Eq: [ast.NotEq],
  ast.NotEq: [ast.Eq],
  ast.Is: [ast.IsNot],
  ast.IsNot: [ast.Is],
  ast.In: [ast.NotIn],
  ast.NotIn: [ast.In],
}
_OTHER_SIGNS = {
  ast.Add: ast.Sub,
  ast.Sub: ast.Add,
  ast.BitAnd: ast.BitOr,
  ast.BitOr: ast.BitAnd,
  ast.LShift: ast.RShift,
  ast.RShift: ast.LShift,
}
_PAIRS = [
  ("min", "max"),
  ("minimum", "maximum"),
  ("argmin", "argmax"),
  ("pmin", "pmax"),
  ("any", "all"),
  ("floor", "ceil"),
  ("zeros", "ones"),
  ("zeros_like", "ones_like"),
]
_OTHER_NAMES = dict(_PAIRS) | {second: first for first, second in _PAIRS}
_DROPPED = (ast.Expr, ast.AugAssign, ast.Raise, ast.Delete)
_CONDITIONAL = (ast.If, ast.IfExp, ast.While)
_HAS_CONTRARY = (ast.Compare, ast.UnaryOp)  # by another operator
_VALUES = (
  ast.Name,
  ast.Attribute,
  ast.Subscript,
  ast.Call,
  ast.BinOp,
  ast.UnaryOp,
  ast.Compare,
)
# of a node, the fields that stay as they are
_LEFT_OUT = {
  ast.AnnAssign: {"annotation"},
  ast.arg: {"annotation"},
  ast.FunctionDef: {"returns", "decorator_list"},
  ast.ClassDef: {"bases", "keywords", "decorator_list"},
  ast.Assert: {"msg"},
}
_NOT_ENTERED = (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)
_NO_BEHAVIOR = {"__repr__", "__str__"}


def _changed(node: ast.AST, **fields) -> ast.AST:
  return type(node)(**(dict(ast.iter_fields(node)) | fields))


def comparison(node: ast.AST) -> Iterator[ast.AST]:
  """Another comparison: its boundary, or its contrary."""
  if isinstance(node, ast.Compare) and len(node.ops) == 1:
    for other in _COMPARISONS[type(node.ops[0])]:
      yield _changed(node, ops=[other()])


def logic(node: ast.AST) -> Iterator[ast.AST]:
  """`and` for `or`, and the contrary."""
  if isinstance(node, ast.BoolOp):
    yield _changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())


def constant(node: ast.AST) -> Iterator[ast.AST]:
  """An integer one more or less, the other truth value."""
  if isinstance(node, ast.Constant):
    if isinstance(node.value, bool):
      yield ast.Constant(not node.value)
    elif isinstance(node.value, int):
      yield ast.Constant(node.value + 1)
      yield ast.Constant(node.value - 1)


def choice(node: ast.AST) -> Iterator[ast.AST]:
  """Another default of an option whose annotation lists its choices."""
  if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Constant):
    annotation = node.annotation
    is_literal = isinstance(annotation, ast.Subscript)
    if is_literal and ast.unparse(annotation.value).endswith("Literal"):
      for other in ast.literal_eval(f"[{ast.unparse(annotation.slice).strip('()')}]"):
        if other != node.value.value:
          yield _changed(node, value=ast.Constant(other))


def dropped(node: ast.AST) -> Iterator[ast.AST]:
  """No statement: a call, a change in place, an error, a name computed anew from itself."""
  is_anew = (
    isinstance(node, ast.Assign)
    and (names := {ast.dump(target) for target in node.targets})
    and any(
      ast.dump(part).replace("Load()", "Store()") in names
      for part in ast.walk(node.value)
    )
  )
  is_in_place = isinstance(node, ast.Assign) and isinstance(
    node.targets[0], (ast.Attribute, ast.Subscript)
  )
  if isinstance(node, _DROPPED) or is_anew or is_in_place:
    yield ast.Pass()


def operand(node: ast.AST) -> Iterator[ast.AST]:
  """One operand alone."""
  if isinstance(node, ast.BoolOp):
    for place in range(len(node.values)):
      others = node.values[:place] + node.values[place + 1 :]
      yield _changed(node, values=others) if len(others) > 1 else others[0]
  elif isinstance(node, ast.BinOp):
    yield node.left
    if isinstance(node.op, (ast.Add, ast.Mult, ast.BitAnd, ast.BitOr)):
      yield node.right


def sign(node: ast.AST) -> Iterator[ast.AST]:
  """The other sign; for bits, the other operation."""
  if isinstance(node, ast.BinOp) and type(node.op) in _OTHER_SIGNS:
    yield _changed(node, op=_OTHER_SIGNS[type(node.op)]())
  elif isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.UAdd):
    yield node.operand


def negation(node: ast.AST) -> Iterator[ast.AST]:
  """A condition's contrary."""
  if isinstance(node, _CONDITIONAL) and not isinstance(node.test, _HAS_CONTRARY):
    yield _changed(node, test=ast.UnaryOp(ast.Not(), node.test))


def arguments(node: ast.AST) -> Iterator[ast.AST]:
  """Two arguments in each other's place: the first two, of `where` the last two."""
  if isinstance(node, ast.Call):
    first = int(_last_name(node.func) == "where")
    pair = node.args[first : first + 2]
    is_pair = len(pair) == 2 and all(map(_may_be_swapped, pair))
    if is_pair and ast.dump(pair[0]) != ast.dump(pair[1]):
      others = [*node.args[:first], pair[1], pair[0], *node.args[first + 2 :]]
      yield _changed(node, args=others)


def _may_be_swapped(argument: ast.AST) -> bool:
  """Whether an argument is a value, unlike a function, a shape, a text or a dtype."""
  is_dtype = re.search(r"(int|float|bool)(\d+|_)?$|dtype$", _last_name(argument))
  return isinstance(argument, _VALUES) and not is_dtype


def extreme(node: ast.AST) -> Iterator[ast.AST]:
  """The minimum for the maximum, and other pairs of functions."""
  if isinstance(node, (ast.Name, ast.Attribute)):
    other = _OTHER_NAMES.get(_last_name(node))
    if other and isinstance(node, ast.Name):
      yield _changed(node, id=other)
    elif other:
      yield _changed(node, attr=other)


def _last_name(node: ast.AST) -> str:
  return getattr(node, "attr", getattr(node, "id", ""))


OPERATORS: list[Callable[[ast.AST], Iterator[ast.AST]]] = [
  comparison,
  logic,
  constant,
  choice,
  dropped,
  operand,
  sign,
  negation,
  arguments,
  extreme,
]


class Mutation(NamedTuple):
  """`after` in place of the text `before` of a file, from a byte on, in the statement of a line."""

  file: str
  statement: int
  line: int
  column: int
  before: str
  after: str
  first: int
  operator: str

  def text(self, root: pathlib.Path = ROOT) -> bytes:
    """The file with the change."""
    source = (root / self.file).read_bytes()
    end = self.first + len(self.before.encode())
    return source[: self.first] + self.after.encode() + source[end:]

  def __str__(self) -> str:
    before, after = (
      textwrap.shorten(text, 70, placeholder="…") for text in (self.before, self.after)
    )
    place = f"{self.file}:{self.line}:{self.column}"
    return f"{place}: {self.operator}, `{before}` -> `{after}`"


def mutations(source: str, file: str = "") -> Iterator[Mutation]:
  """Every change of every statement of a file."""
  text = source.encode()
  lines = text.splitlines(keepends=True)
  starts = [0, *itertools.accumulate(map(len, lines))]
  for statement, node in _nodes(ast.parse(source)):
    for operator in OPERATORS:
      for changed in operator(node):
        old, new = _smallest(node, changed)
        first = starts[old.lineno - 1] + old.col_offset
        end = starts[old.end_lineno - 1] + old.end_col_offset
        yield Mutation(
          file,
          statement.lineno,
          old.lineno,
          old.col_offset + 1,
          text[first:end].decode(),
          ast.unparse(ast.fix_missing_locations(copy.deepcopy(new))),
          first,
          operator.__name__,
        )


def _smallest(node: ast.AST, other: ast.AST) -> tuple[ast.AST, ast.AST]:
  """The parts of two nodes that differ: of a statement, its one expression that changes."""
  if type(node) is not type(other) or isinstance(node, ast.expr):
    return node, other
  for name, field in ast.iter_fields(node):
    if getattr(other, name) is not field:
      return field, getattr(other, name)
  return node, other


def _nodes(tree: ast.Module) -> Iterator[tuple[ast.stmt, ast.AST]]:
  """(innermost statement, node) for the nodes that may change."""

  def enter(statement, node):
    if getattr(node, "name", "") in _NO_BEHAVIOR or _is_text(node):
      return
    statement = node if isinstance(node, ast.stmt) else statement
    yield statement, node
    if isinstance(node, _NOT_ENTERED):
      return
    left_out = _LEFT_OUT.get(type(node), ())
    for name, field in ast.iter_fields(node):
      if name not in left_out:
        for child in field if isinstance(field, list) else [field]:
          is_level = isinstance(child, ast.keyword) and child.arg == "stacklevel"
          if isinstance(child, ast.AST) and not is_level:
            yield from enter(statement, child)

  for node in tree.body:
    yield from enter(node, node)


def _is_text(node: ast.AST) -> bool:
  """Whether a node is a docstring, or `...` for a body."""
  return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def draw(
  count: int, seed: str, names: list[str] = (), root: pathlib.Path = ROOT
) -> list[Mutation]:
  """`count` changes of different statements of the files with one of the `names` in their path.

  Statements have the same chance, then the operators that change a statement. A larger
  count begins with the changes of a smaller one.
  """
  of_statement = collections.defaultdict(lambda: collections.defaultdict(list))
  for path in sorted((root / "jaxsparse").rglob("*.py")):
    file = str(path.relative_to(root))
    if any(name in file.partition("/")[2] for name in names or [""]):
      for mutation in mutations(path.read_text(), file):
        statement = of_statement[file, mutation.statement]
        statement[mutation.operator].append(mutation)
  chance = random.Random(seed)
  statements = list(of_statement.values())
  chance.shuffle(statements)
  choose = lambda operators: chance.choice(operators[chance.choice([*operators])])
  return [choose(operators) for operators in statements[:count]]
