"""The window of a round: of the least cost by an independent account of it, never too long, and told to workers."""

import logging
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxsparse as js
from benchmarks.thousands import windows
from benchmarks.thousands.members import Setting
from jaxsparse.partial.net import messages
from jaxsparse.partial.net.membership import Member, Members, Membership
from jaxsparse.partial.net.messages import ServerMessage, Signal, WorkerMessage
from jaxsparse.partial.rounds import window as module
from jaxsparse.partial.rounds.server import RoundMember, RoundServer
from jaxsparse.partial.rounds.window import FIRST, Window

SECONDS = st.floats(0.01, 1000.0)
# by worker the seconds of each of its turns
TURNS = st.integers(1, 7).flatmap(
  lambda count: st.lists(
    st.lists(SECONDS, min_size=count, max_size=count), min_size=1, max_size=6
  )
)


def observe(turns, quorum=1):
  """A window that has seen these turns, each of them in a round of all, and the time at which the next turn began."""
  window = Window("auto", quorum)
  now = 0.0
  for seconds in zip(*turns, strict=True):
    window.begin(range(len(turns)), now)
    for worker, turn in enumerate(seconds):
      window.end(worker, now + turn)
    now += max(seconds)
  window.begin(range(len(turns)), now)
  return window, now


def expect(turns, elapsed):
  """By worker, when it will be ready, from now: as often as its turns and those of all were that long."""
  ratios = [1.0]
  for number in range(1, len(turns[0])):
    for seconds in turns:
      usual = np.median(seconds[max(0, number - module._RECENT) : number])
      ratios.append(seconds[number] / usual)
  found = []
  for seconds in turns:
    usual = np.median(seconds[-module._RECENT :])
    times = (
      usual * np.quantile(ratios, [(2 * level + 1) / 32 for level in range(16)])
      - elapsed
    )
    found.append(times[times > 0])
  return found


def cost(window, ready, times, late):
  """Seconds of workers that are lost by a window: of those that wait, and of those that are late."""
  lost = ready * window
  for each in times:
    come = each[each <= window]
    if len(each):
      lost += (window - come).sum() / len(each) + late * (1 - len(come) / len(each))
  return lost


@given(TURNS, st.integers(1, 9), st.floats(0.0, 2.0), st.data())
def test_no_window_costs_less(turns, ready, elapsed, data):
  quorum = data.draw(st.integers(1, len(turns)))
  window, begun = observe(turns, quorum)
  usual = sorted(np.median(each[-module._RECENT :]) for each in turns)[quorum - 1]
  assert window.usual == pytest.approx(usual)
  elapsed *= usual
  found = window.choose(ready, range(len(turns)), begun + elapsed)
  times = expect(turns, elapsed)
  lost = lambda seconds: cost(seconds, ready, times, module._LATE * usual)
  others = [0.0, *np.concatenate(times), *np.linspace(0, 3 * usual, 40)]
  # times are differences of late ones, and rounded
  assert lost(found * (1 + 1e-9) + 1e-9) <= min(map(lost, others)) * (1 + 1e-6) + 1e-4


@given(TURNS, st.integers(1, 9), st.floats(0.0, 2.0))
def test_more_that_wait_wait_no_longer_and_none_for_more_than_it_saves(
  turns, ready, elapsed
):
  window, begun = observe(turns)
  now = begun + elapsed * window.usual
  away = range(len(turns))
  few, many = (window.choose(number, away, now) for number in (ready, ready + 1))
  assert 0 <= many <= few
  assert few <= module._LATE * window.usual * len(turns) / ready * (1 + 1e-9)
  assert window.choose(ready, (), now) == 0


@given(TURNS, st.integers(1, 3), st.floats(0.01, 5.0))
def test_a_window_ends(turns, ready, step):
  """No worker comes: at the latest after C, whatever was expected, and at the same time if it is asked again."""
  window, begun = observe(turns)
  most = module._LATE * window.usual
  step *= most / 20
  now = begun
  while not window.is_over(ready, range(len(turns)), now):
    assert now <= begun + most
    now += step
  assert window.is_over(ready, range(len(turns)), now)
  window.close(now)
  assert window.seconds == now - begun


def test_what_is_not_known_is_not_waited_for_and_a_number_is_kept():
  window = Window("auto", 2)
  window.begin(range(3), 0.0)
  assert window.is_over(2, {2}, 1.0)
  assert (window.least, window.wait, window.usual) == (FIRST, FIRST, 0)
  fixed, _ = Window(3.5, 1), observe([[1.0]])
  fixed.begin({0}, 0.0)
  fixed.end(0, 100.0)
  fixed.begin({0}, 200.0)
  assert (fixed.least, fixed.wait) == (3.5, 3.5)
  assert fixed.is_over(1, {0}, 200.0)


def test_a_worker_that_is_a_little_later_is_waited_for_and_one_that_is_slow_is_not():
  window, begun = observe([[30.0] * 6, [33.0] * 6, [300.0] * 6])
  window.end(0, begun + 30.0)
  assert window.choose(1, {1, 2}, begun + 30.0) == pytest.approx(3.0)
  window.end(1, begun + 33.0)
  assert window.choose(2, {2}, begun + 33.0) == 0
  assert window.wait == 0 < window.least == FIRST
  window.forget(1)
  assert window.choose(1, {1, 2}, begun + 30.0) == 0


def test_it_follows_day_and_night():
  """Half of the workers take half as long again from some hour on: after 3 such turns they are waited for."""
  turns = [[60.0] * 8, [60.0] * 8, [60.0] * 5 + [90.0] * 3, [60.0] * 5 + [90.0] * 3]
  window, begun = observe(turns)
  assert window.choose(2, {2, 3}, begun + 60.0) == pytest.approx(30.0)


def test_what_was_ready_before_is_no_turn():
  """A worker whose round has failed, or that was late, is ready again at once."""
  window, begun = observe([[10.0] * 3, [10.0] * 3], quorum=2)
  for now in (10.0, 20.0, 30.0, 40.0):
    window.end(0, begun + now)
  window.begin({0}, begun + 50.0)
  assert window.usual == 10.0


class Hub:
  """A server whose last answer to each worker is kept."""

  def __init__(self, **options):
    quorum = js.partial.Quorum(3, quorum=2, first=0, **options)
    self.answers = {}
    self.begun = []
    self.server = RoundServer(quorum, Members(RoundMember, self.send, 1e6, 0.0))
    for worker in range(3):
      self.tell(WorkerMessage.HELLO, worker, 0.0, address="tcp://h:1")

  def send(self, worker, frame):
    answer = self.answers[worker] = messages.parse_answer(frame)
    if answer.kind == ServerMessage.GROUP and worker == 0:
      self.begun.append((self.server.members.now, answer.content["members"]))
    return True

  def tell(self, kind, worker, now, value=1, **facts):
    position = self.server._quorum.position
    frame = Signal(kind, worker, value, position=position, **facts).pack()
    self.server.receive(worker, [frame], now)

  def run(self, turns, begin, step=0.125):
    """A round in which workers are ready after so many seconds; who is late does not come."""
    for now in np.arange(begin, begin + 3 * max(turns), step):
      self.server.tick(now)
      if self.server._quorum.under_way:
        break
      for worker, turn in enumerate(turns):
        if now == begin + turn:
          self.tell(WorkerMessage.READY, worker, now)
    end, members = self.begun[-1]
    for worker in members:
      number = self.server._quorum.under_way.number
      self.tell(WorkerMessage.DONE, worker, end, number, digest=7)
    return end - begin, members


def test_a_server_learns_to_wait_and_tells_workers_how_long_they_may():
  hub = Hub()
  # nothing is known but that a round takes 2 s
  assert hub.answers[0].content["grace"] == FIRST
  now = 0.0
  lengths = []
  for _ in range(3):
    seconds, members = hub.run((20.0, 20.0, 21.0), now)
    now += seconds
    lengths.append((seconds, members))
  assert lengths == [(21.0, (0, 1, 2))] * 3
  assert hub.answers[0].content["grace"] == 0
  # as long as it has paid before, and no longer than that
  assert hub.run((20.0, 20.0, 400.0), now) == (pytest.approx(23.0, abs=2.0), (0, 1))
  status = hub.server.status()
  assert status["turn"] == 20.0
  assert status["window"] <= 4.0


def test_short_rounds_are_waited_for():
  hub = Hub()
  now = 0.0
  for _ in range(3):
    now += hub.run((0.25, 0.25, 0.25), now)[0]
  assert hub.answers[0].content["grace"] == FIRST - 0.25
  assert hub.server._window.least == 0.025


def test_who_has_been_silent_is_dropped_later():
  """After 3 times the longest silence lately, between `limit` and 4 times that; after a `limit` that is given."""
  for most, expected in ((4.0, (5.0, 12.0, 20.0)), (1.0, (5.0, 5.0, 5.0))):
    members = Members(Member, lambda *_: True, 5.0, 0.0, most=most)
    silent = lambda seconds, members=members: members.limit_of(Member(silence=seconds))
    assert tuple(map(silent, (1.0, 4.0, 9.0))) == expected
  members = Members(Member, lambda *_: True, 5.0, 0.0, most=4.0)
  members.join(b"0", Signal(WorkerMessage.HELLO, 0, address="tcp://h:1"))
  beat = Signal(WorkerMessage.BEAT, 0).pack()
  now = 0.0
  for gap in (4.0, 4.5):
    now += gap
    members.receive(b"0", [beat], now, lambda *_: None)
  assert members.dead_at[0] == now + 13.5
  for _ in range(200):
    members.receive(b"0", [beat], now, lambda *_: None)
  assert members.dead_at[0] == now + 5.0


@pytest.mark.parametrize(
  ("most", "gaps", "limit"),
  [
    (4.0, (0.5, 1.0), 5.0),  # the floor
    (4.0, (0.5, 4.0, 0.5), 11.9),  # three times the longest silence, which decays
    (4.0, (0.5, 9.0), 20.0),  # the ceiling
    (4.0, (9.0, "suspended", 0.5), 20.0),
    (4.0, ("suspended", 0.5), 5.0),  # of this process, not of the server
    (4.0, (9.0, "welcome", 0.5), 5.0),  # of another server
    (1.0, (0.5, 9.0), 5.0),  # a limit that was given
  ],
)
def test_a_worker_waits_longer_for_a_server_that_has_been_silent(most, gaps, limit):
  quiet = lambda *_: None
  place = Membership(0, "tcp://a:1", 120.0, 0.0, quiet, quiet, quiet, limit=5.0)
  place.enter(5.0, None, most)
  for gap in gaps:
    match gap:
      case "welcome":
        place.enter(5.0, None, most)
      case "suspended":
        place.tick(place.now + 30.0)
      case _:
        place.now += gap
        place._last_tick = place.now
        place.hear()
  assert place.server_until == pytest.approx(place.now + limit, abs=0.03)


def test_a_server_says_how_long_it_may_be_silent():
  hub = Hub()
  hub.server.members.most = 4.0
  hub.tell(WorkerMessage.HELLO, 0, 0.0, address="tcp://h:1")
  assert hub.answers[0].content["most"] == 4.0


@pytest.mark.parametrize("grace", ["soon", -1, None, math.nan, math.inf])
def test_bad_windows(grace):
  with pytest.raises(ValueError, match=r"grace=.*choose 'auto', or seconds from 0"):
    js.partial.Quorum(3, 2, grace=grace)


# What it may lose beside a fixed window in which workers train on while they wait, as
# they do with it: more where its first rounds, of 10, knew no turns of workers that differ.
@pytest.mark.parametrize(
  ("scenario", "loss"),
  [
    ("equal", 0.01),
    ("slow", 0.01),
    ("tail", 0.03),
    ("day", 0.03),
    ("newcomer", 0.01),
  ],
)
def test_in_virtual_time_it_loses_little_beside_fixed_windows(scenario, loss):
  setting = Setting(8, 0, 600, entries=1000, straggle=0, scenario=scenario, limit=20.0)
  logging.disable(logging.WARNING)
  try:
    found = windows.compare(setting, (2.0, 30.0), (2.0, 30.0), seeds=1)
  finally:
    logging.disable(logging.NOTSET)
  useful = lambda kind: max(useful for _, useful in found[kind])
  assert found["auto"]["useful"] > useful("training") - loss
  assert found["auto"]["useful"] > useful("waiting") - 0.02
  # all that is trained is delivered, some of it late; a newcomer dies with its work
  died = 0.04 if scenario == "newcomer" else 0.0
  assert 1 - died - 1e-3 < found["auto"]["goodput"] < 1 + 1e-3


def test_workers_train_on_where_a_fixed_window_may_not_stop_them():
  """Late rounds take no training from workers that do not wait; from others they do."""
  setting = Setting(4, 0, 300, entries=1000, straggle=0, scenario="slow", delay=0.0)
  training, waiting = (
    windows.measure(setting._replace(grace=70.0, wait=wait)) for wait in (0.0, None)
  )
  assert training["goodput"] == pytest.approx(1, abs=1e-3)
  assert waiting["goodput"] < 0.8
  assert waiting["over"] < 0.01 < training["over"]
