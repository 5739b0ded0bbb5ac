"""All-gather and reduce-scatter in a few bits an entry, for parameters that are divided over workers (FSDP, ZeRO-3)."""

import functools

import jax
import jax.numpy as jnp

from jaxsparse._compat import AxisName, varying
from jaxsparse.comm import all_gather as gather_rows
from jaxsparse.comm import axes_of, comm_of, in_rank_order
from jaxsparse.low_bit.blocks import BitBlocks
from jaxsparse.types import Comm


def all_gather(
  x: jax.Array, axis: AxisName | Comm, *, bits: int = 8, dimension: int = 0
) -> jax.Array:
  """The parts of all workers along `dimension`, each as Q rounds it to b bits an entry: `jax.lax.all_gather`, tiled.

      result = concatenate(Q(x₀), …, Q(x_{P−1}))      the same bits on every worker: its own part is rounded, too

  For the weights of FSDP: each worker keeps its part unrounded, and a step gathers the
  parts that it needs. The gradient of x is `psum_scatter` of the gradient of the
  result, with the same `bits`. Q rounds as `js.nbit_transform` does, with a step for
  each 32 entries; rounding errors are not kept.

  Each worker sends ⌈log₂P⌉ messages, with P − 1 parts in all. With 8 bits an entry they
  have about 0.25 times the words of float32, with 4 bits 0.13 times.

  Args:
    x: float[…], the part of this worker; the same shape at all.
    axis: the name of the shard_map axis of the workers, a tuple of such names, or a
      comm.
    bits: b, of an entry: 2, 4 or 8.
    dimension: the dimension of x along which the parts follow each other.

  Raises:
    ValueError: for other bits or a dimension that x does not have.
    TypeError: for an x that is not floating.

  Example:
    >>> import jax, jax.numpy as jnp, jaxsparse as js
    >>> gather = jax.vmap(lambda part: js.all_gather(part, js.SimComm("w"), bits=8), axis_name="w")
    >>> gather(jnp.array([[1.0, -2.0], [3.0, 0.0]]))[0].round(1)
    Array([ 1., -2.,  3.,  0.], dtype=float32)
  """
  _check("all_gather", x, bits, dimension)
  comm = comm_of(axis)
  return _gather(_typed(x, comm), comm, bits, dimension % x.ndim)


def psum_scatter(
  x: jax.Array, axis: AxisName | Comm, *, bits: int = 8, dimension: int = 0
) -> jax.Array:
  """The sum over workers, of which each keeps its part, in b bits an entry: `jax.lax.psum_scatter`, tiled.

      result_w = part w of  x_w + Σ_{v ≠ w} Q(x_v)      added in the order of workers

  For the gradients of FSDP. The gradient of x is `all_gather` of the gradient of the
  result, with the same `bits`. Q is that of `all_gather`; rounding errors are lost,
  some 0.005 % of a gradient's energy with 8 bits and 1 % with 4.

  Each worker sends P − 1 messages of one part, none of which waits for another.

  Args:
    x: float[…], a term of the sum.
    axis: as in `all_gather`.
    bits: as in `all_gather`.
    dimension: the dimension of x that is divided over workers.

  Raises:
    ValueError: for other bits, a dimension that x does not have, or one whose length is
      no multiple of P.
    TypeError: for an x that is not floating.

  Example:
    >>> import jax, jax.numpy as jnp, jaxsparse as js
    >>> scatter = jax.vmap(lambda x: js.psum_scatter(x, js.SimComm("w"), bits=8), axis_name="w")
    >>> scatter(jnp.array([[1.0, -2.0], [3.0, 0.0]])).round(1).tolist()
    [[4.0], [-2.0]]
  """
  _check("psum_scatter", x, bits, dimension)
  comm = comm_of(axis)
  if x.shape[dimension] % comm.size:
    raise ValueError(
      f"psum_scatter: {comm.size} workers do not divide dimension {dimension} of {x.shape}: pad it"
    )
  return _scatter(_typed(x, comm), comm, bits, dimension % x.ndim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(
  x: jax.Array,
  comm: Comm,
  bits: int,
  dimension: int,
) -> jax.Array:
  """`all_gather`, whose gradient is `psum_scatter` of the gradient of the result, rounded to as many bits."""
  if not x.size:
    return x.reshape(_shape(x, dimension, x.shape[dimension] * comm.size))
  # One region: a message has all blocks of the part of this worker.
  layout = BitBlocks.of(x.size, 1, bits)
  message = _encode(_flat(x), layout)
  messages = in_rank_order(comm, gather_rows(comm, message))
  rows = jax.vmap(functools.partial(_decode, layout=layout))(messages)
  parts = jnp.moveaxis(rows.reshape(comm.size, *x.shape), 0, dimension)
  # the parts one after the other along their dimension
  return parts.reshape(_shape(x, dimension, -1)).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _scatter(
  x: jax.Array,
  comm: Comm,
  bits: int,
  dimension: int,
) -> jax.Array:
  """`psum_scatter`, whose gradient is `all_gather` of the gradient of the result, rounded to as many bits."""
  if not x.size:
    return x.reshape(_shape(x, dimension, x.shape[dimension] // comm.size))
  # row w is the part of worker w
  parts = jnp.stack(jnp.split(x, comm.size, dimension))
  shape = parts.shape[1:]
  rows = jax.vmap(_flat)(parts)
  # One region: a message has all blocks of the part of its receiver.
  layout = BitBlocks.of(rows.shape[1], 1, bits)
  messages = jax.vmap(functools.partial(_encode, layout=layout))(rows)
  received = comm.all_to_all(messages)
  own_row = rows[comm.rank]

  def add(worker: jax.Array, total: jax.Array) -> jax.Array:
    received_row = _decode(received[worker], layout)
    # The own part is not rounded. All workers add in rank order.
    return total + jnp.where(worker == comm.rank, own_row, received_row)

  total = varying.fori_loop(0, comm.size, add, jnp.zeros_like(own_row))
  return total.reshape(shape).astype(x.dtype)


def _encode(row: jax.Array, layout: BitBlocks) -> jax.Array:
  """The message u32[words] of f32[n]."""
  codes, scales, _ = layout.encode((row,), jnp.int32(0), layout.count)
  return layout.pack(codes, scales)[0]


def _decode(message: jax.Array, layout: BitBlocks) -> jax.Array:
  """The entries f32[n] of a message."""
  return layout.decode(*layout.unpack(message[None])).reshape(-1)[: layout.n]


def _forward(primal, x, comm, bits, dimension):  # type: ignore[no-untyped-def]
  return primal(x, comm, bits, dimension), None


def _backward(transpose, comm, bits, dimension, _, cotangent):  # type: ignore[no-untyped-def]
  return (transpose(cotangent, comm, bits, dimension),)


# Each is the transpose of the other, with the rounding taken for the identity.
_gather.defvjp(
  functools.partial(_forward, _gather), functools.partial(_backward, _scatter)
)
_scatter.defvjp(
  functools.partial(_forward, _scatter), functools.partial(_backward, _gather)
)


def _shape(x: jax.Array, dimension: int, length: int) -> tuple[int, ...]:
  """The shape of x with another length of `dimension`."""
  return *x.shape[:dimension], length, *x.shape[dimension + 1 :]


def _flat(x: jax.Array) -> jax.Array:
  return x.reshape(-1).astype(jnp.float32)


def _typed(x: jax.Array, comm: Comm) -> jax.Array:
  """x, typed as varying over the axes of the workers, as its gradient is.

  A shard_map that checks replication wants x and its gradient to be of one type.
  """
  return varying.as_varying(x, frozenset(axes_of(comm) or ()) & varying.checked_axes())


def _check(function: str, x: jax.Array, bits: int, dimension: int) -> None:
  if bits not in (2, 4, 8):
    raise ValueError(f"{function}: bits={bits!r}, choose one of 2, 4 and 8")
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise TypeError(f"{function}: entries are {x.dtype}, give floating ones")
  if not -x.ndim <= dimension < x.ndim:
    raise ValueError(f"{function}: dimension={dimension!r}, x has {x.ndim} dimensions")
