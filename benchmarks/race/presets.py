"""The papers' recipes, presets.toml, as presets of the race's flags."""

import pathlib
import tomllib
from typing import Any, NamedTuple

from absl import flags

from benchmarks.race.results import Results
from benchmarks.race.standings import Target, standings


class Preset(NamedTuple):
  """Flags of a paper's recipe; their numbers of steps fit this machine."""

  paper: str  # whose it is, and where
  flags: dict[str, Any]  # their values
  paper_steps: int  # of the paper's training
  # Of `paper_tables.toml`, which a race with these flags measures: (a, b, "seconds",
  # "loss" or "pace") for the seconds to the same loss, the loss after as many steps, or
  # the seconds a step, of method a / those of b.
  cells: dict[str, tuple[str, str, str]]

  def measured(self, results: Results, target: Target) -> dict[str, float]:
    """Our numbers of the cells at the first rate, by name, where both methods have one from every seed."""
    if any(results.setting.get(name) != self.flags[name] for name in ("task", "hosts")):
      return {}
    rate = self.flags.get("rate", [""])[0]
    known = {
      (pace.method, "pace"): pace.seconds for pace in results.find("paces", rate=rate)
    }
    for one in (
      one
      for one in standings(results, rate, target)
      if one.optimizer in self.flags["optimizer"]
    ):
      spreads = {"seconds": one.seconds, "loss": one.loss}
      known |= {
        (one.method, of): spread.mean
        for of, spread in spreads.items()
        if spread and not spread.missing
      }
    pairs = {
      name: ((above, of), (below, of))
      for name, (above, below, of) in self.cells.items()
    }
    return {
      name: known[a] / known[b]
      for name, (a, b) in pairs.items()
      if a in known and b in known
    }


_FILE = tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text())
PRESETS = {
  name: Preset(
    own["paper"],
    _FILE["base"][own["base"]] | own["flags"],
    own["paper_steps"],
    own.get("cells", {}),
  )
  for name, own in _FILE["preset"].items()
}
HELP = "A paper's recipe, as values of flags that are not given: " + "; ".join(
  f"{name}: {preset.paper}, {preset.paper_steps:,} steps there"
  for name, preset in PRESETS.items()
)


def apply(name: str | None) -> Preset | None:
  """The preset of that name, whose values flags have from now on that are not given."""
  preset = PRESETS[name] if name else None
  for flag, value in preset.flags.items() if preset else ():
    if not flags.FLAGS[flag].present:
      flags.FLAGS.set_default(flag, value)
  return preset
