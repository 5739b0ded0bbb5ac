r"""Hosts with several devices each, in the network lab: seconds a step, bytes that a host sends, and the loss.

A transformer over bytes (benchmarks/tasks/lm.py) is trained in three ways; a host is a process with CPU devices:

  dense    XLA's own: one program under jax.jit, tensor parallel inside a host, no jaxsparse in it
  flat     SparDL over all devices of all hosts, each of which is a worker with a copy of the parameters
  between  SparDL between hosts alone, tensor parallel inside

The batch is the same. Links between hosts are shaped, devices of a host meet in its memory, over gloo too: a collective
inside takes milliseconds on busy cores, whatever its size, so the model is one wide block. Bytes are those that the
network interface of a host has counted, headers included: the host that sent most, mean of the timed steps. Needs root.

Examples:
  python -m benchmarks.hierarchy
  python -m benchmarks.hierarchy --rate=100mbit --hosts=2 --devices=4 --way=dense,between
  python -m benchmarks.hierarchy --rate=none --json | jq '.[] | [.rate, .way, .seconds]'
"""

import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
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
from benchmarks import entry, netlab
from benchmarks.tasks import lm
from benchmarks.workers import make_console
from jaxsparse import launch

WAYS = ("dense", "flat", "between")
_BOTH = ("hosts", "devices")
_INTERFACES = pathlib.Path("/proc/self/net/dev")  # of the network namespace of this process

_RATE = flags.DEFINE_list("rate", ["1gbit", "100mbit"], "Speeds of the links, as tc writes them; none for any speed.")
_HOSTS = flags.DEFINE_integer("hosts", 3, "Hosts of the lab.")
_DEVICES = flags.DEFINE_integer("devices", 2, "Devices of each host.")
_WAY = flags.DEFINE_list("way", list(WAYS), "Ways to train.")
_WIDTH = flags.DEFINE_integer("width", 1536, "Of the transformer.")
_BLOCKS = flags.DEFINE_integer("blocks", 1, "Of the transformer.")
_BATCH = flags.DEFINE_integer("batch", 1, "Windows of 64 bytes for each device.")
_DENSITY = flags.DEFINE_float("density", 0.01, "Fraction of the entries that SparDL delivers.")
_STEPS = flags.DEFINE_integer("steps", 10, "Timed steps of each way.")
_ROWS = flags.DEFINE_string("rows", None, "Write the rows here and print nothing: how ranks tell who started them.")
_JSON = flags.DEFINE_bool(
  "json", False, "Print the rows as JSON on standard output, everything else on standard error."
)


class Row(NamedTuple):
  """One way to train at one rate.

  Attributes:
    rate: of the links.
    way: one of WAYS.
    n: number of parameters.
    seconds: of a step, median.
    bytes: that the host that sent most has sent in a step, mean; 0 without a network of its own.
    loss: of the last step.
  """

  rate: str
  way: str
  n: int
  seconds: float
  bytes: float
  loss: float


class Trained(NamedTuple):
  """A way to train: the step, and where it starts.

  Attributes:
    step: (params, state, batch) -> (params, state, loss).
    params: with the shardings of the way.
    state: of the optimizer.
  """

  step: Callable[[Any, Any, Any], tuple[Any, Any, jax.Array]]
  params: Any
  state: Any


def sharded(mesh: Mesh, leaf: jax.Array) -> NamedSharding:
  """Tensor parallel: a matrix that widens is cut by columns, the one that narrows again by rows; vectors are whole."""
  if leaf.ndim != 2:
    return NamedSharding(mesh, P())
  return NamedSharding(mesh, P(None, "devices") if leaf.shape[1] > leaf.shape[0] else P("devices"))


def way_of(name: str, mesh: Mesh, params: Any, loss_fn: Callable, density: float) -> Trained:
  """The step and the start of a way; `params` are those of the host."""
  if name == "flat":
    return _by_jaxsparse(mesh, params, loss_fn, _BOTH, density)
  params = _placed(params, jax.tree.map(lambda leaf: sharded(mesh, leaf), params))
  if name == "between":
    return _by_jaxsparse(mesh, params, loss_fn, "hosts", density)
  rest = _descent()
  state = rest.init(params)

  def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, state = rest.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  kept = jax.tree.map(lambda leaf: leaf.sharding, (params, state))
  return Trained(jax.jit(step, out_shardings=(*kept, NamedSharding(mesh, P())), donate_argnums=(0, 1)), params, state)


def _descent() -> optax.GradientTransformation:
  return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))


def _by_jaxsparse(mesh: Mesh, params: Any, loss_fn: Callable, axis: Any, density: float) -> Trained:
  tx = optax.chain(js.spardl_transform(axis, density=density), _descent())
  state = js.init(tx, params, mesh, axis=axis)
  own = js.make_train_step(loss_fn, tx, mesh, axis=axis)

  def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
    params, state, metrics = own(params, state, batch)
    return params, state, metrics.loss

  return Trained(step, params, state)


def _placed(tree: Any, shardings: Any) -> Any:
  """Arrays of every process, from the same whole array on each of them."""
  put = lambda x, sharding: jax.make_array_from_callback(x.shape, sharding, np.asarray(x).__getitem__)
  return jax.tree.map(put, tree, shardings)


def measured(name: str, mesh: Mesh, rate: str, width: int, blocks: int, batch: int, density: float, steps: int) -> Row:
  """Trains in one way, and times all steps but the first two.

  Raises:
    RuntimeError: if the loss does not fall.
  """
  graph, params = nnx.split(lm.Transformer(nnx.Rngs(0), width=width, blocks=blocks), nnx.Param)
  n = sum(leaf.size for leaf in jax.tree.leaves(params))

  def loss_fn(params: Any, batch: Any) -> jax.Array:
    logits = nnx.merge(graph, params)(batch["input"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

  way, text = way_of(name, mesh, params, loss_fn, density), lm.batches(lm.load().train, batch * mesh.size, seed=0)
  split, step, params, state = NamedSharding(mesh, P(_BOTH if name == "flat" else "hosts")), *way
  times, losses, sent = [], [], 0
  for number in range(steps + 2):
    given = next(text)
    given = _placed(given, jax.tree.map(lambda _: split, given))
    if number == 2:
      sent = sent_bytes()
    start = time.perf_counter()
    params, state, loss = step(params, state, given)
    losses.append(float(jax.block_until_ready(loss).addressable_data(0)))
    jax.block_until_ready(params)
    times.append(time.perf_counter() - start)
  if not np.mean(losses[-3:]) < losses[0]:
    raise RuntimeError(
      f"{name}: the loss does not fall, {losses[0]:.3f} at first and {np.mean(losses[-3:]):.3f} at last"
    )
  most = largest(mesh, [(sent_bytes() - sent) / steps, statistics.median(times[2:])])
  return Row(rate, name, n, most[1], most[0], losses[-1])


def sent_bytes() -> int:
  """Bytes that the network interfaces of this host have sent, but for the one to itself; 0 where it has no others."""
  lines = _INTERFACES.read_text().splitlines()[2:] if _INTERFACES.exists() else []
  found = [line.partition(":") for line in lines]
  return sum(int(counts.split()[8]) for name, _, counts in found if name.strip() != "lo")


def largest(mesh: Mesh, values: list[float]) -> list[float]:
  """Element-wise maximum over the hosts, on each of them."""
  rows = np.broadcast_to(np.array(values, np.float32), (mesh.size, len(values)))
  every = jax.make_array_from_callback(rows.shape, NamedSharding(mesh, P(_BOTH)), rows.__getitem__)
  found = jax.jit(lambda x: x.max(0), out_shardings=NamedSharding(mesh, P()))(every)
  return np.asarray(found.addressable_data(0)).tolist()


def table(rows: list[Row]) -> rich.table.Table:
  """The rows, those of one rate together."""
  size = f"{rows[0].n:,} parameters, {_HOSTS.value} hosts with {_DEVICES.value} devices each"
  result = rich.table.Table(title=f"{size}, density {_DENSITY.value:g}")
  for head in ("rate", "way"):
    result.add_column(head, no_wrap=True)
  for head in ("s a step", "dense / this", "MB a host", "flat / this", "loss"):
    result.add_column(head, justify="right", no_wrap=True)
  for number, row in enumerate(rows):
    own = {other.way: other for other in rows if other.rate == row.rate}
    dense, flat = own.get("dense"), own.get("flat")
    result.add_row(
      row.rate,
      row.way,
      f"{row.seconds:.3f}",
      f"{dense.seconds / row.seconds:.2f}" if dense else "–",
      f"{row.bytes / 1e6:.3f}",
      f"{flat.bytes / row.bytes:.2f}" if flat and row.bytes else "–",
      f"{row.loss:.3f}",
      end_section=number + 1 == len(rows) or rows[number + 1].rate != row.rate,
    )
  return result


def _rank(path: pathlib.Path) -> None:
  """Measures in a rank of the lab; rank 0 writes the rows."""
  launch.join()
  shape = (_HOSTS.value, _DEVICES.value)
  mesh = jax.make_mesh(shape, _BOTH, axis_types=(AxisType.Auto,) * 2)
  sizes = (_WIDTH.value, _BLOCKS.value, _BATCH.value, _DENSITY.value, _STEPS.value)
  rows = [measured(name, mesh, _RATE.value[0], *sizes) for name in _WAY.value]
  if jax.process_index() == 0:
    path.write_text(json.dumps(rows))


def _lab(rate: str, path: pathlib.Path) -> list[Row]:
  """Starts a rank on each host of a lab whose links are that fast, and reads the rows."""
  command = [sys.executable, "-m", "benchmarks.hierarchy", *sys.argv[1:], f"--rate={rate}", f"--rows={path}"]
  with netlab.lab(_HOSTS.value, None if rate == "none" else rate) as hosts:
    launch.run(command, _HOSTS.value, devices=_DEVICES.value, hosts=hosts)
  return [Row(*row) for row in json.loads(path.read_text())]


def main() -> None:
  """Measures every way at every rate, and reports."""
  for name in _WAY.value or [""]:
    if name not in WAYS:
      raise ValueError(f"--way={name}, choose from {', '.join(WAYS)}")
  for flag, least in ((_HOSTS, 2), (_DEVICES, 1), (_BLOCKS, 1), (_BATCH, 1), (_STEPS, 3)):
    if flag.value < least:
      raise ValueError(f"--{flag.name}={flag.value}, choose at least {least}")
  if launch.is_rank():
    if not _ROWS.value:
      raise ValueError("the lab starts its own ranks: run this as one program")
    _rank(pathlib.Path(_ROWS.value))
    return
  console, rows = make_console(stderr=_JSON.value), []
  with tempfile.TemporaryDirectory() as folder:
    for rate in _RATE.value:
      rows += _lab(rate, pathlib.Path(folder) / "rows.json")
      console.print(table(rows))
  if _JSON.value:
    print(json.dumps([row._asdict() for row in rows]))


if __name__ == "__main__":
  entry.run(main)
