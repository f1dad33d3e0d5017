"""Allocation policies by name.

A policy of one's own needs no registration: pass the object instead of a name.
"""

from placement.policies.base import Policy, Target
from placement.policies.fixed import FixedPolicy
from placement.policies.goodput import GoodputPolicy
from placement.policies.optimus import OptimusPolicy
from placement.policies.pollux import PolluxPolicy
from placement.policies.registry import POLICIES, make_policy
from placement.policies.tiresias import TiresiasPolicy

__all__ = [
    "POLICIES",
    "FixedPolicy",
    "GoodputPolicy",
    "OptimusPolicy",
    "Policy",
    "PolluxPolicy",
    "Target",
    "TiresiasPolicy",
    "make_policy",
]
