"""Detection of silent workers, and expected ranks of starting workers (pure; times are arguments)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from elastic_ray.membership.messages import GenerationSpec, RankInfo
from elastic_ray.unit import worker_of

# The controller's own hiccups are no silence of the workers: a gap between two looks counts at most this much.
_LONGEST_GAP_S = 0.3


class FailureDetector:
    """Detector of silent workers (or drivers). Its clock stops while the controller itself is blocked.

    Args:
        alone_s: Timeout for a sole member, and for a worker whose process was seen running [s]; None uses
            ``timeout_s``.
    """

    def __init__(self, timeout_s: float, *, alone_s: float | None = None) -> None:
        self._timeout_s = timeout_s
        self._alone_s = alone_s or timeout_s
        self._clock_s = 0.0
        self._looked_s: float | None = None
        self._heard_s: dict[str, float] = {}
        self._questioned: set[str] = set()
        self._excused: set[str] = set()

    def heard(self, *workers: str) -> None:
        """Record a sign of life from these workers."""
        self._heard_s.update(dict.fromkeys(workers, self._clock_s))
        self._questioned.difference_update(workers)
        self._excused.difference_update(workers)

    def discard(self, *workers: str) -> None:
        """Stop watching these workers, until :meth:`heard` is called for them again."""
        for worker in workers:
            self._heard_s.pop(worker, None)
        self._questioned.difference_update(workers)
        self._excused.difference_update(workers)

    def excuse(self, worker: str) -> None:
        """Grant a longer timeout to a worker whose process was seen running, because it may be busy or starved."""
        if worker in self._questioned:  # not heard of since the question
            self._excused.add(worker)

    def questioned(self, worker: str) -> bool:
        """True if :meth:`questionable` has returned the worker, and the worker has been silent since."""
        return worker in self._questioned

    def questionable(self) -> list[str]:
        """Return the workers whose silence has reached a third of the timeout, to be checked; each is returned once."""
        soon_s = self._timeout_s / 3
        found = [w for w, at_s in self._heard_s.items() if self._clock_s - at_s > soon_s and w not in self._questioned]
        self._questioned.update(found)
        return found

    def silence_s(self, worker: str) -> float | None:
        """Return how long a worker has been silent [s], or None if the worker is not watched."""
        heard_s = self._heard_s.get(worker)
        return None if heard_s is None else self._clock_s - heard_s

    def silent(self, now_s: float, members: Iterable[str]) -> list[tuple[str, float]]:
        """Return (worker, silence [s]) for each of ``members`` that has exceeded its timeout at ``now_s`` [s]."""
        if self._looked_s is not None:
            self._clock_s += min(max(0.0, now_s - self._looked_s), _LONGEST_GAP_S)
        self._looked_s = now_s
        watched = list(members)
        patient = set(watched) if len(set(map(worker_of, watched))) == 1 else self._excused  # no other waits for it
        quiet = [(w, self._clock_s - self._heard_s[w]) for w in watched if w in self._heard_s]
        limit_s = {w: self._alone_s if w in patient else self._timeout_s for w in watched}
        return [(worker, silence_s) for worker, silence_s in quiet if silence_s > limit_s[worker]]


class ExpectedRanks:
    """Distinct ranks that starting workers can expect to get.

    Before the first generation, exactly one living worker expects rank 0, so that ``if rank == 0: download()`` runs
    once. A worker that joins a training group never expects rank 0. Final ranks may differ.
    """

    def __init__(self) -> None:
        self._told: dict[str, int] = {}

    def of(self, worker: str, nodes: Mapping[str, str], spec: GenerationSpec | None, target: int) -> RankInfo:
        """Return the rank, node rank and world size that a starting worker can expect.

        Args:
            nodes: Node of each living worker (including this worker), keyed by worker id, oldest first.
        """
        self._told = {each: rank for each, rank in self._told.items() if each in nodes and each != worker}
        # Members that have died are not members of the generation that the worker will join.
        first = max(1, sum(_is_member(each, spec) for each in nodes)) if spec is not None else 0
        taken = set(self._told.values())
        rank = next(number for number in range(first, first + len(nodes) + len(taken) + 1) if number not in taken)
        self._told[worker] = rank
        node = nodes[worker]
        here = [each for each, where in nodes.items() if where == node]
        # Of those on one node: members first, then those that were told before.
        before = [each for each in here if each != worker and (each in self._told or _is_member(each, spec))]
        return RankInfo(
            rank=rank,
            world_size=max(target, rank + 1),
            local_rank=len(before),
            local_world_size=max(len(here), len(before) + 1),
            node_rank=list(dict.fromkeys(nodes.values())).index(node),
        )


def _is_member(worker: str, spec: GenerationSpec | None) -> bool:
    return spec is not None and spec.rank_of(worker) is not None
