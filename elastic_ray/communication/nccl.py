"""SHELL over torch.distributed: NCCL, whose operations run on a GPU some time after their work is done for the CPU."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

CUDA_POLL_S = 2e-4


def identity_of(gpu: int) -> str:
    """Return what NCCL tells GPUs apart by; it takes two ranks with the same for an error.

    It compares GPUs of one host only: with a ``NCCL_HOSTID`` for each process, several ranks may share a GPU.
    """
    return f"{os.environ.get('NCCL_HOSTID', '')}/{torch.cuda.get_device_properties(gpu).uuid}"


def form_nccl(store: Any, rank: int, world_size: int, timeout_s: float, gpu: int) -> Any:
    """An NCCL backend whose communicator can be aborted."""
    # Torch's own watchdog ends the process when a peer is lost or an abort takes long: survivors are to go on.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    backend: Any = dist.ProcessGroupNCCL(store, rank, world_size, options)
    # The first collective builds the communicator: do it here, in the background, not in the first step.
    # In this thread, "cuda" would be another GPU than in the train function's that has called set_device().
    with torch.cuda.device(gpu):
        backend.allreduce([torch.ones(1, device="cuda")]).wait()
        torch.cuda.synchronize()
    return backend


def has_run(works: Sequence[Any], voided: threading.Event, deadline: float) -> bool:
    """Whether operations that were waited for have run, as far as nobody has aborted them: what is aborted ends, too.

    Where a peer is gone they never run, though NCCL's own wait has ended: that is for what the GPU does next.

    Args:
        works: some of them may be gloo's.
        voided: set before they are aborted.
        deadline: how long to wait [s, monotonic].
    """
    while not all(work.is_completed() for work in works):
        if voided.is_set() or time.monotonic() > deadline:
            return False
        time.sleep(CUDA_POLL_S)
    return not voided.is_set()
