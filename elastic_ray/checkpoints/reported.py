"""SHELL: stores the checkpoints that ranks report, so that unavailable storage does not block training.

Rank 0's files are the checkpoint. Files from other ranks are added if the checkpoint has no file of the same name.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from elastic_ray.checkpoints.copying import SourceError
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.run.current import WorkerDismissed
from elastic_ray.state.resume_point import ResumePoint
from placement.storage.storage_calls import Call, StorageCalls, StorageTimeoutError

logger = logging.getLogger(__name__)

_AGAIN_S = 1.0
_LOOK_S = 0.1
_WITHOUT_S = 10.0  # as long as a rank waits for a checkpoint that rank 0 may not have reported


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointNote:
    """Record stored with a checkpoint: its resume point and the metrics reported with it."""

    resume_point: ResumePoint
    metrics: Mapping[str, Any]


class ReportedCheckpoints:
    """Storage, in the background, of the checkpoints that ranks pass to ``report``.

    Args:
        timeout_s: a checkpoint is abandoned once storage has not answered, or only failed, for this long [s].
    """

    def __init__(self, storage: RunStorage, calls: StorageCalls, *, timeout_s: float) -> None:
        self._storage, self._calls, self._timeout_s = storage, calls, timeout_s
        self._given_up: Call | None = None
        self._fails = self._alone = False

    def add(self, checkpoint: Any, index: int, is_stopping: Callable[[], bool]) -> str:
        """Add another rank's files to rank 0's checkpoint of report ``index``; return why they are not kept, or ""."""
        begun_s = time.monotonic()
        while True:
            call = self._calls.start_long(
                f"adding to the checkpoint of report {index}",
                lambda go_on: self._storage.add_to_checkpoint(checkpoint, index, go_on=go_on),
            )
            try:
                if not self._calls.wait(call, timeout_s=self._timeout_s, until=is_stopping):
                    raise WorkerDismissed(stopped=True)
                if call.answer.result() is not None:
                    self._alone = False
                    return ""
                look = self._calls.start("looking for a checkpoint", lambda: self._storage.is_storing(index))
                if not self._calls.wait(look, timeout_s=self._timeout_s, until=is_stopping):
                    raise WorkerDismissed(stopped=True)
                storing = look.answer.result()
            except SourceError:
                raise
            except OSError as error:
                return f"files of another rank than 0 for the checkpoint of report {index} were given up: {error}"
            without_s = 0.0 if self._alone else min(self._timeout_s, _WITHOUT_S)
            if time.monotonic() - begun_s >= (self._timeout_s if storing else without_s):
                self._alone = True
                return (
                    f"another rank than 0 has reported a checkpoint with report {index}, and rank 0 has not: it is not "
                    "kept. Report checkpoints from rank 0, or from all ranks in the same places: their files are put "
                    "into one directory"
                )
            time.sleep(_LOOK_S)

    def store(
        self, checkpoint: Any, index: int, note: CheckpointNote, is_stopping: Callable[[], bool]
    ) -> tuple[str | None, str]:
        """Store the checkpoint and ``note`` of report ``index``, and wait until both are stored or abandoned.

        Returns the path of the stored checkpoint and an empty text; or None and the reason why it was abandoned.

        Raises WorkerDismissed if ``is_stopping()`` returned True, and SourceError if the checkpoint does not exist or
        is not readable. If the run's storage is missing or denies access, this method waits instead, because an
        unavailable mount looks the same.
        """
        if self._given_up is not None and not self._given_up.answer.done():  # this one would wait for as long
            return None, f"the checkpoint of report {index} was given up: {self._calls.silent_for(self._given_up)}"
        until_s = time.monotonic() + (0.0 if self._fails else self._timeout_s)
        while True:
            call = self._start(checkpoint, index, note)
            try:
                if not self._calls.wait(call, timeout_s=self._timeout_s, until=is_stopping):
                    raise WorkerDismissed(stopped=True)
                path = str(call.answer.result().path)
                self._fails = False
                return path, ""
            except SourceError:
                raise
            except OSError as error:
                if isinstance(error, StorageTimeoutError):
                    self._given_up = call
                elif time.monotonic() < until_s:
                    time.sleep(_AGAIN_S)
                    continue
                self._fails = True
                problem = f"the checkpoint of report {index} was given up: {error}"
                logger.warning("%s", problem)
                return None, problem

    def _start(self, checkpoint: Any, index: int, note: CheckpointNote) -> Call:
        def store(go_on: Callable[[], bool]) -> Any:
            return self._storage.persist_checkpoint(
                checkpoint, index, resume_point=note.resume_point, metrics=note.metrics, go_on=go_on
            )

        return self._calls.start_long(f"storing the checkpoint of report {index}", store)
