"""Processes that die, stop or diverge: workers while they compute and inside an average, and the controller."""

import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

import jaxsparse as js
from tests.launch_test import soon
from tests.partial.trainer import START

TRAINER = pathlib.Path(__file__).with_name("trainer.py")


class Processes:
  """Processes of trainer.py, the last one of each worker's number."""

  def __init__(self, folder):
    self.folder, self.all, self.last = folder, [], {}

  def start(self, what, number, address):
    command = [sys.executable, str(TRAINER), what, address, str(number), str(self.folder)]
    with (self.folder / f"{number}.err").open("w") as out:
      self.last[number] = subprocess.Popen(command, stdout=out, stderr=out)
    self.all.append(self.last[number])

  def said(self, number):
    return (self.folder / f"{number}.err").read_text()

  def lines(self, number):
    path = self.folder / f"{number}.log"
    return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def processes(tmp_path):
  found = Processes(tmp_path)
  yield found
  for process in found.all:
    process.kill()
    process.wait()


def test_workers_that_die_return_and_diverge_and_a_lost_controller(processes):
  """Worker 0 diverges; 1 is suspended; 2 kills itself inside an average; 3 is killed while it computes, and restarted.

  The diverged model enters no average; the log names the leaf that is not finite. Then the controller ends, which is an
  exception in the workers that are left, and their parameters are saved.
  """
  controller, lines = js.partial.Controller(4, 2), processes.lines
  with js.partial.Server(controller, limit=1.0) as server:
    for number, what in enumerate(("diverges", "plain", "dies", "stalls")):
      processes.start(what, number, server.address)
    assert processes.last[2].wait(60) == -signal.SIGKILL
    assert soon(lambda: "stalls" in lines(3) and len(lines(1)) > 2)
    assert soon(lambda: "diverges" in lines(0)[:-2])  # and has the model of another one, while there is another one
    processes.last[3].send_signal(signal.SIGKILL)
    processes.start("plain", 3, server.address)
    processes.last[1].send_signal(signal.SIGSTOP)
    assert soon(lambda: 1 not in controller.alive)  # dropped, although its connections are intact
    processes.last[1].send_signal(signal.SIGCONT)
    paused = len(lines(1))
    assert soon(lambda: 1 in controller.alive and len(lines(1)) > paused + 10)
    assert soon(lambda: len(lines(3)) > lines(3).index("stalls") + 10)
  for number in (0, 1, 3):
    assert processes.last[number].wait(60) == 1
    assert "ControllerLost: no sign of life from the controller at tcp://127.0.0.1:" in processes.said(number)
    params, iteration = js.partial.restore(processes.folder / f"{number}.npz", START)
    assert iteration >= 10
    assert 0.5 < float(np.asarray(params["b"]).min()) <= 1
    found = [float(line.split()[-1]) for line in lines(number) if line not in ("diverges", "stalls")]
    assert np.isfinite(found).all()
  began = lines(3)[lines(3).index("stalls") + 1].split()
  assert began[0] == "begins"
  assert int(began[1]) > 0 < float(began[2])  # the trained model of another worker
  assert "worker 0: params['b'] of iteration" in processes.said(0)
