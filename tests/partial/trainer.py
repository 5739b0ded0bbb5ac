"""What the processes of the fault tests run: `python trainer.py WHAT ADDRESS NUMBER FOLDER`, without a real model."""

import os
import pathlib
import signal
import sys
import time

import jax.numpy as jnp
import numpy as np

import jaxsparse as js
from jaxsparse.partial.messages import Kind
from jaxsparse.partial.worker import Runtime

LIMIT, RECONNECT, ENTRIES = 1.0, 1.0, 3000


def die_in_an_average(after: int) -> None:
  """Kills this process after it has sent one piece of the first average from iteration `after` on."""
  send = Runtime._send

  def send_and_die(self, address, piece):
    send(self, address, piece)
    if piece.kind == Kind.PART and self._protocol.model.iteration >= after:
      time.sleep(0.1)  # for the piece to be sent
      os.kill(os.getpid(), signal.SIGKILL)

  Runtime._send = send_and_die


def train(what: str, address: str, number: int, folder: pathlib.Path) -> None:
  """Each step goes a tenth of the way to 1; every line of the file is an iteration and the model's first entry."""
  if what == "dies":
    die_in_an_average(after=10)
  start = {"a": jnp.zeros((ENTRIES // 3, 2)), "b": jnp.zeros(ENTRIES // 3)}
  log = (folder / f"{number}.log").open("a", buffering=1)
  with js.partial.Worker(
    address, number, start, save=folder / f"{number}.npz", timeout=30, reconnect=RECONNECT
  ) as worker:
    params, iteration = worker.params, worker.iteration
    log.write(f"begins {iteration} {float(params['b'][0])}\n")
    while what == "forever" or not (folder / "stop").exists():
      time.sleep(0.02)
      if what == "stalls" and iteration >= 10:
        what = "forever"
        log.write("stalls\n")
        while not (folder / "goes on").exists():
          time.sleep(0.02)
      params = {name: leaf + 0.1 * (1 - leaf) for name, leaf in params.items()}
      if what == "diverges" and iteration >= 10:
        log.write("diverges\n")
        what, params["b"] = "plain", params["b"].at[7].set(jnp.nan)
      params, iteration = worker.reduce(params, iteration + 1)
      assert len({float(np.asarray(leaf).min()) for leaf in params.values()}) == 1  # every entry is averaged alike
      log.write(f"{iteration} {float(params['b'][0])}\n")
  log.write(f"ends {iteration} {float(params['b'][0])}\n")


def serve(number: int, folder: pathlib.Path) -> None:
  """A server for `number` workers; its address goes to a file."""
  server = js.partial.Server(js.partial.Controller(number, 2), limit=LIMIT)
  (folder / "address.new").write_text(server.address)
  (folder / "address.new").rename(folder / "address")
  server.serve()


if __name__ == "__main__":
  what, address, number, folder = sys.argv[1:]
  if what == "server":
    serve(int(number), pathlib.Path(folder))
  else:
    train(what, address, int(number), pathlib.Path(folder))
