r"""Is the plan of ASC-WFBP's Theorem 1 the fastest? Every plan of small random networks, in the paper's own model.

The model is that of CALCCOMMTIME (Algorithm 1): a normal layer starts when its gradient
is ready and the communication before has ended (Definition 1), a merged one is sent
with the next, a simultaneous one starts when it is ready and is slowed down by the one
before (Eq. 13), which it does not slow down. Layers are 2 to 6; backward times, sizes,
α, β and γ < 2 are random. The plan of Theorem 1 is `js.overlap.plan("theorem_1")`,
which decides by these times.

The counterexample is the network of fewest layers in which another plan is faster, with
numbers from 1 to 3.

Examples:
  python -m benchmarks.overlap.theorem
  python -m benchmarks.overlap.theorem --networks=5000 --json | jq .optimal
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from absl import flags

import jaxsparse as js
from benchmarks import entry, report
from benchmarks.workers import make_console
from jaxsparse.overlap import Link, Plan

_LAYERS = 2, 6  # of a random network, the fewest and the most
_EQUAL = 1e-9  # of the seconds: as fast
_NUMBERS = 1, 2, 3  # of a counterexample
_GAMMA = 1.5  # the paper's


class Network(NamedTuple):
  """What a plan is made for."""

  times: tuple[float, ...]  # seconds of backward of each layer
  sizes: tuple[float, ...]  # bytes of each gradient
  link: Link

  @property
  def ready(self) -> list[float]:
    """Seconds until the gradient of each layer is ready."""
    return list(itertools.accumulate(reversed(self.times)))[::-1]

  def plan(self, kind: js.overlap.plans.Kind) -> Plan:
    """The library's plan of a kind."""
    return js.overlap.plan(kind, self.times, self.sizes, **self.link._asdict())


class Found(NamedTuple):
  """Plans of random networks."""

  networks: int
  optimal: float  # fraction in which no plan is faster than that of Theorem 1
  worst: float  # the largest of its seconds / those of the fastest plan
  ours: float  # the fraction in the library's model, beside its fastest plan
  ours_worst: float


def seconds(network: Network, firsts: dict[int, bool]) -> float:
  """The end of the last communication: `firsts` are the first layers of groups, and whether each is simultaneous."""
  link, ready = network.link, network.ready
  before: tuple[float, float] | None = None  # start and bytes of the one before
  last, end = len(ready), 0.0
  for first, at_once in firsts.items():
    size = sum(network.sizes[first:last])
    start = ready[first] if at_once else max(ready[first], end)
    took = link.seconds(size)
    if at_once and before:
      took += _penalty(link, start, *before)
    end = max(end, start + took)
    before, last = (start, size), first
  return end


def _penalty(link: Link, start: float, earlier: float, size: float) -> float:
  """Eq. 13: seconds lost to a communication of `size` bytes that started `earlier`."""
  shared = 1 - (start - earlier) / link.seconds(size)
  return (link.gamma - 1) * link.beta * size * min(1.0, max(0.0, shared))


def plans(layers: int) -> Iterator[dict[int, bool]]:
  """Every plan: layers that are sent with the next or not, and communications that wait or not."""
  for sent in itertools.product((True, False), repeat=layers - 1):
    firsts = [*(layer for layer in range(layers - 1, 0, -1) if sent[layer - 1]), 0]
    for at_once in itertools.product((False, True), repeat=len(firsts) - 1):
      # the first one has none before it
      yield dict(zip(firsts, (False, *at_once), strict=True))


def theorem_1(network: Network) -> dict[int, bool]:
  """The plan of Theorem 1."""
  groups = network.plan("theorem_1").groups
  return {group.layers[0]: group.kind == "simultaneous" for group in groups}


def fastest(network: Network) -> tuple[float, dict[int, bool]]:
  """The fewest seconds of all plans, and one that takes them."""
  every = plans(len(network.times))
  return min(((seconds(network, one), one) for one in every), key=lambda one: one[0])


def random_network(random: np.random.Generator) -> Network:
  """A network in which computing and communication take about as long."""
  layers = int(random.integers(_LAYERS[0], _LAYERS[1] + 1))
  times = random.exponential(1, layers)
  sizes = random.exponential(1, layers) * random.choice([0.1, 1, 10], layers)
  alpha, beta = random.uniform(0.05, 1.5), random.uniform(0.1, 1.5)
  link = Link(alpha, beta, float(random.choice([1.2, 1.5, 1.8])))
  return Network(tuple(times), tuple(sizes), link)


def measure(networks: int, seed: int) -> Found:
  """Theorem 1's plan beside the fastest, in the paper's model and in the library's."""
  random = np.random.default_rng(seed)
  ratios: list[tuple[float, float]] = []
  for _ in range(networks):
    one = random_network(random)
    theirs = seconds(one, theorem_1(one)) / fastest(one)[0]
    kinds: Sequence[js.overlap.plans.Kind] = ("theorem_1", "optimal")
    ours = [one.plan(kind).iteration_time for kind in kinds]
    ratios.append((theirs, ours[0] / ours[1]))
  both = np.array(ratios)
  (optimal, ours_optimal), worst = (both < 1 + _EQUAL).mean(0), both.max(0)
  return Found(networks, *map(float, (optimal, worst[0], ours_optimal, worst[1])))


def counterexample() -> tuple[Network, dict[int, bool]]:
  """The network of fewest layers and least numbers in which a plan is faster than Theorem 1's, and that plan."""
  for layers in range(1, _LAYERS[1] + 1):
    numbers = itertools.product(_NUMBERS, repeat=2 * layers + 2)
    for alpha, beta, *rest in sorted(numbers, key=sum):
      times, sizes = tuple(rest[:layers]), tuple(rest[layers:])
      one = Network(times, sizes, Link(alpha, beta, _GAMMA))
      least, best = fastest(one)
      if seconds(one, theorem_1(one)) > least * (1 + _EQUAL):
        return one, best
  raise RuntimeError("no counterexample")


def _described(network: Network, firsts: dict[int, bool]) -> str:
  """A plan in words: its groups, in the order of sending, numbered as in the paper."""
  last = len(network.times)
  groups = []
  for first, at_once in firsts.items():
    layers = "+".join(str(layer + 1) for layer in range(first, last))
    groups.append(layers + " at once" * at_once)
    last = first
  return ", ".join(groups)


def main() -> None:
  """Measures and reports."""
  console = make_console(stderr=_JSON.value)
  found = measure(_NETWORKS.value, _SEED.value)
  lines = [
    ["the paper's", f"{found.optimal:.0%}", f"{found.worst - 1:.0%}"],
    ["js.overlap's", f"{found.ours:.0%}", f"{found.ours_worst - 1:.0%}"],
  ]
  heads = "model", "Theorem 1's plan is the fastest", "slower by at most"
  console.print(report.table(f"{found.networks} random networks", heads, lines))
  network, best = counterexample()
  console.print(f"counterexample: {network}", highlight=False, soft_wrap=True)
  for name, one in ("Theorem 1", theorem_1(network)), ("fastest", best):
    text = f"{name}: {_described(network, one)}: {seconds(network, one):.2f} s"
    console.print(text, highlight=False)
  if _JSON.value:
    report.print_json(found._asdict() | {"counterexample": network, "fastest": best})


if __name__ == "__main__":  # functions above are used beside the flags of others
  _NETWORKS = flags.DEFINE_integer("networks", 600, "Random networks.", lower_bound=1)
  _SEED = flags.DEFINE_integer("seed", 0, "Of the networks.")
  _JSON = entry.define_json()
  entry.run(main)
