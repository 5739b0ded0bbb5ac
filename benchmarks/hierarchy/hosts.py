"""Trains hosts with several devices each in the ways that `benchmarks.hierarchy` compares, and times the steps."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from benchmarks.netlab import sent_bytes
from benchmarks.tasks import lm

WAYS = ("dense", "flat", "between")
AXES = ("hosts", "devices")


class Row(NamedTuple):
  """One way to train at one rate."""

  rate: str  # of the links
  way: str  # one of WAYS
  n: int  # number of parameters
  seconds: float  # of a step, median
  bytes: float  # that the host that sent most has sent in a step, mean; 0 without a network of its own
  loss: float  # of the last step


class Trained(NamedTuple):
  """A way to train: the step, and where it starts."""

  step: Callable[[Any, Any, Any], tuple[Any, Any, jax.Array]]  # (params, state, batch) -> (params, state, loss)
  params: Any  # with the shardings of the way
  state: Any  # of the optimizer


def sharded(mesh: Mesh, leaf: jax.Array) -> NamedSharding:
  """Tensor parallel: a matrix that widens is cut by columns, the one that narrows again by rows; vectors are whole."""
  if leaf.ndim != 2:
    return NamedSharding(mesh, P())
  return NamedSharding(mesh, P(None, "devices") if leaf.shape[1] > leaf.shape[0] else P("devices"))


def way_of(name: str, mesh: Mesh, params: Any, loss_fn: Callable, density: float) -> Trained:
  """The step and the start of a way; `params` are those of the host."""
  if name == "flat":
    return _by_jaxsparse(mesh, params, loss_fn, AXES, density)
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
  """Trains in one way, and times all steps but the first two."""
  graph, params = nnx.split(lm.Transformer(nnx.Rngs(0), width=width, blocks=blocks), nnx.Param)
  n = sum(leaf.size for leaf in jax.tree.leaves(params))

  def loss_fn(params: Any, batch: Any) -> jax.Array:
    logits = nnx.merge(graph, params)(batch["input"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

  way, text = way_of(name, mesh, params, loss_fn, density), lm.batches(lm.load().train, batch * mesh.size, seed=0)
  split, step, params, state = NamedSharding(mesh, P(AXES if name == "flat" else "hosts")), *way
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


def largest(mesh: Mesh, values: list[float]) -> list[float]:
  """Element-wise maximum over the hosts, on each of them."""
  rows = np.broadcast_to(np.array(values, np.float32), (mesh.size, len(values)))
  every = jax.make_array_from_callback(rows.shape, NamedSharding(mesh, P(AXES)), rows.__getitem__)
  found = jax.jit(lambda x: x.max(0), out_shardings=NamedSharding(mesh, P()))(every)
  return np.asarray(found.addressable_data(0)).tolist()
