"""SHELL: writer of a run's TensorBoard event files, on any file system that pyarrow supports."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import posixpath
import re
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, TypeVar

import pyarrow.fs
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from elastic_ray.events import EventKind, JobEvent, JobPhase, Report
from elastic_ray.observe.trackers.series import (
    PREFIX,
    REPORT,
    JobNumbers,
    SeenReports,
    changes_workers,
    flat_numbers,
    is_mark,
    mark_text,
)
from placement.storage.private_files import make_directory, open_append, open_output

_LENGTH = 8
_SUM = 4
_LARGEST = 64 << 20  # of a record; what says more is no length
_START = 1
_STRING = 7
_DOUBLE, _FLOAT, _INT, _BYTES = 1, 2, 3, 12
# Fields that are used here: number and type, a message's name or a list of one if the field is repeated. Texts are
# bytes, of which files by others may have any.
_FIELDS: Mapping[str, Mapping[str, tuple[int, int | str | list[int | str]]]] = {
    "Event": {
        "wall_time": (1, _DOUBLE),
        "step": (2, _INT),
        "file_version": (3, _BYTES),
        "summary": (5, "Summary"),
        "session_log": (7, "SessionLog"),
    },
    "SessionLog": {"status": (1, _INT)},
    "Summary": {"value": (1, ["Value"])},
    "Value": {"tag": (1, _BYTES), "simple_value": (2, _FLOAT), "tensor": (8, "Tensor"), "metadata": (9, "Metadata")},
    "Tensor": {"dtype": (1, _INT), "tensor_shape": (2, "Shape"), "string_val": (8, [_BYTES])},
    "Shape": {"dim": (2, ["Dim"])},
    "Dim": {"size": (1, _INT)},
    "Metadata": {"plugin_data": (1, "PluginData")},
    "PluginData": {"plugin_name": (1, _BYTES)},
}


def _event_class() -> Any:
    """Return the class of ``Event`` messages."""
    file = descriptor_pb2.FileDescriptorProto(name="event.proto", syntax="proto2")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            one = kind[0] if isinstance(kind, list) else kind
            typed = {"type_name": one} if isinstance(one, str) else {"type": one}
            message.field.add(name=field, number=number, label=3 if one is not kind else 1, **typed)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Event"))


_Event = _event_class()


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_CRC = _crc_table()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C checksum (RFC 3720) of ``data``."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def frame(record: bytes) -> bytes:
    """Return a record as it is stored in an event file, with its length and checksums."""
    length = struct.pack("<Q", len(record))
    return length + _masked(length) + record + _masked(record)


def records(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the records of the event file ``stream``, up to the first record that is truncated or damaged."""
    while True:
        head = stream.read(_LENGTH + _SUM)
        if len(head) < _LENGTH + _SUM or _masked(head[:_LENGTH]) != head[_LENGTH:]:
            return
        (length,) = struct.unpack("<Q", head[:_LENGTH])
        if length > _LARGEST:
            return
        body = stream.read(length + _SUM)
        if len(body) < length + _SUM or _masked(body[:length]) != body[length:]:
            return
        yield body[:length]


def version_event(time_s: float) -> bytes:
    """Return an event file's first record, with a format version that makes readers apply :func:`restart_event`."""
    return _packed(wall_time=time_s, file_version=b"brain.Event:2")


def restart_event(time_s: float, step: int) -> bytes:
    """Return a TensorBoard event that invalidates all earlier events at or after ``step``."""
    return _packed(wall_time=time_s, step=step, session_log={"status": _START})


def _utf8(text: str) -> bytes:
    """Encode any text as UTF-8; a lone surrogate becomes an escape sequence."""
    return text.encode("utf-8", "backslashreplace")


def scalar_event(time_s: float, step: int, values: Mapping[str, float]) -> bytes:
    """Return a TensorBoard event with scalars at a step, keyed by tag (``time_s`` in [s since the epoch])."""
    scalars = [{"tag": _utf8(tag), "simple_value": value} for tag, value in values.items()]
    return _packed(wall_time=time_s, step=step, summary={"value": scalars})


def text_event(time_s: float, step: int, tag: str, text: str) -> bytes:
    """Return a TensorBoard event with a text under a tag, at a step; TensorBoard renders the text as Markdown."""
    tensor = {"dtype": _STRING, "tensor_shape": {"dim": [{"size": 1}]}, "string_val": [_utf8(text)]}
    value = {"tag": _utf8(tag), "tensor": tensor, "metadata": {"plugin_data": {"plugin_name": b"text"}}}
    return _packed(wall_time=time_s, step=step, summary={"value": [value]})


def _packed(**fields: Any) -> bytes:
    packed: bytes = _Event(**fields).SerializeToString()
    return packed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadEvent:
    """Contents of one event that was read from a TensorBoard file."""

    time_s: float = 0.0  # when it was written [s since the epoch]
    step: int = 0
    restarts: bool = False  # it says that what was written of this step and later ones counts no more
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)  # its scalars, by tag
    is_text: bool = False  # it holds a text


def read_event(record: bytes) -> ReadEvent:
    """Return the step, time and scalars of a record. Raises ValueError if the record is not an event."""
    try:
        event = _Event.FromString(record)
    except DecodeError as error:
        raise ValueError(f"a record is not an event: {error}") from None
    found = event.summary.value
    return ReadEvent(
        time_s=event.wall_time,
        step=event.step,
        restarts=event.session_log.status == _START,
        values={
            each.tag.decode(errors="replace"): each.simple_value
            for each in found
            if each.HasField("tag") and each.HasField("simple_value")
        },
        is_text=any(each.HasField("tensor") for each in found),
    )


T = TypeVar("T")

FOLDER = "tensorboard"
_FILE = re.compile(r"events\.out\.tfevents\.(\d+)\..*")
_LARGEST_LOCAL = 8 << 20
_LARGEST_UPLOAD = 1 << 20  # such a file is written anew each time
_UPLOAD_EVERY_S = 15.0
_MOST_UNWRITTEN = 4 << 20
_LONGEST_AGAIN_S = 30.0
_MOST_MARKS = 1000
_KNOWN = 1000  # reports that are looked for in the files of an earlier controller


class TensorBoardWriter:
    """Writer for one directory of event files, for a run whose controller and rank 0 may be replaced.

    When a run returns to a checkpoint, a restart event invalidates later values, which repeated steps then replace;
    marks are kept. The x axis is the optimizer step, or the report's number if the run reports without making optimizer
    steps.
    """

    def __init__(self, filesystem: pyarrow.fs.FileSystem, path: str, *, private: bool) -> None:
        self._files = EventFiles(filesystem, posixpath.join(path, FOLDER), private=private)
        self._seen = SeenReports()
        self._step = 0
        self._marks = collections.deque[tuple[int, JobEvent]](maxlen=_MOST_MARKS)

    def start(self, step: int, reports: int, *, again: bool, events: tuple[JobEvent, ...]) -> None:
        """Read existing files and, unless the run just continues (``again``), invalidate values after ``step``."""
        found = self._files.find()
        if again:
            self._step = max(self._step, found.step)
            self._seen = SeenReports(min(found.reports, default=1) - 1, frozenset(found.reports))
            for event in filter(is_mark, events):
                if event.time_s in found.marks:
                    self._marks.append((found.marks[event.time_s], event))
                else:  # the controller before this one has died before it could write it
                    self.event(event)
        elif found.any:
            self._seen = SeenReports(reports)
            self._go_back(step, reports)
        self._files.write()

    def report(self, report: Report, time_s: float) -> None:
        """Write the numbers of a report, under the names that the user chose."""
        if not self._seen.add(report.index):
            return
        step = report.steps or report.index
        self._step = max(self._step, report.steps)
        values = flat_numbers(report.metrics) | {REPORT: float(report.index)}
        self._files.add(scalar_event(time_s, step, values))

    def numbers(self, numbers: JobNumbers) -> None:
        """Write the job's own numbers, under names that start with :data:`PREFIX`."""
        self._step = max(self._step, numbers.step)
        values = {f"{PREFIX}{name}": value for name, value in numbers.values.items()}
        self._files.add(scalar_event(numbers.time_s, self._step, values))

    def event(self, event: JobEvent) -> None:
        """Write a mark for an event; a restart also invalidates the values after the step where the job resumes."""
        if event.kind is EventKind.RESTART:
            self._go_back(int(event.detail.get("steps", 0)), int(event.detail.get("reports", 0)))
        if is_mark(event):
            self._marks.append((self._step, event))
            self._mark(self._step, event)

    def _mark(self, step: int, event: JobEvent) -> None:
        self._files.add(text_event(event.time_s, step, f"{PREFIX}{event.kind.value}", mark_text(event)))
        values = {f"{PREFIX}pause_s": event.pause_s} if event.pause_s else {}
        if changes_workers(event):
            values[f"{PREFIX}workers"] = float(event.to_workers)
        if values:
            self._files.add(scalar_event(event.time_s, step, values))

    def _go_back(self, step: int, reports: int) -> None:
        """Return to an earlier step: void later values and repeat later marks at that step."""
        self._seen.go_back(reports)
        self._step = step
        self._files.add(restart_event(time.time(), step + 1))
        void = [event for at, event in self._marks if at > step]
        kept = [(min(at, step), event) for at, event in self._marks]
        self._marks.clear()
        self._marks.extend(kept)
        for event in void:
            self._mark(step, event)

    def flush(self) -> None:
        """Write the pending records if they are due; after an error they are kept, up to a limit, and written later."""
        self._files.write()

    def finish(self, phase: JobPhase) -> None:
        """Write all pending records."""
        self._files.write(last=True)


@dataclasses.dataclass(slots=True, kw_only=True)
class Found:
    """Contents of earlier event files, except what a restart has invalidated."""

    reports: dict[int, int] = dataclasses.field(default_factory=dict)  # the last reports, with their steps
    # when each mark was made [s since the epoch], with its step
    marks: dict[float, int] = dataclasses.field(default_factory=dict)
    step: int = 0
    void: int | None = None  # the step from which earlier files count no more; None for none
    any: bool = False  # whether there are files


def _before(steps: dict[T, int], void: int | None) -> dict[T, int]:
    """Return the entries whose step is smaller than ``void``; all entries if ``void`` is None."""
    return {thing: step for thing, step in steps.items() if void is None or step < void}


class EventFiles:
    """Event files of one controller, in the same directory as earlier controllers' files.

    A local file is appended to. Other file systems can only replace an entire file: a file of at most about 1 MiB is
    rewritten every 15 s.
    """

    def __init__(self, filesystem: pyarrow.fs.FileSystem, folder: str, *, private: bool) -> None:
        self._filesystem, self._folder, self._private = filesystem, folder, private
        self._local = isinstance(filesystem, pyarrow.fs.LocalFileSystem)
        self._path = ""
        self._number = 0
        self._newest = 0  # seconds since the epoch in the name of the newest file: readers go by names
        self._written = b""  # of a file that is written anew
        self._size = 0
        self._pending: list[bytes] = []
        self._pending_size = 0
        self._not_before_s = self._again_s = 0.0

    def find(self) -> Found:
        """Return the contents of earlier controllers' event files, except what a restart has invalidated."""
        selector = pyarrow.fs.FileSelector(self._folder, allow_not_found=True)
        names = [posixpath.basename(entry.path) for entry in self._filesystem.get_file_info(selector) if entry.is_file]
        names = sorted(name for name in names if _FILE.fullmatch(name))
        self._newest = max((int(name.split(".")[3]) for name in names), default=0)
        found = Found(any=bool(names))
        void: int | None = None
        for number, name in enumerate(reversed(names)):  # the newest first: of long runs, the older ones are not read
            earlier = self._read(name)
            found.reports = _before(earlier.reports, void) | found.reports
            found.marks = _before(earlier.marks, void) | found.marks
            found.step = earlier.step if number == 0 else found.step
            void = min((step for step in (void, earlier.void) if step is not None), default=None)
            if len(found.reports) >= _KNOWN:
                break
        return found

    def _read(self, name: str) -> Found:
        """Return the valid contents of one file."""
        found = Found()
        with self._filesystem.open_input_stream(posixpath.join(self._folder, name)) as stream:
            for record in records(stream):
                with contextlib.suppress(ValueError):
                    event = read_event(record)
                    found.step = max(0, event.step - 1) if event.restarts else event.step
                    if event.restarts:
                        found.reports, found.marks = (
                            _before(found.reports, event.step),
                            _before(found.marks, event.step),
                        )
                        found.void = event.step if found.void is None else min(found.void, event.step)
                    elif event.is_text:
                        found.marks[event.time_s] = event.step
                    elif (number := event.values.get(REPORT)) is not None:
                        found.reports[int(number)] = event.step
        return found

    def add(self, record: bytes) -> None:
        """Add a record to the pending ones, to be written later."""
        framed = frame(record)
        self._pending.append(framed)
        self._pending_size += len(framed)

    def write(self, *, last: bool = False) -> None:
        """Write the pending records if they are due, or at once if ``last`` is True."""
        if not self._pending or (time.monotonic() < self._not_before_s and not last):
            return
        try:
            self._write(b"".join(self._pending))
        except OSError:
            self._again_s = min(max(1.0, 2 * self._again_s), _LONGEST_AGAIN_S)
            self._not_before_s = time.monotonic() + self._again_s
            while self._pending_size > _MOST_UNWRITTEN:
                self._pending_size -= len(self._pending.pop(0))
            raise
        self._pending, self._pending_size, self._again_s = [], 0, 0.0
        self._not_before_s = 0.0 if self._local else time.monotonic() + _UPLOAD_EVERY_S

    def _write(self, data: bytes) -> None:
        """Append to the current file; start a new file if none is open, and close it once it is full."""
        begins = not self._path
        if begins:
            make_directory(self._filesystem, self._folder, private=self._private)
            self._path = posixpath.join(self._folder, self._name())
            data = frame(version_event(time.time())) + data
        try:
            if self._local:
                _append(self._path, data, private=self._private)
            else:
                with open_output(self._filesystem, self._path, private=self._private) as stream:
                    stream.write(self._written + data)
                self._written += data
        except OSError:
            self._path = "" if begins else self._path
            raise
        self._size += len(data)
        if self._size > (_LARGEST_LOCAL if self._local else _LARGEST_UPLOAD):
            self._path, self._written, self._size = "", b"", 0

    def _name(self) -> str:
        self._newest = max(int(time.time()), self._newest + 1)
        return f"events.out.tfevents.{self._newest:010d}.{socket.gethostname()}.{os.getpid()}"


def _append(path: str, data: bytes, *, private: bool) -> None:
    """Append to a local file; after an error, no part of ``data`` remains in the file."""
    descriptor = open_append(path, private=private)
    try:
        size = os.fstat(descriptor).st_size
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
