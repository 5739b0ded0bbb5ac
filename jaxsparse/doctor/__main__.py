"""The command line: `python -m jaxsparse.doctor`."""

import argparse
import json
import sys

from jaxsparse import launch
from jaxsparse.doctor.checks import TIMEOUT, find


def main() -> None:
  """Prints each finding as soon as it is there; the exit status is 1 if one is "FAIL", else 0."""
  description = "Reports what this installation can do, and for everything that it cannot do, a fix."
  parser = argparse.ArgumentParser(prog="python -m jaxsparse.doctor", description=description)
  limit = "seconds for a program of two workers (%(default)g)"
  parser.add_argument("--timeout", type=float, default=TIMEOUT, help=limit)
  parser.add_argument("--json", action="store_true", help="a list of objects instead of lines")
  options = parser.parse_args()
  if launch.is_rank():
    parser.error("this process is a rank of a run: start the doctor by itself, it starts ranks of its own")
  found = []
  for finding in find(options.timeout):
    found.append(finding)
    if not options.json:
      print(finding, flush=True)
  if options.json:
    print(json.dumps([finding._asdict() for finding in found], indent=2))
  sys.exit(any(finding.status == "FAIL" for finding in found))


if __name__ == "__main__":
  main()
