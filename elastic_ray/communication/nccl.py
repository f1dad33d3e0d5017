"""SHELL over torch.distributed: NCCL groups that never block a process for ever."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

CUDA_POLL_S = 2e-4
_FORMING_POLL_S = 0.05
# An operation that NCCL cannot start for so long has failed; until then nothing can abort it.
_START_S = 5
_ABORT_S = _START_S + 10.0


def identity_of(gpu: int) -> str:
    """Return what NCCL tells GPUs apart by; it takes two ranks with the same for an error.

    It compares GPUs of one host only: with a ``NCCL_HOSTID`` for each process, several ranks may share a GPU.
    """
    return f"{os.environ.get('NCCL_HOSTID', '')}/{torch.cuda.get_device_properties(gpu).uuid}"


def begin_nccl(store: Any, rank: int, world_size: int, timeout_s: float) -> Any:
    """Return an NCCL backend that connects in the background and blocks for a limited time only."""
    # Torch's own watchdog ends the process when a peer is lost or an abort takes long: survivors are to continue.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")  # it asks the store each second, also of an aborted group
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(_START_S))
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")  # connect while the group forms, not in its first collective
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    setattr(options.config, "blocking", 0)  # noqa: B010 - torch knows no other way
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


def connect_nccl(
    backend: Any, store: Any, device: torch.device, until_s: float, called_off: Callable[[], bool]
) -> None:
    """Connect the ranks of an NCCL backend, and start no collective: the present group's are under way on this GPU.

    Two communicators whose collectives start in another order on each rank may wait for each other for ever. So a new
    one's first collective is the caller's, after the ranks have left the present group in the same step.

    Args:
        store: what it was made with, kept as long as it is in use.
        until_s: deadline [s, monotonic].
        called_off: True once the group is not wanted any more.

    Raises RuntimeError: a peer is gone, the time is up, or the group is not wanted any more.
    """
    connecting = _Connecting(backend, store, device, until_s)
    while connecting.is_alive() and time.monotonic() < until_s and not called_off():
        connecting.join(_FORMING_POLL_S)
    if why := connecting.failure_or_stop():
        raise RuntimeError(why)


class _Connecting(threading.Thread):
    """Connects a backend, and aborts it where that fails or is not wanted any more.

    An abort while another thread is within a call of the backend frees what that call continues to use: torch has the
    two take turns and does not exclude each other. So this thread aborts, once it is out of the call.
    """

    def __init__(self, backend: Any, store: Any, device: torch.device, until_s: float) -> None:
        super().__init__(name="nccl-connect", daemon=True)
        self._backend, self._store, self._device, self._until_s = backend, store, device, until_s
        self._failure = ""
        self._stopped = self._over = False
        self._deciding = threading.Lock()
        self.start()

    def failure_or_stop(self) -> str:
        """Return why it has failed, or stop what is under way and return that; empty once connected."""
        with self._deciding:
            self._stopped = not self._over
        if self._stopped:
            threading.Thread(target=self._watch, name="nccl-connect-watch", daemon=True).start()
        return self._failure or ("NCCL was not ready in time, or the group was called off" if self._stopped else "")

    def _watch(self) -> None:
        """Abort from outside where no call returns: torch's own time is up long since."""
        self.join(_ABORT_S)
        if self.is_alive():
            abort_nccl(self._backend)

    def run(self) -> None:
        """Connect, and abort the backend if that fails or is unwanted by then."""
        try:
            self._connect()
        except RuntimeError as error:
            self._failure = str(error).split("\n", 1)[0]
        with self._deciding:
            self._over = True
            unwanted = self._stopped or bool(self._failure)
        if unwanted:
            abort_nccl(self._backend)

    def _connect(self) -> None:
        """Connect; returns sooner once stopped. Raises RuntimeError: a peer is gone, or the time is up."""
        backend, rank = self._backend, self._backend.rank()
        backend.eager_connect_single_device(self._device)
        # A rank's copy to itself meets no peer, and starts when NCCL is ready: many ranks take long.
        mine, own = torch.ones(1, device=self._device), torch.zeros(1, device=self._device)
        copying = None
        while copying is None and not self._stopped:
            backend._start_coalescing()
            try:
                backend.send([mine], rank, 0)
                backend.recv([own], rank, 0)
            except RuntimeError as error:
                if "NCCL timeout" not in str(error) or time.monotonic() > self._until_s:
                    raise
            finally:
                copying = backend._end_coalescing()
        while copying is not None and not copying.is_completed() and not self._stopped:
            time.sleep(CUDA_POLL_S)


def abort_nccl(backend: Any) -> None:
    """Abort an NCCL backend in a thread of its own; end the process, as one that is lost, where that does not return.

    Kernels of a communicator that cannot be aborted occupy the GPU for ever, whatever else the process does.
    """

    def abort() -> None:
        try:
            backend.abort()
        except RuntimeError as error:
            logger.warning("NCCL's abort: %s", error)

    def watch() -> None:
        aborting.join(_ABORT_S)
        if aborting.is_alive():
            logger.critical("NCCL's abort has not returned within %g s: this process ends, as a lost one", _ABORT_S)
            os.kill(os.getpid(), signal.SIGKILL)

    aborting = threading.Thread(target=abort, name="nccl-abort", daemon=True)
    aborting.start()
    threading.Thread(target=watch, name="nccl-abort-watch", daemon=True).start()


def has_run(works: Sequence[Any], voided: threading.Event, deadline: float) -> bool:
    """True if the operations have run by the deadline and were not aborted.

    Where a peer is gone they never run, though NCCL's own wait has ended: that is for what the GPU does next.

    Args:
        works: some of them may be gloo's.
        deadline: how long to wait [s, monotonic].
    """
    while not all(work.is_completed() for work in works):
        if voided.is_set() or time.monotonic() > deadline:
            return False
        time.sleep(CUDA_POLL_S)
    return not voided.is_set()
