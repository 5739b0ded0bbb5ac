"""Vectors that consist of low-rank matrices, row by row, and other vectors, computed where they are written.

A vector f32[n] is given by its pieces, one after the other: each f32[m], or (L f32[r,
a], R f32[r, b]) for LᵀR. A product of factors of few rows costs no more than the read
of its entries.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxsparse import _compat
from jaxsparse._compat import varying
from jaxsparse.arrays import noise

Piece = jax.Array | tuple[jax.Array, jax.Array]


def dense(x: Sequence[Piece]) -> jax.Array:
  """All entries of the vector, f32[n].

  Example:
    >>> factors = jnp.array([[1.0, 2.0]]), jnp.array([[1.0, 3.0]])
    >>> dense([factors, jnp.ones(1)])
    Array([1., 3., 2., 6., 1.], dtype=float32)
  """
  return jnp.concatenate([_matrix(piece).reshape(-1) for piece in x])


def dense_if(finite: jax.Array, x: Sequence[Piece]) -> jax.Array:
  """All entries of the vector, f32[n], or zeros unless `finite`, bool[].

  Example:
    >>> dense_if(jnp.bool_(True), [jnp.ones(1), jnp.zeros(1)])
    Array([1., 0.], dtype=float32)
  """
  # The small factors are chosen between, not the n entries.
  zeroed = lambda array: jnp.where(finite, array, 0.0)
  return dense(jax.tree.map(zeroed, x))


def subtract(
  x: Sequence[Piece],
  grads: jax.Array,
  residual: jax.Array,
  finite: jax.Array,
  decay: float,
) -> jax.Array:
  """`decay * (grads + residual - x)`, f32[n], in the buffer of `residual`, which is returned unless `finite`, bool[].

  Example:
    >>> subtract([jnp.ones(1), jnp.zeros(1)], jnp.array([3.0, 2.0]), jnp.array([0.0, 1.0]), jnp.bool_(True), 0.5)
    Array([1. , 1.5], dtype=float32)
  """
  shapes = [jax.eval_shape(_matrix, piece).shape for piece in x]
  sizes = list(map(math.prod, shapes))
  place_of = lambda size, end: slice(end - size, end)
  places = list(map(place_of, sizes, itertools.accumulate(sizes)))

  def at_once() -> jax.Array:
    # One kernel on a GPU.
    return jnp.where(finite, decay * (grads + residual - dense(x)), residual)

  def in_place() -> jax.Array:
    # Each piece is read from what is written so far: else XLA would copy the buffer.
    into = residual
    for place, piece in zip(places, x, strict=True):
      old = into[place]
      new = decay * (grads[place] + old - _matrix(piece).reshape(-1))
      kept = jnp.where(finite, new, old)
      into = jax.lax.dynamic_update_slice(into, kept, (place.start,))
    return into

  def stored_first() -> jax.Array:
    # XLA for CPUs stores the pieces that a conditional returns, each by a loop over its
    # rows, before any is copied to its place.
    cut = lambda flat: [
      flat[place].reshape(shape) for place, shape in zip(places, shapes, strict=True)
    ]
    sums = list(map(jnp.add, cut(grads), cut(residual)))
    new = lambda: [
      decay * (entries - _matrix(piece)) for entries, piece in zip(sums, x, strict=True)
    ]
    # Cut in the conditional: parts that it is given are copies of the whole residual.
    old = lambda: cut(residual)
    into = residual
    for place, piece in zip(places, varying.cond(finite, new, old), strict=True):
      into = jax.lax.dynamic_update_slice(into, piece.reshape(-1), (place.start,))
    return into

  # On CPU the other ways take 1.3 and 2 to 3.5 times the CPU time of an update. In place
  # an H100 runs 57 kernels for VGG-16, at once 1; a TPU moves 1.14 times the bytes of an
  # update at once, and stores n entries more.
  return _compat.by_platform(cpu=stored_first, gpu=at_once, default=in_place)()


def _matrix(piece: Piece) -> jax.Array:
  """A piece, f32[m] or f32[a, b]."""
  if isinstance(piece, jax.Array):
    return piece
  # a sum of outer products, which XLA computes where it is written; no product of
  # matrices, whose result would be stored
  outer = lambda column, row: column[:, None] * row[None]
  return functools.reduce(jnp.add, map(outer, *piece))


def orthonormal(factors: Sequence[jax.Array], key: jax.Array) -> jax.Array:
  """Bases f32[S, r, most] of S factors f32[a, r], r ≤ a ≤ most: rows of length a, zeros behind them.

  The rows are orthonormal, and each column of the factor is a sum of them, by
  Householder reflections of all factors at once. They are orthonormal for columns that
  depend on each other, too. A column of zeros is replaced by a random one. The QR of
  `jnp.linalg` calls LAPACK, and two batches of it at once block each other on CPUs with
  few cores (JAX 0.10.2).

  Example:
    >>> from jaxsparse.arrays import noise
    >>> (basis,) = jax.jit(orthonormal)([jnp.array([[3.0, 3.0], [0.0, 1.0], [4.0, 4.0]])], noise.key_of(0))
    >>> jnp.abs(basis.round(3))
    Array([[0.6, 0. , 0.8],
           [0. , 1. , 0. ]], dtype=float32)
  """
  if not factors:
    return jnp.zeros((0, 0, 0), jnp.float32)
  x = _scaled_columns(factors, key)
  # The state of the loop: the columns that are left, the vectors v of the reflections
  # I − scale v vᵀ so far, f32[S, r, most], and their scales, f32[S, r].
  scales = jnp.zeros(x.shape[:2], jnp.float32)
  start = x, jnp.zeros_like(x), scales
  _, vectors, scales = varying.fori_loop(0, x.shape[1], _reflect, start)
  return _basis(vectors, scales)


def _scaled_columns(factors: Sequence[jax.Array], key: jax.Array) -> jax.Array:
  """The columns of all factors, f32[S, r, most], each divided by its largest magnitude; random for those of zeros."""
  lengths = [len(factor) for factor in factors]
  most = max(lengths)
  pad = lambda factor: jnp.pad(factor.T, ((0, 0), (0, most - len(factor))))
  x = jnp.stack(list(map(pad, factors)))
  largest = jnp.abs(x).max(2, keepdims=True)
  # Random columns, too, have zeros behind the length of a shorter factor, so that the
  # rows of its basis have them.
  inside = jnp.arange(most)[None] < jnp.array(lengths)[:, None]
  uniform = noise.uniform(noise.bits(key, x.size)).reshape(x.shape)
  drawn = jnp.where(inside[:, None], uniform - 0.5, 0.0)
  is_zero = largest == 0
  # Squares of scaled columns neither overflow nor underflow.
  return jnp.where(is_zero, drawn, x / jnp.where(is_zero, 1.0, largest))


def _reflect(
  column_index: jax.Array, before: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
  """A step of Householder's QR: I − scale v vᵀ maps a column, from its entry `column_index` on, to one entry.

  Args:
    column_index: i32[], the column of this step.
    before: (x, vectors, scales): the columns, f32[S, r, most], each a row of x; v and
      scale of each reflection, f32[S, r, most] and f32[S, r], zeros for later ones.

  Returns:
    The three arrays after the step.
  """
  x, vectors, scales = before
  row = jnp.arange(x.shape[2])[None]
  column = jnp.where(row >= column_index, x[:, column_index], 0.0)
  entries = x[:, :, column_index]
  products = _einsum("sa,sra->sr", column, x)
  square = products[:, column_index, None]
  entry = entries[:, column_index, None]
  # The one entry of the column's image. Its sign is opposite to the entry's, so that
  # their difference does not cancel.
  image = jnp.where(entry < 0, 1.0, -1.0) * jnp.sqrt(square)
  vector = column - jnp.where(row == column_index, image, 0.0)
  half = square - image * entry  # ‖v‖² / 2, 0 for a column of zeros: no reflection
  is_zero = half == 0
  scale = jnp.where(is_zero, 0.0, 1 / jnp.where(is_zero, 1.0, half))
  # xᵀv of each column, without another product: v is `column` but for one entry
  weights = scale * (products - image * entries)
  x = x - weights[:, :, None] * vector[:, None]
  return (
    x,
    vectors.at[:, column_index].set(vector),
    scales.at[:, column_index].set(scale[:, 0]),
  )


def _basis(vectors: jax.Array, scales: jax.Array) -> jax.Array:
  """The first r rows of the product of the reflections I − scale v vᵀ, f32[S, r, most]."""
  rank, most = vectors.shape[1:]
  products = _einsum("sra,sqa->srq", vectors, vectors)

  def weigh(turn: jax.Array, weights: jax.Array) -> jax.Array:
    """The weights f32[S, r] of a reflection's v in each row of the basis; the last reflection comes first."""
    column_index = rank - 1 - turn
    later = _einsum("sq,sqr->sr", products[:, column_index], weights)
    return weights.at[:, column_index].set(
      scales[:, column_index, None] * (vectors[:, column_index, :rank] - later)
    )

  weights = varying.fori_loop(0, rank, weigh, jnp.zeros_like(products))
  # The product of all reflections is I − Σ of weights times v: its first r rows.
  unit = jnp.eye(rank, most, dtype=jnp.float32)[None]
  return unit - _einsum("sqr,sqa->sra", weights, vectors)


_einsum = functools.partial(jnp.einsum, precision="highest")
