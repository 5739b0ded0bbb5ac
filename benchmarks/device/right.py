"""Are results right? Those of each collective beside those of this machine's CPU; top-k beside a stable sort."""

import concurrent.futures
import functools
import multiprocessing
import os
import threading
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxsparse as js
from benchmarks import report, specs
from benchmarks.device import speed
from benchmarks.device.running import PARALLEL, Row, Run, make_ahead
from benchmarks.device.setting import Setting
from jaxsparse.train import simulation

PART = "right"
_STEPS = 3
_PATIENCE = 30.0  # seconds to wait for the CPU at least, once a row has begun
_FURTHEST = 0.01  # relative distance of results that may differ by rounding
ROUNDED = (
  "a2sgd",
  "dcttopk",
  "gaussiank",
  "nbit",
  "oktopk",
  "onebit",
  "powersgd",
  "qsgd",
)
"""Collectives whose totals or thresholds are quotients, roots or sums of products: each compiler rounds and fuses them
in its own way. Those of all others are entries and sums in a fixed order, which have the same bits everywhere."""

INPUTS = {
  "normal": lambda random, n: random.standard_normal(n, np.float32),
  "ties": lambda random, n: np.round(
    random.standard_normal(n, np.float32)
  ),  # whole numbers
}
_FEW = 1 << 11  # entries, of which XLA for GPUs selects up to 16 without sorting


class Trajectory(NamedTuple):
  """Some steps of all workers, on one device."""

  totals: np.ndarray  # f32[steps, P, n]
  residuals: np.ndarray | None  # f32[P, n] after the last step
  # words of the last step, of the worker that sent most, over those of the formula
  fill: float


def simulate(label: str, n: int, workers: int, density: float) -> Trajectory:
  """Steps of a collective on gradients of standard normal numbers, on the default device."""
  (spec,) = specs.parse([label], workers, density=density)
  collective = spec.sized(n)
  state = simulation.initial(collective, workers, n)
  totals = []
  for step in range(_STEPS):
    grads = np.random.default_rng(step).standard_normal((workers, n), np.float32)
    total, state = simulation.reduce_all(collective, jax.numpy.asarray(grads), state)
    totals.append(np.asarray(total))
  residual = state.carried.residual[0]
  sent = int(np.max(state.counters.words_sent))
  fill = sent / max(1, collective.cost(n, workers).words)
  return Trajectory(
    np.stack(totals), None if residual is None else np.asarray(residual), fill
  )


_simulated = functools.cache(simulate)


class Reference:
  """`simulate` on the CPU, in processes beside this one that begin at once."""

  def __init__(self, labels: Sequence[str], *arguments: Any):
    self._arguments = arguments
    self._begin(PARALLEL, labels)

  def _begin(self, processes: int, labels: Sequence[str]) -> None:
    spawn = multiprocessing.get_context("spawn")
    self._pool = concurrent.futures.ProcessPoolExecutor(processes, spawn, _use_cpu)
    self._futures = {
      label: self._pool.submit(simulate, label, *self._arguments) for label in labels
    }

  def of(self, label: str, seconds: float) -> Trajectory:
    """The result of a label, waiting for it as long as this.

    Where a process died, of a compiler that crashes for instance, the results of all
    are lost, and each label has a process of its own.

    Raises:
      BrokenProcessPool: if that died, too.
      TimeoutError: if the result is not there in time.
    """
    try:
      return self._futures[label].result(seconds)
    except (BrokenProcessPool, KeyError):
      self._begin(1, [label])
      return self._futures[label].result(seconds)

  def stop(self) -> None:
    """Ends the processes, whether they have finished or not."""
    self._pool.shutdown(wait=False, cancel_futures=True)
    for child in multiprocessing.active_children():
      child.kill()


def _use_cpu() -> None:
  """Prepares a process: it uses the CPU, and ends with the one that started it, however that ends."""
  jax.config.update("jax_platforms", "cpu")
  threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
  parent = multiprocessing.parent_process()
  assert parent is not None
  parent.join()
  os._exit(1)


def differences(found: Trajectory, expected: Trajectory) -> Row:
  """How far totals and residuals are from the expected ones.

  Returns:
    `differ`, the number of entries with other bits; `largest`, the largest difference
    over the largest magnitude; and `distance`, ‖found − expected‖ / ‖expected‖.
  """
  pairs = [(found.totals, expected.totals)]
  if found.residuals is not None and expected.residuals is not None:
    pairs.append((found.residuals, expected.residuals))
  here, there = (
    np.concatenate([np.ravel(x) for x in column]) for column in zip(*pairs, strict=True)
  )
  apart = here.astype(np.float64) - there
  return {
    "differ": int((here.view(np.uint32) != there.view(np.uint32)).sum()),
    "entries": here.size,
    "largest": float(np.abs(apart).max() / np.abs(there).max()),
    "distance": float(np.linalg.norm(apart) / np.linalg.norm(there.astype(np.float64))),
  }


def compare(
  label: str,
  arguments: tuple[int, int, float],
  reference: Reference | None,
  seconds: float,
) -> Row:
  """A collective on the default device beside the reference; without one, on a CPU, beside a second run."""
  found = _simulated(label, *arguments)
  expected = reference.of(label, seconds) if reference else simulate(label, *arguments)
  is_rounded = label.partition(":")[0] in ROUNDED or "int8" in label or "2bit" in label
  return {
    "same_bits_promised": not is_rounded,
    **differences(found, expected),
    "fill": found.fill,
  }


def select(kind: str, setting: Setting) -> Row:
  """`js.select.top_k` of one input of the smallest size beside a stable sort of the magnitudes by numpy."""
  n = min(setting.sizes)
  x = INPUTS[kind](np.random.default_rng(0), n)
  chosen, _ = jax.device_get(
    speed.programs(setting, n)["js.select.top_k"]().compiled(x, ())
  )
  expected = np.sort(np.argsort(-np.abs(x), kind="stable")[: chosen.indices.size])
  differ = (chosen.indices != expected) | (
    chosen.values.view(np.uint32) != x[expected].view(np.uint32)
  )
  return {"n": n, "k": expected.size, "differ": int(differ.sum())}


def select_few() -> Row:
  """Selects, from few entries, the largest and those that are not finite."""
  x = INPUTS["ties"](np.random.default_rng(0), _FEW)
  x[[700, 5, 900, 3]] = np.nan, -np.nan, -np.inf, np.inf
  found = np.asarray(jax.jit(functools.partial(js.select.top_k, k=7))(x).indices)
  magnitudes = np.where(
    np.isnan(x), np.inf, np.minimum(np.abs(x), np.finfo(np.float32).max)
  )
  expected = np.sort(np.argsort(-magnitudes, kind="stable")[: found.size])
  return {"n": x.size, "k": expected.size, "differ": int((found != expected).sum())}


def measure(run: Run, setting: Setting, until: float) -> None:
  """The rows of this part."""
  labels = [label for label in setting.algorithms if "dtype" not in label]
  arguments = setting.compared, setting.simulated, setting.density
  reference = None if jax.default_backend() == "cpu" else Reference(labels, *arguments)
  try:
    for kind in INPUTS:
      run.measure(
        PART, f"selection, {kind}", until, functools.partial(select, kind, setting)
      )
    run.measure(PART, "selection, not finite", until, select_few)
    make_ahead(
      [functools.partial(_simulated, label, *arguments) for label in labels],
      run.left(until) / 2,
    )
    for label in labels:
      seconds = max(_PATIENCE, run.left(until))
      run.measure(
        PART,
        label,
        until,
        functools.partial(compare, label, arguments, reference, seconds),
      )
  finally:
    if reference:
      reference.stop()


def goals(rows: Sequence[Row]) -> list[report.Goal]:
  """What must hold of the rows that were measured."""
  found = []
  for row in rows:
    if row.get("same_bits_promised", True):
      found.append(
        report.goal(f"{row['row']}: entries with other bits = 0", row["differ"], most=0)
      )
    else:
      distance = float("nan") if row["distance"] is None else row["distance"]
      found.append(
        report.goal(
          f"{row['row']}: relative distance ≤ {_FURTHEST}", distance, most=_FURTHEST
        )
      )
  return found
