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
from jaxsparse.racing.batching import Batches, batches_of, join, stack
from jaxsparse.racing.recipes import Method
from jaxsparse.racing.result import Row
from jaxsparse.racing.training import Program, Setting, Training
from jaxsparse.train.agreement import Agreement, agreements
from jaxsparse.transform.state import reduce_states
from jaxsparse.types import check_whole

_EVALUATIONS = 10  # evaluations of a training
_HALVED = (2, 5)  # evaluations after which the worse half of the rates ends
_MORE = 5  # evaluations beyond the steps, for methods above dense
_ROWS = 4  # batches whose rows the agreement of gradients is measured on


class RaceConfig(NamedTuple):
  """What `js.race` was asked for."""

  setting: Setting
  params: Any  # a pytree, or a function of the seed
  batches: Batches
  steps: int
  rate: float
  multiples: tuple[float, ...]  # multiples of the rate, ascending
  seeds: int

  def check(self) -> None:
    """Raises ValueError for numbers outside their choices."""
    check_whole("race", 2, workers=self.setting.engine.workers)
    check_whole("race", 1, steps=self.steps, seeds=self.seeds)
    if not self.multiples or len(set(self.multiples)) < len(self.multiples):
      raise ValueError(f"race: rates={self.multiples}, give one or several, each once")
    for name, values in ("rate", (self.rate,)), ("rates", self.multiples):
      if not all(0 < value < math.inf for value in values):
        raise ValueError(f"race: {name}={values}, choose positive numbers")

  @property
  def key(self) -> dict[str, Any]:
    """What races that share a file have in common."""
    numbers = {name: getattr(self, name) for name in ("steps", "rate", "seeds")}
    return numbers | {
      "rates": list(self.multiples),
      "workers": self.setting.engine.workers,
      "entries": count_entries(self.start(0)),
    }

  @property
  def every(self) -> int:
    """Steps from one evaluation to the next."""
    return -(-self.steps // _EVALUATIONS)

  @property
  def most(self) -> int:
    """The most steps of a training."""
    return self.steps + _MORE * self.every

  def start(self, seed: int) -> optax.Params:
    """The parameters before the first step."""
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
    """A method at the best of the rates; and the agreement of the workers, if it is dense."""
    program = Program(self.setting, method)
    trainings = {
      multiple: [self._begin(program, multiple, seed) for seed in range(self.seeds)]
      for multiple in self.multiples
    }
    tried = dict[float, float]()
    # Successive halving: rates are compared after the same number of steps.
    for count in (*_HALVED, _EVALUATIONS):
      until = min(self.steps, count * self.every)
      for multiple, of_rate in trainings.items():
        for training in of_rate:
          training.go_on(until, self.every)
        tried[multiple] = statistics.mean(training.losses[-1] for training in of_rate)
        if progress:
          progress(
            f"{name}, rate times {multiple:g}, {until} steps: {tried[multiple]:.4g}"
          )
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
    """A training before its first step."""
    batches = batches_of(self.batches, seed, self.seeds, self.most)
    rng = self.setting.rng
    key = None if rng is None else jax.random.fold_in(rng, seed)
    rate = jnp.float32(multiple * self.rate)
    trained = program.start(rate, self.start(seed))
    return Training(program, rate, key, batches, trained)

  def _reach(self, trainings: list[Training], dense: Row) -> None:
    """Trains on while a loss is above that of dense from the same seed."""
    at_end = dense.steps.index(self.steps)
    for training, losses in zip(trainings, dense.losses, strict=True):
      # Any evaluation counts: a loss may rise again after it.
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
    """What is kept of a method."""
    # evaluations of the seed that trained longest are the steps of all
    longest = max(trainings, key=lambda training: len(training.steps))
    last = len(longest.steps)
    # A seed ends once it has reached dense's loss: its later evaluations are missing.
    losses = [
      training.losses + [math.nan] * (last - len(training.losses))
      for training in trainings
    ]
    rate = multiple * self.rate
    words = longest.words()
    params, state, _ = longest.trained
    setting = self.setting
    workers = setting.engine.workers
    cost = count_update(program.chain(rate), params, workers=workers, axis=setting.axis)
    # words of a step over those of an exchange: 1/H with local steps
    share = words / max(cost.words, 1)
    labels = [
      collective.label
      for reduce_state in reduce_states(state)
      for collective in reduce_state.collectives
    ]
    # simulated workers share a device: a step of all takes P times as long
    simulated = workers if isinstance(setting.where, SimComm) else 1
    return Row(
      name,
      rate,
      multiple,
      tried,
      longest.steps,
      losses,
      words,
      share * (cost.messages + cost.agreements),
      longest.state_bytes(),
      min(training.seconds for training in trainings) / simulated,
      labels[0] if len(labels) == 1 else "",
      max(1, round(1 / share)) if share else 1,
    )

  def _agreements(self, training: Training) -> list[Agreement]:
    """The agreement of gradients before a training, after its first tenth, and at its end."""
    setting = self.setting
    arguments = setting.named | {"rng": setting.rng, "model_state": setting.model_state}
    named = {name: value for name, value in arguments.items() if value is not None}
    batches = batches_of(self.batches, 0, self.seeds, self.most)
    # rows of several batches: with few of them agreement is noise
    batch = join(stack(batches, _ROWS, _ROWS), setting.engine.workers)
    several = [self.start(0), training.tenth, training.trained[0]]
    where = setting.where
    return agreements(
      setting.loss_fn, several, batch, where, axis=setting.axis, **named
    )
