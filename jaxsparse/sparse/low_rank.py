"""Vectors that consist of low-rank matrices, row by row, and other vectors, computed where they are written.

A vector f32[n] is given by its pieces, one after the other: each f32[m], or (L f32[r, a], R f32[r, b]) for LᵀR. A
product of factors of few rows costs no more than the read of its entries.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxsparse import _compat
from jaxsparse.comm import varying

Piece = jax.Array | tuple[jax.Array, jax.Array]


def dense(x: Sequence[Piece]) -> jax.Array:
  """All entries of the vector, f32[n].

  Example:
    >>> factors = jnp.array([[1.0, 2.0]]), jnp.array([[1.0, 3.0]])
    >>> dense([factors, jnp.ones(1)])
    Array([1., 3., 2., 6., 1.], dtype=float32)
  """
  return jnp.concatenate([_matrix(piece).reshape(-1) for piece in x])


def put(x: Sequence[Piece], into: jax.Array, finite: jax.Array) -> jax.Array:
  """All entries of the vector, or zeros unless `finite`, bool[]: f32[n], in the buffer of `into`.

  Example:
    >>> put([jnp.ones(1), jnp.zeros(1)], jnp.array([3.0, 2.0]), jnp.bool_(True))
    Array([1., 0.], dtype=float32)
  """
  # XLA on CPU would choose the piece anew for each entry.
  return _compat.by_platform(x, into, finite, cpu=_put_by_pieces, default=_put_at_once)


def _put_by_pieces(x: Sequence[Piece], into: jax.Array, finite: jax.Array) -> jax.Array:
  new = lambda: [_matrix(piece) for piece in x]
  pieces = varying.cond(finite, new, lambda: jax.tree.map(jnp.zeros_like, jax.eval_shape(new)))
  return _put_at(_starts(x), pieces, into)


def _put_at_once(x: Sequence[Piece], _: jax.Array, finite: jax.Array) -> jax.Array:
  return dense(jax.tree.map(lambda part: jnp.where(finite, part, 0.0), x))


def subtract(x: Sequence[Piece], grads: jax.Array, residual: jax.Array, finite: jax.Array, decay: float) -> jax.Array:
  """`decay * (grads + residual - x)`, f32[n], in the buffer of `residual`, which is returned unless `finite`, bool[].

  Example:
    >>> subtract([jnp.ones(1), jnp.zeros(1)], jnp.array([3.0, 2.0]), jnp.array([0.0, 1.0]), jnp.bool_(True), 0.5)
    Array([1. , 1.5], dtype=float32)
  """
  ways = {"cpu": _subtract_on_cpu, "gpu": _subtract_at_once, "default": _subtract_by_pieces}
  return _compat.by_platform(x, grads, residual, finite, decay, **ways)


def _subtract_by_pieces(
  x: Sequence[Piece], grads: jax.Array, residual: jax.Array, finite: jax.Array, decay: float
) -> jax.Array:
  for start, piece in zip(_starts(x), x, strict=True):
    entries = _matrix(piece).reshape(-1)
    own, old = (part[start : start + entries.size] for part in (grads, residual))
    residual = jax.lax.dynamic_update_slice(residual, jnp.where(finite, decay * (own + old - entries), old), (start,))
  return residual


def _subtract_at_once(
  x: Sequence[Piece], grads: jax.Array, residual: jax.Array, finite: jax.Array, decay: float
) -> jax.Array:
  """On GPUs, where each piece that is written copies the vector."""
  return jnp.where(finite, decay * (grads + residual - dense(x)), residual)


def _subtract_on_cpu(
  x: Sequence[Piece], grads: jax.Array, residual: jax.Array, finite: jax.Array, decay: float
) -> jax.Array:
  """Pieces that a conditional returns are stored, each by a loop over rows, before any is copied to its place."""
  starts = _starts(x)
  shapes = [jax.eval_shape(_matrix, piece).shape for piece in x]
  cut = lambda flat: [flat[start : start + math.prod(shape)] for start, shape in zip(starts, shapes, strict=True)]
  shaped = lambda parts: [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
  sums = shaped(map(jnp.add, cut(grads), cut(residual)))
  new = lambda: [decay * (one - _matrix(piece)) for one, piece in zip(sums, x, strict=True)]
  return _put_at(starts, varying.cond(finite, new, lambda: shaped(cut(residual))), residual)


def _starts(x: Sequence[Piece]) -> list[int]:
  """The flat index of each piece."""
  sizes = [piece.size if isinstance(piece, jax.Array) else piece[0].shape[1] * piece[1].shape[1] for piece in x]
  return [0, *itertools.accumulate(sizes)][:-1]


def _put_at(starts: list[int], pieces: list[jax.Array], into: jax.Array) -> jax.Array:
  for start, piece in zip(starts, pieces, strict=True):
    into = jax.lax.dynamic_update_slice(into, piece.reshape(-1), (start,))
  return into


def _matrix(piece: Piece) -> jax.Array:
  """A piece, f32[m] or f32[a, b]."""
  if isinstance(piece, jax.Array):
    return piece
  left, right = piece
  return functools.reduce(jnp.add, [column[:, None] * row[None] for column, row in zip(left, right, strict=True)])
