"""How the train function of a worker ends whose part in the job is over."""

from __future__ import annotations


class WorkerDismissed(BaseException):
    """This worker's part in the job is over; ``stopped`` when the whole job is."""

    def __init__(self, *, stopped: bool) -> None:
        super().__init__("stopped" if stopped else "left")
        self.stopped = stopped
