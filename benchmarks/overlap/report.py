"""Tables of `benchmarks.overlap`."""

import rich.table

import jaxsparse as js
from benchmarks import report
from benchmarks.overlap import hiding
from benchmarks.overlap.contention import Curve
from benchmarks.overlap.iterations import WORKERS, Row


def table(rows: list[Row], link: js.overlap.Link, ways: int) -> rich.table.Table:
  """The rows, those of one network together."""
  setting = f"α = {1e3 * link.alpha:g} ms, β = {1e9 * link.beta:g} ns/byte, γ = {link.gamma:g}, {ways} at once"
  lines = []
  for one in rows:
    wfbp = next(
      (
        other.seconds
        for other in rows
        if (other.model, other.plan) == (one.model, "wfbp")
      ),
      None,
    )
    lines.append(
      [
        one.model,
        one.plan,
        str(one.groups),
        str(one.most_at_once),
        f"{one.seconds:.3f}",
      ]
    )
    lines[-1] += [
      f"{one.exposed:.3f}",
      report.ratio(wfbp, one.seconds),
      f"{one.speed_up:.1f}",
      f"{one.bound:.1f}",
    ]
  heads = (
    "network",
    "plan",
    "sent",
    "at once",
    "s",
    "exposed s",
    "wfbp / this",
    "S",
    "S_max",
  )
  return report.table(
    f"seconds an iteration, {WORKERS} workers, {setting}: predicted",
    heads,
    lines,
    text=2,
  )


def lab_table(setting: hiding.Setting, rows: list[hiding.Measured]) -> rich.table.Table:
  """The rows of one rate."""
  link = f"α = {1e3 * setting.alpha:.2f} ms, β = {1e9 * setting.beta:.1f} ns/byte, γ = {setting.gamma:.2f}"
  runtime = f"two start-ups take {setting.start_ups:.2f} × one, {100 * setting.hidden:.0f} % of an all-reduce is hidden"
  model = f"{setting.tensors} tensors, {setting.bytes / 1e6:.2f} MB, forward {1e3 * setting.forward:.1f} ms, "
  title = f"{setting.rate}: {model}backward {1e3 * setting.backward:.1f} ms, {link}; {runtime}"
  times = {row.name: row.seconds for row in rows}
  exposed = lambda seconds: report.milliseconds(
    seconds and seconds - times[hiding.ALONE]
  )
  lines = []
  for row in rows:
    off = f"{100 * (row.predicted / row.seconds - 1):+.0f}" if row.predicted else "–"
    lines.append(
      [
        row.name,
        str(row.groups or "–"),
        *map(report.milliseconds, (row.seconds, row.predicted)),
        off,
      ]
    )
    lines[-1] += [exposed(row.seconds), exposed(row.predicted)]
    lines[-1] += [
      report.ratio(times.get(name), row.seconds)
      for name in ("wfbp, dense", hiding.DEFAULT)
    ]
  heads = [
    "plan, collective",
    "sent",
    "ms",
    "predicted",
    "± %",
    "exposed ms",
    "predicted",
    "wfbp / this",
  ]
  return report.table(title, [*heads, "xla default / this"], lines)


def contention_table(curve: Curve) -> rich.table.Table:
  """All-reduces of every size on one network."""
  title = f"{curve.name}, {curve.workers} workers: all-reduces of each size, α = {1e3 * curve.start_up:.2f} ms"
  percent = lambda share: "–" if share is None else f"{100 * share:.0f} %"
  lines = []
  for point in curve.points:
    ratios = f"{2 * point.one / point.two:.2f}", f"{curve.gamma(point):.2f}"
    shares = curve.share(point.size, point.one), curve.share(2 * point.size, point.two)
    times = f"{1e3 * point.one:.2f}", f"{1e3 * point.two:.2f}"
    lines.append([f"{point.size / 1024:,.0f}", *times, *ratios, *map(percent, shares)])
  heads = "kB", "one ms", "two at once ms", "2 × one / two", "γ", "link: one", "two"
  return report.table(title, heads, lines, text=0)
