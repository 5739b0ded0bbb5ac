"""`js.atomic`: a step that is skipped leaves everything as it was, in all transformations of a chain."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from jaxsparse.transform import state as states


def atomic(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """`tx` whose steps take place on all workers or not at all.

  Where a jaxsparse transform skips a step, because a gradient of a worker or a sum holds NaN or Inf, it returns zeros
  and keeps its residual. What follows it in an `optax.chain` does not know: momentum moves the parameters on, AdamW
  decays them, a schedule counts the step. With several transforms (`optax.multi_transform`) one of them may skip while
  another one does not. Under `atomic` such a step returns zeros and leaves the whole state as it was, but for the
  counters `skipped`, `skipped_steps` and the words sent of `js.metrics`. No message is added.

  `js.make_train_step` does it; wrap the chain of a `shard_map` of your own. The state is that of `tx`.

  Args:
    tx: a chain with jaxsparse transforms.

  Example:
    >>> import jax, jax.numpy as jnp, optax, jaxsparse as js
    >>> comm = js.SimComm("workers", members=2)
    >>> tx = js.atomic(optax.chain(js.dense_transform(comm), optax.sgd(1.0, momentum=0.9)))
    >>> params, grads = jnp.zeros(1), jnp.array([[1.0], [3.0]])
    >>> update = jax.vmap(tx.update, in_axes=(0, 0), axis_name="workers")
    >>> state = jax.vmap(lambda _: tx.init(params), axis_name="workers")(grads)
    >>> _, state = update(grads, state)
    >>> updates, state = update(grads.at[1].set(jnp.nan), state)
    >>> updates.ravel(), state[1][0].trace.ravel()  # not -1.8, and not 1.8
    (Array([0., 0.], dtype=float32), Array([2., 2.], dtype=float32))
  """
  tx = optax.with_extra_args_support(tx)

  def update(
    updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
  ) -> tuple[optax.Updates, Any]:
    updates, after = tx.update(updates, state, params, **extra)
    skipped = states.skipped(after)
    updates = jax.tree.map(lambda u: jnp.where(skipped, jnp.zeros_like(u), u), updates)
    return updates, committed(skipped, state, after)

  return optax.GradientTransformationExtraArgs(tx.init, update)


def committed(skipped: jax.Array, before: Any, after: Any) -> Any:
  """The state `after` a step, or where it is `skipped` that `before` it with the counters of the skipped step.

  A transform undoes its own step, without a pass over its residual. Only where there are several may one of them have
  made a step that another one skips.
  """
  is_part = lambda node: states.is_reduce_state(node) or states.is_local_state(node)
  alone = sum(map(is_part, jax.tree.leaves(after, is_leaf=is_part))) == 1
  keep = lambda old, new: new if alone and is_part(old) else undone(skipped, old, new)
  return jax.tree.map(keep, before, after, is_leaf=is_part)


def undone(skipped: jax.Array, before: Any, after: Any) -> Any:
  """`committed` where no transform has undone its step."""

  def keep(old: Any, new: Any) -> Any:
    if not states.is_reduce_state(old):
      return _old_if(skipped, old, new)
    counters = new.counters._replace(
      skipped=jnp.full_like(new.counters.skipped, skipped),
      skipped_steps=old.counters.skipped_steps + skipped.astype(jnp.int32),
    )
    carried = jax.tree.map(lambda a, b: jnp.where(skipped, a, b), old.carried, new.carried)
    return new._replace(carried=carried, counters=counters)

  return jax.tree.map(keep, before, after, is_leaf=states.is_reduce_state)


@jax.jit
def _old_if(skipped: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
  """An equation of its own in the jaxpr, which `commit_early` finds."""
  return jnp.where(skipped, old, new)


def commit_early(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
  """The program with each array of a state chosen, old or new, where the new one is computed, and read as chosen.

  An optimizer computes its update from its new state. As `atomic` is written, it reads a state that a skipped step does
  not keep, so that XLA needs memory for both. In a skipped step the update is zero whatever it is computed from. So it
  can be computed from the state that is kept, which takes the place of the old one.
  """
  jaxpr = closed.jaxpr
  is_choice = lambda equation: equation.params.get("name") == "_old_if"
  # First all that tells whether the step is skipped.
  wanted = {equation.invars[0] for equation in jaxpr.eqns if is_choice(equation)}
  first: list[core.JaxprEqn] = []
  for equation in reversed(jaxpr.eqns):
    if not wanted.isdisjoint(equation.outvars):
      wanted.update(atom for atom in equation.invars if isinstance(atom, core.Var))
      first.insert(0, equation)
  rest = [equation for equation in jaxpr.eqns if wanted.isdisjoint(equation.outvars)]
  inputs = {*jaxpr.invars, *jaxpr.constvars}
  choices = [one for one in rest if is_choice(one) and one.invars[1] in inputs]
  pending = {choice.invars[2]: choice for choice in choices}
  equations, chosen = list(first), {}

  def choose(variables: Iterable[Any]) -> None:
    for new in variables:
      if choice := pending.pop(new, None):
        equations.append(choice)
        chosen[new] = choice.outvars[0]
        choose(choice.outvars)

  known = inputs.union(*(equation.outvars for equation in first))
  choose([new for new in pending if new in known])
  moved = {id(choice) for choice in choices}
  for equation in rest:
    if id(equation) not in moved:
      atoms = [chosen.get(atom, atom) if isinstance(atom, core.Var) else atom for atom in equation.invars]
      equations.append(equation.replace(invars=atoms))
      choose(equation.outvars)
  return core.ClosedJaxpr(jaxpr.replace(eqns=equations), closed.consts)
