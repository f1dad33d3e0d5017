"""Choice of nodes for given job sizes: the cheapest nodes that can hold every job's workers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from placement.autoscaling.objectives.base import WantedSize, lasting
from placement.cluster.cluster import Node, slots
from placement.cluster.jobs import JobView
from placement.cluster.node_types import NodeType

_CHANGE = 0.1  # relative gain that is worth a node of another type where one is there already


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Number of nodes of each type, with the jobs that use them."""

    nodes: Mapping[str, int]  # by node type, none left out
    users: Mapping[str, tuple[str, ...]]  # jobs whose workers each type was counted for
    short: Mapping[str, int]  # workers of each job that find no place within the limits; 0 is left out


@dataclasses.dataclass(slots=True)
class _Open:
    """A node that may still have room."""

    node: Node
    kind: str | None
    left: dict[str, float]


class _Builder:
    """Nodes chosen so far, with their remaining room."""

    def __init__(
        self, types: Sequence[NodeType], static: Iterable[Node], present: Mapping[str, int], most: int | None
    ) -> None:
        self._most = most
        self.types = {each.name: each for each in types}
        self.counts = dict.fromkeys(self.types, 0)
        self.users: dict[str, set[str]] = {name: set() for name in self.types}
        self._present = present
        self._open = [_Open(node, None, dict(node.free)) for node in static if not node.draining]
        for name, each in self.types.items():
            for _ in range(each.min_nodes):
                self._add(name)

    def place(self, view: JobView, gpu: str, workers: int, lasts_h: Mapping[str, float], *, on_demand: bool) -> int:
        """Place a job's workers, on already chosen nodes if possible; return how many do not fit."""
        for each in self._open:
            if workers and each.node.gpu_type == gpu and each.node.matches(view.selector):
                if on_demand and each.node.spot:
                    continue
                workers -= self._fill(each, view, workers)
        while workers:
            name = self._cheapest(view, gpu, workers, lasts_h, on_demand=on_demand)
            if name is None:
                break
            workers -= self._fill(self._add(name), view, workers)
        return workers

    def _add(self, name: str) -> _Open:
        each = self.types[name]
        self.counts[name] += 1
        self._open.append(_Open(each.node(f"{name}-{self.counts[name]}"), name, dict(each.resources)))
        return self._open[-1]

    def _fill(self, each: _Open, view: JobView, workers: int) -> int:
        here = min(slots(each.left, view.bundle), workers)
        for name, need in view.bundle.items() if here else ():
            each.left[name] = each.left.get(name, 0.0) - here * need
        if here and each.kind is not None:
            self.users[each.kind].add(view.job)
        return here

    def _cheapest(
        self, view: JobView, gpu: str, workers: int, lasts_h: Mapping[str, float], *, on_demand: bool
    ) -> str | None:
        """Return the cheapest node type for these workers, or one that has nodes and is hardly more expensive."""
        best: tuple[float, int, str] | None = None
        if self._most is not None and sum(self.counts.values()) >= self._most:
            return None
        for name, each in self.types.items():
            fits = each.slots(view)
            if not fits or each.gpu_type != gpu or self.counts[name] >= each.max_nodes or (on_demand and each.spot):
                continue
            nodes = math.ceil(workers / fits)
            usd = each.usd_per_h * nodes / float(lasting(view, np.array(float(nodes)), each, lasts_h[name]))
            if self.counts[name] < self._present.get(name, 0):
                usd /= 1.0 + _CHANGE
            offer = usd, nodes, name
            best = offer if best is None else min(best, offer)
        return None if best is None else best[2]


def build(
    wants: Mapping[str, WantedSize],
    views: Sequence[JobView],
    types: Sequence[NodeType],
    static: Iterable[Node],
    present: Mapping[str, int],
    lasts_h: Mapping[str, float],
    most: int | None = None,
) -> Fleet:
    """Return the cheapest nodes that can hold these job sizes.

    Jobs are served by priority, running jobs before waiting ones, and then by arrival. A job first uses the room that
    earlier jobs leave on chosen nodes. A job whose ``spot`` is ``mixed`` has its minimum on on-demand nodes. If several
    types fit, the cheapest is used, where the cost includes expected losses by preemption.
    """
    builder = _Builder(types, static, present, most)
    short: dict[str, int] = {}
    for view in sorted(views, key=lambda v: (-v.priority, v.workers == 0, v.arrival)):
        want = wants.get(view.job)
        if want is None or not want.workers:
            continue
        on_demand = min(view.min_workers, want.workers) if view.spot == "mixed" else 0
        missing = builder.place(view, want.gpu, on_demand, lasts_h, on_demand=True) if on_demand else 0
        missing += builder.place(view, want.gpu, want.workers - on_demand, lasts_h, on_demand=False)
        if missing:
            short[view.job] = missing
    users = {name: tuple(sorted(jobs)) for name, jobs in builder.users.items()}
    return Fleet(nodes=builder.counts, users=users, short=short)
