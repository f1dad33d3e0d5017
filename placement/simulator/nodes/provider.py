"""Simulated cloud: a node costs money as soon as it is requested and starts after a delay; spot nodes are reclaimed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from placement.autoscaling.autoscaler import AutoscalerConfig
from placement.autoscaling.objectives import Objective
from placement.checks import check_number
from placement.cluster.cluster import GPU_TYPE_LABEL, MARKET_LABEL, SPOT, Cluster, Node
from placement.cluster.node_types import NodeType
from placement.cluster.price_table import PriceTable
from placement.errors import InputError
from placement.simulator.nodes.disturbances import Disturbances, Span, SpotTrace
from placement.simulator.world.rules import Rules

_HORIZON_S = 60 * 86400.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaledCluster:
    """Settings for a simulated cluster whose size follows its jobs, up to the nodes in the cluster string."""

    objective: str | Objective = "cost_per_progress"
    config: AutoscalerConfig = dataclasses.field(default_factory=AutoscalerConfig)  # times of the autoscaler
    startup_s: float = 180.0  # from asking for a node until it can take a worker [s]
    notice_s: float = 120.0  # time between a spot node's notice and its end [s]; the clouds give 30 to 120
    expected_h: float = 12.0  # mean time that spot nodes are expected to last before any was seen [h]

    def __post_init__(self) -> None:
        for field in ("startup_s", "notice_s"):
            check_number(field, getattr(self, field), least=0, unit="seconds", finite=True, error=InputError)
        check_number("expected_h", self.expected_h, above=0, unit="hours", error=InputError)

    def check(self, rules: Rules, disturbances: Disturbances) -> None:
        """Raise InputError if autoscaling does not support these rules or disturbances, such as failing nodes."""
        if rules.round_s is not None:
            raise InputError(f"rules must be 'live' for autoscale, but got {rules.name!r}")
        if disturbances.node_mtbf_h or disturbances.slow_every_h:
            raise InputError("autoscale goes with spot traces, interference and noise, but got failing or slow nodes")

    def types(self, cluster: Cluster, prices: PriceTable, spot: Mapping[str, SpotTrace]) -> tuple[NodeType, ...]:
        """Return an on-demand node type for each GPU type in the cluster, and a spot type for each with a trace."""
        found = []
        for gpu in sorted({node.gpu_type for node in cluster.nodes}):
            nodes = [node for node in cluster.nodes if node.gpu_type == gpu]
            gpus = nodes[0].total["GPU"]
            for market in ("on-demand", SPOT):
                if market == SPOT and not ("" in spot or gpu in spot):
                    continue
                rate = prices.rates([gpu], spot=[gpu] if market == SPOT else [])[gpu]
                kind = NodeType(
                    name=f"{gpu}-{market}",
                    resources=nodes[0].total,
                    labels={GPU_TYPE_LABEL: gpu, MARKET_LABEL: market},
                    usd_per_h=rate * gpus,
                    max_nodes=len(nodes),
                    startup_s=self.startup_s,
                    lasts_h=self.expected_h if market == SPOT else math.inf,
                )
                found.append(kind)
        return tuple(found)


@dataclasses.dataclass(slots=True)
class Machine:
    """Machine rented from the simulated cloud."""

    node: Node  # it, as the allocator sees it
    kind: NodeType
    since_s: float  # rented since [s]
    ready_s: float  # can take workers from then on [s]
    gone_s: float  # is taken away then [s]; infinity if never
    place: int | None  # which place of the spot market it has; None on demand


class Provider:
    """Simulated cloud that rents machines.

    A spot machine needs a place of the recorded market (``SpotTrace``) that is occupied in the record at that time and
    not used by another simulated machine. It is reclaimed when the record loses the place. If no place is free, nothing
    is rented and the caller must try again later.
    """

    def __init__(self, types: Sequence[NodeType], spot: Mapping[str, SpotTrace], offset_s: float, seed: int) -> None:
        self.types = tuple(types)
        self.machines: dict[str, Machine] = {}
        self.rented_h = {each.name: 0.0 for each in types}
        self._count = 0
        self._gone: dict[str, list[list[Span]]] = {}
        for each in types:
            if each.spot:
                trace = spot.get(each.gpu_type) or spot[""]
                names = [f"{each.name}-{i}" for i in range(each.max_nodes)]
                dealt = trace.deal(names, seed)
                self._gone[each.name] = [list(trace.gone(dealt[name], offset_s, _HORIZON_S)) for name in names]

    @property
    def usd(self) -> float:
        """Amount paid so far [USD]."""
        return sum(each.usd_per_h * self.rented_h[each.name] for each in self.types)

    def want(self, nodes: Mapping[str, int], now_s: float) -> list[Machine]:
        """Rent machines up to the numbers in ``nodes``, returning new ones; give back surplus ones not yet started."""
        fresh: list[Machine] = []
        for each in self.types:
            mine = [m for m in self.machines.values() if m.kind.name == each.name]
            starting = sorted((m for m in mine if m.ready_s > now_s), key=lambda m: -m.ready_s)
            surplus = len(mine) - nodes.get(each.name, 0)
            for machine in starting[: max(surplus, 0)]:
                self.give_back(machine.node.node_id, now_s)
            for _ in range(-surplus):
                rented = self._rent(each, now_s)
                if rented is not None:
                    fresh.append(rented)
        return fresh

    def give_back(self, node_id: str, now_s: float) -> None:
        """Give a machine back to the cloud, so that it costs nothing more."""
        machine = self.machines.pop(node_id)
        self.rented_h[machine.kind.name] += (now_s - machine.since_s) / 3600.0

    def close(self, now_s: float) -> None:
        """Give all machines back to the cloud when the simulation ends."""
        for node_id in list(self.machines):
            self.give_back(node_id, now_s)

    def _rent(self, kind: NodeType, now_s: float) -> Machine | None:
        """Return a new machine, which costs money from now on; None if the spot market has no free place for it."""
        place, gone_s = None, math.inf
        if kind.spot:
            busy = {m.place for m in self.machines.values() if m.kind.name == kind.name}
            free = (
                (i, until) for i in range(kind.max_nodes) if i not in busy and (until := self._until(kind, i, now_s))
            )
            place, gone_s = next(free, (None, 0.0))
            if place is None:
                return None
        self._count += 1
        node = kind.node(f"{kind.name}-{self._count:04d}")
        machine = Machine(
            node=node, kind=kind, since_s=now_s, ready_s=now_s + kind.startup_s, gone_s=gone_s, place=place
        )
        self.machines[node.node_id] = machine
        return machine

    def _until(self, kind: NodeType, place: int, now_s: float) -> float:
        """Return the time when the place will be lost [s]; 0 if it is empty now, infinity if it is never lost."""
        for gone_s, back_s in self._gone[kind.name][place]:
            if gone_s > now_s:
                return gone_s
            if back_s > now_s:
                return 0.0
        return math.inf
