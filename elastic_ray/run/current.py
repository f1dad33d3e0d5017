"""Session of the train loop running in this thread, and the exception that ends a worker's part in a job."""

from __future__ import annotations

import contextvars
import sys
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic_ray.session.session import Session

_session: contextvars.ContextVar[Session | None] = contextvars.ContextVar("elastic_ray_session", default=None)
_in_worker = False
_latest: weakref.ref[Session] | None = None  # of this process; its thread keeps it


def session_of_thread() -> Session | None:
    """Return the session of this thread's train loop; None if the thread has none.

    On a GPU, torch runs backward passes in its own threads, including hooks, ``autograd.Function.backward`` and
    recomputed forward passes. These threads belong to the run that was set last in this process.
    """
    session = _session.get()
    if session is None and _latest is not None and _is_thread_of_torch():
        return _latest()
    return session


def _is_thread_of_torch() -> bool:
    """True if torch is running a backward pass in this thread, and no Python code started the thread."""
    torch = sys.modules.get("torch")
    in_backward = torch is not None and torch._C._current_graph_task_id() != -1
    return in_backward and isinstance(threading.current_thread(), threading._DummyThread)


def replaced_error() -> RuntimeError:
    """Return the error to raise in a loop whose run was replaced by a later run in this process."""
    return RuntimeError(
        "AdaptiveDataParallel must wrap every model before the first epoch: wrapping another model since has "
        "started a new run in this process, so the earlier run's loop cannot continue"
    )


def set_session(session: Session | None) -> None:
    """Set (or, with None, clear) the session of this thread's train loop."""
    global _latest
    _session.set(session)
    _latest = weakref.ref(session) if session is not None else None


def set_worker_session(session: Session | None) -> None:
    """Set the session of a job's worker; no other thread in the worker's process may start a run."""
    global _in_worker
    set_session(session)
    _in_worker = session is not None


def in_worker() -> bool:
    """True while this process is running a job's train function."""
    return _in_worker


def check_thread() -> None:
    """Raise RuntimeError in a worker's thread without a session, because its call would have no effect."""
    if _in_worker and session_of_thread() is None:
        raise RuntimeError(
            f"elastic_ray was called in thread {threading.current_thread().name!r}, which does not belong to the job: "
            "call it in the train function's own thread, or start the other one with "
            "threading.Thread(target=contextvars.copy_context().run, args=(function,))"
        )


class WorkerDismissed(BaseException):
    """Exception that ends a worker's train function; ``stopped`` is True if the entire job ends."""

    def __init__(self, *, stopped: bool) -> None:
        super().__init__("stopped" if stopped else "left")
        self.stopped = stopped
