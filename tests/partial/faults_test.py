"""Processes that die: those of workers while they compute and inside an average, and the controller's."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js

TRAINER = pathlib.Path(__file__).with_name("trainer.py")
LIMIT, GRACE = 1.0, 1.0  # as in trainer.py
LIKE = {"a": jnp.zeros((1000, 2)), "b": jnp.zeros(1000)}


class Processes:
  """Processes of the trainer; none is left behind."""

  def __init__(self, folder):
    self.folder, self.all = folder, {}

  def start(self, what, number, address="-"):
    command = [sys.executable, str(TRAINER), what, address, str(number), str(self.folder)]
    with (self.folder / f"{what}{number}.err").open("w") as out:
      self.all[what, number] = subprocess.Popen(command, stdout=out, stderr=out)
    return self.all[what, number]

  def said(self, what, number):
    return (self.folder / f"{what}{number}.err").read_text()

  def lines(self, number):
    path = self.folder / f"{number}.log"
    return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def processes(tmp_path):
  found = Processes(tmp_path)
  yield found
  for process in found.all.values():
    process.kill()
    process.wait()


def until(condition, seconds=60):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.02)


def test_workers_that_die_and_come_back(processes):
  """Worker 2 kills itself inside an average; worker 3 is killed while it computes, and started again; 1 is paused."""
  controller = js.partial.Controller(4, 2)
  with js.partial.Server(controller, limit=LIMIT) as server:
    for number, what in enumerate(("plain", "plain", "dies", "stalls")):
      processes.start(what, number, server.address)
    assert processes.all["dies", 2].wait(60) == -signal.SIGKILL
    until(lambda: "stalls" in processes.lines(3) and len(processes.lines(1)) > 2)
    processes.all["stalls", 3].send_signal(signal.SIGKILL)
    again = processes.start("plain", 3, server.address)
    processes.all["plain", 1].send_signal(signal.SIGSTOP)
    until(lambda: 1 not in controller.alive)  # dropped, though its connections stand
    processes.all["plain", 1].send_signal(signal.SIGCONT)
    paused = len(processes.lines(1))
    until(lambda: 1 in controller.alive and len(processes.lines(1)) > paused + 10)
    until(lambda: len(processes.lines(3)) > processes.lines(3).index("stalls") + 10)
    (processes.folder / "stop").touch()
    for number in (0, 1):
      assert processes.all["plain", number].wait(60) == 0, processes.said("plain", number)
    assert again.wait(60) == 0, processes.said("plain", 3)
  begins, *_, ends = [line.split() for line in processes.lines(3)[processes.lines(3).index("stalls") + 1 :]]
  assert int(begins[1]) > 0  # a model of somebody who had trained
  assert float(begins[2]) > 0
  for number in (0, 1, 3):
    last = processes.lines(number)[-1].split()
    assert last[0] == "ends"
    assert float(last[2]) > 0.5
  assert int(ends[1]) > int(begins[1])


def test_a_worker_that_diverges_goes_on_and_nobody_else_notices(processes):
  """Its model is in no average; it says which leaf was not finite, and goes on from another worker's model."""
  with js.partial.Server(js.partial.Controller(3, 2), limit=LIMIT) as server:
    for number, what in enumerate(("plain", "plain", "diverges")):
      processes.start(what, number, server.address)
    until(lambda: "diverges" in processes.lines(2) and len(processes.lines(2)) > 10)
    until(lambda: len(processes.lines(2)) > processes.lines(2).index("diverges") + 10)
    (processes.folder / "stop").touch()
    for (what, number), process in processes.all.items():
      assert process.wait(60) == 0, processes.said(what, number)
  for number in range(3):
    lines = [line for line in processes.lines(number) if line != "diverges"]
    assert np.isfinite([float(line.split()[-1]) for line in lines]).all()
    assert float(lines[-1].split()[-1]) > 0.5
  assert "worker 2: params['b'] of iteration" in processes.said("diverges", 2)


def test_the_death_of_the_controller_ends_every_worker_with_its_parameters_saved(processes):
  """One waits in `reduce`, one computes and will not come; both end in the stated time."""
  processes.start("server", 3)
  until((processes.folder / "address").exists)
  address = (processes.folder / "address").read_text()
  processes.start("forever", 0, address)
  processes.start("forever", 1, address)
  processes.start("stalls", 2, address)
  until(lambda: "stalls" in processes.lines(2) and all(len(processes.lines(number)) > 2 for number in (0, 1)))
  os.kill(processes.all["server", 3].pid, signal.SIGKILL)
  killed = time.monotonic()
  workers = [("forever", 0), ("forever", 1), ("stalls", 2)]
  for key in workers:
    assert processes.all[key].wait(30) not in (0, None)
  assert time.monotonic() - killed < LIMIT + GRACE + 10  # for ending processes on a busy machine
  for what, number in workers:
    assert "no sign of life from the controller at tcp://127.0.0.1:" in processes.said(what, number)
    params, iteration = js.partial.restore(processes.folder / f"{number}.npz", LIKE)
    assert iteration >= 1
    assert params["a"].shape == (1000, 2)
    assert 0 < float(np.asarray(params["b"]).min()) <= 1
  with pytest.raises(ValueError, match=r"holds \['a'\], \['b'\], iteration, the model has \['w'\]"):
    js.partial.restore(processes.folder / "0.npz", {"w": jnp.zeros(3)})
