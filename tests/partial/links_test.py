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
from jaxsparse.partial.net.messages import WorkerGroup
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
        mail.update(
          {
            (rank, to, tag): words.copy()
            for tag, words, to, _ in numbered
            if to is not None
          }
        )
        posted.notify_all()
        found = []
        for tag, words, _, origin in numbered:
          key = origin, rank, tag
          assert origin is None or posted.wait_for(
            lambda key=key: key in mail, timeout=60
          )
          found.append(np.zeros_like(words) if origin is None else mail.pop(key))
      return found

    return links.broadcast(
      values if rank == root else np.full_like(values, np.nan), root, rank, size, send
    )

  for found in in_threads(size, member):
    np.testing.assert_array_equal(found.view(np.uint32), values.view(np.uint32))
  assert not mail


def nesterov(comm):
  return optax.chain(
    js.make_transform("topka", comm, density=0.5),
    optax.sgd(0.5, momentum=0.5, nesterov=True),
  )


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("outer", [averaging, choosing, nesterov])
def test_a_link_adds_what_it_moves_to_what_the_others_reach_without_it(
  outer, fragments
):
  """Multiples of 1/8, so that no sum rounds; the link moves in some rounds only."""

  def train(server, number, moves=()):
    is_link = number == 2
    options = {
      "fragments": fragments,
      "every": fragments * (1 if is_link else 4),
      "link": is_link,
    }
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
    without = [
      anchor for anchor, _ in in_threads(2, lambda number: train(server, number))
    ]
  with serve(3) as server:
    found = in_threads(3, lambda number: train(server, number, moves=(1, 4)))
  jax.tree.map(np.testing.assert_array_equal, *without)
  # Each leaf is in one fragment, which is exchanged each second round: with two, both
  # moves are delivered by then.
  expected = jax.tree.map(lambda leaf: leaf + np.float32(16.0), without[0])
  for anchor, seen in found:
    jax.tree.map(np.testing.assert_array_equal, anchor, expected)
    assert [round_ for round_, links in seen if links] == {1: [2, 5], 2: [2, 3, 5, 6]}[
      fragments
    ]


def test_a_link_delivers_once_where_nobody_has_trained():
  """All weights are 0 then, and the weights of a round are equal."""

  def work(number):
    with join(server, number, START, every=1, link=number == 1) as worker:
      params = worker.params
      while worker.round < 2:
        params = worker.step(
          shifted(params, 8.0 if number == 1 and worker.round == 0 else 0.0), weight=0
        )
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


def follow(below, above, until):
  """The loop of a link; what it has saved last."""
  saved = None
  params = above.params
  while below.round < until:
    before = below.round, above.round
    params = below.step(params)
    if below.round > before[0]:
      params = above.step(params, weight=len(below.group.members) - 1)
    if above.round > before[1]:
      saved = above.state
  return saved


def link(server, tops, group, is_lost):
  """Of a group; one that is lost, before it has delivered what a round among groups has moved, goes on at `tops[1]`."""
  devices = jax.devices()
  saved = None
  for top, until in zip(
    tops,
    [2 * ABOVE, STEPS // EVERY + 2] if is_lost else [STEPS // EVERY + 2],
    strict=is_lost,
  ):
    below = join(server, 2, START, every=1, link=True, device=devices[3 * group + 2])
    above = join(top, group, START, every=ABOVE, device=devices[8 + group], state=saved)
    saved = follow(below, above, until)
    rounds = above.round
    below.leave()
    above.leave()
  assert rounds == STEPS // EVERY // ABOVE


@pytest.mark.parametrize("lost", [[], [0], [0, 1]], ids=str)
def test_two_levels_share_all_that_was_trained(lost):
  """Two groups of two workers; each worker ends where the mean of all four workers' movement leads."""
  with contextlib.ExitStack() as stack:
    servers = [stack.enter_context(serve(3)) for _ in range(2)]
    tops = [stack.enter_context(serve(2))] * 2
    if len(lost) == 2:  # and the server of the rounds among groups, too
      tops[1] = stack.enter_context(serve(2))

    def work(process):
      group, number = divmod(process, 3)
      if number == 2:
        return link(servers[group], tops, group, group in lost)
      return train_in_a_group(
        servers[group], number, jax.devices()[process], 2.0 * group + number
      )

    found = in_threads(6, work)
  expected = shifted(START, STEPS * np.mean([0, 1, 2, 3]))
  for params in (found[0], found[1], found[3], found[4]):
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_what_a_group_has_moved_since_the_last_round_among_groups_is_lost_with_its_link_and_nothing_else():
  """Groups of one worker; the link of the first is lost in round 5, after the round among groups that is in round 4."""
  ends = 8, 7  # rounds of the groups
  trained = 7, 4

  def work(process):
    group, number = divmod(process, 2)
    device = jax.devices()[process]
    if number == 0:
      with join(servers[group], 0, START, device=device, every=1) as worker:
        params = worker.params
        while worker.round < ends[group]:
          params = worker.step(
            shifted(params, (group + 1.0) * (worker.round < trained[group]))
          )
        return worker.leave()
    saved = None
    for until in (5, ends[0]) if group == 0 else (ends[1],):
      below = join(servers[group], 1, START, every=1, link=True, device=device)
      above = join(
        top, group, START, every=2, device=jax.devices()[8 + group], state=saved
      )
      saved = follow(below, above, until)
      below.leave()
      above.leave()
    return None

  with serve(2) as top, serve(2) as first, serve(2) as second:
    servers = [first, second]
    found = in_threads(4, work)
  expected = shifted(START, (1.0 * (trained[0] - 1) + 2.0 * trained[1]) / 2)
  for params in (found[0], found[2]):
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_a_sum_that_overflows_skips_the_round_at_all_members():
  largest = np.float32(3e38)
  outer = OuterStep(averaging)
  before = outer.start({"w": jnp.full(3, largest)})
  send = lambda messages: [words for words, *_ in messages]
  zeros = jax.tree.map(jnp.zeros_like, before.params)
  result = outer.run(before, zeros, 1.0, 1, 0, 5, send)
  given = {"w": jnp.full(3, -largest)}
  found = links.add_moved(
    outer,
    before,
    result,
    given,
    WorkerGroup((7,), (1.0,), 0, number=5, links=(7,)),
    0,
    send,
  )
  assert found.skipped
  jax.tree.map(np.testing.assert_array_equal, found.anchor.params, before.params)
  assert found.anchor.position == result.anchor.position


@pytest.mark.parametrize("option", [{"mixing": 0.5}, {"apply_residual": True}])
def test_options_of_workers_are_refused_for_a_link(option):
  with pytest.raises(ValueError, match=f"link=True with.*{next(iter(option))}"):
    js.partial.Rounds(
      "tcp://127.0.0.1:1", 0, START, averaging, every=1, link=True, **option
    )
