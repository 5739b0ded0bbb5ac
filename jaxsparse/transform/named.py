"""Published ways to train with few or small exchanges: one chain each, with the defaults of its paper."""

from typing import Literal

import optax

from jaxsparse._compat import AxisName
from jaxsparse.collectives import Collective, make_collective
from jaxsparse.transform.groups import Special
from jaxsparse.transform.local import local_steps
from jaxsparse.transform.update import collective_transform
from jaxsparse.types import Comm


def diloco(
  inner: optax.GradientTransformation,
  axis: AxisName | Comm,
  *,
  every: int = 500,
  learning_rate: optax.ScalarOrSchedule = 0.7,
  momentum: float = 0.9,
  collective: str | Collective = "dense",
) -> optax.GradientTransformation:
  """DiLoCo: H local steps, a dense average, and Nesterov's momentum on it (Douillard et al., 2023, Algorithm 1).

      sgd = optax.sgd(0.7, momentum=0.9, nesterov=True)
      js.local_steps(inner, optax.chain(js.dense_transform(axis), sgd), every=500)

  Args:
    inner: the optimizer of each worker; AdamW in the paper.
    axis: the name of the shard_map axis of the workers, a tuple of such names, or a
      comm.
    every: H.
    learning_rate: η of the outer step, a number or a schedule by the number of the
      exchange.
    momentum: μ of the outer step.
    collective: another exchange than the dense one, a name, with options as
      "spardl:density=0.01", or an instance.

  Raises:
    ValueError: for an `every` that is no whole number from 1 up, or a collective whose
      total differs between workers.

  Example:
    >>> import optax, jaxsparse as js
    >>> tx = js.diloco(optax.adamw(1e-3), "workers", every=30)
    >>> sparse = js.diloco(optax.adamw(1e-3), "workers", collective="spardl:density=0.01")
  """
  return streaming_diloco(
    inner,
    axis,
    fragments=1,
    every=every,
    delay=0,
    mixing=0.0,
    learning_rate=learning_rate,
    momentum=momentum,
    collective=collective,
  )


def streaming_diloco(
  inner: optax.GradientTransformation,
  axis: AxisName | Comm,
  *,
  fragments: int,
  every: int = 100,
  delay: int = 1,
  mixing: float = 0.5,
  learning_rate: optax.ScalarOrSchedule = 0.7,
  momentum: float = 0.9,
  collective: str | Collective = "dense",
) -> optax.GradientTransformation:
  """Streaming DiLoCo: the leaves in F fragments that are exchanged in turn (Douillard et al., 2025).

  One fragment is due every H/F steps: the largest number of words of a step is about
  1/F of that of `js.diloco`, and their sum over H steps is the same. An update is
  applied τ steps after its exchange. Differences from the paper: outer gradients are
  exchanged in 32 bits instead of 4, and the defaults of H, τ and α are ours. Those of
  the outer step are the defaults of `js.diloco`:

      sgd = optax.sgd(0.7, momentum=0.9, nesterov=True)
      outer = optax.chain(js.dense_transform(axis), sgd)
      js.local_steps(inner, outer, every=100, fragments=F, delay=1, mixing=0.5)

  Args:
    inner: the optimizer of each worker, which updates all leaves in each step; AdamW in
      the paper.
    axis: the name of the shard_map axis of the workers, a tuple of such names, or a
      comm.
    fragments: F, 1 … H.
    every: H.
    delay: τ, less than H/F.
    mixing: α, the weight of a worker's own parameters. With `fragments=1, delay=0,
      mixing=0` it is `js.diloco`.
    learning_rate: η of the outer step, a number or a schedule by the number of the
      exchange.
    momentum: μ of the outer step.
    collective: as in `js.diloco`.

  Raises:
    ValueError: for an argument outside its choices; when used, for fewer leaves than
      fragments.

  Example:
    >>> import optax, jaxsparse as js
    >>> tx = js.streaming_diloco(optax.adamw(1e-3), "workers", fragments=4, every=100)
  """
  # Traits may depend on the options in a label, as "spardl:density=0.01": an instance
  # is made.
  exchange = make_collective(collective)
  # The total of a collective with this trait is the same on every worker.
  if not exchange.traits.replicates:
    raise ValueError(
      f"diloco: the totals of {exchange.name} differ between workers, and so would the parameters after an exchange: "
      "choose a collective that averages"
    )
  # The outer momentum is DiLoCo's own; inner optimizers keep theirs between exchanges.
  sgd = optax.sgd(learning_rate, momentum=momentum, nesterov=True)
  outer = optax.chain(collective_transform(exchange, axis), sgd)
  return local_steps(
    inner, outer, every=every, fragments=fragments, delay=delay, mixing=mixing
  )


def sparseloco(
  inner: optax.GradientTransformation,
  axis: AxisName | Comm,
  *,
  every: int = 30,
  density: float = 1 / 64,
  decay: float = 0.95,
  learning_rate: optax.ScalarOrSchedule = 1.0,
  chunk: int = 4096,
) -> optax.GradientTransformation:
  """SparseLoCo: H local steps, then the top-k of each chunk in 2 bits a value (Sarfi et al., 2025).

  A residual that decays by β takes the place of outer momentum. A worker sends 24 words
  for a chunk of 4,096 entries, 10 bits for each of the 64 largest and four words, P − 1
  times: `js.costs.count("chunktopk", density=1 / 64, wire="2bit", ...)`. Differences
  from the authors' code: a chunk is consecutive entries, not a tile of 64 × 64, and is
  rounded by itself (`js.chunktopk_transform`).

      transform = js.chunktopk_transform(axis, density=1 / 64, decay=0.95, wire="2bit")
      js.local_steps(inner, optax.chain(transform, optax.sgd(1.0)), every=30)

  Args:
    inner: the optimizer of each worker; AdamW in the paper.
    axis: the name of the shard_map axis of the workers, a tuple of such names, or a
      comm.
    every: H.
    density: ρ, of the entries of each chunk.
    decay: β.
    learning_rate: α of the outer step, a number or a schedule by the number of the
      exchange.
    chunk: entries of a chunk.

  Raises:
    ValueError: for an argument outside its choices.

  Example:
    >>> import optax, jaxsparse as js
    >>> tx = js.sparseloco(optax.adamw(1e-3), "workers")
  """
  # Decay, 2 bits and chunks of 4,096 are the settings of the paper.
  collective = make_collective(
    "chunktopk", density=density, decay=decay, wire="2bit", chunk=chunk
  )
  return local_steps(
    inner,
    optax.chain(collective_transform(collective, axis), optax.sgd(learning_rate)),
    every=every,
  )


def demo_transform(
  axis: AxisName | Comm,
  *,
  learning_rate: optax.ScalarOrSchedule = 1e-3,
  density: float = 1 / 128,
  decay: float = 0.999,
  chunk: int = 4096,
  combine: Literal["workers", "contributors"] = "workers",
  special: Special | None = None,
) -> optax.GradientTransformation:
  """DeMo: momentum of each worker's own, of which only the largest DCT coefficients are exchanged (Peng et al., 2024).

  The residual is the momentum: `acc_w = g_w + β (what worker w has not delivered)`. The
  32 largest coefficients of each tile of 64 × 64 entries are delivered, `total = Cᵀ Σ_w
  top_k(C acc_w)`, and its sign moves the parameters:

      optax.chain(js.make_transform("dcttopk", axis, density=1 / 128, decay=0.999),
                  optax.scale_by_sign(), optax.scale_by_learning_rate(1e-3))

  The published code has the learning rate inside, `acc_w = η g_w + …`: the same while η
  is constant, as the sign has no scale. Weight decay is `optax.add_decayed_weights`
  after the sign, in a chain of your own.

  Args:
    axis: the name of the shard_map axis of the workers, a tuple of such names, or a
      comm.
    learning_rate: η, a number or a schedule.
    density: ρ, of the coefficients of each tile.
    decay: β.
    chunk: entries of a full tile, a square number.
    combine: "workers", or "contributors" as in the authors' code, which does not
      conserve: see `js.make_transform("dcttopk", …)`.
    special: other collectives for some leaves, as in `js.make_transform`; the sign is
      taken of their means as well.

  Raises:
    ValueError: for an argument outside its choices.

  Example:
    >>> import jax, jax.numpy as jnp, jaxsparse as js
    >>> mesh, params = jax.make_mesh((len(jax.devices()),), ("workers",)), jnp.zeros((8, 8))
    >>> tx = js.demo_transform("workers", learning_rate=0.01)
    >>> step = js.make_train_step(lambda p, batch: jnp.mean((p - batch.mean()) ** 2), tx, mesh)
    >>> params, state, metrics = step(params, js.init(tx, params, mesh), jnp.ones(len(jax.devices())))
    >>> params[0, :2]
    Array([0.01, 0.01], dtype=float32)
  """
  collective = make_collective(
    "dcttopk", density=density, decay=decay, chunk=chunk, combine=combine
  )
  return optax.chain(
    collective_transform(collective, axis, special),
    # Only the sign of each delivered entry moves the parameters.
    optax.scale_by_sign(),
    optax.scale_by_learning_rate(learning_rate),
  )
