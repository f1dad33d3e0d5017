"""Trackers of one run, used by its controller, each in its own thread."""

from __future__ import annotations

import asyncio
import collections
import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from elastic_ray.batch.reports import StepReport
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.events import EventKind, JobEvent, JobPhase, Report
from elastic_ray.job_spec import JobSpec
from elastic_ray.membership.messages import GenerationSpec
from elastic_ray.observe.trackers.callbacks import Callbacks, CallbackTracker, TrackedRun
from elastic_ray.observe.trackers.series import job_numbers
from elastic_ray.observe.trackers.tensorboard import TensorBoardWriter
from elastic_ray.observe.trackers.tracker_thread import TrackerThread
from elastic_ray.sealed import Raised
from elastic_ray.state.resume_point import ResumePoint

if TYPE_CHECKING:
    from elastic_ray.batch.planner import BatchPlanner

logger = logging.getLogger("elastic_ray.job")

_POLL_S = 0.02
_BOARD_S = 5.0
_MOST_HELD = 5000
_BEGUN = "begun"
_GENERATIONS = 4  # whose members are remembered


class RunTrackers:
    """Trackers of a run: TensorBoard and the user's callbacks; only ``finish`` blocks.

    Args:
        run_id: Id of the run. It stays the same when the controller is replaced.
        tell: Function that sends a sentence about a failing tracker to the job's user.
    """

    def __init__(self, spec: JobSpec, run_id: str, tell: Callable[[str], None]) -> None:
        self._spec, self._run_id, self._tell = spec, run_id, tell
        self._threads: list[TrackerThread] = []
        self._board: TrackerThread | None = None
        self._callbacks: list[CallbackTracker] = []
        self._begun = False
        self._held: list[tuple[Report, float]] | None = []  # until it is known which reports came before them
        self._seen: StepReport | None = None
        self._resizes = self._failures = 0
        self._groups = collections.deque[GenerationSpec](maxlen=_GENERATIONS)
        self._make()

    def _make(self) -> None:
        """Create a tracker for TensorBoard, if it is enabled, and one for each callback."""
        spec = self._spec
        storage = RunStorage(spec.storage_path, spec.storage_filesystem, private=spec.elastic.private_files)
        wanted = spec.elastic.tensorboard
        if wanted if wanted is not None else spec.trial is None:
            writer = TensorBoardWriter(storage.filesystem, storage.path, private=storage.private)
            self._board = TrackerThread("TensorBoard", writer)
            self._threads.append(self._board)
        run = TrackedRun(job=spec.job, run_id=self._run_id, storage=storage, is_trial=spec.trial is not None)
        callbacks = Callbacks(spec.callbacks, self._run_id)
        for index, name in enumerate(spec.callback_names):
            tracker = CallbackTracker(callbacks, index, run)
            self._callbacks.append(tracker)
            self._threads.append(TrackerThread(f"callback {name}", tracker))

    def recall(self, notes: Mapping[str, str], events: tuple[JobEvent, ...]) -> None:
        """Restore the trackers' notes and the events of an earlier controller; must be called before :meth:`start`."""
        for event in events:
            self._count(event)
        if _BEGUN not in notes:
            return
        for index, tracker in enumerate(self._callbacks):
            tracker.recall(notes.get(str(index), ""))
        self._start(0, 0, again=True, events=events)

    @property
    def notes(self) -> dict[str, str]:
        """Notes from which the trackers of the next controller restore their state."""
        found = {str(index): tracker.note for index, tracker in enumerate(self._callbacks) if tracker.note}
        return {**found, _BEGUN: ""} if self._begun else {}

    def start(self, point: ResumePoint | None) -> None:
        """Start the run at ``point`` (None: from scratch); a run that has already started continues."""
        if not self._begun:
            steps, reports = (point.steps, point.reports) if point is not None else (0, 0)
            self._start(steps, reports, again=False)
        self._release()

    def _start(self, steps: int, reports: int, *, again: bool, events: tuple[JobEvent, ...] = ()) -> None:
        self._begun = True
        for thread in self._threads:
            thread.start(steps, reports, again=again, events=events)

    def report(self, report: Report) -> None:
        """Pass a report of rank 0 to all trackers."""
        if self._held is not None and len(self._held) < _MOST_HELD:
            self._held.append((report, time.time()))
            return
        for thread in self._threads:
            thread.report(report, time.time())

    def _release(self) -> None:
        """Pass on the reports held back until the run's start was known, in order: readers expect growing steps."""
        held, self._held = self._held or [], None
        for report, time_s in sorted(held, key=lambda each: each[0].index):
            for thread in self._threads:
                thread.report(report, time_s)

    def event(self, event: JobEvent, group: GenerationSpec | None) -> None:
        """Pass an event for the job to all trackers; ``group`` is the job's current generation (group of workers)."""
        self._count(event)
        if not self._begun:
            return
        for thread in self._threads:
            thread.event(event)
        if event.kind is EventKind.FAILURE and group is not None:
            self._workers_lost(event, group)

    def _count(self, event: JobEvent) -> None:
        self._resizes += event.kind is EventKind.RESIZE
        self._failures += event.kind in (EventKind.FAILURE, EventKind.RESTART)

    def _workers_lost(self, event: JobEvent, after: GenerationSpec) -> None:
        """Notify callbacks of the ranks that are missing from the generation after a failure."""
        before = next((each for each in reversed(self._groups) if each.generation < after.generation), None)
        if before is None:
            return
        left = {member.worker for member in after.members}
        lost = {rank: event.reason for rank, each in enumerate(before.members) if each.worker not in left}
        errors = {rank: RuntimeError(reason) for rank, reason in lost.items()}
        self._notify_callbacks(lambda tracker: tracker.failed(errors))

    def _notify_callbacks(self, tell: Callable[[CallbackTracker], None]) -> None:
        """Queue the call ``tell`` for the tracker of every callback."""
        for thread, tracker in zip(self._threads[-len(self._callbacks) :], self._callbacks, strict=False):
            thread.call("after_exception", functools.partial(tell, tracker))

    def tick(self, now_s: float, planner: BatchPlanner, group: GenerationSpec | None) -> None:
        """Pass new numbers of the job to all trackers, and report the trackers' problems; ``now_s`` is monotonic."""
        if group is not None and (not self._groups or self._groups[-1].generation != group.generation):
            self._groups.append(group)
        if planner.latest is not None and planner.latest is not self._seen:
            self._seen = planner.latest
            numbers = job_numbers(
                planner.latest,
                throughput=planner.throughput,
                goodput=planner.goodput(),
                noise_scale=planner.noise_scale,
                resizes=self._resizes,
                failures=self._failures,
                time_s=time.time(),
            )
            for thread in self._threads:
                thread.numbers(numbers)
        for thread in self._threads:
            for problem in thread.problems(now_s):
                self._tell(f"{problem}. Training continues without it")

    async def finish(self, phase: JobPhase, error: BaseException | Raised | None) -> None:
        """End all trackers with the job, waiting at most ``ElasticConfig(tracker_timeout_s)`` for callbacks.

        TensorBoard gets at most a few seconds, because its writer only waits for storage, which may hang.
        """
        if not self._begun:
            return  # it has ended before it was known where it begins
        self._release()
        if isinstance(error, Raised):
            self._notify_callbacks(lambda tracker: tracker.raised(error))
        for thread in self._threads:
            thread.finish(phase)
        now_s, patience_s = time.monotonic(), self._spec.elastic.tracker_timeout_s
        until_s = {
            each: now_s + (min(_BOARD_S, patience_s) if each is self._board else patience_s) for each in self._threads
        }
        while any(not each.done and time.monotonic() < until_s[each] for each in self._threads):
            await asyncio.sleep(_POLL_S)
        for thread in self._threads:
            problems = thread.problems(time.monotonic())
            for problem in problems if thread.done else (*problems, thread.give_up()):
                logger.warning("job %s: %s", self._spec.job, problem)
