"""SHELL: branches of a job in its controller: if it can have them, when they start, how the result is used."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from elastic_ray.batch.branch_losses import BranchError, BranchPlan, BranchResult
from elastic_ray.events import EventKind, JobPhase
from elastic_ray.job.branching import BranchRun, slots_are_idle
from elastic_ray.job.context import JobContext
from elastic_ray.job_spec import JobSpec
from elastic_ray.membership.messages import CriticalBatch

logger = logging.getLogger("elastic_ray.job")

_LOOK_S = 10.0
_IDLE_WAITS_S, _WAITS_S = 600.0, 3600.0  # for the end of a branch


class JobBranches:
    """Branches of one job (copies at other batch sizes), with at most one comparison at a time."""

    def __init__(self, parts: JobContext) -> None:
        self._parts, self._planner = parts, parts.planner
        self._running: asyncio.Task[None] | None = None
        self._outcome: BranchResult | BranchError | None = None
        self._last_step, self._looked_s = 0, 0.0
        self._told = ""  # why the job was not branched when slots were idle

    def start(self, plan: BranchPlan, start: Callable[[JobSpec], Any]) -> None:
        """Start a background comparison of branches, submitted by ``start``. Raises BranchError if it cannot start."""
        if self._is_running:
            raise BranchError(f"job {self._parts.spec.job!r} cannot be branched: a comparison is already in progress")
        run = self._run_of(plan, idle=False)
        self._outcome = None
        self._running = self._parts.background.start(self._compare(run, start))

    def outcome(self) -> BranchResult | None:
        """Return the last comparison's result; None while it runs. Raises BranchError if it failed or none exists."""
        if isinstance(self._outcome, BranchError):
            raise self._outcome
        if self._outcome is None and not self._is_running:
            raise BranchError(
                "no comparison is in progress: the job's controller has restarted; start the branch again"
            )
        return self._outcome

    @property
    def _is_running(self) -> bool:
        return self._running is not None and not self._running.done()

    def tick(self, start: Callable[[JobSpec], Any], now_s: float) -> None:
        """Start a comparison on idle slots, with ``branch_when_idle``, once the steps have doubled since the last."""
        if not self._parts.spec.elastic.branch_when_idle or now_s - self._looked_s < _LOOK_S or self._is_running:
            return
        self._looked_s, plan, report = now_s, BranchPlan(), self._planner.latest
        if report is not None and report.total_steps >= max(plan.steps, 2 * self._last_step):
            self._running = self._parts.background.start(self._compare_if_idle(plan, report.total_steps, start))

    async def _compare_if_idle(self, plan: BranchPlan, step: int, start: Callable[[JobSpec], Any]) -> None:
        """Run a comparison if the job can be branched and slots are idle."""
        try:
            run = self._run_of(plan, idle=True)
            if not await asyncio.to_thread(slots_are_idle, self._parts.spec):
                return
        except RuntimeError as error:
            if str(error) != self._told:  # it is asked every few seconds
                logger.info("%s", error)
            self._told = str(error)
            return
        self._last_step, self._outcome = step, None
        await self._compare(run, start)

    def _run_of(self, plan: BranchPlan, *, idle: bool) -> BranchRun:
        """Return the comparison to run. Raises BranchError with the reason if the job cannot be branched."""
        spec, report, limits = self._parts.spec, self._planner.latest, self._planner.unbound_limits
        if why_not := self._why_not():
            raise BranchError(f"job {spec.job!r} cannot be branched: {why_not}")
        assert report is not None and limits is not None and limits.max_batch_size is not None, "checked above"
        return BranchRun(
            spec=spec,
            sizes=plan.sizes(report.batch_size, limits.max_batch_size),
            plan=plan,
            idle=idle,
            waits_s=_IDLE_WAITS_S if idle else _WAITS_S,
        )

    def _why_not(self) -> str:
        """Return the reason why the job cannot be branched, with a remedy; empty if it can be."""
        spec, limits, phase = self._parts.spec, self._planner.unbound_limits, self._parts.record.phase
        if spec.branch_of:
            return f"it is a branch, of job {spec.branch_of!r}"
        if spec.trial is not None:
            return "it is a trial, whose state is its sweep's"
        if not spec.states_kept:
            return (
                "ElasticConfig(automatic_checkpoints=False) saves no state that a branch could start from; leave "
                "automatic_checkpoints on"
            )
        if spec.datasets:
            return (
                "its Ray datasets are read once, for this job alone; give an AdaptiveDataLoader a dataset with a length"
            )
        if phase is not JobPhase.RUNNING or self._planner.latest is None or not self._planner.latest.batch_size:
            return f"it is {phase.value} and has not told of a step; branch it while it trains"
        if limits is None or limits.max_batch_size is None or spec.elastic.fixed_batch:
            return (
                "its batch is fixed, so that nothing would follow; call "
                "loader.autoscale_batch_size(max_batch_size=...), or give the loader max_batch_tokens"
            )
        return ""

    async def _compare(self, run: BranchRun, start: Callable[[JobSpec], Any]) -> None:
        """Run the branches in a thread, and limit the job's batch to the critical batch found, if any."""
        events, sizes = self._parts.events, ", ".join(map(str, run.sizes))
        events.emit(EventKind.BRANCH, f"branches at batch {sizes} begin", detail={"sizes": list(run.sizes)})
        try:
            result = await asyncio.to_thread(run.measure, start)
        except Exception as error:
            self._outcome = error if isinstance(error, BranchError) else BranchError(f"{type(error).__name__}: {error}")
            events.emit(EventKind.BRANCH, f"branches tell nothing: {self._outcome}")
            return
        self._outcome, found = result, result.critical_batch
        events.emit(EventKind.BRANCH, str(result).replace("\n  ", " ").replace("\n", "; "), detail=result.plain)
        if found is not None:
            self.set(found)

    def set(self, batch_size: int) -> None:
        """Limit the job's global batch to at most ``batch_size`` samples, in the planner and on all workers."""
        self._planner.set_critical_batch(batch_size)
        self._parts.group.actors.post(self._parts.group.training(), CriticalBatch(batch_size=batch_size))
