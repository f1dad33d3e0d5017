"""Trackers of one run, used by its controller, each in its own thread."""

from __future__ import annotations

import asyncio
import collections
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from elastic_ray.batch.reports import StepReport
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.events import EventKind, JobEvent, JobPhase, Report
from elastic_ray.job_spec import JobSpec
from elastic_ray.membership.messages import GenerationSpec
from elastic_ray.observe.trackers.callbacks import Callbacks, CallbackTracker, TrackedRun
from elastic_ray.observe.trackers.series import JobNumbers, job_numbers
from elastic_ray.observe.trackers.tensorboard import TensorBoardWriter
from elastic_ray.sealed import Raised
from elastic_ray.state.resume_point import ResumePoint

if TYPE_CHECKING:
    from elastic_ray.batch.planner import BatchPlanner


_MOST = 10_000  # calls that wait
_MOST_BYTES = 32 << 20  # of reports among them
_MOST_TOLD = 100  # different problems
_MOST_SAID = 500  # characters of an error
_AGAIN_S = 5.0  # from a begin that has failed to the next one
_FLUSH_S = 1.0
_HANGS_S = 30.0


class Tracker(Protocol):
    """Protocol of a tracker of reports, numbers and events, called from one thread at a time; each call may raise."""

    def start(self, step: int, reports: int, *, again: bool, events: tuple[JobEvent, ...]) -> None:
        """Start the run; called before all other methods.

        Args:
            again: True if an earlier controller started the run; training may have continued in the meantime.
            events: Earlier events of the job, if the previous controller recorded them.
        """

    def report(self, report: Report, time_s: float) -> None:
        """Receive a report from rank 0, made at ``time_s`` [s since the epoch]."""

    def numbers(self, numbers: JobNumbers) -> None:
        """Receive the numbers that describe the job's current training."""

    def event(self, event: JobEvent) -> None:
        """Receive an event for the job, such as a change of its size."""

    def flush(self) -> None:
        """Write out buffered data; called about once a second."""

    def finish(self, phase: JobPhase) -> None:
        """End the run when the job ends in this final ``phase``; no further method is called."""


class TrackerThread:
    """Thread that calls a tracker's methods from a queue, so that callers never wait for the tracker.

    Args:
        most: Maximum number of queued calls; further calls are dropped and counted.
    """

    def __init__(self, name: str, tracker: Tracker, *, most: int = _MOST) -> None:
        self.name = name
        self._tracker, self._most = tracker, most
        self._news = threading.Condition()
        self._calls: collections.deque[tuple[str, Callable[[], None], int]] = collections.deque()
        self._bytes = 0
        self._problems: collections.deque[str] = collections.deque()
        self._told: set[str] = set()
        self._running: tuple[str, float] | None = None
        self._left_out = 0
        self._closed = self._given_up = False
        self._thread: threading.Thread | None = None

    def start(self, step: int, reports: int, *, again: bool, events: tuple[JobEvent, ...] = ()) -> None:
        """Queue a call to :meth:`Tracker.start`; if the call raises, it is repeated."""
        self._put("begin", lambda: self._tracker.start(step, reports, again=again, events=events))

    def report(self, report: Report, time_s: float) -> None:
        """Queue a report from rank 0, made at ``time_s`` [s since the epoch]."""
        self._put("report", lambda: self._tracker.report(report, time_s), size=len(report.to_json()))

    def numbers(self, numbers: JobNumbers) -> None:
        """Queue the job's current numbers."""
        self._put("numbers", lambda: self._tracker.numbers(numbers))

    def event(self, event: JobEvent) -> None:
        """Queue an event for the job, such as a change of its size."""
        self._put("event", lambda: self._tracker.event(event))

    def call(self, what: str, call: Callable[[], None]) -> None:
        """Queue a call for this tracker only; ``what`` names the call in messages."""
        self._put(what, call)

    def finish(self, phase: JobPhase) -> None:
        """Queue the notice that the job ended in ``phase``; the thread exits once all queued calls are done."""
        with self._news:
            self._calls.append(("finish", lambda: self._tracker.finish(phase), 0))
            self._closed = True
            self._news.notify()
        self._start()

    @property
    def done(self) -> bool:
        """True if :meth:`finish` has been called and all queued calls are done."""
        return self._closed and (self._thread is None or not self._thread.is_alive())

    def give_up(self) -> str:
        """Drop all queued calls; return a sentence that says how many, and which call was in progress."""
        with self._news:
            waiting, running = len(self._calls), self._running
            self._given_up = True
            self._calls.clear()
            self._news.notify()
        inside = f" and was in {running[0]}" if running is not None else ""
        return f"{self.name} was given up at the job's end: {waiting} calls waited{inside}"

    def problems(self, now_s: float) -> tuple[str, ...]:
        """Return the tracker's problems since the previous call of this method, given the time [s, monotonic]."""
        running = self._running
        if running is not None and now_s - running[1] > _HANGS_S:
            self._warn(f"hangs {running[0]}", f"does not return from {running[0]} for {_HANGS_S:g} s")
        if self._left_out:
            self._warn("full", f"is too slow: {len(self._calls)} calls wait, and further ones are left out")
        found = tuple(self._problems)
        for _ in found:
            self._problems.popleft()
        return found

    def _warn(self, key: str, what: str) -> None:
        if key not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(key)
            self._problems.append(f"{self.name} {what}")

    def _put(self, what: str, call: Callable[[], None], size: int = 0) -> None:
        """Queue a call, or drop it if too many calls are waiting."""
        with self._news:
            if self._closed:
                return
            if len(self._calls) >= self._most or self._bytes + size > _MOST_BYTES:
                self._left_out += 1
                return
            self._bytes += size
            self._calls.append((what, call, size))
            self._news.notify()
        self._start()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"tracker {self.name}", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        """Make the queued calls one after another until the last one, and flush about once a second."""
        flush_s = time.monotonic() + _FLUSH_S
        while not self._given_up:
            with self._news:
                self._news.wait_for(lambda: self._calls or self._closed, max(0.0, flush_s - time.monotonic()))
                found = self._calls.popleft() if self._calls else None
                self._bytes -= found[2] if found is not None else 0
            if found is not None:
                if not self._call(*found[:2]) and found[0] == "begin":
                    self._start_again(found)
            elif self._closed:
                return
            if time.monotonic() >= flush_s:
                self._call("flush", self._tracker.flush)
                flush_s = time.monotonic() + _FLUSH_S

    def _start_again(self, begin: tuple[str, Callable[[], None], int]) -> None:
        """Retry the start of a run, before all other calls, after a delay; give up once the run has ended."""
        with self._news:
            if not self._news.wait_for(lambda: self._closed or self._given_up, _AGAIN_S):
                self._calls.appendleft(begin)

    def _call(self, what: str, call: Callable[[], None]) -> bool:
        """Make one call and return True if it did not raise; an exception is reported as a problem."""
        self._running = (what, time.monotonic())
        try:
            call()
            return True
        except BaseException as error:  # users' code may call sys.exit()
            logger.debug("tracker %s: %s", self.name, what, exc_info=True)
            key = f"{what} {type(error).__name__}"
            self._warn(key, f"raised in {what}, and is asked again next time: {type(error).__name__}: {_said(error)}")
            return False
        finally:
            self._running = None


def _said(error: BaseException) -> str:
    """Return the text of an error raised by user code, or a substitute if the text itself cannot be produced."""
    try:
        return str(error)[:_MOST_SAID]
    except BaseException:
        return "it cannot say why"


logger = logging.getLogger("elastic_ray.job")

_POLL_S = 0.02
_BOARD_S = 5.0
_MOST_HELD = 5000
_BEGUN = "begun"
_GENERATIONS = 4  # whose members are remembered


class RunTrackers:
    """Trackers of a run: TensorBoard and the user's callbacks; only ``finish`` blocks.

    Args:
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
        """Create a tracker for TensorBoard, if enabled, and one for each callback."""
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
        """Restore the trackers' notes and an earlier controller's events; must be called before :meth:`start`."""
        for event in events:
            self._count(event)
        if _BEGUN not in notes:
            return
        for index, tracker in enumerate(self._callbacks):
            tracker.recall(notes.get(str(index), ""))
        self._start(0, 0, again=True, events=events)

    @property
    def notes(self) -> dict[str, str]:
        """Notes that the next controller's trackers use to restore their state."""
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
        """Pass a report from rank 0 to all trackers."""
        if self._held is not None and len(self._held) < _MOST_HELD:
            self._held.append((report, time.time()))
            return
        for thread in self._threads:
            thread.report(report, time.time())

    def _release(self) -> None:
        """Pass on reports held back until the run's start was known, in order, because readers expect growing steps."""
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
        for thread, tracker in zip(self._threads[-len(self._callbacks) :], self._callbacks, strict=False):
            thread.call("after_exception", functools.partial(tell, tracker))

    def tick(self, now_s: float, planner: BatchPlanner, group: GenerationSpec | None) -> None:
        """Pass the job's new numbers to all trackers, and report the trackers' problems; ``now_s`` is monotonic."""
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
        """End all trackers with the job, waiting at most ``ElasticConfig(tracker_timeout_s)`` for callbacks."""
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
