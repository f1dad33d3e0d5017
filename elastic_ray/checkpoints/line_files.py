"""SHELL: files that a single writer appends lines to, on any file system that pyarrow supports."""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Iterator, Sequence

import pyarrow.fs

from placement.storage.private_files import (
    PART,
    make_directory,
    open_append,
    open_whole,
    replace_file,
    sync,
    sync_directory,
)

_PART_LINES = 1000
PIECE = 1 << 20  # bytes that are read at once
LONGEST_LINE = 8 << 20  # bytes; metrics have at most 256 KiB as JSON


class LineFile:
    """File that receives each appended batch of lines completely or not at all.

    A caller whose append failed can therefore retry without duplicating lines.

    On file systems that cannot append, such as object stores, the entire file is rewritten. With ``in_parts``, lines
    are written to files of about a thousand lines in a directory next to this file, so that rewrites stay small.

    Args:
        in_parts: use several files where the file system cannot append, because there will be many lines.
    """

    def __init__(self, filesystem: pyarrow.fs.FileSystem, path: str, *, private: bool, in_parts: bool = False) -> None:
        self._filesystem, self._path = filesystem, path
        self._private, self._in_parts = private, in_parts
        self._lines: list[str] | None = None  # of the file, or the part, that is written anew
        self._part = 0

    def append(self, lines: Sequence[str]) -> None:
        """Append lines. Raises OSError if they cannot be written; the file is then unchanged."""
        if isinstance(self._filesystem, pyarrow.fs.LocalFileSystem):
            self._append_locally("".join(f"{line}\n" for line in lines).encode())
            return
        if self._lines is None:  # an earlier controller of the same run may have written some
            self._part = len(self._parts()) if self._in_parts else 0
            self._lines = [] if self._in_parts else list(self._read(self._path))
        written = [*self._lines, *lines]
        path = self._path
        if self._in_parts:
            make_directory(self._filesystem, self._folder, private=self._private)
            path = posixpath.join(self._folder, f"{self._part:06d}.jsonl")
        content = "".join(f"{line}\n" for line in written).encode()
        replace_file(self._filesystem, path, content, private=self._private)
        self._lines = written
        if self._in_parts and len(written) >= _PART_LINES:
            self._part, self._lines = self._part + 1, []

    def read(self) -> Iterator[str]:
        """Yield all lines written so far."""
        yield from self._read(self._path)
        if self._in_parts:
            for part in self._parts():
                yield from self._read(part)

    def _append_locally(self, data: bytes) -> None:
        """Append complete lines to a file on the local file system, all or none."""
        descriptor = open_append(self._path, private=self._private)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                data = b"\n" + data  # a crash has cut the last line short
            try:
                while data:
                    data = data[os.write(descriptor, data) :]
                sync(descriptor)
                if not size:
                    sync_directory(self._filesystem, posixpath.dirname(self._path))
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)

    @property
    def _folder(self) -> str:
        return posixpath.splitext(self._path)[0]

    def _parts(self) -> list[str]:
        selector = pyarrow.fs.FileSelector(self._folder, allow_not_found=True)
        entries = self._filesystem.get_file_info(selector)
        names = {posixpath.basename(entry.path).removesuffix(PART) for entry in entries if entry.is_file}
        return [posixpath.join(self._folder, name) for name in sorted(names) if name.endswith(".jsonl")]

    def _read(self, path: str) -> Iterator[str]:
        """Yield the lines of one file, also one cut short, without those longer than ``LONGEST_LINE``."""
        with contextlib.suppress(FileNotFoundError), open_whole(self._filesystem, path) as stream:
            rest, too_long = b"", False
            while piece := stream.read(PIECE):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines[1:] if too_long and lines else lines:
                    yield line.decode(errors="replace")
                too_long = (too_long and not lines) or len(rest) > LONGEST_LINE
                rest = b"" if too_long else rest
            if rest:
                yield rest.decode(errors="replace")
