"""SHELL: changes of the batch while a group trains: fits beside the loop, and what is told to rank 0."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.batch.tuner import TunerSnapshot, fit_snapshot
from elastic_ray.events import EventKind
from elastic_ray.job.context import JobContext
from elastic_ray.membership.messages import BatchProposal
from placement.knowledge.knowledge import Prior


class BatchChanges:
    """Fits the planner's model, and carries out what it then chooses."""

    def __init__(self, parts: JobContext) -> None:
        self._planner, self._group = parts.planner, parts.group
        self._record, self._background, self._events = parts.record, parts.background, parts.events

    def tick(self, now_s: float) -> None:
        """Start a fit if one is due; called about ten times a second with the monotonic time [s]."""
        snapshot = self._planner.due(now_s)
        if snapshot is not None:
            self._background.start(self._fit(snapshot))

    async def _fit(self, snapshot: TunerSnapshot) -> None:
        self._carry_out(self._planner.fitted(await asyncio.to_thread(fit_snapshot, snapshot)))
        if notice := self._planner.take_notice():
            self._events.note(EventKind.BATCH_KEPT, notice)

    def advise(self, priors: Mapping[str, Prior]) -> None:
        """Receive what other jobs have measured, by GPU type."""
        self._carry_out(self._planner.advise(priors))

    def _carry_out(self, change: tuple[BatchChoice, str] | None) -> None:
        """Notify rank 0, unless the group is about to be another one, whose batch is chosen with it."""
        current = self._group.machine.current
        if change is not None and current is not None and self._group.machine.in_flight is None:
            choice, reason = change
            self._record.batch_chosen(reason)
            self._group.actors.post(
                [current.members[0].worker], BatchProposal(generation=current.generation, batch=choice)
            )
