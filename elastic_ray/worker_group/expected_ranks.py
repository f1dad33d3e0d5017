"""Where a worker will stand in a group that it has not joined yet, as far as that can be known (pure)."""

from __future__ import annotations

from collections.abc import Mapping

from elastic_ray.membership.messages import GenerationSpec, RankInfo


class ExpectedRanks:
    """Tells workers their expected rank when they start, each another one.

    Before the first generation exactly one living worker is told rank 0, so that ``if rank == 0: download()`` runs
    once; a worker that joins a group that trains is never told 0. The ranks that they get in the end may be others.
    """

    def __init__(self) -> None:
        self._told: dict[str, int] = {}

    def of(self, worker: str, nodes: Mapping[str, str], spec: GenerationSpec | None, target: int) -> RankInfo:
        """The expected place of a worker that starts now.

        Args:
            worker: its id.
            nodes: of every living worker, this one included, by id; oldest first.
            spec: the present generation, None before the first.
            target: size that the job is heading for.
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
