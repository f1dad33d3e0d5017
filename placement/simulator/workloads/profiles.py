"""Ground truth about an application: step times per GPU type, gradient statistics and progress per epoch."""

from __future__ import annotations

import copy
import csv
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from placement.errors import InputError, reading
from placement.goodput.model import NoiseScale

_CURVES = ("progress", "iteration", "grad_sqr", "grad_var")
_LOCAL_CAPS = {"yolov3": {"aws": 8}}  # Pollux: the larger batches of this table do not fit beside the optimizer


class Application:
    """Profile of one application, read from its folder or fitted to recorded measurements (``fitted``)."""

    name: str  # the folder's name
    # profiled global batches [samples], rising; the first is the initial batch, the last the largest
    batch_sizes: tuple[int, ...]
    epochs: int  # epochs to completion
    step_times: Mapping[str, Times]  # by GPU type

    def __init__(self, folder: Path, gpus: tuple[str, ...]) -> None:
        files = {
            int(m[1]): f for f in folder.glob("validation-*.csv") if (m := re.fullmatch(r"validation-(\d+)", f.stem))
        }
        if not files:
            raise InputError(f"profile {folder} must hold validation-<batch size>.csv files, but has none")
        curves = {size: numbers(file, _CURVES) for size, file in sorted(files.items())}
        lengths = {len(curve["progress"]) for curve in curves.values()}
        if len(lengths) > 1:
            raise InputError(
                f"the validation files of profile {folder} must have equally many epochs, but got {lengths}"
            )
        columns = [np.array([curve[column] for curve in curves.values()]) for column in _CURVES]
        step_times = {gpu: StepTimes(folder, gpu) for gpu in gpus}
        self._know(folder.name, tuple(curves), columns[0], columns[1], columns[2], columns[3], step_times)

    @classmethod
    def fitted(
        cls,
        name: str,
        *,
        batch_sizes: tuple[int, ...],
        epochs: int,
        epoch: float,
        noise: NoiseScale,
        step_times: Mapping[str, Times],
    ) -> Application:
        """Return an application whose epochs each last ``epoch`` iterations (steps at the initial batch)."""
        ends = epoch * np.arange(1, epochs + 1)
        rows = np.ones((len(batch_sizes), 1))
        gains = np.array([[noise.gain(size / batch_sizes[0])] for size in batch_sizes])
        still = np.ones_like(rows @ ends[np.newaxis])
        made = cls.__new__(cls)
        made._know(name, batch_sizes, rows * ends, ends / gains, noise.sqr * still, noise.var * still, step_times)
        return made

    def _know(
        self,
        name: str,
        batch_sizes: tuple[int, ...],
        progress: Floats,
        iterations: Floats,
        sqr: Floats,
        var: Floats,
        step_times: Mapping[str, Times],
    ) -> None:
        """Store curves with one row per batch size and one column per epoch."""
        self.name, self.batch_sizes, self.epochs = name, batch_sizes, progress.shape[1]
        self._sizes = np.array(batch_sizes, dtype=np.float64)
        self._sqr, self._var, self._iterations = sqr, var, iterations
        self._progress = np.concatenate([[0.0], progress.min(axis=0)])
        self.step_times = step_times
        self._noise: dict[tuple[float, int], NoiseScale] = {}
        self._gain: dict[tuple[int, int], float] = {}
        self._stretched: dict[int, Application] = {self.epochs: self}

    def stretched(self, epochs: int) -> Application:
        """Return this application with a different number of epochs, stretching its phases of training to fit."""
        if epochs not in self._stretched:
            twin = copy.copy(self)
            twin.epochs, factor = epochs, epochs / self.epochs
            ends = np.arange(epochs + 1) / factor
            phases = np.minimum((np.arange(epochs) + 0.5) / factor, self.epochs - 1).astype(int)
            before = np.arange(self.epochs + 1)
            twin._progress = factor * np.interp(ends, before, self._progress)
            twin._iterations = np.array(
                [factor * np.interp(ends[1:], before, np.concatenate([[0.0], row])) for row in self._iterations]
            )
            twin._sqr, twin._var = self._sqr[:, phases], self._var[:, phases]
            twin._noise, twin._gain = {}, {}
            self._stretched[epochs] = twin
        return self._stretched[epochs]

    @property
    def fixed_batch(self) -> int | None:
        """Fixed global batch, if only one was profiled [samples]; None if the batch adapts."""
        return self.batch_sizes[0] if len(self.batch_sizes) == 1 else None

    @property
    def init_batch_size(self) -> int:
        """Initial global batch [samples]; progress is counted in iterations at this batch."""
        return self.batch_sizes[0]

    @property
    def max_batch_size(self) -> int:
        """Largest global batch [samples]."""
        return self.batch_sizes[-1]

    def local_bsz_range(self, gpu: str) -> tuple[int, int]:
        """Return the minimum and maximum number of samples per worker and micro-step on this GPU type."""
        least, most = self.step_times[gpu].local_bsz_range
        return least, min(most, _LOCAL_CAPS.get(self.name, {}).get(gpu, most))

    def progress_at(self, epoch: int) -> float:
        """Return the cumulative progress after this number of epochs, in iterations (steps at the initial batch)."""
        return float(self._progress[epoch])

    def noise(self, batch_size: float, epoch: int) -> NoiseScale:
        """Return the gradient's squared norm and variance at a batch size [samples] in an epoch, by interpolation."""
        key = float(batch_size), epoch
        if key not in self._noise and self.fixed_batch:
            self._noise[key] = NoiseScale(sqr=float(self._sqr[0, epoch]), var=float(self._var[0, epoch]))
        if key not in self._noise:
            i = int(np.clip(np.searchsorted(self._sizes, batch_size), 1, len(self._sizes) - 1))
            low, high = self._sizes[i - 1], self._sizes[i]
            part = min(max((batch_size - low) / (high - low), 0.0), 1.0)
            sqr, var = (float(x[i - 1, epoch] * (1 - part) + x[i, epoch] * part) for x in (self._sqr, self._var))
            self._noise[key] = NoiseScale(sqr=sqr, var=var)
        return self._noise[key]

    def gain(self, batch_size: int, epoch: int) -> float:
        """Return the progress of one step at this batch during an epoch, measured in steps at the initial batch."""
        if self.fixed_batch:
            return 1.0  # of shares that are not even the largest counts, which makes no larger batch
        key = batch_size, epoch
        if key not in self._gain:
            self._gain[key] = float(self.noise(batch_size, epoch).gain(batch_size / self.init_batch_size))
        return self._gain[key]

    def iterations_at(self, batch_size: float, epoch: int) -> float:
        """Return the number of optimizer steps in epoch ``epoch`` (from 0) at this batch."""
        return float(np.interp(batch_size, self._sizes, self._iterations[:, epoch]))


def load_profiles(folder: str | Path, gpus: tuple[str, ...]) -> dict[str, Application]:
    """Load those applications in a folder that were profiled on all of these GPU types, keyed by name."""
    return dict(_load(Path(folder).resolve(), tuple(gpus)))


@functools.lru_cache(maxsize=8)  # simulations of one process share the tables
def _load(folder: Path, gpus: tuple[str, ...]) -> dict[str, Application]:
    """Return applications that have placement tables for all GPU types, by name; raise InputError if none exist."""
    if not folder.is_dir():
        raise InputError(f"profiles must be a folder with one folder per application, but got {folder}")
    found = {
        each.name: Application(each, gpus)
        for each in sorted(folder.iterdir())
        if each.is_dir() and all((each / f"placements-{gpu}.csv").exists() for gpu in gpus)
    }
    if not found:
        raise InputError(f"profiles {folder} must hold placements-<gpu>.csv for {', '.join(gpus)}, but no folder does")
    return found


Floats: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = "tuple[int, ...]"

MOST_NODES = 16
"""Tables end here: a job on more nodes is taken to run as on so many."""


def read_rows(path: str | Path, columns: Sequence[str], what: str) -> list[tuple[int, dict[str, str | None]]]:
    """Return the rows of a CSV file that must have these columns, each with its line number."""
    with reading(f"{what} {path}"), open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            raise InputError(
                f"{what} {path} must have the columns {', '.join(columns)}, but {', '.join(missing)} is missing"
            )
        return [(reader.line_num, row) for row in reader]


def read_columns(path: Path, columns: Sequence[str]) -> dict[str, list[str]]:
    """Return columns of a profile as text, keyed by header."""
    rows = read_rows(path, columns, "profile")
    if not rows:
        raise InputError(f"profile {path} must hold one row or more, but is empty")
    return {column: [row[column] or "" for _, row in rows] for column in columns}


def numbers(path: Path, columns: Sequence[str]) -> dict[str, Floats]:
    """Return columns of a profile as arrays, keyed by header.

    Raises InputError for the same reasons as ``read_columns``, and if a value is not a finite number.
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
    """Return the lexicographically smallest rotation of the workers per node, which identifies a placement."""
    rotations = [tuple(counts[i:]) + tuple(counts[:i]) for i in range(len(counts))]
    return min(rotations)


class Times(Protocol):
    """Protocol for an application's true step times on one GPU type."""

    @property
    def local_bsz_range(self) -> tuple[int, int]:
        """Minimum and maximum number of samples per worker and micro-step."""
        ...

    def times(self, counts: Counts, local_bsz: float) -> tuple[float, float]:
        """Return the time of a step without accumulation, and the part of it spent on synchronisation [s]."""
        ...


class StepTimes:
    """True step times by placement and local batch (samples per worker), which no policy sees.

    A placement in ``placements-<gpu>.csv`` is interpolated linearly in the local batch. For any other placement, the
    rows are averaged by (nodes, replicas, local batch), ``scalability-<gpu>.csv`` is appended, and all three axes are
    interpolated linearly over a Delaunay triangulation, with at most 16 nodes. This is the rule of the Pollux artifact,
    so its figures can be reproduced. For a point outside the measured region, the nearest measured node and replica
    counts are used.
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
        """Return the time of a step without accumulation, and the part of it spent on synchronisation [s]."""
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
        """Return interpolated (step time, synchronisation part) [s], for the nearest shape if not measured."""
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
    """Interpolate piecewise linearly between the points, extrapolating from the outer segments."""
    if len(xs) == 1:
        return float(ys[0])
    i = int(np.clip(np.searchsorted(xs, x), 1, len(xs) - 1))
    slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
    return float(ys[i - 1] + slope * (x - xs[i - 1]))
