"""Metrics of the allocator for Prometheus: the cluster's slots, its jobs and its decisions (pure)."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from placement.allocator.slot_use import SlotUse, slot_uses
from placement.allocator.snapshot import CoreSnapshot, JobState, Trigger
from placement.autoscaling.autoscaler import ScalingDecision
from placement.cluster.cluster import SPOT, Node
from placement.cluster.node_types import NodeType
from placement.instruments import Guarded, Sample, WriteSamples, counter, gauge, histogram, label_value

if TYPE_CHECKING:
    from placement.allocator.core import AllocatorCore

PERIOD_S = 1.0

SLOTS = gauge(
    "elastic_slots", "GPUs of the cluster, of nodes without GPUs their CPUs, by what they do.", "state", "gpu_type"
)
JOBS = gauge("elastic_jobs", "Jobs that the allocator knows, by phase.", "phase")
DECISION_SECONDS = histogram(
    "elastic_decision_seconds",
    "CPU time of a decision [s].",
    (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)
DECISIONS = counter("elastic_decisions_total", "Decisions, by what led to them.", "trigger")
NODES_WANTED = gauge("elastic_nodes_wanted", "Nodes that there should be.", "type", "market")
NODES_MISSING = gauge("elastic_nodes_missing", "Of these, nodes that are not there yet.", "type", "market")
SLOT_PRICE = gauge(
    "elastic_slot_price", "Dual price of one slot: what the last decision's value would gain by it.", "gpu_type"
)
NODES_AVOIDED = gauge(
    "elastic_nodes_avoided", "Nodes that are avoided since workers failed there, by whom: all jobs, or some.", "by"
)
INSTRUMENTS = (SLOTS, JOBS, DECISION_SECONDS, DECISIONS, NODES_WANTED, NODES_MISSING, SLOT_PRICE, NODES_AVOIDED)

_SLOT_STATES = tuple(field.name for field in dataclasses.fields(SlotUse))
_PHASES = ("waiting", "starting", "running", "paused")
_NO_TYPE = "none"
_NO_PRICES: Mapping[str, float] = {}


def cluster_samples(
    core: CoreSnapshot,
    scaling: ScalingDecision | None = None,
    node_types: Sequence[NodeType] = (),
    prices: Mapping[str, float] = _NO_PRICES,
) -> tuple[Sample, ...]:
    """Return the current values of all gauges."""
    found = _slot_samples(core.cluster.nodes, core.jobs.values())
    phases = collections.Counter(map(_phase, core.jobs.values()))
    found += [sample for phase in _PHASES for sample in JOBS.sample(phases[phase], phase)]
    avoided = [each for each in core.node_failures if each.by_all or each.avoided_by]
    by_all = sum(each.by_all for each in avoided)
    found += [*NODES_AVOIDED.sample(by_all, "all"), *NODES_AVOIDED.sample(len(avoided) - by_all, "some")]
    for gpu_type, price in prices.items():
        found += SLOT_PRICE.sample(price, label_value(gpu_type or _NO_TYPE))
    if scaling is not None:
        market = {each.name: SPOT if each.spot else "on-demand" for each in node_types}
        for name in sorted({*market, *scaling.nodes}):
            labels = label_value(name), market.get(name, "")
            found += NODES_WANTED.sample(scaling.nodes.get(name, 0), *labels)
            found += NODES_MISSING.sample(scaling.add.get(name, 0), *labels)
    return tuple(found)


def _phase(job: JobState) -> str:
    """Return a job's phase: running if it holds resources for workers, starting if it only has a target."""
    if job.view.paused and not job.target:
        return "paused"
    return "running" if job.view.allocation else "starting" if job.target else "waiting"


def _slot_samples(nodes: Sequence[Node], jobs: Iterable[JobState]) -> list[Sample]:
    """Return slots by GPU type and state; a type's states add up to all its slots."""
    counts = collections.defaultdict[tuple[str, str], float](float)
    uses = slot_uses(nodes, jobs)
    for node in nodes:
        for state in _SLOT_STATES:
            counts[label_value(node.gpu_type or _NO_TYPE), state] += getattr(uses[node.node_id], state)
    kinds = sorted({kind for kind, _ in counts})
    return [s for kind in kinds for state in _SLOT_STATES for s in SLOTS.sample(counts[kind, state], state, kind)]


class AllocatorMetrics:
    """Writer of the allocator's metrics at regular intervals."""

    def __init__(self, write: WriteSamples | None, node_types: Sequence[NodeType] = ()) -> None:
        self._write, self._node_types = write, node_types
        self._written_s = float("-inf")
        self._guarded = Guarded("the allocator")

    def decided(self, trigger: Trigger | None, cpu_s: float) -> None:
        """Write metric samples for one decision, which had this trigger and used `cpu_s` seconds of CPU time."""
        if self._write is not None and trigger is not None:
            write, cause = self._write, trigger
            self._guarded(lambda: write((*DECISIONS.sample(1, cause.value), *DECISION_SECONDS.sample(cpu_s))))

    def tick(self, now_s: float, core: AllocatorCore, scaling: ScalingDecision | None) -> None:
        """Write the gauges at most once a second; ``now_s`` is monotonic [s]."""
        if self._write is None or now_s - self._written_s < PERIOD_S:
            return
        self._written_s = now_s
        write, types = self._write, self._node_types
        self._guarded(lambda: write(cluster_samples(core.snapshot(core.recorded), scaling, types, core.prices)))
