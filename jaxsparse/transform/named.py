"""Published ways to train with few exchanges, each one call of `js.local_steps` with the defaults of its paper."""

import optax

from jaxsparse._compat import AxisName
from jaxsparse.collectives import Collective, make_collective
from jaxsparse.transform.local import local_steps
from jaxsparse.transform.update import transform_of
from jaxsparse.types import Comm


def diloco(
  inner: optax.GradientTransformation,
  axis: AxisName | Comm,
  *,
  every: int = 500,
  learning_rate: optax.ScalarOrSchedule = 0.7,
  momentum: float = 0.9,
  collective: Collective | None = None,
) -> optax.GradientTransformation:
  """DiLoCo: H local steps, a dense average, and Nesterov's momentum on it (Douillard et al., 2023, Algorithm 1).

      outer = optax.chain(js.dense_transform(axis), optax.sgd(0.7, momentum=0.9, nesterov=True))
      js.local_steps(inner, outer, every=500)

  Args:
    inner: the optimizer of each worker; AdamW in the paper.
    axis: the name of the shard_map axis of the workers, a tuple of such names, or a comm.
    every: H.
    learning_rate: η of the outer step, a number or a schedule by the number of the exchange.
    momentum: μ of the outer step.
    collective: from `js.make_collective`, another exchange than the dense one.

  Raises:
    ValueError: for an `every` that is no whole number from 1 up.

  Example:
    >>> import optax, jaxsparse as js
    >>> tx = js.diloco(optax.adamw(1e-3), "workers", every=30)
    >>> sparse = js.diloco(optax.adamw(1e-3), "workers", collective=js.make_collective("spardl", density=0.01))
  """
  transform = transform_of(collective or make_collective("dense"), axis)
  return local_steps(
    inner, optax.chain(transform, optax.sgd(learning_rate, momentum=momentum, nesterov=True)), every=every
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

  A residual that decays by β takes the place of outer momentum. A worker sends 36 words for a chunk of 4,096 entries:
  16 bits for each of the 64 largest and four words: `js.costs.count("chunktopk", density=1 / 64, wire="2bit", ...)`.

      transform = js.chunktopk_transform(axis, density=1 / 64, decay=0.95, wire="2bit")
      js.local_steps(inner, optax.chain(transform, optax.sgd(1.0)), every=30)

  Args:
    inner: the optimizer of each worker; AdamW in the paper.
    axis: the name of the shard_map axis of the workers, a tuple of such names, or a comm.
    every: H.
    density: ρ, of the entries of each chunk.
    decay: β.
    learning_rate: α of the outer step, a number or a schedule by the number of the exchange.
    chunk: entries of a chunk.

  Raises:
    ValueError: for an argument outside its choices.

  Example:
    >>> import optax, jaxsparse as js
    >>> tx = js.sparseloco(optax.adamw(1e-3), "workers")
  """
  collective = make_collective("chunktopk", density=density, decay=decay, wire="2bit", chunk=chunk)
  return local_steps(inner, optax.chain(transform_of(collective, axis), optax.sgd(learning_rate)), every=every)
