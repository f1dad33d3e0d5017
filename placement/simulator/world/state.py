"""The allocator core and the simulated jobs, facing each other: events go in, instructions are carried out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence

from placement.allocator.config import AllocatorConfig
from placement.allocator.core import AllocatorCore
from placement.allocator.events import Event, JobEnded, JobHeartbeat, NodesChanged, TimePassed
from placement.allocator.instructions import Allocate, Instruction
from placement.cluster.cluster import Cluster
from placement.knowledge.knowledge import Knowledge
from placement.policies.shared.base import Policy
from placement.simulator.world.idle import IdleWatch
from placement.simulator.world.job import SimulatedJob
from placement.simulator.world.rules import Location


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """From this moment on, the job has these workers per node id (none: it waits, or is over)."""

    time_s: float
    job: str
    nodes: Mapping[str, int]


class World:
    """Everything that a driver moves through time.

    Args:
        jobs: all jobs of the trace.
        cluster: the nodes at the start.
        policy: decides.
        config: of the core.
        knowledge: what jobs of one application share; None if each knows only what it has measured itself.

    Attributes:
        core: the very class that runs live.
        placed: every change of a job's place, in the order of time.
        decision_s: CPU time of each decision [s].
        idle: how long GPUs were idle that a job could have used.
        touched: jobs that were placed anew since the driver last cleared it.
    """

    def __init__(
        self,
        jobs: Sequence[SimulatedJob],
        cluster: Cluster,
        policy: Policy,
        config: AllocatorConfig,
        knowledge: Knowledge | None = None,
    ) -> None:
        self.core = AllocatorCore(policy, config, knowledge=knowledge)
        self._knowledge = knowledge
        self.jobs = {job.name: job for job in jobs}
        self.placed: list[Placed] = []
        self.decision_s: list[float] = []
        self.idle = IdleWatch()
        self.touched: set[str] = set()
        self._gpu: dict[str, str] = {}
        self._cluster = cluster
        self.send(NodesChanged(cluster=cluster), 0.0)

    def hear(self, job: SimulatedJob, now_s: float) -> None:
        """The job's heartbeat."""
        view = job.view()
        if job.rules.pace.silent_start and not job.progress:
            view = dataclasses.replace(view, progress=None, stop_cost_s=None)
        if self._knowledge is not None:
            job.share(self._knowledge.complete(view, now_s).models)  # as the live allocator tells its jobs
        self.send(JobHeartbeat(view=view), now_s)

    def end(self, job: SimulatedJob, now_s: float) -> None:
        """The job is over and its GPUs are free."""
        if job.location is not None:
            self.placed.append(Placed(time_s=now_s, job=job.name, nodes={}))
            job.leave()
        view = None if job.requested else job.view()  # an oracle has nothing to say of what is over
        self.send(JobEnded(job=job.name, view=view), now_s)

    def tick(self, now_s: float) -> None:
        """Time has passed."""
        self.send(TimePassed(), now_s)
        self.idle.look(self.core.views(now_s), self._cluster, now_s)

    def send(self, event: Event, now_s: float) -> None:
        """Tell the core, and carry out its answer."""
        if isinstance(event, NodesChanged):
            self._cluster = event.cluster
            self._gpu |= {node.node_id: node.gpu_type for node in event.cluster.nodes}
        start = time.process_time()
        instructions = self.core.handle(event, now_s)
        if instructions or isinstance(event, TimePassed):
            self.decision_s.append(time.process_time() - start)
        for instruction in instructions:
            self._carry_out(instruction, now_s)

    def lose_nodes(self, lost: Collection[str], now_s: float) -> None:
        """The workers of these nodes are dead; what is left of their jobs trains on."""
        for job in self.jobs.values():
            if (
                job.location is None
                or job.finished_s is not None
                or not any(node in lost for node in job.location.nodes)
            ):
                continue
            job.advance(now_s - job.now_s)
            left = {node: workers for node, workers in job.location.nodes.items() if node not in lost}
            self.touched.add(job.name)
            self.placed.append(Placed(time_s=now_s, job=job.name, nodes=left))
            if left:
                job.place(job.location.only(left))
            else:
                job.lose_workers()

    def _carry_out(self, instruction: Instruction, now_s: float) -> None:
        """Move the job to the nodes of an ``Allocate``, advanced to now before; other instructions change nothing."""
        if not isinstance(instruction, Allocate):
            return
        job = self.jobs[instruction.job]
        before = {} if job.location is None else dict(job.location.nodes)
        nodes = dict(instruction.nodes)
        if nodes == before:
            return
        if now_s > job.now_s:
            job.advance(now_s - job.now_s)
        if job.finished_s is not None:
            return  # at this very moment; its end is the next event
        self.touched.add(job.name)
        self.placed.append(Placed(time_s=now_s, job=job.name, nodes=nodes))
        job.place(self._location(job, nodes) if nodes else None)

    def _location(self, job: SimulatedJob, nodes: dict[str, int]) -> Location:
        """These workers; of a job that does not share by speed, the first type by name stands for all."""
        types = {node_id: self._gpu[node_id] for node_id in nodes}
        return Location(nodes=nodes, gpu=min(types.values()), types=types if job.mixed_gpu_types else {})
