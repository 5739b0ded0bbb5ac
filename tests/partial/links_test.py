"""Links: what they move is delivered whole, beside any outer chain, and two levels of rounds of them."""

import contextlib
import threading

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from jaxsparse.partial.net.messages import Group
from jaxsparse.partial.rounds import links
from jaxsparse.partial.rounds.outer_step import OuterStep
from tests.partial.rounds_test import averaging, choosing, in_threads, join, serve

START = {"b": jnp.zeros(3), "w": jnp.ones((2, 4))}


def shifted(tree, by):
  return jax.tree.map(lambda leaf: leaf + jnp.asarray(by, leaf.dtype), tree)


@hypothesis.given(st.integers(0, 9), st.integers(1, 6), st.data())
def test_broadcast_gives_all_members_the_bits_of_the_root(entries, size, data):
  root = data.draw(st.integers(0, size - 1))
  values = np.random.default_rng(entries).normal(size=entries).astype(np.float32)
  mail, posted = {}, threading.Condition()

  def member(rank):
    tags = iter(range(100))

    def send(messages):
      numbered = [(next(tags), *message) for message in messages]
      with posted:
        mail.update({(rank, to, tag): words.copy() for tag, words, to, _ in numbered if to is not None})
        posted.notify_all()
        found = []
        for tag, words, _, origin in numbered:
          key = origin, rank, tag
          assert origin is None or posted.wait_for(lambda key=key: key in mail, timeout=60)
          found.append(np.zeros_like(words) if origin is None else mail.pop(key))
      return found

    return links.broadcast(values if rank == root else np.full_like(values, np.nan), root, rank, size, send)

  for found in in_threads(size, member):
    np.testing.assert_array_equal(found.view(np.uint32), values.view(np.uint32))
  assert not mail


def nesterov(comm):
  return optax.chain(js.topka_transform(comm, density=0.5), optax.sgd(0.5, momentum=0.5, nesterov=True))


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("outer", [averaging, choosing, nesterov])
def test_a_link_adds_what_it_moves_to_what_the_others_reach_without_it(outer, fragments):
  """Multiples of 1/8, so that no sum rounds; the link moves in some rounds only."""

  def train(server, number, moves=()):
    is_link = number == 2
    options = {"fragments": fragments, "every": fragments * (1 if is_link else 4), "link": is_link}
    with join(server, number, START, outer, **options) as worker:
      params = worker.params
      seen = []
      while worker.round < 6:
        before = worker.round
        if is_link:
          params = worker.step(params if before not in moves else shifted(params, 8.0))
        else:
          params = worker.step(shifted(params, (number + 1) / 8))
        if worker.round != before:
          seen.append((worker.round, worker.group.links))
      return jax.tree.map(np.asarray, worker._exchanger.anchor.params), seen

  with serve(2) as server:
    without = [anchor for anchor, _ in in_threads(2, lambda number: train(server, number))]
  with serve(3) as server:
    found = in_threads(3, lambda number: train(server, number, moves=(1, 4)))
  jax.tree.map(np.testing.assert_array_equal, *without)
  # Each leaf is in one fragment, which is exchanged each second round: with two, both moves are delivered by then.
  expected = jax.tree.map(lambda leaf: leaf + np.float32(16.0), without[0])
  for anchor, seen in found:
    jax.tree.map(np.testing.assert_array_equal, anchor, expected)
    assert [round_ for round_, links in seen if links] == {1: [2, 5], 2: [2, 3, 5, 6]}[fragments]


def test_a_link_delivers_once_where_nobody_has_trained():
  """All weights are 0 then, and the weights of a round are equal."""

  def work(number):
    with join(server, number, START, every=1, link=number == 1) as worker:
      params = worker.params
      while worker.round < 2:
        params = worker.step(shifted(params, 8.0 if number == 1 and worker.round == 0 else 0.0), weight=0)
      return params

  with serve(2) as server:
    for params in in_threads(2, work):
      jax.tree.map(np.testing.assert_array_equal, params, shifted(START, 8.0))


STEPS, EVERY, ABOVE = 24, 2, 3


def train_in_a_group(server, number, device, movement):
  """A worker whose last rounds only take what has come from above."""
  with join(server, number, START, device=device, every=EVERY) as worker:
    params = worker.params
    for step in range(STEPS + 2 * EVERY):
      params = worker.step(shifted(params, movement if step < STEPS else 0.0))
    assert worker.round == STEPS // EVERY + 2
    return worker.leave()


def follow(below, above, params, until):
  """The loop of a link; returns what each step returned last."""
  while below.round < until:
    before = below.round
    params = returned = below.step(params)
    if below.round > before:
      params = above.step(params, weight=len(below.group.members) - 1)
  return returned, params


def link(server, top, group, is_restarted):
  devices = jax.devices()

  def make(below_state=None, above_state=None):
    below = join(server, 2, START, every=1, link=True, device=devices[3 * group + 2], state=below_state)
    return below, join(top, group, START, every=ABOVE, device=devices[8 + group], state=above_state)

  below, above = make()
  params = above.params
  if is_restarted:
    returned, _ = follow(below, above, params, 2 * ABOVE)  # after a round among groups, which it has not delivered
    states = below.state, above.state
    below.leave()
    above.leave()
    below, above = make(*states)
    params = jax.tree.map(lambda up, down, last: up + (down - last), above.params, below.params, returned)
  follow(below, above, params, STEPS // EVERY + 2)
  assert above.round == STEPS // EVERY // ABOVE
  above.leave()
  below.leave()


@pytest.mark.parametrize("is_restarted", [False, True])
def test_two_levels_share_all_that_was_trained(is_restarted):
  """Two groups of two workers; each worker ends where the mean of all four workers' movement leads."""
  with contextlib.ExitStack() as stack:
    servers = [stack.enter_context(serve(3)) for _ in range(2)]
    top = stack.enter_context(serve(2))

    def work(process):
      group, number = divmod(process, 3)
      if number == 2:
        return link(servers[group], top, group, is_restarted and group == 0)
      return train_in_a_group(servers[group], number, jax.devices()[process], 2.0 * group + number)

    found = in_threads(6, work)
  expected = shifted(START, STEPS * np.mean([0, 1, 2, 3]))
  for params in (found[0], found[1], found[3], found[4]):
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_a_sum_that_overflows_skips_the_round_at_all_members():
  largest = np.float32(3e38)
  outer = OuterStep(averaging)
  before = outer.start({"w": jnp.full(3, largest)})
  send = lambda messages: [words for words, *_ in messages]
  zeros = jax.tree.map(jnp.zeros_like, before.params)
  result = outer.run(before, zeros, 1.0, 1, 0, 5, send)
  given = {"w": jnp.full(3, -largest)}
  found = links.add_moved(outer, before, result, given, Group((7,), (1.0,), 0, number=5, links=(7,)), 0, send)
  assert found.skipped
  jax.tree.map(np.testing.assert_array_equal, found.anchor.params, before.params)
  assert found.anchor.position == result.anchor.position


@pytest.mark.parametrize("option", [{"mixing": 0.5}, {"apply_residual": True}])
def test_options_of_workers_are_refused_for_a_link(option):
  with pytest.raises(ValueError, match=f"link=True with.*{next(iter(option))}"):
    js.partial.Rounds("tcp://127.0.0.1:1", 0, START, averaging, every=1, link=True, **option)
