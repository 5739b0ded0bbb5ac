"""The average of a group as messages between its members, and parts that are early."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxsparse.partial.controller import Group
from jaxsparse.partial.exchange import Average, Early
from jaxsparse.partial.messages import Kind, Piece


@given(st.integers(1, 5), st.integers(0, 12), st.integers(0, 999))
def test_the_average_is_the_same_at_every_member_in_any_order_of_messages(members, entries, seed):
  random = np.random.default_rng(seed)
  numbers = tuple(sorted(random.choice(9, members, replace=False).tolist()))
  weights = random.random(members) + 0.1
  initial_weight = float(random.choice([0.0, 0.25]))
  weights *= (1 - initial_weight) / weights.sum()
  group = Group(numbers, tuple(weights.tolist()), 1, initial_weight, 1)
  values = {number: random.standard_normal(entries).astype(np.float32) for number in numbers}
  start = np.full(entries, 5, np.float32)
  averages = {number: Average(group, number, values[number], start) for number in numbers}
  under_way = [sent for number in numbers for sent in averages[number].begin()]
  while under_way:
    to, piece = under_way.pop(int(random.integers(len(under_way))))
    assert averages[to].needs(piece.sender)
    under_way += list(averages[to].receive(piece))
    assert list(averages[to].receive(piece)) == []  # a duplicate
  expected = sum(w * values[n].astype(float) for w, n in zip(weights, numbers, strict=True)) + initial_weight * start
  for average in averages.values():
    assert average.done
    assert average.result.tobytes() == averages[numbers[0]].result.tobytes()
    np.testing.assert_allclose(average.result, expected, atol=1e-5)


@given(st.integers(1, 40), st.integers(2, 9))
def test_what_a_group_sends_early_is_kept(entries, members):
  """All parts of a group of any size; what a forger sends that is larger than them all takes the place of none."""
  group = Group(tuple(range(members)), (1 / members,) * members, 1, 0.0, 5)
  early = Early(0, entries)
  parts = {}
  for member in range(1, members):
    model = np.full(entries, member, np.float32)
    parts[member] = dict(Average(group, member, model, model).begin())[0]
    early.keep(parts[member])
    early.keep(Piece(Kind.PART, 5, members + member, np.zeros(entries + 2**16 + 1, np.float32)))
    early.keep(parts[member])
  assert {part.sender: part.values.tolist() for part in early.take(5)} == {
    member: part.values.tolist() for member, part in parts.items()
  }


def test_a_part_takes_the_place_of_an_earlier_one_of_its_sender():
  early = Early(0, entries=2**16)
  for number in (5, 6):  # together they are more than any group sends
    early.keep(Piece(Kind.PART, number, 1, np.zeros(2**16 + 1, np.float32)))
  assert [part.number for part in early.take(6)] == [6]


def test_forged_parts_do_not_pile_up(caplog):
  early = Early(0, entries=2**17)
  for sender in range(60):
    early.keep(Piece(Kind.PART, 10**6, 100 + sender, np.zeros(2**17, np.float32)))
  assert sum(part.values.size for part in early.take(10**6)) == 2**17
  (record,) = caplog.records
  assert "worker 0: 131072 entries for group 1000000 from worker 101 are dropped" in record.getMessage()
