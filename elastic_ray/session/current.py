"""The session of the train loop that runs in this thread."""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic_ray.session.session import Session

_session: contextvars.ContextVar[Session | None] = contextvars.ContextVar("elastic_ray_session", default=None)


def session_of_thread() -> Session | None:
    """The session of this thread's train loop; None where nothing has asked for one."""
    return _session.get()


def check_present(session: object) -> None:
    """Raise RuntimeError if a later run of this process has taken the place of this one."""
    present = _session.get()
    if present is not None and present is not session:
        raise RuntimeError(
            "AdaptiveDataParallel must wrap every model before the first epoch: a model that was wrapped since has "
            "begun another run of this process, so the loop of the run before cannot go on"
        )


def set_session(session: Session | None) -> None:
    """Set (or forget) the session of this thread's train loop."""
    _session.set(session)
