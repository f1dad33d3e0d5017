"""Reports of a train loop to its job: its data, its models, and its steps (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from elastic_ray.batch.limits import BatchChoice, BatchLimits
from elastic_ray.batch.noise_scale import NoiseSignal
from elastic_ray.batch.tokens import TokenBatch
from elastic_ray.stragglers.detection import SlowWorker
from placement.cluster.jobs import FoundStrategy
from placement.cluster.progress import Progress
from placement.goodput.mixed import MeasuredPart
from placement.goodput.model import NoiseScale

_SAMPLES_TO_SHARE = 4  # of a worker in an equal split: fewer round a share of a half away

CHOSEN = "auto/"
"""What begins the keys of strategies that were chosen by measurement: each for one group, all of them in use."""


def outdated(before: str, now: str, *, same_workers: bool) -> bool:
    """True if times under the strategy `before` no longer count, because the job trains with another.

    Args:
        same_workers: both are of as many workers on as many nodes.
    """
    both_chosen = before.startswith(CHOSEN) and now.startswith(CHOSEN)
    return before != now and (same_workers or not both_chosen)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Description of a wrapped model for the job."""

    kind: str  # name of its class
    details: str  # digest of what decides how long its steps take


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoaderInfo:
    """Description of the training loader and its models for the job."""

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
        """Refuse batches of which workers on several GPU types could not take shares by their speeds.

        Args:
            min_workers: fewest workers of the job; several types have two at least.

        Raises ValueError: the largest batch has fewer than four samples for each worker.
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
    """Rank 0's account of the steps since its last report (times in seconds).

    ``step_time`` and ``grad_time`` are medians over ``steps`` steps of one shape; 0 where none was seen.
    ``progress`` is that of the whole run, whatever groups and processes it had. ``strategy`` tells ways of
    synchronising gradients apart; while one is being chosen no steps are reported. ``uneven`` steps were shared
    out unequally, so that their times say nothing of equal shares; ``stragglers`` are those of the present group.
    ``ratios`` are its ranks' times for equal work over the median; empty before enough steps were measured.
    ``held_batch`` is the global batch that a policy of the user has set, ``coming`` the ones that it will set, with the
    samples from now until then, ``wish`` the fewest and most workers that it
    asks for; None without. ``parts`` is what each GPU type took of the steps of a group on several; empty where the
    group has one, or where stragglers had smaller shares. ``learning_rate_factor`` is what the first model's learning
    rates are multiplied by, for its batch and by policies; the mean over its parameter groups. ``first_step_s`` is the
    time of the first step after the last change of group; None before that was committed, and before any change.
    ``signal`` is what is known of the gradient's signal beside its ``noise``. ``loss`` is the metric of that name that
    the loop has reported last, after the report's number; None where it has none. ``memory_bound`` is the most samples
    that a worker may take at once, since one ran out of memory with more. ``backend`` carries
    gradients between ranks; empty for one rank. ``mfu`` is model FLOPs utilisation; None where that is not known.
    ``found`` are strategies that have won races, by the form of the group (``sync.choosing``).
    ``tokens_per_sample`` is what the loader's samples have; None where its batch is not declared in tokens.
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
