"""SHELL: calls from the allocator to the jobs' controllers: one at a time per job, concurrent across jobs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError

from placement.allocator.events import Allocate, Instruction

logger = logging.getLogger("placement.allocator")

_CALL_TIMEOUT_S = 5.0  # a controller that does not answer in this time is asked again after its next heartbeat
_QUIET_S = 2.5  # after so long without a heartbeat the controller is asked whether it lives


class Controllers:
    """Handles of the jobs' controllers, with the instructions still to be sent to them.

    Args:
        on_death: Callback that receives the name of a job whose controller has died for good.
    """

    def __init__(self, on_death: Callable[[str], None]) -> None:
        self._on_death = on_death
        self._handles: dict[str, ActorHandle[Any]] = {}
        self._heard_s: dict[str, float] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._outbox: dict[tuple[str, type[Instruction]], Instruction] = {}
        self._sending: set[tuple[str, type[Instruction]]] = set()

    def heard(self, job: str, controller: ActorHandle[Any]) -> None:
        """Record a heartbeat for the job from this controller, which will receive later instructions."""
        self._handles[job] = controller
        self._heard_s[job] = time.monotonic()

    def discard(self, job: str) -> None:
        """Remove the controller of a job that has ended."""
        self._handles.pop(job, None)
        self._heard_s.pop(job, None)

    def post(self, instruction: Instruction) -> None:
        """Send an instruction to its job's controller; of those waiting, only the newest of each type is sent."""
        address = (instruction.job, type(instruction))
        self._outbox[address] = instruction
        if address not in self._sending:
            self._sending.add(address)
            self.spawn(self._send(address))

    def ask_the_quiet(self) -> None:
        """Ping silent controllers, so that a dead one is detected, and its slots freed, before ``silence_s`` ends."""
        now_s = time.monotonic()
        for job, heard_s in self._heard_s.items():
            if now_s - heard_s > _QUIET_S and job in self._handles:
                self.spawn(self._call(job, lambda controller: controller.__ray_ready__.remote()))

    def spawn(self, call: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background, holding a strong reference, since the event loop holds only a weak one."""
        task = asyncio.get_running_loop().create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _send(self, address: tuple[str, type[Instruction]]) -> None:
        try:
            while (instruction := self._outbox.pop(address, None)) is not None:
                await self._carry_out(instruction)
        finally:
            self._sending.discard(address)

    async def _carry_out(self, instruction: Instruction) -> None:
        """Send one instruction to its controller, with the reason: an allocation, or a notice of impossibility."""
        if isinstance(instruction, Allocate):
            told = dict(instruction.nodes), str(instruction.reason), dict(instruction.draining)
            await self._call(instruction.job, lambda to: to.allocate.remote(*told, instruction.nodes_may_come))
        else:
            why, final = instruction.reason, instruction.final
            await self._call(instruction.job, lambda to: to.unsatisfiable.remote(why, final))

    async def _call(self, job: str, call: Callable[[Any], Any]) -> None:
        """Call one controller, without waiting for a slow one or letting a broken one affect the others."""
        controller = self._handles.get(job)
        if controller is None:
            return
        try:
            await asyncio.wait_for(call(controller), timeout=_CALL_TIMEOUT_S)
        except ActorDiedError:  # not ActorUnavailableError: that one may come back
            if self._handles.get(job) is controller:
                logger.warning("job %s: its controller is gone", job)
                self._on_death(job)
        except Exception as error:  # also a time-out: the next heartbeat leads to a reminder
            logger.warning("job %s: its controller did not answer: %r", job, error)
