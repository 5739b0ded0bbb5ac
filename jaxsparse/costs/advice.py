"""Predicts the seconds per step of each algorithm from a profile, and names the fastest."""

import importlib.resources
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from jaxsparse.collectives import Collective, make_collective
from jaxsparse.collectives._base import collective_of
from jaxsparse.costs.calibration import Profile
from jaxsparse.costs.counting import count_entries, count_inside, lacks_shapes, predict
from jaxsparse.types import Link, check_whole

_EVIDENCE_FILE = importlib.resources.files("jaxsparse.costs") / "evidence.json"
_MAX_GAP = 2.0  # percent by which a method's loss may be above dense's
# the least share of tasks on which the gap is at most `_MAX_GAP`, of those that decide
_MIN_TASKS = 0.8
# `advise` warns if a device has more than this many times the timed entries, or fewer
# than the timed entries divided by this
_MAX_SCALE = 4
_PREDICTIONS_FILE = importlib.resources.files("jaxsparse.costs") / "predictions.json"


class Evidence(NamedTuple):
  """The steps of a method to the loss that dense reaches on one task, measured from several seeds.

  Attributes:
    method: what workers exchange, and by which collective:
      "local:every=8/spardl:density=0.3" stands for local steps, "updates/spardl" for an
      optimizer of each worker's own before the exchange, "spardl" for gradients.
    collective: its label, with options.
    every: H, the number of steps from one exchange to the next (`js.local_steps`).
    optimizer: its name, rate and options, "window_adam:0.001:window=4".
    task: what was trained, in words.
    workers: number of workers P.
    steps: the method's steps to dense's loss / dense's own steps, mean over the seeds;
      None if a seed never reached dense's loss, or if the row has a `gap` and its steps
      were not measured.
    deviation: standard deviation of this ratio over the seeds; None if `steps` is None.
    seeds: number of seeds.
    gap: percent by which the held-out loss is above dense's after as many steps, mean
      over the seeds, the method and dense each at its best rate; None if not known.
    gap_error: standard error of the mean gap.
    gap_untuned: the gap at the rate that is best for dense.
    bits: bits per parameter and step that a worker sends; None if not known.
    own_data: whether the data of the workers differ in kind.
  """

  method: str
  collective: str
  every: int
  optimizer: str
  task: str
  workers: int
  steps: float | None
  deviation: float | None
  seeds: int
  gap: float | None = None
  gap_error: float | None = None
  gap_untuned: float | None = None
  bits: float | None = None
  own_data: bool = False

  def __str__(self) -> str:
    # `steps` and `deviation` are None together; with a gap they were not measured.
    reached = "never at dense's loss"
    if self.steps:
      reached = f"{self.steps:.2f} ± {self.deviation:.2f} times dense's steps"
    elif self.gap is not None:
      reached = f"loss {self.gap:+.1f} % above dense's"
    return f"{reached} ({self.task}, {self.optimizer}, {self.workers} workers, {self.seeds} seeds)"


def evidence(
  optimizer: str | None = None, own_data: bool | None = False
) -> list[Evidence]:
  """The evidence that comes with the library, from trainings with this optimizer; for `js.costs.advise`.

  Args:
    optimizer: its name, "adam", which includes kinds of it like window_adam; None for
      all.
    own_data: whether the workers' data differ in kind (`js.agreement`); None for all.

  Returns:
    A row for each method and task, an `Evidence`.

  Raises:
    ValueError: if no row has this optimizer and `own_data`; the message lists the known
      optimizers.

  Example:
    >>> import jaxsparse as js
    >>> sorted({row.optimizer.split(":")[0] for row in js.costs.evidence("adam")})
    ['adam', 'window_adam']
    >>> str(js.costs.evidence("adam")[0]._replace(steps=1.25, deviation=0.1))
    "1.25 ± 0.10 times dense's steps (lm, 3,295,232 parameters, adam:0.0015, 4 workers, 3 seeds)"
  """
  rows = [Evidence(**row) for row in json.loads(_EVIDENCE_FILE.read_text())]
  names = [row.optimizer.split(":")[0] for row in rows]
  # "adam" selects window_adam, too, since it is one word of that name.
  rows_of_optimizer = [
    row
    for row, name in zip(rows, names, strict=True)
    if optimizer in (None, name, *name.split("_")) and own_data in (None, row.own_data)
  ]
  if not rows_of_optimizer:
    known = ", ".join(dict.fromkeys(names))
    raise ValueError(
      f"evidence: no training with optimizer={optimizer!r}, own_data={own_data}, choose one of {known}, or None for all"
    )
  return rows_of_optimizer


class Prediction(NamedTuple):
  """Predicted time of one update of one algorithm, and of a step if only every H-th one exchanges.

  Attributes:
    label: the collective and its options as text, and H if only every H-th step
      exchanges.
    name: of the collective.
    config: its options, for `js.make_transform`.
    arithmetic: seconds of residual, selection, sums and total.
    wire: seconds of its messages.
    messages: number of messages that one worker sends, one after the other.
    words: number of 4-byte words that one worker sends, or where it has several
      devices, one of these.
    inside: seconds of messages between the devices of a worker.
    every: H, the number of steps from one update to the next (`js.local_steps`).
    compute: seconds of the rest of a step, forward and backward.
    evidence: the steps that the method took in a training, if there was one.

  Example:
    >>> Prediction("dense", "dense", {}, 0.1, 0.2, 6, 1000).seconds
    0.30000000000000004
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
  def to_loss(self) -> float:
    """Seconds to the loss that dense has after one step: steps by the evidence, 1 without it, × seconds of a step."""
    # None stands for trainings that never reached dense's loss.
    steps = 1.0 if self.evidence is None else self.evidence.steps or math.inf
    return steps * (self.compute + self.seconds)

  @property
  def latest(self) -> float:
    """`to_loss` with one standard deviation of the evidence's steps more."""
    # Without evidence, or where dense's loss was never reached, there is no deviation.
    deviation = (self.evidence and self.evidence.deviation) or 0.0
    return self.to_loss + deviation * (self.compute + self.seconds)

  @property
  def is_baseline(self) -> bool:
    """Whether this is dense in float32 without evidence, with which methods are compared."""
    is_dense = self.name == "dense" and self.config.get("dtype") in (None, "float32")
    return is_dense and not self.evidence

  @property
  def title(self) -> str:
    """The method of the evidence, or the label."""
    return self.evidence.method if self.evidence else self.label

  def rarely(self, every: int) -> Self:
    """The prediction if only every H-th step has the update; `seconds` is then 1/H of it, and the label names H."""
    return self._replace(
      every=every,
      label=self.label if every == 1 else f"{self.label} every {every} steps",
    )


class Advice(NamedTuple):
  """The predictions of `advise`.

  Attributes:
    predictions: the fastest first; with evidence the one that reaches dense's loss
      first.
    why: one sentence that compares the best prediction with dense, or dense, if it is
      the best, with the best other one, and names the evidence.
    scaling: a warning if arithmetic was timed with over 4 times as many entries as a
      device has, or with less than a quarter of them; else "".
  """

  predictions: list[Prediction]
  why: str
  scaling: str = ""

  @property
  def best(self) -> Prediction:
    """The first prediction."""
    return self.predictions[0]

  def __str__(self) -> str:
    has_evidence = any(prediction.evidence for prediction in self.predictions)
    width = max(31, *(len(prediction.title) for prediction in self.predictions)) + 1
    # Without evidence (False) the column of seconds to the loss is an empty string.
    heads = (
      f"{'to loss':>10}" * has_evidence
      + f"{'seconds':>10}{'arithmetic':>12}{'wire':>10}"
    )
    lines = [f"{'algorithm':<{width}}{heads}{'messages':>10}{'words':>14}"]
    for prediction in self.predictions:
      times = (
        f"{prediction.to_loss:>10.4f}" * has_evidence
        + f"{prediction.seconds:>10.4f}{prediction.arithmetic:>12.4f}{prediction.wire:>10.4f}"
      )
      lines.append(
        f"{prediction.title:<{width}}{times}{prediction.messages:>10}{prediction.words:>14,}"
      )
    if has_evidence:
      accuracy = "Accuracy counts by these trainings alone, which are not yours."
    else:
      accuracy = "Accuracy is not considered: a lower density, or more local steps, are always faster."
    lines += [self.scaling] if self.scaling else []
    return "\n".join([*lines, self.why, accuracy, _describe_errors()])


def _describe_errors() -> str:
  """One sentence: how far predictions were off where the updates were measured."""
  # Each row has the predicted and the measured milliseconds of an update.
  rows = json.loads(_PREDICTIONS_FILE.read_text())
  # Relative errors: large and small updates count alike.
  errors = sorted(abs(row["predicted"] / row["measured"] - 1) for row in rows)
  near = sum(error <= 0.25 for error in errors)
  # The lower median: at least half of the errors are at most as large.
  return (
    f"Seconds are predicted: of the last {len(errors)} predictions that were measured, half were off by at most "
    f"{errors[(len(errors) - 1) // 2]:.0%}, {near} by at most 25%, and the worst by {errors[-1]:.0%}."
  )


def advise(
  params: Any,
  profile: Profile,
  every: Sequence[int] = (1,),
  *,
  evidence: Sequence[Evidence] = (),
  compute: float = 0.0,
) -> Advice:
  """Predicts the seconds per step of every algorithm of a profile, and names the fastest, dense included.

  seconds = overhead + arithmetic · n + α · messages + β · bytes. An algorithm that uses
  the platform's all-reduce has the all-reduce's α and β, β times the algorithm's
  slowdown. Messages by which workers agree on a few numbers cost the all-reduce's α.
  Where a worker has S devices, each has ⌈n/S⌉ entries, and gathers the leaves that are
  replicated inside a worker by the shardings of `params`; a number n stands for sharded
  parameters. With local steps only every H-th step has an update, and seconds and words
  per step are 1/H of the update's. Accuracy is not considered: a lower density, or more
  local steps, are always faster. `print` says so, and how far predictions in our lab
  were off.

  With evidence, from trainings, only dense in float32 and the methods of the evidence
  are compared. They are sorted by the seconds to the loss that dense has after one
  step: steps · (compute + seconds per step), where `steps` are the method's steps over
  dense's. A method is before dense only if it is faster with one standard deviation of
  steps more. Of several trainings of one method the one that took most steps counts.
  Rows with a `gap` say whether a method holds: its loss is within 2 % of dense's on at
  least four of five tasks; a task whose gap is above 2 % by no more than its standard
  error does not count. A method that holds, and has no row with steps, is taken to need
  dense's steps. A method that does not hold counts by its row with the largest gap: if
  this row has no steps, the method never reaches dense's loss.

  Args:
    params: the parameters, a pytree of arrays or of `jax.ShapeDtypeStruct`; or n, which
      leaves PowerSGD and rows out.
    profile: from `js.costs.fit`, or `js.costs.Profile.of`.
    every: the numbers H of steps between exchanges to choose from (`js.local_steps`);
      with evidence it names them.
    evidence: of the methods to choose from, `js.costs.evidence("adam")` or rows of your
      own like these.
    compute: seconds of the rest of your step, forward and backward; with evidence.

  Returns:
    An `Advice`; `print` it for a table. `predictions` has the best first, which is also
    `best`. A prediction has the `label`, `name` and `config` of an algorithm, `every`
    (H), `seconds` per step, and of an update `messages`, `words`, and the seconds of
    `arithmetic`, `wire` and `inside`; with evidence also `to_loss` and `evidence`.

  Raises:
    ValueError: for a profile without algorithms, or without any collective of the
      evidence; no parameters; an empty `every`, or an H that is no whole number from 1
      up; negative seconds; or malformed evidence.

  Example:
    >>> import jaxsparse as js
    >>> from jaxsparse.costs.calibration import Algorithm
    >>> profile = js.costs.Profile(workers=6, alpha=1e-4, beta=8e-9, reduce_alpha=1e-4, reduce_beta=8e-9, algorithms={
    ...   "dense": Algorithm(1e-9, reduces=True), "spardl:density=0.01": Algorithm(4e-8)})
    >>> js.costs.advise(14_728_266, profile).best.label
    'spardl:density=0.01'
    >>> js.costs.advise(14_728_266, profile).why
    'spardl:density=0.01: ... s per step, ... times as fast as dense: it saves ... s of the wire and spends ...'
    >>> js.costs.advise(14_728_266, profile, every=(1, 30)).why
    'spardl:density=0.01 every 30 steps: ... s per step, ... times as fast as dense every 30 steps: it saves ...'
    >>> slow = js.costs.evidence("sgd")[0]._replace(steps=40.0, deviation=1.0)
    >>> js.costs.advise(14_728_266, profile, evidence=[slow], compute=0.2).why
    "dense reaches dense's loss ... times as fast as spardl:density=0.01: 40.00 ± 1.00 times dense's steps (...)"
  """
  if not 0 <= compute < math.inf:
    raise ValueError(
      f"advise: compute={compute}, give the seconds of forward and backward"
    )
  if not profile.algorithms:
    raise ValueError("advise: the profile has no algorithm, make one with js.costs.fit")
  if np.ndim(every) != 1 or not len(every):
    raise ValueError(
      f"advise: every={every!r}, give a list of steps between exchanges, as in (1, 30)"
    )
  for steps in every:
    check_whole("advise", 1, every=steps)
  # A number n leaves out collectives whose words depend on the shapes of leaves. If it
  # leaves out all, `_predict` raises for the first label, and says why.
  labels = [
    label for label in profile.algorithms if not lacks_shapes(label, params)
  ] or profile.algorithms
  updates = [
    _predict(label, params, profile)._replace(compute=compute) for label in labels
  ]
  without_evidence = [update.rarely(steps) for steps in every for update in updates]
  predictions_of_methods = (
    _with_evidence(updates, rows) if (rows := list(evidence)) else without_evidence
  )
  # `to_loss` of the fastest dense prediction: where evidence is given, dense is what
  # has none. Inf without evidence or without dense: `to_loss` alone orders then.
  dense = min(
    (
      prediction.to_loss
      for prediction in predictions_of_methods
      if rows and not prediction.evidence
    ),
    default=math.inf,
  )
  # `latest` is `to_loss` with one standard deviation of the steps more. A method that
  # is faster than dense by less than that gets dense's seconds here.
  sure = lambda prediction: (
    prediction.to_loss if prediction.latest < dense else max(prediction.to_loss, dense)
  )
  # At equal seconds dense, which has no evidence, is first.
  predictions = sorted(
    predictions_of_methods,
    key=lambda prediction: (
      sure(prediction),
      bool(prediction.evidence),
      prediction.to_loss,
    ),
  )
  return Advice(predictions, _explain(predictions), _describe_scaling(params, profile))


def link_of(profile: Profile, name: str | Collective = "dense", **config: Any) -> Link:
  """The cost of a communication from a profile: α, β and γ of one update of a collective, arithmetic included.

  `advise` predicts the seconds of an update of n entries, a linear function of n: α is
  its constant, β its slope per byte of the gradient.

  Args:
    profile: from `fit`, on the workers and the network of the training run.
    name: of a collective in the profile, with options as "spardl:density=0.01"; or the
      collective.
    **config: its options, as in the profile.

  Returns:
    A `Link`; `**link._asdict()` are the arguments of `js.overlap.plan`.

  Raises:
    ValueError: if the profile has no such collective, or if the words of the collective
      depend on the shapes of leaves.

  Example:
    >>> import jaxsparse as js
    >>> from jaxsparse.costs.calibration import Algorithm
    >>> profile = js.costs.Profile(workers=4, alpha=1e-4, beta=8e-9, gamma=1.5, reduce_alpha=1e-4, reduce_beta=8e-9,
    ...   entries=2**20, algorithms={"dense": Algorithm(0.0, reduces=True)})
    >>> link = js.costs.link_of(profile)
    >>> round(link.alpha, 6), round(link.beta, 12), link.gamma  # 4 messages; 2 · 3/4 bytes sent for each byte
    (0.0004, 1.2e-08, 1.5)
  """
  collective = make_collective(name, **config)
  # Labels may name options in another order, or write out defaults.
  wanted = collective_of(collective.label)
  labels = (label for label in profile.algorithms if collective_of(label) == wanted)
  label = next(labels, None)
  if label is None:
    raise ValueError(
      f"link_of: the profile has no {collective.label!r}, choose one of {', '.join(profile.algorithms)}"
    )
  if collective.traits.needs_shapes:
    raise ValueError(
      f"link_of: the words of {label} depend on the shapes of leaves, and are no line in n: choose another algorithm"
    )
  n = 2**24  # so large that rounding to whole words does not matter
  once, twice = (_predict(label, entries, profile).seconds for entries in (n, 2 * n))
  # The line through both points; a byte is a quarter of an entry.
  alpha = max(0.0, 2 * once - twice)
  beta = (twice - once) / (4 * n)
  # Noise may have measured a γ below 1, which `js.overlap.plan` refuses.
  return Link(alpha, beta, max(1.0, profile.gamma))


def _with_evidence(
  updates: list[Prediction], evidence: Sequence[Evidence]
) -> list[Prediction]:
  """Predictions of dense, without evidence, and of each method of the evidence, with the row that `_judge` chooses.

  Args:
    updates: one prediction for each algorithm of the profile, with H = 1.
    evidence: rows, in any order, of any number of methods. A method whose collective is
      not in the profile is left out; ValueError if that leaves out all methods.
  """
  for row in evidence:
    _check(row)
  # Sorted by steps, since `_judge` takes the last timed row: the slowest training. Rows
  # whose steps are None are sorted as Inf.
  rows_of_method: dict[str, list[Evidence]] = {}
  for row in sorted(evidence, key=lambda row: row.steps or math.inf):
    rows_of_method.setdefault(row.method, []).append(row)
  by_method: dict[str, Prediction] = {}
  for method, rows in rows_of_method.items():
    row = _judge(rows)
    for update in updates:
      # Names and options are compared, since labels may have options in another order.
      if (update.name, update.config) == collective_of(row.collective):
        # A method with local steps has this update in every H-th step only.
        by_method[method] = update.rarely(row.every)._replace(evidence=row)
  if not by_method:
    wanted = ", ".join(dict.fromkeys(row.collective for row in evidence))
    raise ValueError(
      f"advise: the profile has {', '.join(update.label for update in updates)}, the evidence is of {wanted}: "
      "give these to js.costs.fit(algorithms=...)"
    )
  baseline = [update for update in updates if update.is_baseline]
  return baseline + list(by_method.values())


def _judge(rows: list[Evidence]) -> Evidence:
  """The row that counts among one method's `rows`, which are sorted by steps, with those without steps last."""
  # `judged` rows have the gap to dense's loss. `timed` rows have the steps to dense's
  # loss; neither gap nor steps if their training never reached that loss.
  judged = [row for row in rows if row.gap is not None]
  timed = [row for row in rows if row.gap is None or row.steps]
  # The slowest training counts. `holds` is true if no row is judged.
  if timed and holds(judged):
    return timed[-1]
  worst = max(judged, key=lambda row: row.gap or 0.0)
  # Here some row is judged. A method that holds was not timed: it is taken to need
  # dense's steps.
  return worst._replace(steps=1.0, deviation=0.0) if holds(judged) else worst


def holds(rows: Sequence[Evidence]) -> bool:
  """Whether a method's loss is within 2 % of dense's on at least four of five tasks; true if no task decides."""
  gaps = [(row.gap, row.gap_error or 0.0) for row in rows if row.gap is not None]
  within = sum(gap <= _MAX_GAP for gap, _ in gaps)
  # A gap that is too large by less than its standard error decides nothing.
  above = sum(gap - error > _MAX_GAP for gap, error in gaps)
  return within >= _MIN_TASKS * (within + above)


def _check(row: Evidence) -> None:
  """Raises ValueError unless `every` and `seeds` are whole, and steps > 0 have a deviation, or both are None."""
  if not isinstance(row, Evidence):
    raise ValueError(
      f"advise: evidence has {row!r}, give a list of rows like those of js.costs.evidence()"
    )
  where = f"advise: evidence of {row.method}"
  check_whole(where, 1, every=row.every, seeds=row.seeds)
  known = [value for value in (row.steps, row.deviation) if value is not None]
  if (
    len(known) == 1
    or row.steps == 0
    or not all(0 <= value < math.inf for value in known)
  ):
    has = f"steps={row.steps} and deviation={row.deviation}"
    raise ValueError(
      f"{where}: {has}, give steps / dense's steps and their deviation, or None for both if never there"
    )


def _predict(label: str, params: Any, profile: Profile) -> Prediction:
  """The prediction of one update of the algorithm `label` of a profile; `params` as for `advise`."""
  name, options = collective_of(label)
  measured = profile.algorithms[label]
  cost = predict(
    name, n=params, workers=profile.workers, devices=profile.devices, **options
  )
  # The formula is an upper bound: `fill` is measured words / words of the formula.
  words = round(cost.words * measured.fill)
  # An all-reduce that was not measured has 0, and is priced as messages.
  reduce_alpha = profile.reduce_alpha or profile.alpha
  reduce_beta = profile.reduce_beta or profile.beta
  alpha, beta = profile.alpha, profile.beta
  # An algorithm that `reduces` sends by the platform's all-reduce, maybe slower for its
  # dtype than for float32.
  if measured.reduces:
    alpha, beta = reduce_alpha, reduce_beta * measured.slowdown
  # A message costs α, one of an agreement the all-reduce's α, a byte β; 4 bytes a word.
  wire = cost.messages * alpha + cost.agreements * reduce_alpha + 4 * words * beta
  arithmetic = measured.seconds(_entries_of_device(params, profile))
  # Messages between the devices of a worker; 0 seconds if a worker is one device.
  inside = count_inside(params, devices=profile.devices).seconds(
    profile.inside_alpha, profile.inside_beta
  )
  return Prediction(
    label, name, options, arithmetic, wire, cost.messages, words, inside
  )


def _entries_of_device(params: Any, profile: Profile) -> int:
  """The gradient entries of one device of a worker."""
  # Rounded up, as the pieces of devices are padded to one size.
  return -(-count_entries(params) // profile.devices)


def _describe_scaling(params: Any, profile: Profile) -> str:
  """A warning if the entries of a device are far more or far fewer than those that were timed; else ""."""
  entries = _entries_of_device(params, profile)
  # A profile that does not say with how many entries it was timed has 0.
  if not profile.entries or 1 / _MAX_SCALE <= entries / profile.entries <= _MAX_SCALE:
    return ""
  return (
    f"Arithmetic was timed with {profile.entries:,} entries a device and is scaled to {entries:,}: "
    "js.costs.fit(mesh, n=params) times that."
  )


def _explain(predictions: list[Prediction]) -> str:
  """One sentence that compares the first, best prediction with dense; if dense is first, with the best other one."""
  best, *others = predictions
  # None if all predictions are the baseline, or none is. Dense with evidence, as in
  # local steps, is a method.
  rival = next(
    (other for other in others if other.is_baseline != best.is_baseline), None
  )
  # Only one of `best` and `rival` can have evidence; None if neither has.
  trained = best.evidence or (rival and rival.evidence)
  if rival is None:
    return f"{best.title}: {trained or f'{best.seconds:.4f} s per step'}"
  if trained:
    sooner = _ratio(rival.to_loss, best.to_loss)
    # `advise` puts dense before a rival that is faster within its deviation only.
    if sooner < 1:
      faster = _ratio(best.to_loss, rival.to_loss)
      return f"{best.title}: that {rival.title} is {faster:.2f} times as fast is within its deviation: {trained}"
    than = (
      f" {sooner:.2f} times as fast as {rival.title}"
      if math.isfinite(sooner)  # Inf for a rival that never gets to dense's loss
      else f", {rival.title} never"
    )
    return f"{best.title} reaches dense's loss{than}: {trained}"
  first = f"{best.title}: {best.seconds:.4f} s per step"
  if best.is_baseline:
    return (
      f"{first}. The fastest other one, {rival.title}, would take {rival.seconds:.4f} s"
    )
  # Seconds per step: only every H-th step has an update.
  saved = rival.wire / rival.every - best.wire / best.every
  spent = best.arithmetic / best.every - rival.arithmetic / rival.every
  return (
    f"{first}, {_ratio(rival.seconds, best.seconds):.2f} times as fast as {rival.title}: it saves {saved:.4f} s of the "
    f"wire and spends {spent:.4f} s more on arithmetic"
  )


def _ratio(seconds: float, others: float) -> float:
  """`seconds / others`: 1 where both are 0, or both Inf; Inf where `others` alone is 0."""
  if seconds == others:
    return 1.0
  return seconds / others if others else math.inf
