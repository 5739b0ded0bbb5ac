"""What an optimized program does, read from the text of its scheduled HLO: kernels, bytes, sorts, exchanges.

A kernel is an instruction that the device runs by itself: a fusion, a sort, a copy, a
custom call. The bytes of one are those of its operands and results; of an operand of
which it reads or replaces entries (gather, slice, scatter in place) those of these
entries.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxsparse.costs.audit import called_by, computations_of, trip_count

# of others the number in the name
_BITS = {
  "pred": 8,
  "token": 0,
  "opaque": 0,
  "bf16": 16,
  "c64": 64,
  "c128": 128,
}
_NO_KERNEL = {
  *(
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "partition-id",
    "replica-id",
    "after-all",
  ),
  *("opt-barrier", "add-dependency", "domain", "while", "conditional", "call"),
}
_COLLECTIVE = re.compile(
  r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|send|recv)\b"
)
_READS_SOME = {"gather", "dynamic-slice", "slice"}
# the operand that has the new entries
_WRITES_SOME = {
  "scatter": 2,
  "dynamic-update-slice": 1,
}
_RENAMES = {"bitcast", "get-tuple-element", "reshape"}
_READS_ALL = {
  "reduce",
  "reduce-window",
  "sort",
  "scatter",
  "dot",
  "convolution",
  "custom-call",
  "fusion",
  "concatenate",
}


class Instruction(NamedTuple):
  """One line of HLO, `name = shape opcode(operands), attributes`."""

  name: str
  bytes: int  # of its result
  opcode: str
  operands: list[str]  # their names
  attributes: str
  is_root: bool  # whether it is the result of its computation

  @property
  def called(self) -> list[str]:
    """The names of the computations that it runs."""
    return called_by(self.attributes)


Computation = dict[str, Instruction]


class Exchange(NamedTuple):
  """A message between devices."""

  opcode: str
  bytes: int
  is_asynchronous: bool
  covered: float  # bytes that kernels move between its start and its end


class Summary(NamedTuple):
  """What a program does in one run, on one device."""

  kernels: int  # outside of branches and loops
  in_branches: int  # of conditionals, of all branches together
  in_loops: int  # of bodies of loops
  # moved by kernels; of a conditional by the branch that moves fewest, of a loop by all
  # known rounds
  bytes: int
  sorts: int
  copies: int  # of at least `large` bytes
  synchronizations: (
    int  # conditionals, and loops of unknown length: the host waits for a value
  )
  exchanges: list[Exchange]


def summarize(text: str, large: int) -> Summary:
  """The summary of a scheduled program, from its text."""
  return _Program(text).summary(large)


class _Program:
  """The computations of a program, by name."""

  def __init__(self, text: str):
    computations, entry = computations_of(text)
    self.computations: dict[str, Computation] = {}
    for name, lines in computations.items():
      instructions = [_parse(line) for line in lines if " = " in line]
      self.computations[name] = {one.name: one for one in instructions}
    self.entry = self.computations[entry]

  def summary(self, large: int) -> Summary:
    everywhere = list(self._everywhere(self.entry, "once"))
    places = [place for place, one in everywhere if _is_kernel(one)]
    kinds = [(self._kind(one), one.bytes) for _, one in everywhere]
    waits = [
      one.opcode == "conditional"
      or (one.opcode == "while" and trip_count(one.attributes) is None)
      for _, one in everywhere
    ]
    return Summary(
      kernels=places.count("once"),
      in_branches=places.count("branch"),
      in_loops=places.count("loop"),
      bytes=self._bytes_of(self.entry),
      sorts=sum(kind == "sort" for kind, _ in kinds),
      copies=sum(kind == "copy" and size >= large for kind, size in kinds),
      synchronizations=sum(waits),
      exchanges=list(self._exchanges()),
    )

  def _everywhere(
    self, computation: Computation, place: str
  ) -> Iterator[tuple[str, Instruction]]:
    """(where it runs, instruction) of a computation and of all computations that it runs."""
    for one in computation.values():
      yield place, one
      inside = {
        "while": "loop",
        "conditional": "branch" if place == "once" else place,
        "call": place,
      }.get(one.opcode)
      for called in one.called if inside else ():
        yield from self._everywhere(self.computations[called], inside or place)

  def _kind(self, one: Instruction) -> str:
    """The opcode of an instruction; of a fusion that of its result."""
    body = (
      self.computations[one.called[0]].values() if one.opcode == "fusion" else [one]
    )
    return next((inner.opcode for inner in body if inner.is_root), one.opcode)

  def _bytes_of(self, computation: Computation) -> int:
    total = 0
    inside = lambda one: [
      self._bytes_of(self.computations[name]) for name in one.called
    ]
    for one in computation.values():
      if one.opcode == "conditional":
        total += min(inside(one))
      elif one.opcode in ("while", "call"):
        total += (trip_count(one.attributes) or 1) * sum(inside(one))
      elif _is_kernel(one):
        total += self._moved(one, computation)
    return total

  def _moved(self, one: Instruction, around: Computation) -> int:
    """The bytes that a kernel reads and writes."""
    if one.opcode == "fusion":
      body, known = self.computations[one.called[0]], dict[str, int]()
      return sum(
        _used(x, body, known) for x in body.values() if x.opcode == "parameter"
      ) + _written_by(body)
    sizes = [around[name].bytes for name in one.operands]
    if one.opcode in _READS_SOME:
      return 2 * one.bytes + sum(sizes[1:])
    if one.opcode in _WRITES_SOME:
      return sum(sizes[1:]) + sizes[_WRITES_SOME[one.opcode]]
    return sum(sizes) + one.bytes

  def _exchanges(self) -> Iterator[Exchange]:
    moved, starts = 0, dict[str, int]()
    for one in self.entry.values():
      if _is_kernel(one):
        moved += self._moved(one, self.entry)
      elif not _COLLECTIVE.match(one.opcode):
        continue
      elif one.opcode.endswith("-start"):
        starts[one.name] = moved
      elif one.opcode.endswith("-done"):
        start = self.entry[one.operands[0]]
        is_asynchronous = '"is_sync":true' not in start.attributes
        yield Exchange(
          one.opcode.removesuffix("-done"),
          one.bytes,
          is_asynchronous,
          moved - starts[start.name],
        )
      else:
        yield Exchange(one.opcode, one.bytes, False, 0)


def _is_kernel(one: Instruction) -> bool:
  return not (
    one.opcode in _NO_KERNEL
    or _COLLECTIVE.match(one.opcode)
    or one.opcode.endswith("-done")
  )


def _used(one: Instruction, body: Computation, known: dict[str, int]) -> int:
  """The bytes of an instruction's result that a fusion uses: all, or what slices and gathers take of it."""
  if one.name not in known:
    used = one.bytes if one.is_root else 0
    for user in body.values():
      places = [place for place, name in enumerate(user.operands) if name == one.name]
      used += max(
        (_used_by(user, place, one, body, known) for place in places), default=0
      )
    known[one.name] = min(used, one.bytes)
  return known[one.name]


def _used_by(
  user: Instruction,
  place: int,
  one: Instruction,
  body: Computation,
  known: dict[str, int],
) -> int:
  if user.opcode in _READS_SOME and place == 0:
    return user.bytes
  if (
    user.opcode in _WRITES_SOME
    and place == 0
    and one.opcode in {*_RENAMES, "parameter"}
  ):
    return 0  # in place
  if user.opcode in _READS_ALL or not user.bytes:
    return one.bytes
  return one.bytes * _used(user, body, known) // user.bytes  # entry by entry


def _written_by(body: Computation) -> int:
  """The bytes that a fusion writes."""
  root = next(one for one in body.values() if one.is_root)
  written = 0
  for result in (
    [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
  ):
    one = _renamed(result, body)
    in_place = (
      one.opcode in _WRITES_SOME
      and _renamed(body[one.operands[0]], body).opcode == "parameter"
    )
    written += (
      body[one.operands[_WRITES_SOME[one.opcode]]].bytes if in_place else one.bytes
    )
  return written


def _renamed(one: Instruction, body: Computation) -> Instruction:
  """The instruction whose result `one` is under another name or shape."""
  return _renamed(body[one.operands[0]], body) if one.opcode in _RENAMES else one


def _parse(line: str) -> Instruction:
  head, text = line.strip().split(" = ", 1)
  shape, rest = _split(text)
  opcode, rest = rest.lstrip().split("(", 1)
  operands, attributes = _split(f"({rest}")
  name = head.removeprefix("ROOT ").lstrip("%")
  return Instruction(
    name,
    _bytes(shape),
    opcode,
    re.findall(r"%([\w.-]+)", operands),
    attributes,
    head.startswith("ROOT "),
  )


def _split(text: str) -> tuple[str, str]:
  """A shape, or what is in the first parentheses, and the rest."""
  depth = 0
  for number, letter in enumerate(text):
    depth += (letter in "({[") - (letter in ")}]")
    if not depth and (letter == " " or (letter == ")" and text[0] == "(")):
      return text[: number + 1], text[number + 1 :]
  return text, ""


def _bytes(shape: str) -> int:
  total = 0
  for kind, sizes in re.findall(r"\b([a-z][a-z0-9]*)\[([0-9,<=]*)\]", shape):
    bits = _BITS.get(kind) or int((re.search(r"\d+", kind) or "0")[0])
    for size in filter(None, sizes.split(",")):
      bits *= int(size.lstrip("<="))
    total += bits // 8
  return total


class Memory(NamedTuple):
  """Memory of a program on the device, in bytes."""

  temp: int  # temporary, by the compiler
  peak: int  # arguments, results and temporary memory, by the compiler


def memory_of(compiled: Any) -> Memory:
  """What the compiler says of a compiled program."""
  found = compiled.memory_analysis()
  temp = found.temp_size_in_bytes
  return Memory(
    temp,
    found.argument_size_in_bytes
    + found.output_size_in_bytes
    - found.alias_size_in_bytes
    + temp,
  )
