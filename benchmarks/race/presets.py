"""The papers' recipes as presets of the race's flags."""

from typing import Any, NamedTuple

from absl import flags


class Preset(NamedTuple):
  """Flags of a paper's recipe; their numbers of steps fit this machine.

  Attributes:
    paper: whose it is, and where.
    flags: their values.
    paper_steps: of the paper's training.

  Example:
    >>> PRESETS["spardl-fig6c"].paper_steps  # 120 epochs of 50,000 images, 6 workers with 16 each
    62500
  """

  paper: str
  flags: dict[str, Any]
  paper_steps: int


def _preset(paper: str, flags: dict[str, Any], epochs: int, examples: int) -> Preset:
  """A recipe whose paper says how many epochs it trains."""
  return Preset(paper, flags, round(epochs * examples / (flags["hosts"] * flags["batch_size"])))


def _race(*labels: str) -> list[str]:
  return ["dense", *labels]


def _oktopk(density: float) -> list[str]:
  return _race(*(f"{name}:density={density}" for name in ("oktopk", "topka", "topkdsa", "gaussiank", "gtopk")))


_SPARDL: dict[str, Any] = {
  "hosts": 6,
  "batch_size": 16,
  "optimizer": ["sgd:0.1"],
  "schedule": "step",
  "clip": 0.0,
  "method": _race(*(f"{name}:density=0.01" for name in ("spardl:teams=2", "oktopk", "topka", "topkdsa"))),
}
_LSTM = {"task": "lstm", "batch_size": 1, "optimizer": ["sgd:0.3"], "schedule": "early_step"}
_OKTOPK: dict[str, Any] = {"hosts": 16, "batch_size": 16, "schedule": "linear", "clip": 0.0}
_FIGURE9 = {"task": "vgg16", "optimizer": ["sgd:0.1"], "method": _oktopk(0.02)}
_BERT = {"task": "bert", "optimizer": ["adamw:0.0002"], "batch_size": 8, "hosts": 32, "method": _oktopk(0.01)}
_A2SGD: dict[str, Any] = {
  "hosts": 8,
  "batch_size": 128,
  "schedule": "polynomial",
  "warm_up": 10,
  "clip": 0.0,
  "method": _race("a2sgd", "topka:density=0.001", "gaussiank:density=0.001", "qsgd:levels=4"),
}

_CIFAR10, _MNIST, _IMDB = 50_000, 60_000, 25_000  # examples to train on
_ADAM = {"task": "resnet20", "optimizer": ["adam:0.01"], "schedule": "constant", "warm_up": 0}
_LARS = {"task": "vgg16", "optimizer": ["lars:1.2"]}  # 0.1 for each of 8 workers, × 1.5: LS(1.5 ×)
PRESETS: dict[str, Preset] = {
  "spardl-fig6a": _preset("SparDL, Figure 6 (a)", _SPARDL | {"task": "vgg16"}, 120, _CIFAR10),
  "spardl-fig6c": _preset("SparDL, Figure 6 (c)", _SPARDL | {"task": "resnet20"}, 120, _CIFAR10),
  "spardl-fig6d": _preset("SparDL, Figure 6 (d)", _SPARDL | _LSTM, 30, _IMDB),
  "oktopk-fig9": _preset("Ok-Topk, Figure 9", _OKTOPK | _FIGURE9, 160, _CIFAR10),
  "oktopk-fig13": Preset("Ok-Topk, Figure 13", _OKTOPK | _BERT, 400_000),
  "a2sgd-fnn3": _preset(
    "A2SGD, Table I and Figure 4", _A2SGD | {"task": "fnn3", "optimizer": ["sgd:0.08"]}, 30, _MNIST
  ),
  "a2sgd-vgg16": _preset("A2SGD, Table I and Figure 4", _A2SGD | _LARS, 150, _CIFAR10),
  "a2sgd-resnet20": _preset(
    "A2SGD, Table I and Figure 4", _A2SGD | {"task": "resnet20", "optimizer": ["sgd:0.8"]}, 150, _CIFAR10
  ),
  "a2sgd-adam": _preset("A2SGD, Table IV", _A2SGD | _ADAM, 150, _CIFAR10),
}
HELP = "A paper's recipe, as values of flags that are not given: " + "; ".join(
  f"{name}: {preset.paper}, {preset.paper_steps:,} steps there" for name, preset in PRESETS.items()
)


def apply(name: str | None) -> None:
  """Gives flags that are not given the values of a preset."""
  for flag, value in PRESETS[name].flags.items() if name else ():
    if not flags.FLAGS[flag].present:
      flags.FLAGS.set_default(flag, value)
