"""SHELL: client that gives a controller or a sweep access to the cluster's pool of warm worker processes."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

import elastic_ray
import placement
from elastic_ray.warm_pool.pool import find_pool, get_or_create_pool
from elastic_ray.warm_pool.sizing import read_config
from elastic_ray.worker.setup import ProcessOwner

logger = logging.getLogger(__name__)

_ORDER_S = 15.0  # no job waits for it, and the pool itself may only be starting
_CLAIM_S = 3.0
_ANSWER_S = 2.0  # a cold process takes not much longer than waiting for a pool that does not answer


class PoolClient:
    """Client for the pool of warm processes: claims processes, and starts new ones when the pool requests it."""

    def __init__(self, owner: ProcessOwner, environment: Mapping[str, Any], start: Callable[[str, str], Any]) -> None:
        self.on = read_config(os.environ).on
        self._owner, self._start = owner, start
        self._environment = environment_key(environment) if self.on else ""
        self._asked = False
        self._witnesses: dict[str, Any] = {}

    async def take(self, node: str, *, starting: bool = True) -> tuple[Any, str] | None:
        """Claim a warm (pre-started) process on a node, and return it with its name; None if none is available."""
        while self.on:
            try:
                pool = await asyncio.to_thread(find_pool)
                if pool is None:
                    return None
                asked = pool.hand_out.remote(self._owner.holder, self._environment, node, starting=starting)
                handed = await asyncio.wait_for(asked, _ANSWER_S)
            except (RayError, asyncio.TimeoutError) as error:
                logger.info("%s: the pool of warm processes does not answer: %r", self._owner.holder, error)
                return None
            if handed is None:
                return None
            actor, ready, name = handed
            if await self._claim(actor, ready=ready):
                return actor, name
        return None

    async def _claim(self, actor: Any, *, ready: bool) -> bool:
        """Claim a process for the owner; return True on success."""
        claim = actor.claim.remote(self._owner)
        try:
            return bool(await (asyncio.wait_for(claim, _CLAIM_S) if ready else claim))
        except RayError:
            return False
        except (asyncio.TimeoutError, asyncio.CancelledError) as error:
            actor.leave.remote(self._owner.holder)  # not killed: it may belong to another by now
            if isinstance(error, asyncio.CancelledError):
                raise
            return False

    async def order(self, nodes: Mapping[str, int], *, over: bool = False) -> None:
        """Report the number of processes wanted per node (``over``: the owner has ended), and start requested ones."""
        if not self.on or not (nodes or over):
            return
        try:
            pool = await asyncio.to_thread(find_pool if over else get_or_create_pool)
            if pool is None:
                return
            first, self._asked = not self._asked, True
            asked = pool.order.remote(self._owner.holder, self._environment, dict(nodes), first=first, over=over)
            starts, self._witnesses = await asyncio.wait_for(asked, _ORDER_S)
            for name, node in starts:
                pool.started.remote(name, self._start(node, name))
        except (RayError, asyncio.TimeoutError, ValueError) as error:
            logger.info("%s: the pool of warm processes does not answer: %r", self._owner.holder, error)

    def witness(self, node: str) -> Any | None:
        """Return a pool process that can check whether other processes on the node run; None if no process can."""
        return self._witnesses.get(node)


def environment_key(environment: Mapping[str, Any]) -> str:
    """Return a key that is equal for processes with the same runtime environment and version of this package."""
    inherited = ray.get_runtime_context().get_runtime_env_string()  # type: ignore[no-untyped-call]
    text = json.dumps([json.loads(inherited or "{}"), environment, _code()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def _code() -> tuple[str, int]:
    """Return this package's path and last modification time, because developers may edit it on a live cluster."""
    folders = [Path(str(package.__file__)).parent for package in (elastic_ray, placement)]
    changed = max(path.stat().st_mtime_ns for folder in folders for path in folder.rglob("*.py"))
    return str(folders[0]), changed
