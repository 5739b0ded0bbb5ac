"""The cost model: what is fitted, what is predicted from it, and what is advised."""

import dataclasses
import itertools
import json
import math
import re
import time

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from jaxsparse.collectives._base import collective_of
from jaxsparse.costs import Profile, calibration
from jaxsparse.costs.advice import Evidence
from jaxsparse.costs.calibration import Algorithm
from jaxsparse.costs.counting import count_inside
from jaxsparse.train import timing
from jaxsparse.train.engine import engine_of
from tests.cases import mesh_of

SPARDL = "spardl:density=0.01"
ALGORITHMS = {"dense": Algorithm(1e-9, reduces=True), SPARDL: Algorithm(2e-8)}
PROFILE = Profile(
  6,
  1e-4,
  8e-9,
  1.5,
  reduce_alpha=2e-4,
  reduce_beta=9e-9,
  entries=10_000,
  algorithms=ALGORITHMS,
)


def test_the_profile_of_a_machine_has_what_was_measured_there_and_the_given_link():
  link = js.overlap.Link(alpha=1e-5, beta=1e-9, gamma=1.5)
  found = Profile.of("h100", link, workers=3, devices=2)
  assert (found.workers, found.devices, found.entries) == (3, 2, 14_728_266)
  assert (found.alpha, found.beta, found.gamma) == link
  assert (found.reduce_alpha, found.reduce_beta) == link[:2]
  names = {collective_of(label)[0] for label in found.algorithms}
  # a2sgd averages no gradients; a new collective is not measured yet
  assert names <= set(js.collective_names()) - {"a2sgd"}
  assert names >= {"dense", "spardl", "oktopk", "onebit", "nbit", "powersgd", "rows"}
  n = 14_728_266
  advice = js.costs.advise(n, found)
  # they need shapes
  assert {"powersgd", "rows"} == set(found.algorithms) - {
    one.label for one in advice.predictions
  }
  for one in advice.predictions:
    measured = found.algorithms[one.label]
    assert one.arithmetic == pytest.approx(measured.arithmetic * n / 2)
    assert 1e-5 < measured.arithmetic * n < 1e-2  # a GPU reads as many entries in 27 µs


def test_seconds_are_arithmetic_and_the_alpha_beta_model():
  n = 1_000_000
  dense, sparse = sorted(
    js.costs.advise(n, PROFILE).predictions, key=lambda one: one.label
  )
  cost = js.costs.predict("spardl", n=n, workers=6, density=0.01)
  assert sparse.seconds == pytest.approx(2e-8 * n + cost.seconds(1e-4, 8e-9))
  assert (sparse.messages, sparse.words, sparse.config) == (
    cost.messages,
    cost.words,
    {"density": 0.01},
  )
  assert dense.seconds == pytest.approx(
    1e-9 * n + js.costs.predict("dense", n=n, workers=6).seconds(2e-4, 9e-9)
  )
  # Messages that are not full, agreements, and an all-reduce that is slower than that
  # of float32.
  half, slow = (
    Algorithm(0.0, fill=0.5),
    Algorithm(0.0, reduces=True, slowdown=2),
  )
  other = dataclasses.replace(
    PROFILE, algorithms={"oktopk:density=0.01": half, "dense:dtype=bfloat16": slow}
  )
  found = js.costs.advise({"w": jnp.zeros((1000, 100))}, other).predictions
  dense, sparse = sorted(found, key=lambda one: one.label)
  cost = js.costs.predict("oktopk", n=100_000, workers=6, density=0.01)
  assert sparse.words == round(cost.words / 2)
  assert sparse.seconds == pytest.approx(
    cost.messages * 1e-4 + 4 * sparse.words * 8e-9 + 3 * 2 * 3 * 2e-4
  )
  cost = js.costs.count("dense", n=100_000, workers=6, dtype="bfloat16")
  assert dense.wire == pytest.approx(cost.seconds(2e-4, 2 * 9e-9))


def test_what_does_not_shrink_with_a_gradient_is_measured_apart(monkeypatch):
  """Time of many entries, scaled, would be far too little for few, and hide which update starts more operations."""
  n = 2**16
  monkeypatch.setattr(calibration, "_LONG", 0.0)
  time_alone = lambda *arguments: ([1e-3 + 5e-9 * arguments[3].size], None)
  monkeypatch.setattr(timing, "alone", time_alone)
  labels = ["dense", "powersgd:rank=2", "spardl:k=5000"]
  params = {"w": jnp.zeros((256, 256))}
  profile = js.costs.fit(
    mesh_of(2), n=params, algorithms=labels, repetitions=1, seconds=math.inf
  )
  for label, measured in profile.algorithms.items():
    # Of each of two workers; 4,096 entries are few, not none.
    assert measured.seconds(n) == pytest.approx(1e-3 + 1e-8 * n), label
    assert measured.seconds(0) == pytest.approx(1e-3 + 1e-8 * 4096)
  small = js.costs.advise({"w": jnp.zeros((80, 80))}, profile)
  assert {one.arithmetic > 1e-3 for one in small.predictions} == {True}
  assert "timed with 65,536 entries a device and is scaled to 6,400" in str(small)
  assert "timed" not in str(js.costs.advise(params, profile))


def test_an_all_reduce_that_was_not_measured_is_not_free():
  """Neither that of dense nor the agreements."""
  algorithms = {"dense": Algorithm(0.0, reduces=True), "oktopk:k=60": Algorithm(0.0)}
  profile = Profile(6, 1e-4, 8e-9, algorithms=algorithms)
  for one in js.costs.advise(10_000, profile).predictions:
    cost = js.costs.predict(one.name, n=10_000, workers=6, **one.config)
    assert one.seconds == pytest.approx(cost.seconds(1e-4, 8e-9)), one.label


def test_fewer_messages_of_teams_count():
  """B-SAG sends 4 messages, 3 teams of 2 of 6 workers, instead of 6, and agrees on nothing."""
  one, three = (
    js.costs.count("spardl", n=1000, workers=6, density=0.01, teams=teams)
    for teams in (1, 3)
  )
  assert (one.messages + one.agreements, three.messages + three.agreements) == (6, 4)
  assert three.seconds(1e-4, 0.0) < one.seconds(1e-4, 0.0)


NUMBERS = st.sampled_from([0.0, 5e-324, 1e-12, 1.0, 1e30])


@hypothesis.settings(max_examples=30)
@hypothesis.given(st.lists(NUMBERS, min_size=14, max_size=14), st.integers(1, 9))
def test_any_numbers_of_a_profile_are_compared(numbers, workers):
  alpha, beta, gamma, reduce_alpha, reduce_beta, *others = numbers
  labels = ("dense", "oktopk:density=0.01", "spardl:density=0.01")
  algorithms = {
    label: Algorithm(arithmetic, 0.5, label == "dense", slowdown, overhead)
    for label, arithmetic, slowdown, overhead in zip(
      labels, others[:3], others[3:6], others[6:9], strict=True
    )
  }
  profile = Profile(
    workers, alpha, beta, gamma, reduce_alpha, reduce_beta, 5, algorithms
  )
  rows = [row_of("updates/spardl")]
  for n in (1, 1000):
    for options in ({}, {"evidence": rows}):
      found = js.costs.advise(n, profile, **options)
      assert found.best.title in str(found)
      assert not math.isnan(found.best.seconds)
  assert js.costs.link_of(profile).alpha >= 0


def test_a_profile_of_an_earlier_version_is_read(tmp_path):
  PROFILE.save(tmp_path / "profile.json")
  earlier = json.loads((tmp_path / "profile.json").read_text())
  for measured in earlier["algorithms"].values():
    measured["agreements"] = 1
    del measured["overhead"]
  (tmp_path / "profile.json").write_text(json.dumps(earlier))
  assert Profile.load(str(tmp_path / "profile.json")) == PROFILE


def test_the_advice_follows_the_network():
  slow = js.costs.advise(10_000_000, PROFILE)
  assert slow.best.label == SPARDL
  assert "it saves" in slow.why
  fast = js.costs.advise(10_000_000, dataclasses.replace(PROFILE, reduce_beta=1e-10))
  assert fast.best.label == "dense"
  assert SPARDL in fast.why
  assert "messages" in str(fast)
  assert str(fast).splitlines()[1].startswith("dense")


def test_the_wire_follows_the_network():
  """A set of indices takes arithmetic, which a slow link gives back and a fast one does not."""
  plain, packed = "spardl:density=0.01", "spardl:wire=f32:density=0.01"
  assert {plain, packed} <= set(calibration.candidates(6, [0.01]))
  algorithms = {plain: Algorithm(2e-9), packed: Algorithm(2.2e-9)}
  for beta, best in ((8e-7, packed), (8e-11, plain)):
    profile = dataclasses.replace(PROFILE, beta=beta, algorithms=algorithms)
    assert js.costs.advise(10_000_000, profile).best.label == best


def test_the_order_is_that_of_measured_updates():
  """A profile of four CPU devices on two cores, and seconds of updates there by turns, the fastest of 22."""
  chunked = "spardl:selector=chunked:density=0.01"
  measured = {"dense": 1.15e-3, chunked: 3.21e-3, "onebit": 3.87e-3}
  algorithms = {
    "onebit": Algorithm(6.85e-9, overhead=5.0e-4),
    "dense": Algorithm(1.15e-9, reduces=True, overhead=2.9e-4),
    chunked: Algorithm(7.34e-9, overhead=3.9e-4),
  }
  profile = Profile(4, 2.86e-4, 6.9e-10, 1.0, 4.8e-5, 1.2e-10, 196_864, algorithms)
  found = js.costs.advise(196_864, profile).predictions
  assert [one.label for one in found] == list(measured)
  for one in found:
    predicted = one.seconds - found[0].seconds
    assert predicted == pytest.approx(measured[one.label] - 1.15e-3, abs=4e-4)


def test_a_link_predicts_what_the_advice_does():
  for label in ALGORITHMS:
    name, config = collective_of(label)
    link = js.costs.link_of(dataclasses.replace(PROFILE, gamma=0.9), name, **config)
    assert link.gamma == 1.0
    for n in (10_000, 1_000_000):
      (one,) = [
        one for one in js.costs.advise(n, PROFILE).predictions if one.label == label
      ]
      assert link.seconds(4 * n) == pytest.approx(one.seconds, rel=1e-3)


def test_the_print_out_says_what_it_does_not_know():
  """Accuracy, and how far predictions were off where updates were measured."""
  *_, why, accuracy, errors = str(js.costs.advise(10_000_000, PROFILE)).splitlines()
  assert why.startswith(SPARDL)
  assert accuracy.startswith(
    "Accuracy is not considered: a lower density, or more local steps, are always faster"
  )
  assert re.fullmatch(
    r"Seconds are predicted: of the last 32 .* at most \d+%, 27 by at most 25%, .* by 50%.",
    errors,
  )
  *_, accuracy, _ = str(
    js.costs.advise(1000, PROFILE, evidence=[row_of("updates/spardl")])
  ).splitlines()
  assert accuracy.startswith("Accuracy counts by these trainings alone")


def test_a_label_has_the_number_of_local_steps():
  best = js.costs.advise(10_000_000, PROFILE, every=(1, 30)).best
  assert (best.label, best.title) == (f"{SPARDL} every 30 steps",) * 2
  assert js.make_collective(best.name, **best.config).density == 0.01
  found = js.costs.advise(
    1000, PROFILE, evidence=[row_of("local:every=10/spardl", every=10)]
  ).predictions
  assert {one.label for one in found} == {"dense", f"{SPARDL} every 10 steps"}


def row_of(method, every=1, steps=1.2, collective=SPARDL):
  return Evidence(
    method, collective, every, "adam:0.001", "lm", 4, steps, 0.1 if steps else None, 3
  )


def test_evidence_orders_methods_by_seconds_to_the_loss():
  """Steps of the training, times compute and exchange of a step."""
  often, rarely = (
    row_of("updates/spardl"),
    row_of("local:every=10/spardl", every=10, steps=1.5),
  )
  found = js.costs.advise(10_000_000, PROFILE, evidence=[often, rarely], compute=0.1)
  (update,) = [
    one
    for one in js.costs.advise(10_000_000, PROFILE).predictions
    if one.label == SPARDL
  ]
  best, other, dense = found.predictions
  seconds = [
    1.5 * (0.1 + update.seconds / 10),
    0.1 + dense.seconds,
    1.2 * (0.1 + update.seconds),
  ]
  assert [best.to_loss, dense.to_loss, other.to_loss] == pytest.approx(seconds)
  assert best.to_loss < other.to_loss < dense.to_loss
  assert [one.evidence for one in found.predictions] == [rarely, often, None]
  ratio = dense.to_loss / best.to_loss
  assert (
    found.why
    == f"local:every=10/spardl reaches dense's loss {ratio:.2f} times as fast as dense: {rarely}"
  )
  assert "to loss" in str(found).splitlines()[0]
  # Dense in 16 bits is no baseline: it needs evidence, as each method.
  algorithms = {label: Algorithm(1e-9) for label in ("dense", "dense:dtype=bfloat16")}
  both = dataclasses.replace(PROFILE, algorithms=PROFILE.algorithms | algorithms)
  much = js.costs.advise(10_000_000, both, evidence=[often, rarely], compute=100.0)
  assert [one.title for one in much.predictions] == [
    "dense",
    often.method,
    rarely.method,
  ]
  narrow = rarely._replace(method="16 bits", collective="dense:dtype=bfloat16", every=1)
  dense, late = js.costs.advise(1000, both, evidence=[narrow]).predictions
  assert (dense.label, late.title, late.evidence) == ("dense", "16 bits", narrow)
  two = dataclasses.replace(PROFILE, algorithms=algorithms)
  assert "times as fast as dense:" in js.costs.advise(10**7, two).why
  assert much.why.startswith(f"{much.best.label} reaches dense's loss 1.")
  assert much.why.endswith(f"times as fast as {often.method}: {often}")


def test_a_gain_within_its_deviation_puts_dense_first():
  unsure = row_of("updates/spardl", steps=0.94)._replace(deviation=0.13)
  found = js.costs.advise(1000, PROFILE, evidence=[unsure], compute=100.0)
  assert [one.name for one in found.predictions] == ["dense", "spardl"]
  assert (
    found.why
    == f"dense: that updates/spardl is 1.06 times as fast is within its deviation: {unsure}"
  )
  sure = unsure._replace(deviation=0.01)
  assert (
    js.costs.advise(1000, PROFILE, evidence=[sure], compute=100.0).best.evidence == sure
  )


@pytest.mark.parametrize(
  ("gaps", "steps"),
  [
    ([(1, 0), (-3, 0), (2, 0), (0, 0), (20, 1)], 1.2),
    ([(1, 0), (-3, 0), (2, 0), (20, 1)], None),
    ([(1, 0), (20, 19)], 1.2),
  ],
  ids=["four of five", "three of four", "one of them does not decide"],
)
def test_a_method_has_to_be_near_dense_on_four_of_five_tasks(gaps, steps):
  timed = row_of("updates/spardl")
  rows = [
    row_of("updates/spardl", steps=None)._replace(gap=gap, gap_error=error)
    for gap, error in gaps
  ]
  for evidence, expected in (([timed, *rows], steps), (rows, steps and 1.0)):
    found = js.costs.advise(1000, PROFILE, evidence=evidence).predictions
    assert [one.evidence.steps for one in found if one.evidence] == [expected]


def test_the_worst_training_of_a_method_counts():
  for steps in (2.0, None):
    rows = [row_of("updates/spardl"), row_of("updates/spardl", steps=steps)]
    (one,) = [
      one
      for one in js.costs.advise(1000, PROFILE, evidence=rows).predictions
      if one.evidence
    ]
    assert one.evidence == rows[1]
  assert math.isinf(one.to_loss)
  assert js.costs.advise(9, PROFILE, evidence=rows).why.startswith(
    "dense reaches dense's loss, updates/spardl never: "
  )
  alone = dataclasses.replace(PROFILE, algorithms={SPARDL: Algorithm(1e-9)})
  assert js.costs.advise(9, alone, evidence=rows).why == f"updates/spardl: {rows[1]}"


def test_local_steps_divide_an_update_among_their_steps():
  one, ten, both = (
    js.costs.advise(10_000_000, PROFILE, every=every)
    for every in ((1,), (10,), (1, 10))
  )
  for update, step in zip(one.predictions, ten.predictions, strict=True):
    assert (step.label, step.words, step.wire) == (
      f"{update.label} every 10 steps",
      update.words,
      update.wire,
    )
    assert step.seconds == pytest.approx(update.seconds / 10)
  assert (both.best.name, both.best.every) == ("spardl", 10)
  assert both.why.startswith(f"{SPARDL} every 10 steps: ")


@pytest.mark.long
def test_fit_measures_each_algorithm_that_is_asked_for(tmp_path):
  asked, lines = ["gaussiank:density=0.1", "topka", "dense", "dense:dtype=bfloat16"], []
  options = {"densities": (0.1, 0.2), "algorithms": asked, "progress": lines.append}
  profile = js.costs.fit(mesh_of(2), n=3000, repetitions=1, **options)
  labels = [asked[0], "topka:density=0.1", "topka:density=0.2", *asked[2:]]
  assert list(profile.algorithms) == labels
  assert [line.split(",")[0] for line in lines] == [
    f"{n} of 5: {label}" for n, label in enumerate(labels, 1)
  ]
  varying, *_, dense, half = profile.algorithms.values()
  assert (dense.reduces, dense.fill, dense.slowdown) == (True, 1.0, 1.0)
  assert not varying.reduces
  assert 0 < varying.fill < 0.9  # the formula is an upper bound
  assert half.slowdown not in (0, 1)  # measured
  assert (
    min(
      profile.alpha,
      profile.beta,
      profile.gamma,
      profile.reduce_alpha,
      profile.reduce_beta,
    )
    > 0
  )
  assert (profile.workers, profile.entries) == (2, 3000)
  profile.save(tmp_path / "profile.json")
  assert Profile.load(tmp_path / "profile.json") == profile


@pytest.mark.long
def test_a_collective_whose_words_depend_on_shapes():
  """Parameters instead of their number: for what is measured, and for what is predicted."""
  params, other = {"w": jnp.zeros((60, 50))}, {"w": jnp.zeros((100, 300))}
  labels = ["powersgd:rank=2", "powersgd:rank=2:alternate=True"]
  profile = js.costs.fit(mesh_of(2), n=params, algorithms=labels, repetitions=1)
  assert profile.entries == 3000
  assert profile.algorithms["powersgd:rank=2"].reduces
  assert {one.words for one in js.costs.advise(other, profile).predictions} == {
    2 * (100 + 300),
    2 * 300,
  }
  with pytest.raises(
    ValueError, match="powersgd: the words of n=.* give the parameters as n"
  ):
    js.costs.advise(3000, profile)


@pytest.mark.long
def test_workers_of_several_devices():
  """Both levels are measured, and each device carries its part of the gradient."""
  mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("hosts", "devices"))
  profile = js.costs.fit(
    mesh, axis="hosts", n=3000, algorithms=["dense"], repetitions=1
  )
  assert (profile.workers, profile.devices) == (2, 2)
  assert min(profile.inside_alpha, profile.inside_beta) > 0
  wide = dataclasses.replace(PROFILE, devices=4, inside_alpha=1e-6, inside_beta=1e-10)
  params = {
    "sharded": jax.device_put(jnp.zeros((8, 10)), NamedSharding(mesh, P("devices"))),
    "whole": jnp.zeros(20),
  }
  for one in js.costs.advise(100, wide).predictions:
    assert (
      one.words
      == js.costs.predict(one.name, n=25, workers=PROFILE.workers, **one.config).words
    )
  assert (
    js.costs.advise(100, wide).best.inside < js.costs.advise(params, wide).best.inside
  )
  assert js.costs.count("topka", n=100, workers=4, devices=4, k=10) == js.costs.count(
    "topka", n=25, workers=4, k=3
  )
  assert count_inside(params["whole"], devices=4).words == 15
  # Divided among four devices already, or whole at the one device.
  assert count_inside(params, devices=1) == js.Cost(0, 0)


def advise_with(**change):
  return js.costs.advise(100, PROFILE, evidence=[row_of("spardl")._replace(**change)])


BAD = [
  (lambda: js.costs.fit(mesh_of(1)), "one worker sends nothing"),
  (lambda: js.costs.fit(mesh_of(2), seconds=0), "fit: seconds=0, give more than 0"),
  (
    lambda: js.costs.fit(mesh_of(2), algorithms=["speedy"]),
    "unknown collective 'speedy'",
  ),
  (
    lambda: js.costs.fit(mesh_of(2), algorithms=[js.momentum_corrected]),
    "fit: .*momentum_corrected.* is no label, .*'spardl:teams=2:density=0.01', of a2sgd, ",
  ),
  (
    lambda: js.costs.fit(mesh_of(2), algorithms="topka"),
    "fit: algorithms='topka', give a list, as \\['topka'\\]",
  ),
  (
    lambda: js.costs.fit(mesh_of(2), algorithms=["powersgd"]),
    "powersgd: the words of n=.* give the parameters as n",
  ),
  (lambda: js.costs.advise(0, PROFILE), "n=0, choose a whole number from 1 up"),
  (lambda: js.costs.advise(5, Profile(2, 1e-4, 1e-9)), "the profile has no algorithm"),
  (lambda: Profile(0, 1e-4, 1e-9), "Profile: workers=0, choose a whole number from 1"),
  (lambda: Profile(2, math.nan, 1e-9), "Profile: alpha=nan, give a number from 0 up"),
  (lambda: Profile(2, 1e-4, -1.0), "Profile: beta=-1.0, give a number from 0 up"),
  (lambda: Algorithm(math.inf), "Algorithm: arithmetic=inf, give a number from 0 up"),
  (
    lambda: Profile.of("a100", js.overlap.Link(0, 0, 1), workers=2),
    "machine='a100', choose one of 'h100'",
  ),
  (
    lambda: Profile.of("h100", js.overlap.Link(0, 0, 1), workers=0),
    "Profile.of: workers=0",
  ),
  (
    lambda: js.costs.advise(5, PROFILE, every=(0,)),
    "advise: every=0, choose a whole number from 1 up",
  ),
  (
    lambda: js.costs.advise(5, PROFILE, every=4),
    r"every=4, give a list of steps between exchanges, as in \(1, 30\)",
  ),
  (
    lambda: js.costs.advise(5, PROFILE, every=()),
    r"every=\(\), give a list of steps between exchanges",
  ),
  (
    lambda: js.costs.advise(5, PROFILE, compute=-1),
    "compute=-1, give the seconds of forward and backward",
  ),
  (
    lambda: js.costs.advise(5, PROFILE, evidence="adam"),
    "evidence has 'a', give a list of rows like those of",
  ),
  (
    lambda: advise_with(collective="topka:density=0.5"),
    "the profile has dense, .* the evidence is of topka",
  ),
  (
    lambda: advise_with(every=0),
    "evidence of spardl: every=0, choose a whole number from 1 up",
  ),
  (lambda: advise_with(seeds=0), "seeds=0, choose a whole number"),
  (
    lambda: advise_with(steps=math.nan),
    "steps=nan and deviation=0.1, give steps / dense's steps",
  ),
  (lambda: advise_with(steps=-1.0), "steps=-1.0 and"),
  (lambda: advise_with(steps=0.0), "steps=0.0 and"),
  (lambda: advise_with(deviation=None), "steps=1.2 and deviation=None, give"),
  (
    lambda: advise_with(steps=None),
    "steps=None and deviation=0.1, give .* or None for both",
  ),
  (
    lambda: js.costs.link_of(PROFILE, "topka", k=3),
    "profile has no 'topka:k=3', choose one of dense, spardl:density",
  ),
  (
    lambda: js.costs.evidence("nadam"),
    "no training with optimizer='nadam', own_data=False, choose one of adam",
  ),
  (
    lambda: js.costs.count("dense", n=5, workers=2, devices=0),
    "devices=0, choose a whole number from 1 up",
  ),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input(call, message):
  with pytest.raises(ValueError, match=message):
    call()


def test_every_candidate_fits_the_workers():
  labels = calibration.candidates(6, [0.01, 0.001])
  assert not any("powersgd" in label for label in labels)
  for label in labels:
    name, config = collective_of(label)
    jax.eval_shape(
      lambda name=name, config=config: js.make_collective(name, **config).init(1000, 6)
    )
    assert js.costs.label_of(name, config) == label


def test_fit_begins_no_algorithm_after_its_seconds(monkeypatch):
  # a machine that is busy
  monkeypatch.setattr(
    calibration._Meter, "_measure_fill", lambda *_: time.sleep(0.5) or 1.0
  )
  with pytest.warns(
    UserWarning,
    match="no time was left for onebit, spardl:density=0.01, spardl:sel.*: they are not",
  ):
    profile = js.costs.fit(mesh_of(2), n=124, seconds=0.1)
  assert list(profile.algorithms) == ["dense"]  # always one


@pytest.mark.parametrize(("budget", "timed"), [(math.inf, 9), (3.5, 4), (0.0, 1)])
def test_repetitions_end_with_their_share_of_the_seconds(budget, timed, monkeypatch):
  engine, runs = engine_of(js.SimComm("workers", members=2), "workers"), []
  watch, grads = timing.Stopwatch(engine), timing.gradients(engine, 10)(0)
  monkeypatch.setattr(
    watch,
    "time",
    lambda program, *arguments: runs.append(1) or (1.0, program(*arguments)),
  )
  times, _ = timing.alone(
    engine, watch, js.make_collective("dense"), grads, 9, budget=budget
  )
  assert times == [1.0] * timed
  assert len(runs) == 2 + timed  # with two of warm-up


def test_arithmetic_is_timed_at_each_workers_own_rank():
  """XLA folds a rank that is constant, and signs were timed 10 to 25 % too short."""
  workers, n = 4, 8
  engine = engine_of(mesh_of(workers), "workers")
  grads = timing.gradients(engine, n * workers)(0)
  # Of each worker another part of the gradient, by its rank.
  micro = js.make_collective("micro", k=workers)
  watch = timing.Stopwatch(engine)
  _, update = timing.alone(engine, watch, micro, grads, repetitions=1, budget=0.0)
  mean, _ = update.program(jnp.copy(grads), update.state)
  parts = np.asarray(mean).reshape(workers, workers, n)
  assert sorted(parts.any(2).nonzero()[1]) == list(range(workers))


def test_other_load_on_the_cores_is_no_arithmetic(monkeypatch):
  """Most repetitions are disturbed, and all of the first three, which take less than a moment of other load."""
  taken = [9.0, 9.0, 0.03, 0.02, 0.03, 0.004, 0.03]
  seconds = itertools.cycle(taken)
  monkeypatch.setattr(
    timing.Stopwatch,
    "time",
    lambda _, program, *arguments: (next(seconds), program(*arguments)),
  )
  engine = engine_of(js.SimComm("workers", members=2), "workers")
  meter = calibration._Meter(engine, "workers", n=10, repetitions=3)
  grads = timing.gradients(engine, 10)(0)
  dense = js.make_collective("dense")
  assert meter._measure_alone(dense, grads, math.inf) == 0.004
  assert next(seconds) == taken[0]  # as many as take 0.1 s


def test_a_moment_of_other_load_is_no_latency(monkeypatch):
  """Five runs of a short chain of messages may all fall into it; after 0.1 s most have not."""
  seconds = itertools.chain([9.0, *[0.004] * 10], itertools.repeat(0.0004))
  monkeypatch.setattr(timing.Stopwatch, "time", lambda *_: (next(seconds), None))
  engine = engine_of(js.SimComm("workers", members=2), "workers")
  meter = calibration._Meter(engine, "workers", n=10, repetitions=5)
  assert meter._measure_seconds(lambda comm, x: comm.shift(x, 1), 4) == 0.0004


def test_a_large_k_is_measured_in_fewer_entries_as_the_same_density(monkeypatch):
  monkeypatch.setattr(calibration._Meter, "_measure_alone", lambda *_: 0.5)
  engine = engine_of(js.SimComm("workers", members=2), "workers")
  n, k = 2**18, 100_000
  meter = calibration._Meter(engine, "workers", n=n, repetitions=1)
  label = f"gaussiank:k={k}"
  assert meter._resized(label, 64).k == math.ceil(k / 64)
  found = meter.measure_algorithm(label, js.make_collective(label), None, 1.0, 1.0)
  assert 0 < found.fill <= 1


def test_a_k_above_n_is_refused_before_anything_is_measured(monkeypatch):
  monkeypatch.setattr(calibration._Meter, "measure_links", pytest.fail)
  with pytest.raises(ValueError, match="topka: k=2000, choose at most .* 1000"):
    js.costs.fit(mesh_of(2), n=1000, algorithms=["dense", "topka:k=2000"])


def test_the_costs_of_an_all_reduce_are_for_each_message_and_byte(monkeypatch):
  """Of 6 workers 2·3 messages, and of 600 numbers of 2 bytes 1000 numbers to and fro."""
  monkeypatch.setattr(
    calibration._Meter, "_measure_line", lambda *_: (0.6, 600, 9.0, 4.0)
  )
  engine = engine_of(js.SimComm("workers", members=6), "workers")
  meter = calibration._Meter(engine, "workers", n=600, repetitions=1)
  assert meter.measure_all_reduce(jnp.bfloat16) == pytest.approx((0.1, 4.0 / 2000))


def test_seconds_inside_a_worker_are_for_each_message_and_byte():
  wide = dataclasses.replace(PROFILE, devices=4, inside_alpha=1e-6, inside_beta=1e-10)
  params = {"whole": jnp.zeros(400)}
  cost = count_inside(params, devices=4)
  assert js.costs.advise(params, wide).best.inside == pytest.approx(
    1e-6 * (cost.messages + cost.agreements) + 1e-10 * cost.bytes
  )


def test_a_row_of_evidence_says_what_was_measured():
  row = js.costs.evidence("adam")[0]._replace(steps=None, deviation=None, gap=None)
  assert str(row).startswith("never at dense's loss (")
  assert str(row._replace(gap=-0.8)).startswith("loss -0.8 % above dense's (")
  timed = row._replace(gap=-0.8, steps=1.1, deviation=0.1)
  assert str(timed).startswith("1.10 ± 0.10 times dense's steps (")
