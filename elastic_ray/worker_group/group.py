"""SHELL: a job's workers as one group, which executes the membership machine's decisions and detects losses."""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elastic_ray.background import Background
from elastic_ray.batch.planner import BatchPlanner
from elastic_ray.events import JobPhase
from elastic_ray.job_spec import JobSpec
from elastic_ray.membership.generation_changes import MembershipConfig
from elastic_ray.membership.instructions import (
    AllLost,
    Announce,
    Complete,
    Instruction,
    Launch,
    Note,
    Release,
    Reserve,
    Withdraw,
)
from elastic_ray.membership.machine import JobMembership
from elastic_ray.membership.messages import Cancel, ControllerMessage, StrategiesKnown
from elastic_ray.membership.signals import Allocated, Lost, Stimulus, TimePassed
from elastic_ray.record.controller_state import ControllerState
from elastic_ray.record.losses import SizeHistory
from elastic_ray.record.record import JobRecord
from elastic_ray.unit import process_names, worker_of
from elastic_ray.worker.messages import RunResult, WorkerHeartbeat, WorkerReregistration
from elastic_ray.worker.setup import Assignment
from elastic_ray.worker_group.actors import WorkerActors
from elastic_ray.worker_group.failure_detector import ExpectedRanks, FailureDetector
from placement.cluster.cluster import by_node, parts
from placement.text import first_line

if TYPE_CHECKING:
    from elastic_ray.job.supervisor import JobSupervisor

logger = logging.getLogger("elastic_ray.job")

# No other waits for the only member of a group, so that a busy machine is no reason to give it up.
_ALONE_TIMES_LONGER = 15
_WARM_UP_AFTER_S = 2.0
_MOST_REFUSALS = 3  # of a runtime environment that could not be set up, once perhaps for want of the network
_UNNOTED = 16  # workers that a controller may have named in its last moments


class WorkerGroup:
    """All workers of a job: members of the current and the planned generation (group), and starting workers."""

    def __init__(
        self,
        spec: JobSpec,
        controller: Any,
        record: JobRecord,
        planner: BatchPlanner,
        background: Background,
        observer: JobSupervisor,
    ) -> None:
        elastic = spec.elastic
        self._spec, self._controller, self._record, self._planner = spec, controller, record, planner
        self._background, self._observer = background, observer
        # who is a member, and what is to become of that
        self.machine = JobMembership(
            MembershipConfig(
                min_workers=spec.min_workers,
                sizes=spec.scheduling.allowed_sizes,
                reserve_timeout_s=elastic.reserve_timeout_s,
                join_timeout_s=elastic.join_timeout_s,
                # A member may be busy for as long as a collective may last; the failure detector finds those that hang.
                switch_timeout_s=elastic.collective_timeout_s,
            ),
            first_most=record.workers_at_most,
        )
        self.actors = WorkerActors(spec, controller, self.take, self._on_result, self._on_refusal)
        self._detector = FailureDetector(
            elastic.heartbeat_timeout_s, alone_s=elastic.heartbeat_timeout_s * _ALONE_TIMES_LONGER
        )
        self.history = SizeHistory(time.monotonic())  # sizes and costs so far
        self.returned: set[str] = set()  # workers whose train function has come back
        self.goal = Allocated(nodes={}, reason="")  # where it is heading
        self._furthest = (0, 0)
        self._places = ExpectedRanks()
        self._given_up: set[str] = set()
        self._refused = 0
        self._spans = False  # whether it was told that a unit spans nodes

    @property
    def silence_s(self) -> Mapping[str, float]:
        """Time since each member's last sign of life [s], keyed by worker."""
        silence_s = {member.worker: self._detector.silence_s(member.worker) for member in self.machine.members()}
        return {worker: age_s for worker, age_s in silence_s.items() if age_s is not None}

    def is_member(self, generation: int, worker: str) -> bool:
        """True if the worker is a member of ``generation``: current, announced, or 0 for the worker's own unit."""
        if generation == 0:
            return worker in self.machine.workers and worker not in self._given_up
        flight = self.machine.in_flight
        specs = (self.machine.current, flight.spec if flight is not None else None)
        return any(spec.generation == generation and spec.rank_of(worker) is not None for spec in specs if spec)

    def training(self) -> set[str]:
        """Return the current members, and the joiners about to enter, whose train function has not returned."""
        members = [*self.machine.members(), *self.machine.entering()]
        return {member.worker for member in members} - self.returned

    def others_train(self, worker: str) -> bool:
        """True if other workers hold the training state, and no worker has returned from the train function."""
        others = {each.worker for each in (*self.machine.holders(), *self.machine.entering())}
        return bool(others - self.returned - {worker}) and not self.machine.returned

    def take(self, stimulus: Stimulus) -> None:
        """Pass the event ``stimulus`` to the membership machine, and carry out the resulting instructions."""
        if self._record.phase.ended:
            return
        if isinstance(stimulus, Allocated):
            self.goal = stimulus
        if not isinstance(stimulus, TimePassed):
            logger.debug("job %s: %s", self._spec.job, stimulus)
        for instruction in self.machine.handle(stimulus, time.monotonic()):
            self._perform(instruction)

    def post_to_members(self, message: ControllerMessage) -> None:
        """Send a message to all members of the current generation."""
        self.actors.post([member.worker for member in self.machine.members()], message)

    def restart_group(self, *, waits: bool) -> None:
        """Release all workers and request new ones; with ``waits``, end warm processes too, as the job has no nodes."""
        for instruction in self.machine.reset(first_most=self._record.workers_at_most):
            self._perform(instruction)
        if waits:
            self.actors.supply.keep_warm({})

    def recover(self, told: Sequence[WorkerReregistration], state: ControllerState) -> None:
        """Continue with an earlier controller's surviving workers, given all their registrations and its ``state``."""
        speakers = [each for each in told if not each.position]
        for each in speakers:
            unit = sorted((other for other in told if other.worker == each.worker), key=lambda other: other.position)
            self.actors.adopt(unit)
            self._detector.heard(*(other.name for other in unit))
            if each.ready is not None:
                self._planner.open(each.ready.loader)
        self.goal = Allocated(nodes=state.nodes, reason=state.reason)
        instructions = self.machine.recover(
            speakers,
            self.goal,
            issued=state.issued,
            world_size=state.world_size,
            announced=state.announced,
            trained=state.trained,
            now_s=time.monotonic(),
            named=state.named + _UNNOTED,
        )
        spec = self.machine.current
        if spec is not None:
            self._planner.recover(spec, self.actors.gpu_type(spec))
        for instruction in instructions:
            self._perform(instruction)

    def heard(self, worker: str, position: int = 0) -> bool:
        """Record a sign of life from a worker; return False if its message must be ignored."""
        if worker in self._given_up:
            return False
        self._detector.heard(process_names(worker, position + 1)[position])
        return True

    def beat(self, beat: WorkerHeartbeat) -> None:
        """Update the failure detector with a worker's heartbeat."""
        if beat.ending:
            self._detector.discard(process_names(beat.worker, beat.position + 1)[beat.position])
        elif beat.at is not None and beat.at > self._furthest:
            # No step is committed without every member, however long one of them cannot beat.
            self._furthest = beat.at
            members = {member.worker for member in self.machine.members()} - self.returned
            self._detector.heard(*self._processes_of(members))

    def _processes_of(self, workers: Iterable[str]) -> set[str]:
        unit = self._spec.scheduling.unit_size
        return {name for worker in workers for name in process_names(worker, unit)}

    def tick(self, now_s: float) -> None:
        """Check for silent workers and advance all timers to ``now_s`` [s]; called about ten times a second."""
        members = self._processes_of(self.machine.watched())
        for process, silence_s in self._detector.silent(now_s, members):
            self.take(
                Lost(worker=worker_of(process), cause=f"it has been silent for {silence_s:.1f} s (hung or cut off)")
            )
        for worker in set(self._detector.questionable()) & members:
            self._background.start(self._check_silent(worker))
        self.take(TimePassed())
        settled = now_s - self.history.settled_s > _WARM_UP_AFTER_S and not self.machine.expects_joiners
        if settled and self.machine.current is not None:  # a process for later would slow the change that is under way
            places = collections.Counter(member.node for member in self.machine.current.members)
            self.actors.supply.keep_warm({node: math.ceil(workers) for node, workers in by_node(places).items()})

    async def _check_silent(self, worker: str) -> None:
        """Check through its node whether a silent worker's process is stopped or only starved."""
        running = await self.actors.is_running(worker, self._spec.elastic.heartbeat_timeout_s / 2)
        if running:
            self._detector.excuse(worker)
        elif running is False and self._detector.questioned(worker):
            self.take(Lost(worker=worker_of(worker), cause="its process is stopped or gone"))

    def _on_result(self, worker: str, result: RunResult) -> None:
        if worker not in self._given_up:
            self.returned.add(worker)
            self._detector.discard(*process_names(worker, self._spec.scheduling.unit_size))
            self._observer.messages.run_ended(worker, result)

    def _on_refusal(self, worker: str, error: Exception, certain: bool) -> None:
        """Handle a refused process: a training job continues without it; any other job may fail to start."""
        self._refused += 1
        if self.machine.current is None and (certain or self._refused >= _MOST_REFUSALS):
            self._observer.finish(JobPhase.FAILED, error=error)
        else:
            self.take(Lost(worker=worker, cause=first_line(error)))

    def _perform(self, instruction: Instruction) -> None:
        """Carry out one instruction of the membership machine."""
        logger.debug("job %s: %s", self._spec.job, instruction)
        match instruction:
            case Reserve(worker=worker, node=node):
                self._warn_of_span(node)
                self.actors.reserve(worker, node)
            case Launch():
                self.actors.launch(self._assignment(instruction))
            case Release(worker=worker, kill=kill, reason=reason):
                logger.info("job %s: worker %s gives its resources back: %s", self._spec.job, worker, reason)
                self._detector.discard(*process_names(worker, self._spec.scheduling.unit_size))
                if kill:
                    self._given_up.add(worker)
                self.actors.release(worker, kill=kill)
                self._observer.allocator.soon()
            case Announce(spec=spec, to=to):
                batch = self._planner.choose(spec, self.actors.gpu_type(spec))
                told = dataclasses.replace(
                    spec,
                    batch=batch,
                    equal_shares=self._planner.equal_shares,
                    critical_batch=self._planner.critical_batch or 0,
                )
                mixed = self._spec.scheduling.mixed_gpu_types
                told = self.actors.with_facts(told, self._planner.type_speeds if mixed else None)
                if (known := self._planner.known_strategies) is not None:
                    self.actors.post(to, StrategiesKnown(strategies=known))
                self.actors.post(to, told)
            case Withdraw(generation=generation, to=to):
                self._planner.withdraw()
                self.actors.post(to, Cancel(generation=generation))
            case Note():
                self._observer.happened(instruction)
            case AllLost(reason=reason):
                self._observer.all_lost(reason)
            case Complete():
                self._observer.complete()

    def _warn_of_span(self, place: str) -> None:
        """Record, once, that a unit spans nodes, because its own traffic then crosses their links."""
        if len(parts(place)) > 1 and not self._spans:
            self._spans = True
            unit = self._spec.scheduling.unit_size
            self._observer.events.warn(f"a unit spans {len(parts(place))} nodes: none has room for its {unit} workers")

    def _assignment(self, launch: Launch) -> Assignment:
        """Return the assignment for a worker that is about to start."""
        self._record.starting()
        forming = self.machine.current is None
        if forming:
            self.history.launched(time.monotonic(), time.time())
        self._detector.discard(*process_names(launch.worker, self._spec.scheduling.unit_size))
        path, point = self._record.restart_point
        trial = self._spec.trial
        return Assignment(
            worker=launch.worker,
            job=self._spec.job,
            train_loop=self._spec.train_loop,
            stored_train_loop=self._spec.stored_train_loop,
            storage_path=self._spec.storage_path,
            node=launch.node,
            controller=self._controller,
            secret=self._spec.secret,
            checkpoint=path,
            checkpoint_ref=trial.checkpoint_ref if trial is not None and path == trial.start_from else None,
            resume_point=point,
            states=self._record.states if forming else (),
            sizes=(self._spec.min_workers, self._spec.max_workers),
            others_at=None if forming else self._planner.epoch,
            expected=self._places.of(
                launch.worker,
                {each.worker: each.node for each in self.machine.workers.values()},
                self.machine.current,
                self.machine.target_workers,
            ),
        )
