"""What is it worth? A profile of `js.costs` from what was measured, and its advice for hosts of eight such devices."""

import functools
import pathlib
from collections.abc import Sequence

import jax
import rich.table

import jaxsparse as js
from benchmarks import report
from benchmarks.device import right, speed, step
from benchmarks.device.running import Row, Run
from benchmarks.device.setting import BACKWARD, Setting
from jaxsparse.costs import counting
from jaxsparse.costs.calibration import Algorithm

PART = "worth"
HOSTS, DEVICES = 2, 8  # workers, and devices of each
LINKS = {10: 30e-6, 25: 30e-6, 100: 5e-6, 400: 5e-6}
"""Gbit/s of a host: seconds of a message. Assumed, not measured: those of TCP, and of RDMA from 100 Gbit/s on."""


def profile_of(run: Run, setting: Setting) -> js.costs.Profile:
  """The profile of the updates of the smallest size, without a link.

  The arithmetic is that of one of `setting.workers` workers, an upper bound for fewer
  of them. How far messages are filled is from the simulated steps.

  Raises:
    RuntimeError: if no update was timed.
  """
  n = min(setting.sizes)
  times = {
    row["row"]: row["queued"] for row in run.measured(speed.PART) if row["n"] == n
  }
  fills = {row["row"]: row["fill"] for row in run.measured(right.PART) if "fill" in row}
  found = dict[str, Algorithm]()
  for spec in setting.parse_algorithms():
    collective = spec.sized(n)
    if spec.label in times and collective.traits.replicates:
      jaxpr = counting.schedule(collective, n, HOSTS)
      reduces = counting.uses_all_reduce(jaxpr, HOSTS)
      fill = (
        min(1.0, fills.get(spec.label, 1.0)) if collective.traits.sizes_vary else 1.0
      )
      label = js.costs.label_of(spec.name, spec.config)
      found[label] = Algorithm(times[spec.label] / n, fill, reduces)
  if not found:
    raise RuntimeError(f"no update of {n:,} entries was timed")
  return js.costs.Profile(HOSTS, 0.0, 0.0, entries=n, algorithms=found, devices=DEVICES)


def over(profile: js.costs.Profile, gigabits: float, alpha: float) -> js.costs.Profile:
  """The profile over links of hosts that all devices of a host share; the all-reduce is taken to use all of them."""
  return profile.over(
    js.overlap.Link(alpha, beta=8 * DEVICES / (gigabits * 1e9), gamma=1.0)
  )


def advise(
  profile: js.costs.Profile, gigabits: int, setting: Setting, compute: float | None
) -> Row:
  """The advice for training the transformer, whose parameters the devices of a host share, over one kind of link."""
  linked = over(profile, gigabits, LINKS[gigabits])
  params = jax.eval_shape(setting.model.parameters)
  advice = js.costs.advise(params, linked)
  found: Row = {"gigabits": gigabits, "alpha": linked.alpha, "why": advice.why}
  found["predictions"] = [
    {
      "label": one.label,
      "seconds": one.seconds,
      "arithmetic": one.arithmetic,
      "wire": one.wire,
      "words": one.words,
    }
    for one in advice.predictions
  ]
  evidence = [
    row for row in js.costs.evidence("adam") if row.collective in profile.algorithms
  ]
  if evidence and compute is not None:
    found["to_loss"] = js.costs.advise(
      params, linked, evidence=evidence, compute=compute
    ).why
  return found


def measure(run: Run, setting: Setting, until: float, path: pathlib.Path) -> None:
  """The rows of this part; the profile goes to `path`."""
  made = list[js.costs.Profile]()

  def make() -> Row:
    made.append(profile_of(run, setting))
    made[0].save(path)
    return {"file": path.name, "algorithms": len(made[0].algorithms)}

  run.measure(PART, "profile", until, make)
  compute = next(
    (row["queued"] for row in run.measured(step.PART) if row["row"] == BACKWARD.label),
    None,
  )
  for gigabits in LINKS if made else ():
    name = f"{HOSTS} x {DEVICES}, {gigabits} Gbit/s"
    run.measure(
      PART, name, until, functools.partial(advise, made[0], gigabits, setting, compute)
    )


def table(rows: Sequence[Row]) -> rich.table.Table:
  """Predicted milliseconds of an update, by algorithm and link."""
  seconds = [
    {one["label"]: one["seconds"] for one in row["predictions"]} for row in rows
  ]
  cells = [
    [label, *(report.milliseconds(of_link[label], 2) for of_link in seconds)]
    for label in sorted(seconds[0])
  ]
  heads = ["algorithm", *(f"{row['gigabits']} Gbit/s" for row in rows)]
  return report.table(
    f"predicted ms an update, {HOSTS} hosts of {DEVICES} devices", heads, cells
  )


def lines(rows: Sequence[Row]) -> list[str]:
  """The advice for each link in words, by seconds of a step and by steps to a loss."""
  return [
    f"{row['row']}: {row[key]}"
    for row in rows
    for key in ("why", "to_loss")
    if key in row
  ]
