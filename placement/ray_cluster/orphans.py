"""SHELL: release of placement groups and notes left behind by jobs whose controller is gone.

Groups are detached, so they outlive a controller that Ray restarts. A controller that ends releases its own groups, and
a worker that has lost its controller first saves the job and then releases its group. This leaves reservations whose
process is dead, and those that were never assigned to a process. Notes in Ray's control store can be left behind in the
same way.
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
    """Return the placement groups to release, out of those whose job the allocator does not know.

    A group is released at once if its process is dead, and after ``_ORPHANED_S`` if no process holds it. Pure, except
    that ``since_s`` is updated.
    """
    for group in since_s.keys() - holders.keys():
        del since_s[group]
    for group in holders:
        since_s.setdefault(group, now_s)
    kept_s = {True: timeout_s, False: -1.0, None: _ORPHANED_S}
    return tuple(sorted(group for group, lives in holders.items() if now_s - since_s[group] > kept_s[lives]))


def _holders(left: Collection[str]) -> dict[str, bool | None]:
    """Return, for each group, whether its process is alive. Blocks for some milliseconds per group."""
    return {group: groups.holder_lives(group) for group in left}


async def _release(group_id: str) -> None:
    group = groups.find(group_id)
    await groups.ready(group, groups.WITHDRAWN_S)
    await asyncio.to_thread(groups.release, group)


class Orphans:
    """Periodic search for orphaned groups (every few seconds) and orphaned notes (every few minutes, or on demand)."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since_s: dict[str, float] = {}
        self._looked_s = self._looked_for_notes_s = -math.inf

    async def release(self, job: str) -> None:
        """Release the groups of a job whose controller is gone for good, each after its process has ended."""
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

    async def poll(self, known: Collection[str], now_s: float) -> None:
        """Release groups that have long had no known job, and delete notes of dead controllers."""
        if now_s - self._looked_s < _EVERY_S:
            return
        self._looked_s = now_s
        await self._find_notes(now_s)
        try:
            jobs = await asyncio.to_thread(groups.of_jobs)
            holders = await asyncio.to_thread(_holders, [group for group, job in jobs.items() if job not in known])
            found = orphaned(holders, self._since_s, now_s, self._timeout_s)
            if found and len(await asyncio.to_thread(names_of_actors, "job:")) > len(known):
                return  # a controller that is alive and silent, or restarting, may have them
            for group in found:
                logger.warning("the placement group of job %s is released: its controller is gone", jobs[group])
                await _release(group)
        except Exception as error:  # the control store may be away for a moment
            logger.warning("placement groups could not be looked at: %s", error)

    async def _find_notes(self, now_s: float) -> None:
        """Delete the notes of dead controllers, at most once every ``_NOTES_EVERY_S``; errors are only logged."""
        if now_s - self._looked_for_notes_s < _NOTES_EVERY_S:
            return
        self._looked_for_notes_s = now_s
        try:
            for controller in await asyncio.to_thread(notes.delete_orphaned):
                logger.info("the notes of controller %s are deleted: it is gone", controller)
        except Exception as error:  # they are found another time
            logger.warning("notes of controllers could not be looked at: %s", error)
