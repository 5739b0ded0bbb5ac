"""Communication-efficient data-parallel training in JAX.

A sparse all-reduce is an ordinary JAX function over five communication verbs. The way of a gradient through this
package is the order of its modules:

    gradient pytree
      -> f32[n]                                flatten
      -> + residual, the largest entries       select
      -> rounds of messages                    collectives, over comm and routes, sparse, ladder and wire
      -> total, new residual                   state
      -> / P, pytree, the next transformation  transform



`training` wraps that in a step over the workers of an `engine`: a mesh, of many processes too, MPI (`comm_mpi`) or the
simulator. `worker` is what each of them does, with `perworker` where they have parameters of their own; `replication`
checks, before a step runs, that replicated values stay equal, `replicas` compares those that workers hold, and
`telemetry` reads what was sent, in counters that do not wrap (`saturating`). `launch` starts the ranks of a run,
`simulation` runs one reduction with any number of workers on one device, `costs` reads the messages and words off its
jaxpr and predicts seconds from what it measures with `timing`, and `doctor` says what an installation can do.

`overlap` plans which gradients travel together while backward goes on, and carries the plan out, compiled as
`compiling` says. `partial` is for workers of different speed, who average models in groups instead.

    tx = optax.chain(js.spardl_transform("workers", density=0.01), optax.sgd(0.1))
    state = js.init(tx, params, mesh, axis="workers")
    step = js.make_train_step(loss_fn, tx, mesh, axis="workers")
    params, state, metrics = step(params, state, batch)
"""

import importlib.util
import typing

from jaxsparse import launch as launch  # in a rank, replaces `sys.exit` before the program looks it up

__version__ = "0.1.0"

if typing.TYPE_CHECKING:
  from jaxsparse._door import *  # noqa: F403
else:

  def __getattr__(name: str) -> typing.Any:
    """Imports a module, or all public names, at the first use of one: the launcher starts without JAX."""
    if importlib.util.find_spec(f"jaxsparse.{name}"):
      return importlib.import_module(f"jaxsparse.{name}")
    if name == "__all__" or not name.startswith("_"):
      door = importlib.import_module("jaxsparse._door")
      globals().update({public: getattr(door, public) for public in ("__all__", *door.__all__)})
      if name in globals():
        return globals()[name]
    raise AttributeError(f"module 'jaxsparse' has no attribute {name!r}", name=name)

  def __dir__() -> list[str]:
    """All public names, for `help` and for completion."""
    return sorted({*globals(), *__getattr__("__all__")})
