"""Whether a cluster could ever run a job (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from placement.cluster.cluster import TOLERANCE, Node, Resources
from placement.cluster.sizes import ANY_SIZE, AllowedSizes


def impossible(
    bundle: Resources,
    min_workers: int,
    label_selector: Mapping[str, str],
    nodes: Sequence[Node],
    sizes: AllowedSizes = ANY_SIZE,
) -> str | None:
    """Why these nodes, if no other job used them, could not run even the smallest size of a job.

    Args:
        bundle: resources of one worker.
        min_workers: fewest workers the job may run with.
        label_selector: labels that a worker's node must have.
        nodes: all living nodes; only ``total`` and ``labels`` count.
        sizes: numbers of workers that the job may have.

    Returns:
        A sentence that names the resource (or label) and what to change; None if the job could run.
    """
    fitting = [node for node in nodes if node.matches(label_selector)]
    if not fitting:
        return _no_such_label(label_selector, nodes)
    where = f" with the labels {dict(label_selector)}" if label_selector else ""
    for resource, amount in bundle.items():
        most = max(node.total.get(resource, 0.0) for node in fitting)
        if most + TOLERANCE < amount:
            return (
                f"a worker needs {amount:g} {resource}, but no node{where} has more than {most:g}; change "
                "ScalingConfig(use_gpu, resources_per_worker, accelerator_type) or add a node with "
                f"{resource}"
            )
    capacity = sum(workers_on(node, bundle) for node in fitting)
    if capacity == 0:
        return (
            f"a worker needs {_text(bundle)} on one node, but no single node{where} has all of it; "
            "change ScalingConfig(resources_per_worker) or add such a node"
        )
    if capacity < min_workers:
        fewer = sizes.at_most(capacity)
        way_out = (
            f"lower ScalingConfig(num_workers), for example to ({fewer}, {min_workers})"
            if fewer
            else f"SchedulingConfig({sizes}) allows none so small: change it, if it asks for too much"
        )
        return (
            f"at least {min_workers} workers of {_text(bundle)} are asked for, but all {len(fitting)} node(s)"
            f"{where} together have room for {capacity}; {way_out}, or add nodes"
        )
    return None


def workers_on(node: Node, bundle: Resources) -> int:
    """How many workers an otherwise empty node has room for."""
    return min(int((node.total.get(name, 0.0) + TOLERANCE) / amount) for name, amount in bundle.items())


def _no_such_label(label_selector: Mapping[str, str], nodes: Sequence[Node]) -> str:
    """Why no node meets the conditions on labels, and which values there are, as a sentence."""
    if not nodes:
        return "the cluster has no living node; start one with `ray start`"
    have = sorted({f"{key}={node.labels[key]}" for node in nodes for key in label_selector if key in node.labels})
    return (
        f"no node has the labels {dict(label_selector)}; there are "
        f"{', '.join(have) or 'none of these keys'}. Change ScalingConfig(label_selector) or start nodes "
        "with `ray start --labels`"
    )


def _text(bundle: Resources) -> str:
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in bundle.items()) + "}"
