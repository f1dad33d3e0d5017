"""SHELL: stragglers of a job: replaces those that its ranks name, and reports slow nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic_ray.batch.reports import StepReport
from elastic_ray.job.context import JobContext
from elastic_ray.membership.messages import GenerationSpec
from elastic_ray.membership.signals import Replace
from elastic_ray.stragglers.slow_workers import SlowWorker

_ALLOCATOR_S = 3.0  # in which the allocator may find another node
_REMEMBER_S = 900.0  # a node that was slow is taken to be so for this long after the job has left it


class StragglerReplacement:
    """Replacement of a job's stragglers, with the slow nodes it has seen.

    The allocator hears of a slow node and may move its workers elsewhere. Where it does not, a worker is replaced by
    another one on the same node, once: what is slow there may be its process or its GPU.

    Attributes:
        ratios: by worker, its time for equal work over the group's median, as rank 0 said last.
    """

    def __init__(self, parts: JobContext) -> None:
        self._group = parts.group
        self.ratios: Mapping[str, float] = {}
        self._since_s: dict[str, float] = {}  # by worker: when its replacement was asked for
        self._wanted: dict[str, SlowWorker] = {}
        self._tried: dict[str, float] = {}  # by node: when a worker on it was replaced
        self._slow: dict[str, tuple[float, float]] = {}  # by node: ratio, and when it was slow last

    def slow_nodes(self, now_s: float) -> dict[str, float]:
        """Return the slowness of nodes that the job has or had: the ratio to the usual step time, by node id.

        Only nodes all of whose workers are to be replaced count, or were when the job left them.
        """
        return {node: ratio for node, (ratio, last_s) in self._slow.items() if now_s - last_s < _REMEMBER_S}

    def hear(self, report: StepReport, now_s: float) -> None:
        """Rank 0's account of the present stragglers [s, monotonic]."""
        current = self._group.machine.current
        if current is None or report.generation != current.generation:
            return
        self.ratios = {member.worker: ratio for member, ratio in zip(current.members, report.ratios, strict=False)}
        self._note_replaced(current, now_s)
        self._wanted = {each.worker: each for each in report.stragglers if each.replace}
        self._since_s = {worker: self._since_s.get(worker, now_s) for worker in self._wanted}
        self._note_nodes(current, report.stragglers, now_s)
        chosen = [each for worker, each in self._wanted.items() if self._may_replace(worker, current, now_s)]
        reason = "; ".join(f"in place of worker {each.worker}: {each}" for each in chosen)
        self._group.take(Replace(workers=frozenset(each.worker for each in chosen), reason=reason))

    def _note_replaced(self, current: GenerationSpec, now_s: float) -> None:
        """Record the nodes of workers that were to be replaced and are gone."""
        for worker, each in self._wanted.items():
            if current.rank_of(worker) is None:
                self._tried[each.node] = now_s

    def _note_nodes(self, current: GenerationSpec, slow: Sequence[SlowWorker], now_s: float) -> None:
        ratios = {each.worker: each.ratio for each in slow if each.replace}
        for node in {each.node for each in self._wanted.values()}:
            here = [ratios.get(member.worker, 1.0) for member in current.members if member.node == node]
            if here and min(here) > 1.0:
                self._slow[node] = min(here), now_s

    def _may_replace(self, worker: str, current: GenerationSpec, now_s: float) -> bool:
        """True if a replacement may start now: elsewhere, or on the same node for the first time."""
        node = self._wanted[worker].node
        goal: Mapping[str, int] = self._group.goal.nodes
        here = sum(1 for member in current.members if member.node == node)
        if goal.get(node, 0) < here:
            return True
        tried_s = self._tried.get(node)
        fresh = tried_s is None or now_s - tried_s > _REMEMBER_S
        return fresh and now_s - self._since_s[worker] > _ALLOCATOR_S
