"""The public names of jaxsparse; `jaxsparse/__init__.py` imports this module at the first use of one."""

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
