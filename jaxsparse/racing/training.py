"""One method of a race: a program of several steps, compiled once for all rates and seeds, and a training by it.

Rates and seeds run one after the other through that program, so that a rate that ends
early costs nothing more and needs no program of another size. On CPU six of them under
`jax.vmap` took a third of the time of dense steps, and 1.3 times that of signs (85,002
parameters, 8 workers).
"""

import dataclasses
import functools
import math
import operator
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxsparse._compat import varying
from jaxsparse._compat.one_at_a_time import dispatch
from jaxsparse.costs.counting import count_entries
from jaxsparse.racing.batching import stack
from jaxsparse.racing.recipes import Method
from jaxsparse.train.engine import Engine
from jaxsparse.train.step import init, make_train_step
from jaxsparse.transform.metrics import metrics
from jaxsparse.transform.specs import placed
from jaxsparse.types import ArrayTree


class Setting(NamedTuple):
  """What all trainings of a race have in common."""

  loss_fn: Callable[..., ArrayTree]  # as for `make_train_step`
  # (params), or (params, model_state) with a model state -> the loss on held-out data,
  # or a value from which `loss_of` takes the loss
  evaluate: Callable[..., Any]
  where: Any  # a mesh, or a comm that knows its workers
  axis: str  # of the workers
  engine: Engine  # of `where`: it knows the number of workers
  options: dict[str, Any]  # options of `make_train_step`
  named: dict[str, ArrayTree]  # arguments of each step, besides those below
  rng: jax.Array | None  # the key of the race, for `loss_fn`; None for no key
  model_state: ArrayTree  # before the first step; None for no model state
  # optimizer state -> what to keep of it after each step; by default None, nothing
  read: Callable[[ArrayTree], ArrayTree] = lambda _: None
  loss_of: Callable[..., float] = float  # result of `evaluate` -> the loss


class Program:
  """The steps of one method, at any rate and from any seed.

  Attributes:
    setting: what all trainings have in common, the loss and the workers for instance.
      Its `read` takes from the optimizer state what is kept after each step.
    chain: rate -> the optax chain of the method.
    start: (rate, params) -> (params, optimizer state, model state) before the first
      step, jitted: what a `Training` has as `trained`.
    run: `_run`, several steps, jitted; it overwrites `trained`, its second argument.
  """

  def __init__(self, setting: Setting, method: Method):
    self.setting = setting
    # A method is (axis, rate) -> chain.
    self.chain = functools.partial(method, setting.axis)
    self.start = jax.jit(self._start)
    # The rate is traced: one compiled program serves all rates.
    self.run = jax.jit(self._run, donate_argnums=1)

  def _start(self, rate: jax.Array, params: optax.Params) -> ArrayTree:
    setting = self.setting
    state = init(self.chain(rate), params, setting.where, axis=setting.axis)
    # The run overwrites its copy, not the caller's parameters.
    return jax.tree.map(jnp.copy, params), state, setting.model_state

  def _run(
    self,
    rate: jax.Array,
    trained: ArrayTree,
    keys: ArrayTree,
    batches: ArrayTree,
    count: jax.Array,
  ) -> tuple[ArrayTree, ArrayTree]:
    """Trains for `count` steps.

    Args:
      rate: f32[], the learning rate.
      trained: (params, optimizer state, model state) of all workers.
      keys: a key for each step, [length], or None.
      batches: leaves [length, …], the batch of all workers at each step.
      count: i32[], at most `length`; batches behind it are not used.

    Returns:
      (trained, rows): `trained` after the steps; and of each step whether it sent words,
      and what the setting reads of the optimizer state after it, leaves [length, …],
      valid up to `count`.
    """
    setting = self.setting
    place = {"mesh": setting.where, "axis": setting.axis}
    length = len(jax.tree.leaves(batches)[0])
    row_of = lambda state: (metrics(state).words_sent > 0, setting.read(state))

    def one_step(index: jax.Array, carried: ArrayTree) -> ArrayTree:
      (params, state, model_state), rows = carried
      # None, for no keys, is a tree without leaves, and stays None.
      key, batch = jax.tree.map(lambda x: x[index], (keys, batches))
      options = place | setting.options
      # `run` donates `trained`: a step within it need not.
      step = make_train_step(setting.loss_fn, self.chain(rate), donate=False, **options)
      of_step = {"rng": key, "model_state": model_state}
      params, state, results = step.traced(
        params, state, batch, **of_step, **setting.named
      )
      keep = lambda row, rows: rows.at[index].set(row)
      rows = jax.tree.map(keep, row_of(state), rows)
      return (params, state, results.model_state), rows

    # Rows to overwrite, with the shapes and dtypes that `row_of` returns.
    repeat = lambda x: jnp.broadcast_to(x, (length, *x.shape))
    rows = jax.tree.map(repeat, row_of(trained[1]))
    # A loop to a traced `count`, since the last call often has fewer steps: a scan over
    # them would have other shapes and compile one more program.
    return varying.fori_loop(0, count, one_step, (trained, rows))


@dataclasses.dataclass
class Training:
  """A training at one rate from one seed.

  Attributes:
    program: the steps of the method.
    rate: f32[], the learning rate.
    key: the key of the seed, which is folded with the number of each step; None for no
      key.
    batches: the batches of the steps to come, without end.
    trained: (params, optimizer state, model state) of all workers.
    steps: the numbers of steps after which the model was evaluated.
    losses: the held-out loss after each of `steps`, Inf where it is not finite.
    exchanges: the numbers of steps, from 1, in which words were sent.
    seconds: seconds of a step of all workers on this machine, in the fastest call.
    tenth: the parameters at the first evaluation, after about a tenth of the steps of
      a race; None before it.
    read: what `setting.read` returned after each step of the last call of the program.
    evaluated: what the last evaluation returned.
  """

  program: Program
  rate: jax.Array
  key: jax.Array | None
  batches: Iterator
  trained: ArrayTree
  steps: list[int] = dataclasses.field(default_factory=list)
  losses: list[float] = dataclasses.field(default_factory=list)
  exchanges: list[int] = dataclasses.field(default_factory=list)
  seconds: float = math.inf
  tenth: ArrayTree = None
  read: ArrayTree = None
  evaluated: Any = None

  def go_on(self, until: int, every: int) -> None:
    """Trains up to step `until` in calls of `every` steps, the last of fewer; evaluates the model after each call."""
    done = self.steps[-1] if self.steps else 0
    while done < until:
      count = min(every, until - done)
      begin = time.perf_counter()
      # The program takes `every` keys, also if fewer steps are left.
      steps = np.arange(done, done + every)
      keys = None if self.key is None else _fold(self.key, steps)
      # The last batch is repeated where `count` < `every`, and is trained on once.
      arguments = self.rate, self.trained, keys, stack(self.batches, count, every)
      # `dispatch`: programs in flight together can deadlock on CPU devices.
      run = self.program.run
      results = jax.block_until_ready(dispatch(run, *arguments, np.int32(count)))
      self.trained, rows = results
      # Rows behind `count` belong to no step.
      sent, self.read = jax.tree.map(operator.itemgetter(slice(count)), rows)
      self.exchanges += (done + 1 + np.flatnonzero(sent)).tolist()
      # the fastest of all calls, since the first one compiles
      self.seconds = min(self.seconds, (time.perf_counter() - begin) / count)
      done += count
      self.steps.append(done)
      self.losses.append(self._evaluate())
      # A copy, since the next call overwrites the parameters.
      if self.tenth is None:
        self.tenth = jax.tree.map(jnp.copy, self.trained[0])

  def _evaluate(self) -> float:
    """The loss of the parameters on held-out data; Inf where it is not finite, so that losses can be sorted."""
    params, _, model_state = self.trained
    arguments = (params,) if model_state is None else (params, model_state)
    setting = self.program.setting
    # The loss, or a value that also has it: `loss_of` takes the loss from it.
    self.evaluated = setting.evaluate(*arguments)
    loss = setting.loss_of(self.evaluated)
    return loss if math.isfinite(loss) else math.inf

  def frequency(self) -> float:
    """Exchanges per step, of whole periods from one exchange to the next; 0 without an exchange."""
    # Of a single exchange the steps before it are the period.
    steps = self.exchanges if len(self.exchanges) > 1 else [0, *self.exchanges]
    return (len(steps) - 1) / max(1, steps[-1] - steps[0])

  def words(self) -> float:
    """4-byte words a step, of the worker that sent most, in as many exchanges per step as `frequency`."""
    words = float(metrics(self.trained[1]).total_words)
    return self.frequency() * words / max(1, len(self.exchanges))

  def state_bytes(self) -> float:
    """Bytes of optimizer state of a worker for each parameter."""
    params, state, _ = self.trained
    engine = self.program.setting.engine
    specs = jax.tree.broadcast(placed(state, engine.axis), state)
    # An array whose spec is not empty has rows of all P workers, 1/P for each; other
    # arrays are the same on every worker.
    size = lambda leaf, spec: leaf.nbytes / (engine.workers if spec else 1)
    total = sum(jax.tree.leaves(jax.tree.map(size, state, specs)))
    return total / count_entries(params)


# (key, numbers of n steps) -> n keys, one for each step
_fold = jax.jit(jax.vmap(jax.random.fold_in, in_axes=(None, 0)))
