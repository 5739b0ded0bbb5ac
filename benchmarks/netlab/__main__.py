r"""Runs COMMAND beside a network lab: hosts with a network of their own, joined by a switch, over links of any speed.

Every host is a network namespace, so its programs meet those of other hosts on the wire
only. COMMAND runs outside: it finds the hosts in the variable JAXSPARSE_HOSTS and
starts programs in them. When it ends, or is interrupted, the lab is removed with all
that still runs in it. Needs root and iproute2.

Examples:
  python -m benchmarks.netlab --hosts=6 --rate=1gbit -- python -m jaxsparse.launch
  --ranks=6 -- python train.py python -m benchmarks.netlab --rate=none -- bash
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys

from absl import app, flags

from benchmarks.netlab import LabUnavailable, lab
from benchmarks.netlab.namespaces import GRACE
from jaxsparse.launch.guard import die_with_parent
from jaxsparse.launch.start import HOSTS

_HOSTS = flags.DEFINE_integer("hosts", 6, "Number of hosts.")
_RATE = flags.DEFINE_string(
  "rate",
  "1gbit",
  "Rate of each link as tc writes it, e.g. 10mbit; or none: not shaped.",
)


def _run(command: list[str], extra: dict[str, str]) -> int:
  """Runs COMMAND; its exit status as a shell gives it."""
  # It would go on with hosts that the next lab removes.
  die_with_us = functools.partial(die_with_parent, signal.SIGTERM, os.getpid())
  inherited = {name: value for name, value in os.environ.items() if name != HOSTS}
  try:
    process = subprocess.Popen(command, env=inherited | extra, preexec_fn=die_with_us)
  except OSError as error:
    print(f"error: cannot run {command[0]!r}: {error.strerror}", file=sys.stderr)
    return 127 if isinstance(error, FileNotFoundError) else 126
  try:
    status = process.wait()
  except BaseException as error:
    # Ctrl-C in a terminal has reached it: twice would break its clean-up
    if not isinstance(error, KeyboardInterrupt):
      process.terminate()
    _stop(process)
    raise
  return status if status >= 0 else 128 - status


def _stop(process: "subprocess.Popen[bytes]") -> None:
  """Waits for the end, which SIGTERM, then SIGKILL bring about."""
  try:
    for end in (process.terminate, process.kill):
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
      end()  # of a process that has ended: nothing
  finally:  # also after a second Ctrl-C
    process.kill()
    process.wait()


def main(argv: list[str]) -> int:
  """Runs COMMAND beside a lab."""
  command = argv[1:]
  if not command:
    sys.exit(
      "error: COMMAND is missing, for example: python -m benchmarks.netlab --rate=1gbit -- python train.py"
    )
  try:
    with lab(_HOSTS.value, _RATE.value) as team:
      return _run(command, {HOSTS: json.dumps([host._asdict() for host in team])})
  except ValueError as error:
    sys.exit(f"error: --{error}")
  except LabUnavailable as error:
    sys.exit(f"error: {error}. Or run COMMAND without a lab")
  except KeyboardInterrupt:
    # the lab is gone: another Ctrl-C has nothing left to interrupt
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return 128 + signal.SIGINT


if __name__ == "__main__":
  app.run(main)
