"""Configuration by users of a job's elasticity, and of its place among other jobs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from elastic_ray.faults import Faults
from elastic_ray.stragglers.detection import RESPONSES, Response, StragglerConfig
from elastic_ray.unit import Unit, check_size
from placement.arguments import NamesArguments
from placement.cluster.jobs import SPOT_USES, SpotUse
from placement.cluster.memory_need import MemoryNeed
from placement.cluster.sizes import AllowedSizes
from placement.cluster.utility import Utility

_SWITCHES = (
    "fixed_batch",
    "restart",
    "automatic_checkpoints",
    "keep_last_state",
    "branch_when_idle",
    "private_files",
    "verify_checkpoints",
    "tensorboard",
    "metrics",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElasticConfig(NamesArguments):
    """Configuration of how a job changes size and how fast it notices trouble. All times in seconds, all above 0.

    Attributes:
        warm_workers_per_node: idle processes (torch imported) that the job asks the cluster's pool to keep on each of
            its nodes beside as many as it has workers there, for the next job to start in; 0 asks for none. The pool
            serves all jobs; its bounds are the cluster's: environment variable ``ELASTIC_RAY_POOL`` of its nodes
            (:func:`elastic_ray.warm_pool.sizing.read_config`). With ``ELASTIC_RAY_POOL=off`` the job keeps so many idle
            processes of its own.
        warm_worker_memory_bytes: a leaving worker whose resident memory is above this ends instead of going
            back to the warm pool.
        heartbeat_timeout_s: silence after which a member counts as hung.
        join_timeout_s: time a new worker has from its reservation until it is ready to join; after one that was late
            the next have twice as long each time, up to eight times, until one is ready.
        reserve_timeout_s: time a reservation of resources may stay unfulfilled before it is given back.
        switch_timeout_s: time a generation has to form its communicator and exchange state.
        collective_timeout_s: longest wait in a collective, for a slow but living peer; must exceed the
            longest step.
        lease_s: time without a sign of life from the driver after which the job saves and ends itself.
        restart: whether a job that has lost all of its workers starts again from its newest checkpoint where
            ``FailureConfig(max_failures)`` is 0, Ray Train's default: for as long as it makes progress, that is until
            three restarts in a row have brought no new checkpoint. A larger ``max_failures`` is a limit of its own.
        controller_timeout_s: time that workers train on without the job's controller, whose process Ray restarts when
            it dies, before they end by themselves.
        report_interval_s: time between rank 0's step reports.
        fixed_batch: keep batch sizes as they are even where the loader allows the job to adapt them.
        automatic_checkpoints: save the whole elastic state (models, optimizers, schedulers, the loader's position,
            statistics) to the run's storage now and then, so that a job that loses all of its workers, or its whole
            cluster, continues from there. The job saves itself once more when it finishes.
        branch_when_idle: compare larger batches by branches of the job (``JobHandle.branch``) where slots are idle that
            no other job can use, each time that the job's steps have doubled, from the 400th on.
        keep_last_state: keep the last automatic checkpoint of a job that has finished; ``Result.checkpoint`` is that
            of a job that reports none, and ``load_model_state`` reads it. False deletes it.
        checkpoint_interval_s: time between two of them; None finds the best from what one costs and how often workers
            are lost (Young 1974, Daly 2006), and keeps their cost under half a percent.
        stragglers: what is done about a worker that takes 1.25 times as long as the others for the same work, or more:
            ``ignore`` it, ``tell`` of it (an event, and the status), ``share`` the samples of a step so that it takes
            fewer, or also ``replace`` it if it stays slow. With ``share`` the others take more samples each than an
            equal split gives them, within ``local_bsz_bounds``; a loop that takes local batches for equally large
            should not ask for it.
        straggler_patience_s: how long a worker is slow before ``replace`` asks for another.
        private_files: on file systems of the nodes (NFS mounts are such) only the job's user may read its files: modes
            0600, and 0700 for directories; a run's directory that belongs to another user is refused. False leaves it
            to the umask, and to the directory's owner. The storage's own rules hold elsewhere.
        storage_timeout_s: longest silence of the run's storage that is waited for. A reported checkpoint that is not
            stored by then (or within half of ``collective_timeout_s``, for the other ranks wait) is given up, which an
            event says, and training continues; a job whose earlier checkpoints cannot be read by then does not start
            anew but fails.
        verify_checkpoints: a job that continues from what is stored of its run reads its reported checkpoints whole and
            compares their checksums with those that were written with them; one that differs is passed over, which an
            event says. Sizes are compared always, and checksums of automatic checkpoints.
        tensorboard: write the run's metrics and how it is doing as TensorBoard files into ``tensorboard`` in its
            directory; None does so for jobs, and not for the trials of a sweep (Ray Tune writes its own).
        metrics: tell Prometheus of the job through Ray's metrics, from the job's controller (docs/metrics.md).
        tracker_timeout_s: time that TensorBoard and the run's callbacks have to end when the job has ended.
        webhook: address (``http://``, ``https://``) that is sent a JSON object when the job has ended, and when it
            waits for too long (docs/trackers.md); None for none. Nothing shows it.
        webhook_waits_s: how long the job waits for resources before the webhook is told.
        faults: a script of faults to try a set-up out with; None for real work.

    Examples:
        >>> from elastic_ray import ElasticConfig
        >>> ElasticConfig(heartbeat_timeout_s=5.0).restart
        True
    """

    warm_workers_per_node: int = 1
    warm_worker_memory_bytes: int = 2 << 30
    heartbeat_timeout_s: float = 2.0
    join_timeout_s: float = 120.0
    reserve_timeout_s: float = 60.0
    switch_timeout_s: float = 20.0
    collective_timeout_s: float = 300.0
    lease_s: float = 60.0
    restart: bool = True
    controller_timeout_s: float = 60.0
    report_interval_s: float = 1.0
    fixed_batch: bool = False
    automatic_checkpoints: bool = True
    keep_last_state: bool = True
    branch_when_idle: bool = False
    checkpoint_interval_s: float | None = None
    stragglers: Response = "tell"
    straggler_patience_s: float = 60.0
    private_files: bool = True
    storage_timeout_s: float = 60.0
    verify_checkpoints: bool = False
    tensorboard: bool | None = None
    metrics: bool = True
    tracker_timeout_s: float = 30.0
    webhook: str | None = dataclasses.field(default=None, repr=False)
    webhook_waits_s: float = 1800.0
    faults: Faults | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._check(field.name, getattr(self, field.name))
        if self.heartbeat_timeout_s >= self.collective_timeout_s:
            raise ValueError(
                f"collective_timeout_s must be above heartbeat_timeout_s ({self.heartbeat_timeout_s:g} s), "
                "for a hung member is to be found before its peers give up, but got "
                f"{self.collective_timeout_s:g} s"
            )

    @property
    def straggler_config(self) -> StragglerConfig:
        """Configuration of stragglers for the workers."""
        return StragglerConfig(response=self.stragglers, patience_s=self.straggler_patience_s)

    def _check(self, name: str, value: object) -> None:
        """Raise unless the value has the field's type and range."""
        if name == "faults":
            if value is not None and not isinstance(value, Faults):
                raise TypeError(f"{name} must be a Faults script or None, but got {value!r}")
        elif name == "webhook":
            if value is not None and not (isinstance(value, str) and value.startswith(("http://", "https://"))):
                kind = "an address of another kind" if isinstance(value, str) else type(value).__name__
                raise ValueError(f"{name} must be an address that begins with http:// or https://, but got {kind}")
        elif name == "stragglers":
            if value not in RESPONSES:
                raise ValueError(f"{name} must be one of {', '.join(RESPONSES)}, but got {value!r}")
        elif name in ("checkpoint_interval_s", "tensorboard") and value is None:
            return
        elif name in _SWITCHES:
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, but got {value!r}")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name} must be a number, but got {value!r}")
        elif name.endswith("_s"):
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be above 0 seconds and finite, but got {value}")
        elif not isinstance(value, int):
            raise TypeError(f"{name} must be a whole number, but got {value!r}")
        elif name == "warm_workers_per_node" and value < 0:
            raise ValueError(f"{name} must be 0 or more, but got {value}")
        elif name == "warm_worker_memory_bytes" and value <= 0:
            raise ValueError(
                f"{name} must be above 0, but got {value}; set warm_workers_per_node=0 to keep no warm workers"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingConfig(NamesArguments):
    """Configuration of a job beside others in the allocator, for which Ray Train's ``ScalingConfig`` has no fields.

    Attributes:
        priority: higher ones get their minimum of workers, and then their growth, before lower ones of their tenant.
        tenant: whose job it is. Tenants share the cluster by their weights (``AllocatorConfig.tenants``); what one
            does not use is lent to others until it asks for it.
        preemptible: whether the job may be stopped, once it runs, for one that comes before it. If not, it keeps its
            minimum of workers until it ends or its nodes are lost.
        deadline_s: seconds after ``submit()`` by which the job should be done. Once an epoch is over and its length
            is known, the allocator keeps as many workers for it as that takes, if it can.
        whole_nodes: prefer whole nodes, and nodes that no other job uses, where nothing is left idle for it.
        spot: how the job uses spot nodes (label ``ray.io/market-type: spot``): ``avoid`` them, ``prefer`` them wherever
            they are to be had, or ``mixed``: its minimum of workers on on-demand nodes, the others anywhere.
        budget_usd: what the job may cost [USD]; the autoscaler plans with it and says at once if it cannot be kept.
        utility: what it is worth that the job is done, by seconds after ``submit()``: pairs of time and value [USD],
            such as ``((3600, 50), (7200, 0))``; linear between, the first value before the first, and the last line
            continues beyond the last. Once its length is known the job has no worker that costs more than it gains.
        weight: how much its speed counts beside that of other jobs of its tenant and priority: where growing is a
            matter of choice, a job of weight 2 gets about twice the workers of one of weight 1. Minimums come first
            all the same.
        tenant_weight: weight of its tenant, where ``AllocatorConfig.tenants`` does not name it; None for 1. Of the jobs
            of a tenant, the largest counts.
        mixed_gpu_types: whether workers may be on GPUs of different types: of its own, and of others that no other job
            has a use for. Each type takes its share of a step's samples by its speed, within ``local_bsz_bounds``, as
            with ``ElasticConfig(stragglers="share")``. Only the policy ``goodput`` gives workers of several types on
            purpose; others keep to their own rules.
        sizes: the only numbers of workers that the job trains with, ascending; None for any between the least and the
            most of ``num_workers``. After a lost worker the job continues with those that are left until the allocator
            has decided again, which takes a second or two.
        multiple_of: only multiples of this number of workers, as ``sizes``; None for any.
        unit: workers that live and die together, on one node: a number, or their mesh by names (``Unit(tp=2)``). The
            workers of a unit are a fixed group of ``torch.distributed``, in which a model is parallelised as under
            ``torchrun``; the job's sizes are units from there on (``JobHandle.resize``, events, ``sizes``), and
            ``ScalingConfig(num_workers)`` is a multiple of it. See docs/units.md.
        memory: bytes that a worker needs by the number of workers, and has, of a model that is divided among them: the
            job has no smaller group than one in which each has enough, but where workers were lost, which an event
            says. ``elastic_ray.sharded_memory(model, ...)`` counts a model. None where any size fits.

    Examples:
        >>> from elastic_ray import SchedulingConfig
        >>> SchedulingConfig(priority=2, sizes=(1, 2, 4)).sizes
        (1, 2, 4)
    """

    priority: int = 0
    tenant: str = ""
    preemptible: bool = True
    deadline_s: float | None = None
    whole_nodes: bool = False
    spot: SpotUse = "prefer"
    budget_usd: float | None = None
    utility: Sequence[tuple[float, float]] | None = None
    weight: float = 1.0
    tenant_weight: float | None = None
    mixed_gpu_types: bool = False
    sizes: tuple[int, ...] | None = None
    multiple_of: int | None = None
    unit: int | Unit = 1
    memory: MemoryNeed | None = None

    @property
    def unit_size(self) -> int:
        """Workers of a unit."""
        return self.unit.size if isinstance(self.unit, Unit) else self.unit

    @property
    def completion_utility(self) -> Utility | None:
        """``utility`` as a function of time."""
        return None if self.utility is None else Utility(self.utility)  # type: ignore[arg-type]

    @property
    def allowed_sizes(self) -> AllowedSizes:
        """``sizes``, ``multiple_of`` and ``memory`` together."""
        return AllowedSizes(
            sizes=() if self.sizes is None else self.sizes,
            multiple_of=1 if self.multiple_of is None else self.multiple_of,
            memory=self.memory,
        )

    def __post_init__(self) -> None:
        if self.sizes == ():
            raise ValueError("sizes must hold the numbers of workers that are allowed, or be None for any, but got ()")
        _ = self.allowed_sizes  # raises
        if (told := self.completion_utility) is not None:
            object.__setattr__(self, "utility", told.points)
        if not isinstance(self.unit, Unit):
            check_size("unit", self.unit)
        if self.unit_size > 1 and (self.mixed_gpu_types or self.memory is not None):
            asked = "mixed_gpu_types" if self.mixed_gpu_types else "memory"
            raise ValueError(f"{asked} is not supported with unit={self.unit}: all units are alike; leave it out")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise TypeError(f"priority must be a whole number, but got {self.priority!r}")
        if not isinstance(self.tenant, str):
            raise TypeError(f"tenant must be text, but got {self.tenant!r}")
        for name in ("preemptible", "whole_nodes", "mixed_gpu_types"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, but got {getattr(self, name)!r}")
        for name, unset in (("weight", False), ("tenant_weight", True)):
            value = getattr(self, name)
            if value is None and unset:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, but got {value!r}")
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be above 0 and finite, but got {value}")
        if self.tenant_weight is not None and not self.tenant:
            raise ValueError(f"tenant_weight needs a tenant to weigh, but got {self.tenant_weight} and tenant=''")
        if self.spot not in SPOT_USES:
            raise ValueError(f"spot must be one of {', '.join(SPOT_USES)}, but got {self.spot!r}")
        for name, unit, what in (("deadline_s", "seconds", " seconds (after submit())"), ("budget_usd", "USD", " USD")):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number of {unit} or None, but got {value!r}")
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be above 0{what} and finite, but got {value}")
