"""What the processes of the fault tests run: `python trainer.py WHAT ADDRESS NUMBER FOLDER`, without a real model."""

import itertools
import os
import signal
import sys
import time

import jax.numpy as jnp
import numpy as np

import jaxsparse as js
from jaxsparse.partial.net.messages import PieceKind
from jaxsparse.partial.net.sockets import Peers

START = {"a": jnp.zeros((1000, 2)), "b": jnp.zeros(1000)}


def die_in_an_average(after: int) -> None:
  """Kills this process after it has sent one piece of an average, after so many others."""
  send, averages = Peers.send, itertools.count()

  def send_and_die(self, address, piece):
    send(self, address, piece)
    if piece.kind == PieceKind.PART and next(averages) >= after:
      time.sleep(0.1)  # for the piece to be sent
      os.kill(os.getpid(), signal.SIGKILL)

  Peers.send = send_and_die


def train(what: str, address: str, number: int, folder: str) -> None:
  """Each step goes a tenth of the way to 1; prints the iteration and the model's first entry."""
  if what == "dies":
    die_in_an_average(after=10)
  with js.partial.Worker(
    address, number, START, save=f"{folder}/{number}.npz", timeout=30, reconnect=0.5
  ) as worker:
    params, iteration = worker.params, worker.iteration
    while True:
      print(iteration, float(params["b"][0]), flush=True)
      time.sleep(0.02)
      params, iteration = worker.reduce(
        {k: leaf + 0.1 * (1 - leaf) for k, leaf in params.items()}, iteration + 1
      )
      # every entry is averaged alike
      assert len({float(np.asarray(leaf).min()) for leaf in params.values()}) == 1


if __name__ == "__main__":
  train(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
