"""Launches of requested nodes, and lifetimes of spot nodes: small state machines without a clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from placement.cluster.cluster import Cluster
from placement.cluster.node_types import NodeType, type_of
from placement.reasons import Cause, Reason
from placement.text import clipped


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """Nodes of one type that were requested and have not arrived yet."""

    since_s: float
    present: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Failed:
    """Consecutive failed launches of one type, with the fewest nodes of that type seen since the last failure."""

    times: int
    fewest: int


class Launches:
    """Launches of node types. If a type's nodes do not arrive, it is closed for a while and others are requested.

        requested --(arrives)--> present
        requested --(nothing arrives for startup + timeout)--> closed for retry x 2^failures --> open again

    If the provider reports that it has none (``refuse``), the type is closed at once. A closed type keeps its existing
    nodes and gets no more. Only a newly arriving node resets the count of failures, not an existing one.

    Args:
        timeout_s: Time beyond the start-up time after which a launch counts as failed [s].
        retry_s: Time until a closed type is requested again [s]; doubled with each failure, up to 8 x.
    """

    def __init__(self, types: Sequence[NodeType], *, timeout_s: float, retry_s: float) -> None:
        self._types = {each.name: each for each in types}
        self._timeout_s, self._retry_s = timeout_s, retry_s
        self._asked: dict[str, _Asked] = {}
        self._closed: dict[str, tuple[float, str]] = {}
        self._failed: dict[str, _Failed] = {}
        self._present: Mapping[str, int] = {}

    def watch(self, wanted: Mapping[str, int], present: Mapping[str, int], now_s: float) -> None:
        """Compare requested nodes with existing ones."""
        self._present = present
        for name, each in self._types.items():
            there, asked, failed = present.get(name, 0), self._asked.get(name), self._failed.get(name)
            if failed is not None and there > failed.fewest:
                del self._failed[name]
            elif failed is not None:
                self._failed[name] = dataclasses.replace(failed, fewest=there)
            if there >= wanted.get(name, 0):
                self._asked.pop(name, None)
            elif asked is None or there > asked.present:
                self._asked[name] = _Asked(since_s=now_s, present=there)
            elif now_s - asked.since_s >= each.startup_s + self._timeout_s:
                missing = wanted[name] - there
                waited_s = now_s - asked.since_s
                self.refuse(name, f"{missing} x {name} did not come in {waited_s:.0f} s", now_s)
            else:
                self._asked[name] = dataclasses.replace(asked, present=min(asked.present, there))

    def refuse(self, name: str, why: str, now_s: float) -> None:
        """Close a node type that is not available now."""
        if name in self._types and self.closed(name, now_s) is None:
            failed = self._failed.get(name)
            times = 0 if failed is None else failed.times
            self._failed[name] = _Failed(times=times + 1, fewest=self._present.get(name, 0))
            self._closed[name] = now_s + self._retry_s * 2 ** min(times, 3), clipped(why)
        self._asked.pop(name, None)

    def closed(self, name: str, now_s: float) -> Reason | None:
        """Return why no more nodes of this type are requested for now; None if the type is open."""
        until_s, why = self._closed.get(name, (float("-inf"), ""))
        return None if now_s >= until_s else Reason(Cause.CLOSED, (why,), f"asked again in {until_s - now_s:.0f} s")


class Lifetimes:
    """Expected lifetime of nodes of each type, from hours and losses seen so far and a prior of one loss.

        lasts = (hours seen + expected) / (losses seen + 1)

    This is a Gamma prior of weight one on the rate of losses, so that a single unlucky or lucky hour does not decide.
    """

    def __init__(self, types: Sequence[NodeType]) -> None:
        self._types = {each.name: each for each in types}
        self._hours = dict.fromkeys(self._types, 0.0)
        self._losses = dict.fromkeys(self._types, 0)
        self._seen: dict[str, str] = {}
        self._seen_s: float | None = None
        self._leaving: frozenset[str] = frozenset()

    def watch(self, cluster: Cluster, given_up: Collection[str], now_s: float) -> None:
        """Count hours, and nodes that disappeared without having been given up.

        Args:
            given_up: Ids of nodes that the last decision gave up. It omits nodes that are draining by now: once given
                up and draining, a node counts as given up until it is gone.
        """
        ours = self._leaving.union(given_up)
        here = {n.node_id: kind for n in cluster.nodes if (kind := type_of(n, tuple(self._types.values()))) is not None}
        if self._seen_s is not None:
            for node_id, kind in self._seen.items():
                self._hours[kind] += max(now_s - self._seen_s, 0.0) / 3600.0
                if node_id not in here and node_id not in ours:
                    self._losses[kind] += 1
        self._leaving = frozenset(n.node_id for n in cluster.nodes if n.draining and n.node_id in ours)
        self._seen, self._seen_s = here, now_s

    def hours(self, name: str) -> float:
        """Return the mean time until a node of this type is reclaimed [h]; infinity if that never happens."""
        expected = self._types[name].lasts_h
        if expected == float("inf"):
            return expected
        return (self._hours[name] + expected) / (self._losses[name] + 1)
