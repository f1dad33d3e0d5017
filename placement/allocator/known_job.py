"""What the allocator's core remembers of one job."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from placement.cluster.jobs import JobView


@dataclasses.dataclass(slots=True, kw_only=True)
class KnownJob:
    """Soft state about one job; the controller's next heartbeat could rebuild all of it. Only it changes itself.

    Attributes:
        view: the last heartbeat's.
        decided_on: the view that the last decision saw; news is what differs from it.
        target: workers by node id that it is to have.
        reason: why, a sentence.
        heard_s: when it was last heard of [s], by the clock for intervals, as all times here.
        swayed_s: when measured speeds alone changed its size last [s].
        impossible_since_s: since when no node could hold it [s]; None if some could.
        told_impossible: whether it was told so.
    """

    view: JobView
    decided_on: JobView
    target: Mapping[str, int]
    reason: str
    heard_s: float
    swayed_s: float = -math.inf
    impossible_since_s: float | None = None
    told_impossible: bool = False

    @classmethod
    def arrived(cls, view: JobView, now_s: float) -> KnownJob:
        """One that was not known before."""
        reason = "keeps the workers that it came with" if view.allocation else "has just arrived"
        return cls(view=view, decided_on=view, target=dict(view.allocation), reason=reason, heard_s=now_s)

    @property
    def waits(self) -> bool:
        """True if it has no workers and would take some."""
        return not self.target and not self.view.paused

    def hear(self, view: JobView, now_s: float) -> None:
        """A heartbeat."""
        self.view, self.heard_s = view, now_s

    def excuse(self, now_s: float) -> None:
        """Its silence until then was not its own."""
        self.heard_s = now_s

    def decided(self) -> None:
        """A decision sees the job as it is now."""
        self.decided_on = self.view

    def give(self, target: Mapping[str, int]) -> None:
        """It is to have these workers."""
        self.target = target

    def swayed(self, now_s: float) -> None:
        """Measured speeds alone have changed its size."""
        self.swayed_s = now_s

    def explain(self, reason: str) -> None:
        """Why it has what it has."""
        self.reason = reason

    def judge(self, impossible: str | None, now_s: float) -> bool:
        """Whether some node could hold it again, given why none could (None if some could)."""
        if impossible is not None:
            self.reason = impossible
            self.impossible_since_s = now_s if self.impossible_since_s is None else self.impossible_since_s
            return False
        again = self.impossible_since_s is not None
        self.impossible_since_s, self.told_impossible = None, self.told_impossible and not again
        return again

    def tell_impossible(self, now_s: float, after_s: float) -> bool:
        """Whether it is to be told now that no node could hold it: once, and only after so long."""
        since_s = self.impossible_since_s
        if since_s is None or self.told_impossible or now_s - since_s < after_s:
            return False
        self.told_impossible = True
        return True
