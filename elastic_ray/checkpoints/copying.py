"""SHELL: copies a directory from one file system to another, piece by piece, so that who waits sees that it goes on."""

from __future__ import annotations

import contextlib
import functools
import os
import posixpath
from collections.abc import Callable, Iterator

import pyarrow.fs

from placement.storage.private_files import make_directory, open_output
from placement.storage.storage_calls import StorageCalls

_PIECE_BYTES = 16 << 20
_THREADS = 4


class SourceError(OSError):
    """What is to be copied is not there, or may not be read; waiting for the storage that gets the copy is no help."""


class MissingSourceError(SourceError, FileNotFoundError):
    """It is not there."""


class DeniedSourceError(SourceError, PermissionError):
    """It may not be read."""


class UnfitSourceError(SourceError):
    """There is something else in it than files and directories."""


@contextlib.contextmanager
def reading_source() -> Iterator[None]:
    """Tell what is wrong with the source from what is wrong with the target."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingSourceError(str(error)) from error
    except PermissionError as error:
        raise DeniedSourceError(str(error)) from error


def copy_directory(
    origin: pyarrow.fs.FileSystem,
    source: str,
    target_filesystem: pyarrow.fs.FileSystem,
    target: str,
    *,
    private: bool,
    go_on: Callable[[], bool] = lambda: True,
) -> None:
    """Copy all files and directories below ``source``.

    Args:
        origin: file system of ``source``.
        source: directory to copy.
        target_filesystem: file system of ``target``.
        target: directory that gets the copies.
        private: whether only their user may read them.
        go_on: asked with every piece; once it says no, copying ends with ``InterruptedError``.

    Raises:
        InterruptedError: ``go_on`` said no. SourceError: something below ``source`` is not there, may not be read, or
            is neither file nor directory.
    """

    def copy_file(path: str, copy: str) -> None:
        with reading_source():
            opened = origin.open_input_stream(path)
        with opened as read, open_output(target_filesystem, copy, private=private) as written:
            while piece := read.read(_PIECE_BYTES):
                if not go_on():
                    raise InterruptedError("the copy was given up")
                written.write(piece)

    files = []
    make_directory(target_filesystem, target, private=private)
    for entry, copy in _below(origin, source, target):
        if entry.type == pyarrow.fs.FileType.Directory:
            make_directory(target_filesystem, copy, private=private)
        else:
            files.append((entry.path, copy))
    # An upload to S3 goes on in several threads of its own; several at once may deadlock (apache/arrow#32372).
    threads = 1 if isinstance(target_filesystem, pyarrow.fs.S3FileSystem) else _THREADS
    pool = StorageCalls(target, threads=threads)
    copies = [pool.start(f"copying {path}", functools.partial(copy_file, path, copy)) for path, copy in files]
    try:
        for each in copies:
            each.answer.result()
    finally:
        for each in copies:
            each.give_up()


def add_files(
    origin: pyarrow.fs.FileSystem,
    source: str,
    target_filesystem: pyarrow.fs.FileSystem,
    target: str,
    *,
    private: bool,
    go_on: Callable[[], bool] = lambda: True,
) -> list[str]:
    """Copy the files below ``source`` that ``target`` has not; returns their names below it.

    Args:
        origin, source, target_filesystem, target, private, go_on: as :func:`copy_directory`.

    Raises:
        InterruptedError, SourceError: as :func:`copy_directory`.
    """
    added = []
    for entry, copy in _below(origin, source, target):
        if target_filesystem.get_file_info(copy).type != pyarrow.fs.FileType.NotFound:
            continue
        if entry.type == pyarrow.fs.FileType.Directory:
            make_directory(target_filesystem, copy, private=private)
            continue
        part = f"{copy}.part"  # whoever reads meanwhile sees all of a file or none of it
        with reading_source():
            opened = origin.open_input_stream(entry.path)
        with opened as read, open_output(target_filesystem, part, private=private) as written:
            while piece := read.read(_PIECE_BYTES):
                if not go_on():
                    raise InterruptedError("the copy was given up")
                written.write(piece)
        target_filesystem.move(part, copy)
        added.append(posixpath.relpath(copy, target))
    return added


def _below(origin: pyarrow.fs.FileSystem, source: str, target: str) -> Iterator[tuple[pyarrow.fs.FileInfo, str]]:
    """What lies below ``source``, and the path of each copy below ``target``."""
    source = source.rstrip("/") or "/"
    if isinstance(origin, pyarrow.fs.LocalFileSystem):
        check_tree(source)
    with reading_source():
        entries = origin.get_file_info(pyarrow.fs.FileSelector(source, recursive=True))
    for entry in entries:
        yield entry, posixpath.join(target, entry.path[len(source) :].lstrip("/"))


def check_tree(folder: str, above: tuple[str, ...] = ()) -> None:
    """Check that a local directory has files and directories only, or links to them.

    Args:
        folder: the directory.
        above: the real paths of those that it was reached through.

    Raises:
        UnfitSourceError: it has a pipe, a socket or a device, whose reader would wait for ever, a link to nothing, or
            one to a directory that it lies in; names it.
    """
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
