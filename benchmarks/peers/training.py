"""Trainings with PyTorch's DistributedDataParallel beside those of a race, whose file gets their rows.

The file says the task, the hosts, the batches and the recipe, and has dense's curves,
whose loss is the target. The same model in PyTorch starts from the same parameters and
sees the same batches.
"""

import itertools
import json
import math
import pathlib
import re
import tempfile
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from benchmarks import netlab, recipes
from benchmarks.peers import ranks
from benchmarks.race.results import Curve, Pace, Results, Whole
from benchmarks.race.standings import Target
from benchmarks.tasks.base import Model, Task, model_of

TASKS = ("cnn", "lm", "lm_medium", "lm_wide")  # that torch_training.py has
_OPTIONS = {"adam": {"b1"}, "muon": {"adam", "only", "steps", "beta"}}
_AGREEMENT = 1e-4  # of the losses of both frameworks, before and behind the first step


class Plan(NamedTuple):
  """What is trained."""

  python: str  # of PyTorch's environment
  methods: list[str]  # of DistributedDataParallel and torchft
  rate: str  # of the links; without a limit there are losses over steps and no seconds
  steps: int  # of dense, whose loss is the target
  most: int  # steps after which a method gives up
  every: int  # steps from one evaluation to the next


def task_of(results: Results) -> str:
  """The task of a race; ValueError for one that PyTorch's ranks have not."""
  if results.setting["task"] not in TASKS:
    raise ValueError(
      f"--race={results.path} trains {results.setting['task']}, choose one of {', '.join(TASKS)}"
    )
  return results.setting["task"]


def _recipe(results: Results, optimizer: recipes.Optimizer) -> recipes.Recipe:
  """The recipe of the race; ValueError for one that PyTorch's ranks have not."""
  text = results.setting["recipe"]
  found = re.fullmatch(r"constant rate(?:, clipping at (\S+))?", text)
  if not found:
    raise ValueError(
      f"--race={results.path} has the recipe {text!r}: choose a constant rate without warm-up"
    )
  own = _OPTIONS.get(optimizer.name)
  if own is None or {name for name, _ in optimizer.options} - own:
    raise ValueError(
      f"--optimizer={optimizer}: PyTorch's ranks have adam with b1, and muon with adam, only, steps, beta"
    )
  return recipes.Recipe(optimizer, clip=float(found[1] or 0))


def write_data(
  path: pathlib.Path,
  task: Task,
  model: Model,
  seed: int,
  hosts: int,
  size: int,
  steps: int,
) -> None:
  """The start with the names and layouts of PyTorch, so many batches of all workers, and what is held out."""
  found: dict[str, Any] = {}
  for keys, leaf in jax.tree_util.tree_leaves_with_path(model.params):
    name = jax.tree_util.keystr(keys, simple=True, separator=".").removesuffix(".value")
    stem, _, kind = name.rpartition(".")
    axes = {("kernel", 2): (1, 0), ("kernel", 4): (3, 2, 0, 1)}.get(
      (kind, leaf.ndim), range(leaf.ndim)
    )
    found[f"start.{stem}.{'bias' if kind == 'bias' else 'weight'}"] = (
      np.ascontiguousarray(np.transpose(leaf, axes))
    )
  batches = list(itertools.islice(task.stream(seed, hosts, size), steps))
  found |= {
    name: np.stack([batch[name] for batch in batches]) for name in ("input", "label")
  }
  found |= {
    f"held_out.{name}": values
    for name, values in zip(("input", "label"), task.held_out, strict=True)
  }
  np.savez(path, **found)


def _first_losses(
  task: Task, model: Model, recipe: recipes.Recipe, seed: int, hosts: int, size: int
) -> list[float]:
  """Our held-out losses before and behind a step of dense."""
  batch, tx = next(task.stream(seed, hosts, size)), recipe.make()
  updates, _ = tx.update(
    jax.grad(model.plain_loss)(model.params, batch), tx.init(model.params), model.params
  )
  after = optax.apply_updates(model.params, updates)
  return [
    model.evaluate(params, model.statistics)[0] for params in (model.params, after)
  ]


def _settings_of(optimizer: recipes.Optimizer) -> dict[str, Any]:
  """The options of Adam, and of Muon or None, with the names of PyTorch's."""
  given = dict(optimizer.options)
  if optimizer.name == "adam":
    return {
      "adam": {"lr": optimizer.rate, "betas": (given.get("b1", 0.9), 0.999)},
      "muon": None,
    }
  muon = {
    "lr": optimizer.rate,
    "only": given.get("only", ""),
    "momentum": given.get("beta", 0.95),
  }
  return {
    "adam": {"lr": given.get("adam", 0.001)},
    "muon": muon | {"ns_steps": given.get("steps", 5)},
  }


def _check(
  line: dict[str, Any], optimizer: recipes.Optimizer, ours: list[float]
) -> None:
  """Raises RuntimeError unless losses before and behind the first step are ours.

  fp16 rounds in the first step, PyTorch's Muon computes in bfloat16, and DiLoCo's ranks
  are apart after it.
  """
  exact = optimizer.name == "adam" and not line["method"].startswith(("fp16", "diloco"))
  count = 2 if exact else 1
  if not np.allclose(line["first"][:count], ours[:count], rtol=0, atol=_AGREEMENT):
    raise RuntimeError(
      f"{line['method']}: losses {line['first']} of PyTorch before and behind a step, ours {ours}"
    )


def _rows_of(
  line: dict[str, Any], optimizer: recipes.Optimizer, seed: int, rate: str
) -> list[Any]:
  """What a line of PyTorch's rank 0 says, as rows of a race."""
  losses = [loss if math.isfinite(loss) else math.inf for loss in line["loss"]]
  key = ranks.named(line["method"]), str(optimizer), seed
  if rate == netlab.UNSHAPED:
    return [Curve(*key, line["steps"], losses, line["accuracy"], line["bytes"] / 4)]
  pace = line["pace"]
  whole = Whole(*key, rate, line["steps"], line["seconds"], losses)
  parts = pace["seconds"], pace["compute"], pace["rest"], line["bytes"]
  return [whole, Pace(key[0], rate, line["steps"][-1], *parts, str(optimizer))]


def train(
  results: Results, task: Task, plan: Plan, optimizer: recipes.Optimizer, seed: int
) -> list[Any]:
  """Rows of all methods with an optimizer from a seed; RuntimeError where PyTorch's losses are not ours."""
  hosts, size = results.setting["hosts"], results.setting["batch_size"]
  recipe, model = _recipe(results, optimizer), model_of(task, seed)
  if optimizer.name == "muon" and (
    apart := [one for one in plan.methods if ranks.library(one) == "torchft"]
  ):
    raise ValueError(
      f"--optimizer={optimizer}: {apart[0]} takes one inner optimizer, and Muon is two: choose adam"
    )
  target = Target(plan.steps).of_seeds(results).get(seed)
  if target is None:
    raise ValueError(
      f"--race={results.path} has no loss of dense after {plan.steps} steps from seed {seed}"
    )
  setting = {
    "task": task.name,
    "size": hosts,
    "batch_size": size,
    "clip": recipe.clip,
    "every": plan.every,
  }
  setting |= _settings_of(optimizer) | {"methods": plan.methods}
  setting |= {
    "target": target,
    "most": plan.most,
    "least": plan.steps if plan.rate == netlab.UNSHAPED else 0,
  }
  with netlab.lab(hosts, plan.rate) as team, tempfile.TemporaryDirectory() as folder:
    data, lines = pathlib.Path(folder) / "data.npz", pathlib.Path(folder) / "rows.jsonl"
    write_data(data, task, model, seed, hosts, size, plan.most)
    ranks.run(
      team,
      plan.python,
      setting | {"data": str(data), "rows": str(lines)},
      "torch_training.py",
    )
    found = list(map(json.loads, lines.read_text().splitlines()))
  ours = _first_losses(task, model, recipe, seed, hosts, size)
  for line in found:
    _check(line, optimizer, ours)
  return [row for line in found for row in _rows_of(line, optimizer, seed, plan.rate)]
