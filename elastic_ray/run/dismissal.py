"""Dismissal of a worker: how its train function ends once its part in the job is over."""

from __future__ import annotations


class WorkerDismissed(BaseException):
    """Exception that ends a worker's train function; ``stopped`` if the whole job ends."""

    def __init__(self, *, stopped: bool) -> None:
        super().__init__("stopped" if stopped else "left")
        self.stopped = stopped
