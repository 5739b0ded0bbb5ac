"""Our numbers of the papers' cells, computed again: formulas, counts, predictions, and kept results.

A test compares them with paper_tables.toml, where they would be stale otherwise. What a
benchmark measured once, and no file of benchmarks/results has, is not among them.
"""

import functools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flax import nnx

import jaxsparse as js
from benchmarks import papers, specs, tables
from benchmarks.heterogeneous import report as heterogeneous
from benchmarks.heterogeneous import virtual
from benchmarks.overlap import architectures, contention, iterations
from benchmarks.race import presets
from benchmarks.race.results import Results
from benchmarks.race.standings import Target
from benchmarks.tasks import images, lm
from benchmarks.tasks.base import entries_of
from jaxsparse.costs import counting

Key = tuple[str, str, str]  # paper, table, name of a cell
Modules = Mapping[str, Callable[[], nnx.Module]]

RESULTS = pathlib.Path(__file__).parent / "results"
_N = 14_728_266  # entries of VGG-16
_VOCABULARY = 30_522  # of BERT, whose decoder has a weight of its own in Ok-Topk
_MODULES: Modules = {
  "FNN-3": lambda: images.NETWORKS["fnn3"][0](nnx.Rngs(0)),
  "VGG-16": lambda: images.NETWORKS["vgg16"][0](nnx.Rngs(0)),
  "VGG-19": lambda: images.VGG(images.VGG19, 100, nnx.Rngs(0)),
  "ResNet-20": lambda: images.NETWORKS["resnet20"][0](nnx.Rngs(0)),
  "LSTM-PTB": lambda: lm.LSTM(10_000, 1500, nnx.Rngs(0)),
}
_NETWORKS = {
  "ResNet-152": "resnet152",
  "DenseNet-201": "densenet201",
  "Inception-v4": "inception_v4",
  "BERT-Base": "bert_base",
}
# presets that measure cells, the steps of dense whose loss is the target, and a target
_RACES = {
  "spardl_fig6a": ("spardl-fig6a", Target(300)),
  "spardl_fig6c": ("spardl-fig6c", Target(300, 0.2)),
  "spardl_fig6d": ("spardl-fig6d", Target(300)),
  "a2sgd_fnn3": ("a2sgd-fnn3", Target(300)),
  "a2sgd_adam": ("a2sgd-adam", Target(300)),
}


@functools.cache
def _schedule(label: str, workers: int) -> Any:
  (spec,) = specs.parse([label], workers)
  return counting.schedule(spec.collective, _N, workers)


def cost(label: str, workers: int, what: str) -> int:
  """The cost of one update of VGG-16: words, messages or bits by the formula, or the "least words", counted."""
  (spec,) = specs.parse([label], workers)
  if what == "least words":
    return counting.count_jaxpr(_schedule(label, workers), workers, "least").words
  found = spec.collective.cost(_N, workers)
  return {"words": found.words, "messages": found.messages, "bits": 32 * found.words}[
    what
  ]


def parameters(name: str) -> int:
  """The number of parameters of a network of the papers."""
  if name == "BERT":
    tensors = architectures.bert_base()
    return sum(one.entries for one in tensors) + 768 * _VOCABULARY
  return entries_of(_MODULES[name])


def formulas() -> Iterator[tuple[Key, float]]:
  """Cells that are a formula or a count; those of `js.costs` name what they count."""
  for cell in papers.every():
    key = cell.paper, cell.table, cell.name
    if cell.by:
      yield key, cost(*cell.by)
    elif cell.what == "parameters" and cell.ours is not None:
      yield key, parameters(cell.name)
  yield from _of_networks()
  link = js.overlap.Link(alpha=1.4e-3, beta=1.7e-9, gamma=1.5)
  full = contention.full_from(link, iterations.WORKERS) / 2**20
  yield (
    ("ASC-WFBP", "Figure 4 (b), link", "MB from which two fill the link"),
    full,
  )
  yield from _of("Partial Reduce", heterogeneous.figure_4())


def _of_networks() -> Iterator[tuple[Key, float]]:
  for name, model in _NETWORKS.items():
    tensors = architectures.MODELS[model]()
    millions = sum(one.entries for one in tensors) / 1e6
    yield ("ASC-WFBP", "Table III", f"{name}, tensors"), len(tensors)
    yield ("ASC-WFBP", "Table III", f"{name}, parameters"), millions


def predictions() -> Iterator[tuple[Key, float]]:
  """Cells that are predicted by the paper's own link: plans of ASC-WFBP."""
  link = js.overlap.Link(alpha=1.4e-3, beta=1.7e-9, gamma=1.5)
  rows = []
  for model in architectures.MODELS:
    times, sizes = iterations.layers_of(model)
    for kind in ("wfbp", "mg_wfbp", "asc_wfbp"):
      plan = js.overlap.plan(kind, times, sizes, **link._asdict())
      rows.append(iterations.row(model, plan))
  yield from _of("ASC-WFBP", iterations.measured(rows))


def measured() -> Iterator[tuple[Key, float]]:
  """Cells whose measurements are kept as JSON."""
  ratios = {name: one.ratio for name, one in of_stragglers().items()}
  yield from _of("Partial Reduce", ratios)
  for file, (preset, target) in _RACES.items():
    results = Results(RESULTS / f"{file}.json", None)
    one = presets.PRESETS[preset]
    yield from _of(one.paper.split(",")[0], one.measured(results, target))
  curves = json.loads((RESULTS / "contention.json").read_text())
  points = [contention.Point(**point) for point in curves[0]["points"]]
  curve = contention.Curve(**curves[0] | {"points": points})
  yield from _of("ASC-WFBP", contention.cells(curve))


def kept() -> Iterator[tuple[Key, float]]:
  """Cells whose measurements are kept in tables."""
  ms = {row["algorithm"]: row["ms"] for row in tables.kept_rows("updates_1gbit")}
  one, two, three = (ms[f"spardl{teams}"] for teams in ("", ":teams=2", ":teams=3"))
  others = [ms[name] / two for name in ("oktopk", "topka", "topkdsa")]
  yield ("SparDL", "Table 3", "the most"), max(others)
  yield ("SparDL", "Table 3", "the least"), min(others)
  yield ("SparDL", "Figure 7", "2 teams, R-SAG"), one / two
  yield ("SparDL", "Figure 7", "3 teams, B-SAG"), one / three
  errors = {
    row["exchange"].removeprefix("SparDL, residual "): 1 - row["test accuracy"][0]
    for row in tables.kept_rows("residuals")
  }
  for name in ("partial", "local"):
    yield ("SparDL", "Figure 8", name), errors[name] / errors["global"]
  regions = {row["regions"]: row for row in tables.kept_rows("regions")}
  slower = [
    regions["even"][links] / regions["balanced"][links]
    for links in ("1 Gbit/s, ms", "100 Mbit/s, ms")
  ]
  yield ("Ok-Topk", "Figure 7", "split and reduce, at most"), max(slower)
  busy = {row[""]: row["all-reduce"] for row in tables.kept_rows("occupancy")}
  for name in ("ResNet-34", "VGG-19"):
    yield ("Partial Reduce", "Table 1, per update", name), busy["u = 0.55"]
  theorem = tables.kept_rows("theorem_1")[0]["Theorem 1's plan is the fastest"]
  yield ("ASC-WFBP", "Theorem 1", "optimal"), theorem
  yield from _of_oktopk()


def _of_oktopk() -> Iterator[tuple[Key, float]]:
  rules = tables.kept_rows("oktopk_rules")[0]
  for name, column in (
    ("selected by a worker", "deviation"),
    ("delivered", "deviation, delivered"),
  ):
    yield ("Ok-Topk", "Figure 6", name), rules[column][0]
  rows = {row["density"]: row for row in tables.kept_rows("oktopk_seen")}
  few, many = (rows[density]["ξ, second half"][0] for density in (0.01, 0.05))
  yield ("Ok-Topk", "Figure 5", "ξ, 5 % / 1 %"), many / few
  for row in rows.values():
    density = f"ξ, {row['density']:.0%}".replace("%", " %")
    if row["density of the sum"]:
      fill_in = 100 * row["density of the sum"][0]
      yield ("Ok-Topk", "Figure 6, fill-in", "VGG-16"), fill_in
      early, late = row["Gaussian-k selects, / k, early"], row["late"]
      yield ("Ok-Topk", "Figure 6, Gaussian-k", "early"), early[0]
      yield ("Ok-Topk", "Figure 6, Gaussian-k", "late"), late[0]
      mean = f"{density}, mean of the second half"
      yield ("Ok-Topk", "Figure 5", mean), row["ξ, second half"][0]
    yield ("Ok-Topk", "Figure 5", f"{density}, the most"), row["ξ, the most"][0]


def of_stragglers() -> dict[str, heterogeneous.Ratio]:
  """Cells of partial reduce by their names, with noise and control."""
  kept = json.loads((RESULTS / "heterogeneous.json").read_text())
  return heterogeneous.paper_cells(virtual.from_json(kept["rows"]))


def _of(paper: str, values: Mapping[str, float]) -> Iterator[tuple[Key, float]]:
  """The cells of a paper that have these names, which are of one table each."""
  for cell in papers.every():
    if cell.paper == paper and cell.name in values and cell.ours is not None:
      yield (paper, cell.table, cell.name), values[cell.name]


def is_stale(ours: float | None, now: float) -> bool:
  """Whether a number of the file, rounded, is another than that of now."""
  if ours is None or (isinstance(ours, int) and isinstance(now, int)):
    return ours != now
  _, _, decimals = f"{ours:g}".partition(".")
  # of a number that was rounded half up
  return abs(ours - now) > 0.51 * 10 ** -len(decimals)
