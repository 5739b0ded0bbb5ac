"""Warnings that are repeated for as long as their cause lasts: said at once, then rarely, with how often."""

import logging
from collections.abc import Hashable

_PAUSE = 10.0  # seconds after which a warning that is repeated is said again, at first
_LONGEST = 80.0  # the longest such pause, in seconds
_MOST = 1000  # kinds of warnings that are remembered


class Warnings:
  """The warnings of a protocol; one of a kind that lasts is said after 10, 20, 40 and then every 80 seconds.

  Args:
    logger: the logger of the module.

  Attributes:
    _said: by kind: when it was logged last, the pause in seconds before it is logged
      again, and how often it was left out since.

  Example:
    >>> import logging
    >>> warnings = Warnings(logging.getLogger("example"))
    >>> [warnings.say(("behind", 3), "worker 3 is behind", now) for now in (0.0, 1.0, 2.0, 12.0)]
    [True, False, False, True]
  """

  def __init__(self, logger: logging.Logger):
    self._logger = logger
    self._said: dict[Hashable, tuple[float, float, int]] = {}

  def say(self, kind: Hashable, text: str, now: float) -> bool:
    """Logs a warning unless one of its kind was logged a short time ago; returns whether it is logged.

    Args:
      kind: the same for warnings whose texts differ in numbers only.
      text: the message.
      now: the time in seconds.
    """
    # Removed and inserted again: so the dict begins with the kind that `say` was called
    # with longest ago, which is forgotten first.
    said, pause, unsaid = self._said.pop(kind, (-float("inf"), _PAUSE, 0))
    is_due = now >= said + pause
    if is_due:
      often = f" ({unsaid} more like this in {now - said:.0f} s)" if unsaid else ""
      self._logger.warning(text + often)
      # The pause is doubled while the cause lasts: the warning comes again within twice
      # the pause. Else pauses begin short again.
      lasts = now < said + 2 * pause
      self._said[kind] = now, min(2 * pause, _LONGEST) if lasts else _PAUSE, 0
    else:
      self._said[kind] = said, pause, unsaid + 1
    while len(self._said) > _MOST:
      del self._said[next(iter(self._said))]
    return is_due
