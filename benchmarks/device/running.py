"""The rows of a run: each is kept as soon as it is measured, and one that fails or is too late says so."""

import concurrent.futures
import json
import os
import pathlib
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import rich.console

from benchmarks import report

Row = dict[str, Any]
_LAST = 0.95  # of the time, after which no row is begun
# programs that are compiled at the same time
PARALLEL = max(1, (os.cpu_count() or 1) // 4)


class Run:
  """Measures rows one after the other, and keeps all of them in a JSON file, a list of rows for each part.

  A row is a dictionary with its `row`, a name, and what was measured; or `error`, the
  text of an exception; or `not_run`, where its turn came too late.

  Args:
    path: of the file.
    head: what it has beside the rows and the seconds of all runs.
    parts: whether each part is measured. The rows of others are read from the file, if
      it is there.
    seconds: the time of the run.
    console: to print rows to.
    same: fields of the head that the file must have as they are, if rows of it are
      kept.

  Attributes:
    head: what the file has beside the rows; of a file whose rows are kept, but for the
      fields `same`.
    rows: by part.
    failed: whether a row raised an exception.

  Raises:
    ValueError: if one of the fields `same` differs.
  """

  def __init__(
    self,
    path: pathlib.Path,
    head: Mapping[str, Any],
    parts: Mapping[str, bool],
    seconds: float,
    console: rich.console.Console,
    same: Sequence[str] = (),
  ):
    self._path, self._seconds, self._console = path, seconds, console
    self._start = time.monotonic()
    earlier = (
      json.loads(path.read_text()) if path.exists() and not all(parts.values()) else {}
    )
    for name in same if earlier else ():
      if earlier[name] != head[name]:
        raise ValueError(
          f"{path} is of {name} {earlier[name]}, not {head[name]}: choose another --name or --report_dir"
        )
    self.head = {
      name: value if name in same else earlier.get(name, value)
      for name, value in head.items()
    }
    self.rows: dict[str, list[Row]] = {
      part: [] if now else earlier.get(part, []) for part, now in parts.items()
    }
    self.failed = False
    self._before = earlier.get("seconds", 0.0)

  @property
  def elapsed(self) -> float:
    """Seconds since the beginning."""
    return time.monotonic() - self._start

  def share(self, of_rest: float) -> float:
    """When a part must end that gets this share of the time that is left, in seconds since the beginning."""
    return self.elapsed + of_rest * max(0.0, _LAST * self._seconds - self.elapsed)

  def left(self, until: float) -> float:
    """Seconds until so many are over since the beginning, at least 0."""
    return max(0.0, until - self.elapsed)

  def measure(
    self, part: str, name: str, until: float, make: Callable[[], Mapping[str, Any]]
  ) -> None:
    """Adds a row of what `make` returns, keeps all rows, and prints this one; none is begun after `until` seconds."""
    if self.left(until):
      self.attempt(part, lambda: self._add(part, name, make()), name)
    else:
      self._add(part, name, {"not_run": f"the part had time until {until:.0f} s"})

  def attempt(
    self, part: str, measure: Callable[[], None], name: str = "the whole part"
  ) -> None:
    """Calls `measure`, and adds a row of the exception that it raises."""
    try:
      measure()
    except Exception as error:
      self.failed = True
      self._console.print(
        traceback.format_exc(), highlight=False, markup=False, soft_wrap=True
      )
      self._add(part, name, {"error": f"{type(error).__name__}: {error}"})

  def _add(self, part: str, name: str, found: Mapping[str, Any]) -> None:
    row = {"row": name, **found}
    self.rows[part].append(
      {key: report.rounded(report.plain(value)) for key, value in row.items()}
    )
    self.keep()
    if "not_run" in row:
      return
    shown = {
      key: value
      for key, value in self.rows[part][-1].items()
      if key != "row" and not isinstance(value, list)
    }
    text = ", ".join(f"{key} {_short(value)}" for key, value in shown.items())
    self._console.print(
      f"{self.elapsed:6.1f} s  {part}: {name}: {text}",
      highlight=False,
      markup=False,
      soft_wrap=True,
    )

  def keep(self) -> None:
    """Writes the file."""
    report.keep(
      self._path,
      {**self.head, "seconds": round(self._before + self.elapsed, 1)},
      self.rows,
    )

  def measured(self, part: str) -> list[Row]:
    """The rows of a part that were measured."""
    return [row for row in self.rows[part] if not _is_missing(row)]

  def missing(self) -> list[str]:
    """What was not measured, and why, a line for all rows of a part with the same reason."""
    names: dict[tuple[str, str], list[str]] = {}
    for part, rows in self.rows.items():
      for row in filter(_is_missing, rows):
        names.setdefault((part, row.get("error") or row["not_run"]), []).append(
          row["row"]
        )
    return [
      f"{part}: {', '.join(rows)}: {reason}" for (part, reason), rows in names.items()
    ]


def make_ahead(makers: Iterable[Callable[[], object]], seconds: float) -> None:
  """Calls functions that cache what they return, mostly compiled programs, in several threads for about `seconds`.

  A function that raises, or finds no time, is called again where its result is needed.
  Nothing else is timed meanwhile.
  """
  pool = concurrent.futures.ThreadPoolExecutor(PARALLEL)
  concurrent.futures.wait([pool.submit(make) for make in makers], seconds)
  pool.shutdown(cancel_futures=True)


def _is_missing(row: Row) -> bool:
  return "error" in row or "not_run" in row


def _short(value: Any) -> str:
  return f"{value:.4g}" if isinstance(value, float) else str(value)
