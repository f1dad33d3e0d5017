"""Ways off nodes: preemption of a job until its save, and times to leave nodes that go (pure; times are arguments)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from elastic_ray.membership.signals import Allocated

_REMIND_S = 1.0  # a message may be lost with a rerun; the same one again changes nothing
_LEAST_MARGIN_S = 10.0


def leave_times(left_s: Mapping[str, float], now_s: float, *, change_s: float, step_s: float) -> dict[str, float]:
    """Return the time at which a job must start to leave each node that is about to go, in time for one change.

    Args:
        left_s: Time until each node goes [s]; 0 if unknown.
        change_s: Longest planned change of the group so far [s]; 0 before the first.
        step_s: Duration of a step [s], as a change waits for the end of one or two; 0 if unknown.
    """
    margin_s = max(_LEAST_MARGIN_S, 2 * change_s, 4 * step_s)
    return {node: now_s + left - margin_s for node, left in left_s.items()}


def save_time(then: Allocated, places: Collection[str], *, write_s: float | None) -> float:
    """Return the time at which a job that leaves all its nodes must be saved; -inf if waiting for others gains nothing.

    A job may train on if all its workers are on nodes that go, as nobody else can use those, and other nodes are there
    or may come in their place. By then its workers there may not be ready.

    Args:
        places: Places of the job's workers.
        write_s: Longest time that one of the job's automatic checkpoints took [s]; None before the first.
    """
    others = then.nodes or then.nodes_may_come
    if not others or write_s is None or not places or not set(places) <= then.draining.keys():
        return -math.inf
    return min(then.draining[place] for place in places) - 2 * write_s


class Preemption:
    """Preemption of a job, from the decision to free its nodes until rank 0 has saved it, or no rank can save it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._then: Allocated | None = None
        self._since_s = self._reminded_s = 0.0
        self.reason = ""

    @property
    def active(self) -> bool:
        """True if the job is being preempted."""
        return self._then is not None

    def start(self, then: Allocated, now_s: float) -> None:
        """Start preempting the job; ``then`` is the allocation to apply once the job is saved."""
        self._then, self.reason = then, then.reason
        self._since_s, self._reminded_s = now_s, float("-inf")

    def adapt(self, then: Allocated) -> None:
        """Replace the allocation to apply after the save; the save still happens, as ranks may already have stopped."""
        self._then = then

    def remind(self, now_s: float) -> bool:
        """True if the request to save must be sent (again) to the workers now; it then counts as sent."""
        due = self.active and now_s - self._reminded_s >= _REMIND_S
        if due:
            self._reminded_s = now_s
        return due

    def failed(self, now_s: float, training: Collection[str]) -> str:
        """Return the reason why no rank will save the job; empty while any rank may still save it.

        Args:
            training: Members that have not stopped yet; includes rank 0 until it has saved.
        """
        if not self.active:
            return ""
        if not training:
            return "the worker that was to save it was lost"
        if now_s - self._since_s > self._timeout_s:
            return f"no step ended, or it was not saved, within join_timeout_s={self._timeout_s:g}"
        return ""

    def lasted_s(self, now_s: float) -> float:
        """Return the duration of the preemption so far [s]."""
        return now_s - self._since_s

    def end(self) -> Allocated | None:
        """End the preemption and return the allocation to apply; None if no preemption was active."""
        then, self._then = self._then, None
        return then
