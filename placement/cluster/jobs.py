"""Views of jobs for allocation policies, and each job's speed by number of workers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from placement.checks import check_choice, check_number, check_whole, is_finite
from placement.cluster.cluster import MARKET_LABEL, SPOT, Resources, check_selector
from placement.cluster.node_record import NodeFailure
from placement.cluster.sizes import ANY_SIZE, AllowedSizes
from placement.cluster.utility import Utility

if TYPE_CHECKING:
    from placement.goodput.fitting import Observation
    from placement.goodput.forecast import BatchForecast
    from placement.goodput.model import GoodputModel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a job in scale-invariant iterations, each the progress of one step at the initial batch M0."""

    done: float  # iterations so far, measured
    epoch_ends: tuple[float, ...] = ()  # ``done`` at the end of each finished epoch
    epochs: float | None = None  # how many epochs the user declared; None if training has no declared end
    first_epochs: float | None = None  # how many it declared first, in the unit of ``epochs``, as far as that is known
    # how many epochs each of ``epoch_ends``, and each of ``epochs``, stands for; 1 before any has ended
    stride: int = 1
    # iterations that an epoch took other jobs of the same model, until the first one here has ended
    usual_epoch: float | None = None
    usual_ends: tuple[float, ...] = ()  # iterations after which earlier jobs of the same model ended
    # parts of the length first declared after which those ended that have the same declarer, above 1 where they went on
    # beyond it
    usual_parts: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_number("done", self.done, least=0, unit="iterations")
        if any(b < a for a, b in itertools.pairwise((0.0, *self.epoch_ends))):
            raise ValueError(f"epoch_ends must never fall, but got {self.epoch_ends}")
        if self.epochs is not None:
            check_number("epochs", self.epochs, above=0)
        if self.first_epochs is not None:
            check_number("first_epochs", self.first_epochs, above=0)
        check_number("stride", self.stride, least=1, unit="epoch")
        if self.usual_epoch is not None:
            check_number("usual_epoch", self.usual_epoch, above=0, unit="iterations")
        for field in ("usual_ends", "usual_parts"):
            for each in getattr(self, field):
                check_number(field, each, above=0, finite=True)


SpotUse = Literal["avoid", "prefer", "mixed"]
"""How a job uses spot nodes: not at all; wherever they are to be had; all but ``min_workers`` of its workers."""

SPOT_USES: tuple[str, ...] = get_args(SpotUse)

WorkerKind: TypeAlias = "tuple[tuple[tuple[str, float], ...], tuple[tuple[str, str], ...]]"
"""Bundle and label selector: jobs of one kind of worker have interchangeable workers."""

Shape: TypeAlias = "tuple[int, int]"
"""Nodes and workers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """Accumulated cost of a job, updated by the allocator and stored by the job's controller for a later allocator."""

    usd: float = 0.0  # so far [USD]
    attained_s: float = 0.0  # worker-seconds that it counts (``JobView.attained_s``)
    worker_usd_per_h: float = 0.0  # price of one of the job's workers when it was last counted [USD/h]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FoundStrategy:
    """Fastest strategy found for synchronising a model's gradients for one form of group, with its step time."""

    name: str
    step_s: float  # [s]

    def __post_init__(self) -> None:
        if not self.name or not 0 < self.step_s < 1e9:
            raise ValueError(f"a strategy needs a name and a step above 0 s, but got {self.name!r} and {self.step_s}")


# A job that nothing is known of starts with two: a live resize takes the second one back if it was of no use.
FIRST_WORKERS = 2

# Least values of numbers with their unit, first of those that must be there, then of those that may be None.
_LEAST = (
    *(("most_workers", 0, ""), ("unit", 1, ""), ("resize_cost_s", 0, "seconds"), ("noise_growth", 1, "")),
    *(("attained_s", 0, ""), ("restarts", 0, "")),
)
_LEAST_IF_SAID = (
    *(("init_batch_size", 1, "sample"), ("max_batch_size", 1, "sample"), ("held_batch", 1, "sample")),
    *(("growth_limit", 1, ""), ("stop_cost_s", 0, "")),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """View of one job, as reported by its controller in every heartbeat.

    Attributes:
        job: Name of the job, unique in the cluster.
        bundle: Resources of one worker, e.g. ``{"CPU": 1, "GPU": 1}``.
        min_workers: Minimum number of workers that the job can run with.
        max_workers: Maximum number of workers that the job accepts.
        submitted_s: Time of submission [s since the epoch]; earlier jobs are admitted first.
        held_at: Exact number of workers set by the user; None leaves the number to the policy.
        paused: Reason why the user has paused the job; empty if it is not paused. A paused job gets no workers.
        wished: Minimum number of workers that the job's own adaptation policy requests; None for no request. These
            workers come from slots that other jobs cannot use (``placement.planning.wishes``). ``held_at`` takes
            precedence.
        allocation: Number of bundles that the job holds, keyed by node id. This includes fulfilled reservations whose
            worker has not joined yet, and bundles of leaving workers until they are released.
        most_workers: Largest number of workers that the job has trained with so far; limits exploration while
            ``goodput`` is unknown.
        goodput: Fitted goodput model; None before the first fit.
        init_batch_size: Initial global batch size (M0) that the user requested [samples].
        max_batch_size: Largest global batch the job may use [samples]; None keeps it at ``init_batch_size``.
        held_batch: Global batch fixed by the job's own policy [samples], used whenever it fits. None lets the job
            choose the best batch.
        forecast: Future values of ``held_batch``; None if no change is known.
        atomic_bsz_range: Minimum and maximum number of samples per worker in one micro-step.
        accumulation: True if the job may accumulate gradients over several micro-steps.
        resize_cost_s: Training time lost by one resize [s], measured or estimated.
        stop_cost_s: Training time lost by stopping the job and restarting it later [s]. None if a stop would lose
            work; the job is then stopped only by limits, lack of room or the user.
        label_selector: Conditions on the labels of a worker's node (``placement.cluster.cluster``); for instance,
            ``{"ray.io/accelerator-type": "in(T4,A100)"}`` selects GPU types.
        growth_limit: Largest number of workers that exploration currently allows, for policies that use only the
            job's own measurements; None for no limit.
        attained_s: Worker-seconds that the job has used so far.
        bill: Accumulated cost, as last reported by an allocator; None if no allocator knew prices.
        restarts: Number of changes to the job's workers so far, not counting the first start.
        fingerprint: Id of the model that the job trains; jobs with the same fingerprint share measurements.
        progress: Progress of the job; None until its workers have started and reported.
        models: Fitted models, keyed by GPU type; ``goodput`` is the model for the current or last type.
        observations: Measured step times, keyed by GPU type, oldest first.
        atomic_bsz_ranges: ``atomic_bsz_range`` keyed by GPU type, if it differs between types.
        priority: Priority; jobs with a higher priority get their minimum, and later their growth, first.
        tenant: Tenant that owns the job; tenants share the cluster according to their weights.
        user: User who submitted the job.
        preemptible: True if the running job may be stopped in favour of a job of higher precedence.
        deadline_s: Deadline for the job to end [s since the epoch]; None for no deadline.
        whole_nodes: True if the job prefers whole nodes, shared with no other job.
        weight: Weight of the job's speed relative to other jobs in the same call to a policy.
        tenant_weight: Weight of the job's tenant, used if the cluster's configuration does not list the tenant; None
            if not declared.
        spot: How the job uses spot nodes; ignored on a cluster that has none.
        budget_usd: Limit on the job's cost [USD]; None for no limit.
        utility: Value of the job's completion as a function of the time since ``submitted_s``; None if not declared.
        slow_nodes: Slowdown factor of the job's steps, keyed by node id, for slow nodes that the job is using or has
            just left.
        node_failures: Failures of the job's workers, with their nodes (``placement.cluster.node_record``).
        mixed_gpu_types: True if the job's workers may run on several GPU types, with work divided by speed. Policies
            that keep a job on one type, or ignore types, ignore this field.
        sizes: Numbers of workers that the job can train with, if some between the minimum and the maximum are invalid
            (``placement.planning.constraints``).
        unit: Number of processes that form one worker; ``bundle`` applies to the whole worker. The processes run on one
            node if any node is large enough (``placement.planning.spans``). Reasons call such a worker a unit.
        strategies: Fastest synchronisation strategies found for the job's model, keyed by form of the group.

    Examples:
        >>> from placement import JobView
        >>> view = JobView(job="digits", bundle={"GPU": 1.0}, max_workers=4)
        >>> view.min_workers
        1
    """

    job: str
    bundle: Resources
    min_workers: int = 1
    max_workers: int = 1
    submitted_s: float = 0.0
    held_at: int | None = None
    paused: str = ""
    wished: int | None = None
    allocation: Mapping[str, int] = dataclasses.field(default_factory=dict)
    most_workers: int = 0
    goodput: GoodputModel | None = None
    init_batch_size: int | None = None
    max_batch_size: int | None = None
    held_batch: int | None = None
    forecast: BatchForecast | None = None
    noise_growth: float = 1.0
    atomic_bsz_range: tuple[int, int] | None = None
    accumulation: bool = False
    resize_cost_s: float = 0.2
    stop_cost_s: float | None = None
    label_selector: Mapping[str, str] = dataclasses.field(default_factory=dict)
    growth_limit: int | None = None
    attained_s: float = 0.0
    bill: Bill | None = None
    restarts: int = 0
    fingerprint: str | None = None
    progress: Progress | None = None
    models: Mapping[str, GoodputModel] = dataclasses.field(default_factory=dict)
    observations: Mapping[str, tuple[Observation, ...]] = dataclasses.field(default_factory=dict)
    atomic_bsz_ranges: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    priority: int = 0
    tenant: str = ""
    user: str = ""
    preemptible: bool = True
    deadline_s: float | None = None
    whole_nodes: bool = False
    weight: float = 1.0
    tenant_weight: float | None = None
    spot: SpotUse = "prefer"
    budget_usd: float | None = None
    utility: Utility | None = None
    slow_nodes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    node_failures: tuple[NodeFailure, ...] = ()
    mixed_gpu_types: bool = False
    sizes: AllowedSizes = ANY_SIZE
    unit: int = 1
    strategies: Mapping[str, FoundStrategy] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"of job {self.job!r}"
        if not self.job:
            raise ValueError("job must be a non-empty name, but got ''")
        if not any(amount > 0 for amount in self.bundle.values()):
            raise ValueError(
                f"bundle {where} must name a resource above 0, such as {{'CPU': 1}}, but got {self.bundle}"
            )
        if any(not amount >= 0 for amount in self.bundle.values()):
            raise ValueError(f"bundle {where} must hold amounts of 0 or more, but got {self.bundle}")
        if not 1 <= self.min_workers <= self.max_workers:
            raise ValueError(
                f"min_workers and max_workers {where} must satisfy 1 <= min <= max, "
                f"but got {self.min_workers} and {self.max_workers}"
            )
        if self.held_at is not None and not self.min_workers <= self.held_at <= self.max_workers:
            raise ValueError(
                f"held_at {where} must lie between min_workers and max_workers "
                f"({self.min_workers} to {self.max_workers}), but got {self.held_at}"
            )
        if self.wished is not None and not 1 <= self.wished <= self.max_workers:
            raise ValueError(
                f"wished {where} must lie between 1 and max_workers ({self.max_workers}), but got {self.wished}"
            )
        if any(workers < 1 for workers in self.allocation.values()):
            raise ValueError(f"allocation {where} must hold 1 or more workers per node, but got {self.allocation}")
        said = [each for each in _LEAST_IF_SAID if getattr(self, each[0]) is not None]
        for name, least, unit in (*_LEAST, *said):
            check_number(f"{name} {where}", getattr(self, name), least=least, unit=unit, finite=name == "noise_growth")
        check_whole(f"priority {where}", self.priority, least=None)
        if self.deadline_s is not None and not is_finite(self.deadline_s):
            raise ValueError(f"deadline_s {where} must be None or seconds since the epoch, but got {self.deadline_s}")
        for name in ("weight", "tenant_weight", "budget_usd"):
            if (value := getattr(self, name)) is not None:
                check_number(f"{name} {where}", value, above=0, finite=True)
        check_choice(f"spot {where}", self.spot, SPOT_USES)
        if self.label_selector:
            check_selector(self.label_selector, f"label_selector {where}")
        if any(not factor >= 1 for factor in self.slow_nodes.values()):
            raise ValueError(f"slow_nodes {where} must hold factors of 1 or more, but got {dict(self.slow_nodes)}")
        if self.forecast is not None and self.held_batch is None:
            raise ValueError(f"forecast {where} needs a held_batch, which it continues, but got None")
        bounds = self.atomic_bsz_range
        if bounds is not None and not 1 <= bounds[0] <= bounds[1]:
            raise ValueError(
                f"atomic_bsz_range {where} must be (least, most) with 1 <= least <= most, but got {bounds}"
            )

    def at_most(self, workers: int) -> JobView:
        """Return a copy of the view in which the job needs, uses, is held at and wishes for at most ``workers``."""
        names = ("min_workers", "max_workers", "held_at", "wished")
        limits: dict[str, Any] = {name: min(n, workers) for name in names if (n := getattr(self, name)) is not None}
        return dataclasses.replace(self, **limits)

    def placed(self, allocation: Mapping[str, int]) -> JobView:
        """Return a copy of the view with this ``allocation`` (workers keyed by node id)."""
        return self if self.allocation == allocation else dataclasses.replace(self, allocation=allocation)

    @property
    def selector(self) -> Mapping[str, str]:
        """Conditions on a worker's node: ``label_selector``, plus the exclusion of spot nodes if the job avoids them.

        A condition on the market in the user's own selector takes precedence.
        """
        if self.spot != "avoid" or MARKET_LABEL in self.label_selector:
            return self.label_selector
        return {**self.label_selector, MARKET_LABEL: f"!{SPOT}"}

    @property
    def workers(self) -> int:
        """Number of workers that the job has, or is planned to have, as in ``allocation``."""
        return sum(self.allocation.values())

    @property
    def arrival(self) -> tuple[float, str]:
        """Sort key for the order of arrival: the time of submission, then the job's name."""
        return (self.submitted_s, self.job)

    @property
    def useful_workers(self) -> int:
        """Largest number of workers that the job can use now, never below ``min_workers``.

        The number is limited by ``max_workers``, and by how many workers can each get the smallest micro-batch from the
        largest global batch. Before a goodput model exists, the speed of larger sizes is unknown. The number is then
        also limited to twice the most workers that the job has run with (2 -> 4..., as Pollux explores), or to the next
        allowed size.
        """
        most = self._most_with_samples
        if self.goodput is None:
            most = min(most, self.explored_workers)
        return max(self.sizes.at_most(most), self.min_workers)

    @property
    def explored_workers(self) -> int:
        """Largest number of workers to try while the job has no goodput model to predict the speed of larger sizes."""
        return max(2 * self.most_workers, self.workers, FIRST_WORKERS, self.sizes.at_least(self.most_workers + 1) or 0)

    @property
    def wished_workers(self) -> int:
        """``wished`` limited by micro-batch, exploration and allowed sizes; ``min_workers`` if nothing is requested."""
        limits = [self._most_with_samples, self.wished or self.min_workers, self.growth_limit or self.max_workers]
        return max(self.sizes.at_most(min(limits)), self.min_workers)

    @property
    def _most_with_samples(self) -> int:
        """Most workers, up to ``max_workers``, that can each get the smallest micro-batch from the largest batch."""
        batch = self.max_batch_size if self.max_batch_size is not None else self.init_batch_size
        if batch is None:
            return self.max_workers
        return min(self.max_workers, batch // (self.atomic_bsz_range[0] if self.atomic_bsz_range else 1))


def worker_kind(view: JobView) -> WorkerKind:
    """Return the kind of a job's workers: a key of the fields that determine which nodes they fit on.

    Many jobs share few kinds, so results are cached by kind.
    """
    return tuple(sorted(view.bundle.items())), tuple(sorted(view.selector.items()))


def alike(views: Iterable[JobView]) -> bool:
    """True if all jobs' workers are interchangeable, with the same bundle and label selector."""
    return len({worker_kind(view) for view in views}) <= 1


def speeds(view: JobView, slots: Sequence[int], most: int | None = None) -> NDArray[np.float64]:
    """Return a job's relative speed on 0..n workers, with each size placed on as few nodes as possible.

    speed[k] = goodput(nodes(k), k) / goodput(nodes(k1), k1), where k1 is the smallest size that can run at all, so
    that speeds of different jobs are comparable. Without a model, speed[k] = k: linear, within
    ``JobView.useful_workers``.

    Args:
        slots: Number of the job's workers that fit on each node, in any order; used only to compute nodes(k).
        most: Largest size of interest; ``view.useful_workers`` by default.

    Returns an array of length n + 1, n = min(most, sum(slots)). speed[0] = 0, and all entries are finite and at least
    0. An entry is 0 if no batch size is possible, and entries may fall with k if communication outweighs the gain. The
    speed of a size that is not allowed is interpolated from the allowed sizes around it, so that a policy that adds one
    worker at a time gets past it; ``placement.planning.constraints`` ensures that no job ends up with a size that is
    not allowed.
    """
    n = min(view.useful_workers if most is None else most, int(sum(slots)))
    if view.goodput is None or n == 0:
        speed = np.arange(n + 1, dtype=np.float64)
    else:
        values = shape_goodputs(view, view.goodput, _shapes(slots, n), view.atomic_bsz_range)
        positive = values[values > 0]
        speed = np.concatenate(([0.0], values / (positive[0] if positive.size else 1.0)))
    if view.sizes.free:
        return speed
    floors = view.sizes.floors(n)
    known = np.unique(floors)
    between: NDArray[np.float64] = np.interp(np.arange(n + 1), known, speed[known])
    return np.where(floors > 0, between, 0.0)


def goodputs(view: JobView, slots: Sequence[int]) -> NDArray[np.float64]:
    """Return a job's goodput [useful samples/s] on 1..n workers, on the fewest nodes each; empty without a model."""
    n = min(view.useful_workers, int(sum(slots)))
    if view.goodput is None or n == 0:
        return np.zeros(0)
    values = shape_goodputs(view, view.goodput, _shapes(slots, n), view.atomic_bsz_range)
    return values if view.sizes.free else np.concatenate(([0.0], values))[view.sizes.floors(n)[1:]]


def _shapes(slots: Sequence[int], most: int) -> tuple[Shape, ...]:
    """Return the job's sizes 1..most, each on as few nodes as possible."""
    roomy = np.cumsum(sorted(slots, reverse=True))
    sizes = np.arange(1, most + 1)
    return tuple(zip((np.searchsorted(roomy, sizes) + 1).tolist(), sizes.tolist(), strict=True))


def shape_goodputs(
    view: JobView, model: GoodputModel, wanted: tuple[Shape, ...], atomic_bsz_range: tuple[int, int] | None
) -> NDArray[np.float64]:
    """Return a read-only array of the goodput [useful samples/s] in each shape (nodes, workers); 0 if no batch fits."""
    limit = view.max_batch_size
    if limit is not None:
        limit = max(limit, model.init_batch_size)
    return _goodputs(model, wanted, limit, atomic_bsz_range, view.accumulation, view.held_batch)


@functools.lru_cache(maxsize=16384)  # a decision asks again for every job, though few models have changed
def _goodputs(
    model: GoodputModel,
    wanted: tuple[Shape, ...],
    max_batch_size: int | None,
    atomic_bsz_range: tuple[int, int] | None,
    accumulation: bool,
    held_batch: int | None,
) -> NDArray[np.float64]:
    """Return the goodput [samples/s] of each shape at the held or best batch: finite, 0 if none fits, read-only."""
    nodes, workers = np.array(wanted).T
    best = model.best_held(
        nodes,
        workers,
        held_batch,
        max_batch_size=max_batch_size,
        atomic_bsz_range=atomic_bsz_range,
        accumulation=accumulation,
    )
    values = np.maximum(np.nan_to_num(np.asarray(best, dtype=np.float64), posinf=0.0), 0.0)
    values.setflags(write=False)
    return values


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """Ground truth about a simulated job, which is unknown for a real one."""

    # true seconds of one step at the requested batch on 1, 2, ... workers, each count on as few nodes as possible; it
    # ends at the most workers that the batch can be split over.
    step_s: tuple[float, ...]
    # optimizer steps at the requested batch from the end of the present epoch to the end of the last one; at least 1
    remaining_steps: float

    def __post_init__(self) -> None:
        if not self.step_s or any(not step_s > 0 for step_s in self.step_s):
            raise ValueError(f"step_s must hold one time above 0 seconds or more, but got {self.step_s}")
        check_number("remaining_steps", self.remaining_steps, least=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceJobView(JobView):
    """View of a job from a trace, with its ground truth and the size that its user requested."""

    oracle: Oracle | None = None  # what is true of it; None if it is to be measured
    # what its user asked for; a scheduler of rigid jobs gives exactly that or nothing
    requested_workers: int | None = None

    def __post_init__(self) -> None:
        JobView.__post_init__(self)  # super() does not see the class that slots made
        where = f"of job {self.job!r}"
        if self.requested_workers is not None:
            check_number(f"requested_workers {where}", self.requested_workers, least=1)


def oracle_of(view: JobView) -> Oracle | None:
    """Return the ground truth about a simulated job; None for a real job."""
    return view.oracle if isinstance(view, TraceJobView) else None


def requested_workers(view: JobView) -> int | None:
    """Return the exact number of workers that a trace job's user requested; None for a real job, which is elastic."""
    return view.requested_workers if isinstance(view, TraceJobView) else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Recent total node cost and number of jobs, both with exponentially decaying weight."""

    hours: float = 0.0  # that are counted [h]
    spent_usd: float = 0.0  # for nodes in that time [USD]
    job_hours: float = 0.0  # number of jobs x hours

    def after(self, hours: float, usd_per_h: float, jobs: int, memory_h: float) -> Account:
        """Return the account after another ``hours`` when nodes cost ``usd_per_h`` and there were ``jobs`` jobs.

        An hour that is ``memory_h`` hours old has a weight of 1/e.
        """
        kept = math.exp(-hours / memory_h)
        fresh = -memory_h * math.expm1(-hours / memory_h)  # not 1 - kept, which has no digits after a short while
        return Account(
            hours=self.hours * kept + fresh,
            spent_usd=self.spent_usd * kept + usd_per_h * fresh,
            job_hours=self.job_hours * kept + jobs * fresh,
        )
