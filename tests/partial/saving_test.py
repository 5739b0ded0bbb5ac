"""A controller that is lost, the file of a worker's parameters, and a process that is killed while it writes it."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js

KILLED = """
  import os, signal, sys, time
  import jax.numpy as jnp, numpy as np, jaxsparse as js

  savez = np.savez
  def half(file, **content):
    savez(file, **content)
    name = file if isinstance(file, (str, os.PathLike)) else file.name
    getattr(file, "flush", lambda: None)()
    os.truncate(name, os.path.getsize(name) // 2)
    os.kill(os.getpid(), signal.SIGKILL)
  np.savez = half
  server = js.partial.Server(js.partial.Controller(2, 2), limit=0.5).__enter__()
  worker = js.partial.Worker(server.address, 0, jnp.zeros(1000), save=sys.argv[1], reconnect=0.1)
  server._controller.leave(1)
  worker.reduce(jnp.ones(1000), 1)
  server.__exit__()
  time.sleep(60)
"""


def test_a_kill_while_saving_keeps_the_former_file_and_leaves_nothing(tmp_path):
  """The next worker that has the file removes what the killed one was writing."""
  path = tmp_path / "saved.npz"
  np.savez(path, iteration=7, **{"": np.full(1000, 3, np.float32)})
  former = path.read_bytes()
  command = [sys.executable, "-c", textwrap.dedent(KILLED), str(path)]
  assert subprocess.run(command, timeout=100, check=False).returncode == -signal.SIGKILL
  assert path.read_bytes() == former
  assert js.partial.restore(path, jnp.zeros(1000))[1] == 7
  other = tmp_path / ".other.npz.1.npz"  # of another file
  other.touch()
  controller = js.partial.Controller(2, 2)
  with js.partial.Server(controller) as server, js.partial.Worker(server.address, 0, jnp.zeros(1000), save=path):
    assert sorted(tmp_path.iterdir()) == sorted([path, other])


@contextlib.contextmanager
def deserted(params, path):
  """(a worker whose controller has just ended, the parameters of its iteration 3)."""
  server = js.partial.Server(js.partial.Controller(2, 2), limit=0.4).__enter__()
  with js.partial.Worker(server.address, 0, params, save=path, reconnect=0.1) as worker:
    server._controller.leave(1)
    held, _ = worker.reduce(params, 3)
    server.__exit__()
    yield worker, held


@pytest.mark.parametrize("computes", [True, False])
def test_every_call_after_the_controller_is_lost_raises_it_and_leaving_ends_normally(tmp_path, computes):
  """Also if the training loop made no call meanwhile. The parameters are saved, whatever their dtype."""
  params, path = {"w": jnp.full((2, 3), 1.5, jnp.bfloat16), "b": jnp.zeros(4)}, tmp_path / "saved.npz"
  with deserted(params, path) as (worker, held):
    if computes:
      worker._runtime.join(60)
    for call in (worker.reduce, worker.reduce, worker.synchronize):
      with pytest.raises(js.partial.ControllerLost, match="no sign of life from the controller at tcp://.* for 0.5 s"):
        call(params, 4)
  found, iteration = js.partial.restore(path, params)
  assert iteration == 3 if computes else iteration in (3, 4)
  content = lambda tree: jax.tree.map(lambda leaf: (leaf.dtype, leaf.tolist()), tree)
  assert content(found) == content(held)
  for like, message in (
    ({**params, "b": jnp.zeros(5)}, r"holds \['b'\] of shape \(4,\), the model's has \(5,\)"),
    ({"a": jnp.zeros(3)}, r"holds \['b'\], \['w'\], iteration, the model has \['a'\]"),
  ):
    with pytest.raises(ValueError, match=message):
      js.partial.restore(path, like)


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
  """The disk is full in the middle of it, for example; the error says why."""

  def full(file, **_):
    pathlib.Path(file if isinstance(file, os.PathLike) else file.name).write_bytes(b"half")
    raise OSError("No space left on device")

  path = tmp_path / "saved.npz"
  path.write_bytes(b"former")
  monkeypatch.setattr(np, "savez", full)
  message = "could not be saved: No space left on device"
  with deserted(jnp.ones(3), path) as (worker, _), pytest.raises(js.partial.ControllerLost, match=message):
    worker.reduce(jnp.ones(3), 4)
  assert path.read_bytes() == b"former"
  assert list(tmp_path.iterdir()) == [path]
