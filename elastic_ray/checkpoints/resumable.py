"""SHELL: stored state of a run, which lets a job of the same name continue."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from elastic_ray.checkpoints.automatic import StateFile, of_unfinished, state_files
from elastic_ray.checkpoints.run_directory import RunStorage, StoredCheckpoint
from elastic_ray.state.resume_point import ResumePoint


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredProgress:
    """Checkpoints of a run that were found in storage."""

    checkpoints: tuple[StoredCheckpoint, ...] = ()  # reported ones, oldest first
    # automatic ones, newest first, but for what an earlier job of the name has finished with
    states: tuple[StateFile, ...] = ()
    result: tuple[StateFile, ...] = ()  # that, newest first; empty where none has finished
    # where the checkpoint stands that a trial starts from; None if it does not say, or starts from none
    start: ResumePoint | None = None
    passed_over: tuple[str, ...] = ()  # why what looks like a checkpoint is not used, a sentence each


def find_stored(
    storage: RunStorage,
    *,
    start_from: str | None,
    is_trial: bool,
    with_states: bool,
    verify: bool = False,
    heard: Callable[[], bool] = lambda: True,
) -> StoredProgress:
    """Find a run's checkpoints in storage and return them.

    Args:
        is_trial: True for a trial, whose own directory is ignored: it starts at ``start_from`` (None: from scratch).
        with_states: also search for automatic checkpoints.
        verify: read reported checkpoints completely and compare their checksums.
        heard: called for every checkpoint, so that a waiting caller sees progress.

    Raises OSError if storage cannot be read, in which case checkpoints may still exist.
    """
    if is_trial:
        return StoredProgress(start=storage.load_resume_point(start_from) if start_from is not None else None)
    problems: list[str] = []
    checkpoints = storage.stored_checkpoints(problems.append, heard, verify=verify)
    found = state_files(storage, problems.append, heard) if with_states else ()
    states = of_unfinished(storage, found)
    return StoredProgress(
        checkpoints=checkpoints,
        states=states,
        result=tuple(each for each in found if each not in states),
        passed_over=tuple(problems),
    )
