"""Processes that die or stop: workers while they compute, inside an average or a round, and the server."""

import contextlib
import signal
import subprocess
import sys

import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.launch.start import free_port
from tests.launch_test import soon
from tests.partial.trainer import START


@pytest.fixture
def start(tmp_path):
  """Starts a process of a module of tests.partial, which ends with the test."""
  with contextlib.ExitStack() as ends:

    def start(what, number, address, module="trainer"):
      command = [
        sys.executable,
        "-m",
        f"tests.partial.{module}",
        what,
        address,
        str(number),
        str(tmp_path),
      ]
      with (tmp_path / f"{number}.log").open("a") as out:
        process = ends.enter_context(subprocess.Popen(command, stdout=out, stderr=out))
      ends.callback(process.kill)
      return process

    yield start


@pytest.mark.long
def test_workers_that_die_and_return_and_a_lost_controller(start, tmp_path):
  """Worker 1 is suspended, 2 kills itself inside an average, 3 is killed while it computes, and restarted.

  Then the controller ends, which is an exception in the workers that are left, and
  their parameters are saved.
  """
  # without one being written
  lines = lambda number: (tmp_path / f"{number}.log").read_text().split("\n")[:-1]
  controller = js.partial.Controller(4, 2)
  with js.partial.Server(controller, limit=1.0) as server:
    workers = [
      start(what, number, server.address)
      for number, what in enumerate(("", "", "dies", ""))
    ]
    assert workers[2].wait(60) == -signal.SIGKILL
    assert soon(lambda: min(len(lines(1)), len(lines(3))) > 10)
    workers[3].kill()
    workers[3].wait()
    killed = len(lines(3))
    workers[3] = start("", 3, server.address)
    workers[1].send_signal(signal.SIGSTOP)
    # dropped, although its connections are intact
    assert soon(lambda: 1 not in controller.alive)
    workers[1].send_signal(signal.SIGCONT)
    paused = len(lines(1))
    assert soon(lambda: 1 in controller.alive and len(lines(1)) > paused + 10)
    assert soon(lambda: len(lines(3)) > killed + 10)
  for number in (0, 1, 3):
    assert workers[number].wait(60) == 1
    assert (
      "ControllerLost: no sign of life from the controller at tcp://127.0.0.1:"
      in lines(number)[-1]
    )
    params, iteration = js.partial.restore(tmp_path / f"{number}.npz", START)
    assert iteration >= 10
    assert 0.5 < float(np.asarray(params["b"]).min()) <= 1
  iteration, value = lines(3)[killed].split()
  assert int(iteration) > 0 < float(value)  # the trained model of another worker


@pytest.mark.long
def test_rounds_go_on_whoever_dies(start, tmp_path):
  """Worker 2 kills itself inside a round and is started again, 1 is suspended, and the server is replaced.

  The workers that have been through a round have the same anchor after it, and all that
  live are in the last rounds.
  """
  address = f"tcp://127.0.0.1:{free_port()}"
  serve = lambda: js.partial.Server(
    js.partial.Quorum(3, quorum=2, grace=0.3), address, limit=1.0
  )
  # without one being written
  whole = lambda number: (tmp_path / f"{number}.log").read_text().split("\n")[:-1]
  rounds = lambda number: [
    line.split() for line in whole(number) if line.startswith("round ")
  ]
  members = lambda: {
    group for number in range(3) for _, _, _, group in rounds(number)[-1:]
  }
  with serve() as server:
    workers = [
      start(what, number, server.address, "round_trainer")
      for number, what in enumerate(("", "", "dies"))
    ]
    assert workers[2].wait(90) == -signal.SIGKILL
    died = len(rounds(0))
    assert soon(lambda: len(rounds(0)) > died + 3)
    workers[2] = start("", 2, server.address, "round_trainer")
    assert soon(lambda: members() == {"0,1,2"})
    workers[1].send_signal(signal.SIGSTOP)
    assert soon(lambda: rounds(0)[-1][3] == "0,2" and 1 not in server._controller.alive)
    workers[1].send_signal(signal.SIGCONT)
    assert soon(lambda: members() == {"0,1,2"})
    assert server._controller.lost == 2
  stopped = len(rounds(0))
  with serve():
    assert soon(
      lambda: (
        min(len(rounds(number)) for number in (0, 1, 2)) > 3
        and len(rounds(0)) > stopped + 3
      )
    )
    assert soon(lambda: members() == {"0,1,2"})
    anchors = {}
    for number in range(3):
      for _, group, digest, _ in rounds(number):
        assert anchors.setdefault(group, digest) == digest
    assert all(worker.poll() is None for worker in workers)
