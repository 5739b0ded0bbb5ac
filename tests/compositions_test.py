"""Every collective in every composition and dtype: nothing is lost, and a skipped step has not happened.

A cell of the table is a collective, what is built around it, and the dtype of the
parameters. A cell is refused by name when it is made or first used (`refusal`), or
these hold:

- Law C in every step, where updates tell what was delivered (`LINEAR`), but for the
  cells that `loses` lists; of the residual that a `decay` leaves, before it
- Law R
- a step in which one worker has NaN leaves every bit of parameters and state as it was,
  counters of skipped steps and words apart, in each phase of the exchanges, and 20
  times in succession
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from jaxsparse.collectives import collective_options
from jaxsparse.transform.state import LocalState, ReduceState, reduce_states
from tests.cases import (
  CASES,
  assert_same_bits,
  integers,
  mesh_of,
  residuals_by_leaf,
  row,
  start,
)

WORKERS, STEPS, FAULTS, MOMENTUM = 3, 9, 20, 0.5
SHAPES = {"bias": (5,), "scale": (3,), "w": (6, 8)}
N, DECAY = 56, 0.5
EPS = 1e-3  # of Adam; 1e-8 is 0 in float16
SPECIAL = {"bias": "dense", "scale": "topka:density=0.5"}

Transform = optax.GradientTransformation


def local(
  transform: Transform, inner: Transform | None = None, **options: Any
) -> Transform:
  return js.local_steps(
    inner or optax.sgd(1.0), optax.chain(transform, optax.sgd(1.0)), **options
  )


WIDENING = 1 + 2.0**-8  # updates have bits that no narrower dtype holds
widened = optax.stateless(
  lambda grads, _: jax.tree.map(lambda g: -WIDENING * g.astype(jnp.float32), grads)
)

averaging = js.average_momentum(optax.adam(0.1, eps=EPS), "workers", every=3)


def split(transform: Transform) -> Transform:
  """The biases in a transform of their own, with a momentum that no other leaf has."""
  dense = optax.chain(js.dense_transform("workers"), optax.sgd(1.0, momentum=0.9))
  labels = {"bias": "dense", "scale": "sparse", "w": "sparse"}
  return optax.multi_transform(
    {"sparse": optax.chain(transform, optax.adamw(0.1, eps=EPS)), "dense": dense},
    labels,
  )


def mixed(transform: Transform) -> Transform:
  """Some leaves in local steps, others not."""
  kinds = {
    "local": local(transform, every=2),
    "plain": optax.chain(js.dense_transform("workers"), optax.adamw(0.1, eps=EPS)),
  }
  return optax.multi_transform(kinds, {"bias": "plain", "scale": "local", "w": "local"})


COMPOSITIONS: dict[str, Callable[[Transform], Transform]] = {
  "plain": lambda transform: optax.chain(transform, optax.sgd(1.0)),
  "accumulate": lambda transform: optax.chain(transform, optax.sgd(1.0)),
  "special": lambda transform: optax.chain(transform, optax.sgd(1.0)),
  "decayed": lambda transform: optax.chain(transform, optax.sgd(1.0)),
  "adamw": lambda transform: optax.chain(transform, optax.adamw(0.1, eps=EPS)),
  "corrected": lambda transform: optax.chain(
    js.momentum_corrected(transform, MOMENTUM), optax.sgd(1.0)
  ),
  "tracked": lambda transform: optax.chain(
    js.ef21(transform, MOMENTUM), optax.sgd(1.0)
  ),
  "warmed up": lambda transform: optax.chain(
    js.warmed_up(transform, {2: 1.0, 4: 0.5}), optax.sgd(1.0)
  ),
  "corrected warm up": lambda transform: optax.chain(
    js.momentum_corrected(js.warmed_up(transform, {2: 1.0, 4: 0.5}), MOMENTUM),
    optax.sgd(1.0),
  ),
  "multi_transform": split,
  "local 1": lambda transform: local(transform, every=1),
  "local 4": lambda transform: local(transform, every=4),
  "local 4 applied": lambda transform: local(transform, every=4, apply_residual=True),
  "local grown": lambda transform: local(
    transform, every=lambda step: 1 + step, apply_residual=True
  ),
  "local wide": lambda transform: local(
    transform, widened, every=1, apply_residual=True
  ),
  "local inner": lambda transform: js.local_steps(
    optax.chain(transform, optax.sgd(1.0, momentum=0.9)),
    optax.chain(js.dense_transform("workers"), optax.sgd(1.0)),
    every=4,
  ),
  "local corrected": lambda transform: local(
    js.momentum_corrected(transform, MOMENTUM), optax.adam(0.1, eps=EPS), every=2
  ),
  "local tracked": lambda transform: local(
    js.ef21(transform, MOMENTUM), optax.adam(0.1, eps=EPS), every=2
  ),
  "local averaged": lambda transform: local(
    transform, averaging, every=2, apply_residual=True
  ),
  "local restored": lambda transform: local(
    js.norm_restored(transform), every=2, apply_residual=True
  ),
  "local mixed": mixed,
  "diloco": lambda transform: js.local_steps(
    optax.adamw(0.1, eps=EPS),
    optax.chain(transform, optax.sgd(0.7, momentum=0.9, nesterov=True)),
    every=3,
  ),
  "fragments": lambda transform: local(transform, every=4, fragments=2),
  "streaming": lambda transform: local(
    transform, optax.adam(0.1, eps=EPS), every=4, fragments=2, delay=1, mixing=0.5
  ),
}
LINEAR = {
  "plain",
  "accumulate",
  "special",
  "decayed",
  "warmed up",
  "local 1",
  "local 4",
  "local 4 applied",
  "local grown",
  "local wide",
  "fragments",
}
"""Where all rates are 1 and nothing follows the transform, so that updates are what is delivered."""

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
NAMES = [case.name for case in CASES if not case.options]
SPARSE = [case.name for case in CASES if not case.options and case.is_sparse]


def is_crossed(name: str, composition: str) -> bool:
  """Whether both meet other dtypes: all compositions with collectives that differ, the others with a few."""
  return name in ("dense", "nbit", "spardl") or composition in (
    "plain",
    "corrected",
    "fragments",
  )


def refusal(name: str, composition: str) -> str | None:
  """What the error of a cell says that is refused; None for all others."""
  if composition == "decayed" and "decay" not in collective_options(name):
    return f"{name}: unknown option decay"
  if name == "a2sgd" and composition != "local inner":
    return "a2sgd|A2SGD"
  if "tracked" in composition and name == "qsgd":
    return "ef21: qsgd loses a part"
  if composition == "local inner" and name in {
    *SPARSE,
    "nbit",
    "onebit",
    "powersgd",
    "rows",
  }:
    return "inner has a jaxsparse transform with a residual"
  if composition in ("warmed up", "corrected warm up") and name not in SPARSE:
    return "warmed_up: .* has no density"
  if "corrected" in composition and name == "dcttopk":
    return "momentum_corrected: masking=True with .*dcttopk"
  return None


def loses(name: str, composition: str, dtype: str) -> bool:
  """Whether a cell does not conserve, and says so: no residual takes what the dtype, or QSGD, rounds off."""
  # which has leaves of `dense`
  rounds = name in ("dense", "a2sgd") or composition == "special"
  return name == "qsgd" or (rounds and dtype != "float32")


class Cell:
  """A trained cell: parameters are zeros in each step, so that those after it are the update, in all its bits."""

  def __init__(self, name: str, composition: str, dtype: str):
    options = {"special": SPECIAL} if composition == "special" else {}
    options |= {"density": 0.2} if name in SPARSE else {}
    options |= {"decay": DECAY} if composition == "decayed" else {}
    params = {leaf: jnp.zeros(shape, DTYPES[dtype]) for leaf, shape in SHAPES.items()}
    self.copies, self.dtype = 2 if composition == "accumulate" else 1, DTYPES[dtype]
    tx = COMPOSITIONS[composition](js.make_transform(name, "workers", **options))
    self.step, self.params, self.state = start(
      tx, mesh_of(WORKERS), params, accumulate=self.copies
    )

  def __call__(self, grads: np.ndarray) -> tuple[Any, Any, bool]:
    """(updates, next state, skipped) of one step with these gradients, f32[P, N]."""
    with jax.numpy_dtype_promotion("standard"):  # adam needs it
      updates, state, metrics = self.step(
        self.params, self.state, np.repeat(grads, self.copies, axis=0)
      )
    return updates, state, bool(metrics.skipped)


def by_leaf(tree: Any) -> np.ndarray:
  """f64[N] of a pytree with the leaves of `SHAPES`, the sum over a leading axis of workers."""
  leaves = [
    np.asarray(tree[name]).astype(np.float64).reshape(-1, math.prod(shape))
    for name, shape in SHAPES.items()
  ]
  return np.concatenate([leaf.sum(0) for leaf in leaves])


def owed(state: Any) -> np.ndarray:
  """f64[N], the sum over workers of residuals and of what is moved."""
  found = residuals_by_leaf(state, WORKERS)
  rows = {
    name: found.get(f"['{name}']", np.zeros(shape)) for name, shape in SHAPES.items()
  }
  return by_leaf(rows) + (
    by_leaf(state.moved) if isinstance(state, LocalState) and state.moved else 0
  )


def entered(cell: Cell, composition: str, grads: np.ndarray) -> np.ndarray:
  """f64[N], the sum over workers of what enters the residuals in a step."""
  rounded = np.asarray(jnp.asarray(grads).astype(cell.dtype)).astype(np.float64)
  if composition == "local wide":
    rounded = WIDENING * rounded
  if composition not in ("corrected", "corrected warm up"):
    return rounded.sum(0)
  momentum = np.asarray(cell.state[0].carried.worker[0].momentum, np.float64).reshape(
    WORKERS, N
  )
  return (MOMENTUM * momentum + rounded).sum(0)


def without_counters(state: Any) -> Any:
  is_node = lambda node: isinstance(node, ReduceState)
  return jax.tree.map(
    lambda node: node.carried if is_node(node) else node, state, is_leaf=is_node
  )


def assert_skipped(cell: Cell, number: int) -> None:
  """A step in which one worker has NaN, which becomes the state of the cell."""
  bad = integers(99, WORKERS, N)
  bad[1, 7 * number % N] = (np.nan, np.inf)[number % 2]
  updates, state, skipped = cell(bad)
  assert skipped
  assert not np.any(by_leaf(updates))
  assert_same_bits(without_counters(state), without_counters(cell.state))
  before, after = js.metrics(cell.state), js.metrics(state)
  assert bool(after.skipped)
  assert int(after.skipped_steps) == int(before.skipped_steps) + 1
  cell.state = state


QUICK = {
  ("a2sgd", "local inner", "float32"),
  ("a2sgd", "plain", "float32"),
  ("dcttopk", "corrected", "float32"),
  ("nbit", "local 4 applied", "bfloat16"),
  ("onebit", "plain", "bfloat16"),
  ("spardl", "corrected", "float32"),
  ("spardl", "local wide", "bfloat16"),
  ("topka", "accumulate", "float32"),
  ("topka", "corrected warm up", "float32"),
  ("topka", "decayed", "float32"),
  ("topka", "fragments", "float32"),
  ("topka", "multi_transform", "float32"),
}
"""Each law, each kind of refusal, and compositions that no file of their own has."""

CELLS = [
  (name, composition, dtype)
  for name in NAMES
  for composition in COMPOSITIONS
  for dtype in DTYPES
  if dtype == "float32"
  or (name, composition, dtype) in QUICK
  or (
    is_crossed(name, composition)
    and (dtype == "bfloat16" or name in ("dense", "spardl"))
  )
]


@pytest.mark.filterwarnings("ignore:js.init. the optimizer keeps .* in (b?)float16")
@pytest.mark.filterwarnings("ignore:make_train_step. 8 steps in a row")
@pytest.mark.parametrize(
  ("name", "composition", "dtype"),
  [row(*cell, quick=cell in QUICK, id="-".join(cell)) for cell in CELLS],
)
def test_a_cell(name, composition, dtype):
  if message := refusal(name, composition):
    with pytest.raises((ValueError, TypeError), match=message):
      Cell(name, composition, dtype)(integers(0, WORKERS, N))
    return
  cell, undisturbed = Cell(name, composition, dtype), []
  tolerance = 1e-5 if dtype == "float32" or composition == "local wide" else 1e-4
  conserves = composition in LINEAR | {"corrected", "corrected warm up"} and not loses(
    name, composition, dtype
  )
  first, kept = cell.state, DECAY if composition == "decayed" else 1
  for number in range(STEPS):
    # has more bits than bfloat16
    grads = integers(number, WORKERS, N) * np.float32(1 + 2.0**-6)
    before = owed(cell.state) + entered(cell, composition, grads)
    updates, state, skipped = cell(grads)
    assert not skipped
    if conserves:
      np.testing.assert_allclose(
        owed(state) / kept - WORKERS * by_leaf(updates), before, atol=tolerance * 50
      )
    cell.state = state
    undisturbed.append((updates, without_counters(state)))
  cell.step.check(cell.params, cell.state)
  cell.state = first
  for number, expected in enumerate(undisturbed):
    assert_skipped(cell, number)
    updates, cell.state, skipped = cell(
      integers(number, WORKERS, N) * np.float32(1 + 2.0**-6)
    )
    assert not skipped
    assert_same_bits((updates, without_counters(cell.state)), expected)
  for number in range(FAULTS):
    assert_skipped(cell, number)
  assert len(reduce_states(cell.state)) == len(reduce_states(first))
