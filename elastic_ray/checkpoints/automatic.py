"""SHELL: automatic checkpoints of a run's elastic state on any file system that pyarrow supports.

Each checkpoint is a directory ``automatic/step_<n>_<token>`` that holds one part per rank (a single part if rank 0
wrote everything) and a manifest (see ``checkpoints/sharded``). The note ``step_<n>_<token>.json`` is next to the
directory. It is written last and holds the resume point and the manifest's checksum. A checkpoint without a note is
incomplete; a checkpoint with a different checksum is corrupt. The token is unique, so that writing never touches an
existing checkpoint, even for the same step.

When a job finishes, its last checkpoint is kept, and ``automatic/finished`` names it. A new job with the same name
starts from scratch instead of continuing from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import posixpath
from collections.abc import Callable, Sequence

import pyarrow.fs

from elastic_ray.checkpoints.checked_files import write_checked
from elastic_ray.checkpoints.run_directory import RunStorage, StoredCheckpoint, read_json
from elastic_ray.state.resume_point import ResumePoint, UnreadableStateError
from placement.storage.private_files import make_directory, open_whole, replace_file
from placement.versions import check_format

DIRECTORY = "automatic"
_FORMAT = 1  # of notes
_FINISHED = "finished"
_MOST_PARTS = 1_000_000
_LONGEST_NAME = 1024


class CorruptStateError(UnreadableStateError):
    """Error raised if an automatic checkpoint cannot be used because it is incomplete, changed, or invalid."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateFile:
    """Complete automatic checkpoint in storage."""

    path: str  # of its directory, on the run's file system
    resume_point: ResumePoint  # where it stands, as beside reported checkpoints
    sha256: str  # of its manifest, in hexadecimal
    size: int  # of all parts [bytes]
    parts: int = 1  # ranks that have written it

    @property
    def steps(self) -> int:
        """Number of optimizer steps that the checkpoint includes."""
        return self.resume_point.steps


def write_note(storage: RunStorage, state: StateFile) -> None:
    """Write the note (JSON file) of an automatic checkpoint; the checkpoint is complete once its note exists."""
    told = {"resume_point": state.resume_point.to_json(), "sha256": state.sha256, "size": state.size}
    content = json.dumps({"format": _FORMAT, **told, "parts": state.parts}).encode()
    write_checked(storage, _note_of(state.path), lambda stream: stream.write(content))


def new_path(storage: RunStorage, steps: int, token: str) -> str:
    """Return the path for a new automatic checkpoint after ``steps`` steps; ``token`` makes the path unique."""
    return posixpath.join(storage.path, DIRECTORY, f"step_{steps:012d}_{token}")


def state_files(
    storage: RunStorage,
    pass_over: Callable[[str], None] = lambda problem: None,
    heard: Callable[[], bool] = lambda: True,
    *,
    directory: str = "",
) -> tuple[StateFile, ...]:
    """Return a run's complete automatic checkpoints, newest first, without checking the contents of their files.

    Raises OSError: storage cannot be read; checkpoints may exist all the same.
    """
    directory = directory or posixpath.join(storage.path, DIRECTORY)
    if storage.filesystem.get_file_info(directory).is_file:
        pass_over(f"{directory} is not used: it is a file, where a directory of automatic checkpoints should be")
        return ()
    selector = pyarrow.fs.FileSelector(directory, allow_not_found=True)
    found = []
    for entry in storage.filesystem.get_file_info(selector):
        name = posixpath.basename(entry.path)
        if not (name.startswith("step_") and name.endswith(".json")):
            continue
        heard()
        path = posixpath.join(directory, name.removesuffix(".json"))
        try:
            if not entry.is_file:
                raise ValueError("its note is no file")
            found.append(_read_note(storage, path))
        except FileNotFoundError:
            continue  # it is being deleted
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            pass_over(f"automatic checkpoint {path} is not used: {type(error).__name__}: {error}")
    return tuple(sorted(found, key=lambda state: -state.steps))


def _read_note(storage: RunStorage, path: str) -> StateFile:
    """Return the checkpoint described by the note beside ``path``."""
    note = read_json(storage.filesystem, _note_of(path))
    check_format(note, _FORMAT)
    told = note["resume_point"]
    point = ResumePoint.from_json(told)
    if point is None or "steps" not in told:
        raise ValueError("it does not say how many steps it holds")
    parts = int(note.get("parts", 0))
    if not 1 <= parts <= _MOST_PARTS:
        raise ValueError(f"parts must be from 1 to {_MOST_PARTS}, but is {parts}")
    return StateFile(path=path, resume_point=point, sha256=str(note["sha256"]), size=int(note["size"]), parts=parts)


def copy_state(storage: RunStorage, state: StateFile, target: RunStorage) -> None:
    """Copy an automatic checkpoint into the run ``target``; its note is copied last, which makes the copy complete."""
    path = posixpath.join(target.path, DIRECTORY, posixpath.basename(state.path))
    make_directory(target.filesystem, path, private=target.private)
    for source, place in ((state.path, path), (_note_of(state.path), _note_of(path))):
        pyarrow.fs.copy_files(
            source, place, source_filesystem=storage.filesystem, destination_filesystem=target.filesystem
        )


def delete_others(storage: RunStorage, state: StateFile, *, keep: int) -> None:
    """Delete all automatic checkpoints except ``state`` and the newest ``keep - 1`` with fewer steps than ``state``.

    Checkpoints with more steps are always deleted: they were corrupt, and the job continued from an earlier one.
    """
    others = [each for each in state_files(storage) if each.path != state.path]
    fewer = [each for each in others if each.steps < state.steps]
    for each in others:
        if each not in fewer[: keep - 1]:
            delete_state(storage, each.path)


def keep_last(storage: RunStorage, state: StateFile) -> None:
    """Delete all automatic checkpoints except ``state``, and mark ``state`` as the result of a finished job."""
    path = posixpath.join(storage.path, DIRECTORY, _FINISHED)
    replace_file(storage.filesystem, path, posixpath.basename(state.path).encode(), private=storage.private)
    for each in state_files(storage):
        if each.path != state.path:
            delete_state(storage, each.path)
    delete_unfinished(storage)


def of_unfinished(storage: RunStorage, states: Sequence[StateFile]) -> tuple[StateFile, ...]:
    """Return the ``states`` that do not belong to a finished job, in order; raises OSError if storage fails."""
    path = posixpath.join(storage.path, DIRECTORY, _FINISHED)
    if not states:
        return ()
    try:
        with open_whole(storage.filesystem, path) as raw:
            finished = bytes(raw.read(_LONGEST_NAME)).decode(errors="replace")
    except FileNotFoundError:
        return tuple(states)
    return tuple(each for each in states if posixpath.basename(each.path) != finished)


def delete_state(storage: RunStorage, path: str) -> None:
    """Delete an automatic checkpoint, its note first, so that an interrupted deletion leaves no complete checkpoint."""
    for delete, each in ((storage.filesystem.delete_file, _note_of(path)), (storage.filesystem.delete_dir, path)):
        with contextlib.suppress(FileNotFoundError):
            delete(each)


def delete_states(storage: RunStorage) -> None:
    """Delete all automatic checkpoints and their directory."""
    with contextlib.suppress(FileNotFoundError):
        storage.filesystem.delete_dir(posixpath.join(storage.path, DIRECTORY))


def delete_unfinished(storage: RunStorage) -> None:
    """Delete directories of automatic checkpoints without a note; the caller ensures that none is being written."""
    directory = posixpath.join(storage.path, DIRECTORY)
    entries = storage.filesystem.get_file_info(pyarrow.fs.FileSelector(directory, allow_not_found=True))
    names = {posixpath.basename(entry.path) for entry in entries}
    for entry in entries:
        name = posixpath.basename(entry.path)
        if entry.type == pyarrow.fs.FileType.Directory and name.startswith("step_") and f"{name}.json" not in names:
            with contextlib.suppress(FileNotFoundError):
                storage.filesystem.delete_dir(posixpath.join(directory, name))


def _note_of(path: str) -> str:
    return path + ".json"


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

    Raises OSError: storage cannot be read; checkpoints may exist all the same.
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
