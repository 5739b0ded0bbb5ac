"""The papers' recipes, presets.toml, as presets of the race's flags."""

import pathlib
import tomllib
from typing import Any, Literal, NamedTuple

from absl import flags

from benchmarks.race.results import Results
from benchmarks.race.standings import Target, standings


class Ratio(NamedTuple):
  """A number of a paper's that compares two methods."""

  above: str  # the method whose number is divided
  below: str  # the method by whose number
  of: Literal["seconds", "loss", "pace"]  # seconds to the same loss, the loss after as many steps, or seconds a step


class Preset(NamedTuple):
  """Flags of a paper's recipe; their numbers of steps fit this machine."""

  paper: str  # whose it is, and where
  flags: dict[str, Any]  # their values
  paper_steps: int  # of the paper's training
  cells: dict[str, Ratio]  # of `paper_tables.toml`, which a race with these flags measures

  def measured(self, results: Results, target: Target) -> dict[str, float]:
    """Our numbers of the cells at the first rate, by name, where both methods have one from every seed."""
    if any(results.setting.get(name) != self.flags[name] for name in ("task", "hosts")):
      return {}
    rate = self.flags.get("rate", [""])[0]
    known = {(pace.method, "pace"): pace.seconds for pace in results.find("paces", rate=rate)}
    for one in (one for one in standings(results, rate, target) if one.optimizer in self.flags["optimizer"]):
      spreads = {"seconds": one.seconds, "loss": one.loss}
      known |= {(one.method, of): spread.mean for of, spread in spreads.items() if spread and not spread.missing}
    pairs = {name: ((cell.above, cell.of), (cell.below, cell.of)) for name, cell in self.cells.items()}
    return {name: known[a] / known[b] for name, (a, b) in pairs.items() if a in known and b in known}


def _read() -> dict[str, Preset]:
  """The presets of the file by name."""
  content, found = tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text()), {}
  for name, own in content["preset"].items():
    cells = {cell: Ratio(*ratio) for cell, ratio in own.get("cells", {}).items()}
    found[name] = Preset(own["paper"], content["base"][own["base"]] | own["flags"], own["paper_steps"], cells)
  return found


PRESETS = _read()
HELP = "A paper's recipe, as values of flags that are not given: " + "; ".join(
  f"{name}: {preset.paper}, {preset.paper_steps:,} steps there" for name, preset in PRESETS.items()
)


def apply(name: str | None) -> None:
  """Gives flags that are not given the values of a preset."""
  for flag, value in PRESETS[name].flags.items() if name else ():
    if not flags.FLAGS[flag].present:
      flags.FLAGS.set_default(flag, value)
