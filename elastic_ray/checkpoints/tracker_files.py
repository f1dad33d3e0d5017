"""SHELL: a train function's log directory, copied to the run's storage if that is not local.

Each process that logs writes its own files, as TensorBoard's writers do. Nothing is ever read back.
"""

from __future__ import annotations

import logging
import os
import posixpath
import shutil
import stat
import tempfile
import threading

from elastic_ray.checkpoints.run_directory import RunStorage
from placement.storage.private_files import make_directory, open_output

logger = logging.getLogger(__name__)

FOLDER = "tensorboard/user"
_EVERY_S = 15.0
_PIECE_BYTES = 16 << 20


class TrackerFiles:
    """Log directory of one process, copied to the run's storage."""

    def __init__(self, storage: RunStorage) -> None:
        self._storage = storage
        self._target = posixpath.join(storage.path, FOLDER)
        self._lock = threading.Lock()
        self._local = ""
        self._copied: dict[str, tuple[int, int]] = {}
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._told = False

    def folder(self) -> str:
        """Return the log directory on this node, creating it if necessary. Raises OSError if it cannot be created."""
        with self._lock:
            if not self._local and self._storage.local:
                make_directory(self._storage.filesystem, self._target, private=self._storage.private)
                self._local = self._target
            elif not self._local:
                self._local = tempfile.mkdtemp(prefix="elastic_ray_tracker_")
                self._thread = threading.Thread(target=self._copy_now_and_then, name="tracker files", daemon=True)
                self._thread.start()
            return self._local

    def close(self, timeout_s: float) -> None:
        """Copy files that have changed since the last copy, for at most ``timeout_s`` [s], then stop copying."""
        if self._thread is None:
            return
        self._closing.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("files in %s were not all copied to %s within %g s", self._local, self._target, timeout_s)

    def _copy_now_and_then(self) -> None:
        while not self._closing.wait(_EVERY_S):
            self._copy()
        if self._copy():
            shutil.rmtree(self._local, ignore_errors=True)

    def _copy(self) -> bool:
        """Copy files that have changed; True if all copies succeeded."""
        try:
            for folder, _, names in os.walk(self._local):
                for name in names:
                    self._copy_file(os.path.join(folder, name))
        except Exception as error:  # of file systems that others wrote
            if not self._told:
                self._told = True
                logger.warning("copying to %s fails, and is tried again: %s", self._target, error)
            return False
        return True

    def _copy_file(self, path: str) -> None:
        """Copy a file if it has changed since the last copy."""
        try:
            found = os.stat(path)
        except FileNotFoundError:  # a link that leads nowhere, or a file that has just gone
            return
        if not stat.S_ISREG(found.st_mode):  # the reader of a pipe would wait for ever
            return
        state = (found.st_size, found.st_mtime_ns)
        if self._copied.get(path) == state:
            return
        filesystem, private = self._storage.filesystem, self._storage.private
        target = posixpath.join(self._target, os.path.relpath(path, self._local).replace(os.sep, "/"))
        make_directory(filesystem, posixpath.dirname(target), private=private)
        with open(path, "rb") as read, open_output(filesystem, target, private=private) as written:
            while piece := read.read(_PIECE_BYTES):
                written.write(piece)
        self._copied[path] = state
