"""Allocation policies by name.

A custom policy needs no registration: pass the object instead of a name.
"""

from placement.policies.baselines.fair_share import FairSharePolicy
from placement.policies.baselines.fixed import FixedPolicy
from placement.policies.baselines.throughput_efficiency import ThroughputEfficiencyPolicy
from placement.policies.baselines.utility_cost import UtilityCostPolicy
from placement.policies.goodput.policy import GoodputPolicy
from placement.policies.registry import POLICIES, make_policy
from placement.policies.shared.base import Policy, Target

__all__ = [
    "POLICIES",
    "FairSharePolicy",
    "FixedPolicy",
    "GoodputPolicy",
    "Policy",
    "Target",
    "ThroughputEfficiencyPolicy",
    "UtilityCostPolicy",
    "make_policy",
]
