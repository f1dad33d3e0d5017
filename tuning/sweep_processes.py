"""SHELL: worker processes that the trials of a sweep use one after the other (owned by the sweep's actor)."""

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
    """A process, what trials can use it, whether it has ever answered, and when it came to rest [s, monotonic]."""

    actor: Any
    kind: JobSpec
    node: str
    ready: bool = False
    since_s: float = 0.0


class SweepProcesses:
    """Pool that lends processes to runs of trials and takes them back.

    A stopped trial's processes are at the survivors' hands at once, where a start would cost them seconds. There are
    never more of them than trials of this kind have had workers on the node at one time. A trial that is paused and
    continues has a second run, which has nothing to do with the processes of its first one.

    Args:
        sweep: name of the sweep, for which processes are taken from the cluster's pool, as far as there are any.
    """

    def __init__(self, sweep: str) -> None:
        self._owner = calling_owner(f"sweep:{sweep}")
        self._kinds: dict[str, JobSpec] = {}
        self._idle: list[_Process] = []
        self._lent: dict[str, list[_Process]] = {}

    def admit(self, run: str, kind: JobSpec) -> None:
        """Admit a run, which may borrow processes for trials of this kind until it is settled."""
        self._kinds[run] = kind
        self._lent.setdefault(run, [])

    async def lend(self, run: str, node: str) -> tuple[Any, bool] | None:
        """Return a process on the node, the one used last or a new one, and whether it has ever answered.

        None for a run that was not admitted, or is settled.
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
        """Accept a process back of a run; one that is not ``fit`` for another run ends."""
        for process in self._lent.get(run, []):
            if process.actor == actor:
                self._lent[run].remove(process)
                self._rest(process, fit=fit, ready=True)
                return
        ray.kill(actor)  # lent by a sweep's actor that is gone

    def settle(self, run: str, fit: Mapping[Any, bool] | None = None) -> None:
        """Close a run that is over: its processes end, except those that another run may use.

        Args:
            fit: those, and whether each has answered; None for none.
        """
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
        """End those that have waited for ``keep_s`` [s, monotonic]."""
        for process in list(self._idle):
            trial = process.kind.trial
            if trial is None or now_s > process.since_s + trial.keep_s:
                self._idle.remove(process)
                ray.kill(process.actor)
