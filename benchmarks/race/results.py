"""The rows of a race in a JSON file, which is replaced whole whenever a row is added: an interruption loses none."""

import fcntl
import json
import math
import os
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import report


class Curve(NamedTuple):
  """Loss over steps of one method from one seed."""

  method: str  # as it was asked for
  optimizer: str  # its name, rate and options
  seed: int  # of the parameters and batches
  steps: list[int]  # at which the model was evaluated
  loss: list[float]  # on what is held out; infinite from where a training diverges
  accuracy: list[float]  # likewise
  words: float  # 4-byte words a step, of the worker that sent most
  # the largest of all steps: the root mean square over workers of the distance of their
  # parameters to the mean
  drift: float = 0.0


class Pace(NamedTuple):
  """Seconds a step of one method on links of one rate."""

  method: str  # as it was asked for
  rate: str  # of the links, as `tc` writes it
  steps: int  # that were timed: whole periods from one exchange to the next
  seconds: float  # of a step: the median over the periods
  compute: float  # of these, forward and backward, all workers at once
  rest: float  # selection, sums and optimizer, likewise
  # a step that the network interface of a host has sent, headers included; of the host
  # that sent most
  bytes: float
  optimizer: str = (
    ""  # that was timed: its name, rate and options; empty in files that do not say it
  )

  @property
  def parts(self) -> tuple[float, float, float]:
    """Seconds of compute, rest and exchange, what messages add: no part that was timed alone is more than is left."""
    compute = min(self.compute, self.seconds)
    rest = min(self.rest, self.seconds - compute)
    return compute, rest, self.seconds - compute - rest


class Whole(NamedTuple):
  """A training in the lab."""

  method: str  # as it was asked for
  optimizer: str  # its name, rate and options
  seed: int  # of the parameters and batches
  rate: str  # of the links
  steps: list[int]  # at which the model was evaluated
  # of all steps until then, without the evaluations and the first step, which compiles
  seconds: list[float]
  loss: list[float]  # on what is held out; infinite from where a training diverges


KINDS: dict[str, Any] = {"curves": Curve, "paces": Pace, "wholes": Whole}


class Results:
  """The rows of one file, to which several processes may add; numbers are kept to six digits, infinite ones as null."""

  def __init__(self, path: pathlib.Path, setting: dict[str, Any] | None):
    self.path = path
    self.rows: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    self.setting: dict[str, Any] = setting or {}
    self.refresh()

  def refresh(self) -> None:
    """Reads the rows that the file has by now."""
    if self.setting and not self.path.exists():
      return  # a new one
    try:
      kept = json.loads(self.path.read_text())
      setting = {"task": kept["setting"]["task"], **kept["setting"]}
      rows = {
        kind: [_read(make, row) for row in kept.get(kind, [])]
        for kind, make in KINDS.items()
      }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise ValueError(
        f"--results={self.path} is not the file of a race, choose another: {error!r}"
      ) from error
    self.setting = self.setting or setting
    for name in self.setting | setting:
      was, now = setting.get(name), self.setting.get(name)
      if was != now:
        raise ValueError(
          f"--results={self.path} has {name}={was!r}, this race {now!r}: choose another file"
        )
    self.rows = rows

  def find(self, kind: str, **key: Any) -> list[Any]:
    """The rows of a kind with these fields."""
    return [
      row
      for row in self.rows[kind]
      if all(getattr(row, name) == value for name, value in key.items())
    ]

  def pace_of(self, row: Curve | Whole, rate: str) -> Pace | None:
    """The pace of a training at a rate: of its method and optimizer, at any learning rate, or of one not named."""
    paces = {
      _options_of(one.optimizer): one
      for one in self.find("paces", rate=rate, method=row.method)
    }
    return paces.get(_options_of(row.optimizer), paces.get(""))

  def add(self, row: Any) -> None:
    """Writes a row into the file, in place of one of the same method, optimizer, seed and rate.

    Of two trainings, or paces, the longer one stays: one that starts anew takes nothing
    away until it is as far.
    """
    kind = next(name for name, make in KINDS.items() if isinstance(row, make))
    key = {
      name: getattr(row, name)
      for name in ("method", "optimizer", "seed", "rate")
      if name in row._fields
    }
    length = lambda one: np.max(one.steps)
    self.path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(self.path.parent, os.O_RDONLY)
    try:
      fcntl.flock(folder, fcntl.LOCK_EX)  # no other process is here now
      self.refresh()
      same = self.find(kind, **key)
      if any(length(one) > length(row) for one in same):
        return
      kept = type(row)(**report.rounded(row._asdict()))
      self.rows[kind] = [*(one for one in self.rows[kind] if one not in same), kept]
      report.keep(self.path, {"setting": self.setting}, self.rows)
    finally:
      os.close(folder)


def _options_of(optimizer: str) -> str:
  """An optimizer without its learning rate: adam:b1=0.8 of adam:0.001:b1=0.8."""
  name, _, options = optimizer.partition(":")
  return f"{name}:{options.partition(':')[2]}" if name else ""


def _read(make: Any, row: dict[str, Any]) -> Any:
  """A row of the file, in which null stands for what is infinite."""
  is_null = lambda leaf: leaf is None
  found = make(
    **jax.tree.map(
      lambda leaf: math.inf if is_null(leaf) else leaf, row, is_leaf=is_null
    )
  )
  if isinstance(found, Curve | Whole) and not 0 < len(found.steps) == len(found.loss):
    raise ValueError(f"{row} is no training")
  return found
