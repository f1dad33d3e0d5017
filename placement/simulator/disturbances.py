"""What goes wrong in a simulated cluster: failures, slow nodes, shared links, noise; all from one seed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Literal

from placement.simulator.errors import InputError

Kind = Literal["down", "up", "slow", "well"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Disturbances:
    """How much goes wrong; nothing by default. Only ``--rules live`` knows of more than noise.

    Attributes:
        node_mtbf_h: mean hours between failures (or spot preemptions) of one node; 0 for none.
        repair_s: time until a lost node is back [s].
        slow_every_h: mean hours between slow spells of one node; 0 for none.
        slow_for_s: length of a slow spell [s].
        slow_factor: how much longer a step takes there; the slowest worker sets the pace.
        interference: part of its speed that a job of several nodes loses while it shares a node with another.
        noise: standard deviation of the logarithm of measured step times.
    """

    node_mtbf_h: float = 0.0
    repair_s: float = 600.0
    slow_every_h: float = 0.0
    slow_for_s: float = 1800.0
    slow_factor: float = 2.0
    interference: float = 0.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        for field in ("node_mtbf_h", "slow_every_h", "noise"):
            if not getattr(self, field) >= 0:
                raise InputError(f"{field} must be 0 or more, but got {getattr(self, field)}")
        for field in ("repair_s", "slow_for_s"):
            if not getattr(self, field) > 0:
                raise InputError(f"{field} must be above 0 seconds, but got {getattr(self, field)}")
        if not self.slow_factor >= 1:
            raise InputError(f"slow_factor must be 1 or more, but got {self.slow_factor}")
        if not 0 <= self.interference < 1:
            raise InputError(f"interference must be at least 0 and below 1, but got {self.interference}")

    def script(self, nodes: Sequence[str], seed: int, until_s: float) -> list[tuple[float, Kind, str]]:
        """(time, what, node) of everything that happens to nodes until then, in the order of time."""
        events: list[tuple[float, Kind, str]] = []
        for node in nodes:
            for every_h, lasts_s, begin, end in (
                (self.node_mtbf_h, self.repair_s, "down", "up"),
                (self.slow_every_h, self.slow_for_s, "slow", "well"),
            ):
                dice, now_s = random.Random(f"{seed}/{begin}/{node}"), 0.0
                while every_h > 0:
                    now_s += dice.expovariate(1.0 / (3600.0 * every_h))
                    if now_s > until_s:
                        break
                    first: Kind = "down" if begin == "down" else "slow"
                    last: Kind = "up" if end == "up" else "well"
                    events += [(now_s, first, node), (now_s + lasts_s, last, node)]
                    now_s += lasts_s
        return sorted(events)
