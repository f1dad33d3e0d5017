"""What the jobs that run now would have on other nodes or under another policy (pure)."""

from __future__ import annotations

import re

from placement.allocator.snapshot import AllocatorLook
from placement.errors import InputError
from placement.policies import POLICIES
from placement.simulator.results.outlook import Outlook, outlook, read_nodes

MOST_JOBS, MOST_NODES = 200, 1000
_SIZES = re.compile(r":(\d+)x(\d+)")
_MOST_TEXT = 200


def compare(
    look: AllocatorLook | None, nodes: str, policy: str, now_s: float
) -> tuple[tuple[Outlook, ...], tuple[Outlook, ...]]:
    """Each job here, and there.

    Args:
        look: the allocator's; None while there is none.
        nodes: such as ``T4:4x8``; empty for the present ones.
        policy: a registered name; empty for the cluster's own.
        now_s: present time [s since the epoch].

    Raises:
        InputError: the nodes or the policy are wrong, or there is nothing to ask about.
    """
    views = [state.view for state in look.core.jobs.values()] if look is not None else []
    if look is None or not views:
        raise InputError("no elastic job runs on this cluster, so there is nothing to ask about")
    if len(views) > MOST_JOBS:
        raise InputError(f"at most {MOST_JOBS} jobs are asked about here, but {len(views)} run")
    # A policy of a user's own is code, which no page may name.
    if policy and policy not in POLICIES:
        raise InputError(f"policy must be one of {', '.join(sorted(POLICIES))}, but got {policy!r}")
    if look.core.policy not in POLICIES:
        raise InputError(f"the cluster's policy {look.core.policy!r} is a user's own: ask with `simulate --live`")
    if len(nodes) > _MOST_TEXT:
        raise InputError(f"nodes must be at most {_MOST_TEXT} characters, but got {len(nodes)}")
    sizes = [(int(count), int(devices)) for count, devices in _SIZES.findall(nodes)]
    if sum(count for count, _ in sizes) > MOST_NODES or any(devices > MOST_NODES for _, devices in sizes):
        raise InputError(f"nodes must be {MOST_NODES} at most, with as many devices each, but got {nodes!r}")
    other = read_nodes(nodes, views) if nodes else look.core.cluster
    rules = look.core.constraints
    now = outlook(views, look.core.cluster, look.core.policy, now_s, stay=True, constraints=rules)
    return now, outlook(views, other, policy or look.core.policy, now_s, constraints=rules)
