r"""Hosts with several devices each, in the network lab: seconds a step, bytes that a host sends, and the loss.

A transformer over bytes (benchmarks/tasks/lm.py) is trained in three ways; a host is a
process with CPU devices:

  dense    XLA's own: one program under jax.jit, tensor parallel inside a host, no jaxsparse in it
  flat     SparDL over all devices of all hosts, each of which is a worker with a copy of the parameters
  between  SparDL between hosts alone, tensor parallel inside

Devices of a host meet in its memory, over gloo too: a collective inside takes
milliseconds on busy cores, whatever its size, so the model is one wide block. Bytes are
those that the network interface of the host that sent most has counted, headers
included, mean of the timed steps. Needs root.

Examples:
  python -m benchmarks.hierarchy python -m benchmarks.hierarchy --rate=100mbit --hosts=2
  --devices=4 --way=dense,between
"""

import json
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import rich.table
from absl import flags
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from benchmarks import entry, netlab, report, workers
from benchmarks.tasks import lm
from jaxsparse import launch

# windows of 64 bytes for each device; fraction of the entries that SparDL delivers
_BATCH, _DENSITY = (
  1,
  0.01,
)
WAYS = ("dense", "flat", "between")
AXES = ("hosts", "devices")

_RATE = flags.DEFINE_list(
  "rate",
  ["1gbit", "100mbit"],
  "Speeds of the links, as tc writes them; none for any speed.",
)
_HOSTS = flags.DEFINE_integer("hosts", 3, "Hosts of the lab.", lower_bound=2)
_DEVICES = flags.DEFINE_integer("devices", 2, "Devices of each host.", lower_bound=1)
_WAY = flags.DEFINE_list("way", list(WAYS), f"Ways to train: {', '.join(WAYS)}.")
_WIDTH = flags.DEFINE_integer("width", 1536, "Of the transformer.")
_BLOCKS = flags.DEFINE_integer("blocks", 1, "Of the transformer.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 10, "Timed steps of each way.", lower_bound=3)
_ROWS = flags.DEFINE_string(
  "rows",
  None,
  "Write the rows here and print nothing: how ranks tell who started them.",
)
_JSON = entry.define_json()
entry.require_choices(_WAY, WAYS)


class Row(NamedTuple):
  """One way to train at one rate."""

  rate: str  # of the links
  way: str  # one of WAYS
  n: int  # number of parameters
  seconds: float  # of a step, median
  # that the host that sent most has sent in a step, mean; 0 without a network of its
  # own
  bytes: float
  loss: float  # of the last step


def start(
  name: str, mesh: Mesh, params: Any, loss_fn: Callable, density: float
) -> tuple[Callable, Any, Any]:
  """A way's step, (params, state, batch) -> (params, state, loss), its params and state; `params` are of the host."""
  rest = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
  if name != "flat":
    params = _placed(params, jax.tree.map(lambda leaf: _sharding(mesh, leaf), params))
  if name == "dense":
    state = rest.init(params)

    def dense(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
      loss, grads = jax.value_and_grad(loss_fn)(params, batch)
      updates, state = rest.update(grads, state, params)
      return optax.apply_updates(params, updates), state, loss

    kept = jax.tree.map(lambda leaf: leaf.sharding, (params, state))
    kept = (*kept, NamedSharding(mesh, P()))
    return jax.jit(dense, out_shardings=kept, donate_argnums=(0, 1)), params, state

  axis = AXES if name == "flat" else "hosts"
  tx = optax.chain(js.spardl_transform(axis, density=density), rest)
  own = js.make_train_step(loss_fn, tx, mesh, axis=axis)

  def sparse(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
    params, state, metrics = own(params, state, batch)
    return params, state, metrics.loss

  return sparse, params, js.init(tx, params, mesh, axis=axis)


def _sharding(mesh: Mesh, leaf: jax.Array) -> NamedSharding:
  """Tensor parallel: a matrix that widens is cut by columns, the one that narrows again by rows; vectors are whole."""
  if leaf.ndim != 2:
    return NamedSharding(mesh, P())
  return NamedSharding(
    mesh, P(None, "devices") if leaf.shape[1] > leaf.shape[0] else P("devices")
  )


def _placed(tree: Any, shardings: Any) -> Any:
  """Arrays of every process, from the same whole array on each of them."""
  put = lambda x, sharding: jax.make_array_from_callback(
    x.shape, sharding, np.asarray(x).__getitem__
  )
  return jax.tree.map(put, tree, shardings)


def measured(
  name: str,
  mesh: Mesh,
  rate: str,
  width: int,
  blocks: int,
  batch: int,
  density: float,
  steps: int,
) -> Row:
  """Trains in one way, and times all steps but the first two; raises RuntimeError if the loss does not fall."""
  graph, params = nnx.split(
    lm.Transformer(nnx.Rngs(0), width=width, blocks=blocks), nnx.Param
  )
  n = sum(leaf.size for leaf in jax.tree.leaves(params))

  def loss_fn(params: Any, batch: Any) -> jax.Array:
    logits = nnx.merge(graph, params)(batch["input"])
    return optax.softmax_cross_entropy_with_integer_labels(
      logits, batch["label"]
    ).mean()

  step, params, state = start(name, mesh, params, loss_fn, density)
  split, text = (
    NamedSharding(mesh, P(AXES if name == "flat" else "hosts")),
    lm.small().stream(0, mesh.size, batch),
  )
  times, losses, sent = [], [], 0
  for number in range(steps + 2):
    given = next(text)
    given = _placed(given, jax.tree.map(lambda _: split, given))
    if number == 2:
      sent = netlab.sent_bytes()
    began = time.perf_counter()
    params, state, loss = step(params, state, given)
    losses.append(float(jax.block_until_ready(loss).addressable_data(0)))
    jax.block_until_ready(params)
    times.append(time.perf_counter() - began)
  last = np.mean(losses[-3:])
  if not last < losses[0]:
    raise RuntimeError(
      f"{name}: the loss does not fall, {losses[0]:.3f} at first and {last:.3f} at last"
    )
  own = np.array(
    [statistics.median(times[2:]), (netlab.sent_bytes() - sent) / steps], np.float32
  )
  # largest over the hosts
  every = _placed(np.broadcast_to(own, (mesh.size, 2)), NamedSharding(mesh, P(AXES)))
  found = jax.jit(lambda x: x.max(0), out_shardings=NamedSharding(mesh, P()))(every)
  seconds, most = np.asarray(found.addressable_data(0)).tolist()
  return Row(rate, name, n, seconds, most, losses[-1])


def table(rows: Sequence[Row]) -> rich.table.Table:
  """The rows, those of one rate together."""
  lines = []
  for row in rows:
    own = {other.way: other for other in rows if other.rate == row.rate}
    dense, flat = own.get("dense"), own.get("flat")
    gain, less = (
      report.ratio(dense and dense.seconds, row.seconds),
      report.ratio(flat and flat.bytes, row.bytes),
    )
    lines.append(
      [
        row.rate,
        row.way,
        f"{row.seconds:.3f}",
        gain,
        f"{row.bytes / 1e6:.3f}",
        less,
        f"{row.loss:.3f}",
      ]
    )
  size = (
    f"{rows[0].n:,} parameters, {_HOSTS.value} hosts with {_DEVICES.value} devices each"
  )
  heads = "rate", "way", "s a step", "dense / this", "MB a host", "flat / this", "loss"
  return report.table(f"{size}, density {_DENSITY:g}", heads, lines, text=2)


def _rank(path: pathlib.Path) -> None:
  """Measures in a rank of the lab; rank 0 writes the rows."""
  launch.join()
  mesh = jax.make_mesh(
    (_HOSTS.value, _DEVICES.value), AXES, axis_types=(AxisType.Auto,) * 2
  )
  sizes = (_WIDTH.value, _BLOCKS.value, _BATCH, _DENSITY, _STEPS.value)
  rows = [measured(name, mesh, _RATE.value[0], *sizes) for name in _WAY.value]
  if jax.process_index() == 0:
    path.write_text(json.dumps(rows))


def main() -> None:
  """Measures every way at every rate, and reports."""
  if launch.is_rank():
    if not _ROWS.value:
      raise ValueError("the lab starts its own ranks: run this as one program")
    _rank(pathlib.Path(_ROWS.value))
    return
  console, rows = workers.make_console(stderr=_JSON.value), []
  for rate in _RATE.value:
    found = workers.measure_in_lab(
      "benchmarks.hierarchy", _HOSTS.value, rate, devices=_DEVICES.value
    )
    rows += [Row(*row) for row in found]
    console.print(table(rows))
  if _JSON.value:
    report.print_json(rows)


if __name__ == "__main__":
  entry.run(main)
