"""SHELL: actors that each run several controllers of a sweep's trials, because starting a process takes seconds."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import secrets
import time
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from elastic_ray.job.controller import JobController
from elastic_ray.job.journal import hosted_before
from elastic_ray.job_spec import JobSpec
from elastic_ray.worker.ownership import calling_owner
from elastic_ray.worker.setup import ProcessOwner
from elastic_ray.worker.stored_train_loop import with_stored_train_loop
from placement.ray_cluster.named_actors import HOSTS, Hosted, HostedGoneError, create_on_head, delete_alias
from placement.text import log_plainly
from placement.versions import Spoken, check_spoken, spoken

logger = logging.getLogger("elastic_ray.job")

_MOST = 16  # a controller takes some hundredths of a processor, and all of an actor share one
_THREADS = 64  # which controllers wait in for storage and for Ray's control store
_IDLE_S = 120.0
_LOOK_S = 5.0
_OPEN_S = 100.0
_AWAY_S = 0.2
_CLOSE_S = 5.0


class ControllerHost:
    """Actor class that runs several trials' controllers, each called through a ``Hosted`` handle.

    When Ray restarts the process, each controller continues as if it had its own actor.
    """

    def __init__(self, own: str, theirs: Spoken) -> None:
        check_spoken(theirs, "the sweep", "its trials' controllers")
        log_plainly(logging.WARNING)
        loop = asyncio.get_event_loop()
        loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="controllers"))
        self._own = own
        self._handle = ray.get_runtime_context().current_actor
        self._controllers: dict[str, JobController] = {}
        self._used_s, self._closing = time.monotonic(), False
        for run in hosted_before(str(ray.get_runtime_context().get_actor_id())):
            self._add(run)
        self._main = loop.create_task(self._watch())

    async def take_up(self, spec: JobSpec, owner: ProcessOwner) -> bool:
        """Run a trial's controller in this process; False if the process runs too many controllers or is closing."""
        assert spec.trial is not None, "only trials are hosted"
        run = spec.trial.controller
        if run in self._controllers:
            return True
        if len(self._controllers) >= _MOST or self._closing:
            return False
        controller = self._add(run)
        try:
            # Of a process before this one that died before it had noted the trial down.
            await asyncio.to_thread(delete_alias, f"job:{run}", self._own)
            if not await controller.take_up(spec, self._own, owner, spoken()):
                raise ValueError(f"a controller named {run!r} is still running")
        except BaseException:
            self._remove(run)
            raise
        return True

    async def call(self, name: str, method: str, *arguments: Any, **options: Any) -> Any:
        """Call ``method`` of the hosted controller ``name``. Raises HostedGoneError if the controller has ended."""
        controller = self._controllers.get(name.partition(":")[2])
        if controller is None:
            raise HostedGoneError(name)
        if method == "__ray_ready__":
            return True
        return await getattr(controller, method)(*arguments, **options)

    async def close(self) -> None:
        """Accept no more trials, and end this actor after its last controller."""
        self._closing = True
        if not self._controllers:
            ray.kill(self._handle)

    def _add(self, run: str) -> JobController:
        controller = JobController(None, spoken(), run, lambda: self._remove(run))
        self._controllers[run] = controller
        return controller

    def _remove(self, run: str) -> None:
        self._controllers.pop(run, None)
        self._used_s = time.monotonic()
        if self._closing and not self._controllers:
            ray.kill(self._handle)

    async def _watch(self) -> None:
        """End this actor if it has had no trials for a while, because the sweep's actor must be gone."""
        while self._controllers or time.monotonic() < self._used_s + _IDLE_S:
            await asyncio.sleep(_LOOK_S)
        ray.kill(self._handle)


class ControllerHosts:
    """Processes that host the controllers of a sweep's trials; the first starts at once, others when needed."""

    def __init__(self, sweep: str) -> None:
        self._sweep = sweep
        self._hosts: dict[str, Any] = {}
        self._add()

    async def open(self, spec: JobSpec) -> Any:
        """Start a controller for this trial on a host and return its handle.

        Raises TimeoutError if a host does not answer, and RayError if no host can be started.
        """
        assert spec.trial is not None, "only trials are hosted"
        name = f"job:{spec.trial.controller}"
        spec = await asyncio.to_thread(with_stored_train_loop, spec)
        deadline_s = time.monotonic() + _OPEN_S
        for own, host in tuple(self._hosts.items()):
            try:
                if await self._take_up(host, spec, deadline_s):
                    return Hosted(host, name)
            except RayActorError as error:
                logger.info("sweep %s: its actor for controllers is gone: %r", self._sweep, error)
                del self._hosts[own]
        host = self._add()
        await self._take_up(host, spec, deadline_s)
        return Hosted(host, name)

    async def _take_up(self, host: Any, spec: JobSpec, deadline_s: float) -> bool:
        """Request that a host run a trial; retry while it is unavailable, as it may already have started the trial."""
        owner = calling_owner("")
        while True:
            try:
                asked = host.take_up.remote(spec, owner)
                return bool(await asyncio.wait_for(asked, max(0.1, deadline_s - time.monotonic())))
            except ActorUnavailableError:
                if time.monotonic() > deadline_s:
                    raise
                await asyncio.sleep(_AWAY_S)

    def _add(self) -> Any:
        own = f"{HOSTS}{self._sweep}/{secrets.token_hex(4)}"
        self._hosts[own] = host = create_on_head(ControllerHost, own, own, spoken(), max_restarts=-1)
        return host

    async def close(self) -> None:
        """Close all hosts; each ends with its last controller."""
        asked = [asyncio.ensure_future(_answer(host.close.remote())) for host in self._hosts.values()]
        await asyncio.wait(asked, timeout=_CLOSE_S)


async def _answer(asked: Any) -> None:
    with contextlib.suppress(RayError):  # one that ends does not answer
        await asked
