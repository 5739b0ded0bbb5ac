"""The hooks of whole_run.py: parts of all tests, and what a run leaves behind."""

import itertools
import os
import pathlib
import subprocess
import time
import types

import pytest

from tests import whole_run
from tests.launch_test import gone


def part(text, items):
  hook = types.SimpleNamespace(pytest_deselected=lambda **_: None)
  whole_run.pytest_collection_modifyitems(
    types.SimpleNamespace(getoption=lambda _: text, hook=hook), items
  )
  return items


def test_parts_together_are_all_tests():
  parts = [part(f"{number}/3", [*range(100)]) for number in (1, 2, 3)]
  assert sorted(itertools.chain(*parts)) == [*range(100)]
  assert part(None, [1, 2]) == [1, 2]


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "-1/3", "1/0"])
def test_what_is_no_part(text):
  with pytest.raises(
    pytest.UsageError, match=f"--part={text}, choose one of 1/N … N/N"
  ):
    whole_run.parse_part(text)


def test_a_process_that_is_left_is_named_and_ended(monkeypatch):
  monkeypatch.setattr(whole_run, "_GRACE", 0.1)
  with subprocess.Popen(
    ["sleep", "300"], env=os.environ | {whole_run.MARK: str(os.getpid())}
  ) as process:
    environment = pathlib.Path(f"/proc/{process.pid}/environ")
    # the kernel sets it a little after `Popen` returns
    while whole_run.MARK.encode() not in environment.read_bytes():
      time.sleep(0.01)
    assert whole_run.end_processes() == [f"process {process.pid}: sleep 300"]
  assert gone(process.pid)
  assert whole_run.end_processes() == []
