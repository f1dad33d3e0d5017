"""Allocation policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from placement.policies.baselines.fair_share import FairSharePolicy
from placement.policies.baselines.fifo import FifoPolicy
from placement.policies.baselines.fixed import FixedPolicy
from placement.policies.baselines.optimus import OptimusPolicy
from placement.policies.baselines.pollux import PolluxPolicy
from placement.policies.baselines.sia import SiaPolicy
from placement.policies.baselines.throughput_efficiency import ThroughputEfficiencyPolicy
from placement.policies.baselines.tiresias import TiresiasPolicy
from placement.policies.baselines.utility_cost import UtilityCostPolicy
from placement.policies.goodput.policy import GoodputPolicy
from placement.policies.own import load, own_policy
from placement.policies.shared.base import Policy

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


def make_policy(policy: object) -> Policy:
    """The policy that a name, an object or a function stands for.

    Args:
        policy: a registered name; ``module:name`` or ``path/to/file.py:name`` of one's own; a policy object or class;
            or a plain function ``(jobs, cluster, now_s) -> {job: workers or Target}``.

    Raises:
        ValueError: no policy has that name.
        TypeError: the object can be none.
    """
    if not isinstance(policy, str):
        return own_policy(policy)
    if policy in POLICIES:
        return POLICIES[policy]()
    if ":" in policy:
        try:
            return own_policy(load(policy))
        except TypeError as error:  # the name is right, what it names is not
            raise ValueError(f"policy {policy!r}: {error}") from error
    raise ValueError(
        f"policy must be one of {', '.join(sorted(POLICIES))}, or a policy of your own as module:name or "
        f"path/to/file.py:name, but got {policy!r}"
    )
