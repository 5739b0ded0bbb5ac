"""The benchmark of updates: what it times is checked, and rows outlive what ends a run."""

import json
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from benchmarks import recorded, specs, workers
from benchmarks.collectives import embedding, updates
from jaxsparse.train import timing
from jaxsparse.train.engine import engine_of
from tests.benchmarks import commands
from tests.cases import quick_of

PLACE = workers.here("sim", 3)


def bench(n=600):
  return updates.Bench(PLACE, "sim", n, warm_up=2, repetitions=2)


def test_a_row_has_the_words_and_the_laws():
  (spec,) = specs.parse(["spardl"], 3, density=0.1)
  row = bench().row(spec, 0.1)
  assert (row.words, row.messages, row.checked, row.wrong) == (4 * 20 * 2, 4, "C R", 0)
  assert (row.warm_up, row.steps, row.gradients) == (2, 2, "normal")
  assert row.arithmetic > 0
  assert row.busbw == pytest.approx(2 * 2 / 3 * 4 * 600 / row.seconds / 1e9)


@pytest.mark.long
@pytest.mark.parametrize(
  "label", quick_of(["powersgd", "powersgd:rank=2:alternate=True"], quick=["powersgd"])
)
def test_what_needs_shapes_has_the_leaves_of_vgg16(label):
  (spec,) = specs.parse([label], 3)
  n = 1728 + 3 * 64 + 36_864 + 100  # a cut fifth leaf
  assert specs.shapes(n) == ((3, 3, 3, 64), *[(64,)] * 3, (3, 3, 64, 64), (64,), (36,))
  assert specs.shapes(14_728_266) == tuple(specs.VGG16.values())
  row = bench(n).row(spec, 0.1)
  params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in specs.shapes(n)]
  cost = js.costs.predict(spec.name, n=params, workers=3, **spec.config)
  assert (row.checked, row.wrong, row.messages) == ("C R", 0, cost.messages)
  assert row.words <= cost.words


def test_ids_follow_zipfs_law_and_the_rows_that_an_all_gather_loses_are_counted():
  ids = embedding.draw(rows=40, workers=3, ids=2000, exponent=1.0)
  shares = np.bincount(ids.ravel(), minlength=40) / ids.size
  np.testing.assert_allclose(
    shares, 1 / np.arange(1, 41) / np.sum(1 / np.arange(1, 41)), rtol=0.1
  )
  few = ids[:, :, :9]
  n = 40 * embedding.WIDTH
  make = embedding.gradients(engine_of(PLACE.where, "workers"), n, few)
  touched = np.any(np.asarray(make(2)).reshape(3, 40, -1), 2)
  assert [set(np.flatnonzero(worker)) for worker in touched] == [
    set(worker) for worker in few[2]
  ]
  bench = updates.Bench(
    PLACE, "sim", n, 2, 2, make, kind="zipf", shapes=embedding.shapes
  )
  for capacity, is_right in ((9, True), (4, False)):
    (spec,) = specs.parse([f"gathered_rows:capacity={capacity}"], 3)
    timed = bench.updates(spec, spec.sized(n, embedding.shapes))
    assert timed.words == [2 * capacity * (embedding.WIDTH + 1)] * 2
    assert (timed.wrong == 0) == is_right
  with pytest.raises(
    ValueError, match="gathered_rows: 5 leaves, choose --gradients=zipf"
  ):
    spec.sized(2000)


def test_an_algorithm_with_a_period_is_timed_over_whole_ones():
  steps_of = lambda label, **counts: updates.plan(
    specs.parse([label], 3, density=0.1)[0].collective, **counts
  )
  assert steps_of(
    "oktopk:threshold_period=8:region_period=12", warm_up=1, repetitions=5
  ) == (46, 24, 24)  # 70 steps
  assert steps_of("oktopk", warm_up=30, repetitions=65) == (30, 128, 64)
  assert steps_of("dense", warm_up=1, repetitions=5) == (1, 5, 1)


@pytest.mark.long
def test_wrong_entries_are_counted(monkeypatch):
  (spec,) = specs.parse(["spardl"], 3, density=0.1)
  kind, reduce = type(spec.collective), type(spec.collective).reduce

  def forgets(self, comm, grads, state):
    reduced = reduce(self, comm, grads, state)
    pending = reduced.state.residual
    zeros = jnp.zeros_like(grads)
    entries = pending.entries._replace(values=jnp.zeros_like(pending.entries.values))
    nothing = pending._replace(grads=zeros, residual=zeros, entries=entries)
    return reduced._replace(state=reduced.state._replace(residual=nothing))

  wrong = 0
  # the two that are timed; without residuals each is a step of its own
  for step in (
    2,
    3,
  ):
    grads = timing.gradients(engine_of(PLACE.where, "workers"), 600)(step).reshape(
      3, 600
    )
    total = js.simulate("spardl", grads, density=0.1).total
    wrong += int((jnp.abs(grads.sum(0) - total) > 1e-5).sum())
  assert wrong > 1000
  monkeypatch.setattr(kind, "reduce", forgets)
  assert bench().updates(spec, spec.sized(600)).wrong == wrong

  def differs(self, comm, grads, state):
    reduced = reduce(self, comm, grads, state)
    bits = jax.lax.bitcast_convert_type(reduced.total.values, jnp.int32)
    # one unit in the last place at one worker
    bits = bits.at[0, :3].add((comm.rank == 1).astype(jnp.int32))
    return reduced._replace(
      total=reduced.total._replace(
        values=jax.lax.bitcast_convert_type(bits, jnp.float32)
      )
    )

  monkeypatch.setattr(kind, "reduce", differs)
  assert bench(601).updates(spec, spec.sized(601)).wrong == 2 * 3


def test_what_bfloat16_rounds_is_not_wrong(monkeypatch):
  """1 + 2⁻⁸ is 1 in bfloat16, and so is its sum with 2⁻⁸: the largest errors of an operand and of a sum at once."""
  (spec,) = specs.parse(["dense:dtype=bfloat16"], 3, density=1)
  grads = jnp.tile(jnp.array([1 + 2**-8, 2**-8, 0]), (600, 1)).T.ravel()
  monkeypatch.setattr(timing, "gradients", lambda *_: lambda _: jnp.copy(grads))
  assert bench().updates(spec, spec.sized(600)).wrong == 0


def test_a_longer_gradient_repeats_the_recorded_one(tmp_path):
  path, (size, steps, entries) = tmp_path / "recorded.npy", (2, 3, 50)
  recording = (
    np.random.default_rng(0).standard_t(2, (size, steps, entries)).astype(np.float32)
  )
  np.save(path, recording)
  n = 2 * entries + 7
  grads = recorded.gradients(PLACE, path, n)
  rows = np.stack([np.asarray(grads(step)).reshape(3, n) for step in range(steps)])
  # each begins with a step and a scale of its own
  for copy in (
    slice(entries),
    slice(entries, 2 * entries),
  ):
    ratios = rows[0, 0, copy] / recording[0]
    (first,) = (number for number, row in enumerate(ratios) if np.ptp(row) < 1e-4)
    assert 0.5 <= abs(ratios[first, 0]) <= 2
    for step in range(steps):
      expected = ratios[first, 0] * recording[:, (first + step) % steps]
      np.testing.assert_allclose(rows[step, :2, copy], expected, 1e-4)
  assert np.asarray(recorded.gradients(PLACE, path, 10)(0)).shape == (30,)


def small(tmp_path, *flags):
  folders = (f"--report_dir={tmp_path}", f"--cache_dir={tmp_path}")
  return commands.run(
    "benchmarks.collectives", "--gradients=normal", "--workers=2", *folders, *flags
  )


@pytest.mark.long
def test_rows_of_several_sizes(tmp_path):
  done = small(
    tmp_path,
    "--engine=devices",
    "--n=1000,2000",
    "--algorithms=topka,dense",
    "--repetitions=1",
    "--json",
  )
  assert done.returncode == 0, done.stderr[-2000:]
  rows = json.loads(done.stdout)
  assert [(row["algorithm"], row["n"]) for row in rows[:3]] == [
    ("topka", 1000),
    ("dense", 1000),
    ("topka", 2000),
  ]
  assert (rows[3]["words"], rows[3]["wrong"]) == (2000, 0)
  kept = [
    json.loads(line)
    for line in (tmp_path / "collectives.jsonl").read_text().splitlines()
  ]
  assert [{**row, "run": kept[0]["run"]} for row in rows] == kept
  assert "wrong: 0 OK" in done.stderr


@pytest.mark.long
def test_an_interrupted_run_keeps_its_rows(tmp_path):
  flags = (
    "--engine=sim",
    "--gradients=normal",
    "--workers=2",
    "--n=1000",
    "--algorithms=dense,spardl,oktopk",
  )
  command = [
    "env",
    "--default-signal",
    sys.executable,
    "-m",
    "benchmarks.collectives",
    *flags,
  ]
  command += [f"--report_dir={tmp_path}", f"--cache_dir={tmp_path}"]
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
  with subprocess.Popen(command, cwd=commands.ROOT, **pipes) as process:
    assert "dense: " in process.stdout.readline()
    process.terminate()
    out, err = process.communicate(timeout=60)
  assert process.returncode == 128 + signal.SIGTERM, err[-2000:]
  assert "│ dense " in out
  kept = [
    json.loads(line)
    for line in (tmp_path / "collectives.jsonl").read_text().splitlines()
  ]
  # oktopk had no time
  assert [row["algorithm"] for row in kept] == ["dense", "spardl"][: len(kept)]


@pytest.mark.long
def test_a_row_that_fails_is_named(tmp_path):
  done = small(
    tmp_path, "--engine=sim", "--n=1000", "--algorithms=dense,topka:density=None:k=2000"
  )
  assert done.returncode == 1
  assert "error: topka:density=None:k=2000: rank 0 failed: " in done.stderr
  assert "│ dense " in done.stdout


@pytest.mark.long
@commands.needs_lab
def test_in_the_lab_dense_takes_what_the_wire_takes(tmp_path):
  flags = (
    "--n=250000",
    "--algorithms=dense,topka",
    "--repetitions=2",
    "--rate=20mbit",
    "--predict",
    "--json",
  )
  done = small(tmp_path, *flags)
  assert done.returncode == 0, done.stderr[-2000:]
  dense, sparse = json.loads(done.stdout)
  wire = 250_000 * 4 * 8 / 20e6  # two workers: each sends n words at 20 Mbit/s
  assert 0.9 * wire < dense["seconds"] < 1.6 * wire
  assert sparse["seconds"] < dense["seconds"] / 4
  assert dense["predicted"] == pytest.approx(dense["seconds"], rel=0.5)
  assert dense["wrong"] == sparse["wrong"] == 0
