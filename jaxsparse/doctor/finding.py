"""The result of one check."""

from typing import Literal, NamedTuple

Status = Literal["ok", "warn", "FAIL"]


class Finding(NamedTuple):
  """The result of one check.

  Attributes:
    status: "ok", "warn" where a feature that not everybody needs is missing, "FAIL" where something is broken.
    what: the subject of the check.
    detail: what the check found; several lines where a program failed.
    fix: what to do; empty where nothing is to be done.

  Example:
    >>> print(Finding("warn", "MPI", "mpi4jax is not installed", "make install"))
    warn MPI: mpi4jax is not installed
         fix: make install
  """

  status: Status
  what: str
  detail: str
  fix: str = ""

  def __str__(self) -> str:
    text = f"{self.status:4} {self.what}: {self.detail}" + (f"\nfix: {self.fix}" if self.fix else "")
    return text.replace("\n", "\n     ")
