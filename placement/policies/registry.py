"""Allocation policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from placement.policies.base import Policy
from placement.policies.fair_share import FairSharePolicy
from placement.policies.fifo import FifoPolicy
from placement.policies.fixed import FixedPolicy
from placement.policies.goodput import GoodputPolicy
from placement.policies.optimus import OptimusPolicy
from placement.policies.pollux import PolluxPolicy
from placement.policies.sia import SiaPolicy
from placement.policies.throughput_efficiency import ThroughputEfficiencyPolicy
from placement.policies.tiresias import TiresiasPolicy
from placement.policies.utility_cost import UtilityCostPolicy

POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "fair_share": FairSharePolicy,
        "fifo": FifoPolicy,
        "fixed": FixedPolicy,
        "goodput": GoodputPolicy,
        "optimus": OptimusPolicy,
        "pollux": PolluxPolicy,
        "sia": SiaPolicy,
        "throughput_efficiency": ThroughputEfficiencyPolicy,
        "tiresias": TiresiasPolicy,
        "utility_cost": UtilityCostPolicy,
    }
)
"""Registered policies; the contract tests run over all of them."""


def make_policy(policy: str | Policy) -> Policy:
    """The policy of that name, or the policy itself.

    Raises:
        ValueError: if no policy has that name.
        TypeError: if the object is not a policy.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(sorted(POLICIES))}, or a Policy, but got {policy!r}")
        return POLICIES[policy]()
    if not isinstance(policy, Policy):
        raise TypeError(f"policy must have a name and decide(jobs, cluster, now_s), but got {policy!r}")
    return policy
