"""Shell: the allocator as one named, detached, restartable actor per Ray cluster.

It keeps the clock, reads Ray's nodes, feeds ``AllocatorCore``, logs its decisions and carries its
instructions to the jobs' controllers. It owns no resources: groups and workers belong to the controllers.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from placement.cluster import Cluster
from placement.core import AllocatorConfig, AllocatorCore
from placement.events import (
    Allocate,
    CoreSnapshot,
    DecisionRecord,
    Event,
    Instruction,
    JobEnded,
    JobHeartbeat,
    NodesChanged,
    Tick,
)
from placement.jobs import JobView
from placement.policies import Policy, make_policy
from placement.snapshot import RawNode, head_node_id, read_nodes, usable

NAME = "allocator"
NAMESPACE = "elastic_ray"

_POLL_S = 0.5
_CALL_TIMEOUT_S = 5.0  # a controller that does not answer in this time is asked again after its next heartbeat
_HISTORY = 3  # snapshots of the nodes that are compared
_QUIET_S = 2.5  # after so long without a heartbeat the controller is asked whether it lives
_FAREWELL_S = 10.0  # how long an ended job's groups count as ours while its controller gives them back

logger = logging.getLogger("placement.allocator")


def get_or_create_allocator(
    policy: str | Policy = "goodput", *, config: AllocatorConfig | None = None
) -> ActorHandle[Any]:
    """The cluster's allocator, created on first use on the head node (if it is there).

    Args:
        policy: a registered name or a policy object; matters only to the call that creates the allocator.
        config: times and thresholds, likewise.

    Raises:
        ValueError: unknown policy name.
        TypeError: an object that is no policy.
    """
    make_policy(policy)  # a bad policy is the caller's error, not a crashing actor
    head = head_node_id()
    options: dict[str, Any] = {
        "name": NAME,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_concurrency": 1000,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(head, soft=True) if head else "DEFAULT",
    }
    actor: Any = ray.remote(Allocator)
    handle: ActorHandle[Any] = actor.options(**options).remote(policy, config)
    return handle


class Allocator:
    """The actor's class; use ``get_or_create_allocator``."""

    def __init__(self, policy: str | Policy, config: AllocatorConfig | None = None) -> None:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        self._policy = make_policy(policy)
        self._config = config
        self._core: AllocatorCore | None = None
        self._started = asyncio.Lock()
        self._controllers: dict[str, ActorHandle[Any]] = {}
        self._history: collections.deque[tuple[RawNode, ...]] = collections.deque(maxlen=_HISTORY)
        self._heard_s: dict[str, float] = {}
        self._ended_s: dict[str, float] = {}
        self._logged: DecisionRecord | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._outbox: dict[tuple[str, type[Instruction]], Instruction] = {}
        self._sending: set[tuple[str, type[Instruction]]] = set()
        self._loop_task = asyncio.get_event_loop().create_task(self._watch())

    async def heartbeat(self, view: JobView, controller: ActorHandle[Any]) -> None:
        """A job's controller says how the job stands: every second, and at once when something changed."""
        core = await self._start()
        self._controllers[view.job] = controller
        self._heard_s[view.job] = time.time()
        self._ended_s.pop(view.job, None)
        # Up to now what a newcomer holds counted as others' use, and nobody may decide on that.
        cluster = None if view.job in core.jobs else self._usable(view.job)
        self._handle(JobHeartbeat(view=view, cluster=cluster))

    async def ended(self, job: str) -> None:
        """A job is over."""
        await self._start()
        self._forget(job)

    async def snapshot(self) -> CoreSnapshot:
        """What the allocator knows and has decided."""
        return (await self._start()).snapshot()

    # ------------------------------------------------------------------------------------------------ inside

    async def _start(self) -> AllocatorCore:
        """The core, made as soon as the nodes are known; groups that exist by then are jobs to hear from."""
        async with self._started:
            if self._core is None:
                while (nodes := await self._read()) is None:
                    await asyncio.sleep(_POLL_S)
                running = any(node.reserved for node in nodes)
                core = AllocatorCore(self._policy, self._config, settling=running)
                core.handle(NodesChanged(cluster=usable(self._history, ())), time.time())
                self._core = core
            return self._core

    async def _watch(self) -> None:
        """Look at the nodes twice a second; a round that fails is logged and the next one comes anyway."""
        await self._start()
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                if await self._read() is not None:
                    self._take_nodes()
                self._handle(Tick())
                self._ask_the_quiet()
            except Exception:
                logger.exception("a round of the allocator failed; the next one follows in %g s", _POLL_S)

    async def _read(self) -> tuple[RawNode, ...] | None:
        try:
            nodes = await asyncio.wait_for(asyncio.to_thread(read_nodes), timeout=_CALL_TIMEOUT_S)
        except Exception as error:  # the control store may be away for a moment; the last view stays
            logger.warning("Ray's nodes could not be read: %s", error)
            return None
        self._history.append(nodes)
        return nodes

    def _take_nodes(self) -> None:
        now_s = time.time()
        self._ended_s = {job: at_s for job, at_s in self._ended_s.items() if now_s - at_s < _FAREWELL_S}
        self._handle(NodesChanged(cluster=self._usable()))

    def _usable(self, *newcomers: str) -> Cluster:
        assert self._core is not None, "the loop starts after the core"
        return usable(self._history, {*self._core.jobs, *self._ended_s, *newcomers})

    def _forget(self, job: str) -> None:
        self._controllers.pop(job, None)
        self._heard_s.pop(job, None)
        self._ended_s[job] = time.time()
        self._handle(JobEnded(job=job))

    def _handle(self, event: Event) -> None:
        assert self._core is not None, "events come after the start"
        instructions = self._core.handle(event, time.time())
        self._log_news()
        for instruction in instructions:
            self._post(instruction)

    def _post(self, instruction: Instruction) -> None:
        """One call per job at a time, the latest instruction only: concurrent calls may overtake each other."""
        address = (instruction.job, type(instruction))
        self._outbox[address] = instruction
        if address not in self._sending:
            self._sending.add(address)
            self._spawn(self._send(address))

    async def _send(self, address: tuple[str, type[Instruction]]) -> None:
        try:
            while (instruction := self._outbox.pop(address, None)) is not None:
                await self._carry_out(instruction)
        finally:
            self._sending.discard(address)

    def _spawn(self, call: Coroutine[Any, Any, None]) -> None:
        # The loop keeps only weak references to its tasks.
        task = asyncio.get_running_loop().create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    def _ask_the_quiet(self) -> None:
        """A dead controller answers at once that it is dead: its share need not wait for ``silence_s``."""
        now_s = time.time()
        for job, heard_s in self._heard_s.items():
            if now_s - heard_s > _QUIET_S and job in self._controllers:
                self._spawn(self._tell(job, lambda controller: controller.__ray_ready__.remote()))

    def _log_news(self) -> None:
        """One line per decision that was made since the last call."""
        assert self._core is not None, "events come after the start"
        log = self._core.log
        fresh: list[DecisionRecord] = []
        for record in reversed(log):
            if record is self._logged:
                break
            fresh.append(record)
        for record in reversed(fresh):
            logger.info("%s", record)
        self._logged = log[-1] if log else None

    async def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, Allocate):
            nodes = dict(instruction.nodes)
            await self._tell(instruction.job, lambda to: to.allocate.remote(nodes, instruction.reason))
        else:
            await self._tell(instruction.job, lambda to: to.unsatisfiable.remote(instruction.reason))

    async def _tell(self, job: str, call: Callable[[Any], Any]) -> None:
        """Call one controller; never wait for a slow one, and never let a broken one harm the others."""
        controller = self._controllers.get(job)
        if controller is None:
            return
        try:
            await asyncio.wait_for(call(controller), timeout=_CALL_TIMEOUT_S)
        except ActorDiedError:  # not ActorUnavailableError: that one may come back
            if self._controllers.get(job) is controller:
                logger.warning("job %s: its controller is gone", job)
                self._forget(job)
        except Exception as error:  # also a time-out: the next heartbeat leads to a reminder
            logger.warning("job %s: its controller did not answer: %r", job, error)
