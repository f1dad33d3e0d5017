"""SHELL: a trial's last checkpoint in Ray's object store, for trials that continue from it while this trial lives."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pyarrow.fs
import ray

if TYPE_CHECKING:
    from ray.train import Checkpoint

logger = logging.getLogger(__name__)

_MOST_BYTES = 256 * 2**20
_FETCH_S = 30.0


def put_checkpoint(checkpoint: Any) -> Any | None:
    """Put a checkpoint's files into Ray's object store; they last as long as this process and a reference exist.

    Returns a reference to the files; None if they are larger than 256 MiB or cannot be read.
    """
    from ray.train import Checkpoint

    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint.from_directory(checkpoint)
    try:
        with checkpoint.as_directory() as folder:
            files = [path for path in Path(folder).rglob("*") if path.is_file()]
            if sum(path.stat().st_size for path in files) > _MOST_BYTES:
                return None
            return ray.put({path.relative_to(folder).as_posix(): path.read_bytes() for path in files})
    except Exception as error:  # it is in storage already: no report may fail by this
        logger.info("a checkpoint is not held in memory: %r", error)
        return None


@contextlib.contextmanager
def fetched_checkpoint(reference: Any | None) -> Iterator[Checkpoint | None]:
    """Provide, within the context, the checkpoint whose files :func:`put_checkpoint` stored under ``reference``.

    The context yields None if ``reference`` is None, or if the files no longer exist or cannot be fetched in time.
    """
    from ray.train import Checkpoint

    if reference is None:
        yield None
        return
    try:
        files: dict[str, bytes] = ray.get(reference, timeout=_FETCH_S)
    except Exception as error:
        logger.info("a checkpoint is read from storage, for it is not in memory any more: %r", error)
        yield None
        return
    memory, root = fsspec.filesystem("memory"), f"/elastic_ray/{uuid.uuid4().hex}"
    try:
        for name, content in files.items():
            memory.pipe_file(f"{root}/{name}", content)
        yield Checkpoint(root, pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(memory)))
    finally:
        with contextlib.suppress(FileNotFoundError):  # it had no files
            memory.rm(root, recursive=True)
