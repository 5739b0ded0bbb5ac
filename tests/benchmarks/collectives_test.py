"""The benchmark of updates: what it times is checked, and what it says can be read."""

import functools
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from benchmarks import specs, updates, workers
from jaxsparse.comm import SoloComm
from tests.benchmarks import commands

collectives = functools.partial(commands.run, "benchmarks.collectives")


def bench(n=600):
  sim = js.SimComm("workers", members=3)
  return updates.Bench(workers.Workers(sim, sim, 3, 3, 0), "sim", n, 2)


def test_a_row_has_the_words_and_the_laws():
  (spec,) = specs.parse(["spardl"], 3, density=0.1)
  row = bench().row(spec, 0.1, "")
  assert (row.words, row.messages, row.checked, row.repetitions) == (4 * 20 * 2, 4, "C R", 2)
  assert row.seconds > 0
  assert 0 < row.selection <= row.arithmetic
  assert row.bus_bandwidth == pytest.approx(2 * 2 / 3 * 4 * 600 / row.seconds / 1e9)


def test_a_result_that_breaks_a_law_is_no_row(monkeypatch):
  (spec,) = specs.parse(["spardl"], 3, density=0.1)
  kind, reduce = type(spec.collective), type(spec.collective).reduce
  forgets = lambda self, comm, grads, state: reduce(self, comm, grads, state)._replace(
    state=state._replace(residual=jnp.zeros_like(grads))
  )
  monkeypatch.setattr(kind, "reduce", forgets)
  with pytest.raises(RuntimeError, match=r"spardl: .* of the gradient was lost or made up \(Law C\)"):
    bench().row(spec, 0.1, "")

  def differs(self, comm, grads, state):
    reduced = reduce(self, comm, grads, state)
    values = reduced.total.values * (1 + jnp.float32(1e-6) * comm.rank.astype(jnp.float32))
    return reduced._replace(total=reduced.total._replace(values=values))

  monkeypatch.setattr(kind, "reduce", differs)
  with pytest.raises(RuntimeError, match=r"different totals \(Law R\)"):
    bench(601).row(spec, 0.1, "")


def test_the_part_before_the_first_message_is_the_selection():
  collective = js.make_collective("topka", k=3)
  tx = js.transform_of(collective, SoloComm(4))
  grads = jnp.array([0.0, 5.0, 1.0, -7.0, 2.0, 6.0])
  (message,) = updates.until_first_message(tx.update)(grads, tx.init(grads))
  values = np.asarray(jax.lax.bitcast_convert_type(message, jnp.float32)).ravel()
  assert {5.0, -7.0, 6.0} <= set(values.tolist())


def test_sizes_as_a_table_a_figure_and_json(tmp_path):
  flags = ("--workers=2", "--n=1000,2000", "--algorithms=spardl,dense", "--repetitions=1", f"--report_dir={tmp_path}")
  done = collectives("--engine=devices", *flags, "--json")
  assert done.returncode == 0, done.stderr[-2000:]
  rows = json.loads(done.stdout)
  assert [(row["algorithm"], row["n"]) for row in rows] == [
    (name, n) for n in (1000, 2000) for name in ("spardl", "dense")
  ]
  assert rows[3]["words"] == 2000
  assert (tmp_path / "collectives.png").stat().st_size > 10_000
  assert "× f32" in done.stderr


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="the lab needs root and iproute2")
def test_in_the_lab_dense_takes_what_the_wire_takes(tmp_path):
  flags = ("--workers=2", "--n=250000", "--algorithms=dense,spardl", "--repetitions=2", f"--report_dir={tmp_path}")
  done = collectives("--rate=20mbit", *flags, "--predict", "--json")
  assert done.returncode == 0, done.stderr[-2000:]
  dense, sparse = json.loads(done.stdout)
  wire = 250_000 * 4 * 8 / 20e6  # two workers: each sends n words at 20 Mbit/s
  assert 0.9 * wire < dense["seconds"] < 1.6 * wire
  assert sparse["seconds"] < dense["seconds"] / 4
  assert dense["predicted"] == pytest.approx(dense["seconds"], rel=0.5)


BAD_FLAGS = [
  (["--workers=0"], "--workers=0, give numbers above 0"),
  (["--n=many"], "--n=many, give numbers above 0"),
  (["--rate=1gbit", "--engine=sim"], "--rate needs ranks that talk over a network"),
  (["--rate=fast"], "fast"),
  (["--algorithms=spardl:teams=4"], "teams=4"),
]


def test_bad_flags(subtests):
  commands.check_refusals("benchmarks.collectives", BAD_FLAGS, subtests)
