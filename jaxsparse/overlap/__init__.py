"""Overlaps communication with backward: plans which gradients are sent in one message and when, and runs the plan.

measure, link_of        backward time of each leaf of a model, and α, β, γ of its communication (measured)
plan -> Plan            groups of layers (plans, search) and their timeline, predicted by one simulation (network)
compiler_options        of a program that carries out a plan by `js.bucketed_transform` (buckets): they keep its order
"""

from jaxsparse.overlap.measured import Layers, link_of, measure
from jaxsparse.overlap.network import Link
from jaxsparse.overlap.plans import Plan, plan
from jaxsparse.train.compiling import compiler_options

__all__ = ["Layers", "Link", "Plan", "compiler_options", "link_of", "measure", "plan"]
