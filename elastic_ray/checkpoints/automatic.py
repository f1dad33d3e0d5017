"""SHELL: automatic checkpoints of a run's elastic state on any file system that pyarrow knows.

Each is a directory ``automatic/step_<n>_<token>`` with a part of each rank that has written, one where rank 0 has
written all, and a manifest (see ``checkpoints/sharded``); and the note ``step_<n>_<token>.json`` beside it, written
last, which says where the run stands and what the manifest's checksum is. A checkpoint without its note is incomplete,
one of another checksum is corrupt. The token differs each time, so that writing never touches a checkpoint that is
there, even of as many steps.

Of a job that has finished the last one stays, and ``automatic/finished`` has its name: a job of the same name begins
anew, and does not continue from there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import posixpath
from collections.abc import Callable, Sequence

import pyarrow.fs

from elastic_ray.checkpoints.checked_files import write_checked
from elastic_ray.checkpoints.run_directory import RunStorage, read_json
from elastic_ray.state.resume_point import ResumePoint, UnreadableStateError
from placement.storage.private_files import make_directory, open_whole, replace_file
from placement.versions import check_format

DIRECTORY = "automatic"
_FORMAT = 1  # of notes
_FINISHED = "finished"
_MOST_PARTS = 1_000_000
_LONGEST_NAME = 1024


class CorruptStateError(UnreadableStateError):
    """Error raised if an automatic checkpoint cannot be used: torn, changed since, or not what it says."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateFile:
    """A complete automatic checkpoint."""

    path: str  # of its directory, on the run's file system
    resume_point: ResumePoint  # where it stands, as beside reported checkpoints
    sha256: str  # of its manifest, in hexadecimal
    size: int  # of all parts [bytes]
    parts: int = 1  # ranks that have written it

    @property
    def steps(self) -> int:
        """Optimizer steps that it holds."""
        return self.resume_point.steps


def write_note(storage: RunStorage, state: StateFile) -> None:
    """Write the note that completes an automatic checkpoint, which counts from then on."""
    told = {"resume_point": state.resume_point.to_json(), "sha256": state.sha256, "size": state.size}
    content = json.dumps({"format": _FORMAT, **told, "parts": state.parts}).encode()
    write_checked(storage, _note_of(state.path), lambda stream: stream.write(content))


def new_path(storage: RunStorage, steps: int, token: str) -> str:
    """Return the path of an automatic checkpoint after ``steps`` steps."""
    return posixpath.join(storage.path, DIRECTORY, f"step_{steps:012d}_{token}")


def state_files(
    storage: RunStorage,
    pass_over: Callable[[str], None] = lambda problem: None,
    heard: Callable[[], bool] = lambda: True,
    *,
    directory: str = "",
) -> tuple[StateFile, ...]:
    """Complete automatic checkpoints of a run, newest first; their files have not been looked into.

    Args:
        directory: where they lie; empty for the run's own place.
        pass_over: takes why something that looks like one is not used, a sentence.
        heard: called with every one, so that who waits sees that it continues.

    Raises OSError: storage cannot be read, which says nothing about what is there.
    """
    directory = directory or posixpath.join(storage.path, DIRECTORY)
    if storage.filesystem.get_file_info(directory).is_file:
        pass_over(f"{directory} is not used: it is a file, where a directory of automatic checkpoints should be")
        return ()
    selector = pyarrow.fs.FileSelector(directory, allow_not_found=True)
    found = []
    for entry in storage.filesystem.get_file_info(selector):
        if not entry.path.endswith(".json"):
            continue
        heard()
        path = posixpath.join(directory, posixpath.basename(entry.path).removesuffix(".json"))
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
    """Return the checkpoint whose note is beside ``path``."""
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
    """Copy an automatic checkpoint into another run of the same file system, its note last."""
    path = posixpath.join(target.path, DIRECTORY, posixpath.basename(state.path))
    make_directory(target.filesystem, path, private=target.private)
    for source, place in ((state.path, path), (_note_of(state.path), _note_of(path))):
        pyarrow.fs.copy_files(
            source, place, source_filesystem=storage.filesystem, destination_filesystem=target.filesystem
        )


def delete_others(storage: RunStorage, state: StateFile, *, keep: int) -> None:
    """Delete all automatic checkpoints but the one just written and the newest of fewer steps, ``keep`` in all.

    Those of more steps are of a course that was left: the job continued from an earlier one because they were corrupt.
    """
    others = [each for each in state_files(storage) if each.path != state.path]
    fewer = [each for each in others if each.steps < state.steps]
    for each in others:
        if each not in fewer[: keep - 1]:
            delete_state(storage, each.path)


def keep_last(storage: RunStorage, state: StateFile) -> None:
    """Keep this automatic checkpoint alone: the job has finished with it."""
    path = posixpath.join(storage.path, DIRECTORY, _FINISHED)
    replace_file(storage.filesystem, path, posixpath.basename(state.path).encode(), private=storage.private)
    for each in state_files(storage):
        if each.path != state.path:
            delete_state(storage, each.path)
    delete_unfinished(storage)


def of_unfinished(storage: RunStorage, states: Sequence[StateFile]) -> tuple[StateFile, ...]:
    """Return those of ``states`` that are of unfinished jobs, in order. Raises OSError: storage cannot be read."""
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
    """Delete an automatic checkpoint, its note first: what is left must not look complete."""
    for delete, each in ((storage.filesystem.delete_file, _note_of(path)), (storage.filesystem.delete_dir, path)):
        with contextlib.suppress(FileNotFoundError):
            delete(each)


def delete_states(storage: RunStorage) -> None:
    """Delete all automatic checkpoints, and their directory."""
    with contextlib.suppress(FileNotFoundError):
        storage.filesystem.delete_dir(posixpath.join(storage.path, DIRECTORY))


def delete_unfinished(storage: RunStorage) -> None:
    """Delete directories of checkpoints that have no note: some rank's part was never written.

    The caller knows that none is being written.
    """
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
