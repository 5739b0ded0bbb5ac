"""Passes over long arrays, read off the text of a compiled program: what each instruction reads and writes of them.

Reading or writing a few entries of an array is no pass.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Pass(NamedTuple):
  """What one instruction of a compiled program does with arrays of n float32."""

  name: str
  opcode: str
  reads: float  # arrays that it reads; of a conditional, in its cheapest branch; of a while loop, each time
  writes: float
  note: str  # "in place" where it changes a few entries of one, and the passes that another branch or iteration adds


class _Instruction(NamedTuple):
  """One line of a program in XLA's text form."""

  name: str
  opcode: str
  weight: float  # what its result holds in arrays of n float32, arrays of far fewer entries left out
  operands: list[str]  # names in the same computation
  calls: list[str]  # names of computations
  is_root: bool


_Computation = dict[str, _Instruction]

_HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_LINE = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
_ARRAY = re.compile(r"([a-z]+\d*)\w*\[([\d,]*)\]")
_CALLS = re.compile(r"(?:calls|to_apply|body|branch_computations|\w+_computation)=(\{[^}]*\}|[^,\s]+)")
_END_OF_OPERANDS = re.compile(r"\)(?:, |$)")
_NAME = re.compile(r"%([\w.-]+)")
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier"}  # no data moves
_FEW_OF = {"gather", "dynamic-slice", "slice"}  # which read no more of their first operand than they write
_INTO = {"scatter", "dynamic-update-slice"}  # which XLA does in place; where it cannot, there is a copy beside them


def passes_of(text: str, n: int) -> list[Pass]:
  """The instructions of a program, `compiled.as_text()`, that read or write arrays of about n entries, n/2 at least."""
  program: dict[str, _Computation] = {}
  entry = name = ""
  for line in text.splitlines():
    if header := _HEADER.match(line):
      name = header[2]
      program[name] = {}
      entry = name if header[1] else entry
    elif name and (found := _LINE.match(line)):
      root, result, shape, opcode, rest = found.groups()
      operands, attributes = [*_END_OF_OPERANDS.split(rest, maxsplit=1), ""][:2]
      calls = [called for group in _CALLS.findall(attributes) for called in _NAME.findall(group)]
      one = _Instruction(result, opcode, _weigh(shape, n), _NAME.findall(operands), calls, bool(root))
      program[name][result] = one
  return [one for one in _passes_in(program, entry) if one.reads or one.writes or one.note]


def _weigh(shape: str, n: int) -> float:
  words = 0.0
  for kind, sizes in _ARRAY.findall(shape):
    entries = math.prod(int(size) for size in sizes.split(",") if size)
    bits = int(re.sub(r"\D", "", kind) or 8)
    words += entries * bits / 32 if 2 * entries >= n else 0
  return words / n


def _passes_in(program: Mapping[str, _Computation], name: str) -> Iterable[Pass]:
  for one in program[name].values():
    if one.opcode in ("call", "conditional", "while"):
      yield _pass_of_branches(one, [list(_passes_in(program, called)) for called in one.calls])
    elif one.opcode not in _FREE:
      yield _pass_of_arrays(one, program[name], program)


def _pass_of_branches(one: _Instruction, branches: Sequence[Sequence[Pass]]) -> Pass:
  """The passes of the branch with the fewest; a note has the most."""
  totals = [(sum(p.reads for p in branch), sum(p.writes for p in branch)) for branch in branches]
  least, most = min(totals, key=sum), max(totals, key=sum)
  if one.opcode == "while":
    return Pass(one.name, one.opcode, *most, "each time round" if any(most) else "")
  return Pass(one.name, one.opcode, *least, f"another branch: {sum(most):g}" if most != least else "")


def _pass_of_arrays(one: _Instruction, around: _Computation, program: Mapping[str, _Computation]) -> Pass:
  """Of a fusion, or of an instruction that is looked at as a fusion of itself alone."""
  if one.opcode == "fusion":
    body = program[one.calls[0]]
  else:
    inputs = {name: around[name]._replace(opcode="parameter", is_root=False) for name in one.operands}
    body = {**inputs, one.name: one._replace(is_root=True)}
  (root,) = (inner for inner in body.values() if inner.is_root)
  outputs = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
  in_place = [output for output in outputs if _is_in_place(output, body)]
  written = [output for output in outputs if output not in in_place]
  entries = [name for output in in_place for name in _behind_bitcasts(output, body).operands[1:]]  # what is put, where
  reads = sum(body[name].weight for name in _read_whole([*(output.name for output in written), *entries], body))
  writes = sum(output.weight for output in written)
  return Pass(one.name, one.opcode, reads, writes, "in place" if in_place else "")


def _is_in_place(output: _Instruction, body: _Computation) -> bool:
  """Whether few entries are put into an array that is given."""
  target = _behind_bitcasts(output, body)
  if target.opcode not in _INTO or not target.weight:
    return False
  into = _behind_bitcasts(body[target.operands[0]], body)
  return into.opcode == "parameter" and not any(body[name].weight for name in target.operands[1:])


def _behind_bitcasts(one: _Instruction, body: _Computation) -> _Instruction:
  while one.opcode == "bitcast":
    one = body[one.operands[0]]
  return one


def _read_whole(needed: Sequence[str], body: _Computation) -> set[str]:
  """The parameters that are read in whole for the results `needed`."""
  seen: set[str] = set()
  queue = list(needed)
  while queue:
    one = body[queue.pop()]
    if one.name not in seen and one.opcode != "parameter":
      queue += one.operands[1:] if one.opcode in _FEW_OF and not one.weight else one.operands
    seen.add(one.name)
  return {name for name in seen if body[name].opcode == "parameter"}
