"""Rounds of many workers: virtual time, the model of an exchange, and a real server with workers that come and go."""

import logging
import math

import pytest

from benchmarks.thousands import levels, load, report, simulation, state, windows
from benchmarks.thousands.members import Exchange, Link, Setting
from benchmarks.thousands.simulation import Simulation
from benchmarks.thousands.timeline import Timeline
from jaxsparse.partial.net.messages import WorkerGroup
from tests.benchmarks.commands import result_of

CALM = Setting(8, 0, 300, entries=1000, straggle=0, jitter=0, grace=0.5)


def test_a_channel_keeps_the_order_of_its_messages_and_a_suspended_receiver_gets_none():
  class Line(Timeline):
    suspended, held = False, []

    def delay(self, channel, size):
      return size

  line, found = Line(), []
  line.post("a", line, found.append, "late", size=2)
  line.post("a", line, found.append, "after it", size=1)
  line.post("b", line, found.append, "other", size=1)
  line.advance(1.5)
  assert found == ["other"]
  line.suspended = True
  line.advance(1.0)
  assert found == ["other"]
  assert [content for _, content in line.held] == [("late",), ("after it",)]


def test_without_failures_all_that_is_trained_is_delivered_in_rounds_of_all():
  found = simulation.simulate(CALM)
  assert found.goodput == pytest.approx(1, abs=1e-3)
  assert (found.failed, found.members, found.lost, found.behind) == (0, 1, 0, 0)
  assert found.round == pytest.approx(CALM.interval, rel=0.02)
  beats = 8 * (1 + 2)  # a second: one of a worker, two of the server
  assert found.messages_in + found.messages_out == pytest.approx(beats, rel=0.15)


def test_a_lost_worker_costs_what_it_has_not_delivered_and_the_time_until_it_is_back():
  network = Simulation(CALM._replace(interval=20.0))
  network.run(110)
  undelivered = network.working[3].undelivered
  network.fail(network.working[3])
  assert 0 < undelivered == network.lost
  network.run(2 * CALM.restart)
  assert network.working[3].lives
  last = [*network.counted.values()][-1]
  assert last == 8
  absent = (CALM.restart + undelivered) / (8 * (network.ended[-1] - network.ended[0]))
  assert network.result().goodput == pytest.approx(1 - absent, abs=0.015)


@pytest.mark.parametrize("failures", [0.0, 2.0])
def test_what_groups_train_reaches_all_groups(failures):
  found = levels.simulate(
    CALM._replace(workers=16, failures=failures, interval=20.0, seconds=1500, seed=1)
  )
  assert found.group == found.outer["workers"] == 4
  # a worker that fails is away, and has not delivered an interval
  least = 1 - failures * (CALM.restart + 20) / 3600
  assert found.inner == pytest.approx(least, abs=0.015 + 0.02 * failures)
  assert found.outer["goodput"] / found.group == pytest.approx(
    found.goodput, abs=0.02 + 0.02 * failures
  )
  # until its link is started again, after an interval among groups of 40 s
  back = CALM.restart + 20
  assert found.goodput == pytest.approx(
    found.inner - failures * back / 3600, abs=1e-9 + 0.015 * failures
  )
  assert found.inner_counted > 4 * 50


def test_the_slowest_link_and_the_number_of_messages_make_an_exchange():
  group = WorkerGroup(tuple(range(8)), (1 / 8,) * 8, 0)
  links = [Link(0.01, 1e6), Link(0.1, 1e6), Link(0.01, 1e5), *[Link(0.01, 1e6)] * 5]
  # Of all-gather and reduce-scatter in log₂P stages each; and where all are sent to at
  # once, then log₂P stages.
  for name, messages, words, stages in (("dense", 6, 7000, 6), ("onebit", 10, None, 4)):
    network = Simulation(CALM._replace(collective=name, entries=4000))
    network.links = links
    cost = network.cost(8)
    assert cost.messages == messages
    assert words in (None, cost.words)
    found = Exchange(network, group).seconds
    assert found == pytest.approx(
      stages * 2 * 0.1 + messages * 50e-6 + 4 * cost.words / 1e5
    )


def test_memory_and_the_message_that_begins_a_round_grow_with_the_number_of_workers_and_no_faster():
  few, many = (state.measure(workers) for workers in (50, 800))
  assert many.memory < 16 * 1.2 * few.memory
  assert many.first < 16 * 1.2 * few.first
  assert many.later < 1.2 * few.later


def test_lockstep_is_daly():
  """Of rare failures the best interval is √(2 c / Λ): half of what is lost are checkpoints, half steps done again."""
  setting = Setting(100, 0.01, 0, restart=0, together=0)
  assert simulation.lockstep(setting) == pytest.approx(
    1 - math.sqrt(2 * 100 * 0.01 / 3600), abs=1e-3
  )
  assert simulation.lockstep(setting._replace(failures=1000)) < 0.01
  assert simulation.lockstep(setting._replace(failures=0)) == 1


@pytest.mark.long
def test_a_server_keeps_nothing_of_workers_that_came_and_went():
  logging.disable(logging.WARNING)
  try:
    found = load.measure(12, 5, 3.0, interval=0.4, seed=0)
  finally:
    logging.disable(logging.NOTSET)
  assert found.rounds > 1
  assert found.joined > 0 < found.left + found.killed
  before, full, after = found.files
  assert full >= before + 12
  assert after < full


@pytest.mark.long
def test_the_command(tmp_path):
  small = (
    "--workers=9",
    "--seconds=300",
    "--n=1000",
    "--processes=2",
    "--rounds=2",
    "--joining=6",
    "--members=4",
    "--seeds=1",
  )
  found = result_of("thousands", *small, "--churn=10", f"--report_dir={tmp_path}")
  assert set(found) == {
    "simulated",
    "windows",
    "state",
    "levels",
    "server",
    "processes",
  }
  assert found["processes"][0]["equal"]
  assert found["simulated"][0]["lockstep"] < found["simulated"][0]["goodput"] <= 1.02
  assert len(found["windows"]) == 2 * len(windows.SCENARIOS)
  for part, rows in found.items():
    assert report.make(part, rows).row_count == len(rows)
