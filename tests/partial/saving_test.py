"""The file of a worker's parameters: of a lost controller, of a process that is killed while it writes it."""

import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.partial.groups import saving

KILLED = """
  import os, pathlib, signal, sys
  import numpy as np
  from jaxsparse.partial.groups import saving

  def half(file, **content):
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
  np.savez = half
  saving.save(pathlib.Path(sys.argv[1]), np.ones(1000), 1)
"""


def test_a_kill_while_saving_keeps_the_former_file_and_leaves_nothing(tmp_path):
  """The next worker that has the file removes what the killed one was writing."""
  # the latter belongs to another file
  path, other = (
    tmp_path / "saved.npz",
    tmp_path / ".other.npz.1.npz",
  )
  np.savez(path, iteration=7, **{"": np.full(1000, 3, np.float32)})
  other.touch()
  former = path.read_bytes()
  command = [sys.executable, "-c", textwrap.dedent(KILLED), str(path)]
  assert subprocess.run(command, timeout=100, check=False).returncode == -signal.SIGKILL
  assert path.read_bytes() == former
  assert js.partial.restore(path, jnp.zeros(1000))[1] == 7
  assert len(list(tmp_path.iterdir())) == 3
  with js.partial.Server(js.partial.Controller(2, 2)) as server:
    js.partial.Worker(server.address, 0, jnp.zeros(1000), save=path).leave()
  assert sorted(tmp_path.iterdir()) == sorted([path, other])


@pytest.mark.parametrize("computes", [True, False])
def test_every_call_after_the_controller_is_lost_raises_it_and_leaving_ends_normally(
  tmp_path, computes
):
  """Also if the training loop made no call meanwhile. The parameters are saved, whatever their dtype."""
  params, path = (
    {"w": jnp.full((2, 3), 1.5, jnp.bfloat16), "b": jnp.zeros(4)},
    tmp_path / "saved.npz",
  )
  server = js.partial.Server(js.partial.Controller(2, 2), limit=0.4).__enter__()
  with js.partial.Worker(server.address, 0, params, save=path, reconnect=0.1) as worker:
    server._controller.leave(1)
    held, _ = worker.reduce(params, 3)
    server.__exit__()
    if computes:
      worker._endpoint._thread.join(60)
    for call in (worker.reduce, worker.reduce, worker.synchronize):
      with pytest.raises(
        js.partial.ControllerLost,
        match="no sign of life from the controller at tcp://.* for 0.5 s",
      ):
        call(params, 4)
  found, iteration = js.partial.restore(path, params)
  assert iteration == 3 if computes else iteration in (3, 4)
  content = lambda tree: jax.tree.map(lambda leaf: (leaf.dtype, leaf.tolist()), tree)
  assert content(found) == content(held)
  for like, message in (
    (
      {**params, "b": jnp.zeros(5)},
      r"holds arrays of the shapes .*b'\]\": \(4,\).* the model's are .*b'\]\": \(5,\)",
    ),
    ({"a": jnp.zeros(3)}, r"\['w'\].* the model's are {\"\['a'\]\": \(3,\)}"),
  ):
    with pytest.raises(ValueError, match=message):
      js.partial.restore(path, like)


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
  """The disk is full in the middle of it, for example; the error says why."""

  def full(file, **_):
    file.write(b"half")
    raise OSError("No space left on device")

  path = tmp_path / "saved.npz"
  path.write_bytes(b"former")
  monkeypatch.setattr(np, "savez", full)
  assert "could not be saved: No space left on device" in saving.save(
    path, jnp.ones(3), 4
  )
  assert path.read_bytes() == b"former"
  assert list(tmp_path.iterdir()) == [path]
