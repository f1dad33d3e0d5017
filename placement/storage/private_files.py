"""SHELL: files and directories that only their user can read, on local file systems.

The process's umask is never changed, since all threads share it; each file gets its mode when it is created. On file
systems other than ``LocalFileSystem`` (which includes NFS mounts), the storage controls who may read.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import logging
import os
import pwd
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.fs

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
PART = ".part"
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS)  # FUSE, network mounts and the like
_FIRST_USER, _NOBODY = 1000, 65534  # uids of people's accounts

_OBJECT_STORES = tuple(
    getattr(pyarrow.fs, name)
    for name in ("S3FileSystem", "GcsFileSystem", "AzureFileSystem")
    if hasattr(pyarrow.fs, name)  # not in every build
)


class ForeignDirectoryError(PermissionError):
    """Error raised if a private directory belongs to another user."""


def make_directory(filesystem: pyarrow.fs.FileSystem, path: str, *, private: bool) -> None:
    """Create a directory and its parents; if private, make it (even if it exists) readable only by its user."""
    if not isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        filesystem.create_dir(path, recursive=True)
        return
    missing = []
    parent = os.path.abspath(path)
    while not os.path.isdir(parent):
        missing.append(parent)
        parent = os.path.dirname(parent)
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process was faster; a file in its place is reported below
            os.mkdir(each, DIRECTORY_MODE if private else 0o777)
        sync_directory(filesystem, os.path.dirname(each))
    if not os.path.isdir(path):
        raise NotADirectoryError(f"{path!r} is to be a directory, but is a file")
    if private:
        tighten(path)


@contextlib.contextmanager
def open_output(filesystem: pyarrow.fs.FileSystem, path: str, *, private: bool) -> Iterator[Any]:
    """Open a binary stream that creates or replaces a file; a private local file is readable only by its user."""
    if not isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        with filesystem.open_output_stream(path) as stream:
            yield stream
        return
    with open(path, "wb", opener=_open_private if private else None) as stream:
        if private:
            tighten(stream.fileno())
        yield stream


def replace_file(filesystem: pyarrow.fs.FileSystem, path: str, content: bytes, *, private: bool) -> None:
    """Replace a file atomically, by writing the new one beside it and moving it into place.

    If a move cannot replace a file (HDFS), only the new file exists for a moment, as ``PATH.part``: see ``open_whole``.
    An object store replaces an object once the new one is complete. Raises OSError if the file system reports an error.
    """
    part = path if isinstance(filesystem, _OBJECT_STORES) else f"{path}{PART}"
    if part != path and not isinstance(filesystem, pyarrow.fs.LocalFileSystem):  # where a move replaces
        there, new = filesystem.get_file_info([path, part])
        if new.is_file and there.type == pyarrow.fs.FileType.NotFound:  # the end came between deleting and moving
            filesystem.move(part, path)
    with open_output(filesystem, part, private=private) as stream:
        stream.write(content)
    if part != path:
        sync_file(filesystem, part)
        try:
            filesystem.move(part, path)
        except OSError:
            if filesystem.get_file_info(path).type == pyarrow.fs.FileType.NotFound:
                raise
            filesystem.delete_file(path)
            filesystem.move(part, path)
    sync_directory(filesystem, os.path.dirname(path))


def open_whole(filesystem: pyarrow.fs.FileSystem, path: str) -> Any:
    """Open a file written by ``replace_file``; raise FileNotFoundError if it does not exist."""
    try:
        return filesystem.open_input_stream(path)
    except FileNotFoundError:
        return filesystem.open_input_stream(f"{path}{PART}")


def sync_file(filesystem: pyarrow.fs.FileSystem, path: str) -> None:
    """Wait until a file's content has reached the disk, so that a node crash cannot lose it."""
    if isinstance(filesystem, pyarrow.fs.LocalFileSystem):  # elsewhere a file is kept once it is written
        _open_and_sync(path)


def sync_directory(filesystem: pyarrow.fs.FileSystem, path: str) -> None:
    """Wait until the names of new and moved files in a directory have reached the disk."""
    if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        _open_and_sync(path, os.O_DIRECTORY)


def sync(descriptor: int) -> None:
    """Wait until an open file has reached the disk, if the file system supports it."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def _open_and_sync(path: str, flags: int = 0) -> None:
    """Sync a file or directory that is not open; one without read permission is skipped."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    except PermissionError:  # may be written but not read: a drop box
        return
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def open_append(path: str, *, private: bool) -> int:
    """Open a local file for appending, creating it if needed, and return its descriptor."""
    mode = FILE_MODE if private else 0o666
    links = os.O_NOFOLLOW if private else 0  # another user of the directory could make us write elsewhere
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | links, mode)
    if private:
        tighten(descriptor)
    return descriptor


def check_own(path: str) -> None:
    """Raise ForeignDirectoryError, with a remedy, if a directory is another user's, who could change files in it."""
    owner = os.stat(path).st_uid
    if owner not in (os.geteuid(), _uid_on(path)):
        raise ForeignDirectoryError(
            f"{path!r} belongs to uid {owner}, who could read, replace and delete what this user (uid {os.geteuid()}) "
            "writes there. Choose another RunConfig(name) or RunConfig(storage_path), give the directory to this user "
            "(chown), or set ElasticConfig(private_files=False) if that user is to share it"
        )


def make_own(path: str, below: str) -> None:
    """Create a private directory, and its parents inside ``below``, where other users may write (such as ``/tmp``)."""
    levels, level = [], os.path.abspath(path)
    while level != os.path.abspath(below):
        levels.append(level)
        level = os.path.dirname(level)
    for level in reversed(levels):
        with contextlib.suppress(FileExistsError):
            os.mkdir(level, DIRECTORY_MODE)
        found = os.lstat(level)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise ForeignDirectoryError(
                f"{level!r} must be a directory of this user (uid {os.geteuid()}), but is uid {found.st_uid}'s, or none"
            )
        tighten(level)


def open_to_others(path: str) -> bool:
    """True if another account on this machine can reach a directory and replace files in it.

    This is possible if others can write to the directory, unless it is sticky or a directory above it denies access.
    """
    level, open_ = os.path.realpath(path), False
    while True:
        found = os.stat(level)
        others = 0o007 | (0o070 if _has_other_members(found.st_gid) else 0)
        if found.st_uid in (0, os.geteuid()):
            if not found.st_mode & others & 0o011:
                return False
            open_ |= bool(found.st_mode & others & 0o022) and not found.st_mode & stat.S_ISVTX
        else:
            open_ = True  # its owner can
        if level == os.path.dirname(level):
            return open_
        level = os.path.dirname(level)


def has_neighbours() -> bool:
    """True if other users run processes on this machine or, unless it is a container, have accounts on it."""
    own = {0, os.geteuid()}
    for process in os.scandir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError):  # it has ended
            if process.name.isdecimal() and process.stat().st_uid not in own:
                return True
    with contextlib.suppress(OSError):
        if Path("/proc/1/comm").read_text().strip() not in ("systemd", "init"):
            return False
    people = [each for each in pwd.getpwall() if not each.pw_shell.endswith(("nologin", "false"))]
    return any(_FIRST_USER <= each.pw_uid < _NOBODY and each.pw_uid not in own for each in people)


def _has_other_members(gid: int) -> bool:
    """True if a group has members other than this user, according to the group database."""
    if gid == 0:
        return False
    try:
        return bool(set(grp.getgrgid(gid).gr_mem) - {pwd.getpwuid(os.geteuid()).pw_name})
    except KeyError:
        return False


def _uid_on(path: str) -> int | None:
    """Return the owner given to our files in a directory, since NFS may map users, and FUSE may know only one."""
    try:
        descriptor, probe = tempfile.mkstemp(prefix=".owner_", dir=path)
    except OSError:
        return None
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        os.unlink(probe)


def tighten(path: str | int) -> None:
    """Remove group and other permissions from one of our own files or directories."""
    found = os.stat(path)
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o077:
        os.chmod(path, stat.S_IMODE(found.st_mode) & 0o700)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)


logger = logging.getLogger("placement.storage")


class LineFile:
    """File that lines are appended to in order; they are in the file when the call returns.

    After an error, which is logged, nothing more is written, because a gap between lines would falsify the record.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: int | None = None
        try:
            self._file = open_append(path, private=True)
        except OSError as error:
            self._give_up(error)

    def append(self, lines: Iterable[str]) -> None:
        """Append lines that end with a line break."""
        left = "".join(lines).encode()
        while left and self._file is not None:
            try:
                left = left[os.write(self._file, left) :]
            except OSError as error:
                os.close(self._file)
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._file = None
        logger.warning("nothing is recorded in %s any more: %s", self._path, error)
