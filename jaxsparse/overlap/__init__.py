"""Hide what must be sent behind backward: which gradients travel together, which at once, and a program that does it.

plan -> Plan            groups and their predicted timeline (plans, search), priced by one simulation (network)
figure                  its timeline as a picture (picture)
"""

from jaxsparse.overlap.network import Link, Sent
from jaxsparse.overlap.picture import figure
from jaxsparse.overlap.plans import Group, Plan, plan

__all__ = ["Group", "Link", "Plan", "Sent", "figure", "plan"]
