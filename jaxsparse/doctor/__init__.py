"""Reports what this installation can do, and for everything that it cannot do, a fix.

    python -m jaxsparse.doctor
    python -m jaxsparse.doctor --json | jq '.[] | select(.status != "ok")'

It checks versions, devices, huge pages and MPI, and lets two workers reduce known gradients on each engine. Every check
that could hang, abort or hold a GPU runs in a process of its own with a time limit. The exit status is 1 if a check
failed, 0 otherwise: a warning concerns features that not everybody needs.

`checks` are the checks, `probes` the programs that they start.
"""

from jaxsparse.doctor.checks import examine

__all__ = ["examine"]
