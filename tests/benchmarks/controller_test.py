"""The controller's server, timed as a user does."""

import functools
import json

import pytest

from tests.benchmarks import commands

run = functools.partial(commands.run, "benchmarks.controller")


def test_throughput_and_latency():
  done = run("--workers=5", "--group_size=3", "--seconds=0.3", "--groups=20", "--curve", "--json")
  assert done.returncode == 0, done.stderr[-2000:]
  result = json.loads(done.stdout)
  assert result["signals_per_second"] > 50
  assert result["groups_per_second"] * 3 == pytest.approx(result["signals_per_second"])
  assert 0 < result["latency"] <= result["latency_99"]
  assert (result["rejected"], result["signal_bytes"]) == (0, 11)
  assert "goal: at least 2,000 signals a second: " in done.stderr
