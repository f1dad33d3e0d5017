"""SHELL: automatic checkpoints, copied between two steps and written by a thread while training continues."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from elastic_ray.checkpoints.automatic import StateFile, delete_others, delete_unfinished
from elastic_ray.checkpoints.interval import FIRST_INTERVAL_S, checkpoint_interval_s
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.checkpoints.sharded.completing import PartsMissingError
from elastic_ray.checkpoints.sharded.saver import PartSaver
from elastic_ray.consensus.saving import SaveAgreement, SaveOrder
from elastic_ray.state.resume_point import ResumePoint
from elastic_ray.state.tree import UnsafeStateError
from elastic_ray.worker.messages import StateSaved
from placement.storage.storage_calls import Call, StorageCalls, StorageTimeoutError

if TYPE_CHECKING:
    from elastic_ray.session.session import Session

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 1.0
_UNSEEN = 2


class StateSaver:
    """Writer of automatic checkpoints between steps. Call :meth:`close` after the run.

    If all ranks hold the same state, rank 0 saves it alone. If the ranks' models differ between averages, rank 0
    announces the save with the next step, after which all ranks hold the mean. If the state is divided among ranks,
    each rank saves its part at the end of a step that all ranks have agreed on.

    Args:
        told: Called with each saved checkpoint; returns the job's mean time between losses of all workers [s].
        interval_s: Time between checkpoints [s]; None derives it from their cost and the observed losses.
        timeout_s: Longest time [s] to wait for unresponsive storage in a preempted job, or for a rank's missing part.
        saving: Agreement between ranks on checkpoints that all of them write; None if rank 0 writes everything.
        workers: Returns the current group's workers in rank order; empty while the group changes.
    """

    def __init__(
        self,
        session: Session,
        storage: RunStorage,
        told: Callable[[StateSaved], float],
        *,
        keep: int,
        interval_s: float | None,
        calls: StorageCalls | None = None,
        timeout_s: float = 60.0,
        saving: SaveAgreement | None = None,
        workers: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        self._calls = calls or StorageCalls(storage.where)
        self._timeout_s, self._session, self._storage, self._told = timeout_s, session, storage, told
        self._keep = keep
        self._fixed_s = interval_s
        self._interval_s = min(interval_s, FIRST_INTERVAL_S) if interval_s is not None else FIRST_INTERVAL_S
        self._since_s = time.monotonic()
        self._writing: Call | None = None
        self._closed = threading.Event()
        self._off = False
        self._failing = False
        self._asked = False
        self._saving = saving or SaveAgreement()
        self._parts = PartSaver(
            session.states, storage, self._calls, workers=workers, busy=self._busy, timeout_s=timeout_s
        )
        if saving is not None:
            saving.serve(self._parts)
        self._refused = False
        self._unseen = 0  # checkpoints one after the other of which a rank's part has not appeared

    def ask(self) -> None:
        """Request a checkpoint after this step or, if that is impossible, after the next step that allows one."""
        self._asked = True

    def between_steps(self) -> None:
        """Start a checkpoint if it is due; otherwise, return almost immediately."""
        order = self._saving.pop_order() if self._session.run.wishes is None else self._unit_order()
        if order is not None:
            self._session.moment("save")
            self._start(order)
            return
        self._report_refusals()
        due = self._asked or time.monotonic() - self._since_s >= self._interval_s
        units = self._session.run.wishes is not None
        if units or self._off or not due or self._session.rank != 0:
            return
        if self._busy() or not self._session.may_save() or self._parts.makes_memory:
            return
        if self._parts.no_memory:
            self._give_up(self._parts.no_memory)
            return
        self._start(None)

    def _unit_order(self, *, ends: bool = False) -> SaveOrder | None:
        """Return the order for the first rank's unit to write a checkpoint together, or None if none is due."""
        run = self._session.run
        if run.wishes is None or run.unit is None or self._off or self._session.rank != 0:
            return None
        if ends:
            run.agree_in_unit(None, saves=True)
        token = run.wishes.pop_save()
        place = run.unit.place
        return SaveOrder(token=f"{token:09x}", rank=place.position, world_size=place.size) if token else None

    def is_due(self) -> bool:
        """True if a checkpoint is due and this worker is not still writing the previous one."""
        due = self._asked or time.monotonic() - self._since_s >= self._interval_s
        return due and not self._busy()

    def _start(self, order: SaveOrder | None) -> None:
        """Write this rank's part as all ranks have agreed or, without an order, the entire state."""
        begin_s = self._since_s = time.monotonic()
        try:
            part = self._parts.capture(order, self._session.resume_point(), copy=True)
            if part is None:  # once there is memory, the next step is soon enough
                self._since_s = begin_s - self._interval_s
                return
            self._asked = False
            pause_s = time.monotonic() - begin_s
            self._writing = self._calls.start_long(
                f"writing the automatic checkpoint at step {part.resume_point.steps}",
                lambda go_on: self._write(lambda go_on: self._parts.write(part, go_on), pause_s, go_on),
            )
        except Exception:
            self._give_up("it cannot be copied", exc_info=True)

    def _report_refusals(self) -> None:
        """Report that rank 0 gathers the entire state because some ranks cannot write their parts."""
        if self._saving.refusals and not self._refused and self._session.rank == 0:
            self._refused = True
            ranks = self._saving.refusals
            self._session.notify(
                "storage",
                f"rank 0 gathers the whole state for automatic checkpoints and writes them alone, for {ranks} of the "
                f"ranks cannot write a part (their logs say why). Where their nodes do not see {self._storage.where}, "
                "set RunConfig(storage_path) to storage that all nodes share",
            )

    def save_last(self, until: Callable[[], bool]) -> None:
        """Save the final state after the train function has returned; a storage failure is reported but not raised."""
        problem = self.save(until)
        if problem:
            logger.warning("job %s: the end of the run was not saved: %s", self._session.job, problem)
            self._session.notify("storage", f"the end of the run was not saved: {problem}")

    def save(self, until: Callable[[], bool] = lambda: False) -> str:
        """Save this rank's state and wait until it is written, after all ranks have stopped training.

        Ranks other than 0 save only their part, if any. Waiting for storage stops once ``until`` returns True.

        Returns the reason if the state could not be saved; empty if it was saved.
        """
        begin_s = time.monotonic()
        units = self._session.run.wishes is not None
        order = self._unit_order(ends=True) if units else self._saving.pop_order()
        if order is None and self._session.rank != 0:
            return ""
        if order is not None:
            self._session.moment("save")
        try:
            if self._writing is not None:  # a checkpoint that was begun earlier
                self._calls.wait(self._writing, timeout_s=self._timeout_s, until=until)
            state = self._write_now(order, self._session.resume_point(), until)
            if state is None:
                return ""
            took_s = time.monotonic() - begin_s
            self._told(StateSaved(state=state, pause_s=took_s, cost_s=took_s, write_s=took_s))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        self._delete_others(state)
        return ""

    def _write_now(self, order: SaveOrder | None, point: ResumePoint, until: Callable[[], bool]) -> StateFile | None:
        """Write while no rank trains; give up if storage does not respond for too long."""
        part = self._parts.capture(order, point, copy=False)
        assert part is not None, "nothing is copied"
        call = self._calls.start_long(
            f"saving the job at step {point.steps}", lambda go_on: self._parts.write(part, go_on)
        )
        if not self._calls.wait(call, timeout_s=self._timeout_s, until=until):
            raise InterruptedError("the job was stopped in the meantime")
        state: StateFile | None = call.answer.result()
        return state

    def close(self) -> None:
        """Cancel a checkpoint that is still being written, and wait briefly for its thread."""
        self._closed.set()
        with contextlib.suppress(StorageTimeoutError, concurrent.futures.CancelledError):
            if self._writing is not None:
                self._calls.wait(self._writing, timeout_s=_CLOSE_TIMEOUT_S)

    def _busy(self) -> bool:
        return self._writing is not None and not self._writing.answer.done()

    def _write(
        self, write: Callable[[Callable[[], bool]], StateFile | None], pause_s: float, go_on: Callable[[], bool]
    ) -> None:
        """Write a copied checkpoint, report it, and schedule the next one."""
        begin_s, cpu_s = time.monotonic(), time.thread_time()
        try:
            state = write(lambda: go_on() and not self._closed.is_set())
            if state is None:
                return
        except InterruptedError:
            return
        except PartsMissingError as error:
            self._parts_missing(error)
            return
        except UnsafeStateError as error:
            self._give_up(str(error))
            return
        except Exception as error:  # a full disk, a lost connection: the next checkpoint may succeed
            if self._closed.is_set():
                return  # torch's archive says something else of a file that is left off
            if not self._failing:
                self._session.notify("storage", f"an automatic checkpoint was not written: {error}")
            self._failing = True
            logger.warning("job %s: the automatic checkpoint was not written: %s", self._session.job, error)
            return
        self._report(state, pause_s, begin_s, cpu_s)

    def _parts_missing(self, error: PartsMissingError) -> None:
        """Warn that a checkpoint's parts are missing; if this repeats, let rank 0 gather and write everything."""
        logger.warning("job %s: the automatic checkpoint was not written: %s", self._session.job, error)
        self._unseen = self._unseen + 1 if error.unseen else 0
        if self._unseen >= _UNSEEN:
            self._saving.given_up = True
            self._refused = True
            self._session.notify(
                "storage",
                f"rank 0 gathers the whole state for automatic checkpoints from now on: {error}, where it looks for "
                f"them, in {self._storage.where}. Set RunConfig(storage_path) to storage that all nodes share",
            )

    def _report(self, state: StateFile, pause_s: float, begin_s: float, cpu_s: float) -> None:
        """Report a checkpoint to the controller, delete old ones, and schedule the next one."""
        self._failing, self._unseen = False, 0
        cost_s = pause_s + time.thread_time() - cpu_s
        saved = StateSaved(state=state, pause_s=pause_s, cost_s=cost_s, write_s=time.monotonic() - begin_s)
        try:
            mean_s = self._told(saved)
        except Exception as error:
            logger.warning(
                "job %s: the controller has not heard of the automatic checkpoint: %s", self._session.job, error
            )
            return
        self._delete_others(state)  # only now: the controller may have needed one of them until here
        self._interval_s = self._fixed_s if self._fixed_s is not None else checkpoint_interval_s(cost_s, mean_s)
        logger.info(
            "job %s: automatic checkpoint at step %d, %.1f MB, pause %.3f s, written in %.1f s; the next in %.0f s",
            self._session.job, state.steps, state.size / 1e6, pause_s, saved.write_s, self._interval_s,
        )  # fmt: skip

    def _delete_others(self, state: StateFile) -> None:
        try:
            delete_others(self._storage, state, keep=self._keep)
            delete_unfinished(self._storage)
        except Exception as error:  # the next one deletes them
            logger.warning("job %s: older automatic checkpoints were not deleted: %s", self._session.job, error)

    def _give_up(self, why: str, *, exc_info: bool = False) -> None:
        self._off = True
        self._parts.refuse(why)
        self._session.notify("storage", f"the job has no automatic checkpoints: {why}")
        logger.warning(
            "job %s: no automatic checkpoints: %s. Report checkpoints with elastic_ray.report(), or switch them off "
            "with ElasticConfig(automatic_checkpoints=False)", self._session.job, why, exc_info=exc_info,
        )  # fmt: skip
