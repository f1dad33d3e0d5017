"""True profile of an application: step times per GPU type, gradient statistics and progress per epoch."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from placement.errors import InputError
from placement.goodput.model import NoiseScale
from placement.simulator.workloads.tables import Floats, StepTimes, Times, numbers

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
        """Return an application whose epochs each last ``epoch`` iterations at the initial batch."""
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
        """Return the same training, with the same phases, over another number of epochs of the same length."""
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
        """Initial global batch, at which progress is counted in iterations [samples]."""
        return self.batch_sizes[0]

    @property
    def max_batch_size(self) -> int:
        """Largest global batch [samples]."""
        return self.batch_sizes[-1]

    def local_bsz_range(self, gpu: str) -> tuple[int, int]:
        """Return the fewest and most samples per worker and micro-step on this GPU type."""
        least, most = self.step_times[gpu].local_bsz_range
        return least, min(most, _LOCAL_CAPS.get(self.name, {}).get(gpu, most))

    def progress_at(self, epoch: int) -> float:
        """Return cumulative scale-invariant iterations after this number of epochs; 0 at 0."""
        return float(self._progress[epoch])

    def noise(self, batch_size: float, epoch: int) -> NoiseScale:
        """Return gradient statistics in an epoch, interpolated linearly between profiled batch sizes."""
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
        """Return the progress of one step at this batch in an epoch, in steps at the initial batch."""
        if self.fixed_batch:
            return 1.0  # of shares that are not even the largest counts, which makes no larger batch
        key = batch_size, epoch
        if key not in self._gain:
            self._gain[key] = float(self.noise(batch_size, epoch).gain(batch_size / self.init_batch_size))
        return self._gain[key]

    def iterations_at(self, batch_size: float, epoch: int) -> float:
        """Return the optimizer steps of a run at this batch up to the end of epoch number ``epoch`` (from 0)."""
        return float(np.interp(batch_size, self._sizes, self._iterations[:, epoch]))


def load_profiles(folder: str | Path, gpus: tuple[str, ...]) -> dict[str, Application]:
    """Load all applications of a folder that were profiled on all of these GPU types, keyed by name.

    Raises InputError: the folder is missing or has no application, or a file lacks a column or has non-numbers.
    """
    return dict(_load(Path(folder).resolve(), tuple(gpus)))


@functools.lru_cache(maxsize=8)  # simulations of one process share the tables
def _load(folder: Path, gpus: tuple[str, ...]) -> dict[str, Application]:
    """Return applications that have placement tables for all GPU types, by name. Raise InputError if there are none."""
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
