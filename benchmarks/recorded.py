"""Records the gradients of every worker in a training, for benchmarks to time real ones in the order they came.

Eight workers train `lm.small` (136,896 parameters, 4 windows of text each) with SparDL
at 1 % and SGD at 0.3; gradients of steps 200 … 299 are kept in --cache_dir, 438 MB. A
gradient of n entries repeats the model: copy c is the whole one with a sign, a scale of
1/2 … 2 and a first step of its own, the same on every worker and in every step. Workers
beyond the eighth begin 37 steps later each round.
"""

import itertools
import math
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxsparse as js
from benchmarks import entry, workers
from benchmarks.tasks import lm
from benchmarks.tasks.base import model_of
from jaxsparse.arrays import flatten
from jaxsparse.train.engine import Engine, engine_of

_WORKERS, _SKIPPED, _STEPS = 8, 200, 100  # recorded ones; steps before; recorded steps
_BATCH, _RATE, _DENSITY = 4, 0.3, 0.01  # windows of text a worker; rate of SGD
_SHIFT = 37  # steps by which workers that share a recorded one are apart


def path_in(folder: str | pathlib.Path) -> pathlib.Path:
  """The file of the recording, f32[workers, steps, parameters], in a cache folder."""
  return pathlib.Path(folder) / f"gradients-lm-{lm.load().digest[:8]}.npy"


def record(
  path: pathlib.Path, size: int = _WORKERS, skipped: int = _SKIPPED, steps: int = _STEPS
) -> None:
  """Trains, and writes the gradients of `size` workers in `steps` steps behind the first `skipped` ones.

  The file is f32[size, steps, parameters]; it has its name once it is complete.
  """
  task = lm.small()
  model = model_of(task, seed=0)
  # The same parameters on all workers, and a batch of each.
  gradient = jax.jit(jax.vmap(jax.grad(model.plain_loss), (None, 0)))
  rows = jax.jit(jax.vmap(lambda grads: flatten.flatten(grads)[0]))
  path.parent.mkdir(parents=True, exist_ok=True)
  beside = path.with_suffix(".new")
  file = np.lib.format.open_memmap(
    beside, "w+", np.float32, (size, steps, task.entries)
  )
  params, state = model.params, None
  for number, batch in enumerate(
    itertools.islice(task.stream(0, size, _BATCH), skipped + steps)
  ):
    grads = gradient(
      params, jax.tree.map(lambda x: x.reshape(size, _BATCH, *x.shape[1:]), batch)
    )
    if number >= skipped:
      file[:, number - skipped] = rows(grads)
    done = js.simulate("spardl", grads, state=state, density=_DENSITY)
    params, state = (
      jax.tree.map(lambda p, total: p - _RATE / size * total, params, done.total),
      done.state,
    )
  file.flush()
  beside.rename(path)


def gradients(
  place: workers.Workers, path: pathlib.Path, n: int
) -> Callable[[int], jax.Array]:
  """A function from a step to the gradients of all workers, f32[n] each, of a recording."""
  engine = engine_of(place.where, "workers")
  recording = np.load(path, mmap_mode="r")
  size, steps, entries = recording.shape
  # A gradient of n entries repeats the model; each copy has a first step and a scale.
  copies = math.ceil(n / entries)
  random = np.random.default_rng(0)
  first = random.integers(0, steps, copies).astype(np.int32)
  scales = (random.choice([-1, 1], copies) * 2 ** random.uniform(-1, 1, copies)).astype(
    np.float32
  )

  # own: f32[steps, entries], the recording of one worker
  def make(own: jax.Array, step: jax.Array) -> jax.Array:
    # Workers beyond the recorded ones have the recording of another, some steps apart.
    late = _SHIFT * (engine.comm.rank // size)
    return (own[(step + first + late) % steps] * scales[:, None]).ravel()[:n]

  split = PartitionSpec("workers")
  program, own = (
    engine.jit(make, (split, PartitionSpec()), split),
    _placed(engine, place, recording),
  )
  return lambda step: program(own, np.int32(step))


def _placed(engine: Engine, place: workers.Workers, recording: np.ndarray) -> jax.Array:
  """The recorded steps of all workers, one worker's after the other's, where the engine wants its arrays."""
  size, steps, entries = recording.shape
  of_workers = lambda own: np.concatenate([recording[worker % size] for worker in own])
  # A rank of MPI and the simulator have no mesh: arrays of their workers alone.
  if not isinstance(place.where, Mesh):
    rows = place.share(1)
    return jnp.asarray(of_workers(range(rows.start, rows.stop)))
  shape, sharding = (
    (engine.workers * steps, entries),
    NamedSharding(place.where, PartitionSpec("workers")),
  )
  # first rows of the workers of one device
  own = lambda index: range(engine.workers * steps)[index[0]][::steps]
  return jax.make_array_from_callback(
    shape, sharding, lambda index: of_workers(row // steps for row in own(index))
  )


def main() -> None:
  """Records, unless that was done."""
  path = path_in(flags.FLAGS.cache_dir)
  if not path.exists():
    record(path)
  print(f"recorded gradients: {path}")


# the flag as well: who imports this module has one of the same name
if __name__ == "__main__":
  entry.define_cache_dir()
  entry.run(main)
