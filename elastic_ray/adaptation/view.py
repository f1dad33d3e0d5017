"""Read-only view of a run, passed to policies and identical on all ranks (pure)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ray.monitoring.measures import WorkerMeasures
from placement.goodput.model import NoiseScale


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyView:
    """Read-only view of a run between two steps, passed to the hooks of policies.

    All values, including elapsed time, are the same on all ranks. Times measured by workers are from the step before
    the one that has just ended.

    Attributes:
        step: number of committed optimizer steps.
        epoch: current epoch, from 0.
        epochs: declared number of epochs; None if not declared.
        epoch_progress: fraction of the epoch's samples used so far in the current pass, 0..1.
        samples: samples trained on since the run started.
        workers: number of ranks in the current group.
        generation: number of the current group; increases with each resize.
        nodes: number of nodes with workers.
        min_workers: smallest allowed number of workers; None if the group is fixed, as under ``torchrun``.
        max_workers: largest allowed number of workers; None if the group is fixed.
        batch_size: global batch of a full step [samples].
        initial_batch_size: global batch that the user's learning rate is meant for [samples].
        max_batch_size: largest batch that the loader allows [samples]; None if the batch is fixed.
        critical_batch: largest batch that wastes no samples, as measured by the job's branches [samples]; None if not
            measured.
        learning_rates: learning rates of the first model's parameter groups, as set by user code and schedulers.
        rate_factor: product of all ``ScaleRate`` requests so far.
        noise: gradient noise of the first model; None before it is measured.
        step_s: duration of a step on rank 0 [s]; 0 until a step of this group has been measured.
        sync_s: time that rank 0 spent waiting for reductions in the same step [s].
        worker_measures: measurements of each rank; empty before the first step of a group.
        elapsed_s: time since the run's first step, including pauses [s].
        worker_s: ``elapsed_s`` summed over the workers [worker-seconds].
        strategies: names of the models' synchronisation strategies.
        metrics: values of the watched metrics (``Policy.watches``) in rank 0's last report; missing metrics are left
            out.
        tokens_per_sample: tokens per sample if the loader's batch is declared in tokens; otherwise None.
        counted_tokens: tokens trained on, if the loop counts them with ``loader.weigh``; otherwise None.
        reports: number of the report that ``metrics`` come from.
        sums: contents of this epoch's accumulators, in the order the loop created them.

    Examples:
        >>> from elastic_ray.adaptation import PolicyView
        >>> view = PolicyView(step=100, workers=4, batch_size=128)
        >>> view.batch_size // view.workers
        32
    """

    step: int = 0
    epoch: int = 0
    epochs: int | None = None
    epoch_progress: float = 0.0
    samples: int = 0
    workers: int = 1
    generation: int = 0
    nodes: int = 1
    min_workers: int | None = None
    max_workers: int | None = None
    batch_size: int = 0
    initial_batch_size: int = 0
    max_batch_size: int | None = None
    critical_batch: int | None = None
    learning_rates: tuple[float, ...] = ()
    rate_factor: float = 1.0
    noise: NoiseScale | None = None
    step_s: float = 0.0
    sync_s: float = 0.0
    worker_measures: tuple[WorkerMeasures, ...] = ()
    elapsed_s: float = 0.0
    worker_s: float = 0.0
    strategies: tuple[str, ...] = ()
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    tokens_per_sample: float | None = None
    counted_tokens: float | None = None
    reports: int = 0
    sums: Sequence[Mapping[str, float]] = ()

    @property
    def progress(self) -> float | None:
        """Fraction of the declared epochs completed so far (0 to 1); None if no number of epochs is declared."""
        if not self.epochs:
            return None
        return min(1.0, (self.epoch + self.epoch_progress) / self.epochs)

    @property
    def tokens(self) -> float | None:
        """Tokens trained on since the run started; None if the loader's batch is not declared in tokens."""
        if self.counted_tokens is not None or self.tokens_per_sample is None:
            return self.counted_tokens
        return self.samples * self.tokens_per_sample

    @property
    def samples_left(self) -> float | None:
        """Samples left in the declared epochs, assuming that future epochs are the same size as past ones.

        None if no number of epochs is declared, and before the first sample.
        """
        done = self.progress
        return self.samples * (1.0 - done) / done if done else None

    @property
    def throughput(self) -> float:
        """Samples per second at the current batch and step time; 0 until a step has been measured."""
        return self.batch_size / self.step_s if self.step_s > 0 else 0.0

    @property
    def noise_scale(self) -> float | None:
        """Simple noise scale B = tr(Sigma) / |G|^2 [samples] (McCandlish et al. 2018, eq. 2.9).

        None before it is measured, and while the estimated squared norm of the gradient is not above 0.
        """
        return None if self.noise is None else self.noise.batch_size(self.initial_batch_size)

    @property
    def gradient_variance(self) -> float | None:
        """Trace of the covariance of one sample's gradient, tr(Sigma); None before it is measured."""
        return None if self.noise is None else max(0.0, self.noise.var) * self.initial_batch_size

    def to_json(self) -> dict[str, Any]:
        """Return the view as plain values, for logs."""
        return dataclasses.asdict(self)


class WatchedMetrics:
    """Reported metrics that policies watch, which rank 0 sends to all ranks within each step's all-reduced numbers."""

    resting: None = None

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._own: dict[str, float] = {}
        self._own_reports = 0
        self.latest: dict[str, float] = {}  # what all ranks know rank 0 to have reported last, by name
        self.reports = 0  # how many reports that stands for

    def watch(self, names: Sequence[str]) -> None:
        """Add metrics to watch; call this before the first epoch, with the same names on all ranks."""
        self._names = tuple(sorted({*self._names, *names}))

    def restore(self, latest: Mapping[str, float], reports: int) -> None:
        """Set the watched metrics, and the number of their report, to values from another rank or a checkpoint."""
        self.latest, self.reports = dict(latest), reports

    def reported(self, metrics: Mapping[str, Any], number: int) -> None:
        """Record those of ``metrics`` that are watched; this rank reports them as the run's report ``number``."""
        numbers = {name: metrics.get(name) for name in self._names}
        self._own = {
            name: float(value)
            for name, value in numbers.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        self._own_reports = number

    def start(self) -> None:
        """Enter a new group of ranks; metrics received in the previous group stay valid."""

    def size(self, world_size: int) -> int:
        """Return the number of values that this object adds to the control sums (numbers all-reduced in each step)."""
        return 1 + 2 * len(self._names) if self._names else 0

    def values(self, rank: int, world_size: int) -> Sequence[float]:
        """Return rank 0's newly reported watched metrics, to be summed over ranks; zeros elsewhere, or if none."""
        if not self._names:
            return ()
        if rank != 0 or self._own_reports <= self.reports:
            return [0.0] * self.size(world_size)
        pairs = [(1.0, self._own[name]) if name in self._own else (0.0, 0.0) for name in self._names]
        return [float(self._own_reports), *(value for pair in pairs for value in pair)]

    def conclude(self, sums: Sequence[float], world_size: int) -> None:
        """Update the watched metrics on this rank from :meth:`values` summed over all ranks."""
        if self._names and sums[0] > 0:
            self.reports = round(sums[0])
            pairs = zip(self._names, sums[1::2], sums[2::2], strict=True)
            self.latest = {name: value for name, there, value in pairs if there > 0 and not math.isnan(value)}
