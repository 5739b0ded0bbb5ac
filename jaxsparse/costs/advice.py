"""Predicts the seconds per step of each algorithm from a profile, and names the fastest."""

import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxsparse.collectives._base import check_whole, collective_of
from jaxsparse.costs.calibration import Profile
from jaxsparse.costs.counting import entries_of, inside, predict
from jaxsparse.costs.evidence import Evidence


class Prediction(NamedTuple):
  """Predicted time of one update of one algorithm, and of a step if only every H-th one exchanges.

  Attributes:
    label: the collective and its options as text.
    name: of the collective.
    config: its options, for `js.make_transform`.
    arithmetic: seconds of residual, selection, sums and total.
    wire: seconds of its messages.
    messages: number of messages that one worker sends, one after the other.
    words: number of 4-byte words that one worker sends, or where it has several devices, one of these.
    inside: seconds of messages between the devices of a worker.
    every: H, the number of steps from one update to the next (`js.local_steps`).
    compute: seconds of the rest of a step, forward and backward.
    evidence: the steps that the method took in a training, if there was one.

  Example:
    >>> Prediction("dense", "dense", {}, 0.1, 0.2, 6, 1000).seconds
    0.30000000000000004
    >>> Prediction("dense", "dense", {}, 0.1, 0.2, 6, 1000, every=30).words_per_step
    33.333333333333336
  """

  label: str
  name: str
  config: dict[str, Any]
  arithmetic: float
  wire: float
  messages: int
  words: int
  inside: float = 0.0
  every: int = 1
  compute: float = 0.0
  evidence: Evidence | None = None

  @property
  def seconds(self) -> float:
    """Seconds of one step, an update divided by H."""
    return (self.arithmetic + self.wire + self.inside) / self.every

  @property
  def words_per_step(self) -> float:
    """4-byte words that one worker sends, mean over the steps."""
    return self.words / self.every

  @property
  def to_loss(self) -> float:
    """Seconds to the loss that dense has after one step: of the steps to it, by the evidence, with their compute."""
    steps = 1.0 if self.evidence is None else self.evidence.steps
    return math.inf if steps is None else steps * (self.compute + self.seconds)


class Advice(NamedTuple):
  """The predictions of `advise`.

  Attributes:
    predictions: the fastest first; with evidence the one that reaches dense's loss first.
    why: one sentence that compares it with the fastest dense one, and names the evidence.

  Example:
    >>> Advice([Prediction("dense", "dense", {}, 0.1, 0.2, 6, 1000)], "it is alone").best.label
    'dense'
  """

  predictions: list[Prediction]
  why: str

  @property
  def best(self) -> Prediction:
    """The first prediction."""
    return self.predictions[0]

  def __str__(self) -> str:
    taught = any(one.evidence for one in self.predictions)
    wide = max(31, *(len(_titled(one)) for one in self.predictions)) + 1
    head = f"{'to loss':>10}" if taught else ""
    lines = [f"{'algorithm':<{wide}}{head}{'seconds':>10}{'arithmetic':>12}{'wire':>10}{'messages':>10}{'words':>14}"]
    for one in self.predictions:
      head = f"{one.to_loss:>10.4f}" if taught else ""
      parts = f"{one.seconds:>10.4f}{one.arithmetic:>12.4f}{one.wire:>10.4f}{one.messages:>10}{one.words:>14,}"
      lines.append(f"{_titled(one):<{wide}}{head}{parts}")
    return "\n".join([*lines, self.why])


def advise(
  params: Any,
  profile: Profile,
  every: Sequence[int] = (1,),
  *,
  evidence: Sequence[Evidence] = (),
  compute: float = 0.0,
) -> Advice:
  """Predicts the seconds per step of every algorithm of a profile, and names the fastest, dense included.

  seconds = arithmetic · n + α · messages + β · bytes; an algorithm that uses the platform's all-reduce has the α and β
  of that, the latter times its slowdown. Where a worker has S devices, n is ⌈n/S⌉ and the links inside add the time of
  gathering what is replicated there, by the shardings of `params`; a number n stands for sharded parameters. With local
  steps only every H-th step has an update, and seconds and words per step are 1/H of it. That ignores accuracy: a lower
  density, or more local steps, are always faster.

  With evidence, from trainings, the order is that of the seconds to the loss that dense has after one step,
  steps · (compute + seconds per step), where steps are those of the method over those of dense. Methods are then dense
  and those of the evidence; of several trainings of one method the one that took most steps counts.

  Args:
    params: the parameters, a pytree of arrays or of `jax.ShapeDtypeStruct`, or their number n.
    profile: from `js.costs.fit`.
    every: the numbers H of steps between exchanges to choose from (`js.local_steps`); with evidence it names them.
    evidence: of the methods to choose from, `js.costs.evidence("adam")` or your own.
    compute: seconds of the rest of your step, forward and backward; with evidence.

  Raises:
    ValueError: for a profile without any algorithm, or without any of the evidence, no parameters, an H that is no
      whole number from 1 up, negative seconds, or evidence that is none.

  Example:
    >>> import jaxsparse as js
    >>> profile = js.costs.Profile(workers=6, alpha=1e-4, beta=8e-9, reduce_alpha=1e-4, reduce_beta=8e-9, algorithms={
    ...   "dense": js.costs.Algorithm(1e-9, reduces=True), "spardl:density=0.01": js.costs.Algorithm(4e-8)})
    >>> js.costs.advise(14_728_266, profile).best.label
    'spardl:density=0.01'
    >>> js.costs.advise(14_728_266, profile).why
    'spardl:density=0.01: ... s per step, ... times as fast as dense: it saves ... s of the wire and spends ...'
    >>> js.costs.advise(14_728_266, profile, every=(1, 30)).why
    'spardl:density=0.01 every 30 steps: ... s per step, ... times as fast as dense every 30 steps: it saves ...'
    >>> slow = js.costs.Evidence("spardl:density=0.01", "spardl:density=0.01", 1, "adam:0.001", "lm", 4, 40.0, 1.0, 3)
    >>> js.costs.advise(14_728_266, profile, evidence=[slow], compute=0.2).why
    "dense reaches its loss first, spardl:density=0.01 0.03 times as soon: 40.00 ± 1.00 times dense's steps (...)"
  """
  n = entries_of(params)
  if n < 1:
    raise ValueError(f"advise: {n} parameters, give at least 1")
  if not 0 <= compute < math.inf:
    raise ValueError(f"advise: compute={compute}, give the seconds of forward and backward")
  if not profile.algorithms:
    raise ValueError("advise: the profile has no algorithm, make one with js.costs.fit")
  replicated = 0 if isinstance(params, numbers.Integral) else _replicated(params, profile.devices)
  gathered = inside(replicated, devices=profile.devices)
  within = gathered.seconds(profile.inside_alpha, profile.inside_beta)
  for steps in every:
    check_whole("advise", 1, every=steps)
  updates = [_prediction(label, params, profile)._replace(inside=within) for label in profile.algorithms]
  if evidence:
    found = _taught(updates, evidence, compute)
  else:
    found = [update._replace(every=steps) for steps in every for update in updates]
  predictions = sorted(found, key=lambda one: one.to_loss)
  return Advice(predictions, _why_sooner(predictions) if evidence else _why(predictions))


def _taught(updates: list[Prediction], evidence: Sequence[Evidence], compute: float) -> list[Prediction]:
  """Dense, and the methods of the evidence, each with that of its training which took most steps."""
  evidence = _checked(evidence)
  updates = [update._replace(compute=compute) for update in updates]
  most: dict[str, Prediction] = {}
  for one in sorted(evidence, key=lambda one: math.inf if one.steps is None else one.steps):
    for update in updates:
      if (update.name, update.config) == collective_of(one.collective):
        most[one.method] = update._replace(every=one.every, evidence=one)
  if not most:
    wanted = ", ".join(dict.fromkeys(one.collective for one in evidence))
    raise ValueError(
      f"advise: the profile has {', '.join(update.label for update in updates)}, the evidence is of {wanted}: "
      "give these to js.costs.fit(algorithms=...)"
    )
  return [update for update in updates if update.name == "dense"] + list(most.values())


def _checked(evidence: Sequence[Evidence]) -> list[Evidence]:
  """The evidence; raises ValueError unless every training has whole numbers, and finite steps or none."""
  found = list(evidence)
  for one in found:
    if not isinstance(one, Evidence):
      raise ValueError(f"advise: evidence={evidence!r}, give a list of js.costs.Evidence, as js.costs.evidence() does")
    where = f"advise: evidence of {one.method}"
    check_whole(where, 1, every=one.every, seeds=one.seeds)
    if one.steps is not None and not 0 < one.steps < math.inf:
      raise ValueError(f"{where}: steps={one.steps}, give steps / dense's steps, or None where it does not get there")
    if (one.steps is None) != (one.deviation is None) or not 0 <= (one.deviation or 0.0) < math.inf:
      raise ValueError(f"{where}: deviation={one.deviation}, give one where there are steps, and only there")
  return found


def _replicated(params: Any, devices: int) -> int:
  """Entries of leaves that the devices of a worker gather: those beyond its own part of what a device holds."""
  held = lambda leaf: math.prod(
    leaf.sharding.shard_shape(leaf.shape) if getattr(leaf, "sharding", None) else leaf.shape
  )
  leaves = jax.tree.leaves(params)
  received = sum(held(leaf) - -(-math.prod(leaf.shape) // devices) for leaf in leaves)
  return received * devices // max(1, devices - 1)


def _prediction(label: str, params: Any, profile: Profile) -> Prediction:
  name, options = collective_of(label)
  measured = profile.algorithms[label]
  cost = predict(name, n=params, workers=profile.workers, devices=profile.devices, **options)
  words = round(cost.words * measured.fill)
  agreeing = measured.agreements * 2 * (profile.workers - 1).bit_length()
  alpha, beta = (profile.reduce_alpha, profile.reduce_beta) if measured.reduces else (profile.alpha, profile.beta)
  wire = cost.messages * alpha + 4 * words * beta * measured.slowdown + agreeing * profile.reduce_alpha
  arithmetic = measured.arithmetic * -(-entries_of(params) // profile.devices)
  return Prediction(label, name, options, arithmetic, wire, cost.messages, words)


def _why(predictions: list[Prediction]) -> str:
  best, *others = predictions
  first = f"{_titled(best)}: {best.seconds:.4f} s per step"
  if best.name == "dense":
    rest = f". The fastest of the others, {_titled(others[0])}, would take {others[0].seconds:.4f} s" if others else ""
    return first + rest
  dense = next((one for one in others if one.name == "dense"), None)
  if dense is None:
    return first
  saved = dense.wire / dense.every - best.wire / best.every
  spent = best.arithmetic / best.every - dense.arithmetic / dense.every
  return (
    f"{first}, {dense.seconds / best.seconds:.2f} times as fast as {_titled(dense)}: it saves {saved:.4f} s of the "
    f"wire and spends {spent:.4f} s more on arithmetic"
  )


def _why_sooner(predictions: list[Prediction]) -> str:
  best, *others = predictions
  if best.evidence is None:
    second = next(one for one in others if one.evidence)
    later = f"{best.to_loss / second.to_loss:.2f} times as soon" if math.isfinite(second.to_loss) else "not at all"
    return f"{_titled(best)} reaches its loss first, {_titled(second)} {later}: {second.evidence}"
  if math.isinf(best.to_loss):
    return f"the profile has no dense, and none of the evidence reached its loss; {_titled(best)}: {best.evidence}"
  dense = next((one for one in others if one.evidence is None), None)
  sooner = f"{dense.to_loss / best.to_loss:.2f} times as soon as {_titled(dense)}" if dense else "first"
  return f"{_titled(best)} reaches dense's loss {sooner}: {best.evidence}"


def _titled(one: Prediction) -> str:
  if one.evidence:
    return one.evidence.method
  return one.label if one.every == 1 else f"{one.label} every {one.every} steps"
