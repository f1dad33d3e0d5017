"""A worker's session, alone in its job."""

from __future__ import annotations

from typing import Any

from elastic_ray.communication.communicator import Communicator
from elastic_ray.membership.worker_side import WorkerMembership
from elastic_ray.run.current import set_session
from elastic_ray.session.session import Session
from elastic_ray.standalone.session import StandaloneController
from elastic_ray.state.resume_point import SavedState


def session_of(kept: dict[str, Any] | None = None) -> Session:
    """A worker's session, alone in its job."""

    def form(plan: Any, rank: int) -> Communicator:
        times = {"timeout_s": 10.0, "form_timeout_s": 10.0}
        return Communicator(None, "alone", rank=0, world_size=1, host="127.0.0.1", **times)

    saved = SavedState(states=kept) if kept is not None else None
    membership = WorkerMembership("0", form, lambda generation, cause: None)
    session = Session("0", membership, StandaloneController(1, membership.post), saved=saved, elastic=True)
    set_session(session)
    return session
