"""What a watch over stragglers is told: the members of a group, and what they have measured of its steps (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from elastic_ray.monitoring.measures import WorkerMeasures


class Tell(Protocol):
    """Tells the job's user something."""

    def __call__(self, text: str, detail: Mapping[str, Any]) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecentSteps:
    """Sums over the latest steps, as long as they are short.

    Attributes:
        work: samples of each rank.
        busy_s: time of each rank until its gradients were complete [s].
        data_s: the part of it that was waiting for data [s].
        faults: pages that each rank fetched from a disk.
        sending_s: time in which each rank was sending [s].
        mib: what each rank handed to collectives [MiB].
        seconds: of the steps, by the slowest rank's clock [s].
    """

    work: list[float] = dataclasses.field(default_factory=list)
    busy_s: list[float] = dataclasses.field(default_factory=list)
    data_s: list[float] = dataclasses.field(default_factory=list)
    faults: list[float] = dataclasses.field(default_factory=list)
    sending_s: list[float] = dataclasses.field(default_factory=list)
    mib: list[float] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def plus(self, sizes: Sequence[Sequence[float]], measured: Sequence[WorkerMeasures]) -> RecentSteps:
        """The same with another step."""
        return RecentSteps(
            work=_added(self.work, [sum(row) for row in sizes]),
            busy_s=_added(self.busy_s, [each.compute_s + each.data_s for each in measured]),
            data_s=_added(self.data_s, [each.data_s for each in measured]),
            faults=_added(self.faults, [each.major_faults for each in measured]),
            sending_s=_added(self.sending_s, [each.sending_s for each in measured]),
            mib=_added(self.mib, [each.wire_mib for each in measured]),
            seconds=self.seconds + max([each.step_s for each in measured]),
        )


def _added(before: Sequence[float], now: Sequence[float]) -> list[float]:
    return [old + new for old, new in zip(before, now, strict=True)] if before else list(now)
