"""The laws of the controller, whatever comes in which order, against a model with scipy and brute force."""

import copy
import fractions
import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import stateful
from hypothesis import strategies as st
from scipy.sparse import csgraph

import jaxsparse as js
from jaxsparse.partial.weights import dynamic


def components(workers, groups):
  """How many parts the sync-graph has."""
  position = {worker: number for number, worker in enumerate(workers)}
  edges = np.zeros((len(position), len(position)))
  for group in groups:
    for one, other in itertools.pairwise([position[member] for member in group if member in position]):
      edges[one, other] = 1
  return csgraph.connected_components(edges, directed=False)[0]


def keeps_windows(workers, groups, window, size):
  """Whether any `window` groups can still connect all, each later group joining at most `size` parts."""
  return all(
    components(workers, groups[len(groups) - last :]) <= 1 + (window - last) * (size - 1)
    for last in range(min(window, len(groups)) + 1)
  )


class Machine(stateful.RuleBasedStateMachine):
  """Signals, failures, deaths and returns in any order; the model knows who waits, since when, and all groups."""

  @stateful.initialize(data=st.data(), workers=st.integers(2, 6))
  def begin(self, data, workers):
    size = data.draw(st.integers(2, workers))
    least = -(-(workers - 1) // (size - 1))
    history = data.draw(st.none() | st.integers(least, least + 3))
    kind = data.draw(st.sampled_from(["constant", "dynamic"]))
    missing = data.draw(st.sampled_from(["closest", "initial"]))
    decay = data.draw(st.sampled_from([0.0, 0.5, 0.99]))
    self.controller = js.partial.Controller(workers, size, kind, decay=decay, missing=missing, history=history)
    self.workers, self.group_size, self.kind, self.missing = workers, size, kind, missing
    self.alive, self.queue, self.last, self.in_group = set(range(workers)), [], {}, {}
    self.since_change, self.number, self.waited = [], 0, {}
    self.for_all = set()

  @property
  def active(self):
    return self.alive - self.for_all

  def take(self, groups):
    """Checks what the controller formed, and follows it."""
    for group in groups:
      self.number += 1
      assert group.number == self.number
      if not self.active:  # the average of all
        assert self.for_all == set(group.members)
        assert set(group.weights) == {1 / len(group.members)}
        assert group.iteration == max(self.last[member] for member in group.members)
        self.in_group.update(dict.fromkeys(group.members, group.number))
        self.for_all, self.since_change = set(), []
        continue
      assert len(group.members) == len(set(group.members)) == min(self.group_size, len(self.active))
      assert set(group.members) <= set(self.queue)
      assert self.queue[0] in group.members
      assert group.iteration == max(self.last[member] for member in group.members)
      assert sum(map(fractions.Fraction, group.weights)) + fractions.Fraction(group.initial) == pytest.approx(
        1, abs=1e-12
      )
      assert min(group.weights) >= 0 <= group.initial
      if self.kind == "constant":
        assert set(group.weights) == {1 / len(group.members)}
      if self.kind == "constant" or self.missing == "closest":
        assert group.initial == 0
      self.queue = [worker for worker in self.queue if worker not in group.members]
      self.in_group.update(dict.fromkeys(group.members, group.number))
      self.since_change.append(group.members)
      for worker in self.queue:  # nobody waits for more groups than there were ahead of it
        self.waited[worker] -= 1
        assert self.waited[worker] >= 0

  @stateful.rule(data=st.data(), steps=st.integers(1, 3))
  def ready(self, data, steps):
    if computing := sorted(self.active - set(self.queue)):
      worker = data.draw(st.sampled_from(computing))
      self.last[worker] = self.last.get(worker, -1) + steps
      self.waited[worker] = len(self.queue)
      self.queue.append(worker)
      self.in_group.pop(worker, None)
      self.take(self.controller.ready(worker, self.last[worker]))

  @stateful.rule(data=st.data(), steps=st.integers(0, 2))
  def synchronizes(self, data, steps):
    if computing := sorted(self.active - set(self.queue)):
      worker = data.draw(st.sampled_from(computing))
      least = 0 if worker in self.in_group else 1  # it may follow a group at once
      self.last[worker] = self.last.get(worker, -1) + max(least, steps)
      self.for_all.add(worker)
      self.in_group.pop(worker, None)
      self.since_change = []
      self.take(self.controller.synchronize(worker, self.last[worker]))

  @stateful.rule(data=st.data())
  def fails(self, data):
    if self.in_group:
      worker = data.draw(st.sampled_from(sorted(self.in_group)))
      self.last[worker] -= 1
      self.since_change = []
      self.take(self.controller.failed(worker, self.in_group.pop(worker)))

  @stateful.rule(data=st.data())
  def leaves(self, data):
    if len(self.alive) > 1:
      worker = data.draw(st.sampled_from(sorted(self.alive)))
      self.alive.remove(worker)
      self.last.pop(worker, None)
      self.in_group.pop(worker, None)
      self.queue = [other for other in self.queue if other != worker]
      self.for_all.discard(worker)
      self.since_change = []
      self.take(self.controller.leave(worker))

  @stateful.rule(data=st.data())
  def joins(self, data):
    if gone := sorted(set(range(self.workers)) - self.alive):
      worker = data.draw(st.sampled_from(gone))
      self.alive.add(worker)
      self.since_change = []
      self.take(self.controller.join(worker))

  @stateful.rule(
    call=st.sampled_from(["ready", "synchronize", "failed", "leave", "join"]),
    worker=st.integers(-2, 8) | st.sampled_from([None, "1", 1.0, True, 2**70]),
    number=st.integers(-5, 5) | st.sampled_from([None, "x", 0.5, False, 2**63, float("nan")]),
  )
  def bad(self, call, worker, number):
    """What is rejected changes nothing; what would be taken is not sent here."""
    before = copy.deepcopy(vars(self.controller))
    arguments = (worker,) if call in ("leave", "join") else (worker, number)
    trial = copy.deepcopy(self.controller)
    if self.would_take(call, worker, number):
      getattr(trial, call)(*arguments)
      return
    with pytest.raises(js.partial.Rejected, match=r"unknown|duplicate|stale|malformed"):
      getattr(self.controller, call)(*arguments)
    assert vars(self.controller) == before

  def would_take(self, call, worker, number):
    if type(worker) is not int or not 0 <= worker < self.workers or (call == "join") == (worker in self.alive):
      return False
    if call in ("ready", "synchronize"):
      fits = type(number) is int and 0 <= number < 2**63
      again = call == "synchronize" and worker in self.in_group
      return fits and worker in self.active - set(self.queue) and number > self.last.get(worker, -1) - again
    return call != "failed" or (worker in self.in_group and self.in_group[worker] == number)

  @stateful.invariant()
  def agree_on_who_waits(self):
    assert self.controller.waiting == tuple(self.queue)
    assert self.controller.alive == tuple(sorted(self.alive))

  @stateful.invariant()
  def any_window_is_connected(self):
    window = self.controller.window
    for end in range(window, len(self.since_change) + 1):
      assert components(sorted(self.active), self.since_change[end - window : end]) == 1

  @stateful.invariant()
  def they_wait_only_for_who_can_connect(self):
    assert self.active  # if all wait for the average of all, they have it
    assert set(self.queue) != self.active  # all ready: somebody must be in a group
    size = min(self.group_size, len(self.active))
    past = [group.members for group in self.controller.history]
    for members in itertools.combinations(self.queue, size):
      assert not keeps_windows(self.active, [*past, members], self.controller.window, size)


Machine.TestCase.settings = hypothesis.settings(max_examples=60, stateful_step_count=40, deadline=None)
TestController = Machine.TestCase


@pytest.mark.parametrize(
  ("arguments", "options", "message"),
  [
    ((1, 2), {}, r"workers=1, choose a whole number of at least 2"),
    ((True, 2), {}, r"workers=True"),
    ((4, 5), {}, r"group_size=5, choose a whole number in 2 … 4"),
    ((4, 1), {}, r"group_size=1"),
    ((4, 2, "equal"), {}, r"weights='equal', choose 'constant' or 'dynamic'"),
    ((4, 2), {"missing": "none"}, r"missing='none', choose 'initial' or 'closest'"),
    ((4, 2), {"decay": 1}, r"decay=1, choose a number in \[0, 1\)"),
    ((4, 2), {"decay": float("nan")}, r"decay=nan"),
    ((8, 3), {"history": 3}, r"history=3: 4 groups or more are needed to connect 8 workers"),
  ],
)
def test_bad_configurations(arguments, options, message):
  with pytest.raises(ValueError, match=message):
    js.partial.Controller(*arguments, **options)


@pytest.mark.parametrize(
  ("worker", "iteration", "message"),
  [
    (4, 1, r"unknown: worker 4, there are 0 … 3"),
    (3, 1, r"unknown: worker 3 has left, it has to join again"),
    (0, 1, r"duplicate: worker 0 is ready already, with iteration 5"),
    (1, 2, r"stale: iteration 2 of worker 1, which has signalled 2 before"),
    (1, -1, r"iteration -1 of worker 1 is malformed"),
    (1, 2.0, r"iteration 2.0 of worker 1 is malformed"),
  ],
)
def test_reasons(worker, iteration, message):
  controller = js.partial.Controller(4, 2)
  controller.leave(3)
  assert controller.ready(1, 2) == []
  assert len(controller.ready(2, 1)) == 1
  assert controller.ready(0, 5) == []
  with pytest.raises(js.partial.Rejected, match=message):
    controller.ready(worker, iteration)


def test_frozen_pairs_are_joined():
  """§4: workers 0 and 1 always arrive together, and 2 and 3; without the filter they would never meet."""
  controller = js.partial.Controller(4, 2, history=4)
  arrivals, step, groups = [(0, 1), (2, 3)], dict.fromkeys(range(4), 0), []
  for turn in range(60):
    for worker in arrivals[turn % 2]:
      if worker not in controller.waiting:
        step[worker] += 1
        groups += controller.ready(worker, step[worker])
  met = {group.members for group in groups}
  assert {(0, 1), (2, 3)} < met
  assert all(components(range(4), [g.members for g in groups[end - 4 : end]]) == 1 for end in range(4, len(groups)))


def test_a_slow_worker_does_not_hold_the_others_up_by_default():
  """Worker 0 is eight times as slow: the seven others are never all waiting."""
  controller, step = js.partial.Controller(8, 3), dict.fromkeys(range(8), 0)
  formed = 0
  for turn in range(160):
    for worker in range(8):
      if worker not in controller.waiting and (worker or turn % 8 == 7):
        step[worker] += 1
        formed += len(controller.ready(worker, step[worker]))
    assert len(controller.waiting) < 3
  assert formed > 160 * 7 / 3


def weights_by_hand(iterations, decay, missing):
  """§3.3 as it is written: one rank after the other."""
  ranks = [max(iterations) - k + 1 for k in iterations]
  alpha, most = fractions.Fraction(decay), max(ranks)
  weights, initial = [fractions.Fraction(0)] * len(ranks), fractions.Fraction(0)
  for rank in range(1, most + 1):
    weight = (1 - alpha) * alpha ** (rank - 1) / (1 - alpha**most)
    owners = [i for i, own in enumerate(ranks) if own == rank]
    if not owners and missing == "closest":
      nearest = min(ranks, key=lambda own: (abs(own - rank), own))
      owners = [i for i, own in enumerate(ranks) if own == nearest]
    if not owners:
      initial += weight
    for owner in owners:
      weights[owner] += weight / len(owners)
  return [float(weight) for weight in weights], float(initial)


@hypothesis.given(
  st.lists(st.integers(0, 30), min_size=1, max_size=6),
  st.sampled_from([0.0, 0.25, 0.5, 0.9]),
  st.sampled_from(["initial", "closest"]),
)
def test_dynamic_weights(iterations, decay, missing):
  found = dynamic(iterations, decay, missing)
  members, initial = weights_by_hand(iterations, decay, missing)
  assert found.members == pytest.approx(members, abs=1e-12)
  assert found.initial == pytest.approx(initial, abs=1e-12)


def test_a_worker_may_be_ages_behind():
  assert dynamic([2**62, 0], 0.5, "closest").members == pytest.approx((1, 0))
  assert dynamic([2**62, 2**62], 0.5, "initial") == ((0.5, 0.5), 0)


@pytest.mark.parametrize(
  ("pairs", "expected"), [([(0, 1), (1, 2), (0, 2)], 0.5), ([(0, 1)] * 2 + [(1, 2), (0, 2)], 0.625)]
)
def test_rho_of_figure_4(pairs, expected):
  groups = [js.partial.Group(pair, (0.5, 0.5), 1) for pair in pairs]
  assert js.partial.rho(groups, 3) == pytest.approx(expected)
  mean = js.partial.mixing(groups, 3)
  assert mean.sum(0) == pytest.approx(np.ones(3))
  assert mean.sum(1) == pytest.approx(np.ones(3))


def test_rho_of_everybody_and_of_strangers():
  everybody = js.partial.Group((0, 1, 2, 3), (0.25,) * 4, 1)
  strangers = [js.partial.Group(pair, (0.5, 0.5), 1) for pair in ((0, 1), (2, 3))]
  assert js.partial.rho([everybody], 4) == pytest.approx(0, abs=1e-9)
  assert js.partial.rho(strangers, 4) == pytest.approx(1)
  with pytest.raises(ValueError, match="no groups, give at least one"):
    js.partial.rho([], 4)
