"""Processes that die or stop: workers while they compute and inside an average, and the controller."""

import contextlib
import signal
import subprocess
import sys

import numpy as np
import pytest

import jaxsparse as js
from tests.launch_test import soon
from tests.partial.trainer import START


@pytest.fixture
def start(tmp_path):
  """Starts a process of trainer.py, which ends with the test."""
  with contextlib.ExitStack() as ends:

    def start(what, number, address):
      command = [sys.executable, "-m", "tests.partial.trainer", what, address, str(number), str(tmp_path)]
      with (tmp_path / f"{number}.log").open("a") as out:
        process = ends.enter_context(subprocess.Popen(command, stdout=out, stderr=out))
      ends.callback(process.kill)
      return process

    yield start


def test_workers_that_die_and_return_and_a_lost_controller(start, tmp_path):
  """Worker 1 is suspended, 2 kills itself inside an average, 3 is killed while it computes, and restarted.

  Then the controller ends, which is an exception in the workers that are left, and their parameters are saved.
  """
  lines = lambda number: (tmp_path / f"{number}.log").read_text().splitlines()
  controller = js.partial.Controller(4, 2)
  with js.partial.Server(controller, limit=1.0) as server:
    workers = [start(what, number, server.address) for number, what in enumerate(("", "", "dies", ""))]
    assert workers[2].wait(60) == -signal.SIGKILL
    assert soon(lambda: min(len(lines(1)), len(lines(3))) > 10)
    workers[3].kill()
    workers[3].wait()
    killed = len(lines(3))
    workers[3] = start("", 3, server.address)
    workers[1].send_signal(signal.SIGSTOP)
    assert soon(lambda: 1 not in controller.alive)  # dropped, although its connections are intact
    workers[1].send_signal(signal.SIGCONT)
    paused = len(lines(1))
    assert soon(lambda: 1 in controller.alive and len(lines(1)) > paused + 10)
    assert soon(lambda: len(lines(3)) > killed + 10)
  for number in (0, 1, 3):
    assert workers[number].wait(60) == 1
    assert "ControllerLost: no sign of life from the controller at tcp://127.0.0.1:" in lines(number)[-1]
    params, iteration = js.partial.restore(tmp_path / f"{number}.npz", START)
    assert iteration >= 10
    assert 0.5 < float(np.asarray(params["b"]).min()) <= 1
  iteration, value = lines(3)[killed].split()
  assert int(iteration) > 0 < float(value)  # the trained model of another worker
