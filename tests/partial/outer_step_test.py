"""The outer step of a round: the bits of the simulator, one program a size, and nothing lost as groups change."""

from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from jaxsparse.partial.net.messages import RoundPosition, WorkerGroup
from jaxsparse.partial.rounds.chain import RoundLink
from jaxsparse.partial.rounds.lineage import Lineage
from jaxsparse.partial.rounds.outer_step import OuterStep
from jaxsparse.partial.rounds.run import Run
from jaxsparse.transform import state as states
from tests.cases import CASES, FEWER, WIRED, each_case, normals, quick_of

PARAMS = {
  "w": np.linspace(-1, 1, 40, dtype=np.float32).reshape(4, 10),
  "b": np.zeros(9, np.float32),
}
N = 49
# That have a set of indices, of which a message without meaning can be told.
WIRES = ["f32", "bf16", "int8", "int4"]


def test_an_outer_step_that_is_skipped_afterwards_is_as_one_that_was_not_finite():
  """Parameters, momentum and residual are those before it; only the position and the counters say that it was."""
  chain = lambda comm: optax.chain(
    js.make_transform("topka", comm, density=0.5), optax.sgd(1.0, momentum=0.5)
  )
  step = OuterStep(chain)
  alone = lambda anchor, given, number: step.run(
    anchor, given, 1.0, 1, 0, number, step._send
  )
  before = alone(step.start(PARAMS), PARAMS, 1).anchor
  skipped = step.skip(before, alone(before, PARAMS, 2))
  poisoned = alone(before, jax.tree.map(lambda leaf: leaf * np.nan, PARAMS), 2)
  assert skipped.skipped
  assert poisoned.skipped
  assert (
    step.digest(skipped.anchor) == step.digest(poisoned.anchor) != step.digest(before)
  )
  assert step.residual(before).any()
  for anchor in (skipped.anchor, poisoned.anchor):
    np.testing.assert_array_equal(step.residual(anchor), step.residual(before))
    np.testing.assert_array_equal(flat(anchor.params), flat(before.params))


class Team:
  """Workers in threads, a device each, whose messages are those of `Run`."""

  def __init__(self, chain, workers, fragments=1, run=Run):
    self.run, self.number = run, 0
    self.steps = [
      OuterStep(chain, fragments, device=jax.devices()[worker])
      for worker in range(workers)
    ]
    self.anchors = [step.start(PARAMS) for step in self.steps]

  def round(self, members, given, weights=None):
    """The results of a round of these workers, each of whom has given its row."""
    self.number, weights = (
      self.number + 1,
      [1 / len(members)] * len(members) if weights is None else weights,
    )
    group, runs = WorkerGroup(tuple(members), tuple(weights), 0, number=self.number), {}
    post = lambda send: runs[send.member].receive(send.piece)
    runs.update({worker: self.run(group, worker, post) for worker in members})

    def run(rank, worker):
      operands = (
        given[worker],
        weights[rank],
        len(members),
        rank,
        self.number,
        runs[worker].exchange,
      )
      return self.steps[worker].run(self.anchors[worker], *operands)

    with futures.ThreadPoolExecutor(len(members)) as pool:
      results = pool.map(run, range(len(members)), members, timeout=280)
      for worker, result in zip(members, results, strict=True):
        last, self.anchors[worker] = self.anchors[worker], result.anchor
    self.check_link(self.steps[worker], last, result, group)
    packs = {self.steps[worker].pack(self.anchors[worker]) for worker in members}
    assert len(packs) == 1  # what all have alike
    assert (
      len({self.steps[worker].digest(self.anchors[worker]) for worker in members}) == 1
    )
    return packs.pop()

  def check_link(self, step, before, result, group):
    """A worker that was away has the same bits, by the packed totals."""
    link = RoundLink.of(group, result)
    link.pack(most=10**9)
    after = link.follow(step, before)
    if not result.skipped:
      after = after._replace(latest=result.anchor.latest)
    assert step.digest(after) == step.digest(result.anchor)
    kept = step.residual(before)  # empty before the first round of this worker
    np.testing.assert_array_equal(step.residual(after), kept if kept.size else 0)

  def catch_up(self, worker, content):
    self.anchors[worker] = self.steps[worker].unpack(content, self.anchors[worker])
    assert self.steps[worker].pack(self.anchors[worker]) == content

  def flat(self, worker):
    return flat(self.anchors[worker].params)

  def residuals(self):
    """Σ_w r_w, in the order of the parameters."""
    less = (
      flat(step.less_residual(anchor, 1))
      for step, anchor in zip(self.steps, self.anchors, strict=True)
    )
    return sum(
      self.flat(worker).astype(np.float64) - own for worker, own in enumerate(less)
    )


def flat(tree):
  return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def trees(seed, workers):
  rows = normals(seed, workers, N)
  return [{"b": row[:9], "w": row[9:].reshape(4, 10)} for row in rows]


class Weighted(js.SimComm):
  """A simulator whose workers give weighted gradients, as those of a round do: 1/P is no float32 for all P."""

  divisor = 1


@each_case(
  [
    case
    for case in CASES
    if case in [*FEWER, *WIRED] and case.make(density=0.5).traits.replicates
  ],
  quick=["powersgd", "spardl-wire=int4", "topka-selector=chunked-wire=int8"],
)
def test_bits_are_those_of_the_simulator(case):
  """Three rounds of all collectives with the same workers, of equal weight."""
  workers = dict(case.options).get("teams", 2) * (1 if "teams" in str(case) else 2)
  chain = lambda comm: optax.chain(
    js.make_transform(case.name, comm, **case.config(density=0.25)), optax.sgd(0.5)
  )
  group = Team(chain, workers)
  tx = js.atomic(chain(Weighted("workers", members=workers)))
  step = jax.jit(jax.vmap(tx.update, in_axes=(0, 0, None), axis_name="workers"))
  params = jax.tree.map(jnp.asarray, PARAMS)
  state = jax.vmap(lambda _: tx.init(params), axis_name="workers")(jnp.arange(workers))
  for seed in range(3):
    given = trees(seed, workers)
    group.round(range(workers), given)
    weighted = jax.tree.map(
      lambda *rows: jnp.stack(rows) * np.float32(1 / workers), *given
    )
    updates, state = step(weighted, state, params)
    params = jax.tree.map(lambda p, u: p + u[0], params, updates)
  # Compilers may fuse otherwise.
  np.testing.assert_allclose(group.flat(0), flat(params), rtol=1e-6, atol=1e-7)


FORGED = {
  "zeros": np.zeros_like,
  "ones": lambda words: ~np.zeros_like(words),
  "noise": lambda words: np.random.default_rng(0).integers(
    0, 2**32, words.shape, words.dtype
  ),
}


class Forging(Run):
  """A run of whose messages worker 1 sends other words."""

  forge = None

  def exchange(self, messages):
    if self._me == 1:
      messages = [(self.forge(words), *way) for words, *way in messages]
    return super().exchange(messages)


@pytest.mark.parametrize("wire", quick_of(WIRES, quick=["int4"]))
@pytest.mark.parametrize("kind", FORGED)
def test_words_that_are_no_message_are_as_one_without_entries(wire, kind):
  """Worker 0 ends the round as if worker 1 had given nothing; results differ, which the server sees."""
  transform = lambda comm: js.make_transform("topka", comm, k=8, wire=wire)
  chain = lambda comm: optax.chain(transform(comm), optax.sgd(1.0))
  given = trees(0, 2)
  nothing = jax.tree.map(np.zeros_like, given[1])
  honest = Team(chain, 2)
  honest.round((0, 1), [given[0], nothing])
  run = type("Run", (Forging,), {"forge": staticmethod(FORGED[kind])})
  forged = Team(chain, 2, run=run)
  with pytest.raises(AssertionError):
    forged.round((0, 1), given)
  np.testing.assert_array_equal(forged.flat(0), honest.flat(0))
  assert forged.flat(0).tolist() != flat(PARAMS).tolist()
  digests = [
    step.digest(anchor)
    for step, anchor in zip(forged.steps, forged.anchors, strict=True)
  ]
  assert digests[0] != digests[1]


class Late(Run):
  """A run in virtual time: a message arrives one delay after it was sent, and computing takes none."""

  def __init__(self, group, number, post, arrivals):
    super().__init__(group, number, post)
    self.arrivals, self.now, self.me = arrivals, 0, number

  def exchange(self, messages):
    for tag, (_, destination, _) in enumerate(messages, start=self._tag + 1):
      if destination is not None:
        self.arrivals[self.me, self.group.members[destination], tag] = self.now + 1
    return super().exchange(messages)

  def _receive(self, words, source, tag):
    received = super()._receive(words, source, tag)
    if source is not None:
      self.now = max(self.now, self.arrivals[self.group.members[source], self.me, tag])
    return received


@pytest.mark.parametrize(
  ("name", "workers", "most"),
  quick_of(
    [
      ("onebit", 4, 3),
      ("onebit", 16, 5),
      ("nbit", 8, 4),
      ("qsgd", 4, 2),
      ("dense", 8, 4),
    ],
    quick=[("onebit", 4, 3)],
  ),
)
def test_messages_that_do_not_depend_on_each_other_take_one_delay(name, workers, most):
  """One to the owners, and ⌈log₂P⌉ of the all-gather; of P − 1 messages one after the other 19 for 16 workers."""
  arrivals, runs = {}, []
  make = lambda *arguments: runs.append(Late(*arguments, arrivals)) or runs[-1]
  team = Team(
    lambda comm: optax.chain(js.make_transform(name, comm), optax.sgd(1.0)),
    workers,
    run=make,
  )
  team.round(range(workers), trees(0, workers))
  assert {run.now for run in runs} == {most}


PLAN = js.overlap.plan(
  "wfbp", [1.0, 1.0], [4 * 9, 4 * 40], alpha=0.5, beta=0.25, gamma=2.0
)
TRANSFORMS = {
  "spardl": lambda comm: js.spardl_transform(comm, density=0.1),
  "onebit": js.onebit_transform,
  "oktopk": lambda comm: js.oktopk_transform(comm, density=0.1),
  "special": lambda comm: js.dense_transform(comm, special={"w": "topka:density=0.1"}),
  "buckets": lambda comm: js.bucketed_transform("topka", comm, plan=PLAN, density=0.1),
}


@pytest.mark.parametrize("name", quick_of(TRANSFORMS, quick=["onebit"]))
def test_nothing_is_lost_while_workers_come_and_go(name):
  """Σ updates + Σ residuals = Σ what was given, over groups of any size; who was away catches up before.

  In the end a worker that leaves gives its residual to another one.
  """
  group = Team(
    lambda comm: optax.chain(TRANSFORMS[name](comm), optax.sgd(1.0)), workers=3
  )
  entered, content = np.zeros(N), None
  for number, members in enumerate([(0, 1), (0, 1, 2), (1, 2), (2,)]):
    for worker in members if content else ():
      group.catch_up(worker, content)
    given, weights = trees(number, 3), np.arange(1, 1 + len(members), dtype=np.float32)
    weights /= weights.sum()
    content = group.round(members, given, weights)
    entered += sum(
      float(weights[rank]) * flat(given[worker]).astype(np.float64)
      for rank, worker in enumerate(members)
    )
    moved = flat(PARAMS).astype(np.float64) - group.flat(members[-1])
    np.testing.assert_allclose(moved + group.residuals(), entered, rtol=1e-4, atol=2e-5)
  before, left = group.residuals(), group.anchors[0]
  group.anchors[2] = group.steps[2].add_residual(
    group.anchors[2], group.steps[0].residual(left)
  )
  group.anchors[0] = group.steps[0].add_residual(left, -group.steps[0].residual(left))
  assert not group.steps[0].residual(group.anchors[0]).any()
  np.testing.assert_allclose(group.residuals(), before, rtol=1e-4, atol=2e-5)


def test_momentum_and_fragments_are_handed_to_a_worker_that_was_away():
  """Round r is of fragment r mod F; the outer momentum of each fragment goes on."""
  chain = lambda comm: optax.chain(
    js.dense_transform(comm), optax.sgd(1.0, momentum=0.5)
  )
  group = Team(chain, workers=3, fragments=2)
  ones = {name: np.ones_like(leaf) for name, leaf in PARAMS.items()}
  content = [group.round((0, 1), [ones] * 3) for _ in range(4)][-1]
  group.catch_up(2, content)
  group.round((1, 2), [ones] * 3)
  np.testing.assert_allclose(group.flat(2)[:9], PARAMS["b"] - (1 + 1.5), rtol=1e-6)
  np.testing.assert_allclose(
    group.flat(2)[9:], PARAMS["w"].ravel() - (1 + 1.5 + 1.75), rtol=1e-6
  )


def test_random_keys_of_the_outer_optimizer_are_handed_to_a_worker_that_was_away():
  def add_noise(updates, key, _):
    now, after = jax.random.split(key)
    return jax.tree.map(
      lambda leaf: leaf + jax.random.normal(now, leaf.shape), updates
    ), after

  noise = optax.GradientTransformation(lambda _: jax.random.key(0), add_noise)
  chain = lambda comm: optax.chain(js.dense_transform(comm), noise, optax.sgd(1.0))
  group = Team(chain, workers=3)
  ones = {name: np.ones_like(leaf) for name, leaf in PARAMS.items()}
  group.catch_up(2, group.round((0, 1), [ones] * 3))
  group.round((1, 2), [ones] * 3)
  np.testing.assert_array_equal(group.flat(1), group.flat(2))


def test_one_program_for_a_size_whoever_is_in_the_group():
  group = Team(js.dense_transform, workers=3)
  content = group.round((0, 1), trees(0, 3))
  for members in ((1, 2), (0, 2)):
    for worker in members:
      group.catch_up(worker, content)
    content = group.round(members, trees(0, 3))
  assert [len(step._programs) for step in group.steps] == [1, 1, 1]
  group.steps[0].compile(group.anchors[0], 3)
  group.catch_up(1, content)
  before = dict(group.steps[0]._programs)
  group.round((0, 1, 2), trees(1, 3))
  assert group.steps[0]._programs == before


def test_a_round_whose_total_is_not_finite_changes_nothing():
  group = Team(
    lambda comm: optax.chain(js.onebit_transform(comm), optax.sgd(1.0, momentum=0.9)),
    workers=2,
  )
  group.round((0, 1), trees(0, 2))
  before = group.flat(0), group.residuals()
  given = trees(1, 2)
  given[1]["b"][3] = np.nan
  group.round((0, 1), given)
  np.testing.assert_array_equal(group.flat(0), before[0])
  np.testing.assert_array_equal(group.residuals(), before[1])
  assert all(
    node.counters.skipped.all() for node in states.reduce_states(group.anchors[0].outer)
  )


def test_bytes_of_another_model_are_refused():
  step = OuterStep(js.dense_transform)
  own = step.start(PARAMS)
  content = step.pack(own)
  old = content[:4] + np.int64(1).tobytes() + content[12:]
  for forged in (b"", content[:-8], b"\0" * len(content), content + bytes(4), old):
    with pytest.raises(ValueError, match="byte|buffer|size|another version"):
      step.unpack(forged, own)


@pytest.mark.long
def test_what_a_collective_remembers_goes_on_as_groups_change():
  """Numbers of steps and momentum, beside residuals; what depends on the number of workers begins anew."""
  ones, teams = [jax.tree.map(np.ones_like, PARAMS)] * 2, [[0], [0, 1]] * 4

  def after(chain, rounds=8):
    team = Team(lambda comm: optax.chain(chain(comm), optax.sgd(1.0)), workers=2)
    for members in teams[:rounds]:
      content = team.round(members, ones)
      for absent in {0, 1} - set(members):
        team.catch_up(absent, content)
    return flat(PARAMS) - team.flat(0)

  # of 8 others in each round
  assert (
    np.count_nonzero(after(lambda comm: js.make_transform("randomk", comm, k=8))) > 30
  )
  sparse = lambda comm: js.warmed_up(js.make_transform("topka", comm, k=1), {3: 1.0})
  assert np.all(after(sparse, rounds=3))
  # k = 1 from the fourth round on
  assert np.ptp(after(sparse, rounds=4) - after(sparse, rounds=3)) > 0
  momentum, moved = np.zeros(2), 0.0
  for members in teams:
    momentum[members] = momentum[members] / 2 + 1 / len(members)
    moved += momentum[members].sum()
  dense = lambda comm: js.momentum_corrected(
    js.dense_transform(comm), 0.5, masking=False
  )
  np.testing.assert_allclose(after(dense), moved, rtol=1e-6)


def test_an_outer_optimizer_that_overflows_moves_nothing():
  team = Team(
    lambda comm: optax.chain(js.make_transform("topka", comm, k=2), optax.sgd(1e38)),
    workers=2,
  )
  ones = [jax.tree.map(lambda leaf: 64 * np.ones_like(leaf), PARAMS)] * 2
  for _ in range(2):
    team.round([0, 1], ones)
    np.testing.assert_array_equal(team.flat(0), flat(PARAMS))
    assert not team.residuals().any()


def test_an_anchor_of_parameters_with_other_shapes_is_refused():
  step = OuterStep(lambda comm: optax.chain(js.dense_transform(comm), optax.sgd(1.0)))
  other = step.start(PARAMS | {"w": PARAMS["w"].T})
  with pytest.raises(ValueError, match="other shapes"):
    step.unpack(step.pack(step.start(PARAMS)), other)


@pytest.mark.parametrize(
  "forged",
  [
    {"position": RoundPosition(2**40 + 1, 5), "lineage": Lineage(2**40 + 1)},
    {"lineage": Lineage(1, (2**62,))},
    {"lineage": Lineage(1, (5,) * 257)},
  ],
)
def test_an_anchor_whose_position_no_server_would_take_is_refused(forged):
  step = OuterStep(lambda comm: js.dense_transform(comm))
  own = step.start(PARAMS)
  good = own._replace(position=RoundPosition(1, 5), lineage=Lineage(1, (5,)))
  assert step.unpack(step.pack(good), own).position.round == 1
  with pytest.raises(ValueError, match="no header of an anchor"):
    step.unpack(step.pack(good._replace(**forged)), own)
