"""The command `python -m jaxsparse.partial`."""

import subprocess
import sys

import jax.numpy as jnp
import pytest

import jaxsparse as js
from jaxsparse.partial.__main__ import main


def test_the_command_line(tmp_path, monkeypatch):
  """A controller as a program, with keys that it makes; it ends with its last worker."""
  command = [sys.executable, "-m", "jaxsparse.partial", "--workers=2", "--group_size=2", f"--keys={tmp_path / 'keys'}"]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    address = process.stdout.readline().strip()
    keys = js.partial.Keys.read(tmp_path / "keys")
    assert (tmp_path / "keys").stat().st_mode & 0o077 == 0
    workers = [js.partial.Worker(address, number, jnp.zeros(2), keys=keys, timeout=30) for number in range(2)]
    for worker in workers:
      worker.leave()
    assert process.wait(30) == 0
  monkeypatch.setattr(sys, "argv", ["jaxsparse.partial", "--workers=2", "--group_size=3"])
  with pytest.raises(SystemExit, match="^error: group_size=3, choose a whole number in 2 … 2, the number of workers$"):
    main()
