"""One method of a race: a program of several steps, compiled once for all rates and seeds, and a training by it.

Rates and seeds run one after the other through that program. Under `jax.vmap` over them
each branch of a `jax.lax.cond` would run, and compile, at every step: an exact
selection beside the threshold that is reused, for example.
"""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxsparse._compat.one_at_a_time import dispatch
from jaxsparse.costs.counting import count_update
from jaxsparse.racing.batching import stack
from jaxsparse.racing.recipes import Method
from jaxsparse.train.engine import Engine
from jaxsparse.train.step import init, make_train_step
from jaxsparse.transform.metrics import metrics
from jaxsparse.transform.specs import placed
from jaxsparse.types import ArrayTree, Cost


class Setting(NamedTuple):
  """What all trainings of a race have in common."""

  loss_fn: Callable[..., ArrayTree]
  evaluate: Callable[..., Any]
  where: Any  # a mesh, or a comm that knows its workers
  axis: str
  engine: Engine
  options: dict[str, Any]  # of `make_train_step`
  given: dict[str, ArrayTree]  # to each step by name, besides those below
  rng: jax.Array | None
  model_state: ArrayTree


class Program:
  """The steps of one method."""

  def __init__(self, setting: Setting, method: Method):
    self._setting = setting
    self._method = method
    self.start = jax.jit(self._start)
    self.run = jax.jit(self._run, donate_argnums=1)

  def chain(self, rate: Any) -> optax.GradientTransformation:
    """The chain of the method at a rate."""
    return self._method(self._setting.axis, rate)

  def _start(self, rate: jax.Array, params: optax.Params) -> ArrayTree:
    setting = self._setting
    state = init(self.chain(rate), params, setting.where, axis=setting.axis)
    return params, state, setting.model_state

  def _run(
    self, rate: jax.Array, trained: ArrayTree, keys: ArrayTree, batches: ArrayTree
  ) -> ArrayTree:
    setting = self._setting

    def one_step(trained: ArrayTree, row: ArrayTree) -> tuple[ArrayTree, None]:
      params, state, model_state = trained
      key, batch = row
      step = make_train_step(
        setting.loss_fn,
        self.chain(rate),
        setting.where,
        axis=setting.axis,
        donate=False,
        **setting.options,
      )
      own = {"rng": key, "model_state": model_state}
      params, state, metrics = step.traced(params, state, batch, **own, **setting.given)
      return (params, state, metrics.model_state), None

    return jax.lax.scan(one_step, trained, (keys, batches))[0]

  def cost(self, params: optax.Params, rate: float) -> Cost:
    """Messages and words of an update."""
    engine = self._setting.engine
    tx = self.chain(rate)
    return count_update(tx, params, workers=engine.workers, axis=self._setting.axis)


class Training:
  """A training at one rate from one seed.

  Attributes:
    steps: at which the model was evaluated.
    losses: at these steps, Inf where the loss is not finite.
    seconds: the fewest that a step of all workers took here.
    tenth: the parameters at the first evaluation.
  """

  def __init__(
    self,
    setting: Setting,
    program: Program,
    rate: float,
    seed: int,
    params: optax.Params,
    batches: Iterator,
  ):
    self._setting = setting
    self._program = program
    self._rate = jnp.float32(rate)
    self._batches = batches
    rng = setting.rng
    self._key = None if rng is None else jax.random.fold_in(rng, seed)
    self._trained = program.start(self._rate, params)
    self.steps: list[int] = []
    self.losses: list[float] = []
    self.seconds = math.inf
    self.tenth: ArrayTree = None

  @property
  def params(self) -> optax.Params:
    """The parameters that all workers have."""
    return self._trained[0]

  @property
  def state(self) -> ArrayTree:
    """The optimizer state of all workers."""
    return self._trained[1]

  def go_on(self, until: int, every: int) -> None:
    """Trains until so many steps, with an evaluation after every few."""
    done = self.steps[-1] if self.steps else 0
    while done < until:
      count = min(every, until - done)
      begin = time.perf_counter()
      numbers = np.arange(done, done + count)
      keys = None if self._key is None else _fold(self._key, numbers)
      batches = stack(self._batches, count)
      arguments = self._rate, self._trained, keys, batches
      self._trained = jax.block_until_ready(dispatch(self._program.run, *arguments))
      self.seconds = min(self.seconds, (time.perf_counter() - begin) / count)
      done += count
      self.steps.append(done)
      self.losses.append(self._evaluate())
      if self.tenth is None:
        self.tenth = jax.tree.map(jnp.copy, self.params)

  def _evaluate(self) -> float:
    params, _, model_state = self._trained
    given = (params,) if model_state is None else (params, model_state)
    loss = float(self._setting.evaluate(*given))
    return loss if math.isfinite(loss) else math.inf

  def words(self) -> float:
    """4-byte words a step, of the worker that sent most."""
    return float(metrics(self.state).total_words) / self.steps[-1]

  def state_bytes(self) -> float:
    """Bytes of optimizer state of a worker for each parameter."""
    engine = self._setting.engine
    specs = jax.tree.broadcast(placed(self.state, engine.axis), self.state)
    size = lambda leaf, spec: leaf.nbytes / (engine.workers if spec else 1)
    entries = sum(leaf.size for leaf in jax.tree.leaves(self.params))
    return sum(jax.tree.leaves(jax.tree.map(size, self.state, specs))) / entries


_fold = jax.jit(jax.vmap(jax.random.fold_in, in_axes=(None, 0)))
