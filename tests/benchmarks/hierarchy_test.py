"""Sparse between hosts: the three ways train the same model."""

import json
import os
import shutil

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from benchmarks import hierarchy
from tests.benchmarks import commands


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of flax
def test_each_way_trains():
  """In one process, which has no network: the way of many hosts is that of the lab."""
  mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), hierarchy.AXES, axis_types=(AxisType.Auto,) * 2)
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    rows = [hierarchy.measured(way, mesh, "none", 16, 1, 1, 0.1, steps=4) for way in hierarchy.WAYS]
  assert [row.way for row in rows] == list(hierarchy.WAYS)
  assert all(row.seconds > 0 for row in rows)
  dense, *sparse = (row.loss for row in rows)
  np.testing.assert_allclose(sparse, dense, rtol=0.1)


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("tc") is None, reason="needs root and iproute2")
def test_in_the_lab_between_sends_at_most_half_of_flat():
  flags = "--rate=100mbit", "--way=flat,between", "--width=128", "--blocks=1", "--steps=4", "--json"
  done = commands.run("benchmarks.hierarchy", *flags)
  assert done.returncode == 0, done.stderr[-2000:]
  flat, between = json.loads(done.stdout)
  assert between["bytes"] <= 0.55 * flat["bytes"]  # headers of packets and of gloo included
