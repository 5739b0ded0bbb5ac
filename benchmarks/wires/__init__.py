"""Bits of an entry on the wire, in every wire format, beside the least that they could be."""

import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
import rich.table
from jax.sharding import Mesh

import jaxsparse as js
from benchmarks import report, specs
from benchmarks.compiled import programs
from jaxsparse.sparse.values import FORMATS

WORKERS = 2  # that send each other the k entries of one of them


class Row(NamedTuple):
  """One wire format of one collective."""

  algorithm: str  # as it was asked for
  density: float  # of the entries that are delivered
  bits: float  # of an entry, in the compiled program
  entropy: float  # bits of an index
  value: int  # bits of a value

  @property
  def ratio(self) -> float:
    """The bits of an entry over the least."""
    return self.bits / (self.entropy + self.value)


def row(spec: specs.Spec, n: int) -> Row:
  """Compiles the update of a collective for two workers of this machine, and counts its bits."""
  devices = jax.devices()[:WORKERS]
  mesh = Mesh(np.array(devices), (programs.AXIS,))
  audit = js.costs.audit(programs.traced(spec, devices, n).lower(), mesh)
  collective: Any = spec.collective
  entries = collective.entries(n)
  block = n // WORKERS if spec.name == "spardl" else getattr(collective, "chunk", n)
  index = (
    math.log2(n / entries)
    if spec.config.get("selector") == "chunked"
    else entropy(round(block * entries / n), block)
  )
  bits = 8 * audit.bytes / entries
  value = FORMATS[spec.config.get("wire", "coo")].bits
  return Row(spec.label, spec.config["density"], bits, index, value)


def entropy(k: int, n: int) -> float:
  """Bits of an index of a set of k of n: log₂ C(n, k) / k.

  Example:
    >>> round(entropy(1, 256), 3), round(entropy(10_000, 1_000_000), 2)
    (8.0, 8.08)
  """
  ways = functools.reduce(
    float.__sub__, map(math.lgamma, (n + 1.0, k + 1.0, n - k + 1.0))
  )
  return ways / math.log(2) / k


HEADS = (
  "exchange",
  "density",
  "bits an entry",
  "entropy of an index",
  "bits of a value",
  "ratio",
)


def cells(one: Row) -> list[str]:
  """The row of a table."""
  numbers = f"{one.bits:.1f}", f"{one.entropy:.2f}", str(one.value), f"{one.ratio:.2f}"
  return [one.algorithm, f"{one.density:.2%}", *numbers]


def table(rows: list[Row]) -> rich.table.Table:
  """All rows."""
  return report.table("bits on the wire", HEADS, map(cells, rows))
