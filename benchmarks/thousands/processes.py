"""Real workers, a process each, in rounds of all of them: a tiny model, no lab, loopback."""

import itertools
import multiprocessing
import os
import pathlib
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

import jaxsparse as js

_ENTRIES = 1000
_EVERY = 10
_PACE = 0.2  # seconds of a step
_START = 1500.0  # seconds until all have joined, and compiled the outer step, on few cores


class Outcome(NamedTuple):
  """Of a run."""

  workers: int
  rounds: int  # that every worker took part in
  members: float  # of a round, mean
  joining: float  # seconds from the start of the processes until all have compiled
  gap: float  # seconds from a round to the next, median
  memory: float  # MB of a worker, proportional set size, mean
  equal: bool  # whether all had the same bits after each round


def _work(address: str, number: int, rounds: int, pipe: Connection) -> None:
  """A worker: says that it has joined, then trains for so many rounds of all and sends what they were."""
  outer = lambda comm: optax.chain(js.dense_transform(comm), optax.sgd(1.0))
  worker = js.partial.Rounds(address, number, jnp.zeros(_ENTRIES), outer, every=_EVERY, timeout=_START, wait=60.0)
  pipe.send(None)
  pipe.recv()
  found: list[tuple[float, int, int, int]] = []
  params = worker.params
  while len(found) < rounds:
    time.sleep(_PACE)
    before = worker.round
    params = worker.step(params + (number + 1) / 1000)
    if worker.round != before:
      digest = worker._exchanger.outer.digest(worker._exchanger.anchor)
      found.append((time.monotonic(), worker.group.number, digest, len(worker.group.members)))
  pages = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()
  memory = next(int(line.split()[1]) / 1000 for line in pages if line.startswith("Pss:"))
  pipe.send((found, memory))
  pipe.recv()
  worker.leave()


def measure(workers: int, rounds: int) -> Outcome:
  """Rounds of so many processes; RuntimeError if one of them ends."""
  os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # of the workers: all compile at the same time
  context = multiprocessing.get_context("forkserver")
  context.set_forkserver_preload([__name__])
  with js.partial.Server(js.partial.Quorum(workers, quorum=workers // 2 + 1, grace=5.0), limit=60.0) as server:
    begin = time.monotonic()
    pipes: list[Connection] = []
    processes: list[Any] = []
    try:
      for number in range(workers):
        pipe, end = context.Pipe()
        process = context.Process(target=_work, args=(server.address, number, rounds, end), daemon=True)
        process.start()
        end.close()
        pipes.append(pipe)
        processes.append(process)
      _receive(pipes)
      joining = time.monotonic() - begin
      for pipe in pipes:
        pipe.send(None)
      found = _receive(pipes)
      for pipe in pipes:
        pipe.send(None)
      for process in processes:
        process.join(60)
    finally:
      for process in processes:
        process.kill()
  by_round: dict[int, list[tuple[float, int, int, int]]] = {}
  for own, _ in found:
    for one in own:
      by_round.setdefault(one[1], []).append(one)
  ended = sorted(min(time for time, *_ in own) for own in by_round.values())
  return Outcome(
    workers=workers,
    rounds=sum(len(own) == workers for own in by_round.values()),
    members=statistics.mean(own[0][3] for own in by_round.values()),
    joining=joining,
    gap=statistics.median(after - before for before, after in itertools.pairwise(ended)),
    memory=statistics.mean(memory for _, memory in found),
    equal=all(len({digest for _, _, digest, _ in own}) == 1 for own in by_round.values()),
  )


def _receive(pipes: list[Connection]) -> list[Any]:
  """What each process sends."""
  found = []
  for number, pipe in enumerate(pipes):
    if not pipe.poll(_START):
      raise RuntimeError(f"worker {number} has sent nothing for {_START:g} s")
    try:
      found.append(pipe.recv())
    except EOFError:
      raise RuntimeError(f"the process of worker {number} has ended") from None
  return found
