"""SHELL: the cluster's pool of warm worker processes, as one named, detached, restartable actor.

A new process needs seconds to import torch. A process of the pool has already done so and has not run anything
else; it is given to one job or sweep, which ends it after use. The pool only keeps records and decides. Jobs'
controllers start the processes, because an actor inherits the Ray job and the runtime environment of the process
that starts it. The processes are detached actors with descriptive names, so that a restarted pool can find those
without an owner.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import secrets
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from elastic_ray.background import Background
from elastic_ray.warm_pool.sizing import (
    End,
    PoolConfig,
    PooledProcess,
    PoolNode,
    ProcessRequest,
    Start,
    plan,
    read_config,
    remember,
)
from placement.ray_cluster.named_actors import actors_named, create_on_head, find_actor
from placement.ray_cluster.snapshot import read_nodes
from placement.text import log_plainly

NAME = "warm-pool"
CONTROLLERS = "warm-controller/"
"""How names of controllers begin that were started before their job."""

logger = logging.getLogger("elastic_ray.pool")

_LOOK_S = 1.0
_ROUNDS_PER_CALL = 5  # idle processes are asked whether they live in every fifth round
_ANSWER_S = 10.0
_START_S = 120.0  # a process has so long to import everything
_ORDER_S = 20.0  # a controller has so long to start what it was told to
_COLD_S = 30.0  # nothing is started on a node for so long after a process failed there
_FIRST_S = 30.0  # within this time after its start the first controller asks


def find_pool() -> Any | None:
    """Return the cluster's pool, or None if it does not exist. Blocks briefly."""
    return find_actor(NAME)


def get_or_create_pool() -> Any:
    """Return the cluster's pool, creating it on the head node if necessary. Blocks briefly."""
    return create_on_head(WarmPool, NAME, get_if_exists=True, max_restarts=-1)


@dataclasses.dataclass(slots=True, kw_only=True)
class _PoolEntry:
    """Entry for an unclaimed process; ``actor`` is None until a controller starts it, at the latest at ``until_s``."""

    process: PooledProcess
    actor: Any = None
    until_s: float = 0.0


class WarmPool:
    """Actor class of the pool. Call :func:`get_or_create_pool` to get the actor."""

    def __init__(self) -> None:
        log_plainly(logging.WARNING)
        self._config: PoolConfig = read_config(os.environ)
        self._entries: dict[str, _PoolEntry] = {}
        self._requests: dict[str, ProcessRequest] = {}
        self._busy: dict[tuple[str, str], float] = {}
        self._nodes: tuple[PoolNode, ...] = ()
        self._background = Background()
        self._since_s = time.monotonic()
        self._handle = ray.get_runtime_context().current_actor
        self._found = asyncio.get_event_loop().create_task(self._find_again())
        self._main = asyncio.get_event_loop().create_task(self._watch())

    async def hand_out(self, job: str, environment: str, node: str, *, starting: bool) -> tuple[Any, bool, str] | None:
        """Remove a process from the pool, and return its handle, whether it is ready, and its name; None if none fits.

        The caller must claim the process before using it.

        Args:
            job: Job or sweep of the caller. For a new job, the pool starts no other process on the node for a while.
        """
        await self._found
        if job not in self._requests:
            self._busy[node, job] = time.monotonic() + self._config.quiet_s
        for ready in (True, False) if starting else (True,):
            for name, entry in self._entries.items():
                process = entry.process
                fits = (process.node, process.environment, process.ready) == (node, environment, ready)
                if fits and entry.actor is not None:
                    del self._entries[name]
                    return entry.actor, ready, name
        return None

    async def order(
        self, job: str, environment: str, nodes: Mapping[str, int], *, first: bool = False, over: bool = False
    ) -> tuple[tuple[tuple[str, str], ...], dict[str, Any]]:
        """Record how many processes a job would use on each node, and return the processes to start.

        Args:
            nodes: Number of processes that the job has and may need again, keyed by node.

        Returns the name and node of each process that the caller must start now, and, keyed by node, a process that
        can check other processes there.
        """
        await self._found
        now_s = time.monotonic()
        before = self._requests.get(job)
        since_s = before.since_s if before is not None and before.environment == environment else now_s
        self._requests[job] = ProcessRequest(
            job=job, environment=environment, nodes=dict(nodes), since_s=since_s, asked_s=now_s, over=over
        )
        if over:  # the node idles, until the next job begins
            self._busy = {(node, whose): until for (node, whose), until in self._busy.items() if whose != job}
        elif first:  # its first epochs have begun, which imports beside them would slow
            self._busy |= {(node, job): now_s + self._config.quiet_s for node in nodes}
        if not self._nodes:
            await self._poll()
        starts = self._decide(environment)
        while over and (more := self._decide(environment, one_by_one=False)):  # no job asks for this one any more
            starts += more
        witnesses = {each.process.node: each.actor for each in self._entries.values() if each.process.ready}
        return tuple(starts), witnesses

    async def started(self, name: str, actor: Any) -> None:
        """Record a process that a controller started at the pool's request; end the process if that was too late."""
        entry = self._entries.get(name)
        if entry is None:  # too late
            ray.kill(actor)
            return
        entry.actor = actor
        self._background.start(self._await_ready(entry))

    async def processes(self) -> tuple[PooledProcess, ...]:
        """Return the processes currently in the pool."""
        await self._found
        return tuple(each.process for each in self._entries.values())

    def _decide(self, environment: str = "", *, one_by_one: bool = True) -> list[tuple[str, str]]:
        """End surplus processes; record and return the processes that the calling controller must start."""
        now_s = time.monotonic()
        busy: dict[str, float] = {}
        for (node, _), until_s in self._busy.items():
            busy[node] = max(busy.get(node, 0.0), until_s)
        processes = [each.process for each in self._entries.values()]
        if not one_by_one:
            processes = [dataclasses.replace(each, ready=True) for each in processes]
        starts: list[tuple[str, str]] = []
        requests = tuple(self._requests.values())
        decided = plan(self._config, nodes=self._nodes, processes=processes, requests=requests, busy=busy, now_s=now_s)
        for each in decided:
            match each:
                case End(name=name, reason=reason):
                    self._end(name, reason)
                case Start(node=node, reason=reason) if each.environment == environment:
                    name = f"{NAME}/{environment}/{node}/{secrets.token_hex(4)}"
                    process = PooledProcess(name=name, node=node, environment=environment, ready=False)
                    self._entries[name] = _PoolEntry(process=process, until_s=now_s + _ORDER_S)
                    logger.debug("warm pool: one more on node %s: %s", node[:8], reason)
                    starts.append((name, node))
        return starts

    def _end(self, name: str, reason: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            logger.debug("warm pool: one less on node %s: %s", entry.process.node[:8], reason)
            if entry.actor is not None:
                ray.kill(entry.actor)

    async def _watch(self) -> None:
        """Check nodes and processes regularly, and end the pool when no jobs or processes are left."""
        await self._found
        rounds = 0
        while True:
            await asyncio.sleep(_LOOK_S)
            rounds += 1
            try:
                await self._poll()
                self._decide()
            except Exception:
                logger.exception("a round of the warm pool failed; the next one follows in %g s", _LOOK_S)
            if rounds % _ROUNDS_PER_CALL == 0:
                for entry in [each for each in self._entries.values() if each.process.ready]:
                    self._background.start(self._ask(entry, _ANSWER_S))
            now_s = time.monotonic()
            self._requests = {each.job: each for each in remember(self._config, self._requests.values(), now_s)}
            self._busy = {key: until_s for key, until_s in self._busy.items() if until_s > now_s}
            if not self._requests and not self._entries and now_s > self._since_s + _FIRST_S:
                logger.debug("warm pool: no job for %g s, so it ends", self._config.idle_s)
                ray.kill(self._handle)

    async def _poll(self) -> None:
        """Update the list of nodes, and drop processes that their controllers have not started in time."""
        nodes = await asyncio.wait_for(asyncio.to_thread(read_nodes), _ANSWER_S)
        self._nodes = tuple(
            PoolNode(node=node.node_id, memory_bytes=node.total.get("memory"), draining=node.draining) for node in nodes
        )
        now_s = time.monotonic()
        for name, entry in list(self._entries.items()):
            if entry.actor is None and now_s > entry.until_s:
                self._end(name, "its controller has not started it")

    async def _await_ready(self, entry: _PoolEntry) -> None:
        if await self._ask(entry, _START_S):
            entry.process = dataclasses.replace(entry.process, ready=True)

    async def _ask(self, entry: _PoolEntry, timeout_s: float) -> bool:
        """True if a process answers and is unclaimed; any other process is dropped from the pool."""
        name = entry.process.name
        try:
            memory = await asyncio.wait_for(entry.actor.memory_bytes.remote(), timeout_s)
        except (RayError, asyncio.TimeoutError) as error:
            if name in self._entries:
                self._busy[entry.process.node, name] = time.monotonic() + _COLD_S
                self._end(name, f"it is not well: {error!r}".split("\n", 1)[0])
            return False
        if memory is None:
            self._entries.pop(name, None)
            return False
        entry.process = dataclasses.replace(entry.process, memory_bytes=memory)
        return True

    async def _find_again(self) -> None:
        """Recover the processes of an earlier pool."""
        try:
            earlier = await asyncio.to_thread(lambda: list(actors_named(f"{NAME}/")))
        except Exception as error:  # those that are not found end themselves before long
            logger.warning("processes of an earlier pool were not looked for: %r", error)
            return
        for name, actor in earlier:
            _, environment, node, _ = name.split("/")
            process = PooledProcess(name=name, node=node, environment=environment, ready=True)
            self._entries[name] = _PoolEntry(process=process, actor=actor)
        await asyncio.gather(*(self._ask(entry, _ANSWER_S) for entry in list(self._entries.values())))
