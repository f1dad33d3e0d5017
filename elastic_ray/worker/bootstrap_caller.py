"""SHELL: a worker's calls to the job's controller to exchange addresses with members of a new generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from elastic_ray.communication.bootstrap import BootstrapCall, call_mac
from elastic_ray.worker.setup import Assignment

_ON_THE_WAY_S = 2.0


class ControllerCaller:
    """Caller of the controller's bootstrap method, through which a new generation's members exchange values."""

    def __init__(self, assignment: Assignment, generation: int) -> None:
        self._controller = assignment.controller
        self._worker = assignment.worker
        self._generation = generation
        self._mac = call_mac(assignment.secret, generation, assignment.worker)
        self._told: list[Any] = []

    def tell(self, values: Mapping[str, bytes]) -> None:
        """Publish values to the other members without waiting; a refusal raises in the next :meth:`ask`."""
        self._told.append(self._call(tells=values))

    def ask(self, keys: tuple[str, ...], wait_s: float, tells: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Publish ``tells``, and return all known values once ``keys`` are known or ``wait_s`` has passed.

        Raises RuntimeError if the controller does not answer, or refuses the call.
        """
        try:
            call = self._call(tells=tells, wants=keys, wait_s=wait_s)
            known: Mapping[str, bytes] = ray.get(call, timeout=wait_s + _ON_THE_WAY_S)
        except RayError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise RuntimeError(f"its controller does not connect it to the other workers: {lines[-1]}") from error
        return known

    def _call(self, **fields: Any) -> Any:
        call = BootstrapCall(generation=self._generation, worker=self._worker, mac=self._mac, **fields)
        return self._controller.bootstrap.remote(call)
