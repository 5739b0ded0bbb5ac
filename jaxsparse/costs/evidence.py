"""What trainings have taught: the steps that a method takes to dense's loss, over those of dense."""

import importlib.resources
import json
from typing import NamedTuple


class Evidence(NamedTuple):
  """The steps of a method to the loss that dense reaches on one task, measured from several seeds.

  Attributes:
    method: what workers exchange, and by which collective: "local:every=8/spardl:density=0.3" stands for local steps,
      "updates/spardl" for an optimizer of each worker's own before the exchange, "spardl" for gradients.
    collective: its label, with options.
    every: H, the number of steps from one exchange to the next (`js.local_steps`).
    optimizer: its name, rate and options, "window_adam:0.001:window=4".
    task: what was trained, in words.
    workers: number of workers P.
    steps: mean over the seeds of the steps to dense's loss / those of dense; None if a seed did not reach it.
    deviation: standard deviation of these; None likewise.
    seeds: their number.

  Example:
    >>> one = Evidence("updates/spardl", "spardl", 1, "adam:0.001", "lm", 4, steps=1.25, deviation=0.1, seeds=3)
    >>> str(one)
    "1.25 ± 0.10 times dense's steps (lm, adam:0.001, 4 workers, 3 seeds)"
  """

  method: str
  collective: str
  every: int
  optimizer: str
  task: str
  workers: int
  steps: float | None
  deviation: float | None
  seeds: int

  def __str__(self) -> str:
    many = (
      "never at dense's loss" if self.steps is None else f"{self.steps:.2f} ± {self.deviation:.2f} times dense's steps"
    )
    return f"{many} ({self.task}, {self.optimizer}, {self.workers} workers, {self.seeds} seeds)"


def evidence(optimizer: str | None = None) -> list[Evidence]:
  """The evidence that comes with the library, from trainings with this optimizer; for `js.costs.advise`.

  Args:
    optimizer: its name, "adam", which includes kinds of it like window_adam; None for all.

  Raises:
    ValueError: for an optimizer without evidence, with those that have some.

  Example:
    >>> sorted({one.optimizer.split(":")[0] for one in evidence("adam")})
    ['adam', 'window_adam']
  """
  kept = [Evidence(**row) for row in json.loads(_FILE.read_text())]
  names = [one.optimizer.split(":")[0] for one in kept]
  found = [one for one, name in zip(kept, names, strict=True) if optimizer in (None, name, *name.split("_"))]
  if not found:
    known = dict.fromkeys(names)
    raise ValueError(f"evidence: no training with optimizer={optimizer!r}, choose one of {', '.join(known)}")
  return found


_FILE = importlib.resources.files("jaxsparse.costs") / "evidence.json"
