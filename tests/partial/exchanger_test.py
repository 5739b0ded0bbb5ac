"""The anchor of a worker: rounds that count, that do not, and those of other workers."""

import itertools
import queue

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from jaxsparse.partial.net.membership import EarlyPieces
from jaxsparse.partial.net.messages import Piece, PieceKind, RoundPosition, WorkerGroup
from jaxsparse.partial.net.transfers import PREFIX
from jaxsparse.partial.rounds import chain
from jaxsparse.partial.rounds.anchor import Forked
from jaxsparse.partial.rounds.exchanger import Exchanger
from jaxsparse.partial.rounds.lineage import Lineage
from jaxsparse.partial.rounds.links import pass_residuals
from jaxsparse.partial.rounds.outer_step import OuterStep, Result
from jaxsparse.partial.rounds.run import Done, Outgoing, Run


def outer(comm):
  return optax.chain(js.make_transform("topka", comm, k=1), optax.sgd(1.0))


class Worker:
  """A worker whose rounds have no other member."""

  def __init__(self, params=None, fragments=1, number=0):
    step = OuterStep(outer, fragments)
    anchor = step.start(jnp.zeros(3) if params is None else params)
    self.number = number
    self.exchanger, self.events = Exchanger(step, anchor, number), queue.Queue()
    self.exchanger.post = self.events.put

  def round(self, number, *given, commit=True, others=(), links=()):
    """A round of which `others` are members, too, as the anchor says."""
    self.exchanger.delta = given[0] if isinstance(given[0], dict) else jnp.array(given)
    group = WorkerGroup((self.number,), (1.0,), 0, number=number, links=links)
    self.exchanger.begin(group)
    event = self.events.get(timeout=60)
    assert isinstance(event, Done), event
    if commit:
      self.exchanger.commit()
      anchor = self.exchanger.anchor
      latest = {**anchor.latest, **dict.fromkeys(others, number)}
      self.exchanger.anchor = anchor._replace(latest=latest)
    elif commit is not None:  # else nobody knows yet whether it counts
      self.exchanger.drop()

  @property
  def anchor(self):
    return np.asarray(self.exchanger.anchor.params).tolist()

  @property
  def residual(self):
    return self.exchanger.outer.residual(self.exchanger.anchor).tolist()


def model_of(donor, worker=None):
  """What a donor sends: its anchor, or links from the round of a worker on, if it has them."""
  values = np.empty(0, np.float32)
  if worker:
    lineage = worker.exchanger.anchor.lineage
    integers = np.array([lineage.round, lineage.id, 0, 1], np.int64)
    values = integers.view(np.float32)
  return donor.exchanger.model(Piece(PieceKind.FETCH, 0, 9, values))


@pytest.fixture
def worker():
  return Worker()


def test_a_round_that_counts_and_one_that_does_not(worker):
  worker.round(5, 4.0, 2.0, 1.0)
  assert (worker.anchor, worker.residual) == ([-4, 0, 0], [0, 2, 1])
  worker.round(6, 9.0, 9.0, 9.0, commit=False)
  assert (worker.anchor, worker.residual) == ([-4, 0, 0], [0, 2, 1])
  worker.round(7, 0.0, 0.0, 3.0)
  assert (worker.anchor, worker.residual) == ([-4, 0, -4], [0, 2, 0])
  assert worker.exchanger.anchor.lineage == Lineage().after(5).after(7)
  assert worker.exchanger.anchor.latest == {0: 7}


def test_the_anchor_of_a_donor_with_the_residual_of_this_worker(worker):
  donor = Worker(number=1)
  worker.round(5, 4.0, 2.0, 1.0)
  donor.round(5, 4.0, 0.0, 1.0, others=[0])
  donor.round(6, 0.0, 7.0, 0.0)
  assert worker.exchanger.adopt(model_of(donor), 0, 0) == RoundPosition(2, 6)
  assert (worker.anchor, worker.residual) == ([-4, -7, 0], [0, 2, 1])
  refused = lambda reason: pytest.raises(ValueError, match=reason)
  with refused("it is that of round 0, before round 2"):
    donor.exchanger.adopt(model_of(Worker()), 0, 0)
  with refused("."):
    donor.exchanger.adopt(Piece(PieceKind.MODEL, 0, 0, np.ones(7, np.float32)), 0, 0)
  broken = Worker()
  broken.exchanger.anchor = donor.exchanger.anchor._replace(params=jnp.full(3, jnp.nan))
  with refused("the parameters of the anchor have NaN or Inf"):
    worker.exchanger.adopt(model_of(broken), 0, 0)
  assert donor.anchor == worker.anchor
  digest = donor.exchanger.digest()
  with refused(f"its digest is {digest:x}, that of round 2 is {digest + 1:x}"):
    worker.exchanger.adopt(model_of(donor), 6, digest + 1)
  assert worker.exchanger.adopt(model_of(donor), 6, digest) == RoundPosition(2, 6)
  assert worker.exchanger.adopt(model_of(donor), 5, digest + 1) == RoundPosition(
    2, 6
  )  # of a round before
  assert worker.exchanger.returned is None


def test_a_last_round_that_another_server_knows_nothing_of_is_undone(worker):
  """What the worker had given comes back, and its residual is that before."""
  donor = Worker(number=1)
  worker.round(5, 4.0, 2.0, 1.0)
  worker.round(6, 8.0, 0.0, 0.0)
  donor.round(5, 4.0, 2.0, 1.0, others=[0])
  donor.round(16, 0.0, 7.0, 0.0)
  worker.exchanger.adopt(model_of(donor), 0, 0)
  assert (worker.anchor, worker.residual) == ([-4, -9, 0], [0, 2, 1])
  assert np.asarray(worker.exchanger.returned).tolist() == [8, 0, 0]


@pytest.mark.parametrize(("largest", "returned"), [(8.0, [8.0, 0.0]), (np.inf, None)])
def test_what_the_undone_round_had_not_delivered_does_not_come_back(largest, returned):
  """What is of another fragment, or of a round that was skipped, is still in the training loop, and given again."""
  zeros = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
  worker, donor = Worker(zeros, fragments=2), Worker(zeros, fragments=2)
  worker.round(5, {"a": jnp.array([largest]), "b": jnp.array([3.0])})
  donor.round(15, zeros)
  donor.round(16, zeros)
  worker.exchanger.adopt(model_of(donor), 0, 0)
  found = worker.exchanger.returned
  assert (
    found if found is None else [float(found[name][0]) for name in "ab"]
  ) == returned


@pytest.mark.parametrize(
  ("rounds", "counts"),
  [((5,), None), ((5, 6), True), ((5, 6, 7), True), ((5, 16), False), ((), None)],
)
def test_a_donor_knows_whether_a_round_counts_of_which_the_worker_was_not_told(
  worker, rounds, counts
):
  """It has been through it; through another one instead; or it may not have been told, either."""
  donor = Worker()
  worker.round(5, 4.0, 2.0, 1.0)
  for number in rounds:
    donor.round(number, 1.0, 0.0, 0.0)
  assert (
    worker.exchanger.was_committed(model_of(donor), RoundPosition(1, 5, last=6))
    is counts
  )


def test_a_donor_of_another_history_knows_nothing_of_a_round(worker):
  donor = Worker()
  worker.round(5, 4.0, 2.0, 1.0)
  donor.round(15, 1.0, 0.0, 0.0)
  assert (
    worker.exchanger.was_committed(model_of(donor), RoundPosition(1, 5, last=6))
    is False
  )


def test_a_last_round_that_was_long_ago_counts(worker):
  donor = Worker(number=1)
  worker.round(5, 4.0, 2.0, 1.0)
  donor.round(5, 1.0, 0.0, 0.0, others=[0])
  anchor = donor.exchanger.anchor
  later = anchor.lineage
  for number in range(6, 400):
    later = later.after(number)
  position = RoundPosition(later.round, 399)
  donor.exchanger.anchor = anchor._replace(lineage=later, position=position)
  worker.exchanger.adopt(model_of(donor), 0, 0)
  assert worker.exchanger.returned is None
  assert worker.residual == [0, 2, 1]


def test_a_result_unlike_that_of_the_others_is_taken_back_but_what_was_given_is_not(
  worker,
):
  worker.round(5, 4.0, 2.0, 1.0)
  worker.round(6, 8.0, 0.0, 0.0)
  assert worker.exchanger.go_back() == RoundPosition(1, 5)
  assert (worker.anchor, worker.residual) == ([-4, 0, 0], [0, 2, 1])


def test_a_worker_whose_rounds_do_not_count_for_the_others_drops_its_residual(
  worker, caplog
):
  """It has been alone for more than a round; what it has moved since is not lost."""
  donor = Worker(number=1)
  worker.round(5, 4.0, 2.0, 1.0)
  donor.round(5, 4.0, 2.0, 1.0, others=[0])
  for number in (6, 7, 8):
    worker.round(number, 8.0, 0.0, 0.0)
  for number in (16, 17):
    donor.round(number, 0.0, 7.0, 0.0)
  position = worker.exchanger.adopt(model_of(donor), 0, 0)
  assert position == RoundPosition(3, 17)
  assert (worker.anchor, worker.residual) == (donor.anchor, [0, 0, 0])
  assert worker.exchanger.returned is None
  assert "rounds that it was in do not count for the others" in caplog.text
  worker.exchanger.adopt(model_of(donor), 0, 0)
  assert caplog.text.count("do not count") == 1


def test_a_new_worker_with_the_number_of_one_before_has_nothing_to_drop(caplog):
  worker, donor = Worker(), Worker(number=1)
  donor.round(5, 4.0, 2.0, 1.0, others=[0])
  worker.exchanger.adopt(model_of(donor), 0, 0)
  assert (worker.exchanger.anchor.residual_group, caplog.text) == (5, "")


def restore(worker):
  """A worker that begins with what another one has saved."""
  restored = Worker().exchanger
  restored.restore(worker.exchanger.arrays)
  return restored


@pytest.mark.parametrize(
  ("later", "others", "residual"),
  [((), [], [0, 2, 1]), ((6,), [], [0, 2, 1]), ((6, 7), [0], [0, 0, 0])],
)
def test_a_saved_residual_counts_until_its_worker_is_in_another_round(
  worker, later, others, residual, caplog
):
  """Whoever has it now, whatever has become of it since."""
  donor = Worker(number=1)
  worker.round(5, 4.0, 2.0, 1.0)
  donor.round(5, 4.0, 2.0, 1.0, others=[0])
  for number in later:
    donor.round(number, 0.0, 0.0, 0.0, others=others)
  step, restored = worker.exchanger.outer, restore(worker)
  restored.adopt(model_of(donor), 0, 0)
  assert step.residual(restored.anchor).tolist() == residual
  assert restored.is_stale == bool(others)
  assert ("its state is of an older round" in caplog.text) == bool(others)


def test_a_state_of_another_branch_is_refused(worker):
  donor = Worker(number=1)
  for number in (5, 6, 7):
    worker.round(number, 4.0, 2.0, 1.0)
  for number in (5, 16):
    donor.round(number, 4.0, 2.0, 1.0, others=[0])
  restored = restore(worker)
  with pytest.raises(Forked, match=r"round 3 of another branch.* are at round 2"):
    restored.adopt(model_of(donor), 0, 0)


def wide(number=0, fragments=1, chain=None):
  """A worker of 10,000 parameters and momentum; all have the same ones."""
  leaves = {"a": jnp.zeros(5000), "b": jnp.ones(5000)}
  made = Worker(leaves, fragments, number)
  step = OuterStep(chain or MOMENTUM, fragments)
  made.exchanger.outer, made.exchanger.anchor = step, step.start(leaves)
  return made


MOMENTUM = lambda comm: optax.chain(
  js.onebit_transform(comm), optax.sgd(0.7, momentum=0.9)
)
SPARSE = lambda comm: optax.chain(
  js.make_transform("topka", comm, k=10), optax.sgd(0.1, 0.9, nesterov=True)
)


def given_in(number):
  rows = np.random.default_rng(number).standard_normal((2, 5000), np.float32)
  return dict(zip("ab", rows, strict=True))


def go_on(donor, numbers, **options):
  for number in numbers:
    donor.round(number, given_in(number), **options)
  donor.exchanger._thread.submit(lambda: None).result()  # links are packed


@pytest.mark.parametrize("missed", [1, 3])
@pytest.mark.parametrize(
  ("chain", "fragments"), [(MOMENTUM, 1), (SPARSE, 2)], ids=["momentum", "sparse"]
)
def test_links_turn_the_anchor_of_a_worker_that_was_away_into_that_of_the_others(
  chain, fragments, missed
):
  """Bit for bit, with the state of the outer optimizer, in fewer bytes; then it is a donor of links itself."""
  worker, late, donor = (wide(n, fragments, chain) for n in range(3))
  go_on(donor, range(5, 9))
  for other in (worker, late):
    other.exchanger.adopt(model_of(donor), 0, 0)
  own = np.arange(10_000, dtype=np.float32)
  outer = worker.exchanger.outer
  worker.exchanger.anchor = outer.add_residual(worker.exchanger.anchor, own)
  before = outer.residual(worker.exchanger.anchor)
  go_on(donor, range(20, 20 + missed))
  content = model_of(donor, worker)
  assert 4 * content.values.size < model_of(donor).values.size
  position = worker.exchanger.adopt(content, 19 + missed, donor.exchanger.digest())
  assert position == donor.exchanger.anchor.position
  assert outer.pack(worker.exchanger.anchor) == outer.pack(donor.exchanger.anchor)
  np.testing.assert_array_equal(outer.residual(worker.exchanger.anchor), before)
  assert model_of(worker, late).values.tobytes() == content.values.tobytes()
  late.exchanger.adopt(model_of(worker, late), 0, 0)
  assert outer.pack(late.exchanger.anchor) == outer.pack(donor.exchanger.anchor)


def test_links_of_rounds_that_were_skipped_or_moved_by_a_link():
  """A round whose sum is not finite, and one to which a link adds what others have moved."""
  worker, donor = wide(number=0), wide(number=1)
  donor.exchanger.is_link = True
  donor.round(5, jax.tree.map(lambda leaf: leaf * np.nan, given_in(5)))
  go_on(donor, [6], links=(1,))
  donor.round(7, jax.tree.map(lambda leaf: leaf * np.inf, given_in(5)), links=(1,))
  go_on(donor, [])
  worker.exchanger.adopt(model_of(donor, worker), 0, 0)
  outer = donor.exchanger.outer
  assert outer.pack(worker.exchanger.anchor) == outer.pack(donor.exchanger.anchor)
  assert len(worker.exchanger._links) == 3
  assert not np.array_equal(donor.exchanger.anchor.params["a"], np.zeros(5000))


def test_links_that_lead_from_another_anchor_or_elsewhere_are_refused():
  """The worker keeps what it has, and the anchor itself is sent where links are no use."""
  worker, donor, other = (wide(number=number) for number in range(3))
  go_on(donor, [5, 6])
  go_on(other, [15])
  before = worker.exchanger.outer.pack(worker.exchanger.anchor)
  whole = model_of(donor).values.size
  good = model_of(donor, worker)
  assert good.values.size < whole
  assert model_of(donor, other).values.size == PREFIX  # of another branch
  ahead = wide(number=3)
  ahead.exchanger.adopt(model_of(donor), 0, 0)
  assert model_of(donor, ahead).values.size == PREFIX  # nothing is missed
  refuse = lambda why: pytest.raises(ValueError, match=why)
  words = good.values.copy()
  words.view(np.uint32)[words.size // 4] ^= 4
  with refuse("its digest is"):
    worker.exchanger.adopt(good._replace(values=words), 0, 0)
  with refuse("words, its donor has"):
    worker.exchanger.adopt(good._replace(values=good.values[:-1]), 0, 0)
  with refuse("its links begin at another round 0|its digest is"):
    other.exchanger.adopt(good, 0, 0)
  moved = wide(number=4)  # it says that it has been through no round, and has
  params = jax.tree.map(lambda leaf: leaf + 1, moved.exchanger.anchor.params)
  moved.exchanger.anchor = moved.exchanger.anchor._replace(params=params)
  with refuse("its digest is"):
    moved.exchanger.adopt(good, 0, 0)
  assert worker.exchanger.outer.pack(worker.exchanger.anchor) == before


def test_forged_links_that_lie_in_each_other_without_end_are_refused():
  worker = wide(number=0)
  # a set of one index, whose number is again such a set
  nested = np.array([1, *[1 << 5, 1 << 5, 1] * 2000], np.uint32)
  sized = np.append(np.uint32(nested.size), nested)
  link = chain.RoundLink(5, 2, (0, 1), (), sized, sized.nbytes)
  words = chain.pack(Lineage(), [link])
  prefix = np.array([7, words.size, 0, 1], np.int64).view(np.uint32)
  values = np.concatenate([prefix, words]).view(np.float32)
  with pytest.raises(ValueError, match="recursion"):
    worker.exchanger.adopt(Piece(PieceKind.MODEL, 1, 1, values), 0, 0)


def test_links_are_kept_until_they_are_as_large_as_an_anchor():
  """Then the oldest are forgotten, and who has missed these gets the anchor; so are all after a round is taken back."""
  worker, donor = wide(number=0), wide(number=1)
  go_on(donor, range(5, 5 + 90))
  anchor = donor.exchanger.outer.size(donor.exchanger.anchor)
  kept = [link.nbytes for link in donor.exchanger._links]
  assert anchor / 2 < sum(kept[:-1]) <= anchor
  assert len(kept) < 90
  assert model_of(donor, worker).values.size == PREFIX
  donor.exchanger.go_back()
  assert len(donor.exchanger._links) == len(kept) - 1
  other = wide(number=2)
  for one, number in ((worker, 1000), (other, 1001)):
    go_on(one, [number])
  worker.exchanger.adopt(model_of(other), 0, 0)
  assert not worker.exchanger._links  # which were of another branch


def test_links_are_kept_where_no_round_was_missed():
  """The anchor of a donor is that of this worker."""
  worker, donor = wide(number=0), wide(number=1)
  for member in worker, donor:
    go_on(member, [5])
  anchor = donor.exchanger.anchor
  donor.exchanger.anchor = anchor._replace(latest={0: 5, 1: 5})
  worker.exchanger.adopt(model_of(donor), 0, 0)
  assert len(worker.exchanger._links) == 1


def test_of_links_larger_than_an_anchor_one_is_kept():
  """Of a dense round with what a link has moved, until the next one; none of them is ever sent."""
  worker = wide(number=1)
  donor = wide(chain=lambda comm: optax.chain(js.dense_transform(comm), optax.sgd(1.0)))
  go_on(donor, range(5, 5 + 6), links=(0,))
  assert [link.words is None for link in donor.exchanger._links] == [True]
  assert model_of(donor, worker).values.size == PREFIX


def test_links_that_were_followed_are_kept_like_those_of_own_rounds():
  """Until all are as many bytes as the anchor."""
  worker, donor = wide(number=0), wide(number=1)
  for number in range(5, 5 + 90, 3):
    go_on(donor, range(number, number + 3))
    worker.exchanger.adopt(model_of(donor, worker), 0, 0)
  kept = sum(link.nbytes for link in worker.exchanger._links)
  anchor = worker.exchanger.outer.size(worker.exchanger.anchor)
  assert anchor / 2 < kept <= anchor


def test_each_answer_has_the_digest_of_the_anchor_which_is_computed_once(worker):
  exchanger = worker.exchanger
  digest = exchanger.outer.digest
  computed = []
  exchanger.outer.digest = lambda anchor: computed.append(anchor) or digest(anchor)

  def count():
    """Digests computed so far, after three answers more."""
    for _ in range(3):
      prefix = model_of(worker).values[:2].view(np.int64)
      assert prefix == digest(exchanger.anchor)
    return len(computed)

  donor = Worker(number=1)
  donor.round(15, 0.0, 7.0, 0.0)
  assert count() == 1
  worker.round(5, 4.0, 2.0, 1.0, commit=None)
  assert count() == 2  # of the result, which does not count yet
  exchanger.commit()
  assert count() == 2
  exchanger.go_back()
  assert count() == 3
  exchanger.adopt(model_of(donor), 0, 0)
  assert count() == 4
  exchanger.restore(donor.exchanger.arrays)
  assert count() == 5


def leave_together(residuals, leaving, skipped=False):
  """The residuals of members after a round of which some leave."""
  step = OuterStep(outer)
  group = WorkerGroup(tuple(range(len(residuals))), (), 0, leaving=leaving)
  anchors = [
    step.add_residual(
      step.without_residual(step.start(jnp.zeros(2))._replace(size=3), 0),
      np.array(residual, np.float32),
    )
    for residual in residuals
  ]
  sent, found = {}, []
  # what leaves first, so that it is there when the others ask for it
  for rank in sorted(group.members, key=lambda member: member not in leaving):
    turn = itertools.count()

    def send(messages, rank=rank, turn=turn):
      ((words, to, source),) = messages
      number = next(turn)
      if to is not None:
        sent[rank, to, number] = words
      return [words if source is None else sent[source, rank, number]]

    result = Result(anchors[rank], 0, skipped)
    after = pass_residuals(step, result, group, rank, send)
    found.append((rank, step.residual(after.anchor).tolist()))
  return [residual for _, residual in sorted(found)]


def test_a_residual_passes_to_one_that_stays_in_the_round_that_it_is_of(caplog):
  residuals = [[1, 2], [4, 8], [16, 32]]
  assert leave_together(residuals, (1,)) == [[5, 10], [0, 0], [16, 32]]
  assert leave_together(residuals, (0, 1)) == [[0, 0], [0, 0], [21, 42]]
  assert leave_together(residuals, (0, 1, 2)) == residuals
  assert leave_together(residuals, (1,), skipped=True) == residuals
  assert not caplog.text
  huge = [[1, 2], [1e38, 8]]
  assert leave_together(huge, (1,)) == [[1, 2], [0, 0]]
  assert "the residual of worker 1, which leaves, is lost" in caplog.text


def test_an_exchange_ends_without_a_result_when_it_fails_or_a_message_is_unlike(caplog):
  """No thread waits for ever, and nothing more is sent."""
  events = queue.Queue()
  run = Run(WorkerGroup((0, 1), (0.5, 0.5), 0, number=3), 0, events.put)
  run.receive(Piece(PieceKind.MESSAGE, 3, 1, np.ones(2, np.float32), tag=1))
  message = np.zeros(3, np.uint32), 1, 1
  assert run.exchange([message])[0].tolist() == [0, 0, 0]
  assert isinstance(events.get(), Outgoing)
  assert run.failed
  assert "worker 1 sent 2 words instead of 3" in caplog.text
  assert run.exchange([message, message])[1].tolist() == [0, 0, 0]
  assert events.empty()


def test_a_member_fills_no_memory_with_pieces_that_nobody_asked_for():
  group = WorkerGroup((0, 1), (0.5, 0.5), 0, number=3)
  room = Piece(PieceKind.MESSAGE, 3, 1, np.zeros(3, np.float32)).words
  run = Run(group, 0, lambda _: None, room=2 * room - 1)
  for tag in (7, 1, 8, 9):  # of 3 words each
    run.receive(Piece(PieceKind.MESSAGE, 3, 1, np.full(3, tag, np.float32), tag))
  assert [*run._received] == [(1, 7)]
  run = Run(group, 0, lambda _: None, room=room)
  for tag in (1, 2, 3):  # as the program asks for them
    run.receive(Piece(PieceKind.MESSAGE, 3, 1, np.full(3, tag, np.float32), tag))
    (found,) = run.exchange([(np.zeros(3, np.uint32), None, 1)])
    assert found.view(np.float32).tolist() == [tag] * 3


def test_a_member_fills_no_memory_with_pieces_without_values():
  run = Run(
    WorkerGroup((0, 1), (0.5, 0.5), 0, number=3), 0, lambda _: None, room=1 << 16
  )
  early = EarlyPieces(1000)
  for tag in range(20_000):
    empty = Piece(PieceKind.MESSAGE, 3, 1, tag=tag)
    run.receive(empty)
    early.keep(empty)
  assert len(run._received) <= 1000
  assert len(early.pieces) <= 10_000


def test_an_error_of_the_outer_chain_is_an_event(worker):
  def fails(_):
    raise TypeError("no such chain")

  worker.exchanger.outer = OuterStep(fails)
  worker.exchanger.begin(WorkerGroup((0,), (1.0,), 0, number=1))
  assert str(worker.events.get(timeout=60)) == "no such chain"
  assert jax.tree.leaves(worker.exchanger.anchor.outer) == []
