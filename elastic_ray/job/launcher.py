"""SHELL: the rendezvous store of a job, its own or its sweep's, and the workers that wait for it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from elastic_ray.job.lease import START_TIMEOUT_S
from elastic_ray.job.messages import Assignment
from elastic_ray.job.spec import JobSpec
from elastic_ray.membership.store import StoreAddress, open_store

logger = logging.getLogger("elastic_ray.job")


class Launcher:
    """Launches workers once there is a store; the job's own one lives as long as this object.

    Args:
        spec: the job.
        launch: runs the train function in a process.
    """

    def __init__(self, spec: JobSpec, launch: Callable[[Assignment], None]) -> None:
        self._spec = spec
        self._launch = launch
        self._store: Any = None
        self._address: StoreAddress | None = None
        self._opened = 0
        self._waiting: list[Callable[[StoreAddress], Assignment]] = []

    @property
    def shared(self) -> bool:
        """Whether the store is the sweep's, which may go."""
        return self._store is None

    async def open(self) -> None:
        """Find the sweep's store, or open one; then launch what waits."""
        self._address = None
        self._opened += 1
        latest, store, address = self._opened, None, await self._of_sweep()
        if address is None:
            host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            store = await asyncio.to_thread(open_store, host)
            address = StoreAddress(host=host, port=store.port)
        if latest != self._opened:
            return  # the job has begun again meanwhile, and all of its workers are to meet in one place
        self._store, self._address = store, address
        for assign in self._waiting:
            self._launch(assign(address))
        self._waiting.clear()

    async def _of_sweep(self) -> StoreAddress | None:
        trial = self._spec.trial
        if trial is None or trial.sweep is None:
            return None
        try:
            address: StoreAddress = await asyncio.wait_for(trial.sweep.store.remote(), START_TIMEOUT_S)
        except (RayError, asyncio.TimeoutError) as error:
            logger.warning("job %s: opens a store of its own, for its sweep does not answer: %s", self._spec.job, error)
            return None
        return dataclasses.replace(address, prefix=f"{self._spec.job}/{secrets.token_hex(4)}")

    def add(self, assign: Callable[[StoreAddress], Assignment]) -> None:
        """Launch a worker, which is told where the store is, now or when there is one."""
        if self._address is None:
            self._waiting.append(assign)
        else:
            self._launch(assign(self._address))
