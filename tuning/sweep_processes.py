"""SHELL: worker processes owned by a sweep's actor, which the sweep's trials reuse one after another."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Mapping
from typing import Any

import ray

from elastic_ray.job_spec import JobSpec
from elastic_ray.warm_pool.processes import pool_client, start_process
from elastic_ray.worker.ownership import calling_owner


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """A process, the kind of trial that can use it, if it ever answered, and when it became idle [s, monotonic]."""

    actor: Any
    kind: JobSpec
    node: str
    ready: bool = False
    since_s: float = 0.0


class SweepProcesses:
    """Pool of a sweep's worker processes, lent to one run (one start of a trial) at a time and returned afterwards.

    When a trial stops, its processes are available to other trials at once, saving the seconds it takes to start one.
    The pool creates no more processes of a kind on a node than trials of that kind have used there at the same time. A
    trial that is paused and resumed gets a second run, which has no claim to the processes of its first run.
    """

    def __init__(self, sweep: str) -> None:
        self._owner = calling_owner(f"sweep:{sweep}")
        self._kinds: dict[str, JobSpec] = {}
        self._idle: list[_Process] = []
        self._lent: dict[str, list[_Process]] = {}

    def admit(self, run: str, kind: JobSpec) -> None:
        """Allow a run to borrow processes until :meth:`complete`; runs of the same ``kind`` reuse each other's."""
        self._kinds[run] = kind
        self._lent.setdefault(run, [])

    async def lend(self, run: str, node: str) -> tuple[Any, bool] | None:
        """Return a process on the node, and whether it has already started up; None if the run is not admitted.

        Prefers the most recently returned idle process of the run's kind, then one from the warm pool, then a new one.
        """
        kind = self._kinds.get(run)
        if kind is None:
            return None
        fits = [each for each in self._idle if each.node == node and each.kind == kind]
        if fits:
            process = fits[-1]
            self._idle.remove(process)
        else:
            # Not one that is only starting: the run does not wait for long.
            pooled = await pool_client(kind, self._owner).take(node, starting=False)
            if run not in self._lent:  # settled meanwhile
                if pooled is not None:
                    ray.kill(pooled[0])
                return None
            ready = pooled is not None
            name = f"worker:{self._owner.holder}/{secrets.token_hex(8)}"
            actor = pooled[0] if pooled is not None else start_process(kind, node, self._owner, name)
            process = _Process(actor=actor, kind=kind, node=node, ready=ready)
        self._lent[run].append(process)
        return process.actor, process.ready

    def take_back(self, run: str, actor: Any, *, fit: bool) -> None:
        """Accept a process handed back by a run, and kill it if ``fit`` is False (no other run can use it)."""
        for process in self._lent.get(run, []):
            if process.actor == actor:
                self._lent[run].remove(process)
                self._rest(process, fit=fit, ready=True)
                return
        ray.kill(actor)  # lent by a sweep's actor that is gone

    def complete(self, run: str, fit: Mapping[Any, bool] | None = None) -> None:
        """Close a finished run, and kill the processes it still borrows, except those in ``fit``."""
        self._kinds.pop(run, None)
        fit = fit or {}
        for process in self._lent.pop(run, []):
            self._rest(process, fit=process.actor in fit, ready=fit.get(process.actor, False))

    def _rest(self, process: _Process, *, fit: bool, ready: bool) -> None:
        trial = process.kind.trial
        if fit and trial is not None and trial.keep_s:
            self._idle.append(dataclasses.replace(process, ready=ready, since_s=time.monotonic()))
        else:
            ray.kill(process.actor)

    def expire(self, now_s: float) -> None:
        """Kill processes that have been idle for longer than their trial's ``keep_s`` at ``now_s`` [s, monotonic]."""
        for process in list(self._idle):
            trial = process.kind.trial
            if trial is None or now_s > process.since_s + trial.keep_s:
                self._idle.remove(process)
                ray.kill(process.actor)
