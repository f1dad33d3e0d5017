"""SHELL: warm-up of a worker process before it belongs to a job, so that no first step waits for imports.

Imports are limited by the CPU. Therefore, the number of processes that import at the same time is limited to the number
of CPUs; with more, none would be ready until all are, and the first step would wait for the last import.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray._private import worker as _ray_worker

from placement.storage.private_files import make_own, open_append

# What a train function or its first step imports, elastic_ray's own names among them. ray.train would be a fifth of
# the time of a start, and is imported in time by train functions that use it: beside the others' steps.
_MODULES = (
    "elastic_ray.worker.worker",
    "elastic_ray.parallel.wrapper",
    "elastic_ray.data.loader",
    "torch.utils.data",
    "torch.distributed",
)
_POLL_S = 0.02
_WAIT_S = 30.0


def warm_up() -> None:
    """Import modules, and run one training step in torch on the CPU, without initialising CUDA."""
    with start_slot():
        import torch

        for name in _MODULES:
            importlib.import_module(name)
        weight = torch.ones(8, 8, requires_grad=True)
        (torch.ones(8, 8) @ weight).sum().backward()  # type: ignore[no-untyped-call]
        torch.optim.SGD([weight], lr=0.0).step()  # the first optimizer of a process imports half of torch's compiler


def resident_bytes() -> int:
    """Return the peak resident memory of this process [bytes]."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def start_slot(folder: Path | None = None, *, slots: int | None = None, timeout_s: float = _WAIT_S) -> Iterator[bool]:
    """Hold one of the machine's slots for starting processes; a process that dies releases its slot.

    Args:
        folder: Folder of the slot files, private to this user; None uses one in the Ray session's folder.
        slots: Number of slots; None uses the number of CPUs available to this process.
        timeout_s: Longest wait for a slot [s]; after that the start continues without one.

    Yields:
        True if a slot is held.
    """
    file = None
    deadline_s = time.monotonic() + timeout_s
    try:
        # Where there is no such folder, or it is another user's, processes start without turns.
        with contextlib.suppress(OSError, AttributeError):
            path = str(folder or _session_folder())
            make_own(path, os.path.dirname(path))
            file = _lock_slot(path, slots or len(os.sched_getaffinity(0)), deadline_s)
        yield file is not None
    finally:
        if file is not None:
            os.close(file)


def _session_folder() -> Path:
    """Return the folder for slot files in the session directory of this process's Ray node."""
    node: Any = _ray_worker._global_node
    return Path(node.get_session_dir_path()) / "elastic_ray_starts"


def _lock_slot(folder: str, slots: int, deadline_s: float) -> int | None:
    """Return the open file that holds a slot, or None if no slot became free in time."""
    while True:
        for slot in range(slots):
            file = open_append(os.path.join(folder, str(slot)), private=True)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
            except OSError:
                os.close(file)
                raise
            else:
                return file
        if time.monotonic() > deadline_s:
            return None
        time.sleep(_POLL_S)
