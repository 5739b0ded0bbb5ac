"""Processes that die, stop or diverge: workers while they compute and inside an average, and the controller."""

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
LIMIT = 1.0  # as in trainer.py
LIKE = {"a": jnp.zeros((1000, 2)), "b": jnp.zeros(1000)}


class Processes:
  """Starts processes of trainer.py."""

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


def test_workers_that_die_return_and_diverge(processes):
  """Worker 0 diverges; 1 is suspended; 2 kills itself inside an average; 3 is killed while it computes, and restarted.

  The diverged model enters no average; the log names the leaf that is not finite.
  """
  controller = js.partial.Controller(4, 2)
  with js.partial.Server(controller, limit=LIMIT) as server:
    for number, what in enumerate(("diverges", "plain", "dies", "stalls")):
      processes.start(what, number, server.address)
    assert processes.all["dies", 2].wait(60) == -signal.SIGKILL
    until(lambda: "stalls" in processes.lines(3) and len(processes.lines(1)) > 2)
    until(lambda: "diverges" in processes.lines(0)[:-2])  # and has the model of another one, while there is another one
    processes.all["stalls", 3].send_signal(signal.SIGKILL)
    again = processes.start("plain", 3, server.address)
    processes.all["plain", 1].send_signal(signal.SIGSTOP)
    until(lambda: 1 not in controller.alive)  # dropped, although its connections are intact
    processes.all["plain", 1].send_signal(signal.SIGCONT)
    paused = len(processes.lines(1))
    until(lambda: 1 in controller.alive and len(processes.lines(1)) > paused + 10)
    until(lambda: len(processes.lines(3)) > processes.lines(3).index("stalls") + 10)
    until(lambda: "diverges" in processes.lines(0) and processes.lines(0)[-10:].count("diverges") == 0)
    (processes.folder / "stop").touch()
    for number, what in enumerate(("diverges", "plain")):
      assert processes.all[what, number].wait(60) == 0, processes.said(what, number)
    assert again.wait(60) == 0, processes.said("plain", 3)
  begins, *_, ends = [line.split() for line in processes.lines(3)[processes.lines(3).index("stalls") + 1 :]]
  assert int(begins[1]) > 0  # the trained model of another worker
  assert float(begins[2]) > 0
  assert "worker 0: params['b'] of iteration" in processes.said("diverges", 0)
  for number in (0, 1, 3):
    values = [line.split()[-1] for line in processes.lines(number) if line not in ("diverges", "stalls")]
    assert np.isfinite([float(value) for value in values]).all()
    last = processes.lines(number)[-1].split()
    assert last[0] == "ends"
    assert float(last[2]) > 0.5
  assert int(ends[1]) > int(begins[1])


def test_a_lost_controller_is_an_exception_at_the_next_call_of_each_worker(processes):
  """Two call `reduce`; one computes for longer than it takes until the controller is lost, and is not ended."""
  server = processes.start("server", 3)
  until((processes.folder / "address").exists)
  address = (processes.folder / "address").read_text()
  workers = [("forever", 0), ("forever", 1), ("stalls", 2)]
  for key in workers:
    processes.start(*key, address)
  until(lambda: "stalls" in processes.lines(2) and all(len(processes.lines(number)) > 2 for number in (0, 1)))
  server.send_signal(signal.SIGKILL)
  for key in workers[:2]:
    assert processes.all[key].wait(30) == 1
  time.sleep(0.5)
  assert processes.all["stalls", 2].poll() is None
  (processes.folder / "goes on").touch()
  assert processes.all["stalls", 2].wait(30) == 1
  for what, number in workers:
    assert "ControllerLost: no sign of life from the controller at tcp://127.0.0.1:" in processes.said(what, number)
    params, iteration = js.partial.restore(processes.folder / f"{number}.npz", LIKE)
    assert iteration >= 1
    assert params["a"].shape == (1000, 2)
    assert 0 < float(np.asarray(params["b"]).min()) <= 1
  with pytest.raises(ValueError, match=r"holds \['a'\], \['b'\], iteration, the model has \['w'\]"):
    js.partial.restore(processes.folder / "0.npz", {"w": jnp.zeros(3)})
