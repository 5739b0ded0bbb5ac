"""Seconds of a program of all workers."""

import jax.numpy as jnp
import numpy as np

from jaxsparse.comm import SimComm
from jaxsparse.train.engine import engine_of
from jaxsparse.train.timing import Stopwatch


def test_workers_wait_for_each_other_before_and_after_a_program(monkeypatch):
  """So the seconds of the slowest worker do not contain its wait for others to start."""
  watch = Stopwatch(engine_of(SimComm("workers", members=2), "workers"))
  order = []

  def gather(value):
    order.append("gather")
    return np.array([value, 7.0])

  def program(x):
    order.append("program")
    return x + 1

  monkeypatch.setattr(watch, "gather", gather)
  assert watch.time(program, jnp.int32(1)) == (7.0, 2)
  assert order == ["gather", "program", "gather"]
