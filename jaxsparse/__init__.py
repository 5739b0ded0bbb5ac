"""Communication-efficient data-parallel training in JAX.

A sparse all-reduce is an ordinary JAX function over the verbs of a `Comm`. A gradient
passes through the packages in this order:

    gradient pytree
      -> one f32[n]                            arrays
      -> + residual; the largest entries       select
      -> rounds of messages between workers    collectives, over comm (messages) and sparse (entries)
      -> total, next residual
      -> / P; an optax update as a pytree      transform
      -> new parameters                        train

    arrays        gradient pytree <-> one f32[n]; sums of a fixed order, noise, factors of matrices
    launch        starts the ranks of a run, and tells a process which one it is
    comm          the verbs, for the axis of a mesh, the simulator and MPI; checks that replicated values are equal
    low_bit       signs and few-bit levels of dense arrays, with a scale for each block
    sparse        sparse vectors, bitsets, wire formats, message sizes
    select        top-k and thresholds: which entries are sent
    collectives   the algorithms: SparDL, Ok-Topk, signs, PowerSGD, dense all-reduce, …; `baselines` to compare with
    transform     a collective as an `optax.GradientTransformation`; its state and metrics
    train         optimizer state and training step of all workers; the simulator `js.simulate`
    costs         messages and words of an update, and seconds by a measured α-β model
    overlap       overlaps communication with backward: plans groups of gradients, and runs the plan
    racing        methods tried on a user's own model: `js.race`, `js.recipes`
    weights       versions of parameters for readers: a chain of exact differences
    partial       rounds of workers that come and go, and partial reduce: training that waits for nobody
    doctor        checks an installation

The four lines that a training program needs:

    tx = optax.chain(js.spardl_transform("workers", density=0.01), optax.sgd(0.1))
    state = js.init(tx, params, mesh, axis="workers")
    step = js.make_train_step(loss_fn, tx, mesh, axis="workers")
    params, state, metrics = step(params, state, batch)
"""

from jaxsparse import costs, overlap, partial, select, weights
from jaxsparse._compat import traced_for
from jaxsparse.collectives import (
  Collective,
  SparseCollective,
  a2sgd,
  chunktopk,
  collective_names,
  dense,
  make_collective,
  nbit,
  oktopk,
  onebit,
  powersgd,
  rows,
  spardl,
)
from jaxsparse.comm import SimComm
from jaxsparse.comm.mpi import MpiComm
from jaxsparse.low_bit.gathers import all_gather, psum_scatter
from jaxsparse.overlap.buckets import bucketed_transform
from jaxsparse.racing.recipes import recipes
from jaxsparse.racing.run import race
from jaxsparse.train.agreement import agreement
from jaxsparse.train.conversion import convert, resize
from jaxsparse.train.flushing import flush
from jaxsparse.train.simulation import simulate
from jaxsparse.train.stacked import stacked
from jaxsparse.train.starting import abstract_state
from jaxsparse.train.step import init, make_train_step
from jaxsparse.transform import factories
from jaxsparse.transform.adam import scale_by_window_adam
from jaxsparse.transform.atomic import atomic
from jaxsparse.transform.averaging import average_momentum
from jaxsparse.transform.factories import make_transform
from jaxsparse.transform.local import local_steps
from jaxsparse.transform.metrics import Metrics, metrics
from jaxsparse.transform.named import (
  demo_transform,
  diloco,
  sparseloco,
  streaming_diloco,
)
from jaxsparse.transform.residuals import own_params
from jaxsparse.transform.restored import norm_restored
from jaxsparse.transform.specs import specs
from jaxsparse.transform.wrappers import ef21, momentum_corrected, warmed_up
from jaxsparse.types import Comm, Cost, Counters, Reduced, Sparse, State

__version__ = "0.1.0"

a2sgd_transform = factories.transform_function(a2sgd.A2SGD)
chunktopk_transform = factories.transform_function(chunktopk.ChunkTopk)
dense_transform = factories.transform_function(dense.Dense)
nbit_transform = factories.transform_function(nbit.NBit)
oktopk_transform = factories.transform_function(oktopk.OkTopk)
onebit_transform = factories.transform_function(onebit.OneBit)
powersgd_transform = factories.transform_function(powersgd.PowerSGD)
rows_transform = factories.transform_function(rows.Rows)
spardl_transform = factories.transform_function(spardl.SparDL)

__all__ = ["costs", "overlap", "partial", "select", "weights"]
__all__ += [
  "Collective",
  "SparseCollective",
  "collective_names",
  "make_collective",
]
__all__ += ["Comm", "MpiComm", "SimComm", "all_gather", "psum_scatter"]
__all__ += ["Cost", "Counters", "Metrics", "Reduced", "Sparse", "State", "metrics"]
__all__ += [
  "atomic",
  "bucketed_transform",
  "ef21",
  "make_transform",
  "momentum_corrected",
  "norm_restored",
  "specs",
  "warmed_up",
]
__all__ += [
  "average_momentum",
  "demo_transform",
  "diloco",
  "local_steps",
  "own_params",
  "scale_by_window_adam",
]
__all__ += ["sparseloco", "streaming_diloco"]
__all__ += [
  "abstract_state",
  "agreement",
  "convert",
  "flush",
  "init",
  "make_train_step",
  "race",
  "recipes",
  "resize",
]
__all__ += ["simulate", "stacked", "traced_for"]
__all__ += [
  "a2sgd_transform",
  "chunktopk_transform",
  "dense_transform",
  "nbit_transform",
  "oktopk_transform",
  "onebit_transform",
  "powersgd_transform",
  "rows_transform",
  "spardl_transform",
]
__all__.sort()
