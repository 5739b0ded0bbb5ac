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

from jaxsparse import costs, overlap, partial, select
from jaxsparse.collectives import (
  Collective,
  SparseCollective,
  a2sgd,
  collective_names,
  collective_options,
  dense,
  gaussiank,
  gtopk,
  make_collective,
  oktopk,
  qsgd,
  randomk,
  spardl,
  topka,
  topkdsa,
)
from jaxsparse.comm import AxisComm, SimComm
from jaxsparse.comm.mpi import MpiComm
from jaxsparse.overlap.buckets import bucketed_transform
from jaxsparse.train.simulation import Simulated, simulate
from jaxsparse.train.step import TrainStep, init, make_train_step
from jaxsparse.train.worker import StepMetrics
from jaxsparse.transform import factories
from jaxsparse.transform.factories import make_transform
from jaxsparse.transform.local import PerWorker
from jaxsparse.transform.metrics import Metrics, metrics
from jaxsparse.transform.specs import specs
from jaxsparse.transform.state import ReduceState
from jaxsparse.transform.update import transform_of
from jaxsparse.types import Comm, Cost, Counters, Reduced, Sparse, State

__version__ = "0.1.0"

a2sgd_transform = factories.transform_function(a2sgd.A2SGD)
dense_transform = factories.transform_function(dense.Dense)
gaussiank_transform = factories.transform_function(gaussiank.GaussianK)
gtopk_transform = factories.transform_function(gtopk.GTopk)
oktopk_transform = factories.transform_function(oktopk.OkTopk)
qsgd_transform = factories.transform_function(qsgd.QSGD)
randomk_transform = factories.transform_function(randomk.RandomK)
spardl_transform = factories.transform_function(spardl.SparDL)
topka_transform = factories.transform_function(topka.TopkA)
topkdsa_transform = factories.transform_function(topkdsa.TopkDSA)

__all__ = [
  "AxisComm",
  "Collective",
  "Comm",
  "Cost",
  "Counters",
  "Metrics",
  "MpiComm",
  "PerWorker",
  "ReduceState",
  "Reduced",
  "SimComm",
  "Simulated",
  "Sparse",
  "SparseCollective",
  "State",
  "StepMetrics",
  "TrainStep",
  "bucketed_transform",
  "collective_names",
  "collective_options",
  "costs",
  "init",
  "make_collective",
  "make_train_step",
  "make_transform",
  "metrics",
  "overlap",
  "partial",
  "select",
  "simulate",
  "specs",
  "transform_of",
]
__all__ += [f"{name}_transform" for name in collective_names()]
__all__.sort()
