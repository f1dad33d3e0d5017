"""SHELL: a run's directory on any file system that pyarrow supports: events, reports and checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import posixpath
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow.fs

from elastic_ray.checkpoints.checked_files import Checksum, sha256_of, write_checked
from elastic_ray.checkpoints.copying import NOTES, MissingSourceError, add_files, copy_directory, reading_source
from elastic_ray.checkpoints.line_files import LineFile
from elastic_ray.events import EventKind, JobEvent, Report
from elastic_ray.json_numbers import dump, load
from elastic_ray.state.resume_point import ResumePoint
from placement.storage.private_files import (
    ForeignDirectoryError,
    check_own,
    make_directory,
    open_whole,
    replace_file,
    sync_directory,
)
from placement.storage.storage_calls import call_storage
from placement.versions import check_format

if TYPE_CHECKING:
    from ray.train import Checkpoint

# ray.train takes longer to import than a worker takes to start: functions import it when they need it.

logger = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"
REPORTS_FILE = "reports.jsonl"
PROGRESS_FILE, _ADDED = NOTES
"""The first is written last into a checkpoint's directory: a directory without it is not a complete checkpoint."""
MARKER_FILE = ".elastic_ray_run"
SUBMISSION_FILE = "submission.json"
ALIVE_FILE = ".elastic_ray_alive"
_FILES = "files"
_FORMAT = 1  # of notes
_LONGEST_SUBMISSION = 1 << 20
_LONGEST_NOTE = 64 << 20  # bytes: of a checkpoint of some hundred thousand files
_CHECKPOINT = re.compile(r"checkpoint_(\d{6,})")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """A complete checkpoint of a run."""

    index: int  # its number, counted from 0 through the whole run
    path: str  # its directory on the run's file system
    resume_point: ResumePoint | None  # where it stands, None where it does not say
    metrics: Mapping[str, Any]  # the metrics it was reported with


def resolve(storage_path: str, filesystem: pyarrow.fs.FileSystem | None) -> tuple[pyarrow.fs.FileSystem, str]:
    """Return a storage path's file system and the path on it, following Ray Train's rules.

    Args:
        storage_path: a URI (``s3://bucket/dir``) or a local path; ``~`` is expanded and a relative path made absolute.
            With ``filesystem``, a path on that file system, without a scheme.
        filesystem: custom file system; None derives it from ``storage_path``.
    """
    if not storage_path.strip():  # what a shell makes of an unset variable: never the current directory
        raise ValueError(f"storage_path must name a directory or a bucket, but got {storage_path!r}")
    if filesystem is not None:
        return filesystem, storage_path.rstrip("/") or "/"
    if "://" not in storage_path:
        return pyarrow.fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(storage_path))
    try:
        found, path = pyarrow.fs.FileSystem.from_uri(storage_path)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError, ValueError) as error:
        raise ValueError(
            f"storage_path must be a local path or a URI that pyarrow knows (s3://, gs://, abfs://, hdfs://, "
            f"file://), but got {storage_path!r}: {error}. Pass another file system as storage_filesystem."
        ) from error
    except OSError as error:
        needs = " (hdfs:// needs Java and Hadoop on every node)" if storage_path.startswith("hdfs://") else ""
        raise OSError(f"the file system of storage_path={storage_path!r} cannot be opened{needs}: {error}") from error
    return found, path


class RunStorage:
    """Directory of one run, used by its controller and its workers.

    Methods block on the file system, which may never answer: call them through ``placement.storage.storage_calls``.
    """

    def __init__(self, path: str, filesystem: pyarrow.fs.FileSystem | None = None, *, private: bool = True) -> None:
        """Set the directory, without reading or writing anything yet.

        Args:
            path: directory of the run, including the run's name; a URI if ``filesystem`` is None.
            filesystem: file system of ``path``; None derives it from ``path``.
        """
        self.filesystem, self.path = resolve(path, filesystem)
        self.private = private
        self.events = LineFile(self.filesystem, posixpath.join(self.path, EVENTS_FILE), private=private)
        reports = posixpath.join(self.path, REPORTS_FILE)
        self.reports = LineFile(self.filesystem, reports, private=private, in_parts=True)

    @property
    def where(self) -> str:
        """Path or URI of the directory, for messages."""
        return self.path if self.local else f"{self.filesystem.type_name.removeprefix('py::')}://{self.path}"

    @property
    def local(self) -> bool:
        """True if the storage is a local directory."""
        return isinstance(self.filesystem, pyarrow.fs.LocalFileSystem)

    def create(self) -> None:
        """Create the directory and a marker file that lets workers check that they see the same directory."""
        with self._named_if_unwritable():
            make_directory(self.filesystem, self.path, private=self.private)
            if self.private and self.local:
                check_own(self.path)
            write_checked(self, posixpath.join(self.path, MARKER_FILE), lambda stream: None)

    @contextlib.contextmanager
    def _named_if_unwritable(self) -> Iterator[None]:
        """Add the directory and a way out to an OSError, such as that of a full disk."""
        try:
            yield
        except ForeignDirectoryError:
            raise
        except OSError as error:
            raise OSError(
                f"the run's directory {self.path!r} ({self.filesystem.type_name}) cannot be written: "
                f"{error}; set RunConfig(storage_path) to a directory or bucket with room that this user may write"
            ) from error

    def create_within(self, timeout_s: float) -> None:
        """Run :meth:`create` with a timeout."""
        call_storage(self.where, "making the run's directory", self.create, timeout_s=timeout_s)

    def check_reachable(self) -> None:
        """Raise ``FileNotFoundError`` if this node does not see the run's directory that the controller created."""
        if not self._exists(posixpath.join(self.path, MARKER_FILE)):
            raise FileNotFoundError(
                f"this node does not see the run's directory {self.path!r} ({self.filesystem.type_name}) "
                "that the job's controller created on another node: set RunConfig(storage_path) to storage "
                "that all nodes share, such as s3://bucket/dir or an NFS mount"
            )

    def write_submission(self, text: str) -> None:
        """Store the JSON text needed to submit the job again, replacing an earlier run's text."""
        path = posixpath.join(self.path, SUBMISSION_FILE)
        with self._named_if_unwritable():
            replace_file(self.filesystem, path, text.encode(), private=self.private)

    def read_submission(self) -> bytes:
        """Return the text stored by :meth:`write_submission`; raises FileNotFoundError if no text is stored."""
        with self.filesystem.open_input_stream(posixpath.join(self.path, SUBMISSION_FILE)) as stream:
            return bytes(stream.read(_LONGEST_SUBMISSION))

    def write_alive(self) -> None:
        """Store the time, as proof to other clusters that the run's controller lives."""
        path = posixpath.join(self.path, ALIVE_FILE)
        replace_file(self.filesystem, path, str(time.time()).encode(), private=self.private)

    def read_alive(self) -> float:
        """Return the time that the run's controller stored last [s since the epoch, its clock]; 0 if none is stored."""
        try:
            with open_whole(self.filesystem, posixpath.join(self.path, ALIVE_FILE)) as stream:
                stored = float(stream.read(64))
                return stored if math.isfinite(stored) else 0.0
        except (FileNotFoundError, ValueError):
            return 0.0

    def read_events(self, most: int | None = None) -> tuple[JobEvent, ...]:
        """Return the last ``most`` events written so far, or all if ``most`` is None.

        Events of kind ``pass`` (proof of the samples that a pass used) and a line cut short by a crash are left out.
        """
        events: deque[JobEvent] = deque(maxlen=most)
        for line in self.events.read():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                event = JobEvent.from_json(line)
                if event.kind is not EventKind.PASS:
                    events.append(event)
        return tuple(events)

    def last_written_s(self) -> float:
        """Return when an event, report, checkpoint or sign of life was last written [s since the epoch]; 0 if never."""
        names = (EVENTS_FILE, REPORTS_FILE, "reports", "automatic", ALIVE_FILE)
        infos = self.filesystem.get_file_info([posixpath.join(self.path, name) for name in names])
        return max((info.mtime_ns or 0) for info in infos) / 1e9

    def read_reports(self, first: int, last: int) -> dict[int, Report]:
        """Return the reports ``first`` to ``last`` by number, ascending; after a restart the repeated ones count."""
        found = {report.index: report for report in self._each_report(first, last)}
        return dict(sorted(found.items()))

    def last_reports(self, first: int, most: int) -> tuple[Report, ...]:
        """Return the last ``most`` reports, in ascending order, leaving out those numbered below ``first``."""
        found: dict[int, Report] = {}
        for report in self._each_report(first, None):
            found.pop(report.index, None)
            found[report.index] = report
            if len(found) > 2 * most:
                found = {each.index: each for each in sorted(found.values(), key=_index)[-most:]}
        return tuple(sorted(found.values(), key=_index)[-most:])

    def _each_report(self, first: int, last: int | None) -> Iterator[Report]:
        for line in self.reports.read():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                report = Report.from_json(line)
                if first <= report.index and (last is None or report.index <= last):
                    yield report

    def persist_checkpoint(
        self,
        source: str | os.PathLike[str] | Checkpoint,
        index: int,
        *,
        resume_point: ResumePoint | None = None,
        metrics: Mapping[str, Any] | None = None,
        go_on: Callable[[], bool] = lambda: True,
    ) -> Checkpoint:
        """Copy a checkpoint into the run, completely or not at all, even if the process dies during the copy.

        On a local file system the finished copy is renamed to its final name. Other file systems cannot rename
        directories, so ``.elastic_ray.json`` marks a complete copy: it is written last, and :meth:`stored_checkpoints`
        requires it. The file holds the size and checksum of each copied file. The entire copy has been flushed to disk
        when this method returns.

        Args:
            metrics: metrics reported with the checkpoint; values that JSON cannot hold are stored as their ``repr``.

        Returns the checkpoint in the run's directory.
        """
        from ray.train import Checkpoint

        origin, origin_path = _source_directory(source)
        self.check_reachable()
        target = posixpath.join(self.path, f"checkpoint_{index:06d}")
        work = posixpath.join(self.path, f".part_{index:06d}_{uuid.uuid4().hex[:8]}") if self.local else target
        note = {
            "format": _FORMAT,
            "index": index,
            "progress": resume_point.to_json() if resume_point is not None else {},
            "metrics": dict(metrics or {}),
        }
        dump(note)  # what cannot be written is found before anything is
        self.delete_checkpoint(work)
        try:
            files = copy_directory(origin, origin_path, self, work, go_on=go_on)
            if not go_on():  # what is complete is found by a restart: not behind the back of who gave it up
                raise InterruptedError("the checkpoint was abandoned")
            self._write_note(posixpath.join(work, PROGRESS_FILE), {**note, _FILES: _told(files)})
            if work != target:
                self.delete_checkpoint(target)
                self.filesystem.move(work, target)
                sync_directory(self.filesystem, self.path)
        except BaseException:
            with contextlib.suppress(Exception):
                self.delete_checkpoint(work)
            raise
        return Checkpoint(target, self.filesystem)

    def add_to_checkpoint(
        self, source: str | os.PathLike[str] | Checkpoint, index: int, *, go_on: Callable[[], bool] = lambda: True
    ) -> list[str] | None:
        """Add this rank's files to checkpoint number ``index``, which rank 0 reported, without changing rank 0's files.

        Returns the names of the added files; None if rank 0 has not stored the checkpoint yet.
        """
        origin, origin_path = _source_directory(source)
        self.check_reachable()
        target = posixpath.join(self.path, f"checkpoint_{index:06d}")
        try:
            note = _read_note(self.filesystem, target)
        except BadNoteError:  # is being written
            note = None
        if note is None:
            return None
        there = self.filesystem.get_file_info(pyarrow.fs.FileSelector(target))
        noted = self._noted(target, note, [posixpath.basename(entry.path) for entry in there])
        if files := add_files(origin, origin_path, self, target, noted, go_on=go_on):
            added = posixpath.join(target, f"{_ADDED}{uuid.uuid4().hex[:8]}.json")
            replace_file(self.filesystem, added, dump({_FILES: _told(files)}).encode(), private=self.private)
        return sorted(files)

    def is_storing(self, index: int) -> bool:
        """True if rank 0 has started to store checkpoint `index`, based on the directories in storage."""
        target = f"checkpoint_{index:06d}"
        if not self.local:
            return self._exists(posixpath.join(self.path, target))
        infos = self.filesystem.get_file_info(pyarrow.fs.FileSelector(self.path))
        return any(info.base_name.startswith((target, f".part_{index:06d}")) for info in infos)

    def load_resume_point(self, checkpoint: str | Checkpoint) -> ResumePoint | None:
        """Return a checkpoint's resume point (position in training); None if it was stored without one."""
        filesystem, path = self.filesystem, checkpoint
        if not isinstance(path, str):
            filesystem, path = path.filesystem, path.path
        try:
            note = _read_note(filesystem, path)
            return None if note is None else ResumePoint.from_json(note["progress"])
        except ValueError as error:
            logger.warning("checkpoint %s does not say where it stands: %s", path, error)
            return None

    def stored_checkpoints(
        self,
        pass_over: Callable[[str], None] = lambda problem: None,
        heard: Callable[[], bool] = lambda: True,
        *,
        verify: bool = False,
    ) -> tuple[StoredCheckpoint, ...]:
        """Return the run's complete checkpoints, oldest first, including any from an earlier run of the same name.

        Args:
            verify: compare checksums in addition to sizes, which reads all files.

        Raises OSError if storage cannot be read, in which case checkpoints may still exist.
        """
        selector = pyarrow.fs.FileSelector(self.path, allow_not_found=True)
        found = []
        for entry in self.filesystem.get_file_info(selector):
            matched = _CHECKPOINT.fullmatch(posixpath.basename(entry.path))
            if not matched:
                continue
            heard()
            path = posixpath.join(self.path, posixpath.basename(entry.path))
            try:
                if entry.is_file:
                    raise BadNoteError("it is a file")
                note = _read_note(self.filesystem, path)
                if note is None:
                    continue  # incomplete
                point = ResumePoint.from_json(note["progress"])
                self._check_files(path, note, heard if verify else None)
                if verify and note.get("index", int(matched[1])) != int(matched[1]):
                    raise BadNoteError(f"its note says that it is number {note['index']!r:.20}")
            except ValueError as error:
                pass_over(f"{path} is not used as a checkpoint: {error}")
                continue
            checkpoint = StoredCheckpoint(index=int(matched[1]), path=path, resume_point=point, metrics=note["metrics"])
            found.append(checkpoint)
        return tuple(sorted(found, key=lambda stored: stored.index))

    def _check_files(self, path: str, note: Mapping[str, Any], heard: Callable[[], bool] | None) -> None:
        """Raise BadNoteError unless the files match the note's sizes and, if ``heard`` is given, its checksums."""
        selector = pyarrow.fs.FileSelector(path, recursive=True)
        found, top = self.filesystem.get_file_info(selector), path.strip("/")  # some give paths with a "/" in front
        entries = {posixpath.relpath(entry.path.strip("/"), top): entry for entry in found}
        for name, written in self._noted(path, note, entries).items():
            entry, sizes = entries.get(name), [size for size, _ in written]
            if entry is None or entry.size not in (None, *sizes):
                there = "is not there" if entry is None else f"has {entry.size} bytes"
                raise BadNoteError(f"its {name} {there}, but {sizes[0]} bytes were written")
            if heard is not None:
                sha256 = sha256_of(self.filesystem, posixpath.join(path, name), heard)
                if sha256 not in [each for _, each in written]:
                    raise BadNoteError(f"its {name} does not have the checksum of what was written")

    def _noted(self, path: str, note: Mapping[str, Any], names: Iterable[str]) -> dict[str, list[tuple[int, str]]]:
        """Return each file's sizes and checksums from all notes of a checkpoint; two ranks may have added one file."""
        noted = {name: [each] for name, each in _files(note).items()}
        for name in names:
            if name.startswith(_ADDED) and name.endswith(".json"):
                with contextlib.suppress(BadNoteError):
                    for added, each in _files(read_json(self.filesystem, posixpath.join(path, name))).items():
                        noted.setdefault(added, []).append(each)
        return noted

    def delete_checkpoint(self, path: str) -> None:
        """Delete a checkpoint's directory; no error if it does not exist."""
        if posixpath.dirname(path) != self.path:
            raise ValueError(f"only directories in the run's own, {self.path!r}, are deleted, but got {path!r}")
        if self.filesystem.get_file_info(path).is_file:
            self.filesystem.delete_file(path)
            return
        # The note first: a deletion that is cut short must not leave something that looks complete.
        note = posixpath.join(path, PROGRESS_FILE)
        with contextlib.suppress(FileNotFoundError):
            if self.filesystem.get_file_info(note).is_file:
                self.filesystem.delete_file(note)
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.delete_dir(path)

    def _exists(self, path: str) -> bool:
        return bool(self.filesystem.get_file_info(path).type != pyarrow.fs.FileType.NotFound)

    def _write_note(self, path: str, note: Mapping[str, Any]) -> None:
        write_checked(self, path, lambda stream: stream.write(dump(note).encode()))


def _source_directory(source: str | os.PathLike[str] | Checkpoint) -> tuple[pyarrow.fs.FileSystem, str]:
    """Return the file system and path of the checkpoint to copy."""
    from ray.train import Checkpoint

    if isinstance(source, Checkpoint):
        origin, path = resolve(source.path, source.filesystem)
    else:
        origin, path = pyarrow.fs.LocalFileSystem(), os.path.abspath(source)
    with reading_source():
        found = origin.get_file_info(path)
    if found.type != pyarrow.fs.FileType.Directory:
        raise MissingSourceError(
            f"a checkpoint must be a directory, but there is none at {path!r} "
            f"({origin.type_name}); keep the directory until report() has returned"
        )
    return origin, path


def _index(report: Report) -> int:
    return report.index


class BadNoteError(ValueError):
    """Error raised if a checkpoint's note is invalid, or contradicts the checkpoint's files."""


def read_json(filesystem: pyarrow.fs.FileSystem, path: str) -> Any:
    """Return the parsed content of a JSON file; raises BadNoteError if it is not JSON, OSError if it is unreadable."""
    with filesystem.open_input_stream(path) as stream:
        text = stream.read(_LONGEST_NOTE + 1)
    if len(text) > _LONGEST_NOTE:
        raise BadNoteError(f"its {posixpath.basename(path)} has more than {_LONGEST_NOTE} bytes")
    try:
        return load(text)
    except ValueError as error:
        raise BadNoteError(f"its {posixpath.basename(path)} is not JSON: {error}") from None


def _told(files: Mapping[str, Checksum]) -> dict[str, dict[str, Any]]:
    return {name: dataclasses.asdict(each) for name, each in files.items()}


def _files(note: Any) -> dict[str, tuple[int, str]]:
    """Return the size and checksum of each file listed in a note; raises BadNoteError if the list is invalid."""
    try:
        return {name: (int(each["size"]), str(each["sha256"])) for name, each in note[_FILES].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadNoteError(f"its note does not list its files: {type(error).__name__}: {error}") from None


def _read_note(filesystem: pyarrow.fs.FileSystem, path: str) -> dict[str, Any] | None:
    """Return the content of a checkpoint's note; None if the note does not exist."""
    name = posixpath.join(path, PROGRESS_FILE)
    try:
        note = read_json(filesystem, name)
    except FileNotFoundError:
        return None
    except OSError:
        if filesystem.get_file_info(name).type == pyarrow.fs.FileType.Directory:
            raise BadNoteError(f"its {PROGRESS_FILE} is a directory") from None
        raise
    if not isinstance(note, dict) or not {"progress", "metrics"} <= note.keys():
        raise BadNoteError(f"its {PROGRESS_FILE} lacks 'progress' or 'metrics'")
    try:
        check_format(note, _FORMAT)
    except ValueError as error:
        raise BadNoteError(f"its {PROGRESS_FILE}: {error}") from None
    for key in ("progress", "metrics"):
        if not isinstance(note[key], dict):
            raise BadNoteError(f"its {PROGRESS_FILE} has {key}={note[key]!r}, which is no object")
    return note
