"""Reports from a train loop to its job about data, models and steps (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from elastic_ray.batch.limits import BatchChoice, BatchLimits
from elastic_ray.batch.tokens import TokenBatch
from elastic_ray.stragglers.detection import SlowWorker
from placement.cluster.jobs import FoundStrategy, Progress
from placement.goodput.mixed import MeasuredPart
from placement.goodput.model import NoiseScale

_SAMPLES_TO_SHARE = 4  # of a worker in an equal split: fewer round a share of a half away

CHOSEN = "auto/"
"""What begins the keys of strategies that were chosen by measurement: each for one group, all of them in use."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSignal:
    """Strength of a model's mean gradient relative to its noise, and the number of estimates so far."""

    present: bool  # the smoothed squared norm of the mean gradient stands out of its own standard error
    # present E ||g||^2 at the initial batch; its unit is the gradient's, or the optimizer's where it is of Adam's kind
    size: float
    updates: int


def outdated(before: str, now: str, *, same_workers: bool) -> bool:
    """True if times measured under the synchronisation strategy `before` are obsolete under the strategy `now`.

    Args:
        same_workers: True if both strategies were measured with the same numbers of workers and nodes. If False, times
            stay valid when both strategies were chosen automatically.
    """
    both_chosen = before.startswith(CHOSEN) and now.startswith(CHOSEN)
    return before != now and (same_workers or not both_chosen)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts about a wrapped model that a worker reports to its job."""

    kind: str  # name of its class
    details: str  # digest of what decides how long its steps take


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoaderInfo:
    """Facts about the training loader and its models that a worker reports to its job."""

    limits: BatchLimits  # what may be done with the batch
    dataset_size: int | None = None  # samples in an epoch, None where unknown
    sample: str = ""  # what a sample looks like, as text
    models: tuple[ModelInfo, ...] = ()  # the wrapped models, in the loop's order
    tokens: TokenBatch | None = None  # the batch as it was declared in tokens; None where it was in samples

    @property
    def max_workers(self) -> int:
        """Largest number of replicas that can each have a sample in every step."""
        limits = self.limits
        batch_size, smallest = (
            (limits.init_batch_size, 1) if limits.fixed else (limits.max_batch_size or 1, limits.lower)
        )
        most = max(1, batch_size // smallest)
        return min(most, self.dataset_size) if self.dataset_size else most

    def check_shares(self, min_workers: int) -> None:
        """Raise ValueError if the batch is too small to divide by speed between workers on several GPU types.

        The batch is too small if the largest batch has fewer than four samples per worker.
        """
        largest = max(self.limits.init_batch_size, self.limits.max_batch_size or 1)
        workers = max(min_workers, 2)
        if largest < _SAMPLES_TO_SHARE * workers:
            raise ValueError(
                f"mixed_gpu_types=True needs a batch of {_SAMPLES_TO_SHARE * workers} samples or more "
                f"({_SAMPLES_TO_SHARE} for each of {workers} workers), so that shares can follow speeds, but the "
                f"loader's largest batch has {largest}; raise batch_size (or max_batch_size), or leave it out"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Rank 0's report of the steps since the previous report (times in seconds).

    ``step_time`` and ``grad_time`` are medians over ``steps`` steps of one shape; 0 if there were none. ``progress``
    covers the entire run, across groups and processes. ``strategy`` is a key for the way gradients are synchronised; no
    steps are reported while a strategy is being chosen. ``uneven`` steps had unequal shares, so that their times do not
    apply to equal shares. ``stragglers`` are the slow workers of the current group. ``ratios`` are its ranks' times for
    equal work / the median; empty until enough steps have been measured. ``held_batch`` is the global batch that a
    user's policy has set, ``coming`` the batches it will set, each with the samples until then, and ``wish`` the
    smallest and largest number of workers it requests; None if no policy requests any. ``parts`` holds each GPU type's
    part of a mixed group's steps; empty for a single type, or if stragglers had smaller shares.
    ``learning_rate_factor`` is the factor on the first model's learning rates, from its batch and from policies,
    averaged over its parameter groups. ``first_step_s`` is the duration of the first step after the last group change;
    None before any change, and until that step is committed. ``signal`` describes the gradient's signal, in addition to
    ``noise``. ``loss`` is the last reported metric of that name, preceded by the report's number; None if not reported.
    ``memory_bound`` is the maximum number of samples that a worker may process at once, because a worker ran out of
    memory with more. ``backend`` is the library that carries gradients between ranks; empty for one rank. ``mfu`` is
    model FLOPs utilisation; None if unknown. ``found`` holds strategies that have won races, keyed by the form of the
    group (``sync.choosing``). ``tokens_per_sample`` is None unless the loader's batch is declared in tokens.
    """

    generation: int
    nodes: int
    replicas: int
    shape: BatchChoice | None
    steps: int
    step_time: float
    grad_time: float
    noise: NoiseScale | None
    epoch: int
    epochs: int | None
    total_steps: int
    batch_size: int
    progress: Progress | None = None
    strategy: str = ""
    held_batch: int | None = None
    coming: tuple[tuple[float, int], ...] = ()
    wish: tuple[int | None, int | None] | None = None
    uneven: bool = False
    stragglers: tuple[SlowWorker, ...] = ()
    ratios: tuple[float, ...] = ()
    learning_rate_factor: float | None = None
    parts: tuple[MeasuredPart, ...] = ()
    first_step_s: float | None = None
    signal: NoiseSignal | None = None
    loss: tuple[int, float] | None = None
    memory_bound: int | None = None
    backend: str = ""
    mfu: float | None = None
    tokens_per_sample: float | None = None
    found: Mapping[str, FoundStrategy] = dataclasses.field(default_factory=dict)
