"""What jobs of a replayed trace tell beyond a live one, for policies that were published with it."""

from __future__ import annotations

import dataclasses

from placement.checks import check_number
from placement.cluster.jobs import JobView


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """Truth that no live job knows.

    Attributes:
        step_s: true seconds of one step at the requested batch on 1, 2, ... workers, each count on as few nodes
            as possible; it ends at the most workers that the batch can be split over.
        remaining_steps: optimizer steps at the requested batch from the end of the present epoch to the end of the
            last one; at least 1.
    """

    step_s: tuple[float, ...]
    remaining_steps: float

    def __post_init__(self) -> None:
        if not self.step_s or any(not step_s > 0 for step_s in self.step_s):
            raise ValueError(f"step_s must hold one time above 0 seconds or more, but got {self.step_s}")
        check_number("remaining_steps", self.remaining_steps, least=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceJobView(JobView):
    """A job of a trace.

    Attributes:
        oracle: what is true of it; None if it is to be measured.
        requested_workers: what its user asked for; a scheduler of rigid jobs gives exactly that or nothing.
    """

    oracle: Oracle | None = None
    requested_workers: int | None = None

    def __post_init__(self) -> None:
        JobView.__post_init__(self)  # super() does not see the class that slots made
        where = f"of job {self.job!r}"
        if self.requested_workers is not None:
            check_number(f"requested_workers {where}", self.requested_workers, least=1)


def oracle_of(view: JobView) -> Oracle | None:
    """What is true of the job; None of a live one."""
    return view.oracle if isinstance(view, TraceJobView) else None


def requested_workers(view: JobView) -> int | None:
    """The exact number that the job's user asked for; None of a live one, which is elastic."""
    return view.requested_workers if isinstance(view, TraceJobView) else None
