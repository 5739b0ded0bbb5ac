"""The rows of a race in a JSON file, which is replaced whole whenever a row is added: an interruption loses none."""

import json
import pathlib
from typing import Any, NamedTuple

from benchmarks import report


class Curve(NamedTuple):
  """Loss over steps of one method from one seed.

  Attributes:
    method: as it was asked for.
    optimizer: its name, rate and options.
    seed: of the parameters and batches.
    steps: at which the model was evaluated.
    loss: on what is held out.
    accuracy: likewise.
    words: 4-byte words a step, of the worker that sent most.
    drift: the largest of all steps: the root mean square over workers of the distance of their parameters to the mean.
  """

  method: str
  optimizer: str
  seed: int
  steps: list[int]
  loss: list[float]
  accuracy: list[float]
  words: float
  drift: float = 0.0


class Pace(NamedTuple):
  """Seconds a step of one method on links of one rate.

  Attributes:
    method: as it was asked for.
    rate: of the links, as `tc` writes it.
    steps: that were timed: whole periods from one exchange to the next.
    seconds: of a step: the median over the periods.
    compute: of these, forward and backward, all workers at once.
    rest: selection, sums and optimizer, likewise.
    bytes: a step that the network interface of a host has sent, headers included; of the host that sent most.
  """

  method: str
  rate: str
  steps: int
  seconds: float
  compute: float
  rest: float
  bytes: float

  @property
  def exchange(self) -> float:
    """Seconds that messages add."""
    return max(0.0, self.seconds - self.compute - self.rest)


class Whole(NamedTuple):
  """A training in the lab.

  Attributes:
    method: as it was asked for.
    optimizer: its name, rate and options.
    seed: of the parameters and batches.
    rate: of the links.
    steps: at which the model was evaluated.
    seconds: of all steps until then, without the evaluations and the first step, which compiles.
    loss: on what is held out.
  """

  method: str
  optimizer: str
  seed: int
  rate: str
  steps: list[int]
  seconds: list[float]
  loss: list[float]


class Advised(NamedTuple):
  """The method that `js.costs.advise` names for links of one rate, from a profile fitted on them and the evidence.

  Attributes:
    rate: of the links.
    method: the one that reaches dense's loss first.
    seconds: predicted of each method to the loss that dense has after one step.
    why: the reason in words, with the evidence.
  """

  rate: str
  method: str
  seconds: dict[str, float]
  why: str


KINDS: dict[str, Any] = {"curves": Curve, "paces": Pace, "wholes": Whole, "advice": Advised}
_KEYS = ("method", "optimizer", "seed", "rate")


class Results:
  """The rows of one file.

  Args:
    path: of the file; read if there is one.
    setting: of the race in words and numbers, the same for all rows; None takes that of the file.

  Attributes:
    setting: likewise.
    rows: by kind, in the order in which they were added.

  Raises:
    ValueError: if the file is of another setting, with what differs.
    FileNotFoundError: if there is no file and no setting.
  """

  def __init__(self, path: pathlib.Path, setting: dict[str, Any] | None):
    self._path = path
    is_new = setting is not None and not path.exists()
    kept: dict[str, Any] = {"setting": setting} if is_new else json.loads(path.read_text())
    self.setting: dict[str, Any] = kept["setting"] if setting is None else setting
    for name in self.setting | kept["setting"]:
      was, now = kept["setting"].get(name), self.setting.get(name)
      if was != now:
        raise ValueError(f"--results={path} has {name}={was!r}, this race {now!r}: choose another file")
    self.rows: dict[str, list[Any]] = {
      kind: [make(**row) for row in kept.get(kind, [])] for kind, make in KINDS.items()
    }

  def find(self, kind: str, **key: Any) -> list[Any]:
    """The rows of a kind with these fields."""
    return [row for row in self.rows[kind] if all(getattr(row, name) == value for name, value in key.items())]

  def add(self, row: Any) -> None:
    """Adds a row, to six digits, in place of one of the same method, optimizer, seed and rate; writes the file."""
    kind = next(name for name, make in KINDS.items() if isinstance(row, make))
    key = {name: getattr(row, name) for name in _KEYS if name in row._fields}
    same, kept = self.find(kind, **key), type(row)(**report.rounded(row._asdict()))
    self.rows[kind] = [*(one for one in self.rows[kind] if one not in same), kept]
    self._write()

  def merge(self, path: pathlib.Path) -> None:
    """Adds all rows of another file."""
    for rows in Results(path, self.setting).rows.values():
      for row in rows:
        self.add(row)

  def _write(self) -> None:
    lines = [f'"setting": {json.dumps(self.setting)}']
    for kind, rows in self.rows.items():
      lines.append(f'"{kind}": [\n' + ",\n".join(json.dumps(row._asdict()) for row in rows) + "\n]")
    report.replace(self._path, "{" + ",\n".join(lines) + "}\n")
