"""Allocation policies by name.

A policy of one's own needs no registration: pass the object instead of a name.
"""

from placement.policies.base import Policy, Target
from placement.policies.fair_share import FairSharePolicy
from placement.policies.fifo import FifoPolicy
from placement.policies.fixed import FixedPolicy
from placement.policies.goodput import GoodputPolicy
from placement.policies.optimus import OptimusPolicy
from placement.policies.pollux import PolluxPolicy
from placement.policies.registry import POLICIES, make_policy
from placement.policies.sia import SiaPolicy
from placement.policies.throughput_efficiency import ThroughputEfficiencyPolicy
from placement.policies.tiresias import TiresiasPolicy
from placement.policies.utility_cost import UtilityCostPolicy

__all__ = [
    "POLICIES",
    "FairSharePolicy",
    "FifoPolicy",
    "FixedPolicy",
    "GoodputPolicy",
    "OptimusPolicy",
    "Policy",
    "PolluxPolicy",
    "SiaPolicy",
    "Target",
    "ThroughputEfficiencyPolicy",
    "TiresiasPolicy",
    "UtilityCostPolicy",
    "make_policy",
]
