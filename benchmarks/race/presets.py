"""The papers' recipes as presets of the race's flags."""

from collections.abc import Mapping
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
  cells: Mapping[str, Ratio] = {}  # of `paper_tables.toml`, which a race with these flags measures

  def measured(self, results: Results, target: Target) -> dict[str, float]:
    """Our numbers of the cells at the first rate, by name, where both methods have one from every seed.

    None where the results are of another task or number of workers; other optimizers do not count.
    """
    if any(results.setting.get(name) != self.flags[name] for name in ("task", "hosts")):
      return {}
    rate = self.flags.get("rate", [""])[0]
    known = {(pace.method, "pace"): pace.seconds for pace in results.find("paces", rate=rate)}
    for one in (one for one in standings(results, rate, target) if one.optimizer in self.flags["optimizer"]):
      spreads = {"seconds": one.seconds, "loss": one.loss}
      known |= {(one.method, of): spread.mean for of, spread in spreads.items() if spread and not spread.missing}
    pairs = {name: ((cell.above, cell.of), (cell.below, cell.of)) for name, cell in self.cells.items()}
    return {name: known[a] / known[b] for name, (a, b) in pairs.items() if a in known and b in known}


def _preset(paper: str, flags: dict[str, Any], epochs: int, examples: int, cells: Mapping[str, Ratio] = {}) -> Preset:
  """A recipe whose paper says how many epochs it trains."""
  return Preset(paper, flags, round(epochs * examples / (flags["hosts"] * flags["batch_size"])), cells)


def _spardl(model: str, panel: str) -> dict[str, Ratio]:
  """How much later than SparDL others have the same loss (Figure 6), and how much longer their steps are (Table 3)."""
  others = {name: label for name, label in _SPARSE.items() if name != "SparDL"}
  later = {f"{name}, {model} ({panel})": Ratio(label, _SPARSE["SparDL"], "seconds") for name, label in others.items()}
  return later | {f"{name}, {model}": Ratio(label, _SPARSE["SparDL"], "pace") for name, label in others.items()}


def _losses(task: str) -> dict[str, Ratio]:
  """The losses of A2SGD's Tables III and IV, over dense's."""
  return {f"{name}, {task}": Ratio(label, "dense", "loss") for name, label in _COMPRESSED.items()}


def _oktopk(density: float) -> list[str]:
  return ["dense", *(f"{name}:density={density}" for name in ("oktopk", "topka", "topkdsa", "gaussiank", "gtopk"))]


_SPARSE = {
  name: f"{label}:density=0.01"
  for name, label in (("SparDL", "spardl:teams=2"), ("Ok-Topk", "oktopk"), ("TopkA", "topka"), ("TopkDSA", "topkdsa"))
}
_SPARDL: dict[str, Any] = {
  "hosts": 6,
  "batch_size": 16,
  "rate": ["1gbit", "100mbit"],  # the paper has the first
  "optimizer": ["sgd:0.1"],
  "schedule": "step",
  "clip": 0.0,
  "method": ["dense", *_SPARSE.values()],
}
_LSTM = {"task": "lstm", "batch_size": 1, "optimizer": ["sgd:0.3"], "schedule": "early_step"}
_OKTOPK: dict[str, Any] = {"hosts": 16, "batch_size": 16, "schedule": "linear", "clip": 0.0}
_FIGURE9 = {"task": "vgg16", "optimizer": ["sgd:0.1"], "method": _oktopk(0.02)}
_BERT = {"task": "bert", "optimizer": ["adamw:0.0002"], "batch_size": 8, "hosts": 32, "method": _oktopk(0.01)}
_COMPRESSED = {
  "A2SGD": "a2sgd",
  "Top-K": "topka:density=0.001",
  "Gaussian-K": "gaussiank:density=0.001",
  "QSGD": "qsgd:levels=4",
}
_A2SGD: dict[str, Any] = {
  "hosts": 8,
  "batch_size": 128,
  "schedule": "polynomial",
  "warm_up": 10,
  "clip": 0.0,
  "method": ["dense", *_COMPRESSED.values()],
}

_CIFAR10, _MNIST, _IMDB = 50_000, 60_000, 25_000  # examples to train on
_ADAM = {"task": "resnet20", "optimizer": ["adam:0.01"], "schedule": "constant", "warm_up": 0}
_LARS = {"task": "vgg16", "optimizer": ["lars:1.2"]}  # 0.1 for each of 8 workers, × 1.5: LS(1.5 ×)
PRESETS: dict[str, Preset] = {
  "spardl-fig6a": _preset("SparDL, Figure 6 (a)", _SPARDL | {"task": "vgg16"}, 120, _CIFAR10, _spardl("VGG-16", "a")),
  "spardl-fig6c": _preset(
    "SparDL, Figure 6 (c)",
    _SPARDL | {"task": "resnet20"},
    120,
    _CIFAR10,
    _spardl("ResNet-20", "c")
    | {"Ok-Topk / TopkA, ResNet-20 (c)": Ratio(_SPARSE["Ok-Topk"], _SPARSE["TopkA"], "seconds")},
  ),
  "spardl-fig6d": _preset("SparDL, Figure 6 (d)", _SPARDL | _LSTM, 30, _IMDB, _spardl("LSTM", "d")),
  "oktopk-fig9": _preset("Ok-Topk, Figure 9", _OKTOPK | _FIGURE9, 160, _CIFAR10),
  "oktopk-fig13": Preset("Ok-Topk, Figure 13", _OKTOPK | _BERT, 400_000),
  "a2sgd-fnn3": _preset(
    "A2SGD, Table I and Figure 4", _A2SGD | {"task": "fnn3", "optimizer": ["sgd:0.08"]}, 30, _MNIST, _losses("FNN-3")
  ),
  "a2sgd-vgg16": _preset("A2SGD, Table I and Figure 4", _A2SGD | _LARS, 150, _CIFAR10),
  "a2sgd-resnet20": _preset(
    "A2SGD, Table I and Figure 4", _A2SGD | {"task": "resnet20", "optimizer": ["sgd:0.8"]}, 150, _CIFAR10
  ),
  "a2sgd-adam": _preset("A2SGD, Table IV", _A2SGD | _ADAM, 150, _CIFAR10, _losses("ResNet-20, Adam")),
}
HELP = "A paper's recipe, as values of flags that are not given: " + "; ".join(
  f"{name}: {preset.paper}, {preset.paper_steps:,} steps there" for name, preset in PRESETS.items()
)


def apply(name: str | None) -> None:
  """Gives flags that are not given the values of a preset."""
  for flag, value in PRESETS[name].flags.items() if name else ():
    if not flags.FLAGS[flag].present:
      flags.FLAGS.set_default(flag, value)
