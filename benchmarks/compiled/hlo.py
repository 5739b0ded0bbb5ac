"""What an optimized program does, read from the text of its scheduled HLO: kernels, bytes, sorts, exchanges.

A kernel is an instruction that runs on the device by itself: a fusion, a sort, a copy, a custom call. One of a loop or a
branch counts once, and apart from those that run in every update. The bytes of a kernel are those of its operands and
results; of an operand of which it reads or replaces only some entries (gather, slice, scatter in place), those of the
entries.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

_BITS = {"pred": 8, "token": 0, "opaque": 0, "s4": 4, "u4": 4} | {"bf16": 16, "c64": 64, "c128": 128}
_NO_KERNEL = {
  *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id", "after-all"),
  *("opt-barrier", "add-dependency", "domain"),
}
_COLLECTIVE = re.compile(r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|send|recv)\b")
_READS_SOME = {"gather", "dynamic-slice", "slice"}
_WRITES_SOME = {"scatter": 2, "dynamic-update-slice": 1}  # the number of the operand that has the new entries
_WHOLE = {"reduce", "reduce-window", "sort", "scatter", "dot", "convolution", "custom-call", "fusion", "concatenate", "pad"}
_RENAMES = {"bitcast", "get-tuple-element", "reshape"}


class Instruction(NamedTuple):
  """One instruction: `name = shape opcode(operands), rest`."""

  name: str
  bytes: int  # of its result
  opcode: str
  operands: list[str]  # names
  rest: str  # attributes
  arguments: str  # the text between its parentheses
  is_root: bool

  @property
  def called(self) -> list[str]:
    """The computations that it names."""
    groups = re.findall(r"(?:calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|%[\w.-]+)", self.rest)
    return re.findall(r"%([\w.-]+)", " ".join(groups))


class Exchange(NamedTuple):
  """A message between devices."""

  bytes: int
  is_asynchronous: bool
  covered: int  # bytes that kernels move between its start and its done


class Summary(NamedTuple):
  """What one update does, or one training step."""

  kernels: int  # that run once
  in_branches: int  # of conditionals, all branches together
  in_loops: int  # of the bodies of loops
  bytes: int  # of the kernels that run once; of a conditional, the branch that moves fewest; a loop as often as known
  sorts: int  # anywhere
  copies: int  # of at least `large` bytes, anywhere
  synchronizations: int  # conditionals, and loops of unknown length: the host reads a predicate
  exchanges: list[Exchange]


def summarize(text: str, large: int) -> Summary:
  """The summary of a scheduled program; a copy of at least `large` bytes counts."""
  return _Program(text, large).summary()


class _Program:
  def __init__(self, text: str, large: int):
    self.large = large
    self.computations: dict[str, dict[str, Instruction]] = {}
    self.entry = ""
    for line in text.splitlines():
      if head := re.match(r"(ENTRY )?%([\w.-]+) .*\{$", line):
        current = self.computations.setdefault(head[2], {})
        self.entry = head[2] if head[1] else self.entry
      elif line.startswith("  ") and " = " in line:
        instruction = _parse(line)
        current[instruction.name] = instruction

  def summary(self) -> Summary:
    everywhere = list(self._everywhere(self.entry, "once"))
    places = [place for place, one in everywhere if self._is_kernel(one)]
    count = lambda opcode: sum(self._does(one, opcode) for _, one in everywhere)
    copies = sum(one.bytes >= self.large for _, one in everywhere if self._does(one, "copy"))
    waits = [
      one for _, one in everywhere if one.opcode == "conditional" or (one.opcode == "while" and not _trips(one))
    ]
    found = [places.count(place) for place in ("once", "branch", "loop")]
    return Summary(*found, self._bytes_of(self.entry), count("sort"), copies, len(waits), list(self._exchanges()))

  def _everywhere(self, name: str, place: str) -> Iterator[tuple[str, Instruction]]:
    """(where it runs, instruction) of a computation and of all that it runs."""
    for one in self.computations[name].values():
      yield place, one
      inner = {"while": "loop", "conditional": "branch" if place == "once" else place, "call": place}
      if one.opcode in inner:
        for called in one.called:
          yield from self._everywhere(called, inner[one.opcode])

  def _does(self, one: Instruction, opcode: str) -> bool:
    """Whether it is an instruction of this kind, or a fusion whose result is of it."""
    if one.opcode == "fusion":
      return any(inner.opcode == opcode and inner.is_root for inner in self.computations[one.called[0]].values())
    return one.opcode == opcode

  @staticmethod
  def _is_kernel(one: Instruction) -> bool:
    if one.opcode in _NO_KERNEL or one.opcode in ("while", "conditional", "call"):
      return False
    return not _COLLECTIVE.match(one.opcode) and not one.opcode.endswith("-done")

  def _bytes_of(self, name: str) -> int:
    total = 0
    for one in self.computations[name].values():
      if one.opcode == "conditional":
        total += min(self._bytes_of(branch) for branch in one.called)
      elif one.opcode == "while":
        total += max(1, _trips(one)) * sum(map(self._bytes_of, one.called))
      elif one.opcode == "call":
        total += self._bytes_of(one.called[0])
      elif self._is_kernel(one):
        total += self._moved(one, self.computations[name])
    return total

  def _moved(self, one: Instruction, around: dict[str, Instruction]) -> int:
    sizes = [around[name].bytes for name in one.operands]
    if one.opcode != "fusion":
      return _moved_alone(one, sizes)
    body = self.computations[one.called[0]]
    known: dict[str, int] = {}
    read = [_read_of(inner, body, known) for inner in body.values() if inner.opcode == "parameter"]
    return sum(read) + _written_by(body)

  def _exchanges(self) -> Iterator[Exchange]:
    schedule = self.computations[self.entry]
    open_: dict[str, int] = {}
    done = 0
    for one in schedule.values():
      if _COLLECTIVE.match(one.opcode) or (one.opcode.startswith("async") and _COLLECTIVE.search(one.rest)):
        if one.opcode.endswith("-start"):
          open_[one.name] = done
        elif one.opcode.endswith("-done"):
          start = schedule[one.operands[0]]
          yield Exchange(one.bytes, "is_sync\":true" not in start.rest, done - open_.pop(start.name, done))
        elif not one.opcode.endswith("-update"):
          yield Exchange(one.bytes, False, 0)
      elif self._is_kernel(one):
        done += self._moved(one, schedule)


def _parse(line: str) -> Instruction:
  head, text = line.strip().split(" = ", 1)
  is_root = head.startswith("ROOT ")
  shape, rest = _take(text)
  opcode, rest = rest.lstrip().split("(", 1)
  arguments, rest = _take("(" + rest)
  name = head.removeprefix("ROOT ").lstrip("%")
  return Instruction(name, _bytes(shape), opcode, re.findall(r"%([\w.-]+)", arguments), rest, arguments, is_root)


def _take(text: str) -> tuple[str, str]:
  """A shape, or what is in parentheses, and the rest."""
  depth = 0
  for number, letter in enumerate(text):
    depth += (letter in "({[") - (letter in ")}]")
    if not depth and (letter == " " or (letter == ")" and text[0] == "(")):
      return text[: number + 1], text[number + 1 :]
  return text, ""


def _bytes(shape: str) -> int:
  total = 0
  for kind, sizes in re.findall(r"\b([a-z][a-z0-9]*)\[([0-9,<=]*)\]", shape):
    bits = _BITS.get(kind) or (8 if kind.startswith("f8") else int((re.search(r"\d+$", kind) or "0")[0]))
    entries = 1
    for size in filter(None, sizes.split(",")):
      entries *= int(size.lstrip("<="))
    total += entries * bits // 8
  return total


def _trips(one: Instruction) -> int:
  """How often the body of a loop runs, 0 if that is not known."""
  known = re.search(r'"known_trip_count":\{"n":"(\d+)"', one.rest)
  return int(known[1]) if known else 0


def _moved_alone(one: Instruction, sizes: list[int]) -> int:
  if one.opcode in _READS_SOME:
    return 2 * one.bytes + sum(sizes[1:])
  if one.opcode in _WRITES_SOME:
    return sum(sizes[1:]) + sizes[_WRITES_SOME[one.opcode]]
  return sum(sizes) + one.bytes


def _read_of(one: Instruction, body: dict[str, Instruction], known: dict[str, int]) -> int:
  """The bytes that a fusion uses of the result of an instruction: all, or what slices and gathers take of it."""
  if one.name in known:
    return known[one.name]
  used = one.bytes if one.is_root else 0
  for user in body.values():
    for place, name in enumerate(user.operands):
      if name != one.name:
        continue
      if user.opcode in _READS_SOME and place == 0:
        used += user.bytes
      elif user.opcode in _WRITES_SOME and place == 0:
        used += 0 if one.opcode in (*_RENAMES, "parameter") else one.bytes
      elif user.opcode in _WHOLE or not user.bytes:
        used += one.bytes
      else:  # entry by entry
        used += one.bytes * _read_of(user, body, known) // user.bytes
  known[one.name] = min(used, one.bytes)
  return known[one.name]


def _written_by(body: dict[str, Instruction]) -> int:
  """The bytes that a fusion writes."""
  root = next(one for one in body.values() if one.is_root)
  results = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
  written = 0
  for one in results:
    while one.opcode in _RENAMES:
      one = body[one.operands[0]]
    base = one
    if one.opcode in _WRITES_SOME:
      base = body[one.operands[0]]
      while base.opcode in _RENAMES:
        base = body[base.operands[0]]
    in_place = one.opcode in _WRITES_SOME and base.opcode == "parameter"
    written += body[one.operands[_WRITES_SOME[one.opcode]]].bytes if in_place else one.bytes
  return written
