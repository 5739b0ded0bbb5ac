"""Hide what must be sent behind backward: which gradients travel together, which at once, and a program that does it.

plan -> Plan            groups and their predicted timeline (plans, search), priced by one simulation (network)
"""

from jaxsparse.overlap.network import Link, Sent
from jaxsparse.overlap.plans import Group, Plan, plan

__all__ = ["Group", "Link", "Plan", "Sent", "plan"]
