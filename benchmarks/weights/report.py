"""Rows of published steps, and their tables."""

import statistics
from typing import NamedTuple

from benchmarks import report


class Row(NamedTuple):
  """One published step; seconds are CPU seconds of this process."""

  rate: float
  entries: int  # of the model
  changed: int  # entries whose pattern in the serving dtype changed
  entropy: float  # bits of the index of a changed entry, if all sets were as likely
  index_bits: float  # bits of a changed entry's index
  difference_bits: float  # bits of a changed entry's difference
  link: int  # bytes of the file
  whole: int  # bytes of the patterns
  zstd: int | None  # bytes of their XOR, compressed
  planes: int | None  # bytes of its byte planes, compressed
  read: float
  diff: float  # finding and packing differences
  digest: float
  publish: float
  latest: float
  apply: float  # unpacking and adding differences
  diff_jit: float
  apply_jit: float


class Fetch(NamedTuple):
  """Versions that readers in the lab have copied."""

  what: str  # how the versions come
  rate: float  # of Adam
  versions: int
  # from the call of `publish` until the last reader has the version; of a reader that is
  # started, from its start until it has the newest one
  seconds: float  # mean
  most: float
  bytes: float  # of files, a reader and version


READERS = ("versions", "rate", "count", "seconds", "most", "bytes a reader")
HEADS = (
  "rate",
  "weights that change",
  "bits an index",
  "entropy",
  "bits a difference",
  "link",
  "/ full copy",
  "/ zstd of XOR",
  "/ zstd of planes",
)
TIMES = (
  "rate",
  "read",
  "find and pack",
  "digest",
  "publish",
  "latest",
  "unpack and add",
  "find, jitted",
  "add, jitted",
)


def sizes(rows: list[Row]) -> list[list[str]]:
  """Means over the steps of a rate, cells of `HEADS`."""
  shown = []
  for rate, own in _by_rate(rows):
    mean = lambda of, own=own: statistics.mean(map(of, own))
    shown.append(
      [
        f"{rate:g}",
        f"{mean(lambda row: 100 * row.changed / row.entries):.2f} %",
        f"{mean(lambda row: row.index_bits):.2f}",
        f"{mean(lambda row: row.entropy):.2f}",
        f"{mean(lambda row: row.difference_bits):.2f}",
        f"{mean(lambda row: row.link):,.0f}",
        f"{mean(lambda row: row.link / row.whole):.4f}",
        *(
          report.ratio(mean(lambda row: row.link), mean(of) if own[0].zstd else None)
          for of in (lambda row: row.zstd, lambda row: row.planes)
        ),
      ]
    )
  return shown


def times(rows: list[Row]) -> list[list[str]]:
  """Medians over the steps of a rate in milliseconds, cells of `TIMES`."""
  names = (
    "read",
    "diff",
    "digest",
    "publish",
    "latest",
    "apply",
    "diff_jit",
    "apply_jit",
  )
  return [
    [
      f"{rate:g}",
      *(
        report.milliseconds(statistics.median(getattr(row, name) for row in own))
        for name in names
      ),
    ]
    for rate, own in _by_rate(rows)
  ]


def fetches(found: list[Fetch]) -> list[list[str]]:
  """Cells of `READERS`."""
  return [
    [
      row.what,
      f"{row.rate:g}",
      str(row.versions),
      f"{row.seconds:.2f}",
      f"{row.most:.2f}",
      f"{row.bytes:,.0f}",
    ]
    for row in found
  ]


def _by_rate(rows: list[Row]) -> list[tuple[float, list[Row]]]:
  rates = dict.fromkeys(row.rate for row in rows)
  return [(rate, [row for row in rows if row.rate == rate]) for rate in rates]


def goals(rows: list[Row]) -> list[report.Goal]:
  """Bits of an index, bytes beside zstd, and reads of the weights in the time of each way, at the worst rate."""
  near = [row.index_bits for row in rows if 0.005 < row.changed / row.entries < 0.02]
  ratios = [row.link / row.zstd for row in rows if row.zstd]
  bits = lambda own: statistics.mean(row.index_bits for row in own)
  median = lambda own, name: statistics.median(getattr(row, name) for row in own)
  reads = lambda name: max(
    median(own, name) / median(own, "read") for _, own in _by_rate(rows)
  )
  ways = {
    "find and pack": "diff",
    "unpack and add": "apply",
    "find, jitted": "diff_jit",
    "add, jitted": "apply_jit",
  }
  return [
    report.goal(
      "bits of an index where 0.5 to 2 % of the weights change <= 9.5",
      max(near, default=None),
      most=9.5,
    ),
    *(
      report.goal(f"bits of an index at a rate of {rate:g} <= 9.5", bits(own), most=9.5)
      for rate, own in _by_rate(rows)
    ),
    report.goal(
      "bytes of a link / zstd of the XOR <= 0.7",
      max(ratios, default=None),
      most=0.7,
    ),
    *(
      report.goal(f"{way}: reads of the weights <= 4", reads(name), most=4)
      for way, name in ways.items()
    ),
  ]
