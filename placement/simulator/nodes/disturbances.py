"""Disturbances to a simulated cluster (failures, spot nodes, slow nodes, shared links, noise), from one seed.

Two recording formats for spot machines are supported: counts at every tick (JSON, skypilot-org/spot-traces) and machine
arrivals and departures (CSV, uclasystem/bamboo). Both are converted to places, each occupied by a machine at some times
and empty at others. Every spot node in the cluster is assigned one place, and exists while that place is occupied.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from placement.checks import check_number, is_whole
from placement.cluster.cluster import Cluster, Node
from placement.errors import InputError, reading
from placement.simulator.world.rules import Rules

Kind = Literal["down", "up", "slow", "well"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Disturbances:
    """Rates of disturbances, all 0 by default. Rules other than ``live`` support only measurement noise."""

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
        check_number("interference", self.interference, least=0, below=1, error=InputError)
        if "" in self.spot and len(self.spot) > 1:
            raise InputError("spot must be one trace for all nodes, or one a GPU type, but got both")

    def check(self, rules: Rules, cluster: Cluster) -> None:
        """Raise InputError unless the simulation's rules and cluster support these disturbances."""
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
        """Return those GPU types in ``types`` that have spot nodes."""
        return tuple(gpu for gpu in types if "" in self.spot or gpu in self.spot)

    def script(self, nodes: Sequence[Node], seed: int, until_s: float) -> list[tuple[float, Kind, str]]:
        """Return (time [s], event, node id) for all events until ``until_s``, sorted: "down", "up", "slow", "well"."""
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


Span = tuple[float, float]
"""(from, to) [s]."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpotTrace:
    """Recorded spot market with numbered places, each with the times when it held a machine."""

    source: str
    length_s: float  # when the record ends [s]; it is then played again from its start
    places: tuple[tuple[Span, ...], ...]  # for each place, when it was taken, in the order of time

    def __post_init__(self) -> None:
        if not self.length_s > 0:
            raise InputError(f"spot trace {self.source} must span some time, but got {self.length_s} seconds")
        if not any(self.places):
            raise InputError(f"spot trace {self.source} must have a machine at some time, but never has one")

    def deal(self, nodes: Sequence[str], seed: int) -> dict[str, int]:
        """Return the index of a random place in the market per node; places repeat only if nodes outnumber them."""
        order = list(range(len(self.places)))
        random.Random(f"{seed}/spot").shuffle(order)
        return {node: order[i % len(order)] for i, node in enumerate(nodes)}

    def gone(self, place: int, offset_s: float, until_s: float) -> Iterator[Span]:
        """Yield (from, to) [s] for each time a place is empty, until ``until_s``; 0 s is ``offset_s`` in the trace."""
        taken = self.places[place]
        if not taken:
            yield 0.0, math.inf
            return
        now_s, cycle = 0.0, 0
        while now_s <= until_s:
            for start_s, end_s in taken:
                shift_s = cycle * self.length_s - offset_s % self.length_s
                if start_s + shift_s > now_s:
                    yield now_s, start_s + shift_s
                now_s = max(now_s, end_s + shift_s)
                if now_s > until_s:
                    return
            cycle += 1


def read_spot(path: str | Path) -> SpotTrace:
    """Read a recorded spot market: JSON with ``metadata.gap_seconds`` and ``data``, or CSV.

    CSV lines are ``milliseconds,add|remove,name``. Raises InputError if the file cannot be read, has neither format, or
    is inconsistent; the message names the file and the position in it.
    """
    with reading(f"spot trace {path}"):
        text = Path(path).read_text(encoding="utf-8")
    if Path(path).suffix == ".json":
        return _counts(text, str(path))
    if Path(path).suffix == ".csv":
        return _events(text, str(path))
    raise InputError(f"spot trace must be a .json file of counts or a .csv file of events, but got {path}")


def _counts(text: str, source: str) -> SpotTrace:
    """Return the trace from a JSON record; place k (from 0) is occupied while the count is above k."""
    try:
        found = json.loads(text)
        gap_s, counts = found["metadata"]["gap_seconds"], found["data"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"spot trace {source} must hold metadata.gap_seconds and data: {error!r}") from error
    check_number(f"metadata.gap_seconds of spot trace {source}", gap_s, above=0, unit="seconds", error=InputError)
    if not isinstance(counts, list) or not counts:
        raise InputError(f"data of spot trace {source} must be a list of counts, but got {type(counts).__name__}")
    for i, count in enumerate(counts):
        if not is_whole(count):
            raise InputError(f"data[{i}] of spot trace {source} must be a count of 0 or more, but got {count!r}")
    places = [_merge((i * gap_s, (i + 1) * gap_s) for i, c in enumerate(counts) if c > k) for k in range(max(counts))]
    return SpotTrace(source=source, length_s=float(gap_s * len(counts)), places=tuple(places))


def _merge(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Merge adjacent spans."""
    merged: list[Span] = []
    for start_s, end_s in spans:
        if merged and merged[-1][1] == start_s:
            merged[-1] = merged[-1][0], float(end_s)
        else:
            merged.append((float(start_s), float(end_s)))
    return tuple(merged)


def _events(text: str, source: str) -> SpotTrace:
    """Return the trace from CSV events; each added machine occupies the first empty place."""
    places: list[list[Span]] = []
    taken: dict[str, tuple[int, float]] = {}
    now_s = 0.0
    for number, row in enumerate(csv.reader(text.splitlines()), start=1):
        where = f"{source}, line {number}"
        at_s, what, name = _event(row, where)
        if at_s < now_s:
            raise InputError(f"{where}: times must not fall, but {at_s:g} s follows {now_s:g} s")
        now_s = at_s
        if what == "add":
            if name in taken:
                raise InputError(f"{where}: {name!r} is added, but is already there")
            busy = {place for place, _ in taken.values()}
            place = next(k for k in range(len(places) + 1) if k not in busy)
            if place == len(places):
                places.append([])
            taken[name] = place, now_s
        else:
            if name not in taken:
                raise InputError(f"{where}: {name!r} is removed, but does not exist")
            place, since_s = taken.pop(name)
            if now_s > since_s:
                places[place].append((since_s, now_s))
    for place, since_s in taken.values():
        if now_s > since_s:
            places[place].append((since_s, now_s))
    return SpotTrace(source=source, length_s=now_s, places=tuple(_merge(spans) for spans in places))


def _event(row: Sequence[str], where: str) -> tuple[float, str, str]:
    """Return (time [s], ``add`` or ``remove``, machine name) from a CSV row; raise InputError if it is malformed."""
    try:
        at_ms, what, name = row
        at_s = float(at_ms) / 1000.0
    except ValueError as error:
        raise InputError(f"{where} must be 'milliseconds,add|remove,name', but got {','.join(row)!r}") from error
    if what not in ("add", "remove") or not name or not (at_s >= 0 and math.isfinite(at_s)):
        raise InputError(f"{where} must be 'milliseconds,add|remove,name', but got {','.join(row)!r}")
    return at_s, what, name
