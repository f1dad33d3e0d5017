"""SHELL over torch.distributed: NCCL groups with operations that never block a process forever."""

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

from placement.text import first_line

logger = logging.getLogger(__name__)

CUDA_POLL_S = 2e-4
_FORMING_POLL_S = 0.05
# An operation that NCCL cannot start for so long has failed; until then nothing can abort it.
_START_S = 5
_ABORT_S = _START_S + 10.0


def identity_of(gpu: int) -> str:
    """Return the identity that NCCL uses to distinguish GPUs; NCCL rejects two ranks with the same identity.

    NCCL compares only GPUs on one host. If each process sets its own ``NCCL_HOSTID``, several ranks can share a GPU.
    """
    return f"{os.environ.get('NCCL_HOSTID', '')}/{torch.cuda.get_device_properties(gpu).uuid}"


def start_nccl(store: Any, rank: int, world_size: int, timeout_s: float) -> Any:
    """Return an NCCL backend that connects in the background, with calls that never block indefinitely."""
    # Torch's own watchdog ends the process when a peer is lost or an abort takes long: survivors are to continue.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")  # it asks the store each second, also of an aborted group
    # After an error the watchdog sleeps for four times as long, to let others dump, with a lock that calls need.
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "0")
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(_START_S))
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")  # connect while the group forms, not in its first collective
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    setattr(options.config, "blocking", 0)  # noqa: B010 - torch knows no other way
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


def connect_nccl(
    backend: Any, store: Any, device: torch.device, until_s: float, called_off: Callable[[], bool]
) -> None:
    """Connect the ranks of an NCCL backend without starting a collective, because the current group may be busy.

    Two communicators can deadlock if ranks start their collectives in different orders. The caller must therefore
    start the new group's first collective only after all ranks have left the current group in the same step.

    Args:
        store: Store that the backend was created with; it is kept alive while it is in use.

    Raises RuntimeError if a peer is gone, the deadline has passed, or the group is no longer wanted.
    """
    connecting = _Connecting(backend, store, device, until_s)
    while connecting.is_alive() and time.monotonic() < until_s and not called_off():
        connecting.join(_FORMING_POLL_S)
    if why := connecting.failure_or_stop():
        raise RuntimeError(why)


class _Connecting(threading.Thread):
    """Thread that connects a backend, and aborts it if that fails or the group is no longer wanted.

    If another thread aborted the backend during a call, it would free memory that the call still uses, since torch does
    not keep the two from running at once. This thread therefore aborts the backend itself, after the call has returned.
    """

    def __init__(self, backend: Any, store: Any, device: torch.device, until_s: float) -> None:
        super().__init__(name="nccl-connect", daemon=True)
        self._backend, self._store, self._device, self._until_s = backend, store, device, until_s
        self._failure = ""
        self._stopped = self._over = False
        self._deciding = threading.Lock()
        self.start()

    def failure_or_stop(self) -> str:
        """Return why connecting failed, empty if connected; if still connecting, stop and return that as the reason."""
        with self._deciding:
            self._stopped = not self._over
        if self._stopped:
            threading.Thread(target=self._watch, name="nccl-connect-watch", daemon=True).start()
        return self._failure or ("NCCL was not ready in time, or the group was called off" if self._stopped else "")

    def _watch(self) -> None:
        """Abort from this thread if the call never returns; torch's own timeout has long passed by then."""
        self.join(_ABORT_S)
        if self.is_alive():
            abort_nccl(self._backend)

    def run(self) -> None:
        """Connect, and abort the backend if connecting fails or the group is no longer wanted by then."""
        try:
            self._connect()
        except Exception as error:  # whatever it is, nobody else aborts the backend
            self._failure = first_line(error)
        with self._deciding:
            self._over = True
            unwanted = self._stopped or bool(self._failure)
        if unwanted:
            abort_nccl(self._backend)

    def _connect(self) -> None:
        """Connect; return early once stopped. Raises RuntimeError if a peer is gone, or the deadline has passed."""
        backend, rank = self._backend, self._backend.rank()
        backend.eager_connect_single_device(self._device)
        # A rank's copy to itself meets no peer, and starts when NCCL is ready: many ranks take long.
        mine, own = torch.ones(1, device=self._device), torch.zeros(1, device=self._device)
        copying = None
        while copying is None and not self._stopped:
            backend._start_coalescing()
            ready = False
            try:
                backend.send([mine], rank, 0)
                backend.recv([own], rank, 0)
                ready = True
            except RuntimeError as error:
                if "NCCL timeout" not in str(error) or time.monotonic() > self._until_s:
                    raise
            finally:
                ended = backend._end_coalescing()  # torch returns work here even if nothing was started
            copying = ended if ready else None
        while copying is not None and not copying.is_completed() and not self._stopped:
            time.sleep(CUDA_POLL_S)


def abort_nccl(backend: Any, calling: threading.RLock | None = None) -> None:
    """Abort an NCCL backend in a separate thread, and kill this process if the abort does not return.

    Otherwise the communicator's kernels would occupy the GPU forever. A killed process counts as lost. The backend and
    the tensors of its unfinished operations are freed after the abort, unless the caller keeps the backend.

    Args:
        calling: Lock that each call to the backend holds, because the abort frees memory that a call uses; None if
            no other thread calls the backend. A call that takes longer than NCCL's own timeout is not waited for.
    """
    returned = threading.Event()

    def abort() -> None:
        if calling is not None and calling.acquire(timeout=_START_S + 1.0):
            calling.release()  # the group is cancelled, so that no other call starts
        try:
            backend.abort()
        except RuntimeError as error:
            logger.warning("NCCL's abort: %s", error)
        finally:
            returned.set()

    def watch() -> None:
        if not returned.wait(_ABORT_S):
            logger.critical("NCCL's abort has not returned within %g s: this process ends, as a lost one", _ABORT_S)
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=abort, name="nccl-abort", daemon=True).start()
    threading.Thread(target=watch, name="nccl-abort-watch", daemon=True).start()


def has_run(works: Sequence[Any], voided: threading.Event, deadline: float) -> bool:
    """True if the operations have completed by the deadline and were not aborted.

    If a peer is gone, they never complete, although NCCL's ``wait`` returns: it only orders later work on the GPU.

    Args:
        voided: Set when the generation is cancelled, which ends the wait.
    """
    while not voided.is_set():
        if all(work.is_completed() for work in works):
            return not voided.is_set()
        if time.monotonic() > deadline:
            return False
        time.sleep(CUDA_POLL_S)
    return False
