"""Event-driven time with a cluster that grows and shrinks: the autoscaler requests nodes from a simulated cloud."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from placement.allocator.events import NodesChanged
from placement.autoscaling.autoscaler import Autoscaler
from placement.cluster.cluster import Cluster
from placement.simulator.live import LiveDriver
from placement.simulator.nodes.disturbances import Disturbances
from placement.simulator.nodes.provider import Machine, Provider
from placement.simulator.world.job import SimulatedJob
from placement.simulator.world.state import World

_LEAVE_S = 30.0
"""So long before a spot node's end its workers leave; from the notice on another node is asked for."""


class ScalingDriver(LiveDriver):
    """Live driver whose nodes are those that the autoscaler requested and the simulated cloud could provide.

    Args:
        disturbances: Disturbances of the jobs. Its spot markets are ignored, since the provider has them.
        notice_s: Time between a spot node's notice and its end [s].
    """

    def __init__(
        self,
        world: World,
        autoscaler: Autoscaler,
        provider: Provider,
        disturbances: Disturbances,
        *,
        notice_s: float,
        seed: int,
        longest_s: float,
    ) -> None:
        super().__init__(world, Cluster(), dataclasses.replace(disturbances, spot={}), seed, longest_s)
        self._autoscaler, self._provider, self._notice_s = autoscaler, provider, notice_s
        self._noticed: set[str] = set()
        self._ending: set[str] = set()
        self._released: frozenset[str] = frozenset()
        self._ready: set[str] = set()
        self._told: Cluster | None = None
        self._obtainable = tuple(
            each.node(f"{each.name}~{i}") for each in provider.types for i in range(each.max_nodes)
        )

    def _arrive(self, job: SimulatedJob, now_s: float) -> None:
        self._tell_nodes(now_s)
        super()._arrive(job, now_s)
        self._scale(now_s)

    def _tick(self, now_s: float) -> None:
        super()._tick(now_s)
        self._scale(now_s)

    def _scale(self, now_s: float) -> None:
        """Query the autoscaler, carry out its decision, and notify the allocator."""
        nodes = self._nodes(self._noticed)
        decision = self._autoscaler.decide(self._world.core.views(now_s), nodes, now_s)
        self._released = frozenset(decision.release)
        for machine in self._provider.want(decision.nodes, now_s):
            self._at(machine.ready_s, lambda at_s, machine=machine: self._join(machine, at_s))  # type: ignore[misc]
            if machine.gone_s < float("inf"):
                notice_s = max(machine.gone_s - self._notice_s, machine.since_s)
                self._at(notice_s, lambda at_s, machine=machine: self._notice(machine, at_s))  # type: ignore[misc]
                leave_s = max(machine.gone_s - min(_LEAVE_S, self._notice_s), machine.since_s)
                self._at(leave_s, lambda at_s, machine=machine: self._leave(machine, at_s))  # type: ignore[misc]
                self._at(machine.gone_s, lambda at_s, machine=machine: self._lose(machine, at_s))  # type: ignore[misc]
        self._tell_nodes(now_s)
        self._let_go(now_s)

    def _let_go(self, now_s: float) -> None:
        """Return released nodes that no longer run any worker."""
        busy = {node for job in self._present.values() if job.location is not None for node in job.location.nodes}
        empty = [node for node in self._released if node in self._ready and node not in busy]
        for node in empty:
            self._provider.give_back(node, now_s)
            self._ready.discard(node)
        if empty:
            self._tell_nodes(now_s)

    def _join(self, machine: Machine, now_s: float) -> None:
        if machine.node.node_id in self._provider.machines:
            self._ready.add(machine.node.node_id)
            self._tell_nodes(now_s)

    def _notice(self, machine: Machine, now_s: float) -> None:
        if machine.node.node_id in self._provider.machines:
            self._noticed.add(machine.node.node_id)
            self._scale(now_s)

    def _leave(self, machine: Machine, now_s: float) -> None:
        if machine.node.node_id in self._provider.machines:
            self._ending.add(machine.node.node_id)
            self._tell_nodes(now_s)

    def _lose(self, machine: Machine, now_s: float) -> None:
        """Remove a machine if it is still rented: its workers die, and allocator and autoscaler are notified."""
        node_id = machine.node.node_id
        if node_id not in self._provider.machines:
            return
        for job in list(self._present.values()):
            self._advance(job, now_s)
        self._provider.give_back(node_id, now_s)
        self._ready.discard(node_id)
        self._world.lose_nodes({node_id}, now_s)
        self._tell_nodes(now_s)
        self._scale(now_s)

    def _nodes(self, away: Collection[str]) -> Cluster:
        """Return the nodes that are ready for workers; those in ``away`` are marked as draining."""
        machines = self._provider.machines
        return Cluster(nodes=tuple(machines[n].node for n in sorted(self._ready))).draining(away)

    def _tell_nodes(self, now_s: float) -> None:
        cluster = self._nodes(self._ending | self._released)
        if cluster != self._told:
            self._told = cluster
            self._world.send(NodesChanged(cluster=cluster, obtainable=self._obtainable), now_s)
