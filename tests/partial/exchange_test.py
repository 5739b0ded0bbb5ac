"""The average of a group as messages between its members."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxsparse.partial.controller import Group
from jaxsparse.partial.exchange import Average


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
    assert averages[to].needs(1, piece.sender)
    under_way += list(averages[to].receive(piece))
    assert list(averages[to].receive(piece)) == []  # a duplicate
  expected = sum(w * values[n].astype(float) for w, n in zip(weights, numbers, strict=True)) + initial_weight * start
  for average in averages.values():
    assert average.done
    assert average.result.tobytes() == averages[numbers[0]].result.tobytes()
    np.testing.assert_allclose(average.result, expected, atol=1e-5)
