"""The command line: `python -m jaxsparse.doctor`."""

import argparse
import json
import sys
from collections.abc import Iterator

from jaxsparse import launch
from jaxsparse.doctor import engines, machine, mpi
from jaxsparse.doctor.finding import Finding

TIMEOUT = 60.0  # seconds for a program of two workers


def examine(timeout: float = TIMEOUT) -> list[Finding]:
  """The findings of all checks, which the command prints.

  Args:
    timeout: seconds that each program of two workers may take.

  Example:
    >>> from jaxsparse import doctor
    >>> [finding.what for finding in doctor.examine() if finding.status == "FAIL"]  # takes a while  # doctest: +SKIP
    []
  """
  return list(_findings(timeout))


def main() -> None:
  """Prints each finding as soon as it is there; the exit status is 1 if one is "FAIL", else 0."""
  description = "Reports what this installation can do, and for everything that it cannot do, a fix."
  parser = argparse.ArgumentParser(prog="python -m jaxsparse.doctor", description=description)
  parser.add_argument(
    "--timeout", type=float, default=TIMEOUT, help="seconds for a program of two workers (%(default)g)"
  )
  parser.add_argument("--json", action="store_true", help="a list of objects instead of lines")
  parser.add_argument("--probe", help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.probe:
    from jaxsparse.doctor import probes  # imports JAX, which the doctor itself does without

    probes.answer(options.probe)
    return
  if launch.is_rank():
    parser.error("this process is a rank of a run: start the doctor by itself, it starts ranks of its own")
  found = []
  for finding in _findings(options.timeout):
    found.append(finding)
    if not options.json:
      print(finding, flush=True)
  if options.json:
    print(json.dumps([finding._asdict() for finding in found], indent=2))
  sys.exit(any(finding.status == "FAIL" for finding in found))


def _findings(timeout: float) -> Iterator[Finding]:
  """All findings, one by one."""
  yield machine.versions()
  yield from machine.devices(timeout)
  yield from machine.huge_pages()
  for engine in ("devices", "sim", "processes"):
    yield engines.check(engine, timeout)
  yield engines.check_scatter(timeout)
  yield from mpi.check(timeout)
