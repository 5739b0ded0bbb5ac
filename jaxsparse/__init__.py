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
from jaxsparse.collectives import Collective, SparseCollective, collective_names, collective_options, make_collective
from jaxsparse.collectives.a2sgd import a2sgd_transform
from jaxsparse.collectives.dense import dense_transform
from jaxsparse.collectives.gaussiank import gaussiank_transform
from jaxsparse.collectives.gtopk import gtopk_transform
from jaxsparse.collectives.oktopk import oktopk_transform
from jaxsparse.collectives.qsgd import qsgd_transform
from jaxsparse.collectives.randomk import randomk_transform
from jaxsparse.collectives.spardl import spardl_transform
from jaxsparse.collectives.topka import topka_transform
from jaxsparse.collectives.topkdsa import topkdsa_transform
from jaxsparse.comm import AxisComm, SimComm
from jaxsparse.comm.mpi import MpiComm
from jaxsparse.overlap.buckets import bucketed_transform
from jaxsparse.train.simulation import Simulated, simulate
from jaxsparse.train.step import TrainStep, init, make_train_step
from jaxsparse.train.worker import StepMetrics
from jaxsparse.transform.local import PerWorker
from jaxsparse.transform.metrics import Metrics, metrics
from jaxsparse.transform.state import ReduceState, specs
from jaxsparse.transform.update import make_transform, transform_of
from jaxsparse.types import Comm, Cost, Counters, Reduced, Sparse, State

__version__ = "0.1.0"

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
  "a2sgd_transform",
  "bucketed_transform",
  "collective_names",
  "collective_options",
  "costs",
  "dense_transform",
  "gaussiank_transform",
  "gtopk_transform",
  "init",
  "make_collective",
  "make_train_step",
  "make_transform",
  "metrics",
  "oktopk_transform",
  "overlap",
  "partial",
  "qsgd_transform",
  "randomk_transform",
  "select",
  "simulate",
  "spardl_transform",
  "specs",
  "topka_transform",
  "topkdsa_transform",
  "transform_of",
]
