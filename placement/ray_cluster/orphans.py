"""SHELL: gives back what jobs have left whose controller is gone for good: placement groups, and notes.

Groups are detached, so that they outlive a controller that Ray restarts. A controller that ends releases its own, and
a worker that has lost its controller saves the job first and then gives back its own. What is left is a reservation
whose process is dead, or that was reported to no process. With its notes in Ray's control store it is the same.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Collection, Mapping

from placement.ray_cluster import groups, notes
from placement.ray_cluster.named_actors import names_of_actors

logger = logging.getLogger("placement.allocator")

_EVERY_S = 10.0
# A controller is restarted within seconds; one that is alive tells the allocator of its job every second.
_ORPHANED_S = 120.0
_LOOK_S = 0.5
_NOTES_EVERY_S = 300.0  # Ray is asked for each controller that has any


def orphaned(
    holders: Mapping[str, bool | None], since_s: dict[str, float], now_s: float, timeout_s: float
) -> tuple[str, ...]:
    """Groups to release of jobs that the allocator does not know (pure but for ``since_s``, which it keeps).

    One whose process is dead serves nobody any more, one that no process holds after ``_ORPHANED_S`` neither.

    Args:
        holders: whether each group's process lives; None where none holds it.
        since_s: when each group was first seen without a known job [s].
        now_s: the time [s].
        timeout_s: for how long a process that lives keeps its group [s].
    """
    for group in since_s.keys() - holders.keys():
        del since_s[group]
    for group in holders:
        since_s.setdefault(group, now_s)
    kept_s = {True: timeout_s, False: -1.0, None: _ORPHANED_S}
    return tuple(sorted(group for group, lives in holders.items() if now_s - since_s[group] > kept_s[lives]))


def _holders(left: Collection[str]) -> dict[str, bool | None]:
    """Return for each group whether its process lives. Blocks for some milliseconds a group."""
    return {group: groups.holder_lives(group) for group in left}


async def _release(group_id: str) -> None:
    group = groups.find(group_id)
    await groups.ready(group, groups.WITHDRAWN_S)
    await asyncio.to_thread(groups.release, group)


def _controllers() -> int:
    """Controllers of jobs and trials that Ray knows, restarting ones among them. Blocks for some milliseconds."""
    return len(names_of_actors("job:"))


class Orphans:
    """Looks for such groups every few seconds, and for such notes at first, every few minutes, and with cause.

    Args:
        timeout_s: for how long a process without a controller, which may be saving the job, keeps its group [s].
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since_s: dict[str, float] = {}
        self._looked_s = self._looked_for_notes_s = -math.inf

    async def release(self, job: str) -> None:
        """Release what a job has whose controller is gone for good: each group once its process is gone as well."""
        self._looked_for_notes_s = -math.inf
        until_s = time.monotonic() + self._timeout_s
        try:
            # Once: a job of that name may run anew before long, in groups of its own.
            left = {group for group, owner in (await asyncio.to_thread(groups.of_jobs)).items() if owner == job}
            while left:
                holders = await asyncio.to_thread(_holders, left)
                held = {group for group, lives in holders.items() if lives and time.monotonic() < until_s}
                await asyncio.gather(*map(_release, left - held))
                left = held
                await asyncio.sleep(_LOOK_S if left else 0.0)
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
            holders = await asyncio.to_thread(_holders, [group for group, job in jobs.items() if job not in known])
            found = orphaned(holders, self._since_s, now_s, self._timeout_s)
            if found and await asyncio.to_thread(_controllers) > len(known):
                return  # a controller that is alive and silent may have them
            for group in found:
                logger.warning("the placement group of job %s is released: its controller is gone", jobs[group])
                await _release(group)
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
