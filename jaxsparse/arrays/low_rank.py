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
  """`decay * (grads + residual - x)`, f32[n], in the buffer of `residual`; the old residual unless `finite`, bool[].

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
    # XLA on CPU stores what a conditional returns: it computes all pieces, each by a
    # loop over rows, before the first one is written into `residual`.
    cut = lambda flat: [
      flat[place].reshape(shape) for place, shape in zip(places, shapes, strict=True)
    ]
    sums = list(map(jnp.add, cut(grads), cut(residual)))
    new = lambda: [
      decay * (entries - _matrix(piece)) for entries, piece in zip(sums, x, strict=True)
    ]
    # Cut inside the conditional: XLA would copy pieces that are passed to it.
    old = lambda: cut(residual)
    into = residual
    for place, piece in zip(places, varying.cond(finite, new, old), strict=True):
      into = jax.lax.dynamic_update_slice(into, piece.reshape(-1), (place.start,))
    return into

  # On CPU the other ways take 1.3 and 2 to 3.5 times the CPU time of an update. In
  # place, an H100 runs 57 kernels for VGG-16 instead of 1. At once, a TPU moves 1.14
  # times the bytes of an update and stores n entries more.
  return _compat.by_platform(cpu=stored_first, gpu=at_once, default=in_place)()


def _matrix(piece: Piece) -> jax.Array:
  """The entries of a piece: f32[m], or LᵀR, f32[a, b]."""
  if isinstance(piece, jax.Array):
    return piece
  # A sum of outer products, which XLA fuses with its use; it would store the result of
  # a matrix product.
  outer = lambda column, row: column[:, None] * row[None]
  return functools.reduce(jnp.add, map(outer, *piece))


def orthonormal(factors: Sequence[jax.Array], key: jax.Array) -> jax.Array:
  """Bases f32[S, r, most] of S factors f32[a, r], r ≤ a, by Householder reflections; `most` is the largest a.

  The r rows of a basis, filled with zeros behind length a, are orthonormal, even where
  columns of the factor depend on each other. Each column is a linear combination of
  them; a column of zeros is first replaced by a random one. All factors are reflected
  at once. Not by the QR of `jnp.linalg`, which calls LAPACK: two batches at once block
  each other on CPUs with few cores (JAX 0.10.2).

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
  """The columns of all factors, f32[S, r, most], scaled to a largest magnitude of 1; columns of zeros become random."""
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
    before: (x, vectors, scales). The r columns of S matrices, f32[S, r, most], padded
      to `most` entries, each column a row of x; v and scale of each reflection, f32[S,
      r, most] and f32[S, r], zeros for later ones.

  Returns:
    The three arrays after the step.
  """
  x, vectors, scales = before
  row = jnp.arange(x.shape[2])[None]
  column = jnp.where(row >= column_index, x[:, column_index], 0.0)
  # the entry of each column at position `column_index`, f32[S, r]
  entries = x[:, :, column_index]
  products = _einsum("sa,sra->sr", column, x)
  # the square of the norm of `column`, f32[S, 1]
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
  """The first r rows of H_{r−1} ⋯ H_1 H_0, f32[S, r, most], with the reflections H = I − scale v vᵀ.

  The product is I − Σ w vᵀ, with a vector of weights w for each v. A further factor H
  on the right adds w = scale (v − Σ (v'ᵀv) w'), summed over the later v' with their w'.
  """
  rank, most = vectors.shape[1:]
  products = _einsum("sra,sqa->srq", vectors, vectors)

  def weigh(turn: jax.Array, weights: jax.Array) -> jax.Array:
    """Sets the first r entries of w, f32[S, r], of one reflection; turn 0 is that of the last reflection."""
    column_index = rank - 1 - turn
    later = _einsum("sq,sqr->sr", products[:, column_index], weights)
    return weights.at[:, column_index].set(
      scales[:, column_index, None] * (vectors[:, column_index, :rank] - later)
    )

  weights = varying.fori_loop(0, rank, weigh, jnp.zeros_like(products))
  # the first r rows of I − Σ w vᵀ
  unit = jnp.eye(rank, most, dtype=jnp.float32)[None]
  return unit - _einsum("sqr,sqa->sra", weights, vectors)


_einsum = functools.partial(jnp.einsum, precision="highest")
