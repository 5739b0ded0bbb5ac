"""The figures of schedules: their arrows are the messages of the jaxpr, and all workers end with all gradients."""

import itertools

import jax
import jax.numpy as jnp
import matplotlib.text
import pytest

import jaxsparse as js
from docs import schedules
from jaxsparse._compat import inner_jaxprs
from jaxsparse.comm import AxisComm, all_gather
from jaxsparse.comm.schedules import strides
from jaxsparse.costs.counting import schedule
from tests.cases import row


def routes(jaxpr):
  """The pairs of each message of a jaxpr, in order."""
  found = [
    sorted(equation.params["perm"])
    for equation in jaxpr.eqns
    if equation.primitive.name == "ppermute"
  ]
  inner = [
    routes(one) for equation in jaxpr.eqns for one in inner_jaxprs(equation.params)
  ]
  return [*found, *itertools.chain(*inner)]


def compiled(name, workers, n, **options):
  return routes(schedule(js.make_collective(name, density=1.0, **options), n, workers))


def gathered(workers):
  gather = jax.make_jaxpr(
    lambda x: all_gather(AxisComm("workers"), x), axis_env=[("workers", workers)]
  )
  return routes(gather(jnp.float32(0)).jaxpr)


def arrows(figure):
  """The pairs of each row of a figure, read off the ends of its arrows."""
  (axes,) = figure.axes
  drawn = [text for text in axes.texts if isinstance(text, matplotlib.text.Annotation)]
  rounds = sorted({-round(arrow.xyann[1] + 0.2) for arrow in drawn})
  pairs = lambda t: [
    (arrow.xyann[0], arrow.xy[0])
    for arrow in drawn
    if -round(arrow.xyann[1] + 0.2) == t
  ]
  return [sorted(pairs(t)) for t in rounds]


def first_rounds(workers):
  return compiled("spardl", workers, workers)[: len(strides(workers))]


@pytest.mark.parametrize(
  ("draw", "expected", "arguments"),
  [
    row(
      schedules.spar_reduce_scatter,
      first_rounds,
      [3],
      quick=True,
      id="spar_reduce_scatter, 3 workers",
    ),
    row(
      schedules.spar_reduce_scatter,
      first_rounds,
      [6],
      id="spar_reduce_scatter, 6 workers",
    ),
    row(schedules.bruck, gathered, [6], quick=True, id="bruck, 6 workers"),
    row(
      schedules.teams,
      lambda p, d: compiled("spardl", p, p // d, teams=d),
      [6, 2],
      id="teams, 2 of 3 workers",
    ),
    row(
      schedules.teams,
      lambda p, d: compiled("spardl", p, p // d, teams=d),
      [6, 3],
      id="teams, 3 of 2 workers",
    ),
    row(schedules.tree, lambda p: compiled("gtopk", p, 1), [3], id="tree, 3 workers"),
    row(schedules.tree, lambda p: compiled("gtopk", p, 1), [6], id="tree, 6 workers"),
  ],
)
def test_arrows_are_the_messages_that_are_sent(draw, expected, arguments):
  drawn = arrows(draw(*arguments))
  assert drawn == expected(*arguments)


@pytest.mark.parametrize(
  ("workers", "teams"),
  [row(2, 2, quick=True), row(6, 1), row(6, 2), row(6, 3), row(8, 4)],
)
def test_messages_carry_what_their_senders_hold_and_all_get_all(workers, teams):
  size = workers // teams
  rounds = schedules.rounds_of("spardl", workers, size, teams=teams)
  start = [
    {block: frozenset([worker]) for block in range(size)} for worker in range(workers)
  ]
  states = schedules.held(rounds, start, given=len(strides(size)))
  for messages, state in zip(rounds, states, strict=False):
    for message in messages:
      assert all(
        summed <= state[message.source][block]
        for block, summed in message.parts.items()
      )
  assert states[-1] == [dict.fromkeys(range(size), frozenset(range(workers)))] * workers


def test_more_workers_than_numbers_are_exact_for_are_refused():
  with pytest.raises(ValueError, match="9 workers, choose 1 … 8"):
    schedules.bruck(9)
