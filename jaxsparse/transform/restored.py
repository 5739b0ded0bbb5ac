"""`js.norm_restored`: the mean of the workers' normalized updates, as long as each of them is.

total, residual_w    those of a jaxsparse transform                      exchange
s²                   Σ_w ⟨u_w, total/P⟩ / Σ_w ⟨u_w, delivered_w⟩         two numbers a leaf, one all-reduce
update               total / (P s)                                       the same on every worker
"""

import jax
import jax.numpy as jnp
import optax
from optax import OptState

from jaxsparse.arrays import flatten
from jaxsparse.comm import all_reduce_cost
from jaxsparse.transform.residuals import residual_leaves
from jaxsparse.transform.state import ReduceState, RestoredState
from jaxsparse.transform.update import Transform
from jaxsparse.transform.wrapped import PLACEHOLDER
from jaxsparse.transform.wrappers import checked_transform
from jaxsparse.types import ArrayTree, saturated_sum


def norm_restored(transform: optax.GradientTransformation) -> Transform:
  """The transform with its mean of the workers' updates u_w multiplied by 1/s, which makes it as long as each u_w.

  An optimizer that normalizes (Muon, Adam, Lion, signs) gives each worker an update of
  full length. Their noise differs, so their mean is shorter, and one optimizer after a
  dense exchange, which normalizes the mean, moves further than P optimizers before it.
  For each leaf by itself:

      s²     = Σ_w ⟨u_w, total / P⟩ / Σ_w ⟨u_w, delivered_w⟩      in [1/P, 1]
      update = total / (P s)

  s = 1 where all workers have the same update, and 1/√P where they have nothing in
  common. `delivered_w` is u_w plus what the residual of worker w loses in this
  exchange; u_w without a residual. What rounding or selection does to both sums
  cancels: where the collective conserves the sum, workers with equal updates have s = 1.
  s = 1 for leaves of zeros and with one worker; s² is at least 1/P, also where
  the sums are not positive.

  Residuals are those of the transform, in the units of u_w:

      total + Σ_w residual_w = Σ_w u_w + Σ_w (residual_w before)        (Law C)

  so each entry that is delivered late is multiplied by the 1/s of the exchange that
  delivers it. `js.flush` delivers what is left times 1. With `apply_residual` of
  `js.local_steps` a worker trains at θ − residual_w: what it has not delivered counts
  there at its own length, not at that of the mean. Of leaves of 16 bits the product is
  rounded once more.

  Two numbers a leaf are added up over the workers in one all-reduce behind the
  exchange, `js.costs` counts it. `js.metrics(state).agreement` is s² of all leaves
  together.

  Args:
    transform: a jaxsparse transform, `js.onebit_transform(...)` for instance, not a
      chain.

  Returns:
    A transformation whose state is a `RestoredState`, to be the first of its chain,
    that of `outer` in `js.local_steps`.

  Raises:
    TypeError: for a transformation that is not a jaxsparse transform.
    ValueError: when used, for a transform that is a `js.norm_restored` itself.

  Example:
    Two workers whose updates, of length √2, have one of two entries in common: their
    mean (1, 0) is as long as they are.

    >>> import jax, jax.numpy as jnp, jaxsparse as js
    >>> tx = js.norm_restored(js.dense_transform(js.SimComm("workers", members=2)))
    >>> updates = jnp.array([[1.0, 1.0], [1.0, -1.0]])
    >>> state = jax.vmap(tx.init, axis_name="workers")(updates)
    >>> mean, state = jax.vmap(tx.update, axis_name="workers")(updates, state)
    >>> mean[0].round(3), state.products[0]  # s² = 2 / 4
    (Array([1.414, 0.   ], dtype=float32), Array([[2., 4.]], dtype=float32))
  """
  transform = checked_transform("norm_restored", transform)
  comm = transform.comm

  def init(params: optax.Params) -> OptState:
    before = transform.init(params)
    # `optax.tree_map_params` inits with a placeholder instead of parameters.
    if isinstance(params, PLACEHOLDER):
      return before
    if isinstance(before, RestoredState):
      raise ValueError(
        "norm_restored: the transform is a js.norm_restored already, give the transform inside"
      )
    leaves = len(jax.tree.leaves(params))
    return RestoredState(before, jnp.zeros((leaves, 2)))

  def update(
    updates: optax.Updates,
    state: RestoredState,
    params: ArrayTree = None,
    *,
    agree: jax.Array | None = None,
    **extra: ArrayTree,
  ) -> tuple[optax.Updates, RestoredState]:
    before = state.exchange
    # `js.local_steps` gives `agree` in a step without an exchange: bool[], whether this
    # worker is finite. The workers only agree whether to skip.
    if agree is not None:
      zeros, after = transform.update(updates, before, params, agree=agree, **extra)
      return zeros, state._replace(exchange=after)
    # The exchange is given u + r and leaves r′, so u + r − r′ is delivered. `entered`
    # is ⟨u, u + r⟩ of each leaf, f32[leaves].
    entered = _products(updates, updates) + _products(updates, _residuals(before))
    # Residuals are read before the exchange writes the next ones to the same buffers.
    updates, entered = jax.lax.optimization_barrier((updates, entered))
    mean, after = transform.update(updates, before, params, **extra)
    delivered = entered - _products(updates, _residuals(after))
    # The formula has total / P, and `mean` is total / divisor. The divisor is P, or 1
    # where updates are weighted already: these weights are taken for 1/P.
    shared = _products(updates, mean) * (comm.divisor / comm.size)
    # f32[leaves, 2], summed over workers in one all-reduce.
    pairs = jnp.stack([shared, delivered], axis=1)
    products = comm.all_reduce(pairs)
    # Products that are not finite are those of a skipped step, or beyond float32: the
    # factors of the last exchange are taken again.
    products = jnp.where(jnp.isfinite(products).all(), products, state.products)
    after = _add_words(after, all_reduce_cost(pairs.size, comm.size).words)
    state = RestoredState(after, products)
    return _scale(mean, state.factors(comm.size)), state

  restored = Transform(init, update)
  restored.comm = comm
  restored.with_collectives = lambda change: norm_restored(
    transform.with_collectives(change)
  )
  return restored


def _residuals(state: ReduceState) -> list[jax.Array]:
  """The residuals of this worker in pytree order, zeros of leaves without one."""
  return list(residual_leaves(state).values())


def _scale(mean: optax.Updates, factors: jax.Array) -> optax.Updates:
  """Each leaf times its factor; `factors` is f32[leaves]."""
  leaves, structure = jax.tree.flatten(mean)
  # 16 bits are scaled in float32, and rounded once.
  scaled = [
    (leaf.astype(flatten.wide_dtype(leaf)) * factors[leaf_index]).astype(leaf.dtype)
    for leaf_index, leaf in enumerate(leaves)
  ]
  return jax.tree.unflatten(structure, scaled)


def _products(a: ArrayTree, b: ArrayTree) -> jax.Array:
  """The inner product of each leaf of two pytrees, f32[leaves]."""
  wide = lambda x: x.astype(jnp.float32)
  product = lambda x, y: jnp.sum(wide(x) * wide(y))
  pairs = zip(*map(jax.tree.leaves, (a, b)), strict=True)
  return jnp.array([product(x, y) for x, y in pairs])


def _add_words(state: ReduceState, words: int) -> ReduceState:
  """The state whose counters include `words` more 4-byte words sent, besides those of its collectives."""
  before = state.counters
  # u32 wraps around, and is then less than what was added.
  total = before.total_words + jnp.uint32(words)
  wraps = before.total_wraps + (total < words).astype(jnp.uint32)
  return state._replace(
    counters=before._replace(
      words_sent=saturated_sum(before.words_sent, words),
      words_used=saturated_sum(before.words_used, words),
      total_words=total,
      total_wraps=wraps,
    )
  )
