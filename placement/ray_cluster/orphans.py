"""SHELL: gives back what jobs have left whose controller is gone for good: placement groups, and notes.

Groups are detached, so that they outlive a controller that Ray restarts. A controller that ends releases its own, and
a worker that has lost its controller its own; what is left is a reservation that no process was told of. With its
notes in Ray's control store it is the same.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Mapping

import ray

from placement.ray_cluster import groups, notes

logger = logging.getLogger("placement.allocator")

_EVERY_S = 10.0
# A controller is restarted within seconds; one that is alive tells the allocator of its job every second.
_ORPHANED_S = 120.0
# Workers that have lost their controller save the job between two steps, write, and give back what they hold.
_SAVING_S = 60.0
_NOTES_EVERY_S = 300.0  # Ray is asked for each controller that has any


def orphaned(
    jobs: Mapping[str, str], known: Collection[str], since_s: dict[str, float], now_s: float
) -> tuple[str, ...]:
    """Groups whose job has been unknown for ``_ORPHANED_S`` (pure but for ``since_s``, which it keeps).

    Args:
        jobs: job of each group, by the group's id.
        known: jobs that the allocator has heard of.
        since_s: when each group was first seen without a known job [s].
        now_s: the time [s].
    """
    lost = {group for group, job in jobs.items() if job not in known}
    for group in tuple(since_s):
        if group not in lost:
            del since_s[group]
    for group in lost:
        since_s.setdefault(group, now_s)
    return tuple(sorted(group for group, first_s in since_s.items() if now_s - first_s > _ORPHANED_S))


def _controllers() -> int:
    """Controllers of jobs and trials that Ray knows, restarting ones among them. Blocks for some milliseconds."""
    return sum(str(named["name"]).startswith("job:") for named in ray.util.list_named_actors(all_namespaces=True))


class Orphans:
    """Looks for such groups every few seconds, and for such notes at first, every few minutes, and with cause."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}
        self._looked_s = self._looked_for_notes_s = -math.inf

    async def release(self, job: str) -> None:
        """Release what a job still has a minute after its controller was found to be gone for good."""
        self._looked_for_notes_s = -math.inf
        try:
            left = [group for group, owner in (await asyncio.to_thread(groups.of_jobs)).items() if owner == job]
            await asyncio.sleep(_SAVING_S)  # a job of that name may run anew by then, in groups of its own
            for group in left:
                await asyncio.to_thread(groups.release, groups.find(group))
        except Exception as error:  # they are found again before long
            logger.warning("the placement groups of job %s were not released: %s", job, error)

    async def look(self, known: Collection[str], now_s: float) -> None:
        """Release what has had no job for long, and delete the notes of controllers that are dead.

        Args:
            known: jobs that the allocator has heard of.
            now_s: the time [s, monotonic].
        """
        if now_s - self._looked_s < _EVERY_S:
            return
        self._looked_s = now_s
        await self._look_for_notes(now_s)
        try:
            jobs = await asyncio.to_thread(groups.of_jobs)
            found = orphaned(jobs, known, self._since_s, now_s)
            if found and await asyncio.to_thread(_controllers) > len(known):
                return  # a controller that is alive and silent may have them
            for group in found:
                logger.warning("the placement group of job %s is released: its controller is gone", jobs[group])
                await asyncio.to_thread(groups.release, groups.find(group))
        except Exception as error:  # the control store may be away for a moment
            logger.warning("placement groups could not be looked at: %s", error)

    async def _look_for_notes(self, now_s: float) -> None:
        """Delete the notes of dead controllers, once in ``_NOTES_EVERY_S`` at most; a failure is only logged."""
        if now_s - self._looked_for_notes_s < _NOTES_EVERY_S:
            return
        self._looked_for_notes_s = now_s
        try:
            for controller in await asyncio.to_thread(notes.delete_orphaned):
                logger.info("the notes of controller %s are deleted: it is gone", controller)
        except Exception as error:  # they are found another time
            logger.warning("notes of controllers could not be looked at: %s", error)
