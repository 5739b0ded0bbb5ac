"""The trainings of a race: those of one method, whose worse rates end early, and the agreement of the workers."""

import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxsparse.comm import SimComm
from jaxsparse.costs.counting import count_entries, count_update
from jaxsparse.racing.batching import Batches, batches_of, check_batches, join, stack
from jaxsparse.racing.recipes import Method
from jaxsparse.racing.result import Row
from jaxsparse.racing.training import Program, Setting, Training
from jaxsparse.train.agreement import Agreement, agreements
from jaxsparse.transform.state import local_states, reduce_states
from jaxsparse.types import check_whole

_EVALUATIONS = 10  # evaluations of a training
_HALVED_AFTER = (2, 5)  # evaluations after which the worse half of the rates ends
_EXTRA_EVALUATIONS = 5  # beyond the steps of a race, for methods above dense
_AGREEMENT_BATCHES = 4  # batches whose rows the agreement of gradients is measured on


class RaceConfig(NamedTuple):
  """What `js.race` was asked for.

  Attributes:
    setting: what all trainings have in common: workers, loss, options of a step.
    params: the parameters before the first step: a pytree, or a function of the seed.
    batches: a function of the step, or an iterable.
    steps: of each training; methods above dense have up to `most`, about half more.
    rate: the user's learning rate.
    multiples: multiples of `rate` to try, ascending.
    seeds: number of trainings of each method at each rate.

  A model is evaluated after each `every` steps, a tenth of `steps`, rounded up.
  """

  setting: Setting
  params: Any
  batches: Batches
  steps: int
  rate: float
  multiples: tuple[float, ...]
  seeds: int

  def check(self) -> None:
    """Raises ValueError for numbers outside their choices, and for batches that cannot serve all seeds."""
    # One worker exchanges nothing, and one step is timed with its compilation.
    check_whole("race", 2, workers=self.setting.engine.workers, steps=self.steps)
    check_whole("race", 1, seeds=self.seeds)
    if not self.multiples or len(set(self.multiples)) < len(self.multiples):
      raise ValueError(f"race: rates={self.multiples}, give one or several, each once")
    for name, values in ("rate", (self.rate,)), ("rates", self.multiples):
      if not all(0 < value < math.inf for value in values):
        raise ValueError(f"race: {name}={values}, choose positive numbers")
    check_batches(self.batches, self.seeds)

  @property
  def key(self) -> dict[str, Any]:
    """The numbers that a race and the file from which it goes on must have in common, by name, for JSON."""
    numbers = {name: getattr(self, name) for name in ("steps", "rate", "seeds")}
    return numbers | {
      "rates": list(self.multiples),
      "workers": self.setting.engine.workers,
      "entries": count_entries(self.start(0)),
    }

  @property
  def every(self) -> int:
    """Steps from one evaluation to the next, a tenth of all, rounded up."""
    return -(-self.steps // _EVALUATIONS)

  @property
  def most(self) -> int:
    """The most steps of a training."""
    return self.steps + _EXTRA_EVALUATIONS * self.every

  def start(self, seed: int) -> optax.Params:
    """The parameters of a seed, 0, 1, …, before the first step."""
    # A pytree may be callable itself, as a module of Equinox is.
    is_function = callable(self.params) and jax.tree_util.all_leaves([self.params])
    return self.params(seed) if is_function else self.params

  def tune(
    self,
    name: str,
    method: Method,
    dense: Row | None,
    progress: Callable[[str], object] | None,
  ) -> tuple[Row, list[Agreement]]:
    """Trains a method at all rates, of which the worse half ends early, and returns the row of the best one.

    Args:
      name: the name of the method.
      method: (axis, rate) -> optax chain.
      dense: the row of dense, whose losses the method has to reach; None if this is
        dense itself.
      progress: called with a line of text for each rate whenever rates are compared;
        None calls nothing.

    Returns:
      (row, agreements): the row at the best rate; and the agreement of the workers'
        gradients, of dense only, else [].
    """
    program = Program(self.setting, method)
    trainings = {
      multiple: [self._begin(program, multiple, seed) for seed in range(self.seeds)]
      for multiple in self.multiples
    }
    # Mean loss of each multiple over the seeds, when it was last compared.
    tried = dict[float, float]()
    # Successive halving: the remaining rates are compared after `count` evaluations.
    for count in (*_HALVED_AFTER, _EVALUATIONS):
      # `every` is rounded up: `count` evaluations may be more than all steps.
      until = min(self.steps, count * self.every)
      for multiple, of_rate in trainings.items():
        for training in of_rate:
          training.go_on(until, self.every)
        tried[multiple] = statistics.mean(training.losses[-1] for training in of_rate)
        if progress:
          progress(
            f"{name}, rate times {multiple:g}, {until} steps: {tried[multiple]:.4g}"
          )
      # Half of the rates go on, rounded up; only the best is left at the end.
      wanted = 1 if count == _EVALUATIONS else -(-len(trainings) // 2)
      best = sorted(trainings, key=lambda multiple: tried[multiple])[:wanted]
      trainings = {multiple: trainings[multiple] for multiple in best}
    ((multiple, winners),) = trainings.items()
    # Only the best rate goes on to the loss of dense.
    if dense:
      self._reach(winners, dense)
    row = self._row(name, program, multiple, sorted(map(list, tried.items())), winners)
    return row, [] if dense else self._agreements(winners[0])

  def _begin(self, program: Program, multiple: float, seed: int) -> Training:
    """A training of a seed at `multiple` times the user's rate, before its first step."""
    batches = batches_of(self.batches, seed, self.seeds, self.most)
    rng = self.setting.rng
    key = None if rng is None else jax.random.fold_in(rng, seed)
    rate = jnp.float32(multiple * self.rate)
    trained = program.start(rate, self.start(seed))
    return Training(program, rate, key, batches, trained)

  def _reach(self, trainings: list[Training], dense: Row) -> None:
    """Trains each seed on until it reaches dense's loss from the same seed, or has `most` steps."""
    # Index of dense's losses after the steps of the race; `dense` is its row.
    at_end = dense.steps.index(self.steps)
    for training, losses in zip(trainings, dense.losses, strict=True):
      # Any earlier evaluation counts, even if the loss rose again.
      while training.steps[-1] < self.most and min(training.losses) > losses[at_end]:
        training.go_on(training.steps[-1] + self.every, self.every)

  def _row(
    self,
    name: str,
    program: Program,
    multiple: float,
    tried: list[list[float]],
    trainings: list[Training],
  ) -> Row:
    """The row of a method.

    Args:
      name: the name of the method.
      program: its steps.
      multiple: the best rate over the user's rate.
      tried: [multiple, mean loss] of each rate.
      trainings: at the best rate, one for each seed.
    """
    # Seeds are evaluated after the same steps, of which the longest training has all.
    longest = max(trainings, key=lambda training: len(training.steps))
    last = len(longest.steps)
    # A seed ends once it has reached dense's loss: its later evaluations are missing.
    losses = [
      training.losses + [math.nan] * (last - len(training.losses))
      for training in trainings
    ]
    rate = multiple * self.rate
    params, state, _ = longest.trained
    setting = self.setting
    workers = setting.engine.workers
    # messages and words of one exchange
    cost = count_update(program.chain(rate), params, workers=workers, axis=setting.axis)
    # A chain of several transforms, or groups of leaves, has several collectives.
    labels = [
      collective.label
      for reduce_state in reduce_states(state)
      for collective in reduce_state.collectives
    ]
    # 1/H. An exchange of local steps is of one of their fragments, and `cost` of all.
    fragments = max((len(local.outer) for local in local_states(state)), default=1)
    share = longest.frequency() / fragments
    # Several transforms may exchange in different steps: their words tell how much of
    # `cost` a step has.
    if len(labels) > 1:
      share = longest.words() / max(cost.words, 1)
    # Simulated workers share a device: a step of all P takes P times as long as one's.
    simulated = workers if isinstance(setting.where, SimComm) else 1
    return Row(
      name,
      rate,
      multiple,
      tried,
      longest.steps,
      losses,
      longest.words(),
      share * (cost.messages + cost.agreements),
      longest.state_bytes(),
      min(training.seconds for training in trainings) / simulated,
      labels[0] if len(labels) == 1 else "",
      round(1 / share) if share else 0,  # H
    )

  def _agreements(self, training: Training) -> list[Agreement]:
    """The agreement of gradients before a training, after its first tenth, and at its end."""
    setting = self.setting
    # Arguments of `loss_fn`, which has no key and no model state where these are None.
    arguments = setting.named | {"rng": setting.rng, "model_state": setting.model_state}
    named = {name: value for name, value in arguments.items() if value is not None}
    # The training is that of seed 0: these are its first batches.
    batches = batches_of(self.batches, 0, self.seeds, self.most)
    # One batch of the rows of several: with few rows agreement is noise.
    batch = join(
      stack(batches, _AGREEMENT_BATCHES, _AGREEMENT_BATCHES), setting.engine.workers
    )
    several = [self.start(0), training.tenth, training.trained[0]]
    where = setting.where
    return agreements(
      setting.loss_fn, several, batch, where, axis=setting.axis, **named
    )
