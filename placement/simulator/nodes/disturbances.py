"""Disturbances of a simulated cluster: failures, spot nodes, slow nodes, shared links, noise; from one seed."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

from placement.checks import check_number
from placement.cluster.cluster import Cluster, Node
from placement.errors import InputError
from placement.simulator.nodes.spot import SpotTrace
from placement.simulator.world.rules import Rules

Kind = Literal["down", "up", "slow", "well"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Disturbances:
    """Rates of disturbances; none by default. Rules other than live ones support only noise."""

    node_mtbf_h: float = 0.0  # mean hours between failures of one node; 0 for none
    repair_s: float = 600.0  # time until a lost node is back [s]
    slow_every_h: float = 0.0  # mean hours between slow spells of one node; 0 for none
    slow_for_s: float = 1800.0  # length of a slow spell [s]
    slow_factor: float = 2.0  # how much longer a step takes there; the slowest worker sets the pace
    interference: float = 0.0  # part of its speed that a job of several nodes loses while it shares a node with another
    noise: float = 0.0  # standard deviation of the logarithm of measured step times
    # what happens to spot nodes, by the GPU type whose nodes they are; the empty type stands for all nodes
    spot: Mapping[str, SpotTrace] = dataclasses.field(default_factory=dict)
    spot_offset_h: float = 0.0  # where in these traces the simulation starts [hours]

    def __post_init__(self) -> None:
        for field in ("node_mtbf_h", "slow_every_h", "noise", "spot_offset_h"):
            check_number(field, getattr(self, field), least=0, finite=True, error=InputError)
        for field in ("repair_s", "slow_for_s"):
            check_number(field, getattr(self, field), above=0, unit="seconds", error=InputError)
        check_number("slow_factor", self.slow_factor, least=1, error=InputError)
        if not 0 <= self.interference < 1:
            raise InputError(f"interference must be at least 0 and below 1, but got {self.interference}")

        if "" in self.spot and len(self.spot) > 1:
            raise InputError("spot must be one trace for all nodes, or one a GPU type, but got both")

    def check(self, rules: Rules, cluster: Cluster) -> None:
        """Raise InputError unless these rules and this cluster support the disturbances."""
        wrong = dataclasses.replace(self, noise=0.0, spot_offset_h=0.0)
        if rules.round_s is not None and wrong != Disturbances():
            changed = [f.name for f in dataclasses.fields(self) if getattr(wrong, f.name) != f.default]
            named = ", ".join(name for name in changed if name != "spot" or self.spot)
            raise InputError(
                f"rules must be 'live' for {named}, but got {rules.name!r}; only noise goes with all rules"
            )
        missing = sorted(set(self.spot) - {"", *(node.gpu_type for node in cluster.nodes)})
        if missing:
            types = ", ".join(sorted({node.gpu_type for node in cluster.nodes}))
            raise InputError(f"spot must name GPU types of the cluster ({types}), but got {', '.join(missing)}")

    def spot_types(self, types: Collection[str]) -> tuple[str, ...]:
        """Return the GPU types whose nodes are spot nodes."""
        return tuple(gpu for gpu in types if "" in self.spot or gpu in self.spot)

    def script(self, nodes: Sequence[Node], seed: int, until_s: float) -> list[tuple[float, Kind, str]]:
        """Return (time, kind, node) of every event on a node until ``until_s``, in the order of time."""
        events: list[tuple[float, Kind, str]] = []
        for node in nodes:
            events += self._spells(node.node_id, "down", "up", (self.node_mtbf_h, self.repair_s), seed, until_s)
            events += self._spells(node.node_id, "slow", "well", (self.slow_every_h, self.slow_for_s), seed, until_s)
        for gpu, trace in sorted(self.spot.items()):
            places = trace.deal([node.node_id for node in nodes if gpu in ("", node.gpu_type)], seed)
            for node_id, place in places.items():
                for gone_s, back_s in trace.gone(place, 3600.0 * self.spot_offset_h, until_s):
                    events += [(gone_s, "down", node_id), (back_s, "up", node_id)]
        return sorted(event for event in events if event[0] < math.inf)

    def _spells(
        self, node: str, begin: Kind, end: Kind, spell: tuple[float, float], seed: int, until_s: float
    ) -> Iterator[tuple[float, Kind, str]]:
        """Yield the start and end of each random spell; ``spell`` is (mean hours between spells, duration [s])."""
        every_h, lasts_s = spell
        dice, now_s = random.Random(f"{seed}/{begin}/{node}"), 0.0
        while every_h > 0:
            now_s += dice.expovariate(1.0 / (3600.0 * every_h))
            if now_s > until_s:
                return
            yield now_s, begin, node
            now_s += lasts_s
            yield now_s, end, node
