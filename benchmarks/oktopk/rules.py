"""Ok-Topk in numpy, from its paper, with and without the capacities of this library's messages, and ours."""

import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxsparse as js

LIMITS = {"paper": (False, False), "of a worker": (True, False)}
LIMITS |= {"of a region": (False, True), "capacities": (True, True)}
OURS = "none", "fixed", "search"
_THRESHOLD_PERIOD, _REGION_PERIOD = 32, 64  # τ′ and τ of the paper

Counts = tuple[np.ndarray, int]  # selected by each worker, and delivered
Reduce = Callable[[np.ndarray], tuple[np.ndarray, Counts]]


class Rule:
  """Ok-Topk from its paper, in numpy: the total of a step, and what was selected and delivered."""

  def __init__(self, workers: int, n: int, k: int, of_worker: bool, of_region: bool):
    self._workers, self._k, self._step = workers, k, 0
    self._of_worker, self._of_region = of_worker, of_region
    self.accumulated = np.zeros((workers, n), np.float32)
    self._residual = np.zeros((workers, n), np.float32)
    self._local, self._global = np.zeros(workers, np.float32), np.float32(0)
    self._bounds = np.zeros(workers + 1, int)

  def __call__(self, grads: np.ndarray) -> tuple[np.ndarray, Counts]:
    """One step with f32[P, n]."""
    acc = self.accumulated = grads + self._residual
    is_exact = self._step % _THRESHOLD_PERIOD == 0
    if is_exact:
      self._local = np.partition(np.abs(acc), -self._k, axis=1)[:, -self._k]
    reach = (np.abs(acc) >= self._local[:, None]) & (acc != 0)
    sent = reach.copy()
    if self._of_worker:
      for row, own in zip(acc, sent, strict=True):
        keep(row, own, 2 * self._k)
    if self._step % _REGION_PERIOD == 0:
      self._bounds = self._balanced(sent)
    if self._of_region:
      self._limit_regions(acc, sent)
    sums = np.where(sent, acc, np.float32(0)).sum(0)
    if is_exact:
      self._global = np.sort(np.abs(sums))[-self._k]
    out = (np.abs(sums) >= self._global) & (sums != 0)
    self._residual = np.where(sent & out, np.float32(0), acc)
    self._step += 1
    return np.where(out, sums, np.float32(0)), (reach.sum(1), int(out.sum()))

  def _balanced(self, sent: np.ndarray) -> np.ndarray:
    """Mean over workers of the boundaries of regions with equally many selected entries."""
    places = [np.flatnonzero(own) for own in sent]
    parts = range(1, self._workers)
    each = [[one[part * len(one) // self._workers] for part in parts] for one in places]
    inner = np.sum(each, 0) // self._workers
    return np.array([0, *inner, sent.shape[1]])

  def _limit_regions(self, acc: np.ndarray, sent: np.ndarray) -> None:
    even = -(-self._k // self._workers)
    for row, own in zip(acc, sent, strict=True):
      for start, end in itertools.pairwise(self._bounds):
        keep(row[start:end], own[start:end], even + even // 2)


def keep(values: np.ndarray, chosen: np.ndarray, most: int) -> None:
  """Leaves the largest of the chosen entries, at most so many."""
  places = np.flatnonzero(chosen)
  order = np.argsort(-np.abs(values[places]), kind="stable")
  chosen[places[order[most:]]] = False


def library(workers: int, k: int, nudge: str) -> Reduce:
  """The library's Ok-Topk as such a function."""
  state: Any = None

  def reduce(grads: np.ndarray) -> tuple[np.ndarray, Counts]:
    nonlocal state
    done = js.simulate("oktopk", jnp.asarray(grads), state=state, k=k, nudge=nudge)
    state = done.state
    selected = np.full(workers, float(done.metrics.selected))
    return np.asarray(done.total), (selected, int(done.metrics.delivered))

  return reduce


def rule_of(name: str, workers: int, n: int, k: int) -> Reduce:
  """The rule of that name."""
  if name in LIMITS:
    return Rule(workers, n, k, *LIMITS[name])
  return library(workers, k, name)
