"""True step times of one application on one GPU type: measured tables, with interpolation."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from placement.errors import InputError

Floats: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = "tuple[int, ...]"

MOST_NODES = 16
"""Tables end here: a job on more nodes is taken to run as on so many."""


def read_columns(path: Path, columns: Sequence[str]) -> dict[str, list[str]]:
    """Return columns of a CSV file keyed by header, in any order.

    Raises InputError: the file is missing or empty, or lacks a column.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [column for column in columns if column not in (reader.fieldnames or ())]
            if missing:
                raise InputError(
                    f"profile {path} must have the columns {', '.join(columns)}, but {', '.join(missing)} is missing"
                )
            rows = list(reader)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"profile {path} cannot be read: {error}") from error
    if not rows:
        raise InputError(f"profile {path} must hold one row or more, but is empty")
    return {column: [row[column] or "" for row in rows] for column in columns}


def numbers(path: Path, columns: Sequence[str]) -> dict[str, Floats]:
    """Return the result of ``read_columns`` for columns of finite numbers.

    Raises InputError: as ``read_columns``, or a value is not a finite number.
    """
    return {column: _numbers(path, column, texts) for column, texts in read_columns(path, columns).items()}


def _numbers(path: Path, column: str, texts: Sequence[str]) -> Floats:
    try:
        values = np.array([float(text) for text in texts], dtype=np.float64)
    except ValueError as error:
        raise InputError(f"column {column} of profile {path} must hold numbers: {error}") from error
    if not np.isfinite(values).all():
        raise InputError(f"column {column} of profile {path} must hold finite numbers")
    return values


def canonical(counts: Sequence[int]) -> Counts:
    """Return the lexicographically smallest rotation of the workers per node, as placements are named in the tables."""
    rotations = [tuple(counts[i:]) + tuple(counts[:i]) for i in range(len(counts))]
    return min(rotations)


class Times(Protocol):
    """Protocol of the true step times of an application on one GPU type."""

    @property
    def local_bsz_range(self) -> tuple[int, int]:
        """Fewest and most samples per worker and micro-step."""
        ...

    def times(self, counts: Counts, local_bsz: float) -> tuple[float, float]:
        """Return (step time without accumulation, its synchronisation part) [s]."""
        ...


class StepTimes:
    """True step times by placement and local batch, which no policy sees.

    A placement in ``placements-<gpu>.csv`` is interpolated linearly in the local batch. For any other placement, the
    rows are averaged by (nodes, replicas, local batch), ``scalability-<gpu>.csv`` is appended, and all three axes are
    interpolated linearly over a Delaunay triangulation, with at most 16 nodes. This is the Pollux artifact's rule, so
    its figures can be reproduced. A point outside the measured region uses the nearest measured node and replica
    count.
    """

    def __init__(self, folder: Path, gpu: str) -> None:
        self.gpu = gpu
        path = folder / f"placements-{gpu}.csv"
        names = read_columns(path, ["placement"])["placement"]
        table = numbers(path, ["local_bsz", "step_time", "sync_time"])
        self._known: dict[Counts, tuple[Floats, Floats]] = {}
        rows: dict[tuple[int, int, float], list[tuple[float, float]]] = {}
        groups: dict[Counts, list[tuple[float, float, float]]] = {}
        for name, local, step, sync in zip(
            names, table["local_bsz"], table["step_time"], table["sync_time"], strict=True
        ):
            counts = _placement(path, name)
            groups.setdefault(counts, []).append((local, step, sync))
            rows.setdefault((len(counts), sum(counts), local), []).append((step, sync))
        for counts, points in groups.items():
            array = np.array(sorted(points))
            self._known[counts] = array[:, 0], array[:, 1:]
        self.local_bsz_range = int(table["local_bsz"].min()), int(table["local_bsz"].max())
        mean = {key: np.mean(times, axis=0) for key, times in sorted(rows.items())}
        extra = numbers(
            folder / f"scalability-{gpu}.csv", ["num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time"]
        )
        axes = np.column_stack([extra["num_nodes"], extra["num_replicas"], extra["local_bsz"]])
        times = np.column_stack([extra["step_time"], extra["sync_time"]])
        self._axes = np.concatenate([np.array(list(mean), dtype=np.float64), axes])
        self._times = np.concatenate([np.array(list(mean.values()), dtype=np.float64), times])
        self._between: object | None = None
        self._cache: dict[tuple[Counts, float], tuple[float, float]] = {}

    def times(self, counts: Counts, local_bsz: float) -> tuple[float, float]:
        """Return (step time without accumulation, its synchronisation part) [s].

        Args:
            counts: Workers on each node, each at least 1, in the order of the nodes.
            local_bsz: Samples per worker and micro-step, at least 1.
        """
        key = canonical(counts), float(local_bsz)
        if key not in self._cache:
            self._cache[key] = self._look_up(*key)
        return self._cache[key]

    def _look_up(self, counts: Counts, local_bsz: float) -> tuple[float, float]:
        if counts in self._known:
            sizes, times = self._known[counts]
            step, sync = (_line(local_bsz, sizes, times[:, i]) for i in (0, 1))
        else:
            step, sync = self._interpolate(min(len(counts), MOST_NODES), sum(counts), local_bsz)
        step = max(step, 1e-9)  # lines that are continued far below the smallest batch
        return step, min(max(sync, 0.0), step)

    def _interpolate(self, nodes: int, replicas: int, local_bsz: float) -> tuple[float, float]:
        """Return interpolated (step time, its synchronisation) [s]; those of the nearest shape if not measured."""
        from scipy.interpolate import LinearNDInterpolator  # takes a while to import

        if self._between is None:
            self._between = LinearNDInterpolator(self._axes, self._times)
        between: LinearNDInterpolator = self._between  # type: ignore[assignment]
        local = float(np.clip(local_bsz, self._axes[:, 2].min(), self._axes[:, 2].max()))
        for n, r in itertools.chain([(nodes, replicas)], self._nearest(nodes, replicas)):
            step, sync = np.ravel(between([[n, r, local]])).tolist()
            if step == step:  # not a number: outside everything measured
                return step, sync
        raise InputError(f"no step time of {self.gpu} is near {nodes} nodes, {replicas} replicas, {local_bsz} samples")

    def _nearest(self, nodes: int, replicas: int) -> list[tuple[float, float]]:
        """Return measured (nodes, replicas) pairs, the nearest first."""
        pairs = np.unique(self._axes[:, :2], axis=0)
        away = np.abs(np.log(pairs / np.array([nodes, replicas]))).sum(axis=1)
        return [(float(n), float(r)) for n, r in pairs[np.argsort(away, kind="stable")]]


def _placement(path: Path, name: str) -> Counts:
    if not name.isdigit() or "0" in name:
        raise InputError(f"placement of profile {path} must be digits from 1 to 9, but got {name!r}")
    return canonical([int(digit) for digit in name])


def _line(x: float, xs: Floats, ys: Floats) -> float:
    """Interpolate piecewise linearly through the points, extrapolating from the outer segments."""
    if len(xs) == 1:
        return float(ys[0])
    i = int(np.clip(np.searchsorted(xs, x), 1, len(xs) - 1))
    slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
    return float(ys[i - 1] + slope * (x - xs[i - 1]))
