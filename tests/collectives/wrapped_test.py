"""A wrapper that defines `reduce` alone is like the collective inside in everything else."""

import dataclasses
import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.collectives import Collective
from jaxsparse.collectives._base import Traits
from jaxsparse.collectives._wrapped import EF21, Corrected, WarmedUp, Wrapped
from jaxsparse.train import simulation
from jaxsparse.transform.groups import Bundle, assign_collectives, groups_of
from jaxsparse.types import Deferred
from tests.cases import CASES, assert_same_bits, integers, normals, row

N, WORKERS = 30, 4


class Plain(Wrapped):
  """A wrapper by someone who knows no more than `reduce`."""

  def reduce(self, comm, grads, state):
    return self.collective.reduce(comm, grads, state)


class Halved(Wrapped):
  """Half of each gradient, and a state of its own around that of the collective inside."""

  def init(self, n, size):
    state = self.collective.init(n, size)
    return state._replace(shared=(jnp.int32(0), state.shared))

  def inner_state(self, state):
    return state._replace(shared=state.shared[1])

  def reduce(self, comm, grads, state):
    reduced = self.collective.reduce(comm, grads / 2, self.inner_state(state))
    shared = state.shared[0] + 1, reduced.state.shared
    return reduced._replace(state=reduced.state._replace(shared=shared))


def plain(collective):
  return Plain(collective=collective)


def ladder():
  inner = js.make_collective("topka", density=0.1)
  return WarmedUp(collective=inner, steps=(2,), densities=(0.5,))


def run(collective, steps=4, n=N):
  """Totals, momenta and residuals of some steps."""
  state = simulation.initial(collective, WORKERS, n)
  found = []
  for step in range(steps):
    grads = jnp.asarray(16 * integers(step, WORKERS, n))
    totals, state = simulation.reduce_all(collective, grads, state)
    found.append((totals, state.carried.residual, state.carried.worker))
  return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_a_wrapper_does_not_change_is_that_of_the_collective_inside(case):
  inner = case.make(density=0.2)
  wrapper = plain(inner)
  assert wrapper.traits == inner.traits
  shapes = ((4, 3), (8,))
  fitted = wrapper.for_leaves(shapes)
  assert fitted == plain(inner.for_leaves(shapes))
  assert fitted.traits == inner.for_leaves(shapes).traits
  assert wrapper.for_devices(2) == plain(inner.for_devices(2))
  assert wrapper.for_groups([9, 5]) == [plain(one) for one in inner.for_groups([9, 5])]
  assert wrapper.entries(N) == inner.entries(N)
  workers = case.workers()[-1]
  assert wrapper.slots(N, workers) == inner.slots(N, workers)
  assert wrapper.cost(N, workers) == inner.cost(N, workers)
  state = inner.init(N, workers)
  assert wrapper.is_partial(N, state) == inner.is_partial(N, state)


def test_a_wrapper_forwards_whatever_a_collective_can_be_asked():
  """A new method of `Collective` is forwarded, or is computed from others that are."""
  computed = {"check_size", "count", "label", "name", "ranges"}
  asked = {name for name, _ in inspect.getmembers(Collective) if name[0] != "_"}
  assert asked - vars(Wrapped).keys() - computed == {"reduce"}


@pytest.mark.parametrize(
  "inner",
  [
    row(js.make_collective("topka", density=0.2), quick=True, id="topka"),
    row(js.make_collective("spardl", density=0.2), id="spardl"),
    row(ladder(), id="ladder"),
  ],
)
def test_momentum_is_masked_through_any_wrapper(inner):
  correct = lambda collective: Corrected(collective=collective, momentum=0.5)
  expected = run(correct(inner))
  assert_same_bits(run(correct(plain(inner))), expected)
  assert np.any(expected[-1][2][0].momentum == 0)


@pytest.mark.long
def test_momentum_is_masked_around_a_state_of_the_wrappers_own():
  """Halves of gradients have the signs, and so the masks, of gradients."""
  correct = lambda collective: Corrected(collective=collective, momentum=0.5)
  halved = run(correct(Halved(collective=ladder())))
  for (_, _, own), (_, _, whole) in zip(halved, run(correct(ladder())), strict=True):
    assert_same_bits(own[0].momentum, whole[0].momentum)


def test_a_ladder_masks_momentum_in_steps_that_deliver_some_entries_only():
  """Density 1 before step 2, 10 % from then on."""
  inner = js.make_collective("topka", density=0.1)
  whole_first = WarmedUp(collective=inner, steps=(2,), densities=(1.0,))
  steps = run(Corrected(collective=whole_first, momentum=0.5))
  grads = [16 * integers(step, WORKERS, N).astype(np.float64) for step in range(4)]
  expected = np.zeros((WORKERS, N))
  for number, (_, residual, worker) in enumerate(steps):
    home = expected / 2 + grads[number]
    if number:
      home = home + np.asarray(steps[number - 1][1][0], np.float64)
    expected = expected / 2 + grads[number]
    if number >= 2:
      expected = np.where(np.asarray(residual[0], np.float64) == home, expected, 0)
    np.testing.assert_array_equal(worker[0].momentum, expected)


def test_costs_of_a_wrapper_need_shapes_where_those_of_the_collective_do():
  low_rank = plain(js.make_collective("powersgd", rank=1))
  for price in (js.costs.predict, js.costs.count):
    with pytest.raises(ValueError, match="depend on the shapes of their leaves"):
      price(low_rank, n=10_000, workers=4)
    found = price(low_rank, n={"w": jnp.zeros((100, 100))}, workers=4)
    assert found == price("powersgd", n={"w": jnp.zeros((100, 100))}, workers=4, rank=1)


def test_k_is_shared_out_among_groups_through_a_wrapper():
  assignment = assign_collectives(plain(js.make_collective("topka", k=6)), {})
  shapes = {"b": (10,), "w": (4, 5)}
  groups = groups_of(shapes, assignment, [Bundle((0,)), Bundle((1,))])
  assert [group.collective.collective.k for group in groups] == [2, 4]


@pytest.mark.parametrize("around", [lambda x: x, plain, lambda x: plain(plain(x))])
def test_one_momentum_is_enough_at_any_depth(around):
  dense = js.make_collective("dense")
  for one in (
    Corrected(collective=dense, momentum=0.5),
    EF21(collective=dense, momentum=0.5),
  ):
    for wrapper, name in ((Corrected, "momentum_corrected"), (EF21, "ef21")):
      with pytest.raises(ValueError, match=f"{name}: .*dense has a momentum already"):
        wrapper(collective=around(one), momentum=0.5)


def test_two_momenta_are_refused_when_a_transform_is_made():
  one = js.onebit_transform("workers")
  for outer in (js.ef21, js.momentum_corrected):
    for inner in (js.ef21, js.momentum_corrected):
      with pytest.raises(ValueError, match="onebit has a momentum already"):
        outer(inner(one))


LOSING = {
  "dense": {"dtype": "bfloat16"},
  "qsgd": {"error_feedback": False},
  "spardl": {"density": 0.1, "residual": "partial"},
  "topka": {"density": 0.1, "decay": 0.5},
  "a2sgd": {},
}


@pytest.mark.parametrize("name", LOSING)
def test_ef21_refuses_what_loses_a_part_also_through_a_wrapper(name):
  inner = js.make_collective(name, **LOSING[name])
  for collective in (inner, plain(inner), plain(plain(inner))):
    with pytest.raises(ValueError, match="loses a part of what it is given"):
      EF21(collective=collective, momentum=0.5)


class FirstHalfTotal(NamedTuple):
  """A `Formula` of a total with the first half of its entries."""

  values: jax.Array
  grads: jax.Array

  def finish(self, values, finite, residual, decay):
    is_first = jnp.arange(values.size) < values.size // 2
    total = jnp.where(is_first & finite, values, 0.0)
    left = jnp.where(is_first, 0.0, self.grads + residual)
    return total, jnp.where(finite, decay * left, residual)


class FirstHalf(Collective):
  """Someone's collective that delivers the first half of the entries, and defers its total."""

  def entries(self, n):
    return n // 2

  def init(self, n, size):
    return js.State(residual=jnp.zeros(n))

  def cost(self, n, size):
    return js.Cost(1, n)

  def reduce(self, comm, grads, state):
    total = FirstHalfTotal(comm.all_reduce(grads + state.residual), grads)
    return Deferred(total, state, js.Counters())


def test_momentum_of_a_deferred_total_is_masked_where_it_delivers():
  expected = np.zeros((WORKERS, N))
  steps = run(Corrected(collective=FirstHalf(), momentum=0.5))
  for step, (totals, _, worker) in enumerate(steps):
    expected = expected / 2 + 16 * integers(step, WORKERS, N)
    assert np.any(totals[0][: N // 2])
    expected[:, : N // 2] = 0
    np.testing.assert_array_equal(worker[0].momentum, expected)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Traits)])
def test_a_trait_that_nothing_would_read_is_refused(field):
  body = {field: False, "__module__": __name__}
  with pytest.raises(TypeError, match=f"Own: {field} is a field of `traits`"):
    type("Own", (Collective,), body)


def test_traits_of_ones_own():
  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Lossy(Collective):
    decay: float = 0.5

    @property
    def traits(self):
      return dataclasses.replace(super().traits, conserves=False)

    def cost(self, n, size):
      return js.Cost(0, 0)

    def reduce(self, comm, grads, state):
      return js.Reduced(grads, state, js.Counters())

  assert plain(Lossy()).traits == Traits(conserves=False, decay=0.5)


@pytest.mark.parametrize("name", ["dcttopk", "powersgd", "rows"])
def test_leaves_of_another_number_of_entries_are_refused(name):
  """Devices of a worker have leaves of their own, which the shapes of the worker's do not fit."""
  options = {"k": 4} if name == "dcttopk" else {}
  inner = js.make_collective(name, **options).for_leaves(((4, 4),)).for_devices(2)
  for collective in (inner, plain(inner)):
    with pytest.raises(
      ValueError, match=r"n=8 entries, its leaves of shapes .* have 16"
    ):
      collective.init(8, 2)


@pytest.mark.parametrize(
  "label", ["oktopk", "topka:selector=reuse", "spardl:selector=reuse"]
)
def test_reused_thresholds_may_keep_entries_at_a_density_of_1(label):
  """Of a second gradient of half the size, so its momentum has to be masked."""
  name, *options = label.split(":")
  chosen = dict(option.split("=") for option in options)
  collective = js.make_collective(name, density=1.0, **chosen)
  first = normals(0, 3, 200)
  state = simulation.initial(collective, 3, 200)
  _, state = simulation.reduce_all(collective, jnp.asarray(first), state)
  _, state = simulation.reduce_all(collective, jnp.asarray(first / 2), state)
  assert np.any(np.asarray(state.carried.residual[0]) == first / 2)
  one = jax.tree.map(lambda leaf: leaf[0], state)
  assert collective.is_partial(200, one) is not False
