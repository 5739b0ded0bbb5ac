"""Overlaps communication with backward: plans which gradients are sent in one message and when, and runs the plan.

measure, link_of        backward time of each leaf of a model, and α, β, γ of its communication (measured)
runtime_of              whether a runtime overlaps communications with each other and with arithmetic (measured)
plan -> Plan            groups of layers (plans, search) and their timeline, predicted by one simulation (network)
bucketed_transform      a transform that sends the groups of a plan; compiler_options keep their order (buckets)
figure                  a picture of the timeline (picture)
traced                  the timeline of a real run, from a trace of the profiler (traced)
"""

from jaxsparse.overlap.buckets import bucketed_transform
from jaxsparse.overlap.measured import Layers, Runtime, link_of, measure, runtime_of
from jaxsparse.overlap.network import Link, Sent
from jaxsparse.overlap.picture import figure
from jaxsparse.overlap.plans import Group, Plan, plan
from jaxsparse.overlap.traced import Traced, traced
from jaxsparse.train.compiling import compiler_options

__all__ = [
  "Group",
  "Layers",
  "Link",
  "Plan",
  "Runtime",
  "Sent",
  "Traced",
  "bucketed_transform",
  "compiler_options",
  "figure",
  "link_of",
  "measure",
  "plan",
  "runtime_of",
  "traced",
]
