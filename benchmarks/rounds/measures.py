"""What `benchmarks.rounds` measures on a team of workers."""

import contextlib
import itertools
import json
import math
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import netlab, watching
from benchmarks.elastic.phases import Phase
from benchmarks.race.results import Results, Whole
from benchmarks.race.standings import Target, crossing
from benchmarks.rounds.team import PROGRAMS, Team
from benchmarks.rounds.worker import QUIET, make_task
from benchmarks.tasks.base import model_of
from jaxsparse.launch.start import HOSTS, Host
from jaxsparse.partial.net import transfers

_BIN = 5.0  # seconds
_AFTER = 10.0  # seconds for which a team is watched after a fault at least
_MOST = 150.0  # and at most, until a round has all workers
_READS = 3
_HELD = 10.0  # seconds for which a worker of goodput is stopped, or cut off
FAULTS = ("killed", "stopped", "cut")


class Round(NamedTuple):
  """A round, as its members wrote it."""

  time: float  # when the first member went on from its result
  members: list[int]
  steps: float  # of all members, that the round has brought into the model
  equal: bool  # whether all members wrote the same digest of their anchor


class Hidden(NamedTuple):
  """Steps while an exchange is in flight, and without one."""

  rate: str
  every: int
  delay: int
  without: float  # median seconds of the training step
  flying: float
  flight: float  # steps that an exchange is in flight
  call: float  # median seconds of the call after it, `Rounds.step`, and the longest
  longest: float
  step: float  # seconds a step, with all


class Race(NamedTuple):
  """A training until the anchor has a loss on held-out data, beside the synchronous one."""

  rate: str
  every: int
  delay: int
  seed: int
  target: float  # dense Adam's loss after 300 steps from that seed
  steps: float  # of each worker
  seconds: float
  # seconds with the same optimizer, collective and H in one program, by its pace in the
  # same run
  synchronous: float


class Curve(NamedTuple):
  """Loss of training over time."""

  name: str
  seconds: list[float]
  loss: list[float]
  marks: list[float]  # seconds at which something happened


class Goodput(NamedTuple):
  """A run in which workers are killed, or none."""

  mode: str  # rounds or synchronous
  seconds: float
  kills: int
  trained: float | None  # examples a second of all workers
  delivered: float  # examples a second that are in the model
  lost: int | None  # steps whose result is in no model
  loss: float | None  # of training, the mean of the last quarter
  longest: float | None  # seconds of a call of `Rounds.step`
  equal: bool | None  # whether anchors were equal after each round


class Recovery(NamedTuple):
  """What followed a kill, in seconds."""

  round: float  # until the rest had the next round
  usual: float  # between two rounds, the median
  imported: float  # the newcomer: until it had started and imported
  compiled: float  # from then on until it had compiled its step
  joined: float  # until it had the anchor, and had compiled the outer step
  member: float  # until it went on from its first round


class Fault(NamedTuple):
  """What followed a fault."""

  fault: str
  longest: (
    float  # seconds of a call of `Rounds.step`, of all workers that are not stopped
  )
  gap: float  # seconds between two rounds at most
  usual: float  # the median
  again: float | None  # seconds from the end of the fault until a round had all workers
  lost: int  # workers that the controller took for lost
  equal: bool  # whether anchors were equal after each round


class Fetch(NamedTuple):
  """What a reader, or a worker that comes back, fetches while no exchange is under way."""

  what: str
  megabytes: float
  seconds: float  # median, and the longest
  longest: float


def rounds_of(team: Team, begin: float = 0.0, end: float = float("inf")) -> list[Round]:
  """The rounds of a span of time."""
  groups: dict[int, list[dict[str, Any]]] = {}
  for one in team.events("round", begin=begin, end=end):
    groups.setdefault(one["number"], []).append(one)
  found = []
  for own in groups.values():
    digests = {one["digest"] for one in own if one["stand"][1] == one["number"]}
    steps = sum(one["steps"] for one in own if not one["skipped"])
    found.append(Round(own[0]["time"], own[0]["members"], steps, len(digests) <= 1))
  return sorted(found)


def hidden(team: Team, rate: str, seconds: float) -> Hidden:
  """Lets a team train."""
  begin = time.monotonic()
  time.sleep(seconds)
  steps, one = team.events("step", begin=begin), team.settings[0]
  median = lambda flying: statistics.median(
    step["trained"] for step in steps if step["flying"] == flying
  )
  calls = [step["waited"] for step in steps]
  flight = sum(step["flying"] > 0 for step in steps) / len(
    team.events("round", begin=begin)
  )
  pace = len(team.hosts) * seconds / len(steps)
  found = median(0), median(2), flight, statistics.median(calls), max(calls), pace
  return Hidden(rate, one.every, one.delay, *found)


def curve(team: Team, name: str, begin: float, marks: Sequence[float]) -> Curve:
  """The loss of training since `begin`, the mean of all steps of each `_BIN` seconds."""
  bins: dict[int, list[float]] = {}
  for step in team.events("step", begin=begin):
    bins.setdefault(int((step["time"] - begin) // _BIN), []).append(step["loss"])
  means = {
    number: statistics.mean(filter(math.isfinite, own))
    for number, own in sorted(bins.items())
  }
  return Curve(
    name,
    [_BIN * (1 + number) for number in means],
    list(means.values()),
    [at - begin for at in marks],
  )


def with_pace(path: pathlib.Path, method: str, optimizer: str, rate: str) -> Results:
  """The results of a race, with the seconds that a step of this method takes now: machines differ from day to day."""
  with tempfile.TemporaryDirectory(prefix="jaxsparse-") as folder:
    copy = pathlib.Path(folder, path.name)
    copy.write_text(json.dumps(json.loads(path.read_text()) | {"paces": []}))
    choice = {
      "method": method,
      "optimizer": optimizer,
      "rate": rate,
      "results": copy,
      "report_dir": folder,
    }
    command = [sys.executable, "-m", "benchmarks.race", "--parts=paces"]
    command += [f"--{name}={value}" for name, value in choice.items()]
    subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
    return Results(copy, None)


def race(team: Team, rate: str, results: Results, rounds: int) -> Race:
  """Lets a team train for so many rounds, then evaluates the anchors that the first worker has written."""
  one, kept = team.settings[0], lambda number: team.folder / f"anchor{number}.npz"
  last = rounds - rounds % one.keep
  team.wait(kept(last).exists, f"{last} rounds")
  begin = min(
    step["time"] - step["trained"] - step["waited"]
    for step in team.events("step")[: len(team.hosts)]
  )
  ends = {
    end["stand"][0]: end["time"] - begin
    for end in team.events("round")
    if not end["worker"]
  }
  team.end()
  model = model_of(make_task(one.task), one.seed)
  whole = Whole("rounds", one.optimizer, one.seed, rate, [], [], [])
  for number in range(one.keep, last, one.keep):
    with np.load(kept(number)) as leaves:
      params = jax.tree.unflatten(
        jax.tree.structure(model.params), list(leaves.values())
      )
    whole.steps.append(number * one.every)
    whole.seconds.append(ends[number])
    whole.loss.append(model.evaluate(params, model.statistics)[0])
  target = Target(300).of_seeds(results)[one.seed]
  (beside,) = results.find("curves", optimizer=one.optimizer, seed=one.seed)
  steps, synchronous, pace = (
    crossing(whole, target),
    crossing(beside, target),
    results.pace_of(beside, rate),
  )
  if steps is None or synchronous is None or pace is None:
    raise RuntimeError(f"the loss {target} was not reached: {whole.loss}")
  seconds = float(np.interp(steps, whole.steps, whole.seconds))
  return Race(
    rate,
    one.every,
    one.delay,
    one.seed,
    target,
    steps,
    seconds,
    synchronous * pace.seconds,
  )


def goodput(
  team: Team, seconds: float, kill_every: float, seed: int, fault: str = FAULTS[0]
) -> tuple[Goodput, list[Recovery], Curve]:
  """Trains for so many seconds, and every so often a worker has a fault."""
  begin, kills, dice, before = (
    time.monotonic(),
    list[tuple[float, int]](),
    random.Random(seed),
    sum(team.lost()),
  )
  while (
    kill_every and (at := begin + kill_every * (len(kills) + 0.5)) < begin + seconds
  ):
    time.sleep(max(0.0, at - time.monotonic()))
    kills.append((time.monotonic(), number := dice.randrange(len(team.hosts))))
    _strike(team, number, fault)
  time.sleep(max(0.0, begin + seconds - time.monotonic()))
  end = time.monotonic()
  rounds, steps = rounds_of(team, begin, end), team.events("step", begin=begin, end=end)
  lost = sum(team.lost()) - before
  per_second = lambda steps: team.settings[0].batch * steps / (end - begin)
  rates = per_second(len(steps)), per_second(sum(one.steps for one in rounds))
  loss = statistics.mean(step["loss"] for step in steps[-len(steps) // 4 :])
  longest, equal = (
    max(step["waited"] for step in steps),
    all(one.equal for one in rounds),
  )
  for number in {number for _, number in kills}:
    team.wait_for(number)
  found = Goodput("rounds", end - begin, len(kills), *rates, lost, loss, longest, equal)
  name = f"a worker {fault} every {kill_every:g} s" if kill_every else "no fault"
  killed = kills if fault == "killed" else []
  return (
    found,
    [_recovery(team, rounds, *kill) for kill in killed],
    curve(team, name, begin, [at for at, _ in kills]),
  )


def _strike(team: Team, number: int, fault: str) -> None:
  """A worker is killed and replaced at once, or stopped or cut off for `_HELD` seconds."""
  if fault == "killed":
    team.kill(number)
    team.start(number)
    return
  with team.stopped(number) if fault == "stopped" else team.cut(number):
    time.sleep(_HELD)


def _recovery(team: Team, rounds: list[Round], killed: float, number: int) -> Recovery:
  first: dict[str, float] = {}
  for one in team.events("imported", "compiled", "joined", "round", begin=killed):
    if one["worker"] == number:
      first.setdefault(one["event"], one["time"])
  until = [
    first.get(name, float("nan"))
    for name in ("imported", "compiled", "joined", "round")
  ]
  after = next(
    (one.time for one in rounds if one.time > killed and number not in one.members),
    float("nan"),
  )
  parts = [
    after - before for before, after in zip([killed, *until], until, strict=False)
  ]
  return Recovery(after - killed, _usual(rounds), *parts)


def _usual(rounds: list[Round]) -> float:
  gaps = [after.time - before.time for before, after in itertools.pairwise(rounds)]
  return statistics.median(gaps) if gaps else math.nan


def fetches(team: Team, download: str) -> Iterator[Fetch]:
  """Fetches of a reader that receives at this rate, an anchor and two rounds; and of a worker that missed two."""
  netlab.set_download(team.controller_host, download)
  from_four, links = [], []
  for _ in range(_READS):
    # the first link compiles what applies it
    anchor, _, link = team.read(transfers.MOST_DONORS, [1, 1, 2])
    from_four.append(anchor)
    links.append(link)
  from_one = [team.read(1, [1])[0] for _ in range(_READS)]
  yield _fetch("the anchor, from one worker", from_one)
  yield _fetch(f"the anchor, from {transfers.MOST_DONORS} workers", from_four)
  yield _fetch("links of two rounds, from one worker", links)
  returns = [_return(team) for _ in range(_READS)]
  yield _fetch("links of a worker that was stopped for two rounds", returns)


def _return(team: Team) -> tuple[float, int]:
  """Seconds and bytes of a worker that was stopped for two rounds, from its request until it has the last anchor."""
  number = 1
  team.settle(1)
  begin = time.monotonic()
  missed = lambda: [one for one in rounds_of(team, begin) if number not in one.members]
  with team.stopped(number):
    team.wait(lambda: len(missed()) >= 2, "two rounds without a worker")
    time.sleep(QUIET)
  begin = time.monotonic()
  adopted = lambda: team.events("adopted", begin=begin)
  team.wait(lambda: bool(adopted()), "the worker to have the anchor")
  first = adopted()[0]
  # The training loop asks for a round when a step ends; it may be that of the stop.
  steps = team.events("step", begin=begin, end=first["time"])
  asked = [step["time"] for step in steps if step["worker"] == number]
  return first["time"] - max([begin, *asked]), first["nbytes"]


def _fetch(what: str, fetched: list[tuple[float, int]]) -> Fetch:
  seconds = [taken for taken, _ in fetched]
  megabytes = statistics.median(nbytes for _, nbytes in fetched) / 1e6
  return Fetch(what, megabytes, statistics.median(seconds), max(seconds))


def faults(team: Team, hold: float) -> Iterator[Fault]:
  """One fault after the other; between them all workers are there again."""
  last = len(team.hosts) - 1

  def stop() -> None:
    with team.stopped(1):
      time.sleep(hold)

  def cut() -> None:
    with team.cut(2):
      time.sleep(hold * 2 / 3)

  def kill_controller() -> None:
    for _ in range(2):
      team.controller.kill()
      team.controller.wait(10)
      time.sleep(3)
      team.start_controller()
      time.sleep(hold / 3)

  def send(number: int) -> Callable[[], None]:
    return lambda: team.processes[0].send_signal(number)

  fast, every = team.settings[last], max(1, team.settings[last].every // 4)
  yield _fault(team, "none, for comparison", lambda: time.sleep(hold))
  yield _fault(team, f"a worker stopped for {hold:g} s", stop, but=1)
  yield _fault(team, f"a link cut for {hold * 2 / 3:.0f} s", cut)
  yield _fault(team, "the controller killed twice, for 3 s each", kill_controller)
  yield _fault(team, "a worker gives NaN", send(signal.SIGUSR2))
  yield _fault(team, "parameters of a worker NaN, until it ends", send(signal.SIGUSR1))
  team.replace(0)
  garbage = "10,000 messages of garbage to the controller, and to a worker"
  yield _fault(team, garbage, lambda: team.send_garbage(10_000))
  team.replace(last, every=every, delay=every // 2, pace=4 * fast.pace)
  team.settle()
  yield _fault(team, "a worker 4 times slower", lambda: time.sleep(hold))
  team.replace(last, every=fast.every, delay=fast.delay, pace=fast.pace)


def _fault(
  team: Team, name: str, happen: Callable[[], None], but: int | None = None
) -> Fault:
  begin, lost = time.monotonic(), len(team.lost())
  happen()
  end = time.monotonic()
  time.sleep(_AFTER)
  again = None
  while again is None and time.monotonic() < end + _MOST:
    time.sleep(1)
    rounds = rounds_of(team, begin - _AFTER)
    again = next(
      (
        one.time - end
        for one in rounds
        if one.time > end and len(one.members) == len(team.hosts)
      ),
      None,
    )
  gaps = [after.time - before.time for before, after in itertools.pairwise(rounds)]
  calls = [
    step["waited"] for step in team.events("step", begin=begin) if step["worker"] != but
  ]
  equal = all(one.equal for one in rounds)
  return Fault(
    name,
    max(calls),
    max(gaps),
    statistics.median(gaps),
    again,
    len(team.lost()) - lost,
    equal,
  )


def synchronous(
  hosts: Sequence[Host], seconds: float, kill_every: float, seed: int
) -> Goodput:
  """The training of `benchmarks.elastic` by `jaxsparse.launch --restarts`, which goes on with the ranks that are left.

  Counts the steps up to the last checkpoint, each of as many examples for any number of
  ranks.
  """
  kills, dice, batch = 0, random.Random(seed), 60
  with tempfile.TemporaryDirectory(prefix="jaxsparse-") as folder:
    marks, checkpoints = (
      pathlib.Path(folder, "marks"),
      pathlib.Path(folder, "checkpoints"),
    )
    phase = json.dumps(Phase(0, 10**6, batch, 0.01, 25, folder, until=10**6))
    command = [
      sys.executable,
      "-m",
      "jaxsparse.launch",
      f"--ranks={len(hosts)}",
      "--restarts=99",
      "--",
    ]
    command += [sys.executable, "-m", "benchmarks.elastic", f"--phase={phase}"]
    environment = (
      os.environ | PROGRAMS | {HOSTS: json.dumps([host._asdict() for host in hosts])}
    )
    with (
      open(f"{folder}/log", "w") as log,
      subprocess.Popen(command, env=environment, stdout=log, stderr=log) as run,
    ):
      try:
        watching.wait(marks.exists, "the first step")
        begin, first = time.monotonic(), _saved(checkpoints)
        while (
          kill_every and (at := begin + kill_every * (kills + 0.5)) < begin + seconds
        ):
          time.sleep(max(0.0, at - time.monotonic()))
          if ranks := _ranks(hosts):
            os.kill(dice.choice(ranks), signal.SIGKILL)
          kills += 1
        time.sleep(max(0.0, begin + seconds - time.monotonic()))
        took, steps = time.monotonic() - begin, _saved(checkpoints) - first
      finally:
        run.terminate()
  return Goodput(
    "synchronous", took, kills, None, batch * steps / took, None, None, None, None
  )


def _saved(checkpoints: pathlib.Path) -> int:
  """The step of the last checkpoint, 0 without one."""
  return max(
    (int(path.name) for path in checkpoints.glob("*") if path.name.isdecimal()),
    default=0,
  )


def _ranks(hosts: Sequence[Host]) -> list[int]:
  """The processes that train: of those with their command on each host the last one, which others have started."""
  found = []
  for host in hosts:
    listed = subprocess.run(
      ["ip", "netns", "pids", host.name], capture_output=True, timeout=10, check=False
    ).stdout
    with contextlib.suppress(OSError):  # one has ended meanwhile
      found.append(
        [
          pid
          for pid in map(int, listed.split())
          if b"--phase" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
      )
  return [max(own) for own in found if own]
