"""SHELL: a run's directory on any file system pyarrow knows: events, checkpoints and the ``Result``."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import posixpath
import re
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow.fs

from elastic_ray.events import JobEvent, JobOutcome

if TYPE_CHECKING:
    from ray.train import Checkpoint
    from ray.train.v2.api.result import Result

# ray.train takes longer to import than a worker takes to start: functions import it when they need it.

EVENTS_FILE = "events.jsonl"
PROGRESS_FILE = ".elastic_ray.json"
"""Written last into a checkpoint's directory: a directory without it is not a complete checkpoint."""
MARKER_FILE = ".elastic_ray_run"
_CHUNK_BYTES = 64 << 20
_CHECKPOINT = re.compile(r"checkpoint_(\d{6,})")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """A complete checkpoint of a run.

    Attributes:
        index: its number, counted from 0 through the whole run.
        path: its directory on the run's file system.
        progress: what the caller stored beside it: epoch, loader positions...
        metrics: the metrics it was reported with.
    """

    index: int
    path: str
    progress: Mapping[str, Any]
    metrics: Mapping[str, Any]


def resolve(storage_path: str, filesystem: pyarrow.fs.FileSystem | None) -> tuple[pyarrow.fs.FileSystem, str]:
    """File system and path on it, by Ray Train's rules.

    Args:
        storage_path: a URI (``s3://bucket/dir``) or a local path, of which ``~`` and relative ones are made
            absolute; with a ``filesystem`` a path on that, without a scheme.
        filesystem: a file system of the user's own.

    Raises:
        ValueError: if pyarrow knows no file system for the URI. OSError: if it cannot be opened: hdfs:// without Java.
    """
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
    """The directory of one run, used by its controller and by its workers.

    Calls block on the file system: an event loop runs them in a thread. Instances are pickled to workers.
    """

    def __init__(self, path: str, filesystem: pyarrow.fs.FileSystem | None = None) -> None:
        """Name the directory; nothing is read or written yet.

        Args:
            path: directory of the run, the run's own name included; a URI if there is no ``filesystem``.
            filesystem: file system that ``path`` lies on.
        """
        self.filesystem, self.path = resolve(path, filesystem)
        self._lines: list[str] | None = None  # events of a file system that cannot append
        self._unwritten = False

    @property
    def local(self) -> bool:
        """Whether it is a plain directory."""
        return isinstance(self.filesystem, pyarrow.fs.LocalFileSystem)

    def create(self) -> None:
        """Create the directory and the marker by which a worker sees that it reaches the same one.

        Raises:
            OSError: if the directory cannot be written; the message names it.
        """
        try:
            self.filesystem.create_dir(self.path, recursive=True)
            self._write(posixpath.join(self.path, MARKER_FILE), "")
        except OSError as error:
            raise OSError(
                f"the run's directory {self.path!r} ({self.filesystem.type_name}) cannot be written: "
                f"{error}; set RunConfig(storage_path) to a directory or bucket this user may write"
            ) from error

    def check_reachable(self) -> None:
        """Raise ``FileNotFoundError`` where this node does not see the controller's directory."""
        if not self._exists(posixpath.join(self.path, MARKER_FILE)):
            raise FileNotFoundError(
                f"this node does not see the run's directory {self.path!r} ({self.filesystem.type_name}) "
                "that the job's controller created on another node: set RunConfig(storage_path) to storage "
                "that all nodes share, such as s3://bucket/dir or an NFS mount"
            )

    # --- events ---------------------------------------------------------------------------------------------

    def append_event(self, line: str) -> None:
        """Add a line to ``events.jsonl``: at once on a local file system, with :meth:`flush` elsewhere."""
        path = posixpath.join(self.path, EVENTS_FILE)
        if self.local:
            with open(path, "a", encoding="utf-8") as file:
                file.write(line.rstrip("\n") + "\n")
            return
        if self._lines is None:  # an earlier controller of the same run may have written some
            self._lines = list(self._event_lines())
        self._lines.append(line.rstrip("\n"))
        self._unwritten = True

    def flush(self) -> None:
        """Write what :meth:`append_event` had to keep back, by writing the whole file anew."""
        if self._unwritten and self._lines is not None:
            self._write(posixpath.join(self.path, EVENTS_FILE), "\n".join(self._lines) + "\n")
            self._unwritten = False

    def read_events(self) -> tuple[JobEvent, ...]:
        """The events written so far; a last line cut short by a crash is left out."""
        events = []
        for line in self._event_lines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                events.append(JobEvent.from_json(line))
        return tuple(events)

    def _event_lines(self) -> Iterator[str]:
        with contextlib.suppress(FileNotFoundError):
            yield from self._read(posixpath.join(self.path, EVENTS_FILE)).splitlines()

    # --- checkpoints ----------------------------------------------------------------------------------------

    def persist_checkpoint(
        self,
        source: str | os.PathLike[str] | Checkpoint,
        index: int,
        *,
        progress: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Copy a checkpoint into the run, so that it is there wholly or not at all.

        On a local file system the copy gets its name by a rename; elsewhere (where directories cannot be
        renamed) by ``.elastic_ray.json``, which is written last and which :meth:`stored_checkpoints` looks
        for.

        Args:
            source: a local directory, or a checkpoint anywhere.
            index: number of the checkpoint; an earlier one of the same number is replaced.
            progress: epoch, loader positions..., JSON-serialisable, for :meth:`load_progress`.
            metrics: the metrics reported with it; what JSON cannot hold is stored as its ``repr``.

        Returns:
            The checkpoint in the run's directory.

        Raises:
            FileNotFoundError: if ``source`` is no directory, or this node does not see the run's directory.
        """
        from ray.train import Checkpoint

        if isinstance(source, Checkpoint):
            origin, origin_path = resolve(source.path, source.filesystem)
        else:
            origin, origin_path = pyarrow.fs.LocalFileSystem(), os.path.abspath(source)
        if origin.get_file_info(origin_path).type != pyarrow.fs.FileType.Directory:
            raise FileNotFoundError(
                f"a checkpoint must be a directory, but there is none at {origin_path!r} "
                f"({origin.type_name}); keep the directory until report() has returned"
            )
        self.check_reachable()
        target = posixpath.join(self.path, f"checkpoint_{index:06d}")
        work = posixpath.join(self.path, f".part_{index:06d}_{uuid.uuid4().hex[:8]}") if self.local else target
        note = {"index": index, "progress": dict(progress or {}), "metrics": dict(metrics or {})}
        text = json.dumps(note, default=_plain)
        self.delete_checkpoint(work)
        try:
            self._copy(origin, origin_path, work)
            self._write(posixpath.join(work, PROGRESS_FILE), text)
            if work != target:
                self.delete_checkpoint(target)
                self.filesystem.move(work, target)
        except BaseException:
            with contextlib.suppress(Exception):
                self.delete_checkpoint(work)
            raise
        return Checkpoint(target, self.filesystem)

    def load_progress(self, checkpoint: str | Checkpoint) -> Mapping[str, Any] | None:
        """What was stored beside a checkpoint; None if it is not one that a job of ours wrote.

        Args:
            checkpoint: a checkpoint, or the path of one on this run's file system.
        """
        if isinstance(checkpoint, str):
            note = _read_note(self.filesystem, checkpoint)
        else:
            note = _read_note(checkpoint.filesystem, checkpoint.path)
        return None if note is None else note["progress"]

    def stored_checkpoints(self) -> tuple[StoredCheckpoint, ...]:
        """Complete checkpoints of the run, oldest first; also those of an earlier run of the same name."""
        selector = pyarrow.fs.FileSelector(self.path, allow_not_found=True)
        found = []
        for entry in self.filesystem.get_file_info(selector):
            matched = _CHECKPOINT.fullmatch(posixpath.basename(entry.path))
            note = _read_note(self.filesystem, entry.path) if matched and not entry.is_file else None
            if matched and note is not None:
                found.append(
                    StoredCheckpoint(
                        index=int(matched[1]),
                        path=posixpath.join(self.path, posixpath.basename(entry.path)),
                        progress=note["progress"],
                        metrics=note["metrics"],
                    )
                )
        return tuple(sorted(found, key=lambda stored: stored.index))

    def delete_checkpoint(self, path: str) -> None:
        """Delete a checkpoint's directory; no error if it is gone already."""
        if posixpath.dirname(path) != self.path:
            raise ValueError(f"only directories in the run's own, {self.path!r}, are deleted, but got {path!r}")
        # The note first: a deletion that is cut short must not leave something that looks complete.
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.delete_file(posixpath.join(path, PROGRESS_FILE))
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.delete_dir(path)

    # --- files ----------------------------------------------------------------------------------------------

    def _copy(self, origin: pyarrow.fs.FileSystem, source: str, target: str) -> None:
        self.filesystem.create_dir(target, recursive=True)
        # pyarrow's threaded uploads to S3 may deadlock (apache/arrow#32372); Ray Train avoids them as well.
        threads = not isinstance(self.filesystem, pyarrow.fs.S3FileSystem)
        pyarrow.fs.copy_files(
            source,
            target,
            source_filesystem=origin,
            destination_filesystem=self.filesystem,
            chunk_size=_CHUNK_BYTES,
            use_threads=threads,
        )

    def _exists(self, path: str) -> bool:
        return bool(self.filesystem.get_file_info(path).type != pyarrow.fs.FileType.NotFound)

    def _write(self, path: str, text: str) -> None:
        with self.filesystem.open_output_stream(path) as stream:
            stream.write(text.encode())

    def _read(self, path: str) -> str:
        with self.filesystem.open_input_stream(path) as stream:
            return str(stream.readall().decode(errors="replace"))


def _read_note(filesystem: pyarrow.fs.FileSystem, path: str) -> dict[str, Any] | None:
    """The JSON beside a checkpoint; None where there is none or it is not ours."""
    try:
        with filesystem.open_input_stream(posixpath.join(path, PROGRESS_FILE)) as stream:
            note = json.loads(stream.readall())
    except (FileNotFoundError, ValueError):
        return None
    return note if isinstance(note, dict) and {"progress", "metrics"} <= note.keys() else None


def _plain(value: Any) -> Any:
    """A JSON value for what ``json`` does not know: a scalar's number, else text."""
    item = getattr(value, "item", None)
    if callable(item):
        with contextlib.suppress(Exception):
            return item()
    return repr(value)


def make_result(outcome: JobOutcome, storage: RunStorage) -> Result:
    """Ray Train's ``Result`` of a job that has ended.

    ``metrics`` are the last ones reported (with or without a checkpoint), ``checkpoint`` the newest
    checkpoint, ``best_checkpoints`` all that were kept, oldest first, and ``metrics_dataframe`` has a row for
    every report.
    """
    import pandas as pd
    from ray.train import Checkpoint
    from ray.train.v2.api.exceptions import TrainingFailedError
    from ray.train.v2.api.result import Result

    kept: list[tuple[Checkpoint, dict[str, Any]]] = [
        (Checkpoint(path, storage.filesystem), dict(metrics)) for path, metrics in outcome.checkpoints
    ]
    error = outcome.error
    if error is not None and not isinstance(error, TrainingFailedError):
        error = TrainingFailedError(f"{type(error).__name__}: {error}")
        error.__cause__ = outcome.error
    return Result(
        metrics=dict(outcome.metrics),
        checkpoint=kept[-1][0] if kept else None,
        error=error,
        path=storage.path,
        metrics_dataframe=pd.DataFrame([dict(row) for row, _ in outcome.history]) if outcome.history else None,
        best_checkpoints=kept,
        return_value=outcome.return_value,
        _storage_filesystem=storage.filesystem,
    )
