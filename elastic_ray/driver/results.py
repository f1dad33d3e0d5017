"""SHELL: Ray Train's ``Result`` of a job, and all of its reports."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.events import JobOutcome, Report
from elastic_ray.sealed import Raised, Sealed
from placement.storage.storage_calls import call_storage

if TYPE_CHECKING:
    from ray.train.v2.api.result import Result

logger = logging.getLogger(__name__)


def make_result(outcome: JobOutcome, storage: RunStorage, *, timeout_s: float = 60.0) -> Result:
    """Ray Train's ``Result`` of a job that has ended.

    ``metrics`` are the last ones reported (with or without a checkpoint). ``checkpoint`` is the newest reported
    checkpoint; of a job that reports none, the directory of its automatic ones, for ``load_model_state``.
    ``best_checkpoints`` are all reported ones that were kept, oldest first. ``metrics_dataframe`` has a row for
    every report; those that the outcome has not kept are read from storage, for at most ``timeout_s``.
    """
    import pandas as pd
    from ray.train import Checkpoint
    from ray.train.v2.api.exceptions import TrainingFailedError
    from ray.train.v2.api.result import Result

    from elastic_ray.errors import TrainFunctionError

    kept: list[tuple[Checkpoint, dict[str, Any]]] = [
        (Checkpoint(path, storage.filesystem), dict(metrics)) for path, metrics in outcome.checkpoints
    ]
    automatic = Checkpoint(outcome.states, storage.filesystem) if outcome.states else None
    error = outcome.error
    if isinstance(error, Raised):
        error = TrainFunctionError.of(error)
    elif error is not None and not isinstance(error, TrainingFailedError):
        cause, error = error, TrainingFailedError(f"{type(error).__name__}: {error}")
        error.__cause__ = cause
    rows = [dict(report.metrics) for report in all_reports(outcome, storage, timeout_s=timeout_s)]
    return Result(
        metrics=dict(outcome.metrics),
        checkpoint=kept[-1][0] if kept else automatic,
        error=error,
        path=storage.path,
        metrics_dataframe=pd.DataFrame(rows) if rows else None,
        best_checkpoints=kept,
        return_value=_opened(outcome.return_value),
        _storage_filesystem=storage.filesystem,
    )


def _opened(value: Sealed | None) -> Any:
    try:
        return value.open() if value is not None else None
    except Exception as error:  # the job has its result all the same
        logger.warning("what the train function returned cannot be unpickled in this process: %r", error)
        return None


def all_reports(outcome: JobOutcome, storage: RunStorage, *, timeout_s: float) -> list[Report]:
    """Every report of a job that has ended: its last ones as they were, those before from storage."""
    last = outcome.reports[0].index - 1 if outcome.reports else 0
    if last < outcome.first_report:
        return list(outcome.reports)
    try:
        before = call_storage(
            storage.where,
            "reading reports",
            lambda: storage.read_reports(outcome.first_report, last),
            timeout_s=timeout_s,
        )
    except Exception as error:  # the job has its result all the same
        before = {}
        why = str(error)
    else:
        why = "they are not in the file"
    missing = last - outcome.first_report + 1 - len(before)
    if missing:
        logger.warning("%d of %d reports before number %d cannot be had: %s", missing, last, last + 1, why)
    return [*before.values(), *outcome.reports]
