"""Event-driven time: the allocator learns of arrivals, ends and lost nodes at once, and of progress at intervals.

In a cluster that grows and shrinks, the autoscaler requests nodes from a simulated cloud.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable, Collection, Sequence

from placement.allocator.events import NodesChanged
from placement.autoscaling.autoscaler import Autoscaler
from placement.cluster.cluster import Cluster
from placement.cluster.node_types import obtainable
from placement.simulator.nodes.disturbances import Disturbances, Kind
from placement.simulator.nodes.provider import Machine, Provider
from placement.simulator.world.job import SimulatedJob
from placement.simulator.world.rules import Pace
from placement.simulator.world.state import World
from placement.text import count

_SCRIPT_S = 30 * 86400.0


class LiveDriver:
    """Driver for a simulation with a heap of events; simultaneous events are handled in the order they were pushed.

    Args:
        longest_s: Simulated time after which the simulation gives up [s].
        pace: Interval of heartbeats and of the allocator's periodic checks, and the delay until a new size is measured.
    """

    def __init__(
        self,
        world: World,
        cluster: Cluster,
        disturbances: Disturbances,
        seed: int,
        longest_s: float,
        pace: Pace = Pace(),  # noqa: B008
    ) -> None:
        self._pace, self._world, self._cluster, self._disturbances = pace, world, cluster, disturbances
        self._longest_s = longest_s
        self._present: dict[str, SimulatedJob] = {}
        self._version: dict[str, int] = {}
        self._down: dict[str, int] = {}
        self._slow: dict[str, int] = {}
        self._order = itertools.count()
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._done = 0
        script = disturbances.script(cluster.nodes, seed, _SCRIPT_S)
        for time_s, together in itertools.groupby(script, key=lambda event: event[0]):
            happens = [(what, node) for _, what, node in together]
            self._at(time_s, lambda now_s, happens=happens: self._disturb(happens, now_s))  # type: ignore[misc]

    def run(self, jobs: Sequence[SimulatedJob], on_progress: Callable[[int, int, float], None] | None) -> None:
        """Run until all jobs are done, calling ``on_progress`` hourly; raise RuntimeError after ``longest_s``."""
        for job in jobs:
            self._at(job.trace.time_s, lambda now_s, job=job: self.arrive(job, now_s))  # type: ignore[misc]
        self._at(jobs[0].trace.time_s, self.tick)
        hour = 1
        while self._done < len(jobs):
            now_s, _, act = heapq.heappop(self._heap)
            if now_s > self._longest_s:
                raise RuntimeError(
                    f"{count(len(self._present), 'job')} without an end, one is {next(iter(self._present))!r}"
                )
            act(now_s)
            self._schedule_touched(now_s)
            if on_progress is not None and now_s >= 3600.0 * hour:
                hour = int(now_s // 3600.0) + 1
                on_progress(self._done, len(jobs), now_s)

    def _at(self, time_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._heap, (time_s, next(self._order), act))

    def arrive(self, job: SimulatedJob, now_s: float) -> None:
        job.arrive(now_s)
        self._present[job.name] = job
        self._world.receive(job, now_s)

    def tick(self, now_s: float) -> None:
        for job in list(self._present.values()):
            self._advance(job, now_s)
        for job in list(self._present.values()):
            self._world.receive(job, now_s)
        self._world.tick(now_s)
        self._at(now_s + self._pace.heartbeat_s, self.tick)

    def _wake(self, job: SimulatedJob, version: int, now_s: float) -> None:
        """Handle the end of a job's epoch or its new workers joining, unless it has been placed again since."""
        if self._version.get(job.name) != version or job.name not in self._present:
            return
        joins, batch = job.joined_s <= now_s, job.fixed_batch
        self._advance(job, now_s)
        if job.name in self._present:
            if joins or job.fixed_batch != batch:
                self._at(now_s + self._pace.measured_s, lambda at_s: self._report(job, at_s))
            self._foresee(job)

    def _report(self, job: SimulatedJob, now_s: float) -> None:
        if job.name in self._present:
            self._advance(job, now_s)
        if job.name in self._present:
            self._world.receive(job, now_s)

    def _disturb(self, happens: Sequence[tuple[Kind, str]], now_s: float) -> None:
        """Apply everything that happens to nodes at one moment, and notify the allocator once."""
        for job in list(self._present.values()):
            self._advance(job, now_s)
        for what, node in happens:
            counts = self._down if what in ("down", "up") else self._slow
            counts[node] = counts.get(node, 0) + (1 if what in ("down", "slow") else -1)
        self._world.lose_nodes({node for what, node in happens if what == "down"}, now_s)
        paced = {node for what, node in happens if what in ("slow", "well")}
        for job in self._present.values():
            if job.location is not None and not paced.isdisjoint(job.location.nodes):
                self._world.touched.add(job.name)
        if len(paced) < len(happens):
            nodes = tuple(each for each in self._cluster.nodes if not self._down.get(each.node_id))
            self._world.send(NodesChanged(cluster=dataclasses.replace(self._cluster, nodes=nodes)), now_s)

    def _advance(self, job: SimulatedJob, now_s: float) -> None:
        """Advance a job to the current time; if it is done, notify the allocator at once."""
        if now_s > job.now_s and job.finished_s is None:
            job.advance(now_s - job.now_s)
        if job.finished_s is not None and self._present.pop(job.name, None) is not None:
            self._done += 1
            self._world.end(job, now_s)

    def _schedule_touched(self, now_s: float) -> None:
        """Schedule the next event of every job that was placed again."""
        while self._world.touched:
            touched = sorted(self._world.touched)
            self._world.touched.clear()
            for job in [self._present[name] for name in touched if name in self._present]:
                self._foresee(job)
                if job.training is not None and job.joined_s == float("inf"):
                    told_s = now_s + job.restart_left_s + self._pace.measured_s
                    self._at(told_s, lambda at_s, job=job: self._report(job, at_s))  # type: ignore[misc]
            if self._disturbances.interference:
                for job in self._present.values():
                    self._advance(job, now_s)
                    self._foresee(job)

    def _foresee(self, job: SimulatedJob) -> None:
        self._slow_down(job)
        version = self._version[job.name] = self._version.get(job.name, 0) + 1
        time_s = job.next_s()
        if time_s < float("inf"):
            self._at(time_s, lambda now_s: self._wake(job, version, now_s))

    def _slow_down(self, job: SimulatedJob) -> None:
        """Slow the job down to account for its slowest node and for shared links."""
        nodes = () if job.location is None else tuple(job.location.nodes)
        loss = 0.0
        if self._disturbances.interference and len(nodes) > 1:
            others = [each.location.nodes for each in self._present.values() if each is not job and each.location]
            if any(len(each) > 1 and not each.keys().isdisjoint(nodes) for each in others):
                loss = self._disturbances.interference
        job.see_slow({node: self._disturbances.slow_factor for node in nodes if self._slow.get(node)}, loss=loss)


_LEAVE_S = 30.0
"""So long before a spot node's end its workers leave; from the notice on another node is asked for."""


class ScalingDriver(LiveDriver):
    """Live driver with an autoscaler whose requests for nodes are granted by a simulated cloud if possible.

    Args:
        disturbances: Disturbances to the jobs. Their spot markets are ignored, since the provider simulates them.
        notice_s: Time between the notice that a spot node will be reclaimed and its loss [s].
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
        self._obtainable = obtainable(provider.types)

    def arrive(self, job: SimulatedJob, now_s: float) -> None:
        self._send_nodes(now_s)
        super().arrive(job, now_s)
        self._scale(now_s)

    def tick(self, now_s: float) -> None:
        super().tick(now_s)
        self._scale(now_s)

    def _scale(self, now_s: float) -> None:
        """Query the autoscaler, carry out its decision, and notify the allocator."""
        nodes = self._nodes(self._noticed)
        decision = self._autoscaler.decide(self._world.core.views(now_s), nodes, now_s)
        self._released = frozenset(decision.release)
        for machine in self._provider.want(decision.nodes, now_s):
            self._at(machine.ready_s, self._marking(machine, self._ready, self._send_nodes))
            if machine.gone_s < float("inf"):
                notice_s = max(machine.gone_s - self._notice_s, machine.since_s)
                self._at(notice_s, self._marking(machine, self._noticed, self._scale))
                leave_s = max(machine.gone_s - min(_LEAVE_S, self._notice_s), machine.since_s)
                self._at(leave_s, self._marking(machine, self._ending, self._send_nodes))
                self._at(machine.gone_s, functools.partial(self._lose, machine))
        self._send_nodes(now_s)
        self._let_go(now_s)

    def _let_go(self, now_s: float) -> None:
        """Give back released nodes that no longer run any worker."""
        busy = {node for job in self._present.values() if job.location is not None for node in job.location.nodes}
        empty = [node for node in self._released if node in self._ready and node not in busy]
        for node in empty:
            self._provider.give_back(node, now_s)
            self._ready.discard(node)
        if empty:
            self._send_nodes(now_s)

    def _marking(self, machine: Machine, marked: set[str], act: Callable[[float], None]) -> Callable[[float], None]:
        """Return an event that marks a machine and calls ``act``, if the machine is still rented."""

        def mark(now_s: float) -> None:
            if machine.node.node_id in self._provider.machines:
                marked.add(machine.node.node_id)
                act(now_s)

        return mark

    def _lose(self, machine: Machine, now_s: float) -> None:
        """Remove a machine if it is still rented: its workers die, and the allocator and autoscaler are notified."""
        node_id = machine.node.node_id
        if node_id not in self._provider.machines:
            return
        for job in list(self._present.values()):
            self._advance(job, now_s)
        self._provider.give_back(node_id, now_s)
        self._ready.discard(node_id)
        self._world.lose_nodes({node_id}, now_s)
        self._send_nodes(now_s)
        self._scale(now_s)

    def _nodes(self, away: Collection[str]) -> Cluster:
        """Return the nodes that are ready for workers; those in ``away`` are marked as draining."""
        machines = self._provider.machines
        return Cluster(nodes=tuple(machines[n].node for n in sorted(self._ready))).draining(away)

    def _send_nodes(self, now_s: float) -> None:
        cluster = self._nodes(self._ending | self._released)
        if cluster != self._told:
            self._told = cluster
            self._world.send(NodesChanged(cluster=cluster, obtainable=self._obtainable), now_s)
