"""Real workers, a process each, in rounds of all of them or in groups with links: a tiny model, no lab, loopback."""

import contextlib
import itertools
import multiprocessing
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

import jaxsparse as js

_ENTRIES = 1000
_EVERY = 10
_PACE = 0.2  # seconds of a step
_START = (
  1500.0  # seconds until all have joined, and compiled the outer step, on few cores
)
_OF_GROUPS = 2  # rounds of a group from one among groups to the next


class Round(NamedTuple):
  """A round, at a worker that took part in it."""

  ended: float  # seconds of the clock
  number: int  # of its group
  digest: int  # of the anchor after it
  members: int


class Outcome(NamedTuple):
  """The outcome of a run."""

  workers: int
  groups: int
  rounds: int  # that every worker of a group took part in
  above: int  # rounds among groups, of all groups
  members: float  # of a round, mean
  joining: float  # seconds from the start of the processes until all have compiled
  gap: float  # seconds from a round of a group to the next, median
  memory: float  # MB of a process, proportional set size, mean
  equal: bool  # whether all members had the same bits after each round


def _average(comm: js.Comm) -> optax.GradientTransformation:
  return optax.chain(js.dense_transform(comm), optax.sgd(1.0))


def _join(address: str, number: int, params: Any, **options: Any) -> js.partial.Rounds:
  return js.partial.Rounds(
    address, number, params, _average, timeout=_START, wait=60.0, **options
  )


def _round_of(worker: js.partial.Rounds) -> Round:
  digest = worker._exchanger.outer.digest(worker._exchanger.anchor)
  return Round(time.monotonic(), worker.group.number, digest, len(worker.group.members))


def _memory() -> float:
  pages = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()
  return next(int(line.split()[1]) / 1000 for line in pages if line.startswith("Pss:"))


def _work(pipe: Connection, address: str, number: int, rounds: int) -> None:
  """A worker: says that it has joined, then trains for so many rounds and sends what they were."""
  worker = _join(address, number, jnp.zeros(_ENTRIES), every=_EVERY)
  pipe.send(None)
  pipe.recv()
  found: list[Round] = []
  params = worker.params
  while len(found) < rounds:
    time.sleep(_PACE)
    before = worker.round
    params = worker.step(params + (number + 1) / 1000)
    if worker.round != before:
      found.append(_round_of(worker))
  pipe.send((found, _memory(), []))
  pipe.recv()
  worker.leave()


def _link(
  pipe: Connection, address: str, number: int, rounds: int, top: str, group: int
) -> None:
  """The link of a group, which also sends what the rounds among groups were."""
  below = _join(address, number, jnp.zeros(_ENTRIES), every=1, link=True)
  above = _join(top, group, below.params, every=_OF_GROUPS)
  pipe.send(None)
  pipe.recv()
  found: list[Round] = []
  among_groups: list[Round] = []
  params = above.params
  while len(found) < rounds:
    before = below.round, above.round
    params = below.step(params)
    if below.round != before[0]:
      found.append(_round_of(below))
      params = above.step(params, len(below.group.members) - 1)
    if above.round != before[1]:
      among_groups.append(_round_of(above))
  pipe.send((found, _memory(), among_groups))
  pipe.recv()
  above.leave()
  below.leave()


def measure(workers: int, rounds: int, groups: int = 1) -> Outcome:
  """Rounds of so many processes, in groups with a link each if there are several; RuntimeError if one of them ends."""
  size = workers // groups
  with contextlib.ExitStack() as stack:
    servers = [_serve(size, stack) for _ in range(groups)]
    top = _serve(groups, stack) if groups > 1 else None
    begin = time.monotonic()
    pipes = []
    for number in range(size * groups):
      group, member = divmod(number, size)
      facts = servers[group].address, member, rounds
      if top and member == size - 1:
        pipes.append(_start(stack, _link, *facts, top.address, group))
      else:
        pipes.append(_start(stack, _work, *facts))
    _receive(pipes)
    joining = time.monotonic() - begin
    for pipe in pipes:
      pipe.send(None)
    found = _receive(pipes)
    for pipe in pipes:
      pipe.send(None)
    for pipe in pipes:
      pipe.poll(60)  # until it is closed: the process has left
  by_group = [
    _by_number([own for own, *_ in found[first : first + size]])
    for first in range(0, size * groups, size)
  ]
  inside = [own for each in by_group for own in each]
  among = _by_number([own for *_, own in found])
  ends = [
    sorted(min(member.ended for member in own) for own in each) for each in by_group
  ]
  return Outcome(
    workers=workers,
    groups=groups,
    rounds=sum(len(own) == size for own in inside),
    above=sum(len(own) == groups for own in among),
    members=statistics.mean(own[0].members for own in inside),
    joining=joining,
    gap=statistics.median(
      after - before for each in ends for before, after in itertools.pairwise(each)
    ),
    memory=statistics.mean(memory for _, memory, _ in found),
    equal=all(len({member.digest for member in own}) == 1 for own in inside + among),
  )


def _by_number(found: list[list[Round]]) -> list[list[Round]]:
  """The members of each round."""
  by_number: dict[int, list[Round]] = {}
  for each in itertools.chain.from_iterable(found):
    by_number.setdefault(each.number, []).append(each)
  return [*by_number.values()]


def _serve(size: int, stack: contextlib.ExitStack) -> js.partial.Server:
  quorum = js.partial.Quorum(size, quorum=size // 2 + 1, grace=5.0)
  return stack.enter_context(js.partial.Server(quorum, limit=60.0))


def _start(
  stack: contextlib.ExitStack, work: Callable[..., None], *facts: Any
) -> Connection:
  """Starts a process, which ends with the stack."""
  os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = (
    "1"  # of the workers: all compile at the same time
  )
  context = multiprocessing.get_context("forkserver")
  context.set_forkserver_preload([__name__])
  pipe, end = context.Pipe()
  process: Any = context.Process(target=work, args=(end, *facts), daemon=True)
  process.start()
  stack.callback(process.kill)
  end.close()
  return pipe


def _receive(pipes: list[Connection]) -> list[Any]:
  """What each process sends."""
  found = []
  for number, pipe in enumerate(pipes):
    if not pipe.poll(_START):
      raise RuntimeError(f"process {number} has sent nothing for {_START:g} s")
    try:
      found.append(pipe.recv())
    except EOFError:
      raise RuntimeError(f"process {number} has ended") from None
  return found
