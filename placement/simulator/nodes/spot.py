"""Recorded traces of spot machines, assigned to the nodes of a simulated cluster.

Two formats are read: counts at every tick (JSON, skypilot-org/spot-traces) and machine arrivals and departures (CSV,
uclasystem/bamboo). Both become a number of places, each occupied by a machine at some times and empty at others. Every
spot node of the cluster is assigned one place, and exists while that place is occupied.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from placement.checks import is_whole
from placement.errors import InputError

Span = tuple[float, float]
"""(from, to) [s]."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpotTrace:
    """A recorded spot market: the times at which each of its places held a machine."""

    source: str
    length_s: float  # when the record ends [s]; it is then played again from its start
    places: tuple[tuple[Span, ...], ...]  # for each place, when it was taken, in the order of time

    def __post_init__(self) -> None:
        if not self.length_s > 0:
            raise InputError(f"spot trace {self.source} must span some time, but got {self.length_s} seconds")
        if not any(self.places):
            raise InputError(f"spot trace {self.source} must have a machine at some time, but never has one")

    def deal(self, nodes: Sequence[str], seed: int) -> dict[str, int]:
        """Return the place of each node. Places are distinct while there are enough, and reused after that."""
        order = list(range(len(self.places)))
        random.Random(f"{seed}/spot").shuffle(order)
        return {node: order[i % len(order)] for i, node in enumerate(nodes)}

    def gone(self, place: int, offset_s: float, until_s: float) -> Iterator[Span]:
        """Yield the spans of simulated time in which a place is empty; second 0 is ``offset_s`` of the record."""
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
    """Read a trace: JSON with ``metadata.gap_seconds`` and ``data``, or CSV lines ``milliseconds,add|remove,name``.

    Raises InputError: the file cannot be read, has neither format, or is inconsistent; the message names the file and
    the position in it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"spot trace {path} cannot be read: {error}") from error
    if Path(path).suffix == ".json":
        return _counts(text, str(path))
    if Path(path).suffix == ".csv":
        return _events(text, str(path))
    raise InputError(f"spot trace must be a .json file of counts or a .csv file of events, but got {path}")


def _counts(text: str, source: str) -> SpotTrace:
    """Return the trace of a JSON record; place k (from 0) is occupied while the count is above k."""
    try:
        found = json.loads(text)
        gap_s, counts = found["metadata"]["gap_seconds"], found["data"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"spot trace {source} must hold metadata.gap_seconds and data: {error!r}") from error
    if isinstance(gap_s, bool) or not isinstance(gap_s, (int, float)) or not gap_s > 0:
        raise InputError(f"metadata.gap_seconds of spot trace {source} must be above 0 seconds, but got {gap_s!r}")
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
    """Return the trace of CSV events; each added machine occupies the first empty place."""
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
    """Return (time [s], ``add`` or ``remove``, machine name) of a CSV row. Raise InputError if it is malformed."""
    try:
        at_ms, what, name = row
        at_s = float(at_ms) / 1000.0
    except ValueError as error:
        raise InputError(f"{where} must be 'milliseconds,add|remove,name', but got {','.join(row)!r}") from error
    if what not in ("add", "remove") or not name or not (at_s >= 0 and math.isfinite(at_s)):
        raise InputError(f"{where} must be 'milliseconds,add|remove,name', but got {','.join(row)!r}")
    return at_s, what, name
