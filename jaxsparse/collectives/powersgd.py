"""PowerSGD: an all-reduce of low-rank factors of each matrix of the gradient (Vogels et al., 2019; ACP-SGD, 2023).

A matrix of a × b entries is sent as factors of r (a + b) numbers, found by one step of power iteration that starts from
the factors of the last step. What r directions leave out stays in the residual.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, Self

import jax
import jax.numpy as jnp

from jaxsparse.collectives._base import Collective, replace_fields
from jaxsparse.comm import all_reduce_cost
from jaxsparse.sparse import flatten
from jaxsparse.types import Comm, Cost, Counters, Reduced, State, saturated, saturated_sum


class Factors(NamedTuple):
  """The last factors of each compressed leaf, the same on every worker.

  Attributes:
    left: L, f32[a, r] each; () without `alternate`, where every step starts from R.
    right: R, f32[b, r] each.
    step: number of steps so far, i32[].

  Example:
    >>> import jaxsparse as js
    >>> collective = js.make_collective("powersgd", rank=1).for_leaves(((4, 3), (5,)))
    >>> [factor.shape for factor in collective.init(17, size=2).shared.right]
    [(3, 1)]
  """

  left: tuple[jax.Array, ...]
  right: tuple[jax.Array, ...]
  step: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSGD(Collective):
  """Averages the projection of each matrix of the gradient on r directions, the same on every worker (PowerSGD).

  A leaf with two axes or more is a matrix of a × b entries, cut between the two axes for which a + b is least; a stack
  of layers in one leaf is one matrix. With `M_w = gradient_w + residual_w`, and orth(L) an orthonormal basis of the
  columns of L,

      L = Σ_w M_w orth(R),   R = Σ_w M_wᵀ orth(L)
      total = orth(L) Rᵀ,    next residual_w = M_w − orth(L) orth(L)ᵀ M_w

  The next step starts from this R, as in the paper (warm start). Vectors, and leaves with r (a + b) ≥ a b, are sent
  whole. So a matrix takes 2 r (a + b) (P − 1)/P words, in two all-reduces, and no indices. With `alternate` odd steps
  compute L and deliver `L orth(R)ᵀ`, even ones compute R (ACP-SGD): one all-reduce, 2 r a (P − 1)/P or
  2 r b (P − 1)/P words.

  Differences from the paper: R is orthonormalized as well, a column of zeros in L or R is replaced by a random
  direction, the same on every worker, the residual is a worker's own projection error (the authors' code keeps
  `M_w − total / P`), and a leaf is cut where its factors are smallest.

  The entries of a total are sums of products, whose last bits depend on the machine: workers need processors of one
  kind. Where a worker has several devices, each of them factorizes its own pieces of the leaves. As the words depend on
  the shapes of leaves, `js.costs.count`, `js.costs.predict` and `js.costs.fit` need the parameters.

  Args:
    rank: r, 1 or more, the number of directions.
    alternate: whether steps compute the left and the right factors in turn.
    seed: of the first factors, and of random directions, 0 … 2³² − 1.

  Raises:
    ValueError: for a rank or a seed outside its choices.

  Example:
    A matrix of rank 1 arrives whole:

    >>> import jax.numpy as jnp, jaxsparse as js
    >>> matrix = jnp.outer(jnp.arange(3.0), jnp.array([1.0, 2.0, 3.0, 1.0]))
    >>> out = js.simulate("powersgd", {"w": jnp.stack([matrix, matrix])}, rank=1)
    >>> out.total["w"][2].round(), int(out.metrics.words_sent)
    (Array([ 4.,  8., 12.,  4.], dtype=float32), 8)
  """

  rank: int = 4
  alternate: Literal[False, True] = False
  seed: int = 0
  decay: float = 1.0
  leaves: tuple[tuple[int, ...], ...] = dataclasses.field(default=(), init=False)
  ranges = (("rank", 1, None), ("seed", 0, 2**32 - 1))

  @property
  def sizes_vary(self) -> bool:
    return self.alternate

  @property
  def needs_shapes(self) -> bool:
    return not self.leaves

  def for_leaves(self, shapes: tuple[tuple[int, ...], ...]) -> Self:
    return replace_fields(self, leaves=shapes)

  def init(self, n: int, size: int) -> State:
    layout = self._layout(n)
    if (found := sum(entries for entries, _ in layout)) != n:
      raise ValueError(f"{self.name}: n={n} entries, its leaves of shapes {self.leaves} have {found}")
    shapes = [matrix for _, matrix in layout if matrix]
    right = tuple(_drawn(jax.random.key(self.seed), [(b, self.rank) for _, b in shapes]))
    left = tuple(jnp.zeros((a, self.rank), jnp.float32) for a, _ in shapes) if self.alternate else ()
    return State(residual=jnp.zeros(n, jnp.float32), shared=Factors(left, right, jnp.int32(0)))

  def cost(self, n: int, size: int) -> Cost:
    costs = self._costs(n, size)
    if self.alternate:
      return max(costs, key=lambda cost: cost.words)
    return Cost(*(sum(parts) for parts in zip(*costs, strict=True)))

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n, factors = grads.size, state.shared
    acc = grads + state.residual
    matrices, others = self._split(acc)
    key, to_left = jax.random.fold_in(jax.random.key(self.seed), factors.step + 1), factors.step % 2 == 0
    if self.alternate:
      turns = [functools.partial(turn, comm, key, matrices, others, factors) for turn in (_to_left, _to_right)]
      total, own, summed, after = jax.lax.cond(to_left, *turns)
    else:
      _, _, summed, half = _to_left(comm, key, matrices, others, factors)
      total, own, _, after = _to_right(comm, key, matrices, others[:0], half)
      after = after._replace(left=())
    costs = [saturated(cost.words, jnp.uint32) for cost in self._costs(n, comm.size)]
    words = jnp.where(to_left, *costs) if self.alternate else saturated_sum(*costs)
    residual = acc - self._join(own, others)
    state = state._replace(residual=residual, shared=after._replace(step=factors.step + 1))
    return Reduced(self._join(total, summed), state, Counters(words, words, selected=n, delivered=n))

  def _layout(self, n: int) -> list[tuple[int, tuple[int, int] | None]]:
    """The entries of each leaf, and its matrix (a, b), None for a leaf that is sent as it is."""
    shapes = [matrix_of(shape) for shape in self.leaves or ((n,),)]
    return [(a * b, (a, b) if self.rank * (a + b) < a * b else None) for a, b in shapes]

  def _costs(self, n: int, size: int) -> list[Cost]:
    """Of the all-reduce for the left factors, and of that for the right ones."""
    layout = self._layout(n)
    others = sum(entries for entries, matrix in layout if not matrix)
    left, right = (sum(self.rank * matrix[axis] for _, matrix in layout if matrix) for axis in (0, 1))
    counts = left + others, right + others * self.alternate
    return [all_reduce_cost(count, size) if count else Cost(0, 0) for count in counts]

  def _split(self, flat: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """The matrices of f32[n], and all other entries."""
    sizes, shapes = zip(*self._layout(flat.size), strict=True)
    leaves = list(zip(flatten.parts(flat, sizes), shapes, strict=True))
    others = [leaf for leaf, matrix in leaves if not matrix]
    return [leaf.reshape(matrix) for leaf, matrix in leaves if matrix], jnp.concatenate([flat[:0], *others])

  def _join(self, matrices: Sequence[jax.Array], others: jax.Array) -> jax.Array:
    """Undoes `_split`."""
    layout = self._layout(others.size + sum(matrix.size for matrix in matrices))
    rest = flatten.parts(others, [entries for entries, matrix in layout if not matrix])
    found, single = iter(matrices), iter(rest)
    return jnp.concatenate([next(found).reshape(-1) if matrix else next(single) for _, matrix in layout])


def matrix_of(shape: tuple[int, ...]) -> tuple[int, int]:
  """The matrix a × b of a leaf whose axes are cut in two where a + b is least; (1, n) for a vector.

  Example:
    >>> matrix_of((3, 3, 16, 32)), matrix_of((64, 8, 8)), matrix_of((5,))
    ((144, 32), (64, 64), (1, 5))
  """
  cuts = [(math.prod(shape[:axis]), math.prod(shape[axis:])) for axis in range(1, len(shape))]
  return min(cuts, key=sum, default=(1, math.prod(shape)))


def orthonormal(factors: Sequence[jax.Array], key: jax.Array) -> list[jax.Array]:
  """Orthonormal columns for each f32[a, r], r ≤ a, whose span contains that of the factor.

  Gram–Schmidt with every projection done twice, so that columns that depend on each other become orthogonal, too; for a
  column that leaves nothing, a random one. The QR of `jnp.linalg` calls LAPACK, and two batches of it at once block
  each other on CPUs with few cores (JAX 0.10.2).

  Example:
    >>> (basis,) = orthonormal([jnp.array([[3.0, 3.0], [0.0, 1.0], [4.0, 4.0]])], jax.random.key(0))
    >>> jnp.abs(basis.T.round(3))
    Array([[0.6, 0. , 0.8],
           [0. , 1. , 0. ]], dtype=float32)
  """
  drawn = _drawn(key, [factor.shape for factor in factors])
  add = lambda number, bases: [_with_column(*one, number) for one in zip(bases, factors, drawn, strict=True)]
  most = max((factor.shape[1] for factor in factors), default=0)
  return jax.lax.fori_loop(0, most, add, [0 * factor for factor in factors])


def _with_column(basis: jax.Array, factor: jax.Array, drawn: jax.Array, number: jax.Array) -> jax.Array:
  """A basis, whose columns from `number` on are zeros, and what the column of the factor adds to it."""
  found, other = (_beside(basis, columns[:, number]) for columns in (factor, drawn))
  return basis.at[:, number].set(jnp.where(jnp.any(found != 0), found, other))


def _beside(basis: jax.Array, vector: jax.Array) -> jax.Array:
  """The part of a vector that is orthogonal to a basis, with norm 1, or zeros."""
  for _ in range(2):
    vector = _unit(vector)
    vector = vector - jnp.matmul(basis, jnp.matmul(vector, basis, precision="highest"), precision="highest")
  return _unit(vector)


def _unit(vector: jax.Array) -> jax.Array:
  """The vector with norm 1, or zeros."""
  largest = jnp.abs(vector).max()
  vector = vector / jnp.where(largest == 0, 1.0, largest)  # so that squares neither overflow nor underflow
  return vector / jnp.maximum(jnp.linalg.norm(vector), 1.0)


_Turn = tuple[list[jax.Array], list[jax.Array], jax.Array, Factors]


def _to_left(comm: Comm, key: jax.Array, matrices: list[jax.Array], others: jax.Array, factors: Factors) -> _Turn:
  """The left factors, from the right ones: all of them and `others` are summed by one all-reduce.

  Returns:
    (total, own, others, factors): what the all-reduce delivers of each matrix; the projection of each matrix of this
    worker, which the total contains; the sum of all other entries; the factors before, with the new ones.
  """
  bases = orthonormal(factors.right, key)
  own = _products(matrices, bases)
  flat = jnp.concatenate([*(factor.reshape(-1) for factor in own), others])
  flat = comm.all_reduce(flat) if flat.size else flat
  *sums, others = flatten.parts(flat, [*(factor.size for factor in own), others.size])
  left = tuple(one.reshape(factor.shape) for one, factor in zip(sums, own, strict=True))
  transposed = [basis.T for basis in bases]
  return _products(left, transposed), _products(own, transposed), others, factors._replace(left=left)


def _to_right(comm: Comm, key: jax.Array, matrices: list[jax.Array], others: jax.Array, factors: Factors) -> _Turn:
  """The right factors, from the left ones: those of the transposed matrices."""
  mirrored = Factors(factors.right, factors.left, factors.step)
  total, own, others, after = _to_left(comm, key, [matrix.T for matrix in matrices], others, mirrored)
  total, own = ([matrix.T for matrix in found] for found in (total, own))
  return total, own, others, Factors(after.right, after.left, after.step)


def _products(matrices: Sequence[jax.Array], factors: Sequence[jax.Array]) -> list[jax.Array]:
  return [jnp.matmul(m, factor, precision="highest") for m, factor in zip(matrices, factors, strict=True)]


def _drawn(key: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
  return [jax.random.normal(jax.random.fold_in(key, number), shape) for number, shape in enumerate(shapes)]
