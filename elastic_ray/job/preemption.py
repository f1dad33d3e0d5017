"""Preemption of a job, from an allocation without nodes until the save (pure; times are arguments)."""

from __future__ import annotations

from collections.abc import Collection

from elastic_ray.membership.signals import Allocated

_REMIND_S = 1.0  # a message may be lost with a rerun; the same one again changes nothing


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
