"""A part of a worker of rounds: `python parts_trainer.py ADDRESS WORKER PART PORT FOLDER OPTIONS`; options in JSON."""

import contextlib
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import jaxsparse as js

START = {
  "b": np.arange(5, dtype=np.float32),
  "w": np.arange(48, dtype=np.float32).reshape(8, 6),
}


def start(dtype="float32"):
  """The parameters at the start, whose weights have this dtype."""
  return START | {"w": START["w"].astype(jnp.dtype(dtype))}


def outer(comm):
  return optax.chain(js.dense_transform(comm), optax.sgd(1.0, momentum=0.5))


def choosing(comm):
  return optax.chain(js.make_transform("topka", comm, density=0.5), optax.sgd(1.0))


def moves(worker, step):
  """What a worker moves in a step: multiples of 1/8, so that no sum rounds."""
  factor = (worker + 1) * (1 + step % 3) / 8
  return jax.tree.map(
    lambda leaf: (factor * (1 + np.arange(leaf.size) % 7)).reshape(leaf.shape), START
  )


def place(params):
  """Replicated biases, and weights that are sharded over as many rows as there are devices, or else columns."""
  mesh = jax.make_mesh((jax.device_count(),), ("devices",))
  rows = (
    PartitionSpec("devices")
    if 8 % jax.device_count() == 0
    else PartitionSpec(None, "devices")
  )
  specs = {"b": PartitionSpec(), "w": rows}
  make = lambda leaf, spec: jax.make_array_from_callback(
    leaf.shape, NamedSharding(mesh, spec), leaf.__getitem__
  )
  return jax.tree.map(make, params, specs)


def train(worker, number, steps, nan=None, meets=False):
  """The parameters after steps first, first + 1, … of a worker; that of number `nan` is not finite at worker 1.

  With `meets` up to the first round of workers 0 and 1.
  """
  params = worker.params
  step = jax.jit(
    lambda params, moved: jax.tree.map(
      lambda leaf, more: leaf - more.astype(leaf.dtype), params, moved
    )
  )
  for count in range(*steps):
    moved = moves(number, count)
    if (number, count) == (1, nan):
      moved["w"][-1, -1] = np.nan
    params = worker.step(step(params, moved))
    if meets and worker.group.members == (0, 1):
      break
  return params


def flat(tree):
  return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def as_float32(tree):
  """A file of numpy has no bfloat16."""
  return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), tree)


def report(exchanger, path):
  """Saves what a part has after each round: its number, the anchor, the residual, and what was given, weighted."""
  commit = exchanger.commit

  def commit_and_save():
    given = flat(exchanger.delta)
    position = commit()
    weight = exchanger.group.weights[exchanger.group.members.index(exchanger._worker)]
    found = {
      "given": weight * given,
      "residual": exchanger.outer.residual(exchanger.anchor),
      "base": position.base,
    }
    np.savez(
      f"{path}.{position.round}.npz", vector=flat(exchanger.anchor.params), **found
    )
    return position

  exchanger.commit = commit_and_save


def main(address, number, part, port, folder, parts, devices, steps, **options):
  jax.config.update("jax_num_cpu_devices", devices)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(
    f"127.0.0.1:{port}", parts, part, heartbeat_timeout_seconds=10
  )
  chain = choosing if options.pop("sparse", False) else outer
  if options.pop("dies", None) == part:
    # computes, which is too early above
    from tests.partial.round_trainer import (
      die_in_a_round,
    )

    die_in_a_round(after=2)
  catches = options.pop("catches", False)
  nan = options.pop("nan", None)
  meets = options.pop("meets", False)
  # the numbers of the parts whose states the parts go on from
  saved = options.pop("saved", [])
  state = dict(np.load(f"{folder}/{number}.{saved[part]}.npz")) if saved else None
  params = place(start(options.pop("dtype", "float32")))
  if options.pop("own_keys", False):
    options["keys"] = js.partial.Keys.read(f"{folder}/keys.{number}")
  with (
    contextlib.suppress(RuntimeError if catches else ()),
    js.partial.Rounds(address, number, params, chain, state=state, **options) as worker,
  ):
    report(worker._exchanger, f"{folder}/{number}.{part}")
    began = worker.round
    params = train(worker, number, steps, nan, meets)
    whole = as_float32(multihost_utils.process_allgather(params, tiled=True))
    found = {
      "began": began,
      "round": worker.round,
      "vector": flat(worker._exchanger.anchor.params),
    }
    np.savez(f"{folder}/{number}.{part}.npz", **found, **worker.state, **whole)


if __name__ == "__main__":
  main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5], **json.loads(sys.argv[6]))
