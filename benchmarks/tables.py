"""Writes the tables of the pages from the JSON of benchmarks/results, between two marks: `make tables`.

    <!-- table: race race_lm -->
    <!-- end -->

The first word is a function of this module, the others are its arguments. Tables that
no function computes are kept with their command and commit in
benchmarks/results/tables, and `kept NAME` writes one.
"""

import collections
import functools
import itertools
import json
import pathlib
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import rich.table

import jaxsparse as js
from benchmarks import papers as cells_of_papers
from benchmarks import report
from benchmarks import wires as bits_of_wires
from benchmarks.compiled import hlo
from benchmarks.compiled.rows import HEADS, Row
from benchmarks.device import speed, step, worth
from benchmarks.heterogeneous import report as in_virtual_time
from benchmarks.heterogeneous import virtual
from benchmarks.overlap import contention as contention_of
from benchmarks.overlap import report as overlap_report
from benchmarks.overlap.iterations import WORKERS
from benchmarks.peers import rows as rows_of_peers
from benchmarks.race import report as race_report
from benchmarks.race.report import name_of, rate_text, slow_first
from benchmarks.race.results import Results
from benchmarks.race.standings import DENSE, Target, standings
from benchmarks.report import means, number
from benchmarks.rounds import report as rounds_report
from benchmarks.sweep import training as sweep
from benchmarks.thousands import report as rows_of_thousands
from benchmarks.weights import report as rows_of_weights
from jaxsparse.costs.advice import Evidence, holds

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# A table between its marks. Groups: the first mark, the words in it, the last mark.
_REGION = re.compile(
  r"^(<!-- table: ([^\n]+?) -->\n).*?^(<!-- end -->)", re.DOTALL | re.MULTILINE
)
# A cell of a column of numbers: empty, or it begins with a sign or a digit, and has no
# letters but those of an exponent, of ms or µs, or behind "of".
_NUMBER = re.compile(r"([-+≤>–\d][^A-Za-z]*(e[-+]\d+|ms|µs| of .*)?)?")
_UPDATES = (
  ("updates_1gbit", "6 hosts, 1 Gbit/s"),
  ("updates_two_hosts", "2 hosts, a core each, 1 Gbit/s"),
)
_SIGNS, _SIGNS_4 = (
  "updates:apply_residual=True/onebit",
  "local:every=4:apply_residual=True/onebit",
)


def fill(page: str) -> str:
  """The page with every marked table as the results have it; ValueError for a mark of no table, with the choices."""
  return _REGION.sub(lambda found: f"{found[1]}\n{_make(found[2])}\n\n{found[3]}", page)


def pages() -> list[pathlib.Path]:
  """The pages of the repository, with or without tables."""
  return [
    *ROOT.glob("*.md"),
    *(ROOT / "benchmarks").rglob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
  ]


def _make(mark: str) -> str:
  """The table of a mark, "race race_lm": a function of `TABLES` and its arguments; ValueError for no such function."""
  name, *arguments = mark.split()
  if name not in TABLES:
    raise ValueError(
      f"<!-- table: {mark} -->: no table {name!r}, choose one of {', '.join(TABLES)}"
    )
  return TABLES[name](*arguments)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """A table whose columns of numbers are aligned to the right; the first is left out if it is empty."""
  rows = [list(row) for row in rows]
  # The first column is empty with its head: a table of one part has no name of a part.
  if not any([head[0], *(row[0] for row in rows)]):
    head, rows = head[1:], [row[1:] for row in rows]
  # Never the first column, 0, which has the names of rows.
  is_number = [
    column and all(_NUMBER.fullmatch(row[column]) for row in rows)
    for column in range(len(head))
  ]
  rule = ["--:" if right else "---" for right in is_number]
  return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *rows])


@functools.cache
def _kept() -> dict[str, Any]:
  """All kept tables by name: each has its `command`, `columns` (heads with formats), and `rows`."""
  found: dict[str, Any] = {}
  for path in sorted((RESULTS / "tables").glob("*.json")):
    found |= json.loads(path.read_text())
  return found


def _text(value: Any, form: str) -> str:
  """A cell: `value` in a format, with the unit that may follow the format (".1f ms"); nothing for None.

  A list is a mean and a standard deviation. Texts have the format "".
  """
  if value is None:
    return ""
  number, _, unit = form.partition(" ")
  parts = value if isinstance(value, list) else [value]
  return " ± ".join(format(part, number) for part in parts) + f" {unit}".rstrip()


def kept(name: str) -> str:
  """A table of benchmarks/results/tables under its command; ValueError for an unknown name, with the choices."""
  if name not in _kept():
    raise ValueError(f"no kept table {name!r}, choose one of {', '.join(_kept())}")
  found = _kept()[name]
  rows = (
    [_text(*cell) for cell in zip(row, found["columns"].values(), strict=True)]
    for row in found["rows"]
  )
  return "\n".join(
    ["```bash", *found["command"], "```", "", markdown(list(found["columns"]), rows)]
  )


def kept_rows(name: str) -> list[dict[str, Any]]:
  """The rows of a kept table, by heads of its columns."""
  found = _kept()[name]
  return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


def compiled(part: str, *topologies: str) -> str:
  """The "updates" or "steps" that were compiled for these platforms and topologies."""
  rows = []
  for topology in topologies:
    found = json.loads((RESULTS / f"compiled_{topology}.json").read_text())
    for one in found[part]:
      exchanges = [hlo.Exchange(**exchange) for exchange in one["exchanges"]]
      rows.append(
        [topology.replace("_", " "), *Row(**one | {"exchanges": exchanges}).cells]
      )
  return markdown(["devices", *HEADS], rows)


def device(part: str, name: str) -> str:
  """What was measured on a device: the "speed" of updates, the "step" of a transformer, or what they are "worth"."""
  found = json.loads((RESULTS / f"device_{name}.json").read_text())
  tables = {
    "speed": lambda: speed.table(found["speed"], found["launches"], ""),
    "step": lambda: step.table(found["step"], ""),
    "worth": lambda: worth.table(
      [row for row in found["worth"] if "predictions" in row]
    ),
  }
  return _of_rich("", {"": tables[part]()}, ["program", "algorithm"])


def peers(name: str = "peers", steps: str = "") -> str:
  """Updates of PyTorch's DistributedDataParallel beside ours; or trainings of a race to dense's loss after `steps`."""
  if steps:
    trained = rows_of_peers.trained(_results(name), int(steps))
    return _of_rich("", {"": rows_of_peers.trained_table(trained)}, ["optimizer"])
  found = json.loads((RESULTS / f"{name}.json").read_text())
  return _of_rich(
    "",
    {"": rows_of_peers.table([rows_of_peers.Row(**row) for row in found["rows"]])},
    ["method"],
  )


@functools.cache
def _results(name: str) -> Results:
  """The curves and paces of a race in benchmarks/results; None: whatever its setting was."""
  return Results(RESULTS / f"{name}.json", None)


def race(name: str, *options: str) -> str:
  """Seconds to dense's loss after 300 steps, or to `loss=`, at every rate of links."""
  given = dict(option.split("=") for option in options)
  results = _results(name)
  target = Target(300, float(given["loss"]) if "loss" in given else None)
  rates = slow_first(pace.rate for pace in results.rows["paces"])
  return _of_rich(
    "links",
    {rate_text(rate): race_report.table(results, rate, target) for rate in rates},
    ["optimizer"],
  )


def paces(*names: str) -> str:
  """Milliseconds a step of races without curves, and another method's / those of SparDL."""
  return _of_rich(
    "task",
    {
      _results(name).setting["task"]: race_report.paces(_results(name))
      for name in names
    },
  )


def wholes(name: str) -> str:
  """Whole trainings on the clock beside steps × seconds a step."""
  return _of_rich("", {"": race_report.wholes(_results(name))})


def losses(name: str, *words: str) -> str:
  """Held-out loss after so many steps over bits, lowest loss first; with `seeds=3` of rows that have as many seeds."""
  steps = [float(word) for word in words if word.isdigit()]
  # One word at most is no number of steps; 1 seed without it.
  (seeds,) = [
    int(word.removeprefix("seeds=")) for word in words if not word.isdigit()
  ] or [1]
  return _of_rich(
    "",
    {"": race_report.losses(_results(name), *steps, seeds=seeds)},
    ["method", "optimizer"],
  )


def runs(*names: str) -> str:
  """Runs of `benchmarks.train`: means over seeds and folds."""
  forms = {
    "test_loss": ",.4f",
    "test_accuracy": ",.4f",
    "train_loss": ",.4f",
    "words_per_step": ",.0f",
  }
  rows = []
  for name in names:
    found = json.loads((RESULTS / f"{name}.json").read_text())
    same = {"workers": re.findall(r"(\d+) workers", found["title"])[0]}
    rows += means(
      [run | same for run in found["runs"]],
      ["optimizer", "algorithm", "workers"],
      forms,
    )
  head = [
    "optimizer",
    "exchange",
    "workers",
    "held-out loss",
    "held-out accuracy",
    "train loss",
    "words a step",
  ]
  return markdown(head, rows)


def elastic(part: str, folder: str = str(RESULTS)) -> str:
  """Trainings that lose a worker and gain two: `runs` in the lab, `simulated`, `recoveries`, or the residual `lost`."""
  found = json.loads(pathlib.Path(folder, "elastic.json").read_text())[part]
  if part == "lost":
    head = [
      "the lost worker's residual / the update of a step, ℓ₂",
      "what it gained since the last checkpoint",
    ]
    return markdown(head, means(found, [], {"all": ",.2f", "since": ",.2f"}))
  if part == "recoveries":
    parts = [
      "end the others, start processes",
      "import, join",
      "model, restore, resize",
      "compile, first step",
    ]
    named = [
      one | dict(zip(parts, one["parts"], strict=True)) | {"all, s": sum(one["parts"])}
      for one in found
    ]
    forms = dict.fromkeys([*parts, "all, s"], ",.1f") | {"again": ",.0f"}
    return markdown(
      ["workers", *parts, "all, s", "steps done again"], means(named, ["change"], forms)
    )
  # The most that any training of a run has lost.
  lost = {
    one["run"]: max(other["lost"] for other in found if other["run"] == one["run"])
    for one in found
  }
  rows = means(found, ["run"], {"accuracy": ",.4f", "delivered": ",.4f"})
  return markdown(
    ["run", "test accuracy", "delivered", "lost"],
    [[*row, f"{lost[row[0]]:.1e}"] for row in rows],
  )


def late() -> str:
  """Trainings in rounds of which some workers are late."""
  found = json.loads((RESULTS / "late.json").read_text())
  of = f"late in each round, of {found['setting']['workers']}"
  return markdown(
    [of, "steps", "held-out loss"],
    means(found["outcomes"], ["late", "steps"], {"loss": ",.3f"}),
  )


def rounds(part: str, folder: str = str(RESULTS)) -> str:
  """Rounds in the lab: what is `hidden` of exchanges, `goodput` beside synchronous training, `recoveries`, `faults`."""
  found = json.loads(pathlib.Path(folder, "rounds.json").read_text())[part]
  return _of_rich("", {"": rounds_report.make(part, found)})


def thousands(part: str, folder: str = str(RESULTS)) -> str:
  """Rounds of many workers: `simulated`, in two `levels`, at a real `server`, in real `processes`."""
  found = json.loads(pathlib.Path(folder, "thousands.json").read_text())[part]
  return _of_rich("", {"": rows_of_thousands.make(part, found)})


def weights(part: str) -> str:
  """Versions of a model in bfloat16: `sizes` of links, `times`, or `readers` in the lab."""
  found = json.loads((RESULTS / "weights.json").read_text())
  if part == "readers":
    fetches = [rows_of_weights.Fetch(**row) for row in found["readers"]]
    return markdown(rows_of_weights.READERS, rows_of_weights.fetches(fetches))
  rows = [rows_of_weights.Row(**row) for row in found["rows"]]
  if part == "sizes":
    return markdown(rows_of_weights.HEADS, rows_of_weights.sizes(rows))
  return markdown(rows_of_weights.TIMES, rows_of_weights.times(rows))


def heterogeneous(*parts: str) -> str:
  """Parts of the comparison in virtual time as `benchmarks.heterogeneous` prints them, or `speed_ups` over a worker."""
  rows = virtual.from_json(
    json.loads((RESULTS / "heterogeneous.json").read_text())["rows"]
  )
  if parts == ("speed_ups",):
    return _of_rich(
      "", {"": in_virtual_time.scale_table(in_virtual_time.speed_ups(rows))}
    )
  groups = in_virtual_time.group_by_environment(
    row for row in rows if row.part in parts
  )
  return _of_rich(
    "workers",
    {str(own[0].environment): in_virtual_time.table(own, "") for own in groups},
  )


def contention(source: str) -> str:
  """Two all-reduces at once: `measured` in the lab, or in the model of the `paper`."""
  if source == "paper":
    curve = contention_of.predicted(
      js.overlap.Link(alpha=1.4e-3, beta=1.7e-9, gamma=1.5), WORKERS
    )
    return _of_rich("", {curve.name: overlap_report.contention_table(curve)})
  made = {}
  for one in json.loads((RESULTS / "contention.json").read_text()):
    points = [contention_of.Point(**point) for point in one["points"]]
    made[rate_text(one["name"])] = overlap_report.contention_table(
      contention_of.Curve(**one | {"points": points})
    )
  return _of_rich("links", made)


def _of_rich(
  label: str, found: Mapping[str, rich.table.Table], code: Sequence[str] = ()
) -> str:
  """Tables with the same columns as one, which begins with their names; cells under the heads `code` are code.

  Args:
    label: the head of the column of names.
    found: the tables by name; a table alone may have the name "", whose column is left
      out if `label` is "" too.
    code: heads of columns whose cells are labels, to be shown as code.
  """
  head = [str(column.header) for column in next(iter(found.values())).columns]
  # Labels of collectives elsewhere are shown by their names in words.
  shown = lambda name, cell: f"`{cell}`" if name in code else name_of(str(cell))
  rows = []
  for name, one in found.items():
    for cells in zip(*(column.cells for column in one.columns), strict=True):
      rows.append([name, *map(shown, head, cells)])
  return markdown([label, *head], rows)


def papers(*words: str) -> str:
  """A paper's numbers beside ours, then what they are; ValueError for a paper without a table, with the choices."""
  name, cells = " ".join(words), cells_of_papers.every()
  if name not in (known := dict.fromkeys(cell.paper for cell in cells)):
    raise ValueError(f"paper {name!r}, choose one of {', '.join(known)}")
  both = cells_of_papers.tables_of([cell for cell in cells if cell.paper == name])
  return "\n\n".join(_of_rich("", {"": one}) for one in both)


def trainers() -> str:
  """DiLoCo in DrJAX with its own exchange and with ours: held-out loss, and words that a replica sends."""
  names = {
    "drjax": "`drjax.reduce_mean`, Nesterov",
    "dense": "`js.dense_transform`, Nesterov",
    "signs": "`js.onebit_transform`, Nesterov",
    "sparseloco": "SparseLoCo: `js.chunktopk_transform` in 2 bits, SGD",
  }
  found = json.loads((RESULTS / "trainers.json").read_text())
  dense = {row["seed"]: row["words"] for row in found if row["exchange"] == "drjax"}
  shown = [
    row
    | {"exchange": names[row["exchange"]], "share": row["words"] / dense[row["seed"]]}
    for row in found
  ]
  forms = {"loss": ",.3f", "accuracy": ",.3f", "words": ",.0f", "share": ",.3f"}
  head = [
    "exchange and outer optimizer",
    "held-out loss",
    "accuracy",
    "words an exchange",
    "of DrJAX's",
  ]
  return markdown(head, means(shown, ["exchange"], forms))


def verdicts() -> str:
  """How many numbers of each paper have which verdict."""
  counts = collections.Counter(
    (cell.paper, cell.verdict) for cell in cells_of_papers.every()
  )
  known = get_args(cells_of_papers.Verdict)
  names = dict.fromkeys(paper for paper, _ in counts)
  return markdown(
    ["paper", *known],
    [[name, *(str(counts[name, one]) for one in known)] for name in names],
  )


def summary() -> str:
  """What users want to know first: recommended methods beside dense."""
  rows = []
  for name, what, methods in (
    (
      "race_lm",
      "seconds to dense's loss, transformer of 3.3 M parameters, Adam",
      (_SIGNS, _SIGNS_4),
    ),
    (
      "race_resnet20",
      "seconds to dense's loss, ResNet-20, SGD",
      ("spardl:density=0.01",),
    ),
  ):
    for rate in slow_first(pace.rate for pace in _results(name).rows["paces"]):
      found = {one.method: one for one in standings(_results(name), rate, Target(300))}
      for method in methods:
        numbers = [number(found[one].seconds, ",.1f") for one in (DENSE, method)]
        gain = number(found[method].speed_up, ",.2f")
        rows.append(
          [what, f"4 hosts, {rate_text(rate)}", name_of(method), *numbers, gain]
        )
  # Milliseconds of an update by algorithm, for each network. Those outside `_UPDATES`
  # have no ratio to dense in their table (`gains`): the ratio is computed.
  ms_of = {
    f"6 hosts, {row['links']}": row
    for row in kept_rows("updates_rates")
    if row["n"] == 14_728_266
  }
  gains: dict[tuple[str, str], float] = {}
  for table, network in _UPDATES:
    ms_of[network] = {row["algorithm"]: row["ms"] for row in kept_rows(table)}
    gains |= {(network, row["algorithm"]): row["× f32"] for row in kept_rows(table)}
  for network, ms in ms_of.items():
    for method, text in (
      ("spardl", "SparDL"),
      ("spardl:selector=chunked:wire=bf16", "SparDL, chunked, bf16"),
    ):
      if method in ms:
        numbers = [f"{ms[DENSE]:,.0f}", f"{ms[method]:,.0f}"]
        gain = f"{gains.get((network, method), ms[DENSE] / ms[method]):.1f}"
        rows.append(
          ["ms an update, n = 14.7 M (VGG-16), 1 %", network, text, *numbers, gain]
        )
  return markdown(
    ["measured", "network", "method", "dense", "this method", "times as fast"], rows
  )


def recipes(*families: str) -> str:
  """How often each recipe of training.toml is within 2 % of dense, over the tasks of its condition."""
  names = {
    (one["method"], one["optimizer"]): one["words"] for one in sweep.RECIPES.values()
  }
  known = js.costs.evidence(own_data=None)
  rows = [row for row in known if row.gap is not None and row.workers == 4]
  cells = []
  for family, own_data in itertools.product(families, (False, True)):
    groups: dict[str, list[Evidence]] = {}
    for row in rows:
      # "window_adam" is of the family "adam".
      kind = row.optimizer.split(":")[0]
      if row.own_data == own_data and kind.split("_")[-1] == family:
        groups.setdefault(names[row.method, kind], []).append(row)
    data = "differ" if own_data else "shares of all"
    in_order = sorted(groups.items(), key=lambda one: _median_gap(one[1]))
    cells += [[data, words, *_recipe_cells(found)] for words, found in in_order]
  head = ["workers' data", "recipe", "bits", "median, %", "worst, %", "tasks"]
  head += ["within 2 %", "undecided", "within 2 % at dense's rate", "holds"]
  return markdown(head, cells)


def _median_gap(rows: Sequence[Evidence]) -> float:
  """Median over tasks of the percent of a recipe's loss above dense's."""
  return statistics.median(row.gap for row in rows if row.gap is not None)


def _recipe_cells(rows: Sequence[Evidence]) -> list[str]:
  """The cells of one recipe; a task is undecided whose gap is over 2 % by less than its standard error."""
  gaps = {row.task.split(",")[0]: (row.gap or 0, row.gap_error or 0) for row in rows}
  worst = max(gaps, key=lambda task: gaps[task])
  # 2 %, as `holds` takes it
  within = sum(gap <= 2 for gap, _ in gaps.values())
  above = sum(gap - error > 2 for gap, error in gaps.values())
  untuned = sum(row.gap_untuned is not None and row.gap_untuned <= 2 for row in rows)
  bits = statistics.median(row.bits or 0 for row in rows)
  return [
    f"{bits:.2g}",
    f"{_median_gap(rows):+.1f}",
    f"{gaps[worst][0]:+.0f} ({worst})",
    str(len(rows)),
    str(within),
    str(len(rows) - within - above),
    str(untuned),
    "yes" if holds(rows) else "no",
  ]


def wire() -> str:
  """Seconds on the wire of one update, by the formulas: the most that a method can save."""
  # α, seconds of a message, and β, seconds of a byte
  networks = {
    "100 Mbit/s": (3e-4, 8e-8),
    "1 Gbit/s": (1e-4, 8e-9),
    "25 Gbit/s": (3e-5, 3.2e-10),
  }
  models = {
    "ResNet-20": 269_722,
    "transformer": 3_295_232,
    "VGG-16": 14_728_266,
    "BERT": 133_547_324,
  }
  methods: dict[str, dict[str, Any]] = {"dense": {}, "spardl": {"density": 0.01}}
  rows = []
  for model, n in models.items():
    costs = [
      js.costs.predict(name, n=n, workers=6, **options)
      for name, options in methods.items()
    ]
    rows.append(
      [
        model,
        f"{n:,}",
        *(f"{one.seconds(*link):.2g}" for link in networks.values() for one in costs),
      ]
    )
  return markdown(
    [
      "model",
      "n",
      *(f"{name}: {one}" for name in networks for one in ("dense", "SparDL 1 %")),
    ],
    rows,
  )


def wires() -> str:
  """Bits of an entry in every wire format, in compiled programs, beside the entropy."""
  rows = json.loads((RESULTS / "wires.json").read_text())["rows"]
  of_row = lambda row: bits_of_wires.cells(bits_of_wires.Row(**row))
  return markdown(bits_of_wires.HEADS, map(of_row, rows))


_SIMPLE = (
  kept,
  race,
  paces,
  wholes,
  losses,
  runs,
  papers,
  trainers,
  verdicts,
  summary,
  wire,
  wires,
  peers,
  recipes,
)
TABLES = {
  function.__name__: function
  for function in (
    *_SIMPLE,
    elastic,
    late,
    rounds,
    thousands,
    weights,
    heterogeneous,
    contention,
    compiled,
    device,
  )
}


def main() -> None:
  """Fills all pages."""
  for page in pages():
    before = page.read_text()
    after = fill(before)
    if after != before:
      report.replace(page, after)
      print(f"tables: {page.relative_to(ROOT)}")


if __name__ == "__main__":
  main()
