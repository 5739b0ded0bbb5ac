"""Values and programs that must be the same on all workers, and are not: every difference is found."""

import functools
import json
import re
import threading
import warnings

import hypothesis
import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxsparse as js
from jaxsparse import launch
from jaxsparse.train import replicas
from jaxsparse.train.replicas import hashed
from tests.cases import mesh_of, normals, row
from tests.ranks import FEW, OPTIONS, TRANSFORMS, run

VALUES = normals(0, 64)


def _apart(mesh, ours, theirs):
  """An array that JAX takes for replicated, and of which the last device holds another value."""
  pieces = [
    jax.device_put(theirs if device == mesh.devices[-1] else ours, device)
    for device in mesh.devices
  ]
  return jax.make_array_from_single_device_arrays(
    ours.shape, NamedSharding(mesh, PartitionSpec()), pieces
  )


def test_check_names_the_first_array_that_differs_and_the_workers():
  mesh = mesh_of(3)
  check = js.make_train_step(
    lambda p, _: jnp.sum(p["x"]), js.dense_transform("workers"), mesh
  ).check
  same, swapped, one_bit = VALUES, VALUES.copy(), VALUES.copy()
  swapped[[3, 60]] = swapped[[60, 3]]
  one_bit.view(np.uint32)[5] ^= 1
  check({"x": _apart(mesh, same, same), "y": _apart(mesh, swapped, swapped)}, ())
  for other in (-same, swapped, one_bit):
    with pytest.raises(
      ValueError,
      match=r"params\['x'\] and 0 other of 2 arrays .*: worker 2 and worker 0 hold other",
    ):
      check({"x": _apart(mesh, same, other), "y": _apart(mesh, other, other)}, ())
  with pytest.raises(ValueError, match=r"params\['x'\] and 1 other of 2 arrays"):
    # leaves that are swapped
    check({"x": _apart(mesh, same, -same), "y": _apart(mesh, -same, same)}, ())


ROWS = arrays.arrays(np.uint32, 16)
_hashed = jax.jit(hashed)


@hypothesis.given(ROWS, st.data())
def test_hashes_differ_where_words_do(words, data):
  """Any other words; any order of them; one bit."""
  shuffled = words[np.array(data.draw(st.permutations(range(16))))]
  flipped = words.copy()
  flipped[data.draw(st.integers(0, 15))] ^= np.uint32(
    1 << data.draw(st.integers(0, 31))
  )
  found = np.asarray(_hashed(words))
  for other in (
    data.draw(ROWS),
    shuffled,
    flipped,
    ~words,
    words ^ np.uint32(1 << 31),
    words + np.uint32(1 << 23),
  ):
    assert (_hashed(other) == found).all() == (other == words).all()
  assert np.asarray(_hashed(flipped))[0] != found[0]


def _digests(what):
  """The error where two programs differ in nothing that is short."""
  digest = "`a jaxpr with the digest [0-9a-f]{16}`"
  where = f"{digest} on process 0, and {digest} on process 1"
  return f"{what} of process 1 is not that of process 0.*{where}.*are the same. To see"


def _values(what, leaf):
  """The error where the values of a leaf differ."""
  line = rf"`{leaf} with the checksum \d+`"
  return f"{what} of process 1 is not that of process 0.*{line} on process 0, and {line} on process 1"


NAMED = {  # what the error says of each difference, on both ranks
  "learning rate": _digests("tx.update"),
  "schedule": _digests("tx.update"),
  "table of rates": _digests("tx.update"),
  "injected rate": _digests("the initial state"),
  "momentum": _digests("tx.update"),
  "no momentum": r"`state\[1\]\[0\].trace\['b'\] is float32\[4\]` on process 0, and `nothing` on process 1",
  "density": r"`state\[0\] is that of topka:density=0.3` on process 0, and `state\[0\] is that of topka:density=0.5`",
  "every": _digests("tx.update"),
  "outer rate": _digests("tx.update"),
  "apply_residual": _digests("tx.update"),
  "loss scale": _digests("the training step"),
  "constant": _digests("the training step"),
  "batch size": r"`batch is float32\[(4|8), 9\]` on process 0, and `batch is float32\[(8|16), 9\]` on process 1",
  "batch type": r"`batch is float32\[\d, 9\]` on process 0, and `batch is bfloat16\[\d, 9\]` on process 1",
  "accumulate": r"accumulate': 1.* on process 0, and .*accumulate': 2.* on process 1",
  "donate": r"donate': True.* on process 0, and .*donate': False.* on process 1",
  "values of params": _values("params", r"params\['b'\] is float32\[4\]"),
  "names of params": r"params of process 1 .*`params\['b'\] is float32\[4\] .*`params\['c'\] is float32\[4\]",
  "random bits": r"params of process 1 .*`jax_threefry_partitionable=True` on process 0, and `jax_\w+=False` on",
  "random key": _values("the training step", r"argument \['rng'\] is key<fry>\[\]"),
}


ACROSS = [  # where each worker has a device of both processes
  _digests("tx.update"),
  _digests("the training step"),
  _values("params", r"params\['b'\] is float32\[4\]"),
  r"params\['b'\] and 0 other of \d arrays .*: device 1 of worker 0 and device 0 of worker 0 hold other values",
]


@pytest.mark.parametrize(
  ("engine", "which"),
  [row("processes", "few"), row("processes", "all"), row("mpi", "all")],
)
def test_ranks_that_run_other_programs_are_told_the_difference(tmp_path, engine, which):
  """Both the same; where nobody compares programs, `step.check` finds what came of them."""
  run(
    "different", engine, 2, tmp_path, which, devices=2 if engine == "processes" else 1
  )
  told, other = (
    json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)
  )
  assert told == other
  across, late = told.pop("across"), told.pop("not compared", None)
  assert len(across) == (0 if engine == "mpi" else 4 if which == "few" else 8)
  for message, error in zip(ACROSS * 2, across, strict=False):
    assert re.search(message, error), error
  if which == "all":
    assert re.match(
      r"params\['[bw]'\] and \d other of \d+ arrays .*: workers? (1|2, 3) and worker 0 hold other",
      late,
    )
  assert {*NAMED} == {*TRANSFORMS, *OPTIONS}
  assert {*told} == {*(FEW if which == "few" else NAMED)}  # the same programs run
  for name, error in told.items():
    assert re.search(NAMED[name], error), (name, error)


def test_only_flags_of_xla_that_change_results_are_compared(monkeypatch):
  monkeypatch.setenv(
    "XLA_FLAGS",
    "--xla_dump_to=/0 --xla_cpu_max_isa=AVX2 --xla_force_host_platform_device_count=3",
  )
  assert replicas._settings()[0] == "XLA_FLAGS=--xla_cpu_max_isa=AVX2"


class _Threads:
  """An engine whose processes are threads."""

  processes = 2

  def __init__(self):
    self._values = {}
    self._barrier = threading.Barrier(2, timeout=60)

  def of_processes(self, value):
    self._values[threading.current_thread().name] = value
    self._barrier.wait()
    rows = np.stack([value for _, value in sorted(self._values.items())])
    self._barrier.wait()
    return rows


def _warnings_of_both(target):
  """The texts of the warnings of two threads, "0" and "1"."""
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    threads = [threading.Thread(target=target, name=str(number)) for number in range(2)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
  return [str(one.message) for one in caught]


@pytest.mark.parametrize("same", [True, False])
def test_processes_that_compute_with_other_instructions_are_warned(monkeypatch, same):
  monkeypatch.setattr(
    replicas,
    "_instructions",
    lambda: "avx" if same else f"avx{threading.current_thread().name}",
  )
  engine, found = _Threads(), []
  target = lambda: found.append(replicas.check_same(engine, "the step", ["a line"]))
  caught = _warnings_of_both(target)
  assert found == [None, None]
  assert len(caught) == (0 if same else 2)
  assert all(
    "the step of process 1 is computed with other instructions than that of process 0 ('avx1'"
    in text
    for text in caught
  )


def _errors_of_both(monkeypatch, heads):
  """The errors and warnings of two threads whose programs, instructions and heads differ."""
  name = lambda: threading.current_thread().name
  monkeypatch.setattr(replicas, "_instructions", lambda: f"avx{name()}")
  monkeypatch.setattr(replicas, "program_digest", lambda _: name())
  engine, errors = _Threads(), []

  def check():
    with pytest.raises(ValueError, match="the step of process 1") as raised:
      replicas.check_same(engine, "the step", heads[int(name())], "a program")
    errors.append(str(raised.value))

  caught = _warnings_of_both(check)
  assert ["computed with other instructions" in text for text in caught] == [True, True]
  assert len(errors) == 2
  assert errors[0] == errors[1]
  return errors[0]


def test_a_head_that_differs_is_named_before_the_program(monkeypatch):
  error = _errors_of_both(monkeypatch, (["a line", "one"], ["a line"]))
  assert "`one` on process 0, and `nothing` on process 1" in error
  assert "digest" not in error


def test_programs_that_differ_are_refused_by_their_digests(monkeypatch):
  error = _errors_of_both(monkeypatch, (["a line"], ["a line"]))
  assert (
    "the step of process 1 is not that of process 0. The first difference is "
    "`a jaxpr with the digest 0` on process 0, and `a jaxpr with the digest 1` on process 1"
  ) in error


def test_what_the_error_says_to_do_shows_the_difference():
  """Its two expressions, of chains that differ in a rate: of the update, and of the initial state."""
  of_step, of_state = re.search(
    "diff: (.*), or for the initial state (.*)$", replicas._TO_SEE
  ).groups()
  mesh, params, batch = mesh_of(2), jnp.zeros(4), jnp.ones((2, 4))

  def text(expression, rate, make=optax.sgd):
    tx = optax.chain(js.dense_transform("workers"), make(rate))
    step = js.make_train_step(lambda p, x: jnp.vdot(p, x[0]), tx, mesh)
    names = {"tx": tx, "step": step, "mesh": mesh, "params": params, "batch": batch}
    return eval(expression, globals() | names)

  assert text(of_step, 0.25) == text(of_step, 0.25) != text(of_step, 0.5)
  injected = functools.partial(text, make=optax.inject_hyperparams(optax.sgd))
  assert injected(of_state, 0.25) == injected(of_state, 0.25)
  assert injected(of_state, 0.25) != injected(of_state, 0.5)


def test_instructions_are_compared_unless_they_are_chosen(monkeypatch):
  assert replicas._instructions() == "" or set(replicas._instructions().split()) & {
    "avx",
    "asimd",
  }
  monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
  assert replicas._instructions() == ""


@pytest.mark.long
def test_a_rank_that_alone_gives_another_batch_is_told(tmp_path):
  """The other one waits for it in its step, until the launcher ends the run."""
  with pytest.raises(launch.RunFailed, match="rank 1"):
    run("one_sided", "processes", 2, tmp_path, limit=120)
  told = (tmp_path / "1").read_text()
  assert re.search(
    r"step of process 1 has arguments of other shapes .* here batch is float32\[4, 9\]$",
    told,
  )
