"""Processes of a benchmark are watched: the events that they write, a JSON object a line, and waits for them."""

import contextlib
import json
import pathlib
import time
from collections.abc import Callable, Iterable
from typing import Any


def events(paths: Iterable[pathlib.Path], kinds: Iterable[str]) -> list[dict[str, Any]]:
  """The events of these kinds in files, in order of time."""
  # Lines are searched as text before they are parsed, since most are other events.
  wanted = [f'"event": "{kind}"' for kind in kinds]
  found = []
  for path in paths:
    for line in path.read_text().splitlines():
      if any(words in line for words in wanted):
        with contextlib.suppress(ValueError):  # half a line of one that was killed
          found.append(json.loads(line))
  return sorted(found, key=lambda event: event["time"])


def wait(
  holds: Callable[[], bool],
  what: str,
  outputs: Iterable[pathlib.Path] = (),
  *,
  seconds: float = 240.0,
  pause: float = 0.5,
) -> None:
  """Waits until a condition holds; RuntimeError with the ends of `outputs` if it does not in time.

  Args:
    holds: the condition.
    what: the condition in words, for the error.
    outputs: files whose last 3,000 characters the error has.
    seconds: how long to wait.
    pause: seconds from one look to the next.
  """
  end = time.monotonic() + seconds
  while not holds():
    if time.monotonic() > end:
      tails = [path.read_text()[-3000:] for path in outputs]
      raise RuntimeError("\n".join([f"waited {seconds:g} s for {what}", *tails]))
    time.sleep(pause)
