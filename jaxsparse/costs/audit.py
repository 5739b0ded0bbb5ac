"""`js.costs.audit`: the collective operations of a compiled program that cross an axis of the mesh."""

import itertools
import math
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxsparse._compat import AxisName, names_of

# An instruction of HLO text that communicates: `%name = shape kind(operands), …`. The
# suffix -start is of the first half of an asynchronous pair, which has all that counts.
_OPERATION = re.compile(
  r"%?\S+ = (?P<shape>\(.*?\)|\S+) "
  r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast)"
  r"(?P<start>-start)?\("
)
# A dtype with its dimensions, as in bf16[128,64].
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
# Bytes of an entry, for some types; of others `_itemsize` reads bits in their names.
_BYTES = {
  "pred": 1,
  "bf16": 2,
  "c64": 8,
  "c128": 16,
}
# Frames within this folder, the package's, are not the user's.
_PACKAGE = str(pathlib.Path(__file__).parents[1])


class Operation(NamedTuple):
  """A collective operation of a compiled program.

  Attributes:
    kind: as HLO names it, "all-reduce" for instance.
    dtype: of its arrays, as HLO names it.
    entries: of its result on one device.
    bytes: bytes that a device sends across the axis in one run of the program, all
      rounds of loops together.
    source: file and line of the program that made it, outside of JAX and jaxsparse
      where there is one.

  Example:
    >>> Operation("all-reduce", "f32", 100, 600, "train.py:7").bytes
    600
  """

  kind: str
  dtype: str
  entries: int
  bytes: int
  source: str


class Audit(NamedTuple):
  """What a compiled program sends across an axis of the mesh.

  Attributes:
    operations: those that cross the axis, the largest first; of a conditional those of
      the branch that sends most.

  Example:
    >>> print(Audit((Operation("all-reduce", "f32", 100, 600, "train.py:7"),)))
    600 bytes in 1 operations
             600  all-reduce f32[100]  train.py:7
  """

  operations: tuple[Operation, ...]

  @property
  def bytes(self) -> int:
    """Bytes that a device sends across the axis in one run of the program."""
    return sum(operation.bytes for operation in self.operations)

  def __str__(self) -> str:
    # A line each: bytes sent, kind, dtype[entries of its result], line of its source.
    lines = [
      f"{operation.bytes:>12,}  {operation.kind} {operation.dtype}[{operation.entries:,}]  {operation.source}"
      for operation in self.operations
    ]
    return "\n".join(
      [f"{self.bytes:,} bytes in {len(self.operations)} operations", *lines]
    )


def audit(
  program: jax.stages.Lowered | jax.stages.Compiled | str,
  mesh: Mesh,
  axis: AxisName = "workers",
  *,
  at_most: int | None = None,
) -> Audit:
  """The collective operations of a compiled program that cross an axis of the mesh, also those the compiler added.

  A compiler adds all-gathers and all-reduces where shardings need them. Bytes are those
  of the algorithms that send least, over A indices of the axis: an all-reduce of b
  bytes sends 2 b (A − 1)/A, an all-gather and a reduce-scatter (A − 1)/A of the whole
  array, an all-to-all (A − 1)/A of its operand, a permutation its operand. If a group
  has several devices with the same index, they share the bytes, but not those of an
  all-to-all.

  Args:
    program: `step.lower(...)`, `jax.jit(...).lower(...)`, what either compiles to, or
      the text of optimized HLO for CPU, GPU or TPU.
    mesh: the mesh of the program.
    axis: the axis, or tuple of axes, that should be crossed seldom.
    at_most: bytes that a device may send across the axis in one run; None for no limit.

  Returns:
    An `Audit`; `print` it.

  Raises:
    ValueError: for a text without a program; if the program sends more than `at_most` bytes, with its operations; if
      the mesh has no such axis, or the program runs on other numbers of devices.

  Example:
    >>> import jax, jax.numpy as jnp, jaxsparse as js
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("workers",))
    >>> tx, params = js.onebit_transform("workers"), jnp.zeros(40_000)
    >>> step = js.make_train_step(lambda p, batch: jnp.vdot(p, batch[0]), tx, mesh)
    >>> lowered = step.lower(params, js.init(tx, params, mesh), jnp.ones((step.workers, 40_000)))
    >>> js.costs.audit(lowered, mesh, at_most=20_000).bytes < 20_000  # a dense exchange sends up to 320,000
    True
  """
  if unknown := [name for name in names_of(axis) if name not in mesh.shape]:
    raise ValueError(
      f"audit: axis {unknown[0]!r} is not an axis of the mesh, choose from {tuple(mesh.axis_names)}"
    )
  compiled = program.compile() if isinstance(program, jax.stages.Lowered) else program
  # `as_text` returns None where a platform has no text.
  text = compiled if isinstance(compiled, str) else compiled.as_text() or ""
  if "ENTRY " not in text:
    raise ValueError(
      f"audit: {text[:40]!r} is no optimized HLO: give step.lower(...), or the text of what it compiles to"
    )
  # A program of one device has no number.
  devices = _field(text, "num_partitions")
  if devices not in ("", str(mesh.size)):
    raise ValueError(
      f"audit: the program has {devices} devices, the mesh has {mesh.size}: give its mesh"
    )
  program_text = _Text(text, _positions(mesh, axis))
  result = Audit(
    tuple(
      sorted(
        program_text.operations(program_text.entry),
        key=lambda operation: -operation.bytes,
      )
    )
  )
  if at_most is not None and result.bytes > at_most:
    raise ValueError(
      f"audit: more than at_most={at_most:,} bytes cross axis {axis!r}: {result}"
    )
  return result


def _positions(mesh: Mesh, axis: AxisName) -> np.ndarray:
  """The index along the axis of each device, i64[devices]; HLO numbers devices in row-major order of the mesh.

  Several axes count as one, whose index is row-major over them.
  """
  names = mesh.axis_names
  # coordinates of each device in the mesh, [axes of the mesh, devices]
  coords = np.indices(mesh.devices.shape).reshape(len(names), -1)
  chosen = [names.index(name) for name in names_of(axis)]
  return np.asarray(
    np.ravel_multi_index(
      tuple(coords[chosen]), [mesh.devices.shape[axis_index] for axis_index in chosen]
    )
  )


class _Text:
  """The text of a program: its computations by name, and where their instructions come from.

  Attributes:
    positions: i64[devices], the index of each device along the axis; `positions[i]` is
      that of the device which HLO calls i.
    computations: the instructions of each computation, a line each, by its name.
    entry: the name of the computation that the program runs.
    frames: the tables that tell the source of an instruction.
  """

  def __init__(self, text: str, positions: np.ndarray):
    self.positions = positions
    self.computations, self.entry = computations_of(text)
    self.frames = _Frames(text)

  def operations(self, computation: str) -> list[Operation]:
    """The operations that cross the axis, in one run of a computation."""
    crossing = list[Operation]()
    # The pattern matches the -start of an asynchronous pair, and not its -done.
    for line in self.computations[computation]:
      if (match := _OPERATION.match(line.removeprefix("ROOT "))) and (
        operation := self._operation(match, line)
      ):
        crossing.append(operation)
      # Operations of one run of each computation that this instruction runs.
      inside = {
        name: self.operations(name)
        for name in called_by(line)
        if name in self.computations
      }
      if " conditional(" in line:
        # One branch runs: the one that sends most counts.
        crossing += max(
          inside.values(),
          key=lambda branch: sum(operation.bytes for operation in branch),
          default=[],
        )
      elif " while(" in line:
        crossing += _repeated(line, inside)
      else:
        crossing += itertools.chain(*inside.values())
    return crossing

  def _operation(self, match: re.Match, line: str) -> Operation | None:
    """The operation of an instruction, as `_OPERATION` matches it; None if it does not cross the axis."""
    # (dtype, entries) of each array in the shape of the result
    shapes = [
      (kind, math.prod(int(size) for size in sizes.split(",") if size))
      for kind, sizes in _ARRAY.findall(match["shape"])
    ]
    # A -start returns a tuple of operands and results; that of a permute has contexts
    # behind them. Only results count. An all-reduce-start returns results alone.
    if match["start"] and match["kind"] != "all-reduce" and len(shapes) > 1:
      shapes = (
        shapes[1:2]
        if match["kind"] == "collective-permute"
        else shapes[len(shapes) // 2 :]
      )
    entries = sum(size for _, size in shapes)
    # bytes sent across the axis / bytes of the results
    share = self._share(match["kind"], line, entries)
    if not share:
      return None
    size = sum(count * _itemsize(kind) for kind, count in shapes)
    return Operation(
      match["kind"],
      shapes[0][0],
      entries,
      math.ceil(share * size),
      self.frames.source_of(line),
    )

  def _share(self, kind: str, line: str, entries: int) -> float:
    """Bytes that a device sends across the axis / bytes of the result; 0 if the operation does not cross the axis."""
    if kind == "collective-permute":
      pairs = re.findall(
        r"\{(\d+),(\d+)\}",
        line.partition("source_target_pairs=")[2].partition("}}")[0] + "}",
      )
      crosses = [
        self.positions[int(source)] != self.positions[int(target)]
        for source, target in pairs
      ]
      # Where any pair crosses, a device sends its operand, as large as its result.
      return float(any(crosses))
    # Each group, a list of device numbers, communicates by itself.
    groups = _groups(line, len(self.positions))
    # Groups may differ: the group with the most indices of the axis counts.
    widest = max(groups, key=lambda group: len(set(self.positions[group])))
    indices = len(set(self.positions[widest]))
    if indices == 1:
      return 0.0
    per_index = len(widest) / indices  # devices with the same index share the bytes
    # The summed array is as large as indices · per_index results. A device sends
    # (indices − 1) / (indices · per_index) of it: as much as indices − 1 results.
    if kind == "reduce-scatter":
      return indices - 1
    # Fewer entries than indices cannot be scattered: all of them are sent.
    if kind == "all-reduce" and entries < indices:
      return 1 / per_index
    # The array is padded and cut into one piece for each index. All pieces but one are
    # sent; in an all-reduce twice, by its reduce-scatter and by its all-gather.
    share = math.ceil(entries / indices) * (indices - 1) / entries
    # In an all-to-all nothing is shared: devices with the same index have other entries.
    if kind.endswith("all-to-all"):
      return share
    return (2 if kind == "all-reduce" else 1) * share / per_index


class _Frames:
  """The tables of files and lines at the head of a program; some programs have file and line beside each instruction.

  Attributes:
    files: names of files, by their numbers as text.
    lines: "{file_name_id=2 … line=7}" of each location in a file, by its number.
    frames: "{file_location_id=2 parent_frame_id=1}" of each stack frame, by its number;
      the parent is its caller.

  All are empty in programs without tables.
  """

  def __init__(self, text: str):
    # A table, of rows "number content", stands between its name and an empty line.
    head = text.partition("ENTRY")[0]
    table = lambda name, row: dict(
      re.findall(
        row, head.partition(f"\n{name}\n")[2].partition("\n\n")[0], re.MULTILINE
      )
    )
    self.files = table("FileNames", r'^(\d+) "(.*)"$')
    self.lines = table("FileLocations", r"^(\d+) (\{.*\})$")
    self.frames = table("StackFrames", r"^(\d+) (\{.*\})$")

  def source_of(self, line: str) -> str:
    """File and line of the innermost caller outside of JAX and jaxsparse, else of the outermost that is known."""
    # Some programs have file and line in the instruction itself, and no frames.
    if plain := re.search(r'source_file="([^"]*)" source_line=(\d+)', line):
      return f"{plain[1]}:{plain[2]}"
    # Frames run from the innermost caller to the outermost.
    places = list(self._places(_field(line, "stack_frame_id")))
    # Installed packages are in "site-packages"; `_PACKAGE` is the folder of jaxsparse.
    users = [
      place
      for place in places
      if "site-packages" not in place and not place.startswith(_PACKAGE)
    ]
    return next(iter([*users, *reversed(places)]), "added by the compiler")

  def _places(self, frame: str) -> Iterator[str]:
    """Yields file:line of a frame, then of its callers from the innermost outwards; nothing if `frame` is ""."""
    while frame in self.frames:
      place = self.lines.get(_field(self.frames[frame], "file_location_id"), "")
      yield f"{self.files.get(_field(place, 'file_name_id'), '?')}:{_field(place, 'line')}"
      parent = _field(self.frames[frame], "parent_frame_id")
      # The outermost frame is its own parent.
      frame = parent if parent != frame else ""


def _repeated(line: str, inside: dict[str, list[Operation]]) -> list[Operation]:
  """The operations of a loop, over all rounds; `inside` has those of one run of its body and condition, by name."""
  rounds = trip_count(line)
  if rounds is None:
    if sent := list(itertools.chain(*inside.values())):
      raise NotImplementedError(
        f"audit: {sent[0].kind} {sent[0].dtype}[{sent[0].entries:,}] of {sent[0].source} is inside a loop of unknown "
        "length, so its bytes are unknown: give the loop a length that is known when it is traced, as jax.lax.scan "
        "has, or audit the program of one round"
      )
    return []
  # A loop tests its condition once more than it runs its body.
  is_condition = lambda name: re.search(rf"condition=%?{re.escape(name)}\b", line)
  return [
    operation._replace(
      bytes=operation.bytes * (rounds + 1 if is_condition(name) else rounds)
    )
    for name, operations in inside.items()
    for operation in operations
  ]


def _field(text: str, name: str) -> str:
  """The digits after "name=" in a text; "" where there are none."""
  match = re.search(rf"\b{name}=(\d+)", text)
  return match[1] if match else ""


def _itemsize(kind: str) -> float:
  """Bytes of an entry of a dtype of HLO; 0 for a name without bits, as of a token."""
  # The bits are the first number in a name, as in f8e4m3.
  bits = re.search(r"\d+", kind)
  return _BYTES.get(kind) or (int(bits[0]) / 8 if bits else 0)


def computations_of(text: str) -> tuple[dict[str, list[str]], str]:
  """The instructions of each computation of HLO text by its name, and the name of the one that the program enters."""
  computations: dict[str, list[str]] = {}
  current: list[str] = []
  entry = ""
  for line in text.splitlines():
    # Heads of computations stand at the margin, and instructions are indented.
    if head := re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line):
      current = computations.setdefault(head[2], [])
      entry = head[2] if head[1] else entry
    elif line.startswith("  "):
      current.append(line.strip())
  return computations, entry


def trip_count(line: str) -> int | None:
  """How often the body of a loop runs; None if that is not known."""
  known = re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', line)
  return int(known[1]) if known else None


def called_by(line: str) -> list[str]:
  """The names of the computations that an instruction runs."""
  # Each of these attributes holds one name, or several within braces.
  named = re.findall(
    r"(?:calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|%?[\w.-]+)", line
  )
  return re.findall(r"[\w.-]+", " ".join(named).replace("%", ""))


def _groups(line: str, devices: int) -> list[list[int]]:
  """The groups of device numbers in `replica_groups`; one group of all devices if it is empty or missing.

  Notations: {{0,1},{2,3}}, [2,2]<=[4], [2,2]<=[2,2]T(1,0), mesh['a'=2,'b'=2] {'b'}
  Others raise NotImplementedError.
  """
  text = line.partition("replica_groups=")[2]
  if not text or text.startswith("{}"):
    return [list(range(devices))]
  if listed := re.match(r"\{(\{[\d,]+\}(?:,\{[\d,]+\})*)\}", text):
    return [_whole(group) for group in re.findall(r"\{([\d,]+)\}", listed[1])]
  # [groups, devices]<=[shape]T(order): 0, 1, … in this shape, its axes in this order,
  # reshaped to rows of groups.
  if iota := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
    ids = _iota(iota[2], iota[3])
    return ids.reshape(_whole(iota[1])).tolist()
  # Axes of a mesh with their sizes, maybe the numbers of its devices as shape and order
  # (else row-major), and the axes along which the devices of a group lie.
  if named := re.match(
    r"mesh\[((?:'\w+'=\d+,?)+)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{((?:'\w+',?)*)\}",
    text,
  ):
    names, digits = zip(*re.findall(r"'(\w+)'=(\d+)", named[1]), strict=True)
    sizes = list(map(int, digits))
    # for each axis, whether the devices of a group lie along it
    inside = [name in re.findall(r"\w+", named[4]) for name in names]
    shape = named[2] or ",".join(digits)
    ids = _iota(shape, named[3]).reshape(sizes)
    # The axes of a group go last, so that its devices lie side by side.
    order = sorted(range(len(sizes)), key=inside.__getitem__)
    group_size = math.prod(itertools.compress(sizes, inside))
    return ids.transpose(order).reshape(-1, group_size).tolist()
  raise NotImplementedError(
    f"audit: replica_groups={text[:80]!r}: this notation is not known"
  )


def _whole(text: str) -> list[int]:
  """The whole numbers of a text, which commas separate."""
  return [int(digits) for digits in text.split(",")]


def _iota(shape: str, order: str | None) -> Any:
  """The numbers 0, 1, … in an array of the shape "2,2", transposed by the order of axes "1,0"; None for no order."""
  ids = np.arange(math.prod(_whole(shape))).reshape(_whole(shape))
  return ids.transpose(_whole(order)) if order else ids
