"""What is measured, and on how much: in a whole run, and with --small."""

from typing import NamedTuple

import jax

import jaxsparse as js
from benchmarks import specs
from benchmarks.compiled.transformer import Transformer


class Step(NamedTuple):
  """A training step."""

  label: str
  method: str  # as `benchmarks.methods` names it; "" for forward and backward alone
  optimizer: str = ""  # as `benchmarks.recipes` names it


class Setting(NamedTuple):
  """What a run measures."""

  # labels of collectives, the most important first: the time may not suffice for all
  algorithms: tuple[str, ...]
  compared: (
    int  # entries of the gradients whose updates are compared with those of the CPU
  )
  # entries of the gradients whose updates are timed, and of which the top-k are
  # selected
  sizes: tuple[int, ...]
  repetitions: int  # of what is timed, at most
  model: Transformer
  sequences: int  # of a step
  steps: tuple[Step, ...]
  density: float = 0.01  # of all collectives that have one and do not name it
  simulated: int = 4  # workers on one device, where results are compared
  workers: int = 8  # of the updates and steps of one of them alone that are timed

  def parse_algorithms(self) -> list[specs.Spec]:
    """The collectives, for the workers that are timed."""
    return specs.parse(list(self.algorithms), self.workers, density=self.density)

  def collective(self, spec: specs.Spec, n: int) -> js.Collective:
    """The collective of n entries; where it needs shapes and the model has n entries, of the leaves of the model."""
    if not spec.collective.traits.needs_shapes or n != self.model.entries:
      return spec.sized(n)
    return spec.collective.for_leaves(
      tuple(x.shape for x in jax.tree.leaves(jax.eval_shape(self.model.parameters)))
    )


_FIRST = (
  "dense",
  "dense:dtype=bfloat16",
  "onebit",
  "spardl:selector=chunked",
  "spardl",
  "nbit",
  "powersgd",
)
BACKWARD = Step("forward and backward", "")
_DENSE = Step("dense, Adam", "dense", "adam:0.0003")
_SIGNS = "updates:apply_residual=True/onebit"

WHOLE = Setting(
  algorithms=(*_FIRST, *(name for name in js.collective_names() if name not in _FIRST)),
  compared=100_000,
  sizes=(14_728_266, Transformer().entries),  # VGG-16 for CIFAR-10, and the model below
  repetitions=20,
  model=Transformer(),
  sequences=8,
  steps=(
    BACKWARD,
    _DENSE,
    Step("signs of Muon", _SIGNS, "muon:0.01:only=up|down|qkv|out"),
    Step("signs, window Adam", _SIGNS, "window_adam:0.0003:window=8"),
  ),
)

SMALL = Setting(
  algorithms=(
    "dense",
    "dense:dtype=bfloat16",
    "topka",
  ),  # whose programs are made soonest
  compared=5_000,
  sizes=(5_000,),
  repetitions=3,
  model=Transformer(width=16, blocks=1, heads=2, length=16, symbols=64),
  sequences=2,
  steps=(
    Step(
      "top-k of updates", "updates:apply_residual=True/topka:density=0.1", "sgd:0.1"
    ),
  ),
)
