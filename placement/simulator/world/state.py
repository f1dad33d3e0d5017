"""Simulated world: sends events to the allocator core and carries out its instructions on simulated jobs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from placement.allocator.config import AllocatorConfig
from placement.allocator.core import AllocatorCore
from placement.allocator.events import Allocate, Event, Instruction, JobEnded, JobHeartbeat, NodesChanged, TimePassed
from placement.cluster.cluster import Cluster, without
from placement.cluster.jobs import JobView
from placement.cluster.packing import FreeResources
from placement.goodput.remaining import discount, seconds_left
from placement.goodput.speeds import GoodputCache, Ints, table
from placement.goodput.step_time import Floats
from placement.knowledge.knowledge import Knowledge
from placement.policies.shared.base import Policy
from placement.simulator.world.job import SimulatedJob
from placement.simulator.world.rules import Location

_HORIZON_S = 300.0  # a size lasts so long at least, or as long as those of the job have lasted so far
_GAIN = 1.05  # of speed, after the cost of the change, below which a change is not worth its risk
_SHARE = 0.25  # of what its GPUs do on average, below which a further one costs more than it gives


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Workers of a job, keyed by node id, from ``time_s`` onwards; empty if the job is waiting or has ended.

    Examples:
        >>> from placement.simulator import Placed
        >>> Placed(time_s=60.0, job="a", nodes={"n1": 2}).nodes
        {'n1': 2}
    """

    time_s: float
    job: str
    nodes: Mapping[str, int]


class World:
    """Simulated state that a driver advances through time: the allocator core and the jobs.

    Args:
        knowledge: Measurements shared by jobs of one application; None if each job knows only its own.
    """

    def __init__(
        self,
        jobs: Sequence[SimulatedJob],
        cluster: Cluster,
        policy: Policy,
        config: AllocatorConfig,
        knowledge: Knowledge | None = None,
    ) -> None:
        self.core = AllocatorCore(policy, config, knowledge=knowledge)  # the very class that runs live
        self._knowledge = knowledge
        self.jobs = {job.name: job for job in jobs}
        self.placed: list[Placed] = []  # every change of a job's place, in the order of time
        self.decision_s: list[float] = []  # CPU time of each decision [s]
        self.idle = IdleWatch()  # how long GPUs were idle that a job could have used
        self.touched: set[str] = set()  # jobs that were placed anew since the driver last cleared it
        self._gpu: dict[str, str] = {}
        self._cluster = cluster
        self.send(NodesChanged(cluster=cluster), 0.0)

    def receive(self, job: SimulatedJob, now_s: float) -> None:
        """Send the job's heartbeat (its current view) to the allocator core at ``now_s`` [s]."""
        view = job.view()
        if job.rules.pace.silent_start and not job.progress:
            view = dataclasses.replace(view, progress=None, stop_cost_s=None)
        if self._knowledge is not None:
            job.share(self._knowledge.complete(view, now_s).models)  # as the live allocator tells its jobs
        self.send(JobHeartbeat(view=view), now_s)

    def end(self, job: SimulatedJob, now_s: float) -> None:
        """End the job at ``now_s`` [s] and free its GPUs."""
        if job.location is not None:
            self.placed.append(Placed(time_s=now_s, job=job.name, nodes={}))
            job.leave()
        view = None if job.requested else job.view()  # an oracle has nothing to say of what is over
        self.send(JobEnded(job=job.name, view=view), now_s)

    def tick(self, now_s: float) -> None:
        """Advance the allocator core's clock to ``now_s``, which may trigger a decision, and record idle GPUs."""
        self.send(TimePassed(), now_s)
        self.idle.poll(self.core.views(now_s), self._cluster, now_s)

    def send(self, event: Event, now_s: float) -> None:
        """Send the core an event and carry out its instructions."""
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
        """Kill the workers on these nodes; their jobs' remaining workers continue."""
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
        """Move an ``Allocate`` instruction's job to its nodes; other instructions change nothing."""
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
        types = {node_id: self._gpu[node_id] for node_id in nodes}  # of which the first by name counts for all
        mixed = types if job.mixed_gpu_types else {}
        job.place(Location(nodes=nodes, gpu=min(types.values()), types=mixed) if nodes else None)


class IdleWatch:
    """Record of how long GPUs were idle while some job could have used them, according to the job's own model.

    A waiting job can use idle GPUs if its smallest size fits. A running job can use them if some of them, on its own
    nodes first, would make it 5 % faster after the cost of the change, and each would contribute at least a quarter of
    what its current GPUs contribute on average.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0  # the longest time [s] from a decision that left a job such GPUs to the next that did not
        self.gpu_s = 0.0  # GPU-seconds that were idle while any job could have used some of their type
        self._cache = GoodputCache()
        self._since_s: dict[str, float] = {}
        self._looked_s = 0.0
        self._idle = 0

    def poll(self, views: Sequence[JobView], cluster: Cluster, now_s: float) -> None:
        """Update the record after a decision; ``views`` holds the jobs with their current workers."""
        self.longest_s = max([self.longest_s, *(now_s - since_s for since_s in self._since_s.values())])
        self.gpu_s += self._idle * (now_s - self._looked_s)
        could: dict[str, None] = {}
        self._looked_s, self._idle = now_s, 0
        taken = {view.job: view.allocation for view in views if view.allocation}
        left = without(cluster, taken, {view.job: view.bundle for view in views})
        for gpu in sorted({node.gpu_type for node in left.nodes}):
            room = FreeResources(Cluster(nodes=tuple(node for node in left.nodes if node.gpu_type == gpu)))
            here = [
                view for view in views if not view.allocation or room.index(next(iter(view.allocation))) is not None
            ]
            found = self._could_use(here, gpu, room, now_s)
            if found:
                self._idle += max(int(room.slots(view).sum()) for view in found)
                could |= dict.fromkeys(view.job for view in found)
        self._since_s = {job: self._since_s.get(job, now_s) for job in could}

    def _could_use(self, views: Sequence[JobView], gpu: str, room: FreeResources, now_s: float) -> list[JobView]:
        """Return the jobs, waiting or running on this GPU type, that could use its idle GPUs."""
        found, running, shapes = [], [], []
        for view in views:
            slots = room.slots(view)
            if not view.allocation and slots.sum() >= (view.held_at or view.min_workers):
                found.append(view)
            elif view.allocation and slots.any() and view.held_at is None and view.goodput is not None:
                running.append(view)
                shapes.append(_grown(view, slots, room))
        if not running:
            return found
        width = max(len(shape) for shape in shapes)
        grown = np.array([np.pad(shape, ((0, width - len(shape)), (0, 0))) for shape in shapes])
        nodes, workers = grown[:, :, 0], grown[:, :, 1]
        rates = table(running, gpu, nodes, np.maximum(workers, 1), self._cache)
        return found + [view for view, pays in zip(running, _pays(running, workers, rates, now_s), strict=True) if pays]


def _grown(view: JobView, slots: Ints, room: FreeResources) -> Ints:
    """Return (nodes, workers) of the job now and with one, two... more idle slots, up to its largest size."""
    most = view.useful_workers if view.growth_limit is None else min(view.useful_workers, view.growth_limit)
    own = {room.index(node) for node in view.allocation}
    shape, nodes, workers = [(len(own), view.workers)], len(own), view.workers
    for i in sorted(range(len(slots)), key=lambda i: (i not in own, -slots[i])):
        nodes += i not in own and bool(slots[i])
        for _ in range(int(slots[i])):
            workers += 1
            if workers <= most and view.sizes.at_most(workers) == workers:
                shape.append((nodes, workers))
    return np.array(shape, dtype=np.int64)


def _pays(views: Sequence[JobView], workers: Ints, rates: Floats, now_s: float) -> list[bool]:
    """Return, for each job, whether any larger size pays off; the first column is its current size."""
    rate, size = rates[:, :1], np.maximum(workers[:, :1], 1)
    speed = np.divide(rates, rate, out=np.zeros_like(rates), where=rate > 0)
    lasted_s = np.array([max(now_s - view.submitted_s, 0.0) / (view.restarts + 1) for view in views])
    cost_s = np.array([view.resize_cost_s for view in views])
    part = discount(speed, seconds_left(views, rate[:, 0]), cost_s, np.maximum(_HORIZON_S, lasted_s))
    enough = speed - 1.0 >= _SHARE * (workers - size) / size
    pays = (workers > size) & enough & (speed * part > _GAIN)
    return [bool(np.any(row)) for row in pays]
