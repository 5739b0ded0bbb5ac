"""The signals that end a program, as exceptions that leave time to clean up."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
  """Lets the signals that end a program end a block by an exception, and defers them during the clean-up.

  A program's own handlers are called as before, and signals that it ignores (nohup) stay ignored.
  """

  def __init__(self) -> None:
    self._before: dict[int, Any] = {}
    self._held = False
    self._late: int | None = None

  def __enter__(self) -> "Signals":
    if threading.current_thread() is threading.main_thread():  # the only one that may have handlers
      for number in SIGNALS:
        before = signal.getsignal(number)
        if before not in (signal.SIG_IGN, None):
          self._before[number] = before
          signal.signal(number, self._arrived)
    return self

  def hold(self) -> None:
    """From now on signals wait for the end of the `with` block."""
    self._held = True

  def _arrived(self, number: int, frame: FrameType | None) -> None:
    before = self._before[number]
    if self._held:
      self._late = number
    elif callable(before):  # among them Python's own for SIGINT, which raises KeyboardInterrupt
      before(number, frame)
    else:
      raise SystemExit(128 + number)

  def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
    for number, before in self._before.items():
      signal.signal(number, before)
    if self._late is not None and error is None:  # otherwise the program is on its way out anyway
      signal.raise_signal(self._late)
