"""SHELL: worker processes that the trials of a sweep use one after the other (owned by the sweep's actor)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection
from typing import Any

import ray

from elastic_ray.job.processes import start_process
from elastic_ray.job.spec import JobSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """A process, what trials can use it, and since when it has been where it is [s, monotonic]."""

    actor: Any
    kind: JobSpec
    node: str
    since_s: float


class ProcessPool:
    """Lends processes to trials and takes them back.

    A stopped trial's processes are at the survivors' hands at once, where a start would cost them seconds. There are
    never more of them than trials of this kind have had workers on the node at one time.
    """

    def __init__(self) -> None:
        self._idle: list[_Process] = []
        self._lent: dict[str, list[_Process]] = {}

    def lend(self, job: str, kind: JobSpec, node: str) -> tuple[Any, bool]:
        """A process on the node for a trial of this kind, the one used last or a new one, and whether it is new."""
        fits = [each for each in self._idle if each.node == node and each.kind == kind]
        if fits:
            self._idle.remove(fits[-1])
        actor = fits[-1].actor if fits else start_process(kind, node)
        lent = _Process(actor=actor, kind=kind, node=node, since_s=time.monotonic())
        self._lent.setdefault(job, []).append(lent)
        return actor, not fits

    def take_back(self, job: str, actor: Any, *, fit: bool) -> None:
        """A trial needs a process no more; one that is not ``fit`` for another trial ends."""
        for process in self._lent.get(job, []):
            if process.actor == actor:
                self._lent[job].remove(process)
                self._rest(process, fit=fit)
                return
        ray.kill(actor)  # lent by a sweep's actor that is gone

    def settle(self, job: str, fit: Collection[Any] = ()) -> None:
        """A trial is over: what it still has ends, but for those that are ``fit`` for another trial."""
        for process in self._lent.pop(job, []):
            self._rest(process, fit=process.actor in fit)

    def _rest(self, process: _Process, *, fit: bool) -> None:
        trial = process.kind.trial
        if fit and trial is not None and trial.keep_s:
            self._idle.append(dataclasses.replace(process, since_s=time.monotonic()))
        else:
            ray.kill(process.actor)

    def expire(self, now_s: float) -> None:
        """End those that have waited for ``keep_s`` [s, monotonic]."""
        for process in list(self._idle):
            trial = process.kind.trial
            if trial is None or now_s > process.since_s + trial.keep_s:
                self._idle.remove(process)
                ray.kill(process.actor)
