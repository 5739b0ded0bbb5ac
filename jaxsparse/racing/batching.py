"""Batches of all workers by the step: from a function, or from an iterable that begins again."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.types import ArrayTree

Batches: TypeAlias = Callable[[int], ArrayTree] | Iterable[ArrayTree]


def check_batches(batches: Batches, seeds: int) -> None:
  """Raises ValueError for an iterator, which cannot begin again, and for fewer batches than seeds, or none."""
  if callable(batches):
    return
  # An iterator is its own `iter`, and empty after one pass.
  if not isinstance(batches, Iterable) or iter(batches) is batches:
    raise ValueError(
      f"race: batches={batches!r} cannot begin again: give a list, a loader, or a function of the step"
    )
  if next(iter(batches), None) is None:
    raise ValueError(f"race: batches={batches!r} has no batch")
  # Seeds would train on equal batches, and tell nothing of noise.
  if isinstance(batches, Sized) and len(batches) < seeds:
    raise ValueError(
      f"race: batches has {len(batches)} for seeds={seeds}: give one at least for each seed, or a function of the step"
    )


def batches_of(batches: Batches, seed: int, seeds: int, most: int) -> Iterator:
  """The endless batches of a seed, 0 … seeds − 1, whose training takes at most `most` steps.

  A function is called with `seed · most`, `seed · most + 1`, and so on. An iterable
  begins anew whenever it ends, and its batches with fewer rows than the first one are
  left out. If it has a length, seeds start evenly spaced over it, else `most` batches
  apart.
  """
  if callable(batches):
    return map(batches, itertools.count(seed * most))
  # batches from the first one of a seed to the first one of the next seed
  size = len(batches) // seeds if isinstance(batches, Sized) else most
  return itertools.islice(_repeat(batches), seed * size, None)


def _repeat(batches: Iterable) -> Iterator:
  """The batches again and again, without those that have fewer rows than the first one."""
  most = 0
  while True:
    is_empty = True
    for batch in batches:
      rows = len(jax.tree.leaves(batch)[0])
      most = most or rows
      if rows >= most:
        is_empty = False
        yield batch
    if is_empty:
      raise ValueError(
        f"race: batches={batches!r} has no batch of {most} rows when it begins again: give a list, a loader, or a "
        "function of the step"
      )


def stack(batches: Iterator, steps: int, length: int) -> ArrayTree:
  """The next `steps` batches, stacked to leaves [length, …]; the last one is repeated if `steps` < `length`."""
  # Numpy batches stay in the memory of the host.
  stack_rows = lambda *rows: (
    jnp.stack(rows) if isinstance(rows[0], jax.Array) else np.stack(rows)
  )
  rows = list(itertools.islice(batches, steps))
  # The program takes `length` batches, and does not train on the repeated one.
  repeated = rows[-1:] * (length - steps)
  return jax.tree.map(stack_rows, *rows, *repeated)


def join(stacked: ArrayTree, workers: int) -> ArrayTree:
  """Batches [steps, P · rows, …] as one batch, [P · steps · rows, …], where each worker has its rows of all steps."""

  def join_leaf(x: np.ndarray) -> np.ndarray:
    # The first axis of a batch is split over the workers: the rows of one worker of all
    # steps have to stand together.
    rows = x.reshape(len(x), workers, -1, *x.shape[2:])
    return rows.swapaxes(0, 1).reshape(-1, *x.shape[2:])

  return jax.tree.map(join_leaf, stacked)
