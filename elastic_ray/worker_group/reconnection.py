"""SHELL: waiting, in a restarted controller, until its predecessor's workers have registered."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_ray.record.controller_state import ControllerState
from elastic_ray.unit import process_names
from elastic_ray.worker.messages import WorkerReregistration
from elastic_ray.worker.process import is_running
from placement.cluster.cluster import parts
from placement.ray_cluster.named_actors import find_actor

logger = logging.getLogger("elastic_ray.job")

_POLL_S = 0.05
_LOOK_S = 0.5  # between two looks at the silent; a worker asks its controller as often
_QUIET_S = 2.0  # a worker that is well has asked several times by then: those that have not are worth a look
_SEE_S = 5.0  # a node has so long to tell whether a process of its own runs
_SILENT_S = 3.0  # a worker that cannot be looked at counts as lost after this
# One that runs and is silent may be starved, with its state whole. To wait for it costs nothing: no step is committed
# without it, and a controller that had been there all along would wait longer (``WorkerGroup``'s failure detector).
_STARVED_S = 20.0


class Reconnection:
    """Workers' registrations with a restarted controller; only the latest from each worker counts."""

    def __init__(self, state: ControllerState, unit: int) -> None:
        self._unit = unit
        self._processes = dict(state.processes)
        self._homes, self._pids = state.homes, state.pids
        self._alive = {worker for worker, process in state.processes.items() if process}
        self._struck: set[str] = set()
        self._told: dict[str, WorkerReregistration] = {}

    def receive(self, told: WorkerReregistration) -> None:
        """Record a worker's registration, replacing an earlier one."""
        self._told[told.name] = told
        for member in told.spec.members if told.spec is not None else ():
            for name in process_names(member.worker, self._unit):
                self._processes.setdefault(name, "")

    @property
    def _missing(self) -> list[str]:
        return sorted(self._processes.keys() - self._told.keys() - self._struck)

    async def complete(self) -> tuple[WorkerReregistration, ...]:
        """Wait for living workers to register and return their registrations, without units that lack a process."""
        begin_s = time.monotonic()
        looking = asyncio.get_running_loop().create_task(self._poll())
        while missing := self._missing:
            waited_s = time.monotonic() - begin_s
            if waited_s > _STARVED_S or (waited_s > _SILENT_S and self._alive.isdisjoint(missing)):
                break
            await asyncio.sleep(_POLL_S)
        looking.cancel()
        whole = {
            each.worker
            for each in self._told.values()
            if self._told.keys() >= set(process_names(each.worker, self._unit))
        }
        return tuple(each for each in self._told.values() if each.worker in whole)

    async def _poll(self) -> None:
        """Search repeatedly for workers that are dead or stopped, and stop waiting for them."""
        begin_s = time.monotonic()
        while True:
            self._strike(await asyncio.to_thread(self._dead, self._missing))
            await asyncio.sleep(_LOOK_S)
            missing = self._missing if time.monotonic() - begin_s > _QUIET_S else []
            states = await asyncio.gather(*(self._runs(worker) for worker in missing))
            self._alive |= {worker for worker, runs in zip(missing, states, strict=True) if runs}
            self._strike([worker for worker, runs in zip(missing, states, strict=True) if runs is False])

    def _strike(self, workers: list[str]) -> None:
        for worker in workers:
            logger.info("worker %s is dead or stopped: its controller continues without it", worker)
        self._struck.update(workers)

    def _dead(self, workers: list[str]) -> list[str]:
        """Return the workers whose process Ray reports as dead."""
        return [worker for worker in workers if (name := self._processes[worker]) and not _lives(name)]

    async def _runs(self, worker: str) -> bool | None:
        """True if the worker's process is running, as seen from its node; None if unknown."""
        node, pid = self._homes.get(worker), self._pids.get(worker)
        if node is None or pid is None:
            return None
        beside = next((told.actor for told in self._told.values() if next(iter(parts(told.node))) == node), None)
        look: Any = ray.remote(is_running)
        on_node = NodeAffinitySchedulingStrategy(node, soft=False)
        try:
            if beside is not None:
                asked = beside.sees_running.remote(pid)
            else:
                asked = look.options(num_cpus=0, scheduling_strategy=on_node).remote(pid)
            return bool(await asyncio.wait_for(asked, _SEE_S))
        except Exception as error:  # of a node that is gone, or of a control store that is away
            logger.info("worker %s could not be looked at: %s", worker, error)
            return None


def _lives(process: str) -> bool:
    try:
        return find_actor(process) is not None
    except Exception as error:  # the control store does not answer: it may live
        logger.info("process %s could not be looked up: %s", process, error)
        return True
