"""DrJAX: the DiLoCo of docs/how_to/trainers.md, and what the page's diff makes of it."""

import re

import pytest

from tests.benchmarks import commands
from tests.docs_test import blocks, run, snippets
from tests.trainers.diffs import changed, lines_changed

pytest.importorskip("drjax")
THEIRS = snippets("docs/how_to/trainers.md")[0]
DIFF, *_ = blocks("docs/how_to/trainers.md", "diff")
SIGNS = 'js.onebit_transform("replicas")'
SPARSELOCO = (
  'js.chunktopk_transform("replicas", density=1 / 64, decay=0.95, wire="2bit")'
)
# The parameters, and the words of the largest array of each message of the compiled
# program.
SHOW = r"""
import re
text = train_round.lower(params, inner_states, outer_state, batches).compile().as_text()
kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
for shapes in re.findall(rf"= (.*?) (?:{kinds})(?:-start)?\(", text):
  dimensions = [[int(size) for size in found.split(",") if size] for found in re.findall(r"\[([\d,]*)\]", shapes)]
  print("message", max(int(jnp.prod(jnp.array(sizes))) for sizes in dimensions))
print("params", *jnp.concatenate([params["bias"], params["kernel"].reshape(-1)]), f"loss {loss}")
"""
WORDS = "print('words', int(js.metrics(outer_state).words_sent))\n"
ENTRIES = 31 * 64


def trained(code, folder, words=True):
  """(parameters, loss, words sent by a replica, words of each message) of a program."""
  printed = run(code + SHOW + (WORDS if words else ""), folder)
  number = lambda name: [
    float(found) for found in re.findall(rf"{name} (\S+)$", printed, re.MULTILINE)
  ]
  (line,) = re.findall(r"params (.*) loss", printed)
  return (
    [float(entry) for entry in line.split()],
    *number("loss"),
    number("words"),
    number("message"),
  )


def test_dense_is_theirs(tmp_path):
  assert lines_changed(DIFF) == (3, 2)
  params, loss, _, (message, *_) = trained(THEIRS, tmp_path, words=False)
  own, own_loss, (words,), _ = trained(
    changed(THEIRS, DIFF.replace(SIGNS, 'js.dense_transform("replicas")')), tmp_path
  )
  assert own == pytest.approx(params, rel=1e-5, abs=1e-6)
  assert own_loss == pytest.approx(loss, rel=1e-5)
  assert message == 30 * 64  # the kernel, beside it the bias
  assert words == 2 * 3 / 4 * ENTRIES


@pytest.mark.parametrize(
  ("outer", "most", "axes"),
  [
    pytest.param(SIGNS, ENTRIES / 16, "Auto", id="signs"),
    pytest.param(SPARSELOCO, 64, "Explicit", id="SparseLoCo"),
    pytest.param(
      'js.spardl_transform("replicas", density=0.05)',
      ENTRIES / 4,
      "Explicit",
      id="spardl",
    ),
  ],
)
def test_fewer_words(outer, most, axes, tmp_path):
  """They are those of the metrics, and no message of the program is larger: no parameters of a replica are gathered."""
  mesh = 'jax.make_mesh((4,), ("replicas",)'
  code = changed(THEIRS, DIFF.replace(SIGNS, outer)).replace(
    mesh, f"{mesh}, (jax.sharding.AxisType.{axes},)"
  )
  _, loss, (words,), messages = trained(code, tmp_path)
  assert 0 < words <= most
  assert max(messages) <= words
  assert loss < 0.2


def test_the_benchmark():
  flags = "--exchange=drjax,dense,signs", "--rounds=2", "--every=2", "--seed=3"
  theirs, dense, signs = commands.result_of("trainers", *flags)
  assert dense["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
  assert dense["words"] == theirs["words"] == 1.5 * dense["n"]
  assert 0 < signs["words"] < dense["words"] / 25
  assert signs["loss"] < 6
