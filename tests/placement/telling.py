"""A simulated cluster whose allocator is recorded, as a real one would be."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from placement.allocator.config import AllocatorConfig
from placement.allocator.core import AllocatorCore
from placement.allocator.events import Event, Instruction, NodesChanged
from placement.allocator.recording import decision_line, event_line, start_line
from placement.cluster.cluster import Cluster
from placement.knowledge.knowledge import Knowledge
from placement.policies import Policy
from placement.simulator.live import LiveDriver
from placement.simulator.nodes.clusters import parse_cluster
from placement.simulator.nodes.disturbances import Disturbances
from placement.simulator.workloads.profiles import Application
from placement.simulator.workloads.traces import Lengths, TraceJob
from placement.simulator.world.job import SimulatedJob
from placement.simulator.world.rules import LiveRules
from placement.simulator.world.state import World


class TellingCore(AllocatorCore):
    """The core, and what it is told and decides as lines."""

    def __init__(self, policy: Policy, config: AllocatorConfig, knowledge: Knowledge) -> None:
        super().__init__(policy, config, knowledge=knowledge)
        self.lines = [start_line(policy, config, settling=False)]

    def handle(self, event: Event, now_s: float, steady_s: float | None = None) -> list[Instruction]:
        """See ``AllocatorCore``."""
        self.lines.append(event_line(event, now_s, steady_s))
        before = self.recorded
        instructions = super().handle(event, now_s, steady_s)
        self.lines += [decision_line(record) for record in self.snapshot(before).log]
        return instructions


def tell(
    trace: Sequence[TraceJob],
    applications: Mapping[str, Application],
    nodes: str,
    policy: Policy,
    config: AllocatorConfig,
    *,
    rules: LiveRules = LiveRules(),  # noqa: B008
    disturbances: Disturbances = Disturbances(),  # noqa: B008
    lengths: Lengths = Lengths(),  # noqa: B008
) -> TellingCore:
    """Simulate these jobs, which ask all the time what others know; the core that decided, with all its lines."""
    config = dataclasses.replace(config, gather_s=0.0)
    knowledge, cluster = Knowledge(), parse_cluster(nodes)
    jobs = []
    for spec in trace:
        application = lengths.application(applications[spec.application], spec.name, 0)
        job = SimulatedJob(
            spec,
            application,
            rules,
            requested=False,
            gpus_per_node={node.gpu_type: int(node.total["GPU"]) for node in cluster.nodes},
            sigma=disturbances.noise,
            declared=float(application.epochs),
            sizes=spec.sizes,
        )
        jobs.append(job)
    world = World(jobs, Cluster(), policy, config, knowledge)
    world.core = core = TellingCore(policy, config, knowledge)
    world.send(NodesChanged(cluster=cluster), 0.0)
    LiveDriver(world, cluster, disturbances, 3, 1e6, rules.pace).run(jobs, None)
    return core
