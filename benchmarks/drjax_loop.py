r"""DiLoCo as DrJAX writes it, with its own exchange and with ours: held-out loss and words, for `make trainers`.

Replicas of a transformer over bytes (benchmarks/tasks/lm.py) train H steps each, then
they exchange what they have moved. The loop is DrJAX's, that of
docs/how_to/trainers.md; the exchange and the optimizer behind it differ:

  drjax       `drjax.reduce_mean`, then SGD with Nesterov's momentum: DiLoCo
  dense       the same by `js.stacked` and `js.dense_transform`
  signs       `js.onebit_transform`, then the same SGD
  sparseloco  the top-k of each chunk in 2 bits a value, a residual that decays, then SGD without momentum

Words of an exchange are those that a replica sends, `js.metrics`; those of drjax are
the words of dense, which makes the same all-reduce. Needs drjax.

Examples:
  python -m benchmarks.drjax_loop
  python -m benchmarks.drjax_loop --exchange=drjax,signs --rounds=5 --seed=0
"""

import functools
import importlib.util
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxsparse as js
from benchmarks import entry, report
from benchmarks.tasks import lm
from benchmarks.tasks.base import Batch, Model, Task, model_of
from benchmarks.workers import make_console

AXIS = "replicas"
_BATCH = 4  # windows of a replica in a step

_nesterov = optax.sgd(0.7, momentum=0.9, nesterov=True)
# The transform of an exchange, or None for that of DrJAX, and the optimizer behind it.
EXCHANGES: dict[
  str,
  tuple[
    Callable[[], optax.GradientTransformation] | None, optax.GradientTransformation
  ],
] = {
  "drjax": (None, _nesterov),
  "dense": (lambda: js.dense_transform(AXIS), _nesterov),
  "signs": (lambda: js.onebit_transform(AXIS), _nesterov),
  "sparseloco": (
    lambda: js.chunktopk_transform(AXIS, density=1 / 64, decay=0.95, wire="2bit"),
    optax.sgd(1.0),
  ),
}

_EXCHANGE = flags.DEFINE_list(
  "exchange", list(EXCHANGES), f"Exchanges: {', '.join(EXCHANGES)}."
)
_REPLICAS = flags.DEFINE_integer(
  "replicas", 4, "Replicas, each on a CPU device.", lower_bound=1
)
_EVERY = flags.DEFINE_integer(
  "every", 30, "H, steps of a replica between two exchanges.", lower_bound=1
)
_ROUNDS = flags.DEFINE_integer("rounds", 20, "Exchanges.", lower_bound=1)
_RATE = flags.DEFINE_float(
  "rate", 1e-3, "Of the AdamW of each replica.", lower_bound=0.0
)
_SEED = entry.define_seeds([0, 1, 2])
_RESULTS = flags.DEFINE_string("results", None, "Write the rows here.")
_JSON = entry.define_json()
entry.require_choices(_EXCHANGE, list(EXCHANGES), empty=False)


class Row(NamedTuple):
  """One training."""

  exchange: str  # one of EXCHANGES
  seed: int
  n: int  # number of parameters
  replicas: int
  every: int  # H
  rounds: int
  words: float  # that a replica sends in an exchange, mean
  train_loss: float  # of the last round, mean over replicas and steps
  loss: float  # held out, of the parameters after the last exchange
  accuracy: float  # likewise


def trained(
  exchange: str,
  task: Task,
  seed: int,
  replicas: int,
  every: int,
  rounds: int,
  rate: float,
) -> Row:
  """Trains with one exchange."""
  import drjax

  mesh = jax.make_mesh((replicas,), (AXIS,), (AxisType.Auto,))
  placed = NamedSharding(mesh, PartitionSpec(AXIS))
  model = model_of(task, seed)
  transform, outer = EXCHANGES[exchange]
  if transform is not None:
    outer = js.stacked(optax.chain(transform(), outer), mesh, axis=AXIS)
  inner = optax.adamw(rate)
  train = functools.partial(_steps, model, inner)

  @jax.jit
  @drjax.program(placements={AXIS: replicas})
  def train_round(
    params: Any, inner_states: Any, outer_state: Any, batches: Batch
  ) -> tuple[Any, ...]:
    starts = drjax.broadcast(params)
    ends, inner_states, losses = drjax.map_fn(train, (starts, inner_states, batches))
    deltas = jax.tree.map(jnp.subtract, starts, ends)
    updates, outer_state = outer.update(
      drjax.reduce_mean(deltas) if transform is None else deltas, outer_state, params
    )
    return (
      optax.apply_updates(params, updates),
      inner_states,
      outer_state,
      losses.mean(),
    )

  with jax.set_mesh(mesh):
    params, outer_state = model.params, outer.init(model.params)
    rows = lambda leaf: jax.device_put(
      jnp.broadcast_to(leaf, (replicas, *jnp.shape(leaf))), placed
    )
    inner_states = jax.tree.map(rows, inner.init(params))
    for batches in _rounds(task, seed, replicas, every, rounds):
      given = jax.device_put(batches, placed)
      params, inner_states, outer_state, loss = jax.block_until_ready(
        train_round(params, inner_states, outer_state, given)
      )
  n = task.entries
  words = (
    2 * (replicas - 1) / replicas * n
    if transform is None
    else js.metrics(outer_state).total_words / rounds
  )
  held_out = model.evaluate(params, model.statistics)
  return Row(
    exchange, seed, n, replicas, every, rounds, float(words), float(loss), *held_out
  )


def _steps(
  model: Model,
  inner: optax.GradientTransformation,
  params: Any,
  state: Any,
  batches: Batch,
) -> Any:
  """H steps of one replica: (parameters, state, losses)."""

  def step(carry: tuple[Any, Any], batch: Batch) -> tuple[tuple[Any, Any], jax.Array]:
    params, state = carry
    loss, grads = jax.value_and_grad(model.plain_loss)(params, batch)
    updates, state = inner.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), loss

  (params, state), losses = jax.lax.scan(step, (params, state), batches)
  return params, state, losses


def _rounds(
  task: Task, seed: int, replicas: int, every: int, rounds: int
) -> Iterator[Batch]:
  """The batches of each round, [replicas, H, batch, …]."""
  stream = task.stream(seed, replicas, _BATCH)
  for _ in range(rounds):
    steps = [next(stream) for _ in range(every)]
    by_replica = lambda *parts: np.stack(
      [part.reshape(replicas, _BATCH, *part.shape[1:]) for part in parts], 1
    )
    yield jax.tree.map(by_replica, *steps)


def main() -> None:
  """Trains with each exchange from each seed, and prints their losses and words; RuntimeError without drjax."""
  if importlib.util.find_spec("drjax") is None:
    raise RuntimeError("drjax is not installed: pip install 'jaxsparse[trainers]'")
  jax.config.update("jax_num_cpu_devices", _REPLICAS.value)
  console, task, rows = make_console(stderr=_JSON.value), lm.small(), []
  for seed in _SEED.value:
    for exchange in _EXCHANGE.value:
      rows.append(
        trained(
          exchange,
          task,
          seed,
          _REPLICAS.value,
          _EVERY.value,
          _ROUNDS.value,
          _RATE.value,
        )
      )
      console.print(
        f"{exchange}, seed {seed}: held-out loss {rows[-1].loss:.3f}", highlight=False
      )
  found = [row._asdict() for row in rows]
  heads = ["exchange", "held-out loss", "accuracy", "words an exchange"]
  forms = {"loss": ",.3f", "accuracy": ",.3f", "words": ",.0f"}
  console.print(
    report.table(str(task), heads, report.means(found, ["exchange"], forms))
  )
  if _RESULTS.value:
    report.replace(pathlib.Path(_RESULTS.value), json.dumps(found, indent=1) + "\n")
  if _JSON.value:
    report.print_json(found)


if __name__ == "__main__":
  entry.run(main)
