"""The controller of rounds: when they begin, with whom and with which weights, and when they count."""

import time

import pytest

import jaxsparse as js
from jaxsparse.partial.net.messages import Rejected, RoundPosition
from jaxsparse.partial.rounds.quorum import Behind

START = RoundPosition()


@pytest.fixture
def quorum():
  """Three of five workers are there, two are enough."""
  found = js.partial.Quorum(5, quorum=2, first=9)
  for worker in (0, 1, 3):
    found.join(worker, START)
  return found


def ready(quorum, *workers):
  return [
    group for worker in workers for group in quorum.ready(worker, 1, quorum.position)
  ]


def test_a_round_begins_with_all_that_are_there_or_at_a_release_with_enough(quorum):
  assert ready(quorum, 0, 3) == []
  (group,) = ready(quorum, 1)
  assert (group.members, group.iteration, group.number) == ((0, 1, 3), 0, 10)
  assert quorum.failed(1, 10) == group
  assert ready(quorum, 3) == quorum.release() == []
  assert ready(quorum, 0) == []
  (group,) = quorum.release()
  assert (group.members, group.number) == ((0, 3), 11)


def test_an_event_costs_as_much_with_many_workers_as_with_few():
  """Of a round, in which each is ready and done once, and one pair has missed messages of each other."""

  def seconds_an_event(workers):
    quorum = js.partial.Quorum(workers, quorum=1, first=0)
    for worker in range(workers):
      quorum.join(worker, START)
    ready(quorum, *range(workers))
    for worker in range(workers - 1):
      quorum.failed(worker, 1, missing=workers - 1)
    quorum.leave(workers - 1, 0)
    begin = time.thread_time()
    ready(quorum, *range(workers - 1))
    verdicts = [quorum.done(worker, 2, digest=1) for worker in range(workers - 1)]
    assert verdicts[-1]
    return (time.thread_time() - begin) / workers

  few, many = (
    min(seconds_an_event(workers) for _ in range(3)) for workers in (200, 4000)
  )
  # in proportion to the number of workers it would be 20 times as much
  assert many < 4 * few


def test_a_round_does_not_wait_for_a_new_worker_that_has_never_been_ready(quorum):
  """But for the first one, in which all are new."""
  ready(quorum, 0, 1, 3)
  for worker in (0, 1, 3):
    quorum.done(worker, 10, digest=5)
  quorum.join(2, START)
  (group,) = ready(quorum, 0, 1, 3)
  assert group.members == (0, 1, 3)
  ready(quorum, 2)
  for worker in (0, 1, 3):
    quorum.done(worker, 11, digest=5)
  assert ready(quorum, 0, 1, 3) == []  # it is known now
  (group,) = ready(quorum, 2)
  assert group.members == (0, 1, 2, 3)


def test_weights_are_of_all_that_are_there_and_not_new(quorum):
  """A worker that is late delivers with the same weight, so that its steps count as much as others."""
  quorum.ready(0, 30, START)
  quorum.ready(1, 0, START)
  (group,) = quorum.ready(3, 10, START)
  assert group.weights == (0.75, 0.0, 0.25)
  quorum.failed(0, group.number)
  for worker in (0, 1, 3):
    groups = quorum.ready(worker, 0, START)
  assert groups[0].weights == (1 / 3, 1 / 3, 1 / 3)
  for worker in (0, 1, 3):
    quorum.done(worker, groups[0].number, digest=5)
  for worker in (0, 1):
    quorum.ready(worker, 1, quorum.position)
  assert quorum.release()[0].weights == (0.5, 0.5)  # what 3 trains weighs nothing
  quorum.failed(0, groups[0].number + 1)
  quorum.ready(0, 2, quorum.position)
  quorum.ready(3, 5, quorum.position)
  assert quorum.release()[0].weights == (0.25, 0.625)  # 1 is late
  quorum.leave(1, weight=4)
  quorum.failed(0, groups[0].number + 2)
  quorum.ready(0, 2, quorum.position)
  (group,) = quorum.ready(3, 2, quorum.position)
  assert group.weights == (0.5, 0.5)


def test_a_result_counts_when_all_members_have_it(quorum):
  (group,) = ready(quorum, 0, 1, 3)
  assert quorum.done(0, 10, digest=5) is quorum.done(3, 10, digest=6) is None
  assert quorum.position == START
  verdict = quorum.done(1, 10, digest=5)
  assert (verdict.group, verdict.digest, verdict.differing) == (group, 5, (3,))
  assert quorum.position == RoundPosition(1, 10)
  with pytest.raises(Behind):
    quorum.ready(0, 1, START)


def test_a_member_that_is_lost_or_joins_again_ends_its_round_for_all(quorum):
  (group,) = ready(quorum, 0, 1, 3)
  quorum.done(0, 10, digest=5)
  assert quorum.leave(3, weight=7) == (group, [])
  assert quorum.done(1, 10, digest=5) is None
  assert (quorum.position, quorum.lost, quorum.lost_weight) == (START, 1, 7)
  (group,) = ready(quorum, 0, 1)
  assert quorum.join(1, START) == group


def test_the_last_that_all_wait_for_leaves(quorum):
  ready(quorum, 0, 1)
  (group,) = quorum.leave(3)[1]
  assert group.members == (0, 1)


def test_workers_that_are_ready_while_a_round_is_under_way_are_behind_when_it_counts(
  quorum,
):
  ready(quorum, 0, 1)
  quorum.release()
  ready(quorum, 3)
  quorum.done(0, 10, digest=5)
  assert quorum.done(1, 10, digest=5).behind == (3,)
  assert quorum.waiting == ()


def begin(quorum, *workers):
  (group,) = ready(quorum, *workers) or quorum.release()
  return group


def count(quorum, group):
  for worker in group.members:
    quorum.done(worker, group.number, digest=5)


def test_two_that_miss_messages_of_each_other_take_turns_for_2_rounds_then_for_4_until_they_succeed(
  quorum,
):
  for turns in (2, 4):
    group = begin(quorum, 0, 1, 3)
    assert group.members == (0, 1, 3)
    quorum.failed(1, group.number, missing=3)
    quorum.failed(3, group.number, missing=1)  # the same failure
    quorum.failed(0, group.number)
    assert quorum.pairs.are_apart(3, 1)
    quorum.ready(0, 1, quorum.position)
    found = []
    while len(found) < turns:
      waiting = quorum.waiting
      group = begin(quorum, *[worker for worker in (0, 1, 3) if worker not in waiting])
      found.append(group.members)
      assert len(quorum.waiting) == 1
      count(quorum, group)
    assert found == [(0, 1), (0, 3)] * (turns // 2)
  group = begin(quorum, 0, 1, 3)
  count(quorum, group)
  assert not quorum.pairs.are_apart(3, 1)
  assert begin(quorum, 0, 1, 3).members == (0, 1, 3)


def test_one_that_misses_messages_of_many_is_left_out_and_nobody_if_the_others_are_too_few(
  quorum,
):
  group = begin(quorum, 0, 1, 3)
  assert quorum.failed(0, group.number, missing=3) == group
  assert (
    quorum.failed(1, group.number, missing=3)
    is quorum.failed(1, group.number, missing=4)
    is None
  )
  assert begin(quorum, 0, 1, 3).members == (0, 1)
  quorum.failed(0, group.number + 1)
  quorum.leave(1)
  assert begin(quorum, 0).members == (0, 3)  # else there would be no round at all
  quorum.leave(3)
  quorum.join(3, START)
  assert not quorum.pairs.are_apart(0, 3)


def test_a_new_controller_learns_where_rounds_are_from_the_most_trained_worker():
  quorum = js.partial.Quorum(3, quorum=2)
  quorum.join(0, START)
  ready(quorum, 0)
  quorum.join(1, RoundPosition(4, 44, last=45))
  assert (quorum.position, quorum.waiting) == (RoundPosition(4, 44), ())
  quorum.join(2, RoundPosition(3, 33))
  assert quorum.position == RoundPosition(4, 44)


def test_it_is_over_when_the_last_worker_has_left_in_good_order(quorum):
  for worker in (0, 1):
    quorum.leave(worker)
  quorum.leave(3, weight=1)
  assert not quorum.over  # all were lost, some may be started again
  quorum.join(3, START)
  quorum.leave(3)
  assert quorum.over


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda quorum: quorum.join(5, START), "unknown: worker 5, there are 0 … 4"),
    (lambda quorum: quorum.ready(2, 1, START), "absent: worker 2"),
    (lambda quorum: quorum.ready(0, -1, START), "weight -1 of worker 0 must be >= 0"),
    (lambda quorum: ready(quorum, 0, 0), "duplicate: worker 0 is ready already"),
    (lambda quorum: quorum.done(2, 10, 1), "absent: worker 2"),
  ],
)
def test_what_is_rejected(quorum, call, message):
  with pytest.raises(Rejected, match=message):
    call(quorum)


@pytest.mark.parametrize(
  "options",
  [
    *({"quorum": 0}, {"quorum": 4}, {"quorum": True}),
    *({"quorum": 2, "grace": grace} for grace in (-1, 1e10, float("inf"), "never")),
  ],
)
def test_bad_options(options):
  with pytest.raises(ValueError, match="quorum=|grace="):
    js.partial.Quorum(3, **options)
