"""The table that the laws are tested over: every collective that exists, with every choice of its options."""

import functools
import math
import re
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from jaxsparse.collectives import (
  Collective,
  SparseCollective,
  _base,
  _kinds,
  make_collective,
)
from jaxsparse.transform.state import reduce_states

WORKERS = (1, 2, 3, 4, 5, 6, 8, 13, 16)
QUICK = (1, 3, 4)
"""The sizes of `make test`: one worker, and a power of two and another number. `make test-all` has all WORKERS."""

AS_USERS = {
  "xla_backend_optimization_level": 3,
  "xla_llvm_disable_expensive_passes": False,
} | ({"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {})
"""Compiler options that undo those of conftest.py, for bits that depend on the machine code."""

# Options that are numbers, and so have no list of choices; and what a choice needs
# beside it to mean something.
VARIANTS: dict[str, list[dict[str, Any]]] = {
  "chunktopk": [{"chunk": 7}],
  "dcttopk": [{"chunk": 16}],
  "gtopk": [{"selector": "reuse", "wire": "int8"}],
  "oktopk": [{"threshold_period": 2, "region_period": 1}],
  "powersgd": [{"rank": 1}],
  "qsgd": [{"levels": 1}],
  "rows": [{"capacity": 7}],
  "spardl": [
    {"teams": 2},
    {"teams": 3},
    {"teams": 5},
    {"teams": 8},
    {"teams": 8, "sag": "bruck"},
    {"selector": "chunked", "wire": "bf16"},
    {"selector": "reuse", "wire": "int8", "teams": 2},
    {"wire": "int8", "teams": 3},
  ],
  "topka": [{"selector": "chunked", "wire": "int8"}],
  "topkdsa": [{"selector": "reuse", "wire": "int8"}],
}
BESIDE: dict[tuple[str, Any], dict[str, Any]] = {
  ("powersgd", True): {"rank": 1},
  ("spardl", "bruck"): {"teams": 2},
  ("spardl", "recursive"): {"teams": 4},
}
LONG = re.compile(
  "chunktopk-(chunk|wire)|dcttopk-|gaussiank-|gtopk-|nbit-bits=[18]|oktopk-|powersgd-rank=1$|qsgd-levels|rows-"
  "|spardl-(teams=([358]|2-sag)|selector=.*wire|wire=int8)|topka-(wire|selector=(chunked$|reuse))|topkdsa-"
)
"""Cases with options that `make test` leaves out.

The choices of selector and wire, which the collectives share, are tested with SparDL, and together, as those that lose
most, with TopkA. Those of Ok-Topk's thresholds are compared with the paper in numpy, those of DctTopk are tested with
ChunkTopk.
"""

UNLIKE = ("a2sgd", "dense", "oktopk", "qsgd", "spardl", "spardl-teams=2")
"""What `make test` tests the transform, the engines and training with: collectives that differ in what they carry from
step to step (parameters of their own, nothing, thresholds, random numbers, residuals). The laws have all of them."""


class Case(NamedTuple):
  """A collective and its options, without the number of entries to deliver."""

  name: str
  options: tuple[tuple[str, Any], ...] = ()

  def __str__(self) -> str:
    return "-".join(
      [self.name, *(f"{option}={value}" for option, value in self.options)]
    )

  @property
  def is_sparse(self) -> bool:
    return issubclass(_kinds()[self.name], SparseCollective)

  @property
  def by_magnitude(self) -> bool:
    """Whether a giant entry is delivered at once. A threshold that everything else equals selects too much for that."""
    by_other_rule = self.name in (
      "a2sgd",
      "gaussiank",
      "micro",
      "oktopk",
      "randomk",
    ) or "contributors" in str(self)
    return self.exact and not by_other_rule

  @property
  def exact(self) -> bool:
    """Whether small whole numbers arrive as they are."""
    return not self.make(density=0.5).traits.scaled

  @property
  def rounding(self) -> float:
    """What the sum of a few small numbers may lose, as a share of them."""
    return 2**-8 if "bfloat16" in str(self) else 2**-22 if self.exact else 2**-18

  def config(self, **entries: Any) -> dict[str, Any]:
    """The configuration; `entries` (density or k) are for sparse collectives only."""
    return dict(self.options) | (entries if self.is_sparse else {})

  def make(self, **entries: Any) -> Collective:
    return make_collective(self.name, **self.config(**entries))

  def workers(self, sizes: Iterable[int] = WORKERS) -> list[int]:
    """Those numbers of workers that its teams divide."""
    teams = dict(self.options).get("teams", 1)
    # every compiled program takes seconds: fewer of them for all but the default
    # options
    if self.options:
      # of 3 workers hardly an entry is lost
      few = (6,) if self.options == (("residual", "partial"),) else (3, 6)
      sizes = [size for size in sizes if size in (few if teams == 1 else (5, 6, 8, 16))]
    fitting = [size for size in sizes if size % teams == 0]
    return fitting[:1] if len(self.options) > 1 else fitting


def all_cases() -> list[Case]:
  """Every collective as it is by default, with each other choice of each option, and the variants above."""
  cases = {}
  for name, kind in sorted(_kinds().items()):
    configs = [{}, *VARIANTS.get(name, [])]
    for option, choices in _base.choices_of(kind).items():
      default = kind.__dataclass_fields__[option].default
      configs += [
        BESIDE.get((name, choice), {}) | {option: choice}
        for choice in choices
        if choice != default
      ]
    cases.update(dict.fromkeys(Case(name, tuple(config.items())) for config in configs))
  return list(cases)


CASES = all_cases()
FEWER = [case for case in CASES if len(case.options) != 1 or not LONG.match(str(case))]
"""For laws that take long: choices that collectives share are met by some of them, and together."""
WIRED = [case for case in CASES if "wire" in dict(case.options)]
"""Every wire format of every collective that has several; for laws of local steps and of rounds."""
DEFAULTS = [str(case) for case in CASES if not case.options]
CONSERVING = [case for case in CASES if case.make(density=0.5).traits.conserves]
REPLICATING = [case for case in CASES if case.make(density=0.5).traits.replicates]


def averaged(axis: Any = "workers") -> optax.GradientTransformation:
  """The outer chain of local SGD, which averages parameters."""
  return optax.chain(js.dense_transform(axis), optax.sgd(1.0))


def each(
  cases: list[Case],
  sizes: Iterable[int] = WORKERS,
  quick: Iterable[int] = QUICK,
  options: str = "",
) -> pytest.MarkDecorator:
  """Parametrizes with (case, workers).

  Quick are the sizes `quick` of cases without options, and the first size of others
  that the pattern `options` matches, but for `LONG`.
  """

  def is_quick(case: Case, workers: int) -> bool:
    if not case.options:
      return workers in quick
    return (
      bool(re.match(options, str(case)))
      and not LONG.match(str(case))
      and workers == case.workers(sizes)[0]
    )

  pairs = [(case, workers) for case in cases for workers in case.workers(sizes)]
  rows = [row(*pair, quick=is_quick(*pair), id="{}-{}".format(*pair)) for pair in pairs]
  return pytest.mark.parametrize(("case", "workers"), rows)


def each_case(
  cases: list[Case], quick: Container[str] = UNLIKE
) -> pytest.MarkDecorator:
  """Parametrizes with each case; long but for those of the names `quick`."""
  return pytest.mark.parametrize(
    "case", [row(case, quick=str(case) in quick, id=str(case)) for case in cases]
  )


def quick_of(rows: Iterable[Any], quick: Container[Any] = QUICK) -> list[Any]:
  """What to parametrize with, values or tuples of them: long but for the `quick` ones."""
  return [
    row(*(one if isinstance(one, tuple) else (one,)), quick=one in quick)
    for one in rows
  ]


def row(*values: Any, quick: bool = False, id: str | None = None) -> Any:
  """One row of a table of tests. `make test` leaves out what is not quick; another row has the same law."""
  return pytest.param(*values, id=id, marks=[] if quick else [pytest.mark.long])


@functools.cache
def mesh_of(workers: int) -> Mesh:
  return Mesh(np.array(jax.devices()[:workers]), ("workers",))


def sim(workers: int) -> js.SimComm:
  return js.SimComm("workers", members=workers)


def linear(params: Any, batch: jax.Array) -> jax.Array:
  """A loss whose gradient is the batch of the worker, [1, n]."""
  return jnp.vdot(_concatenated(params), batch[0])


def quadratic(params: Any, batch: jax.Array) -> jax.Array:
  """A loss whose gradient is the parameters minus the mean of the worker's batch, [rows, n]."""
  return jnp.sum((batch - _concatenated(params)[None]) ** 2) / (2 * len(batch))


def _concatenated(params: Any) -> jax.Array:
  return jnp.concatenate(
    [jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(params)]
  )


def start(
  tx: optax.GradientTransformation,
  where: Any,
  params: Any,
  loss: Callable = linear,
  **options: Any,
) -> tuple[Callable, Any, Any]:
  """(step, a copy of the parameters, state); the step keeps its arguments, or as `donate` says."""
  params = jax.tree.map(jnp.copy, params)
  return (
    js.make_train_step(loss, tx, where, **{"donate": False} | options),
    params,
    js.init(tx, params, where),
  )


def update_program(
  tx: optax.GradientTransformation, state: Any, workers: int
) -> Callable:
  """The update of all workers: their gradients and the state to their updates, as rows, and the next state."""
  spec = js.specs(state, "workers")

  def worker(grads: Any, state: Any) -> Any:
    updates, state = tx.update(jax.tree.map(lambda g: g[0], grads), state)
    return jax.tree.map(lambda x: x[None], updates), state

  specs = (P("workers"), spec)
  return jax.jit(
    jax.shard_map(worker, mesh=mesh_of(workers), in_specs=specs, out_specs=specs)
  )


def residuals_by_leaf(state: Any, workers: int) -> dict[str, np.ndarray]:
  """f64[P, entries] of each leaf that has a residual, by its name."""
  found = {}
  for node in reduce_states(state):
    method = node.layout.method
    for group, part in zip(method.groups, node.groups, strict=True):
      if part.residual is not None:
        ends = np.cumsum([math.prod(method.shapes[leaf]) for leaf in group.leaves])[:-1]
        each = np.split(
          np.asarray(part.residual, np.float64).reshape(workers, -1), ends, axis=1
        )
        found |= {
          method.names[leaf]: row for leaf, row in zip(group.leaves, each, strict=True)
        }
  return found


def integers(seed: int, *shape: int) -> np.ndarray:
  """Small whole numbers, whose sums are exact in every dtype that travels."""
  return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def normals(seed: int, *shape: int) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def bits(x: Any) -> np.ndarray:
  x = np.asarray(x)
  return x.view(f"u{x.itemsize}")


def assert_same_bits(found: Any, expected: Any) -> None:
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)), found, expected
  )


def flat(tree: Any) -> np.ndarray:
  """f64[n], the leaves one after the other."""
  return rows(tree, 1)[0]


def rows(tree: Any, workers: int) -> np.ndarray:
  """f64[P, n] of a pytree whose leaves begin with an axis of workers."""
  leaves = [
    np.asarray(leaf).astype(np.float64).reshape(workers, -1)
    for leaf in jax.tree.leaves(tree)
  ]
  return np.concatenate([np.zeros((workers, 0)), *leaves], axis=1)


def check_steps(
  name: str, grads: np.ndarray, reference: Callable, **options: Any
) -> Any:
  """Totals and residuals of steps are those of `reference(gradients, residuals)`, bit for bit; returns the last one."""
  left, state = np.zeros_like(grads[0]), None
  for step in grads:
    total, left, *_ = reference(step, left)
    out = js.simulate(name, step, state=state, **options)
    state = out.state
    np.testing.assert_array_equal(np.broadcast_to(out.total, total.shape), total)
    np.testing.assert_array_equal(out.residuals, left)
  return out
