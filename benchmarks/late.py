r"""Loss of a training in rounds whose late workers are others in each round, beside one in which nobody is late.

M workers train by themselves for H steps. In a round M - late of them, drawn at random,
exchange what they have moved, with the outer step of `js.partial.Rounds`; the others
keep theirs for the next round. All in one process, in turn: seconds are not measured.

Example:
  python -m benchmarks.late --late=0,2 --steps=300,1000 --seed=0
"""

import itertools
import pathlib
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from benchmarks import entry, methods, recipes, report, workers
from benchmarks.tasks import registry
from benchmarks.tasks.base import Task, model_of
from jaxsparse.partial.net.messages import WorkerGroup
from jaxsparse.partial.rounds.outer_step import OuterStep
from jaxsparse.partial.rounds.run import Run

_MUON = "muon:0.01:adam=0.003:only=blocks:rows=64:steps=3:beta=0.9"
_WORKERS = flags.DEFINE_integer(
  "workers", 6, "M, the number of workers.", lower_bound=2
)
_LATE = entry.define_numbers(
  "late", [0, 2], "How many are late in each round.", flags.IntegerParser(0)
)
_EVERY = flags.DEFINE_integer(
  "every", 4, "H, the steps from one round to the next.", lower_bound=1
)
_STEPS = entry.define_numbers(
  "steps", [300, 1000], "Steps of each worker, of trainings one after the other."
)
_TASK = flags.DEFINE_string("task", "lm", "What is trained, as in benchmarks.race.")
_BATCH_SIZE = flags.DEFINE_integer(
  "batch_size", 4, "Examples of a worker in a step.", lower_bound=1
)
_COLLECTIVE = flags.DEFINE_string(
  "collective", "onebit", "The collective of a round, as in benchmarks.race."
)
_OPTIMIZER = flags.DEFINE_string(
  "optimizer", _MUON, "The optimizer of each worker, as in benchmarks.race."
)
_SCHEDULE = flags.DEFINE_enum(
  "schedule", "cosine", list(recipes.SCHEDULES), "Of the rate, over --steps."
)
_APPLY_RESIDUAL = flags.DEFINE_bool(
  "apply_residual", True, "Whether workers go on from the anchor less residuals."
)
_CLIP = flags.DEFINE_float(
  "clip", 1.0, "Largest norm of a gradient, 0 for any.", lower_bound=0.0
)
_SEED = entry.define_seeds([0, 1, 2])
_REPORT_DIR = entry.define_report_dir("late.json")


class Outcome(NamedTuple):
  """A training and the loss of its anchor on held-out data."""

  late: int
  seed: int
  steps: int
  loss: float


class Workers:
  """All workers of a training, with the outer step of `js.partial.Rounds` on a device each."""

  def __init__(self, task: Task, seed: int, steps: int):
    self.model = model_of(task, seed)
    count = range(_WORKERS.value)
    (method,) = methods.parse("collective", [_COLLECTIVE.value], _WORKERS.value)
    outer = lambda comm: optax.chain(method.exchange(comm, {}), optax.sgd(1.0))
    self.steps = [
      OuterStep(outer, device=jax.devices()[1 + worker]) for worker in count
    ]
    self.anchors = [step.start(self.model.params) for step in self.steps]
    (optimizer,) = recipes.parse_optimizers([_OPTIMIZER.value], 0.001)
    self.tx = recipes.Recipe(
      optimizer, _SCHEDULE.value, clip=_CLIP.value, steps=steps
    ).make()
    self.params, self.states = (
      [self.model.params] * len(count),
      [self.tx.init(self.model.params)] * len(count),
    )
    self._local = jax.jit(self._local_step)

  def _local_step(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
    grads = jax.grad(self.model.loss, has_aux=True)(
      params, batch, self.model.statistics
    )[0]
    updates, state = self.tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  def train(self, batch: Any) -> None:
    """A step of every worker with its rows of a batch."""
    size = len(jax.tree.leaves(batch)[0]) // len(self.params)
    for worker, state in enumerate(self.states):
      own = jax.tree.map(
        lambda x, worker=worker: x[worker * size : (worker + 1) * size], batch
      )
      self.params[worker], self.states[worker] = self._local(
        self.params[worker], state, own
      )

  def exchange(self, members: tuple[int, ...], number: int) -> None:
    """A round of these workers; the others get its anchor, and keep what they have moved."""
    moved = [
      jax.tree.map(jnp.subtract, self._base(worker), own)
      for worker, own in enumerate(self.params)
    ]
    group, runs = (
      WorkerGroup(members, (1 / _WORKERS.value,) * len(members), number, number=number),
      dict[int, Run](),
    )
    post = lambda send: runs[send.member].receive(send.piece)
    runs.update({worker: Run(group, worker, post) for worker in members})

    def run(worker: int) -> Any:
      operands = (
        group.weights[0],
        len(members),
        members.index(worker),
        number,
        runs[worker].exchange,
      )
      return self.steps[worker].run(self.anchors[worker], moved[worker], *operands)

    with futures.ThreadPoolExecutor(len(members)) as pool:
      for worker, result in zip(members, pool.map(run, members), strict=True):
        self.anchors[worker] = result.anchor
        moved[worker] = jax.tree.map(jnp.zeros_like, moved[worker])
    content, *others = {
      self.steps[worker].pack(self.anchors[worker]) for worker in members
    }
    if others:
      raise RuntimeError(f"anchors of the members of round {number} differ")
    for worker in set(range(len(self.params))) - set(members):
      self.anchors[worker] = self.steps[worker].unpack(content, self.anchors[worker])
    self.params = [
      jax.tree.map(jnp.subtract, self._base(worker), one)
      for worker, one in enumerate(moved)
    ]

  def _base(self, worker: int) -> Any:
    """The parameters of a worker that has moved nothing since the last round."""
    anchor = self.anchors[worker]
    own = (
      self.steps[worker].less_residual(anchor, 1 / _WORKERS.value)
      if _APPLY_RESIDUAL.value
      else anchor.params
    )
    return jax.device_put(own, jax.devices()[0])


def train(task: Task, seed: int, late: int, steps: int, show: Any) -> float:
  """The loss on held-out data of the anchor after a training."""
  own, random = Workers(task, seed, steps), np.random.default_rng(seed)
  batches = task.stream(seed, _WORKERS.value, _BATCH_SIZE.value)
  for step, batch in enumerate(itertools.islice(batches, steps), start=1):
    own.train(batch)
    if step % _EVERY.value == 0 or step == steps:
      members = sorted(
        random.permutation(_WORKERS.value)[: _WORKERS.value - late].tolist()
      )
      own.exchange(tuple(members), step)
    show(step, 0.0)
  anchor = jax.device_put(own.anchors[members[0]].params, jax.devices()[0])
  return own.model.evaluate(anchor, own.model.statistics, None)[0]


def main() -> None:
  """Trains each, and prints a row of each number of late workers."""
  # outer steps have one each
  jax.config.update("jax_num_cpu_devices", 1 + _WORKERS.value)
  console, outcomes = workers.make_console(), list[Outcome]()
  task = registry.make(_TASK.value)
  path = pathlib.Path(_REPORT_DIR.value, "late.json")
  setting = {
    "task": str(task),
    "workers": _WORKERS.value,
    "every": _EVERY.value,
    "batch_size": _BATCH_SIZE.value,
  }
  setting |= {
    "collective": _COLLECTIVE.value,
    "optimizer": _OPTIMIZER.value,
    "schedule": _SCHEDULE.value,
  }
  setting |= {"apply_residual": _APPLY_RESIDUAL.value}
  for seed, steps, late in itertools.product(_SEED.value, _STEPS.value, _LATE.value):
    with report.progress(
      console, f"{late} of {_WORKERS.value} late, seed {seed}", steps
    ) as show:
      outcomes.append(Outcome(late, seed, steps, train(task, seed, late, steps, show)))
    report.keep(path, {"setting": setting}, {"outcomes": report.rounded(outcomes)})
  rows = report.means(
    (one._asdict() for one in outcomes), ["late", "steps"], {"loss": ".3f"}
  )
  console.print(
    report.table(
      "Loss on held-out data", [f"late of {_WORKERS.value}", "steps", "loss"], rows
    )
  )


if __name__ == "__main__":
  entry.run(main)
