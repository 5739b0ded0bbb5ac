"""Overlaps communication with backward: plans which gradients are sent in one message and when, and runs the plan.

measure                 backward time of each leaf of a model (measured); `js.costs.link_of` has α, β, γ
plan -> Plan            groups of layers (plans, search) and their timeline, predicted by one simulation (network)
compiler_options        of a program that carries out a plan by `js.bucketed_transform` (buckets): they keep its order
"""

from jaxsparse._compat.compiling import compiler_options
from jaxsparse.overlap.measured import Layers, measure
from jaxsparse.overlap.plans import Plan, plan
from jaxsparse.types import Link

__all__ = ["Layers", "Link", "Plan", "compiler_options", "measure", "plan"]
