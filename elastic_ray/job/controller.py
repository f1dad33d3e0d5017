"""SHELL: the job's controller, a detached actor that runs one job; a sweep's trials share actors (``job.host``).

Its state is soft. If its process dies, the workers keep training and Ray starts a replacement, which the workers
contact; everything else is restored from the journal. Workers and their placement groups end when the controller ends
them, or by themselves if it stays away; resources that a trial gets from its sweep belong to the sweep's actor. Members
of a generation find each other through the controller. The driver holds a lease on the job; if it is not renewed, the
controller ends the job and itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from elastic_ray.background import Background
from elastic_ray.batch.branch_losses import BranchPlan, BranchResult
from elastic_ray.communication.bootstrap import Bootstrap, BootstrapCall
from elastic_ray.events import JobEvent, JobOutcome, JobPhase, JobStatus, Report, WorkerInfo
from elastic_ray.job.journal import Journal
from elastic_ray.job.supervisor import JobSupervisor
from elastic_ray.job_spec import JobSpec
from elastic_ray.record.controller_state import ControllerState
from elastic_ray.warm_pool.client import environment_key
from elastic_ray.warm_pool.pool import CONTROLLERS
from elastic_ray.warm_pool.processes import end_strays
from elastic_ray.warm_pool.sizing import read_config
from elastic_ray.worker.messages import ControllerAnswer, StateSaved, WorkerMessage, WorkerReregistration
from elastic_ray.worker.ownership import adopt, calling_owner
from elastic_ray.worker.setup import ProcessOwner
from elastic_ray.worker.stored_train_loop import delete_train_loop, stored_train_loop, with_stored_train_loop
from elastic_ray.worker_group.failure_detector import FailureDetector
from elastic_ray.worker_group.reconnection import Reconnection
from placement.allocator.actor import find_allocator
from placement.ray_cluster import groups
from placement.ray_cluster.autoscaler_presence import may_autoscale
from placement.ray_cluster.named_actors import (
    Hosted,
    add_alias,
    aliases,
    create_on_head,
    delete_alias,
    find_actor,
    names_of_actors,
)
from placement.ray_cluster.notes import TRAIN_LOOP
from placement.reasons import Cause, Reason
from placement.text import log_plainly
from placement.versions import Spoken, VersionError, check_spoken, spoken

logger = logging.getLogger("elastic_ray.job")

_TICK_S = 0.1
_WARM_ANSWER_S = 20.0  # one that is only starting is still sooner there than a new one
_RELEASE_S = 10.0
_KNOWN_S = 5.0
_NOTE_S = 1.0  # a control store that is away holds no driver up for longer
_DRIVER = "driver"
_PREFIX = "job:"


def start(spec: JobSpec) -> Any:
    """Start and return the job's controller, pre-started (warm) if possible. Raises ValueError if its name is taken."""
    stored = with_stored_train_loop(spec)
    try:
        return _warm(stored) or _create(stored)
    except BaseException:
        if stored.stored_train_loop:
            delete_train_loop(stored.stored_train_loop)
        raise


def _create(spec: JobSpec) -> Any:
    """Return a new controller. Raises ValueError if a controller with that name is alive."""
    find_allocator()  # the cluster's first job has one made, whose process starts beside its controller's
    # A worker node that goes away must not take the job's memory of itself along.
    name = _name_of(spec)
    controller = create_on_head(JobController, name, spec, spoken(), max_restarts=-1)
    if any(find_actor(own) is not None for own, _ in aliases(name, whole=True)):
        ray.kill(controller)
        raise ValueError(f"a controller named {name!r} is still running")
    return controller


def _name_of(spec: JobSpec) -> str:
    return f"{_PREFIX}{spec.trial.controller if spec.trial is not None else spec.job}"


def _warm(spec: JobSpec) -> Any | None:
    """Return a warm controller that is now running this job; None if none is available.

    A warm controller that does not answer is killed, so that it cannot start the job later.
    """
    if spec.trial is not None:
        return None
    taken = {own for own, _ in aliases(_PREFIX)}
    for own in set(names_of_actors(f"{CONTROLLERS}{environment_key({})}/")) - taken:
        if (controller := find_actor(own)) is None:
            continue
        try:
            if ray.get(controller.take_up.remote(spec, own, calling_owner(""), spoken()), timeout=_WARM_ANSWER_S):
                return controller
        except (RayError, VersionError) as error:  # it must not begin after all, beside the one that is made now
            logger.info("job %s: a warm controller does not answer: %r", spec.job, error)
            ray.kill(controller)
            delete_alias(_name_of(spec), own)
    return None


def prepare_next() -> None:
    """Start a warm (idle) controller for the next job with this runtime environment, unless one exists; blocks."""
    kind = f"{CONTROLLERS}{environment_key({})}/"
    if set(names_of_actors(kind)) <= {own for own, _ in aliases(_PREFIX)}:
        create_on_head(JobController, f"{kind}{secrets.token_hex(4)}", None, spoken(), max_restarts=-1)


class JobController:
    """Actor class of a job's controller.

    All methods are coroutines on one event loop, so no locks are needed.
    """

    def __init__(
        self, spec: JobSpec | None, theirs: Spoken, hosted: str = "", on_end: Callable[[], None] | None = None
    ) -> None:
        check_spoken(theirs, "the driver", "its job's controller")
        log_plainly(logging.WARNING)
        actor: Any = ray.get_runtime_context().current_actor
        self._handle = Hosted(actor, f"{_PREFIX}{hosted}") if hosted else actor
        # exit_actor() raises an exception that only a task of Ray's own understands
        self._end = on_end or functools.partial(ray.kill, actor)
        self._background = Background()
        self._journal = Journal(str(ray.get_runtime_context().get_actor_id()), hosted)
        self._recovered = asyncio.Event()
        self._own_name = ""
        self._takes = asyncio.Lock()
        spec = spec or self._journal.begun()
        if spec is not None:
            self._live(spec)
        else:
            self._main = asyncio.get_event_loop().create_task(self._wait_for_job())

    async def _wait_for_job(self) -> None:
        """Wait for a job in a warm controller; end the process if none arrives."""
        await asyncio.sleep(read_config(os.environ).idle_s)
        async with self._takes:
            self._end()

    async def take_up(self, spec: JobSpec, own: str, owner: ProcessOwner, theirs: Spoken) -> bool:
        """Run a job in this warm (pre-started, idle) controller; False if the controller or the job's name is in use.

        Args:
            own: Name of this controller's actor; the job's name is added as an alias.
        """
        check_spoken(theirs, "the driver", "its job's controller")
        async with self._takes:
            if self._own_name or not await asyncio.to_thread(add_alias, _name_of(spec), own):
                return False
            self._main.cancel()
            self._own_name = own
            await asyncio.to_thread(adopt, owner)
            await asyncio.to_thread(self._journal.start, spec)
            self._live(spec)
            return True

    def _live(self, spec: JobSpec) -> None:
        """Start a job, or continue it from the journal of the previous controller."""
        self._stored_train_loop = spec.stored_train_loop
        remembered = self._journal.read()
        if self._stored_train_loop:
            self._journal.put(TRAIN_LOOP, self._stored_train_loop)
        self._reconnection: Reconnection | None = None
        self._state_before: ControllerState | None = None
        if spec.stored_train_loop:
            _, callbacks = stored_train_loop(spec.stored_train_loop)  # the function goes to its workers without us
            spec = dataclasses.replace(spec, callbacks=callbacks)
        logging.getLogger("elastic_ray").setLevel(spec.log_level)
        self._spec = spec
        self._job = JobSupervisor(spec, self._handle, self._background, self._journal)
        self._bootstrap = Bootstrap(spec.secret, self._job.group.is_member)
        self._lease = FailureDetector(spec.elastic.lease_s)
        self._lease.heard(_DRIVER)
        self._closed = asyncio.Event()
        if remembered is None:
            self._recovered.set()
        else:
            self._state_before = remembered[0]
            self._reconnection = Reconnection(self._state_before, self._spec.scheduling.unit_size)
            self._job.recall(*remembered)
        self._main = asyncio.get_event_loop().create_task(self._run())

    def _discard(self) -> None:
        """Delete the journal, aliases and stored train function, because no replacement controller will need them."""
        self._journal.close(delete=True)
        for own, alias in aliases(_name_of(self._spec), whole=True):
            delete_alias(alias, own)
        if self._stored_train_loop:
            delete_train_loop(self._stored_train_loop)

    async def renew_lease(self) -> JobStatus:
        """Renew the driver's lease (without it, the job would end), and return the job's status."""
        await self._known()
        self._lease.heard(_DRIVER)
        return self._job.status()

    async def _known(self) -> None:
        """Wait after a restart until the job's state has been recovered, for a few seconds at most."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._recovered.wait(), _KNOWN_S)

    async def spec(self) -> JobSpec:
        """Return the submitted specification without the train function, callbacks and secret."""
        trial = self._spec.trial
        if trial is not None:
            trial = dataclasses.replace(trial, checkpoint_ref=None)  # an answer is not to keep it alive
        return dataclasses.replace(self._spec, train_loop=b"", callbacks=b"", trial=trial, secret="")

    async def status(self) -> JobStatus:
        """Return the job's current status."""
        await self._known()
        return self._job.status()

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Return the members of the current generation, in rank order."""
        await self._known()
        return self._job.workers()

    async def events(self, since: int = 0) -> tuple[JobEvent, ...]:
        """Return the job's events in order, skipping the first ``since``."""
        await self._known()
        return tuple(self._job.record.events[since:])

    async def resize(self, workers: int) -> None:
        """Hold the job at this number of workers until :meth:`release`.

        Raises ValueError if the number is outside the job's range, or more than the loader's batch limits can use.
        """
        await self._change(lambda: self._job.hold(workers))

    async def release(self) -> None:
        """Let the allocator choose the job's size again, after :meth:`resize`."""
        await self._change(lambda: self._job.hold(None))

    async def pause(self, reason: str = "paused by JobHandle.pause()") -> None:
        """Save the job after the current step and release its slots until :meth:`resume`.

        Raises ValueError if the job cannot be paused, or is already paused.
        """
        await self._change(lambda: self._job.pause(reason))

    async def resume(self) -> None:
        """Let a paused job continue once the allocator has slots for it. Raises ValueError if the job is not paused."""
        await self._change(lambda: self._job.resume())

    async def weigh(self, weight: float) -> None:
        """Set how much this job's speed matters relative to other jobs, instead of ``SchedulingConfig.weight``."""
        await self._change(lambda: self._job.weigh(weight))

    async def branch(self, plan: BranchPlan) -> None:
        """Start comparing branches (copies of the job at other batches). Raises BranchError if this is impossible."""
        await self._recovered.wait()
        self._job.branches.start(plan, start)

    async def branched(self) -> BranchResult | None:
        """Return the result of :meth:`branch`; None while running. Raises BranchError if it failed or never started."""
        return self._job.branches.outcome()

    async def next_report(self, after: int | None, wait_s: float) -> Report | None:
        """Wait for the next report after number ``after`` (None: the last delivered); None after ``wait_s`` [s]."""
        await self._recovered.wait()
        return await self._job.reports.next(after, wait_s)

    async def stop(self, *, now: bool = False, reason: str = "stop() was called") -> None:
        """Stop the job after the current step, saving it if possible; with ``now``, stop at once without saving."""
        await self._known()
        if now:
            self._job.stop_reason = f"{reason}, now"
            self._job.finish(JobPhase.STOPPED)
        self._job.stop(reason)
        await self._persist_state()

    async def _change(self, change: Callable[[], None]) -> None:
        await self._recovered.wait()
        change()
        await self._persist_state()

    async def _persist_state(self) -> None:
        """Write the state to the journal before answering a driver, so that the change survives this process."""
        self._job.journal_state()
        await asyncio.to_thread(self._journal.flush, _NOTE_S)

    async def outcome(self) -> JobOutcome | None:
        """Return the job's outcome once its records are written (best effort); None while the job has not ended."""
        await self._recovered.wait()
        await self._job.shutdown.written()
        return self._job.record.outcome()

    async def close(self) -> None:
        """End this controller, because the driver has fetched all information about the ended job."""
        self._closed.set()

    async def allocate(
        self, nodes: Mapping[str, int], reason: str, draining: Mapping[str, float], nodes_may_come: bool
    ) -> None:
        """Apply the allocator's decision for this job; see :meth:`JobSupervisor.allocate` for the arguments."""
        await self._recovered.wait()
        self._job.allocate(nodes, reason, draining, nodes_may_come=nodes_may_come)

    async def unsatisfiable(self, reason: Reason, final: bool) -> None:
        """Handle the allocator's finding that no node can satisfy the job's resource request; may fail the job.

        If ``final``, even nodes that the allocator's own autoscaling could add would not satisfy the request.
        """
        await self._recovered.wait()
        job = self._job
        if job.group.machine.current is not None or job.record.phase.ended:
            return
        if not final and await asyncio.to_thread(may_autoscale):
            reason = dataclasses.replace(reason, cause=Cause.AUTOSCALER)
            job.record.message, job.record.needs_node = reason.explained, True
            return
        from elastic_ray.errors import ImpossibleResourcesError  # imports ray.train

        job.finish(JobPhase.FAILED, error=ImpossibleResourcesError(reason.explained))

    async def push(self, message: WorkerMessage) -> bool:
        """Handle a worker's message; return False if the job has ended, so that the worker can stop."""
        await self._recovered.wait()
        job = self._job
        await job.messages.receive(message)
        return not job.record.phase.ended

    async def saved(self, message: StateSaved) -> float:
        """Record rank 0's automatic checkpoint; return the job's mean time between total losses [s]."""
        await self._recovered.wait()
        return self._job.saved(message)

    async def greet(self, worker: str, token: str) -> ControllerAnswer:
        """Return whether process ``worker`` (empty: an idle one) with secret ``token`` belongs to this controller."""
        if self._reconnection is not None:
            return ControllerAnswer.INTRODUCE if worker else ControllerAnswer.STRANGER
        return ControllerAnswer.KNOWN if self._job.group.actors.knows(worker, token) else ControllerAnswer.STRANGER

    async def introduce(self, told: WorkerReregistration) -> None:
        """Receive the registration of a worker that was started before this controller's process restarted."""
        if self._reconnection is not None:
            self._reconnection.receive(told)

    async def bootstrap(self, call: BootstrapCall) -> dict[str, bytes]:
        """Exchange addresses between the members of a generation that is being formed.

        Raises BootstrapRefusedError if the caller is not a member.
        """
        return await self._bootstrap.meet(call)

    async def claim_fault(self, index: int) -> bool:
        """Claim fault ``index`` in the test's fault script; return True only for the first claim of that fault."""
        await self._recovered.wait()
        return self._job.claim_fault(index)

    async def _run(self) -> None:
        """Run the job, then clean up and end this controller."""
        try:
            await self._run_job()
            if self._job.shutdown.vacated is not None:
                await self._job.shutdown.vacated
        except Exception:  # those that wait for it learn of its end
            logger.exception("job %s: its controller ends", self._spec.job)
        await asyncio.sleep(0.2)  # let the last answers out
        await self._job.group.actors.withdrawn()
        await self._job.group.actors.supply.refilled()
        if self._spec.trial is None and self._spec.elastic.warm_workers_per_node and read_config(os.environ).on:
            await asyncio.to_thread(prepare_next)
        await asyncio.to_thread(self._discard)
        self._end()

    async def _run_job(self) -> None:
        """Run the job until it has ended and the driver has fetched the outcome or is gone."""
        job = self._job
        try:
            try:
                await self._recover()
            finally:
                self._reconnection = None
                self._recovered.set()
            opening = self._background.start(job.open())  # storage may take its time: questions are answered meanwhile
            while not self._over():
                await asyncio.sleep(_TICK_S)
                if not job.record.phase.ended:
                    job.update_observers(time.monotonic())
                    if opening.done():
                        opening.result()
                    if opening.done() or job.group.machine.workers:  # those of the controller before train already
                        job.tick()
                        job.branches.tick(start, time.monotonic())
        except Exception as error:  # a bug of ours must end the job with its reason, not leave it hanging
            logger.exception("job %s: its controller failed", self._spec.job)
            job.finish(JobPhase.FAILED, error=error)
            while not self._over():
                await asyncio.sleep(_TICK_S)
        if not job.record.phase.ended:
            lease_s = self._spec.elastic.lease_s
            await self._save_and_end(f"its driver is gone: it has not renewed its lease of lease_s={lease_s:g} s")
        await job.shutdown.written()

    async def _save_and_end(self, reason: str) -> None:
        """End a job whose driver is gone, saving it first if possible."""
        job = self._job
        logger.warning("job %s: %s, so it ends", self._spec.job, reason)
        try:
            job.stop(reason)
            while not job.record.phase.ended:
                await asyncio.sleep(_TICK_S)
                job.update_observers(time.monotonic())
                job.tick()
        except Exception as error:
            logger.exception("job %s: its controller failed", self._spec.job)
            job.finish(JobPhase.FAILED, error=error)

    async def _recover(self) -> None:
        """Recover after a restart: find the living workers, release resources that none of them holds, and continue."""
        if self._reconnection is None or self._state_before is None:
            return
        job, state = self._job, self._state_before
        job.journal_revival(state)
        await asyncio.to_thread(self._journal.flush, _NOTE_S)
        ended = job.record.phase.ended
        told = () if ended else await self._reconnection.complete()
        await self._release_others(state, told)
        self._reconnection = None
        if not told and not ended:
            await job.open()  # what starts now starts from what is stored
        job.recover(state, told)
        await self._persist_state()

    async def _release_others(self, state: ControllerState, told: Collection[WorkerReregistration]) -> None:
        """Release resources that none of these workers holds: reservations, and processes that were still starting."""

        def release() -> None:
            groups.release_all(state.job, but={each.group for each in told})
            end_strays(state.job, {each.process for each in told})

        try:
            await asyncio.wait_for(asyncio.to_thread(release), _RELEASE_S)
        except (
            Exception
        ) as error:  # the control store is away: the allocator finds groups, and processes end themselves
            logger.warning("job %s: what no worker holds was not given back: %s", state.job, error)

    def _over(self) -> bool:
        return self._closed.is_set() or bool(self._lease.silent(time.monotonic(), (_DRIVER,)))
