"""A worker of rounds for fault tests, without a real model: `python round_trainer.py WHAT ADDRESS NUMBER FOLDER`."""

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import optax

import jaxsparse as js
from jaxsparse.partial.rounds.run import Run
from tests.partial.trainer import START


def die_in_a_round(after: int) -> None:
  """Kills this process after it has sent the first messages of a round, after so many others."""
  exchange = Run.exchange

  def exchange_and_die(self, messages):
    received = exchange(self, messages)
    if self.group.iteration >= after:
      time.sleep(0.1)  # for the messages to be sent
      os.kill(os.getpid(), signal.SIGKILL)
    return received

  Run.exchange = exchange_and_die


def train(what: str, address: str, number: int) -> None:
  """Each step goes a tenth of the way to the own number; prints each round: group, digest of the anchor, members."""
  if what == "dies":
    die_in_a_round(after=3)
  outer = lambda comm: optax.chain(js.onebit_transform(comm), optax.sgd(1.0))
  with js.partial.Rounds(
    address, number, START, outer, every=8, delay=4, timeout=30
  ) as worker:
    exchanger, params = worker._exchanger, worker.params
    commit = exchanger.commit

    def report():
      position, anchor = commit(), exchanger.anchor
      members = ",".join(map(str, exchanger.group.members))
      print("round", position.base, exchanger.outer.digest(anchor), members, flush=True)
      return position

    exchanger.commit = report
    while True:
      params = worker.step(
        jax.tree.map(lambda leaf: leaf + jnp.float32(0.1) * (number - leaf), params)
      )
      time.sleep(0.01)


if __name__ == "__main__":
  train(*sys.argv[1:3], int(sys.argv[3]))
