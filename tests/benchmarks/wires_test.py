"""Bits of an entry: those that the page has are those of today's programs, and meet the goals."""

import json
import math

import jax
import pytest

import jaxsparse as js
from benchmarks import specs, tables, wires
from tests.cases import quick_of

N = 14_728_266
ROWS = {
  row["algorithm"]: wires.Row(**row)
  for row in json.loads((tables.RESULTS / "wires.json").read_text())["rows"]
}
# Bits of an entry at 1 %, and of SparseLoCo's chunks.
MOST = {
  "spardl:wire=f32": 40.8,
  "spardl:wire=bf16": 24.8,
  "spardl:wire=int8": 16.9,
  "spardl:wire=int4": 13.0,
  "spardl:selector=chunked:wire=int4": 11.5,
  "chunktopk:density=0.015625:wire=2bit": 12.1,
}


@pytest.mark.parametrize("label", quick_of(ROWS, quick=["spardl:wire=int4"]))
def test_kept_bits_are_those_of_todays_program(label):
  """Counted in the jaxpr, where the kept ones are of the compiled program."""
  (spec,) = specs.parse([label], wires.WORKERS, density=0.01)
  cost = js.costs.count(spec.collective, n=N, workers=wires.WORKERS)
  entries = math.ceil(spec.config["density"] * N)
  assert ROWS[label].bits == pytest.approx(32 * cost.words / entries, rel=1e-3)


def test_goals():
  assert all(ROWS[label].bits <= most for label, most in MOST.items())
  assert all(row.ratio >= 1 for row in ROWS.values())


def test_a_row_of_a_compiled_program():
  """32 bits of a value and 32 of an index, a word each."""
  assert len(jax.devices()) >= wires.WORKERS
  (spec,) = specs.parse(["topka:wire=coo"], wires.WORKERS, density=0.5)
  row = wires.row(spec, 64)
  assert (row.bits, row.value, row.density) == (64.0, 32, 0.5)
  assert 2 ** (32 * row.entropy) == pytest.approx(math.comb(64, 32), rel=1e-6)
