"""SHELL: copies a directory between file systems in chunks, so that a caller sees progress."""

from __future__ import annotations

import contextlib
import functools
import os
import posixpath
import uuid
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

import pyarrow.fs

from elastic_ray.checkpoints.checked_files import CHUNK_BYTES, CheckedStream, Checksum, sha256_of, write_checked
from placement.storage.private_files import PART, make_directory, sync_directory
from placement.storage.storage_calls import StorageCalls

if TYPE_CHECKING:
    from elastic_ray.checkpoints.run_directory import RunStorage

NOTES = (".elastic_ray.json", ".elastic_ray_added_")
"""A checkpoint's note, and what the names of those about added files begin with."""
_THREADS = 4


class SourceError(OSError):
    """Error raised if a copy fails because of its source, so that waiting for the target's storage cannot help."""


class MissingSourceError(SourceError, FileNotFoundError):
    """Error raised if the source of a copy does not exist."""


class DeniedSourceError(SourceError, PermissionError):
    """Error raised if reading the source of a copy is not permitted."""


class UnfitSourceError(SourceError):
    """Error raised if the source of a copy contains anything other than files and directories."""


@contextlib.contextmanager
def reading_source() -> Iterator[None]:
    """Convert file errors in this context to ``SourceError``, to distinguish them from the target's errors."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingSourceError(str(error)) from error
    except PermissionError as error:
        raise DeniedSourceError(str(error)) from error


def copy_directory(
    origin: pyarrow.fs.FileSystem,
    source: str,
    storage: RunStorage,
    target: str,
    *,
    go_on: Callable[[], bool] = lambda: True,
) -> dict[str, Checksum]:
    """Copy everything below ``source`` on ``origin`` to ``target`` in the run's storage, and flush it to disk.

    Returns the checksum of each file, keyed by its path below ``target``.
    """

    files, directories = [], [target]
    make_directory(storage.filesystem, target, private=storage.private)
    for entry, copy in _below(origin, source, target):
        if entry.type == pyarrow.fs.FileType.Directory:
            make_directory(storage.filesystem, copy, private=storage.private)
            directories.append(copy)
        else:
            files.append((entry.path, copy))
    # An upload to S3 continues in several threads of its own; several at once may deadlock (apache/arrow#32372).
    threads = 1 if isinstance(storage.filesystem, pyarrow.fs.S3FileSystem) else _THREADS
    pool = StorageCalls(target, threads=threads)
    copies = [
        pool.start(f"copying {path}", functools.partial(_copy_file, origin, path, storage, copy, go_on))
        for path, copy in files
    ]
    try:
        sums = [each.answer.result() for each in copies]
    finally:
        for each in copies:
            each.give_up()
    for directory in directories:
        sync_directory(storage.filesystem, directory)
    return {posixpath.relpath(copy, target): each for (_, copy), each in zip(files, sums, strict=True)}


def add_files(
    origin: pyarrow.fs.FileSystem,
    source: str,
    storage: RunStorage,
    target: str,
    noted: Collection[str],
    *,
    go_on: Callable[[], bool] = lambda: True,
) -> dict[str, Checksum]:
    """Copy the files below ``source`` that ``target`` lacks; returns checksums keyed by path below ``target``.

    Args:
        noted: names of files already recorded with the checkpoint. An unrecorded file of the right size in ``target``
            was copied by an earlier attempt, and is included in the result.
    """
    added = {}
    for entry, copy in _below(origin, source, target):
        name, there = posixpath.relpath(copy, target), storage.filesystem.get_file_info(copy)
        if there.type != pyarrow.fs.FileType.NotFound:
            if there.is_file and entry.is_file and name not in noted and there.size == entry.size is not None:
                added[name] = Checksum(sha256_of(storage.filesystem, copy, go_on), there.size)
            continue
        if entry.type == pyarrow.fs.FileType.Directory:
            make_directory(storage.filesystem, copy, private=storage.private)
            continue
        part = f"{copy}.{uuid.uuid4().hex[:8]}{PART}"  # whoever reads meanwhile sees all of a file or none of it
        try:
            checksum = _copy_file(origin, entry.path, storage, part, go_on)
            if _publish(storage.filesystem, part, copy):
                added[name] = checksum
        finally:
            with contextlib.suppress(Exception):
                storage.filesystem.delete_file(part)
        sync_directory(storage.filesystem, posixpath.dirname(copy))
    return added


def _publish(filesystem: pyarrow.fs.FileSystem, part: str, copy: str) -> bool:
    """Give a file its final name; False if another rank did so first (detected on local file systems only)."""
    if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        try:
            os.link(part, copy)
            return True
        except FileExistsError:
            return False
        except OSError:
            pass  # it has no links
    filesystem.move(part, copy)
    return True


def _copy_file(
    origin: pyarrow.fs.FileSystem, path: str, storage: RunStorage, copy: str, go_on: Callable[[], bool]
) -> Checksum:
    """Copy one file without flushing its directory entry to disk."""
    with reading_source():
        opened = origin.open_input_stream(path)

    def write(stream: CheckedStream) -> None:
        while piece := opened.read(CHUNK_BYTES):
            stream.write(piece)

    with opened:
        return write_checked(storage, copy, write, go_on, named=False)


def _below(origin: pyarrow.fs.FileSystem, source: str, target: str) -> Iterator[tuple[pyarrow.fs.FileInfo, str]]:
    """Yield each entry below ``source`` and its path below ``target``, leaving out a checkpoint's notes."""
    source = source.rstrip("/") or "/"
    if isinstance(origin, pyarrow.fs.LocalFileSystem):
        check_tree(source)
    with reading_source():
        entries = origin.get_file_info(pyarrow.fs.FileSelector(source, recursive=True))
    for entry in entries:
        name = entry.path.strip("/")[len(source.strip("/")) :].lstrip("/")  # some give paths with a "/" in front
        if name != NOTES[0] and not name.startswith(NOTES[1]):
            yield entry, posixpath.join(target, name)


def check_tree(folder: str, above: tuple[str, ...] = ()) -> None:
    """Check that a local directory contains only files, directories, and links to these."""
    above = (*above, os.path.realpath(folder))
    with reading_source():
        paths = [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
    for path in paths:
        what = ""
        if os.path.isdir(path):
            if os.path.realpath(path) in above:
                what = f"a link to {os.readlink(path)!r}, which it lies in"
            else:
                check_tree(path, above)
        elif not os.path.isfile(path):
            gone = os.path.islink(path) and not os.path.exists(path)
            what = f"a link to {os.readlink(path)!r}, which leads nowhere" if gone else "a pipe, socket or device"
        if what:
            raise UnfitSourceError(
                f"a checkpoint must hold files and directories, or links to them, but {path!r} is {what}: remove it "
                "before report(checkpoint=...)"
            )
