"""SHELL: files written once, with a checksum, and flushed to disk before their names are published."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import posixpath
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow.fs

from placement.storage.private_files import open_output, sync_directory, sync_file

if TYPE_CHECKING:
    from elastic_ray.checkpoints.run_directory import RunStorage

CHUNK_BYTES = 16 << 20
_SYNC_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class Checksum:
    """Size and SHA-256 checksum that a file must have."""

    sha256: str  # in hexadecimal
    size: int  # of the file [bytes]


def write_checked(
    storage: RunStorage,
    path: str,
    write: Callable[[CheckedStream], object],
    go_on: Callable[[], bool] = lambda: True,
    *,
    named: bool = True,
) -> Checksum:
    """Write a file with ``write(stream)`` and return its checksum; after an error, the caller must delete the file.

    Args:
        go_on: called for every chunk; if it returns False, writing stops with ``InterruptedError``.
        named: also flush the directory entry to disk; if False, the caller flushes the directory.
    """
    filesystem = storage.filesystem
    with open_output(filesystem, path, private=storage.private) as raw:
        stream = CheckedStream(raw, go_on, lambda: sync_file(filesystem, path))
        write(stream)
    sync_file(filesystem, path)
    if named:
        sync_directory(filesystem, posixpath.dirname(path))
    return Checksum(stream.digest(), stream.size)


def sha256_of(filesystem: pyarrow.fs.FileSystem, path: str, go_on: Callable[[], bool]) -> str:
    """Return the SHA-256 of a file, in hexadecimal; raises InterruptedError if ``go_on`` returns False."""
    found = hashlib.sha256()
    with filesystem.open_input_stream(path) as stream:
        while piece := stream.read(CHUNK_BYTES):
            if not go_on():
                raise InterruptedError("the reading was abandoned")
            found.update(piece)
    return found.hexdigest()


class CheckedStream(io.RawIOBase):
    """Output stream that counts and hashes the bytes written to it."""

    def __init__(self, raw: Any, go_on: Callable[[], bool], sync: Callable[[], None]) -> None:
        super().__init__()
        self._raw, self._go_on, self._sync = raw, go_on, sync
        self._unsynced = 0
        self._digest = hashlib.sha256()
        self.size = 0  # bytes so far

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), CHUNK_BYTES):
            if not self._go_on():
                raise InterruptedError("the checkpoint was abandoned")
            piece = view[begin : begin + CHUNK_BYTES]
            self._raw.write(piece)
            self._digest.update(piece)
            self._unsynced += len(piece)
            if self._unsynced >= _SYNC_BYTES:  # all at once at the end would be a long silence
                self._sync()
                self._unsynced = 0
        self.size += len(view)
        return len(view)

    def digest(self) -> str:
        """Return the SHA-256 of the bytes written so far, in hexadecimal."""
        return self._digest.hexdigest()
