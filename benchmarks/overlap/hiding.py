"""Seconds an iteration with each plan, measured with all ranks in step, beside what the plan predicts.

A model of many small tensors is trained for a few steps with every plan, with a plain
all-reduce of each leaf as XLA compiles it by default, and with no communication at all.
Layers, link and runtime are measured on the same workers just before, and the planner
gets what they say: one communication at a time where two do not start beside each
other, and everything ready at the end of backward where none is hidden. Parameters
after the last step must be those of the plain all-reduce.
"""

import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import jaxsparse as js
from benchmarks.overlap.runtime import measure_runtime
from benchmarks.workers import AXIS, Workers
from jaxsparse.train import timing
from jaxsparse.train.engine import engine_of, local_shard

_RATE = 0.1  # of learning
# two short all-reduces that take less than so many times as long as one start beside
# each other
_BESIDE = 1.5
_HIDES = 0.5  # fraction of an all-reduce that must be hidden for a plan to count on it

DEFAULT, ALONE = "xla default", "no communication"


class Measured(NamedTuple):
  """One way to train."""

  name: str  # the kind of plan and the collective, or what else was done
  groups: int  # communications; 0 where the compiler decides
  seconds: float  # of an iteration, the median of the slowest rank
  # a step without communication, and what the plan says that backward does not hide; or
  # None
  predicted: float | None


class Setting(NamedTuple):
  """The measurements before planning: of the model, of an all-reduce as `js.overlap.Link`, of the `Runtime`."""

  rate: str
  tensors: int
  bytes: float
  forward: float
  backward: float
  alpha: float
  beta: float
  gamma: float
  start_ups: float
  hidden: float


class Lab:
  """The workers, a model of `depth` layers of `width`, with a matrix and a bias each, and the measurements of both."""

  def __init__(
    self,
    workers: Workers,
    rate: str,  # of the links
    depth: int = 20,
    width: int = 128,
    batch: int = 256,  # rows for each worker
    density: float = 0.01,  # of SparDL
    repetitions: int = 9,
  ):
    self._where, self._rate, self._repetitions = workers.where, rate, repetitions
    self._engine = engine_of(workers.where, AXIS)
    self._watch = timing.Stopwatch(self._engine)
    rng = np.random.default_rng(0)
    weight = lambda: (rng.normal(size=(width, width)) / np.sqrt(width)).astype(
      np.float32
    )
    params = {
      f"layer{layer:03}": {"b": np.zeros(width, np.float32), "w": weight()}
      for layer in range(depth)
    }
    rows = rng.normal(size=(workers.size * batch, width)).astype(np.float32)
    self._specs = (PartitionSpec(), PartitionSpec(AXIS))
    self._params, self._batch = self._engine.place((params, rows), self._specs)
    self._layers = js.overlap.measure(
      _loss, self._params, self._batch, workers.where, cuts=3, repetitions=repetitions
    )
    n = sum(leaf.size for leaf in jax.tree.leaves(self._params))
    self._sparse = {"density": density}
    algorithms = ["dense", js.costs.label_of("spardl", self._sparse)]
    self._profile = js.costs.fit(
      workers.where,
      n=n,
      algorithms=algorithms,
      repetitions=repetitions,
      seconds=math.inf,
    )
    self._runtime = measure_runtime(workers.where, repetitions)

  @property
  def setting(self) -> Setting:
    """The measurements before planning."""
    layers, link = self._layers, js.costs.link_of(self._profile)
    sizes, backward = layers.sizes, sum(layers.backward_times)
    return Setting(
      self._rate,
      len(sizes),
      sum(sizes),
      layers.forward,
      backward,
      *link,
      *self._runtime,
    )

  def plan(self, kind: Any, name: str) -> js.overlap.Plan:
    """The plan of a kind for a collective, from the measurements."""
    layers = self._layers if self._runtime.hidden >= _HIDES else self._layers.at_the_end
    ways = 2 if self._runtime.start_ups < _BESIDE else 1
    link = js.costs.link_of(self._profile, name, **self._config(name))
    return js.overlap.plan(
      kind, layers.backward_times, layers.sizes, **link._asdict(), ways=ways
    )

  def rows(self, kinds: list[str]) -> list[Measured]:
    """Everything measured: XLA's default, no communication at all, and plans with dense and with SparDL."""
    # A SparDL for each of many tensors would take minutes to compile.
    chosen = {
      "dense": kinds,
      "spardl": [kind for kind in kinds if kind in ("single", "optimal")],
    }
    plans = {
      (kind, name): self.plan(kind, name) for name in chosen for kind in chosen[name]
    }
    runs: dict[Any, _Run] = {
      label: self._plain(label == DEFAULT) for label in (DEFAULT, ALONE)
    }
    for (_, name), plan in plans.items():
      if (name, plan.groups) not in runs:  # one program for plans that are the same
        runs[name, plan.groups] = self._planned(plan, name)
    # In turn, so that noise meets all of them alike; medians after the first two.
    rounds = [
      [run.step(self._watch, self._batch) for run in runs.values()]
      for _ in range(self._repetitions + 2)
    ]
    times = dict(
      zip(runs, map(statistics.median, zip(*rounds[2:], strict=True)), strict=True)
    )
    for key in runs:
      if key[0] == "dense":
        _check_same(runs[key].params, runs[DEFAULT].params)
    rows = [Measured(label, 0, times[label], None) for label in (DEFAULT, ALONE)]
    for (kind, name), plan in plans.items():
      predicted = times[ALONE] + plan.exposed
      rows.append(
        Measured(
          f"{kind}, {name}", len(plan.groups), times[name, plan.groups], predicted
        )
      )
    return rows

  def _config(self, name: str) -> dict[str, Any]:
    return self._sparse if name == "spardl" else {}

  def _planned(self, plan: js.overlap.Plan, name: str) -> "_Run":
    grouped = js.bucketed_transform(
      name, AXIS, plan=plan, order=self._layers.order, **self._config(name)
    )
    tx = optax.chain(grouped, optax.sgd(_RATE))
    return _Run(
      js.make_train_step(_loss, tx, self._where),
      self._params,
      js.init(tx, self._params, self._where),
    )

  def _plain(self, communicate: bool) -> "_Run":
    """A step of optax's users: each leaf's mean, or nothing, and plain gradient descent."""

    def worker(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
      loss, grads = jax.value_and_grad(_loss)(params, batch)
      if communicate:
        loss, grads = jax.tree.map(
          lambda x: self._engine.comm.all_reduce(x) / self._engine.comm.size,
          (loss, grads),
        )
      return jax.tree.map(lambda p, g: p - _RATE * g, params, grads), state, loss

    same, split = self._specs
    return _Run(
      self._engine.jit(worker, (same, same, split), (same, same, same)),
      self._params,
      jnp.zeros(()),
    )


class _Run:
  """A training run: a program, and its current parameters, of which it has a copy, and state."""

  def __init__(self, program: Callable, params: Any, state: Any):
    self._program, self.params, self._state = (
      program,
      jax.tree.map(jnp.copy, params),
      state,
    )

  def step(self, watch: timing.Stopwatch, batch: Any) -> float:
    """Seconds of one step."""
    seconds, (self.params, self._state, _) = watch.time(
      self._program, self.params, self._state, batch
    )
    return seconds


def _loss(params: Any, batch: jax.Array) -> jax.Array:
  for layer in sorted(params):
    batch = jnp.tanh(batch @ params[layer]["w"] + params[layer]["b"][None])
  return jnp.mean(batch**2)


def _check_same(params: Any, expected: Any) -> None:
  """Raises RuntimeError where the parameters differ from those of a plain all-reduce."""
  for one, other in zip(
    jax.tree.leaves(params), jax.tree.leaves(expected), strict=True
  ):
    apart = np.abs(local_shard(one) - local_shard(other)).max()
    if not apart < 1e-5:
      raise RuntimeError(
        f"the parameters of a plan are {apart:.1e} from those of a plain all-reduce"
      )
