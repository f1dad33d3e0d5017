"""SHELL: a sweep's actor, which starts its trials' controllers, lends them worker processes and weighs trials.

A lost actor is recreated and recovers the trials' metrics from their next reports. Processes that it had lent out end
with it; to their trials, these are lost workers. The actor ends itself once none of its trials has a controller.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import secrets
import socket
import time
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError

from elastic_ray.job_spec import JobSpec
from placement.cluster.packing import FreeResources
from placement.ray_cluster.named_actors import ALLOCATOR, create_on_head, find_actor
from placement.text import log_plainly
from tuning.rung_sizes import Sweep, SweepPlanner
from tuning.trials import CheckpointCache, Promise, TrialRecord, weights

logger = logging.getLogger("tuning.sweep")

_LOOK_S = 0.5
_FIRST_S = 60.0  # within this time after its start the first trial comes
_LINGER_S = 10.0  # after the last trial
_CALL_TIMEOUT_S = 5.0
_NEWS = 0.1  # relative change of a weight that is told
_ATTEMPTS = 5
_PLAN_S = 3.0
_ENDLESS = 1_000_000  # trials: nobody means so many
_OPEN_S = 120.0
_STOP_S = 15.0  # for trials to end their steps
_TOLD_S = 2.0  # within which all drivers of a sweep that was stopped have asked
_SEEN_S = 5.0  # a driver that has no trial and has not asked for so long has ended
_SILENT_S = 60.0  # the same for one with trials: a searcher may keep its loop busy


class SweepStoppedError(RuntimeError):
    """Error raised if a trial is started after its sweep was stopped."""

    def __init__(self, sweep: str, reason: str) -> None:
        super().__init__(f"sweep {sweep!r} was stopped and starts no trial any more: {reason}")
        self._arguments = sweep, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return SweepStoppedError, self._arguments


class SweepRunsError(RuntimeError):
    """Error raised if another sweep with the same name is running on the cluster."""

    def __init__(self, sweep: str, runs: str) -> None:
        super().__init__(
            f"sweep {sweep!r} runs already ({runs}): two sweeps of one name at a time would weigh each other's trials, "
            "and `elastic-ray stop` would end both. Give this one a name of its own, with tuning.elastic(sweep=...), "
            "tune.RunConfig(name=...) or tuning.nni.Experiment(name=...), or wait until the other has ended"
        )
        self._arguments = sweep, runs

    def __reduce__(self) -> tuple[Any, ...]:
        return SweepRunsError, self._arguments


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SweepDriver:
    """Identity and limits of a sweep's driver, the process that runs one ``Tuner.fit()`` or one NNI experiment."""

    token: str  # unique among all drivers
    ray_job: str  # Ray job of its process
    folder: str  # directory of the sweep's results; the same after ``Tuner.restore``
    promise: Promise | None  # by what the sweep's trials are compared; None weighs them alike
    words: str  # the process, for people
    begun_s: float  # when it began [s since the epoch]
    limits: Sweep | None = None  # when the sweep is to end; None for no plan
    trials: int = 0  # in all, with a plan

    def planner(self) -> SweepPlanner | None:
        """Return a planner for the number of workers per trial; None unless the sweep has a promise and a limit."""
        if self.limits is None or not self.limits.planned or self.promise is None:
            return None
        return SweepPlanner(self.limits, self.promise, self.trials, self.begun_s)


def this_driver(
    folder: str, promise: Promise | None, limits: Sweep | None = None, trials: int | None = None
) -> SweepDriver:
    """Return a new driver: a record that this process runs the sweep whose results are in ``folder``.

    Without a promise (comparison rule), all trials have the same weight. Raises ValueError if the limits have a
    deadline or budget, but the total number of ``trials`` or of reports per trial is unknown.
    """
    if limits is not None and limits.planned:
        if promise is None or promise.max_t is None:
            raise ValueError(
                "Sweep(deadline_s=..., budget_usd=...) needs a scheduler with rungs and an end, "
                f"ASHAScheduler(max_t=...) for instance, or tuning.elastic(promise=...), but got {promise}"
            )
        if not trials or trials > _ENDLESS:
            raise ValueError(
                "Sweep(deadline_s=..., budget_usd=...) needs the number of trials, but got a searcher without end: "
                "set TuneConfig(num_samples=...)"
            )
    return SweepDriver(
        promise=promise,
        limits=limits,
        trials=trials or 0,
        begun_s=time.time(),
        token=secrets.token_hex(8),
        ray_job=ray.get_runtime_context().get_job_id(),
        folder=folder,
        words=f"driven by process {os.getpid()} on {socket.gethostname()}, results in {folder}",
    )


def sweep_runs(name: str) -> bool:
    """True if the sweep with this name has an actor, meaning that it is running or ended only seconds ago."""
    return find_actor(f"sweep:{name}") is not None


def claim_sweep(name: str, driver: SweepDriver) -> None:
    """Make ``driver`` the only driver of the sweep ``name``; wait up to 10 s to see whether an earlier one has ended.

    Raises SweepRunsError if the earlier driver is running.
    """
    deadline = time.monotonic() + 2 * _SEEN_S
    for attempt in range(_ATTEMPTS):
        try:
            sweep = find_sweep(name, driver.promise)
            while runs := ray.get(sweep.claim.remote(driver), timeout=_OPEN_S):
                busy, words = runs
                if busy or time.monotonic() > deadline:
                    raise SweepRunsError(name, words)
                time.sleep(_LOOK_S)
        except RayActorError:  # it had nothing to do and has just ended itself
            time.sleep(0.2 * (attempt + 1))
        else:
            return
    raise RuntimeError(f"the actor of sweep {name!r} ends again and again before the sweep can begin")


def release_sweep(name: str, driver: SweepDriver) -> None:
    """Release the sweep's name for other sweeps if ``driver`` holds it; return without waiting for an answer."""
    if ray.is_initialized() and (sweep := find_actor(f"sweep:{name}")) is not None:
        sweep.release.remote(driver.token)


def stop_sweep(name: str, reason: str = "stop_sweep() was called") -> bool:
    """Stop a running sweep: no more trials start, and running trials end after their current step.

    The call does not wait for the trials. Once they have ended, the sweep's ``Tuner.fit()`` or ``Experiment.run()``
    returns the results so far.

    Args:
        name: Name of the sweep, ``tuning.elastic(sweep=...)``; by default the name of the Tune or NNI experiment.
        reason: Reason recorded in each trial's last event.

    Returns:
        False if no such sweep is running, True otherwise.
    """
    sweep = find_actor(f"sweep:{name}")
    if sweep is None:
        return False
    ray.get(sweep.stop.remote(reason), timeout=_OPEN_S)
    return True


class StopWatch:
    """Non-blocking check for whether the sweeps driven by this process have been stopped."""

    def __init__(self) -> None:
        self._asked: dict[str, Any] = {}

    def poll(self, name: str, driver: SweepDriver | None = None) -> str:
        """Return why the sweep ``name`` was stopped, once all its trials have ended; empty until then.

        ``driver`` is the calling driver, or None if it has not claimed the sweep. The call also signals to the sweep's
        actor that the driver is alive. It does not block: it returns the answer to the previous call's request.
        """
        asked = self._asked.pop(name, None)
        if asked is not None and not ray.wait([asked], timeout=0)[0]:
            self._asked[name] = asked
            return ""
        try:
            if asked is not None and (reason := str(ray.get(asked))):
                return reason
            if (sweep := find_actor(f"sweep:{name}")) is not None:
                self._asked[name] = sweep.stopped.remote(driver)
        except RayError:  # it has ended: no trial runs
            pass
        return ""


def find_sweep(name: str, promise: Promise | None) -> Any:
    """Return the actor of the sweep ``name``, or create it, to compare trials by ``promise`` (None: all alike)."""
    return create_on_head(SweepActor, f"sweep:{name}", name, promise, get_if_exists=True)


def open_controller(name: str, promise: Promise | None, spec: JobSpec) -> tuple[Any, Promise | None]:
    """Return a controller actor that runs the trial, and the promise (rule) that the sweep uses to compare trials.

    The controller is either new or no longer needed by an earlier trial. If the sweep already has a promise, that
    promise is returned instead of ``promise``. Raises SweepStoppedError if the sweep was stopped.
    """
    for attempt in range(_ATTEMPTS):
        try:
            opened = find_sweep(name, promise).open.remote(spec)
            controller, kept = ray.get(opened, timeout=_OPEN_S)
        except GetTimeoutError:
            raise TimeoutError(
                f"the actor of sweep {name!r} has not started trial {spec.job!r} within {_OPEN_S:g} s; the head node, "
                "where it runs, may be overloaded: try fewer trials at a time (max_concurrent_trials)"
            ) from None
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, SweepStoppedError) else error) from None
        except RayActorError:  # it had nothing to do and has just ended itself
            time.sleep(0.2 * (attempt + 1))
        else:
            if promise not in (None, kept):
                logger.warning(
                    "trial %s is weighed by %s, not by %s: sweep %r has another trial or has had one within %g s, and "
                    "keeps its promise; give this sweep a name of its own, or wait until then",
                    *(spec.job, kept, promise, name, _LINGER_S),
                )
            return controller, kept
    raise RuntimeError(f"the actor of sweep {name!r} ends again and again before it can start trial {spec.job!r}")


def promised(spec: JobSpec, promise: Promise | None) -> JobSpec:
    """Return a trial's job spec with the promise's metric, mode, rungs (cuts) and report limit; unchanged for None."""
    if promise is None or spec.trial is None:
        return spec
    most, rungs = promise.max_t, promise.rungs
    trial = dataclasses.replace(spec.trial, most_reports=most, rungs=rungs, metric=promise.metric, mode=promise.mode)
    return dataclasses.replace(spec, trial=trial)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _TrialStart:
    """A started trial: its name, kind and controller."""

    trial: str
    kind: JobSpec
    controller: Any


class SweepActor:
    """Actor class of a sweep, which starts, compares and stops trials; use :func:`find_sweep` to get its handle."""

    def __init__(self, name: str, promise: Promise | None) -> None:
        from elastic_ray.job.controller import start  # their imports, which drivers are spared here
        from elastic_ray.job.host import ControllerHosts
        from tuning.sweep_processes import SweepProcesses

        log_plainly(logging.WARNING)
        logger.setLevel(logging.INFO)
        self._start, self._hosts = start, ControllerHosts(name)
        self._name, self._promise = name, promise
        self._records: dict[str, TrialRecord] = {}
        self._announced_weights: dict[str, float] = {}
        self._planner: SweepPlanner | None = None
        self._sized: dict[str, int] = {}
        self._planned_s = 0.0
        self._busy: dict[str, _TrialStart] = {}
        self._ending: dict[str, _TrialStart] = {}
        self._opening = 0
        self._processes = SweepProcesses(name)
        self._cached = CheckpointCache()
        self._handle = ray.get_runtime_context().current_actor
        self._driver: SweepDriver | None = None
        self._claimed = False
        self._folder, self._seen_s = "", 0.0
        self._since_s = time.monotonic() + _FIRST_S
        self._stop_reason, self._stopped_by_s, self._stopped, self._told_s = "", 0.0, False, 0.0
        self._loop_task = asyncio.get_event_loop().create_task(self._watch())

    async def claim(self, driver: SweepDriver) -> tuple[bool, str] | None:
        """Make ``driver`` the sweep's driver, unless another driver may still be alive.

        Returns None on success. Otherwise returns whether the other driver is certainly running, and its description.
        """
        now_s, other = time.monotonic(), self._driver
        if other is not None and other.token != driver.token and not _has_ended(other):
            silent_s = now_s - self._seen_s
            if silent_s < (_SILENT_S if self._busy else _SEEN_S):
                return bool(self._busy) or silent_s < _TOLD_S, other.words
        if not self._busy or not self._claimed:  # else it was resumed
            self._promise, self._planner = driver.promise, driver.planner()
        self._claimed = True
        if not self._busy:
            self._stop_reason, self._stopped, self._told_s = "", False, 0.0
        if driver.folder != self._folder:
            self._records = {each.trial: self._records[each.trial] for each in self._busy.values()}
        self._driver, self._folder, self._seen_s, self._since_s = driver, driver.folder, now_s, now_s
        return None

    async def release(self, token: str) -> None:
        """Release the sweep's name for other drivers, if its current driver has this token."""
        if self._driver is not None and self._driver.token == token:
            self._driver = None

    async def open(self, spec: JobSpec) -> tuple[Any, Promise | None]:
        """Return a controller that runs this trial, and the sweep's promise (None if trials are not compared)."""
        assert spec.trial is not None, "only trials are opened here"
        if self._stop_reason:
            raise SweepStoppedError(self._name, self._stop_reason)
        cached = self._cached.find(spec.trial.start_from)
        trial = dataclasses.replace(spec.trial, sweep=self._handle, checkpoint_ref=cached)
        spec = promised(dataclasses.replace(spec, trial=trial), self._promise)
        kind, run = _kind(spec), trial.controller
        self._processes.admit(run, kind)
        # Callbacks are the user's code, of which a fault is to cost no other trial.
        self._opening += 1
        try:
            controller = self._start(spec) if spec.callbacks else await self._hosts.open(spec)
        finally:
            self._opening -= 1
        self._begun(run, _TrialStart(trial=spec.job, kind=kind, controller=controller))
        return controller, self._promise

    async def attached(self, spec: JobSpec, controller: Any) -> Promise | None:
        """Register a running trial that a new driver has reconnected to; return the sweep's promise or None."""
        assert spec.trial is not None, "only trials are attached here"
        run, kind = spec.trial.controller, _kind(spec)
        self._processes.admit(run, kind)
        self._begun(run, _TrialStart(trial=spec.job, kind=kind, controller=controller))
        return self._promise

    def _begun(self, run: str, begun: _TrialStart) -> None:
        """Add a running trial; if it was still starting when the sweep was stopped, stop it."""
        self._busy[run] = begun
        self._since_s = time.monotonic()
        record = self._records.get(begun.trial, TrialRecord(trial=begun.trial))
        self._records[begun.trial] = dataclasses.replace(record, running=True)
        self._announced_weights.pop(begun.trial, None)
        self._sized.pop(begun.trial, None)
        self._weigh()
        if self._stop_reason:
            begun.controller.stop.remote(reason=f"the sweep was stopped: {self._stop_reason}")

    async def notify(self, trial: str, before: int, values: tuple[float, ...]) -> None:
        """Record a trial's metric at each report after its first ``before`` reports, and update all trials' weights."""
        record = self._records.get(trial, TrialRecord(trial=trial)).told(before, values)
        self._records[trial] = dataclasses.replace(record, running=self._runs(trial))
        self._weigh()

    async def closed(self, run: str) -> None:
        """Record that a run (one start of a trial) has ended; its controller may now run another trial."""
        ended = self._busy.pop(run, None)
        if ended is not None:
            self._ending[run] = ended
            self._ended(run, ended)

    async def stop(self, reason: str, now: bool = False) -> int:
        """Stop all running trials and start no more; return the number of trials that were running.

        Args:
            now: True to stop in the middle of a step; by default trials finish their current step.
        """
        self._stop_reason = self._stop_reason or reason
        self._stopped_by_s = time.monotonic() + _STOP_S
        for each in self._busy.values():
            each.controller.stop.remote(now=now, reason=f"the sweep was stopped: {reason}")
        logger.info("sweep %s: stopped with %d trials: %s", self._name, len(self._busy), reason)
        return len(self._busy)

    async def stopped(self, driver: SweepDriver | None = None) -> str:
        """Return why the sweep was stopped, once all its trials have ended; empty until then, or if it was not stopped.

        Args:
            driver: The calling driver, or None if it has not claimed the sweep; the call also signals that it is alive.
        """
        if driver is not None and self._driver in (None, driver):
            if self._driver is None:  # this actor was made again
                self._promise, self._planner = driver.promise, driver.planner()
            self._driver, self._folder, self._seen_s = driver, driver.folder, time.monotonic()
        if self._stopped:
            self._told_s = self._told_s or time.monotonic()
        return self._stop_reason if self._stopped else ""

    async def _all_ended(self) -> bool:
        """True if no reachable controller is still running a trial, or the wait for the trials has timed out."""
        for each in tuple(self._busy.values()):
            try:
                status = await asyncio.wait_for(each.controller.status.remote(), _CALL_TIMEOUT_S)
            except (RayError, asyncio.TimeoutError):
                continue
            if not status.phase.ended:
                return time.monotonic() > self._stopped_by_s
        return True

    async def lend(self, run: str, node: str) -> tuple[Any, bool] | None:
        """Return a process on the node, and whether it has already started up; None if the run was not admitted."""
        return await self._processes.lend(run, node)

    async def take_back(self, run: str, actor: Any, *, fit: bool) -> None:
        """Accept a process handed back by a run, and kill it if ``fit`` is False (no other trial can use it)."""
        self._processes.take_back(run, actor, fit=fit)

    async def complete(self, run: str, fit: dict[Any, bool]) -> None:
        """Close a run and kill what it borrows but the processes in ``fit`` (each with whether it has started up)."""
        self._processes.complete(run, fit)

    async def hold(self, run: str, path: str, held: tuple[Any]) -> None:
        """Keep a run's checkpoint in the cluster's memory, so that a trial can start from it without reading storage.

        ``held`` is a tuple with the checkpoint's Ray reference; Ray would replace a bare reference with its object.
        """
        if run in self._busy:
            self._cached.hold(run, path, held[0])

    def _runs(self, trial: str) -> bool:
        return any(each.trial == trial for each in self._busy.values())

    def _ended(self, run: str, ended: _TrialStart) -> None:
        trial, keep_s = ended.trial, ended.kind.trial.keep_s if ended.kind.trial is not None else 0.0
        self._cached.over(run, time.monotonic() + keep_s)  # the process that owns it waits as long, too
        if trial in self._records:
            self._records[trial] = dataclasses.replace(self._records[trial], running=self._runs(trial))
        self._weigh()

    def _weigh(self) -> None:
        weighed = weights(list(self._records.values()), self._promise)
        for each in self._busy.values():
            weight, before = weighed.get(each.trial), self._announced_weights.get(each.trial, 1.0)
            if weight is not None and abs(weight.value - before) > _NEWS * before:
                self._announced_weights[each.trial] = weight.value
                logger.debug("sweep %s: trial %s weighs %.2f: %s", self._name, each.trial, weight.value, weight.reason)
                each.controller.weigh.remote(weight.value)

    async def _size(self, planner: SweepPlanner) -> None:
        """Resize trials to their rung's size, computed from the allocator's current models of the trials."""
        allocator = await asyncio.to_thread(find_actor, ALLOCATOR)
        if allocator is None:
            return
        try:
            seen = await asyncio.wait_for(allocator.snapshot.remote(), _CALL_TIMEOUT_S)
        except (RayError, asyncio.TimeoutError):
            return
        trials = {each.trial: each for each in self._busy.values()}
        room, before = FreeResources(seen.cluster), planner.note
        views = [state.view for job, state in seen.jobs.items() if job in trials]
        slots = {view.job: room.slots(view).tolist() for view in views}
        for job, workers in planner.sizes(self._records, views, slots, time.time()).items():
            if self._sized.get(job) != workers:
                self._sized[job] = workers
                trials[job].controller.resize.remote(workers)
        if planner.note and not before:
            logger.warning("sweep %s: %s", self._name, planner.note)

    async def _watch(self) -> None:
        """Discard controllers that are gone, and end this actor when none is left."""
        while True:
            await asyncio.sleep(_LOOK_S)
            looked_at = {**self._busy, **self._ending}
            # A controller whose process died before it had ended does not know that nobody wants it any more.
            asks = [
                getattr(each.controller, "close" if run in self._ending else "spec") for run, each in looked_at.items()
            ]
            gone = await asyncio.gather(*(_is_gone(ask.remote()) for ask in asks))
            for (run, each), is_gone in zip(looked_at.items(), gone, strict=True):
                if is_gone:
                    self._processes.complete(run)
                    self._ending.pop(run, None)
                    if self._busy.pop(run, None) is not None:
                        self._ended(run, each)
            if self._stop_reason and not self._stopped:
                self._stopped = await self._all_ended()
            now_s = time.monotonic()
            if self._planner is not None and self._busy and now_s > self._planned_s + _PLAN_S:
                self._planned_s = now_s
                await self._size(self._planner)
            if self._told_s and now_s > self._told_s + _TOLD_S:  # another sweep of the name may begin
                self._stop_reason, self._stopped, self._told_s = "", False, 0.0
            self._processes.expire(now_s)
            self._cached.expire(now_s)
            if self._busy or self._opening:
                self._since_s = max(self._since_s, now_s)
            elif now_s > self._since_s + _LINGER_S:
                await self._hosts.close()
                if not (self._busy or self._opening):
                    ray.kill(self._handle)


def _has_ended(driver: SweepDriver) -> bool:
    """True if Ray reports that the driver's process has ended."""
    private: Any = ray._private
    return any(each["JobID"] == driver.ray_job and each["IsDead"] for each in private.state.jobs())


async def _is_gone(asked: Any) -> bool:
    """True if the controller that received the call has ended for good."""
    try:
        await asyncio.wait_for(asked, _CALL_TIMEOUT_S)
    except ActorDiedError:  # not ActorUnavailableError: that one may come back
        return True
    except (RayError, asyncio.TimeoutError):
        return False
    return False


def _kind(spec: JobSpec) -> JobSpec:
    """Return the job spec reduced to the fields that trials must share to use each other's processes."""
    trial = spec.trial
    if trial is not None:
        trial = dataclasses.replace(
            trial, controller="", start_from=None, checkpoint_ref=None, sweep=None, parameters={}
        )
    return dataclasses.replace(spec, job="", train_loop=b"", storage_path="", trial=trial, secret="")
