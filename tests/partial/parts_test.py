"""Workers of several processes in rounds: real processes, and one worker's protocols."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxsparse as js
from jaxsparse.launch.start import free_port
from jaxsparse.partial.net import messages
from jaxsparse.partial.net.messages import Signal, WorkerMessage
from jaxsparse.partial.rounds import slices
from tests.launch_test import soon
from tests.partial import parts_trainer
from tests.partial.parts_trainer import START
from tests.partial.rounds_test import in_threads, join, serve
from tests.quick_compilation import ENVIRONMENT

LIMIT = 240  # seconds of a test's processes


@pytest.fixture
def start(tmp_path):
  """Starts the processes of a worker, which end with the test; their outputs are in the folder."""
  with contextlib.ExitStack() as ends:

    def start(address, number, parts=2, devices=2, **options):
      port = free_port()
      text = json.dumps(options | {"parts": parts, "devices": devices})
      processes = []
      for part in range(parts):
        command = [address, str(number), str(part), str(port), str(tmp_path), text]
        with (tmp_path / f"{number}.{part}.log").open("w") as log:
          process = subprocess.Popen(
            [sys.executable, "-m", "tests.partial.parts_trainer", *command],
            stdout=log,
            stderr=log,
            env=os.environ | {"JAX_PLATFORMS": "cpu", **ENVIRONMENT},
          )
        ends.enter_context(process)
        ends.callback(process.kill)
        processes.append(process)
      return processes

    yield start


@pytest.fixture
def finish(tmp_path):
  """Waits for all processes of workers, and loads what they have saved: by worker, of each part."""

  def finish(workers):
    for number, processes in enumerate(workers):
      for part, process in enumerate(processes):
        assert process.wait(LIMIT) == 0, (tmp_path / f"{number}.{part}.log").read_text()
    return [
      [
        dict(np.load(tmp_path / f"{number}.{part}.npz"))
        for part in range(len(processes))
      ]
      for number, processes in enumerate(workers)
    ]

  return finish


def by_part(tree, parts=2):
  """f32 of each part: its slices of the leaves, one after the other."""
  cut = lambda leaf: np.split(
    np.pad(np.ravel(leaf), (0, -np.size(leaf) % parts)), parts
  )
  return [
    np.concatenate(rows).astype(np.float32)
    for rows in zip(*map(cut, jax.tree.leaves(tree)), strict=True)
  ]


@pytest.mark.long
@pytest.mark.parametrize(
  "options",
  [
    {"nan": 6},
    {"fragments": 2, "delay": 1},
    {"delay": 1, "mixing": 0.5},
    {"dtype": "bfloat16", "delay": 1, "mixing": 0.5, "nan": 6},
    {"fragments": 2, "link": True, "own_keys": True},
  ],
  ids=str,
)
def test_two_processes_are_a_worker_as_one_process_is_bit_for_bit(
  options, start, finish, tmp_path
):
  """With leaves that are sharded over all devices, and replicated, and whose sizes two does not divide."""
  every = 4
  # A worker whose parameters are not finite goes back to the anchor, and takes the
  # steps of one round more.
  steps = [(0, 4 * every), (0, (4 + ("nan" in options)) * every)]

  def train(number):
    given = {"every": every} | {
      name: value
      for name, value in options.items()
      if name not in ("nan", "dtype", "own_keys")
    }
    params = jax.tree.map(
      jnp.asarray, parts_trainer.start(options.get("dtype", "float32"))
    )
    with join(server, number, params, parts_trainer.outer, **given) as worker:
      own = parts_trainer.train(worker, number, steps[number], options.get("nan"))
      return worker._exchanger.anchor.params, own

  with serve(2) as server:
    expected = in_threads(2, train)
  *own, at_server = js.partial.Keys.make_own(2)
  for number, keys in enumerate(own):
    keys.write(tmp_path / f"keys.{number}")
  with serve(2, keys=at_server if options.get("own_keys") else None) as server:
    workers = [
      start(server.address, number, steps=steps[number], every=every, **options)
      for number in range(2)
    ]
    found = finish(workers)
  for (anchor, own), parts in zip(expected, found, strict=True):
    for part, vector in zip(parts, by_part(anchor), strict=True):
      np.testing.assert_array_equal(part["vector"], vector)
      for name, leaf in parts_trainer.as_float32(own).items():
        np.testing.assert_array_equal(part[name], leaf)


@pytest.mark.long
def test_nothing_is_lost_whatever_the_number_of_devices_inside_a_worker(start, finish):
  """Σ updates + Σ residuals = Σ weight_w (θ − θ_w), of three workers with 1, 2 and 3 devices a process."""
  steps, devices = 8, (1, 2, 3)
  with serve(3) as server:
    workers = [
      start(
        server.address, number, steps=(0, steps), every=4, devices=count, sparse=True
      )
      for number, count in enumerate(devices)
    ]
    found = finish(workers)
  moved = [
    parts_trainer.moves(number, step) for number in range(3) for step in range(steps)
  ]
  given = jax.tree.map(lambda *leaves: sum(leaves) / 3, *moved)
  for part in range(2):
    anchor = found[0][part]["vector"]
    residuals = [parts[part]["residual"] for parts in found]
    assert all(residual.any() for residual in residuals)
    np.testing.assert_allclose(
      by_part(START)[part] - anchor + sum(residuals), by_part(given)[part], rtol=1e-5
    )
    for parts in found[1:]:
      np.testing.assert_array_equal(parts[part]["vector"], anchor)


@pytest.mark.long
@pytest.mark.parametrize(("dies", "catches"), [(0, False), (1, False), (1, True)])
def test_a_worker_that_loses_a_part_in_a_round_is_lost_as_a_whole(
  dies, catches, start, finish, tmp_path, caplog
):
  """The other worker goes on. The other part ends soon, with an error that names it; without part 0 JAX ends it.

  So it does where the program catches the error, and ends as if nothing had happened.

  A round counts for all parts of its members or for none, and what is delivered of each
  part is what was given in the rounds that count: Σ updates + Σ residuals = Σ weight_w
  (θ − θ_w).
  """
  options = {"steps": (0, 12), "every": 2, "sparse": True, "timeout": 60}
  with serve(2, quorum=1, grace=5.0) as server:
    whole = start(server.address, 0, **options)
    lost = start(server.address, 1, dies=dies, catches=catches, **options)
    assert lost[dies].wait(LIMIT) == -signal.SIGKILL
    began = time.monotonic()
    assert lost[1 - dies].wait(LIMIT) != 0
    assert time.monotonic() - began < 20  # 5 on a machine that does nothing else
    (found,) = finish([whole])
  log = (tmp_path / f"1.{1 - dies}.log").read_text()
  assert (
    "part 1 of worker 1 is lost"
    if dies
    else "JAX distributed service detected fatal errors"
  ) in log
  assert "worker 1 is lost" in caplog.text
  for part, own in enumerate(found):
    rounds = [load_rounds(tmp_path, number, part) for number in range(2)]
    assert len(rounds[1]) == 2 < len(rounds[0])
    assert [one["base"] for one in rounds[0]][:2] == [one["base"] for one in rounds[1]]
    given = sum(one["given"] for one in (*rounds[0], *rounds[1]))
    residuals = own["residual"] + rounds[1][-1]["residual"]
    np.testing.assert_allclose(
      by_part(START)[part] - own["vector"] + residuals, given, rtol=1e-5
    )


def load_rounds(folder, number, part):
  """What a part has after each round that counted."""
  rounds = range(1, 1 + len([*folder.glob(f"{number}.{part}.*.npz")]))
  return [dict(np.load(folder / f"{number}.{part}.{one}.npz")) for one in rounds]


@pytest.mark.long
def test_each_part_of_a_worker_that_joins_gets_the_anchor_of_that_part(start, finish):
  """Its devices and shardings are others; after its first round all parts have what those of the other worker have."""
  options = {"steps": (0, 10**6), "every": 2, "meets": True}
  with serve(2, quorum=1, grace=5.0) as server:
    first = start(server.address, 0, devices=1, **options)
    assert soon(lambda: server._controller.alive == (0,))
    assert soon(lambda: server._controller.position.round > 3)
    found = finish([first, start(server.address, 1, devices=3, **options)])
  for part, (mine, other) in enumerate(zip(*found, strict=True)):
    assert mine["round"] == other["round"] > other["began"] > 3
    assert (mine["vector"] != by_part(START)[part]).any()
    np.testing.assert_array_equal(mine["vector"], other["vector"])


@pytest.mark.long
def test_each_part_goes_on_from_what_it_has_saved_itself(start, finish, tmp_path):
  """As if training had not ended. A state of another part is refused, by all parts."""
  options = {"every": 4, "sparse": True, "delay": 1}

  def run(*steps, **more):
    with serve(1) as server:
      return finish([start(server.address, 0, steps=steps, **options, **more)])[0]

  expected = run(0, 16)
  run(0, 8)
  processes = start("tcp://127.0.0.1:9", 0, steps=(8, 16), **options, saved=[0, 0])
  refused = (
    "this process is part 1 of 2 of its worker, but the state was saved by part 0 of 2"
  )
  for part, process in enumerate(processes):
    assert process.wait(LIMIT) == 1
    assert ("part 1 of this worker: " * (part == 0) + f"Rounds: {refused}") in (
      tmp_path / f"0.{part}.log"
    ).read_text()
  for part, other in zip(run(8, 16, saved=[0, 1]), expected, strict=True):
    assert part["residual"].any()
    for name in (*START, "vector", "residual", "moved"):
      np.testing.assert_array_equal(part[name], other[name])


@pytest.mark.long
def test_another_number_of_parts_is_refused(start):
  with serve(2, quorum=1) as server:
    start(server.address, 0, steps=(0, 1000), every=1000)
    assert soon(lambda: server._controller.alive == (0,))
    with pytest.raises(
      ValueError, match="unlike: worker 1 has parts=1, the others have parts=2"
    ):
      join(server, 1, jax.tree.map(jnp.asarray, START), parts_trainer.outer)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (7, 1, 2), (0, 3)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_slices_hold_each_entry_once_and_leaves_come_back_with_their_shardings(
  shape, dtype
):
  """On four devices of one process, in another order than theirs; zeros at the end are none of the slice."""
  mesh = jax.make_mesh(
    (4,), ("devices",), devices=[jax.devices()[number] for number in (2, 0, 3, 1)]
  )
  leaf = jnp.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape)
  params = {"w": jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))}
  place = slices.Slices(params)
  own = np.asarray(place.to_host(params)["w"])
  assert own.dtype == dtype
  np.testing.assert_array_equal(own, np.ravel(leaf))
  back = place.to_device({"w": own})["w"]
  assert back.sharding == params["w"].sharding
  np.testing.assert_array_equal(back, leaf)


def test_leaves_that_are_not_on_all_processes_alike_are_refused():
  here = NamedSharding(jax.make_mesh((2,), ("devices",)), PartitionSpec())
  for sharding, what in (
    (here, r"is on \[2, 0\] devices of processes 0 … 1"),
    (jnp.zeros(1).sharding, "has a Single"),
  ):
    with pytest.raises(
      ValueError,
      match=rf"Rounds: params\['w'\] {what}.*choose a NamedSharding over equally many",
    ):
      slices._check("params['w']", sharding, parts=2)


@pytest.mark.parametrize(
  "address", ["tcp://a:1,", "tcp://a:1,tcp://b:0", "tcp://a:1;tcp://b:2", ",tcp://a:1"]
)
def test_a_server_takes_the_addresses_of_all_parts_and_no_others(address):
  hello = Signal(WorkerMessage.HELLO, 3, address="tcp://a:1,tcp://[::1]:2")
  assert messages.parse_signal([hello.pack()]) == hello
  with pytest.raises(messages.Rejected, match="malformed"):
    messages.parse_signal([hello._replace(address=address).pack()])
