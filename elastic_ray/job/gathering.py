"""SHELL: a restarted controller waits until the workers of the one before have told it who they are."""

from __future__ import annotations

import asyncio
import logging
import time

import ray

from elastic_ray.job.journal import Noted
from elastic_ray.job.messages import Introduction
from placement.actor import NAMESPACE

logger = logging.getLogger("elastic_ray.job")

_POLL_S = 0.05
_LOOK_S = 0.5  # between two questions whether the silent are alive
_SILENT_S = 3.0  # a lent process, which Ray cannot be asked about, counts as lost after this
_STARVED_S = 20.0  # and one that is known to be alive, and may be busy, after this


class Gathering:
    """Introductions so far; the latest of each worker counts, for training goes on meanwhile.

    Args:
        noted: what the controller before has noted down.
    """

    def __init__(self, noted: Noted) -> None:
        self._processes = dict(noted.processes)
        self._told: dict[str, Introduction] = {}

    def hear(self, told: Introduction) -> None:
        """A worker introduces itself."""
        self._told[told.worker] = told
        for member in told.plan.members if told.plan is not None else ():
            self._processes.setdefault(member.worker, "")

    async def complete(self) -> tuple[Introduction, ...]:
        """Everybody who lives."""
        begin_s = time.monotonic()
        looked_s = 0.0
        while missing := self._processes.keys() - self._told.keys():
            now_s = time.monotonic()
            if now_s - looked_s > _LOOK_S:
                looked_s = now_s
                gone = await asyncio.to_thread(self._gone, sorted(missing))
                for worker in gone:
                    del self._processes[worker]
            waited_s = time.monotonic() - begin_s
            if waited_s > _STARVED_S or (waited_s > _SILENT_S and not any(self._processes.get(w) for w in missing)):
                break
            await asyncio.sleep(_POLL_S)
        return tuple(self._told.values())

    def _gone(self, workers: list[str]) -> list[str]:
        """Those whose process Ray knows to be dead."""
        return [worker for worker in workers if (name := self._processes[worker]) and not _lives(name)]


def _lives(process: str) -> bool:
    try:
        ray.get_actor(process, namespace=NAMESPACE)
    except ValueError:
        return False
    except Exception as error:  # the control store does not answer: nobody knows
        logger.info("process %s could not be looked up: %s", process, error)
    return True
