"""The laws of the controller, whatever comes in which order, against a model with scipy and brute force."""

import copy
import re

import hypothesis
import numpy as np
import pytest
from hypothesis import stateful
from hypothesis import strategies as st
from scipy.sparse import csgraph

import jaxsparse as js
from jaxsparse.partial.groups.controller import dynamic_weights
from jaxsparse.partial.net.messages import Rejected


def components(workers, groups):
  """The component of each of `workers` in the graph whose edges join the members of a group."""
  edges = np.zeros((workers, workers))
  for group in groups:
    edges[group[0], group] = 1
  return csgraph.connected_components(edges, directed=False)[1]


class Machine(stateful.RuleBasedStateMachine):
  """Signals, failures, deaths, absences and returns in any order; the model knows who waits, and the groups."""

  @stateful.initialize(data=st.data(), workers=st.integers(2, 6))
  def begin(self, data, workers):
    size = data.draw(st.integers(2, workers))
    least = -(-(workers - 1) // (size - 1))
    history = data.draw(st.none() | st.integers(least, least + 3))
    self.kind = data.draw(st.sampled_from(["constant", "dynamic"]))
    options = {
      "missing": data.draw(st.sampled_from(["closest", "initial"])),
      "history": history,
    }
    self.controller = js.partial.Controller(workers, size, self.kind, **options)
    self.workers, self.group_size, self.keeps_all = (
      workers,
      size,
      options["missing"] == "closest",
    )
    self.alive, self.last = set(range(workers)), dict.fromkeys(range(workers), -1)
    self.queue, self.for_all, self.absent, self.in_group = [], set(), set(), {}
    self.since, self.number, self.waited = [], 0, {}  # groups since all were connected

  @property
  def active(self):
    return self.alive - self.for_all

  @property
  def size(self):
    return min(self.group_size, len(self.active))

  def elsewhere(self, workers):
    """Those of `workers` that are not in the component of the worker that has waited longest."""
    found = [
      -1 if w in self.absent else one
      for w, one in enumerate(components(self.workers, self.since))
    ]
    return [worker for worker in workers if found[worker] != found[self.queue[0]]]

  def take(self, groups):
    """Checks what the controller formed, and follows it."""
    for group in groups:
      self.number += 1
      members = set(group.members)
      assert group.number == self.number
      assert group.iteration == max(self.last[member] for member in members)
      self.in_group.update(dict.fromkeys(members, group.number))
      if not self.active:  # the average of all
        assert self.for_all == members
        assert set(group.weights) == {1 / len(members)}
        self.for_all, self.since = set(), []
        continue
      assert len(group.members) == len(members) == self.size
      assert self.queue[0] in members <= set(self.queue)
      assert not members <= self.absent or self.active <= self.absent
      assert sum(group.weights) + group.initial == pytest.approx(1, abs=1e-12)
      assert min(group.weights) >= 0 <= group.initial
      if self.kind == "constant":
        assert set(group.weights) == {1 / len(members)}
      assert group.initial == 0 or not (self.kind == "constant" or self.keeps_all)
      self.queue = [worker for worker in self.queue if worker not in members]
      self.absent -= members
      self.since.append(group.members)
      if (
        len(
          set(components(self.workers, self.since)[sorted(self.active - self.absent)])
        )
        == 1
      ):
        self.since = []
      assert len(self.since) < self.controller.window + self.workers - self.group_size
      for (
        worker
      ) in self.queue:  # nobody waits for more groups than there were ahead of it
        self.waited[worker] -= 1
        assert self.waited[worker] >= 0

  @stateful.rule(
    data=st.data(),
    steps=st.integers(0, 2),
    synchronizes=st.sampled_from([False, False, True]),
  )
  def signals(self, data, steps, synchronizes):
    if computing := sorted(self.active - set(self.queue)):
      worker = data.draw(st.sampled_from(computing))
      # it may follow a group at once
      least = 0 if synchronizes and worker in self.in_group else 1
      self.last[worker] += max(least, steps)
      self.in_group.pop(worker, None)
      if synchronizes:
        self.for_all.add(worker)
        self.absent.discard(worker)
      else:
        self.waited[worker] = len(self.queue)
        self.queue.append(worker)
      signal = self.controller.synchronize if synchronizes else self.controller.ready
      self.take(signal(worker, self.last[worker]))

  @stateful.rule(data=st.data())
  def fails(self, data):
    if self.in_group:
      worker = data.draw(st.sampled_from(sorted(self.in_group)))
      self.last[worker] -= 1
      self.since = []
      self.take(self.controller.failed(worker, self.in_group.pop(worker)))

  @stateful.rule(data=st.data())
  def leaves(self, data):
    if len(self.alive) > 1:
      worker = data.draw(st.sampled_from(sorted(self.alive)))
      self.queue = [other for other in self.queue if other != worker]
      self.in_group.pop(worker, None)
      for workers in (self.alive, self.for_all, self.absent):
        workers.discard(worker)
      self.take(self.controller.leave(worker))

  @stateful.rule()
  def have_waited(self):
    if self.controller.held:
      self.absent |= self.active - set(self.queue)
      self.since = []
    self.take(self.controller.release())
    assert not self.controller.held

  @stateful.rule(data=st.data())
  def gets_the_model_of_another(self, data):
    """A worker joins again, or one goes on whose model was not finite: its next iteration may be any."""
    if idle := sorted(set(range(self.workers)) - set(self.queue) - self.for_all):
      worker = data.draw(st.sampled_from(idle))
      self.last[worker] = -1
      self.in_group.pop(worker, None)
      if worker in self.alive:
        self.controller.replaced(worker)
      else:
        self.alive.add(worker)
        self.since = []
        self.take(self.controller.join(worker))

  @stateful.rule(
    call=st.sampled_from(
      ["ready", "synchronize", "failed", "leave", "join", "replaced"]
    ),
    worker=st.integers(-2, 8) | st.sampled_from([None, "1", 0.5, 2**70]),
    number=st.integers(-5, 5)
    | st.sampled_from([None, "x", 0.5, 2**40, 2**62, float("nan")]),
  )
  def bad(self, call, worker, number):
    """What is rejected changes nothing, and the reason is told; what is accepted goes to a copy."""
    # a function
    state = lambda: {
      name: value for name, value in vars(self.controller).items() if name != "_weigh"
    }
    before = copy.deepcopy(state())
    arguments = (
      (worker, number) if call in ("ready", "synchronize", "failed") else (worker,)
    )
    if reason := self.reason(call, worker, number):
      with pytest.raises(Rejected, match=f"^{re.escape(reason)}"):
        getattr(self.controller, call)(*arguments)
      assert state() == before
    else:
      getattr(copy.deepcopy(self.controller), call)(*arguments)

  def reason(self, call, worker, number):
    """Why a call is rejected; empty for one that is accepted."""
    if type(worker) is not int or not 0 <= worker < self.workers:
      return f"unknown: worker {worker!r}, there are 0 … {self.workers - 1}"
    if worker not in self.alive:
      return "" if call == "join" else f"unknown: worker {worker} has left"
    if call in ("leave", "join"):
      return f"duplicate: worker {worker} has joined already" if call == "join" else ""
    if call == "failed":
      return (
        ""
        if (worker, number) in self.in_group.items()
        else f"stale: worker {worker} is not in group {number!r}"
      )
    if call != "replaced" and (type(number) is not int or not 0 <= number < 2**62):
      return f"iteration {number!r} of worker {worker} is malformed, send a whole number in 0 … 2^62 − 1"
    last, again = self.last[worker], call == "synchronize" and worker in self.in_group
    if worker in self.for_all or worker in self.queue:
      return f"duplicate: worker {worker} is ready already, with iteration {last}"
    stale = call != "replaced" and number <= last - again
    if stale:
      return f"stale: iteration {number} of worker {worker}, which has signalled {last}"
    newest = max(self.last[other] for other in self.alive)
    if call != "replaced" and newest >= 0 and number > newest + 2**20:
      return (
        f"iteration {number} of worker {worker} is more than {2**20} after {newest}"
      )
    return ""

  @stateful.invariant()
  def they_wait_only_for_a_present_worker_of_another_component(self):
    assert self.controller.waiting == tuple(self.queue)
    assert self.controller.alive == tuple(sorted(self.alive))
    assert self.controller._absent == self.absent
    assert self.active  # if all wait for the average of all, they have it
    assert set(self.queue) != self.active  # all ready: somebody must be in a group
    assert self.controller.held == (len(self.queue) >= self.size)
    if self.controller.held:
      assert len(self.since) >= self.controller.window or self.absent.intersection(
        self.queue[: self.size]
      )
      assert not self.elsewhere(self.queue)
      assert not self.absent.issuperset(self.elsewhere(self.active))


Machine.TestCase.settings = hypothesis.settings(
  max_examples=60, stateful_step_count=40, deadline=None
)
TestController = Machine.TestCase


@pytest.mark.parametrize(
  ("arguments", "options", "message"),
  [
    ((1, 2), {}, r"controller: workers=1, choose a whole number from 2 up"),
    ((4, 5), {}, r"controller: group_size=5, choose a whole number from 2 to 4"),
    ((4, 2, "equal"), {}, r"weights='equal', choose 'constant' or 'dynamic'"),
    ((4, 2), {"missing": "none"}, r"missing='none', choose 'initial' or 'closest'"),
    ((4, 2), {"decay": 1}, r"decay=1, choose a number in \[0, 1\)"),
    ((4, 2), {"decay": float("nan")}, r"decay=nan"),
    (
      (8, 3),
      {"history": 3},
      r"controller: history=3, choose a whole number from 4 up, or None",
    ),
  ],
)
def test_bad_configurations(arguments, options, message):
  with pytest.raises(ValueError, match=message):
    js.partial.Controller(*arguments, **options)


def train(controller, due, turns):
  """The groups of workers that are ready for turns `due(worker, turn)`; `release` is called once one has waited."""
  groups, iterations = [], dict.fromkeys(range(controller.workers), 0)
  for turn in range(turns):
    waited = controller.waiting
    for worker in range(controller.workers):
      if worker not in controller.waiting and due(worker, turn):
        iterations[worker] += 1
        groups += controller.ready(worker, iterations[worker])
    if set(waited) & set(controller.waiting):
      groups += controller.release()
  return groups


@pytest.mark.parametrize("slow", [1, 30])
def test_frozen_pairs_are_joined(slow):
  """§4: 0 and 1 always arrive together, and 2 and 3, which may be so slow that the former go on without them."""
  controller = js.partial.Controller(4, 2, history=4)
  due = lambda worker, turn: turn % 2 == 0 if worker < 2 else turn % (2 * slow) == 1
  met = [group.members for group in train(controller, due, 60 * slow)]
  assert {(0, 1), (2, 3)} < set(met)
  across = [set(members) & {0, 1} and set(members) & {2, 3} for members in met]
  assert sum(map(bool, across)) >= 10
  assert len(met) >= 30 * slow * 0.7


def test_the_group_filter_waits_after_as_many_groups_as_its_history():
  controller = js.partial.Controller(3, 2, history=2)
  assert [
    len(controller.ready(0, step) + controller.ready(1, step)) for step in (1, 2, 3)
  ] == [1, 1, 0]
  assert controller.ready(2, 1)


def test_groups_up_to_one_that_failed_do_not_count():
  controller = js.partial.Controller(3, 2, history=2)
  meet = lambda step: len(controller.ready(0, step) + controller.ready(1, step))
  assert [meet(1), meet(2)] == [1, 1]
  controller.failed(0, number=2)
  assert [meet(3), meet(4), meet(5)] == [1, 1, 0]


def test_a_slow_worker_does_not_hold_the_others_up_by_default():
  """Worker 0 is eight times as slow: the seven others are never all waiting."""
  controller = js.partial.Controller(8, 3)

  def due(worker, turn):
    assert worker or not controller.held
    return worker or turn % 8 == 7

  assert len(train(controller, due, 160)) > 160 * 7 / 3


def weights_by_hand(iterations, decay, missing):
  """§3.3 as it is written, one rank after the other: the weights of the members, and of the initial model."""
  ranks = [max(iterations) - k + 1 for k in iterations]
  weights = np.zeros(len(ranks) + 1)
  for rank in range(1, max(ranks) + 1):
    nearest = min(ranks, key=lambda own: (abs(own - rank), own))
    owner = rank if missing == "initial" else nearest
    owners = [i for i, own in enumerate(ranks) if own == owner] or [-1]
    weights[owners] += (
      (1 - decay) * decay ** (rank - 1) / (1 - decay ** max(ranks)) / len(owners)
    )
  return weights


@hypothesis.given(
  st.lists(st.integers(0, 30), min_size=1, max_size=6),
  st.sampled_from([0.0, 0.25, 0.5, 0.9]),
  st.sampled_from(["initial", "closest"]),
)
def test_dynamic_weights(iterations, decay, missing):
  found = np.hstack(dynamic_weights(iterations, decay, missing))
  np.testing.assert_allclose(
    found, weights_by_hand(iterations, decay, missing), atol=1e-12
  )
  # A worker may be ages behind.
  assert dynamic_weights([2**62, 0], 0.5, "closest")[0] == pytest.approx((1, 0))
  assert dynamic_weights([2**62, 2**62], 0.5, "initial") == ((0.5, 0.5), 0)
