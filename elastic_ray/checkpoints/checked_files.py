"""SHELL: files that are written once, with their checksum, and have reached the disk before others hear of them."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
from collections.abc import Callable
from typing import Any

from elastic_ray.checkpoints.run_directory import RunStorage
from placement.storage.private_files import open_output

CHUNK_BYTES = 16 << 20
_SYNC_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class Checksum:
    """What a file must be.

    Attributes:
        sha256: in hexadecimal.
        size: of the file [bytes].
    """

    sha256: str
    size: int


def write_checked(
    storage: RunStorage,
    path: str,
    write: Callable[[CheckedStream], object],
    go_on: Callable[[], bool] = lambda: True,
) -> Checksum:
    """Write a file; what is there of it after an error is the caller's to delete.

    Args:
        storage: the run.
        path: of the file, on the run's file system; its directory exists.
        write: writes it.
        go_on: asked with every piece; once it says no, writing ends with ``InterruptedError``.
    """
    with open_output(storage.filesystem, path, private=storage.private) as raw:
        stream = CheckedStream(raw, go_on, lambda: sync(storage, path))
        write(stream)
    sync(storage, path)
    return Checksum(stream.digest(), stream.size)


def sync(storage: RunStorage, path: str) -> None:
    """Wait until a file has reached the disk: a node's end would take what only its memory holds."""
    if not storage.local:
        return  # there a file is kept once it is written
    with open(path, "rb") as file:
        os.fsync(file.fileno())


class CheckedStream(io.RawIOBase):
    """A stream that counts and digests what goes through it.

    Attributes:
        size: bytes so far.
    """

    def __init__(self, raw: Any, go_on: Callable[[], bool], sync: Callable[[], None]) -> None:
        super().__init__()
        self._raw = raw
        self._go_on = go_on
        self._sync = sync
        self._unsynced = 0
        self._digest = hashlib.sha256()
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), CHUNK_BYTES):
            if not self._go_on():
                raise InterruptedError("the checkpoint was given up")
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
        """SHA-256 of what was written, in hexadecimal."""
        return self._digest.hexdigest()
