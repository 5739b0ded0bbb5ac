"""PowerSGD: an all-reduce of low-rank factors of each matrix of the gradient (Vogels et al., 2019; ACP-SGD, 2023).

A matrix of a × b entries is sent as factors of r (a + b) numbers, found by one step of
power iteration that starts from the factors of the last step. What r directions leave
out stays in the residual.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse._compat import varying
from jaxsparse.arrays import flatten, low_rank, noise
from jaxsparse.arrays.sums import largest_magnitude
from jaxsparse.collectives._base import ByLeaf, Traits
from jaxsparse.comm import all_reduce_cost, ordering, schedules
from jaxsparse.types import (
  Comm,
  Cost,
  Counters,
  Deferred,
  Reduced,
  State,
  saturated,
  saturated_sum,
)

Matrix = tuple[int, int]  # a × b entries
_Factorized = tuple[jax.Array, jax.Array]


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


class _MatrixLeaf(NamedTuple):
  """A leaf that is a matrix of shape (a, b): its first flat index and its gradient, f32[a · b]."""

  start: int
  grads: jax.Array
  shape: tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSGD(ByLeaf):
  """Averages the projection of each matrix of the gradient on r directions, the same on every worker (PowerSGD).

  A leaf with two axes or more is a matrix of a × b entries, cut between the two axes
  for which a + b is least; a stack of layers in one leaf is one matrix. With `M_w =
  gradient_w + residual_w`, and orth(L) an orthonormal basis of the columns of L,

      L = Σ_w M_w orth(R),   R = Σ_w M_wᵀ orth(L)
      total = orth(L) Rᵀ,    next residual_w = M_w − orth(L) orth(L)ᵀ M_w

  The next step starts from this R, as in the paper (warm start). Vectors, and leaves
  with r (a + b) ≥ a b, are sent whole. So a matrix takes 2 r (a + b) (P − 1)/P words,
  in two all-reduces, and no indices. With `alternate` steps 0, 2, … compute L and
  deliver `L orth(R)ᵀ`, steps 1, 3, … compute R (ACP-SGD): one all-reduce, 2 r a (P −
  1)/P or 2 r b (P − 1)/P words.

  Differences from the paper: R is orthonormalized as well, a column of zeros in L or R
  is replaced by a random direction, the same on every worker, the residual is a
  worker's own projection error (the authors' code keeps `M_w − total / P`), and a leaf
  is cut where its factors are smallest.

  The entries of a total are sums of products, whose last bits depend on the machine:
  workers need processors of one kind. Where a worker has several devices, each of them
  factorizes its own pieces of the leaves. As the words depend on the shapes of leaves,
  `js.costs.count`, `js.costs.predict` and `js.costs.fit` need the parameters.

  Args:
    rank: r, 1 or more, the number of directions.
    alternate: whether steps compute the left and the right factors in turn.
    wire: "bf16" rounds all that is sent to 8 significant bits, which halves the words;
      the residuals keep the errors.
    seed: of the first factors, and of random directions, 0 … 2³² − 1.
    decay: as in `js.SparseCollective`.

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
  wire: Literal["f32", "bf16"] = "f32"
  seed: int = 0
  decay: float = 1.0
  ranges = (("rank", 1, None), ("seed", 0, 2**32 - 1))

  @property
  def traits(self) -> Traits:
    return dataclasses.replace(super().traits, scaled=True, sizes_vary=self.alternate)

  def init(self, n: int, size: int) -> State:
    start = super().init(n, size)
    shapes = [matrix for _, matrix in self._layout(n) if matrix]
    seed = jax.random.key(self.seed)
    right = tuple(
      jax.random.normal(jax.random.fold_in(seed, index), (b, self.rank), jnp.float32)
      for index, (_, b) in enumerate(shapes)
    )
    # The first step computes L from R, so no L is read before.
    left = (
      tuple(jnp.zeros((a, self.rank), jnp.float32) for a, _ in shapes)
      if self.alternate
      else ()
    )
    return start._replace(shared=Factors(left, right, jnp.int32(0)))

  def cost(self, n: int, size: int) -> Cost:
    """The most messages and 4-byte words that one of `size` workers sends in a step, for n entries."""
    costs = self._costs(n, size)
    # A step has one of the two all-reduces, so the larger one is an upper bound.
    if self.alternate:
      return max(costs, key=lambda cost: cost.words)
    # both halves of a step
    return Cost(*(sum(parts) for parts in zip(*costs, strict=True)))

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n = grads.size
    factors = state.shared
    # the same random directions on every worker, other ones in each step
    key = noise.fold(noise.key_of(self.seed), factors.step)
    to_left = factors.step % 2 == 0
    # M_w, a matrix for each leaf, and the entries that are sent whole
    leaves, others = self._split(grads, state.residual)
    # Behind a barrier `others` are stored once: both the message and the residual read
    # them.
    others = jax.lax.optimization_barrier(others)
    add = functools.partial(self._all_reduce, comm)
    # Half steps: `left` computes L from R, `right` computes R from L.
    left, right = (
      functools.partial(_turn, add, key, leaves, to_right=to_right)
      for to_right in (False, True)
    )
    # Sets `done`, the half step with the factors of the total, and `sent`, the half
    # step that sends the entries sent whole.
    if self.alternate:
      # One half runs: L = Σ_w M_w orth(R) in even steps, R = Σ_w M_wᵀ orth(L) in odd.
      turns = [
        lambda turn=turn: turn(state.residual, others, factors)
        for turn in (left, right)
      ]
      done = varying.cond(to_left, *turns)
      sent = done
      bound = done.bound
      after = done.factors
    else:
      # L = Σ_w M_w orth(R), then R = Σ_w M_wᵀ orth(L) (Algorithm 1)
      half = left(state.residual, others, factors)
      # `_after` delays the residual until the first half is done, so that the second
      # half adds gradient + residual again: else XLA would keep the sums of the first
      # half in memory. The second half sends no `others`: the first one has sent them.
      done = right(_after(half.bound, state.residual), others[:0], half.factors)
      sent = half
      bound = jnp.maximum(half.bound, done.bound)
      after = done.factors._replace(left=())
    costs = self._costs(n, comm.size)
    halves = [saturated(cost.words, jnp.uint32) for cost in costs]
    words = jnp.where(to_left, *halves) if self.alternate else saturated_sum(*halves)
    # the total and the residual, computed where the step ends
    total = LowRank(
      total=self._join(n, done.total, sent.others),
      projection=self._join(n, done.projection, sent.local_others),
      grads=grads,
      bound=bound,
    )
    after_state = state._replace(shared=after._replace(step=factors.step + 1))
    counters = Counters(words, words, selected=n, delivered=n)
    return Deferred(total, after_state, counters)

  def _layout(self, n: int) -> list[tuple[int, Matrix | None]]:
    """The entries of each leaf, and its matrix (a, b), None for a leaf that is sent as it is."""
    layout: list[tuple[int, Matrix | None]] = []
    for a, b in map(matrix_of, self.shapes(n)):
      # A leaf whose factors take as many words as itself is sent whole.
      is_shorter = self.rank * (a + b) < a * b
      layout.append((a * b, (a, b) if is_shorter else None))
    return layout

  def _costs(self, n: int, size: int) -> list[Cost]:
    """The costs of the all-reduce for the left factors, and of the all-reduce for the right ones, in this order."""
    layout = self._layout(n)
    others = sum(entries for entries, matrix in layout if not matrix)
    matrices = [matrix for _, matrix in layout if matrix]
    left = self.rank * sum(a for a, _ in matrices)
    right = self.rank * sum(b for _, b in matrices)
    # Entries that are sent whole go with the left factors; with `alternate`, with the
    # factors of each step.
    counts = left + others, right + others * self.alternate
    cost = all_reduce_cost if self.wire == "f32" else schedules.rounded_all_reduce_cost
    return [cost(count, size) if count else Cost(0, 0) for count in counts]

  def _all_reduce(
    self,
    comm: Comm,
    x: jax.Array,
  ) -> tuple[jax.Array, jax.Array]:
    """The sum of f32[m] over workers, and the share of this worker in it; the shares of all workers add up to the sum.

    The share is x; with `wire="bf16"` it is x less the errors that this worker's
    rounding made, which stay in its residual.
    """
    # an all-reduce of nothing would be a message all the same
    if not x.size:
      return x, x
    return (
      (comm.all_reduce(x), x)
      if self.wire == "f32"
      else schedules.rounded_all_reduce(comm, x)
    )

  def _split(
    self, grads: jax.Array, residual: jax.Array
  ) -> tuple[list[_MatrixLeaf], jax.Array]:
    """The leaves of a gradient f32[n] that are sent as factors, and gradient + residual of all other leaves, f32[m]."""
    # the number of entries of each leaf, and its (a, b); None if the leaf is sent whole
    entries, shapes = zip(*self._layout(grads.size), strict=True)
    # The last start is the end of the vector, which `zip` drops.
    starts = [0, *itertools.accumulate(entries)]
    leaves = list(zip(starts, flatten.parts(grads, entries), shapes, strict=False))
    others = [
      leaf + residual[start : start + leaf.size]
      for start, leaf, shape in leaves
      if not shape
    ]
    matrices = [
      _MatrixLeaf(start, leaf, shape) for start, leaf, shape in leaves if shape
    ]
    # an empty part first, since there may be no others
    return matrices, jnp.concatenate([grads[:0], *others])

  def _join(
    self, n: int, matrices: Sequence[_Factorized], others: jax.Array
  ) -> tuple[jax.Array | _Factorized, ...]:
    """The pieces of a low-rank vector (`arrays.low_rank`), in the order of the leaves: undoes `_split`.

    Args:
      n: length of the vector.
      matrices: (f32[r, a], f32[r, b]) of each leaf that is sent as factors.
      others: f32[m], the entries of all other leaves.
    """
    remaining = iter(matrices)
    pieces = list[jax.Array | _Factorized]()
    start = 0
    layout = self._layout(n)
    # Neighbouring leaves that are sent whole are one piece: fewer kernels write it.
    for is_whole, leaves in itertools.groupby(layout, key=lambda leaf: leaf[1] is None):
      sizes = [entries for entries, _ in leaves]
      if is_whole:
        pieces = [*pieces, others[start : start + sum(sizes)]]
        start += sum(sizes)
      else:
        pieces += [next(remaining) for _ in sizes]
    return tuple(pieces)


class LowRank(NamedTuple):
  """The total and the own projection as pieces of a low-rank vector: a `Formula`.

  A piece is f32[m], or a pair (left f32[r, a], right f32[r, b]) for the matrix leftᵀ
  right, row by row.

  Attributes:
    total: the pieces of the total.
    projection: the pieces of what this worker contributes to the total.
    grads: f32[n], of this worker.
    bound: f32[], no magnitude of an entry of the total is larger.
  """

  total: Sequence[jax.Array | _Factorized]
  projection: Sequence[jax.Array | _Factorized]
  grads: jax.Array
  bound: jax.Array

  @property
  def values(self) -> tuple[list[jax.Array], jax.Array]:
    """(lefts, bound): the left factor of each piece, or the piece if it is f32[m]; and the bound.

    The total is linear in `lefts`, which the caller divides for the mean. The bound is
    Inf or NaN where an entry of the total may be.
    """
    lefts = [piece[0] if isinstance(piece, tuple) else piece for piece in self.total]
    return lefts, self.bound

  def finish(
    self,
    values: tuple[list[jax.Array], jax.Array],
    finite: jax.Array,
    residual: jax.Array,
    decay: float,
  ) -> tuple[jax.Array, jax.Array]:
    """The total and the residual, as `Formula.finish` returns them.

    Args:
      values: (lefts, bound) of the property `values`: the left factor of each pair,
        other pieces whole, and the bound; all divided by P for the mean.
      finite: bool[], false in a step that all workers skip.
      residual: before the step.
      decay: the factor of the next residual.
    """
    pieces = [
      (left, piece[1]) if isinstance(piece, tuple) else left
      for left, piece in zip(values[0], self.total, strict=True)
    ]
    # decay · (grads + residual − projection), or `residual` unless finite
    residual = low_rank.subtract(self.projection, self.grads, residual, finite, decay)
    # `depend_on` returns 0, so `finite` keeps its value, but only after the residual is
    # computed: `grads` is read before the update reuses its buffer.
    finite &= ordering.depend_on(residual[:1], jnp.int32(0)) == 0
    return low_rank.dense_if(finite, pieces), residual


def matrix_of(shape: tuple[int, ...]) -> tuple[int, int]:
  """The matrix a × b of a leaf whose axes are cut in two where a + b is least; (1, n) for a vector.

  Example:
    >>> matrix_of((3, 3, 16, 32)), matrix_of((64, 8, 8)), matrix_of((5,))
    ((144, 32), (64, 64), (1, 5))
  """
  cut = lambda axis: (math.prod(shape[:axis]), math.prod(shape[axis:]))
  cuts = map(cut, range(1, len(shape)))
  return min(cuts, key=sum, default=(1, math.prod(shape)))


def _bases(
  factors: Sequence[jax.Array],
  key: jax.Array,
) -> list[jax.Array]:
  """The orthonormal basis of the columns of each factor f32[a, r], as rows f32[r, a].

  Factors of lengths 2^(i − 1) + 1 … 2^i are padded to the longest and orthonormalized
  together: few loops to compile, and less than half is padding. `key` draws directions
  in place of columns of zeros.
  """
  # i, where 2^i is the length rounded up to a power of two
  length_bits = lambda index: (len(factors[index]) - 1).bit_length()
  by_length = sorted(range(len(factors)), key=length_bits)
  basis_of = dict[int, jax.Array]()
  for bits, group in itertools.groupby(by_length, length_bits):
    indices = list(group)
    alike = [factors[index] for index in indices]
    bases = low_rank.orthonormal(alike, noise.fold(key, bits))
    for index, basis in zip(indices, bases, strict=True):
      # without the padding to the longest factor of the group
      basis_of[index] = basis[:, : len(factors[index])]
  return [basis_of[index] for index in range(len(factors))]


def _project(
  leaves: list[_MatrixLeaf], residual: jax.Array, bases: list[jax.Array], to_right: bool
) -> list[jax.Array]:
  """The factors of this worker.

  Args:
    leaves: of each matrix the first flat index `start`, the gradient `grads`, f32[ab],
      and the `shape` (a, b).
    residual: f32[n]; a matrix M_w is gradient + residual.
    bases: one for each leaf, with the r basis vectors as rows: orth(L)ᵀ, f32[r, a], if
      `to_right`, else orth(R)ᵀ, f32[r, b].
    to_right: which factors to compute.

  Returns:
    (M_wᵀ orth(L))ᵀ, f32[r, b] of each leaf, if `to_right`, else M_w orth(R), f32[a, r].
  """
  factors = list[jax.Array]()
  # Each leaf reads the residual only after the factor before it is computed, so that
  # one sum of gradient and residual is stored at a time.
  for leaf, basis in zip(leaves, bases, strict=True):
    residual = _after(factors[-1] if factors else basis, residual)
    flat = leaf.grads + residual[leaf.start : leaf.start + leaf.grads.size]
    matrix = flat.reshape(leaf.shape)
    factors.append(_matmul(basis, matrix) if to_right else _matmul(matrix, basis.T))
  return factors


class _Turn(NamedTuple):
  """The result of half a step.

  Attributes:
    total: what the all-reduce delivers of each matrix, as (f32[r, a], f32[r, b]).
    projection: what this worker contributes to `total`, in the same form.
    others: f32[m], the sum of all entries that are sent whole.
    local_others: f32[m], what this worker contributes to `others`.
    bound: f32[], no magnitude of an entry of `total` or `others` is larger.
    factors: the factors before, with the left or the right ones replaced.
  """

  total: list[_Factorized]
  projection: list[_Factorized]
  others: jax.Array
  local_others: jax.Array
  bound: jax.Array
  factors: Factors


def _turn(
  add: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
  key: jax.Array,
  leaves: list[_MatrixLeaf],
  residual: jax.Array,
  others: jax.Array,
  factors: Factors,
  *,
  to_right: bool,
) -> _Turn:
  """Half a step: the left factors, from the right ones, or, if `to_right`, the right ones, from the left ones.

  One all-reduce sums the factors of all matrices, and `others`.

  Args:
    add: an all-reduce of f32[m] that returns the sum and this worker's share in it.
    key: of the random directions in place of columns of zeros.
    leaves: the gradients of the matrices.
    residual: f32[n], before the step.
    others: f32[m], gradient + residual of entries that are sent whole; empty if they
      have been sent.
    factors: the factors before this half step.
    to_right: which factors to compute.
  """
  bases = _bases(factors.left if to_right else factors.right, key)
  local = _project(leaves, residual, bases, to_right)
  flat = jnp.concatenate([*(factor.reshape(-1) for factor in local), others])
  flat, share = add(flat)
  sizes = [*(factor.size for factor in local), others.size]

  def cut(buffer: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """The factors and the other entries in a flat buffer."""
    *parts, others = flatten.parts(buffer, sizes)
    shaped = [
      flat.reshape(factor.shape) for flat, factor in zip(parts, local, strict=True)
    ]
    return shaped, others

  summed, others = cut(flat)
  shares, local_others = cut(share)
  # orth(L) Rᵀ of the new R, or L orth(R)ᵀ of the new L, as (f32[r, a], f32[r, b]):
  # bases and R are rows already, L is f32[a, r].
  factorized = lambda factor, basis: (basis, factor) if to_right else (factor.T, basis)
  total = list(map(factorized, summed, bases))
  projection = list(map(factorized, shares, bases))
  new = tuple(factor.T if to_right else factor for factor in summed)
  # An entry of a product is a sum of r terms: an entry of a basis, at most 1, or 2 with
  # rounding errors, times an entry of a factor.
  rank = len(bases[0]) if bases else 0
  largest = lambda x: largest_magnitude(x) if x.size else 0.0
  bound = jnp.maximum(
    2 * rank * largest(flat[: flat.size - others.size]), largest(others)
  )
  after = factors._replace(right=new) if to_right else factors._replace(left=new)
  return _Turn(total, projection, others, local_others, bound, after)


def _after(read: jax.Array, x: jax.Array) -> jax.Array:
  """`x`, available to an accelerator only after `read` is computed."""
  return jax.lax.optimization_barrier((x, read))[0]


_matmul = functools.partial(jnp.matmul, precision="highest")
