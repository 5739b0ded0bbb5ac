"""Hide what must be sent behind backward: which gradients travel together, which at once, and a program that does it.

measure, link_of        backward time of each leaf of a model, and what a communication costs, measured (measured)
runtime_of              whether a runtime sends at once, and while it computes (measured)
plan -> Plan            groups and their predicted timeline (plans, search), priced by one simulation (network)
bucketed_transform      the plan carried out, in a program that compiler_options keep as it is (buckets)
figure                  its timeline as a picture (picture)
traced                  what a run really did, from the profiler's trace (traced)
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
