"""A worker of `benchmarks.rounds`: it trains, takes part in rounds, and writes what happens, a JSON object a line."""

import itertools
import json
import math
import pathlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxsparse as js
from benchmarks import recipes
from benchmarks.tasks import data, images, registry
from benchmarks.tasks.base import Task, model_of
from jaxsparse.partial.net import messages, transfers
from jaxsparse.partial.net.sockets import Keys, zmq
from jaxsparse.partial.rounds import status

QUIET = 3.0  # seconds after a round, until all workers have heard of it


class Settings(NamedTuple):
  """The settings of a worker."""

  # cnn, of the digits, the name of another task, or the number of entries that move by
  # a number each step
  task: str
  batch: int  # examples of a step
  every: int  # H
  delay: int
  pace: float  # seconds of a step at least: the device is idle for the rest
  transform: str  # dense, onebit or another of js.*_transform
  optimizer: str = "adam:0.001"
  apply_residual: bool = False
  # the first worker writes the anchor into the folder after each so many rounds, 0 for
  # never
  keep: int = 0
  seed: int = 0
  number: int = 0
  life: int = 0  # how often a worker has been started in place of this one
  server: str = ""
  address: str = ""  # of this worker's host
  folder: str = ""  # of the keys, and of what the workers write
  torchft: str = (
    ""  # the Python of torchft's environment, whose DiLoCo takes the place of rounds
  )


def make_task(name: str) -> Task:
  """The task of that name."""
  return (
    images.make_small("cnn", data.load("digits"))
    if name == "cnn"
    else registry.make(name)
  )


class Training(NamedTuple):
  """What a worker trains."""

  # parameters, state and batch to the next ones and a loss
  step: Callable[[Any, Any, Any], tuple[Any, Any, jax.Array]]
  params: Any
  state: Any
  batches: Iterator[Any]
  evaluate: Callable[[Any], tuple[float, float]]  # loss and accuracy


def _model(one: Settings) -> Training:
  task = make_task(one.task)
  model = model_of(task, one.seed)
  tx = recipes.Recipe(
    recipes.parse_optimizers([one.optimizer], 0.001)[0], clip=1.0
  ).make()

  def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
    loss, gradient = jax.value_and_grad(model.plain_loss)(params, batch)
    updates, state = tx.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, loss

  batches = task.stream(10_000 * one.seed + 1000 * one.life + one.number, 1, one.batch)
  evaluate = lambda params: model.evaluate(params, model.statistics)
  return Training(step, model.params, tx.init(model.params), batches, evaluate)


def _vector(one: Settings) -> Training:
  """A vector of `task` entries, which move by the same number in each step."""
  step = lambda params, state, batch: (params + batch, state, jnp.zeros(()))
  params = np.zeros(int(one.task), np.float32)
  return Training(
    step,
    params,
    (),
    itertools.repeat(np.float32(1e-3 * (1 + one.number))),
    lambda _: (0.0, 0.0),
  )


def _outer(name: str) -> Callable[[js.Comm], optax.GradientTransformation]:
  transform = getattr(js, f"{name}_transform")
  return lambda comm: optax.chain(transform(comm), optax.sgd(1.0))


def run(one: Settings) -> None:
  """Trains until SIGTERM. SIGUSR1 makes the parameters NaN once, SIGUSR2 what is given in the next round."""
  folder, asked = pathlib.Path(one.folder), set[int]()
  for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: asked.add(number))
  with (folder / f"worker{one.number}.{one.life}").open("a", buffering=1) as log:

    def say(event: str, **facts: Any) -> None:
      facts = {
        "event": event,
        "worker": one.number,
        "life": one.life,
        "time": time.monotonic(),
      } | facts
      log.write(json.dumps(facts) + "\n")

    say("imported")
    training = (_vector if one.task.isdecimal() else _model)(one)
    start, state = jax.device_put((training.params, training.state), jax.devices()[0])
    step = jax.jit(training.step, donate_argnums=(0, 1))
    compiled = step.lower(start, state, next(training.batches)).compile()
    say("compiled")
    outer = _outer(one.transform)
    options: dict[str, Any] = {
      "every": one.every,
      "delay": one.delay,
      "apply_residual": one.apply_residual,
    }
    options["keys"] = Keys.read(folder / "keys")
    with js.partial.Rounds(
      one.server, one.number, start, outer, bind=one.address, **options
    ) as worker:
      say("joined", address=worker._endpoint.address)
      _watch_fetches(worker._exchanger, say)
      while not (
        folder / "begin"
      ).exists():  # until all have joined, and none has trained ahead
        time.sleep(0.05)
      _train(one, worker, compiled, state, training.batches, asked, say)
      params = worker.leave()
    loss, accuracy = training.evaluate(params)
    say("end", loss=loss, accuracy=accuracy)


def _train(
  one: Settings,
  worker: Any,
  step: Any,
  state: Any,
  batches: Any,
  asked: set[int],
  say: Any,
) -> None:
  """Trains until SIGTERM, and says what each step and each round was."""
  exchanger, params, last = worker._exchanger, worker.params, 0
  nan = lambda tree: jax.tree.map(lambda leaf: leaf * jnp.nan, tree)
  flies = lambda: worker._flight is not None and worker._endpoint._answers.empty()
  while signal.SIGTERM not in asked:
    flying, start = flies(), time.monotonic()
    params, state, loss = step(params, state, next(batches))
    jax.block_until_ready((params, state))
    trained = time.monotonic() - start
    flying += flies()
    time.sleep(max(0.0, one.pace - trained))
    if signal.SIGUSR1 in asked:
      asked.discard(signal.SIGUSR1)
      params = nan(params)
    if signal.SIGUSR2 in asked:
      asked.discard(signal.SIGUSR2)
      _poison(exchanger)
    # of the one fragment
    given = worker._flight[1] if worker._flight else worker._undelivered + 1
    steps, start = int(given[0, 1]), time.monotonic()
    params = worker.step(params)
    say(
      "step",
      loss=float(loss),
      trained=trained,
      waited=time.monotonic() - start,
      flying=flying,
    )
    if worker._flight is None and worker.group.number != last:
      group, position, last = (
        worker.group,
        exchanger.anchor.position,
        worker.group.number,
      )
      # not on the clock of a race
      digest = None if one.keep else exchanger.outer.digest(exchanger.anchor)
      if one.keep and not one.number and position.round % one.keep == 0:
        np.savez(
          pathlib.Path(one.folder, f"anchor{position.round}"),
          *jax.tree.leaves(exchanger.anchor.params),
        )
      facts = {"digest": digest, "skipped": exchanger.delivered.skipped}
      say(
        "round",
        number=group.number,
        members=group.members,
        steps=steps,
        stand=position,
        **facts,
      )


def _watch_fetches(exchanger: Any, say: Any) -> None:
  """Says when the worker has taken over what a donor sent."""
  adopt = exchanger.adopt

  def adopted(model: messages.Piece, *facts: Any) -> Any:
    position = adopt(model, *facts)
    say("adopted", nbytes=model.values.nbytes)
    return position

  exchanger.adopt = adopted


def _poison(exchanger: Any) -> None:
  """Has the worker give NaN in its next round, which it would refuse to do."""
  run = exchanger.outer.run

  def poisoned(anchor: Any, given: Any, *rest: Any) -> Any:
    exchanger.outer.run = run
    return run(anchor, jax.tree.map(lambda leaf: leaf * jnp.nan, given), *rest)

  exchanger.outer.run = poisoned


class _Reader(js.partial.Follower):
  """A reader that keeps the bytes of its last fetch."""

  nbytes = 0

  def _fetch(self, *facts: Any) -> messages.Piece:
    model = super()._fetch(*facts)
    self.nbytes = model.values.nbytes
    return model


def read(
  server: str, keys: str, entries: int, transform: str, donors: int, waits: list[int]
) -> None:
  """Prints seconds and bytes of a reader's fetches after so many rounds each: the anchor from donors, then links."""
  own_keys = Keys.read(pathlib.Path(keys))
  params = np.zeros(entries, np.float32)
  reader = _Reader(server, params, _outer(transform), rate=math.inf, keys=own_keys)
  replica = reader._replica
  replica.outer.digest(replica.anchor)  # compiles it
  # slices of the anchor: the links of the first rounds are fewer bytes
  reader._in_vain = 1
  transfers.MOST_DONORS = donors
  last_round = lambda: status.ask(server, own_keys)["round"]

  def fetch(rounds: int) -> tuple[float, int]:
    wanted = last_round() + rounds
    while last_round() < wanted:
      time.sleep(0.5)
    # all workers have heard of the round, and no exchange is under way
    time.sleep(QUIET)
    begin = time.monotonic()
    # Of short rounds workers may have gone on to the next one, and are asked again.
    while reader.latest().version < wanted:
      time.sleep(0.1)
    return time.monotonic() - begin, reader.nbytes

  print(json.dumps(list(map(fetch, waits))))


def send_garbage(addresses: list[str], keys: pathlib.Path, count: int) -> None:
  """Sends so many messages that are none, or forged, to each address."""
  context, random = zmq.Context(), np.random.default_rng(0)
  for address in addresses:
    socket = context.socket(zmq.DEALER)
    own = Keys.read(keys)
    socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = (
      own.public,
      own.secret,
      own.public,
    )
    socket.connect(address)
    for number in range(count):
      kind, worker, long = (int(random.integers(bound)) for bound in (12, 8, 200))
      # a message begins with its kind, a signal with the worker behind it
      forged = bytes([kind, 0, worker]) + random.bytes(messages._SIGNAL.size - 3)
      piece = bytes([kind]) + random.bytes(messages._PIECE.size - 1)
      choices = (
        [random.bytes(long)],
        [forged],
        [piece, random.bytes(long // 4 * 4)],
        [b""] * (1 + long % 5),
      )
      socket.send_multipart(list(choices[number % 4]))
    socket.close(linger=10_000)
  context.term()
