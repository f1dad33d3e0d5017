"""User configuration of how a job changes size, and how it is scheduled relative to other jobs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from elastic_ray.faults import Faults
from elastic_ray.stragglers.detection import RESPONSES, Response, StragglerConfig
from elastic_ray.unit import Unit
from placement.arguments import NamesArguments
from placement.checks import check_choice, check_number, check_switch, check_whole, plain_numbers
from placement.cluster.jobs import SPOT_USES, SpotUse
from placement.cluster.sizes import AllowedSizes, MemoryNeed
from placement.cluster.utility import Utility

_SWITCHES = (
    *("fixed_batch", "restart", "automatic_checkpoints", "keep_last_state", "branch_when_idle"),
    *("private_files", "verify_checkpoints", "tensorboard", "metrics"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElasticConfig(NamesArguments):
    """Configuration of how a job changes size and how fast it detects failures. Times are in seconds, above 0.

    Attributes:
        warm_workers_per_node: Idle processes (torch imported) that the job requests from the cluster's pool on each of
            its nodes, in addition to one for each of the job's workers on that node. The next job then starts faster. 0
            requests none. The pool serves all jobs, within limits that the nodes' environment variable
            ``ELASTIC_RAY_POOL`` sets (:func:`elastic_ray.warm_pool.sizing.read_config`). With ``ELASTIC_RAY_POOL=off``
            the job keeps this number of idle processes for itself.
        heartbeat_timeout_s: A worker that sends no heartbeat for this long counts as hung.
        join_timeout_s: Time limit for a new worker to become ready after its resources were reserved. Each time a
            worker is late, the limit doubles (up to eight times this setting), until a worker is ready in time.
        reserve_timeout_s: Time until an unfulfilled resource reservation is cancelled.
        switch_timeout_s: Time limit for the workers in a new generation (group) to connect and exchange state.
        collective_timeout_s: Maximum wait in a collective for a peer that is slow but alive. It must exceed the longest
            step.
        lease_s: If the driver is silent for this long, the job saves its state and ends.
        restart: If a job has lost all its workers, restart it from its newest checkpoint, even if
            ``FailureConfig(max_failures)`` is 0, Ray Train's default. The job fails once three restarts in a row have
            produced no new checkpoint. If ``max_failures`` is not 0, it is the limit instead.
        controller_timeout_s: How long workers keep training while the job's controller does not respond; after that,
            they exit. Ray restarts the controller's process if it dies.
        report_interval_s: Time between rank 0's reports to the controller about its steps.
        fixed_batch: If True, keep the batch size constant even if the loader allows the job to adapt it.
        automatic_checkpoints: Save the entire elastic state (models, optimizers, schedulers, the loader's position,
            statistics) to the run's storage periodically and when the job finishes. A job that loses all its workers,
            or its entire cluster, continues from the last of these checkpoints.
        branch_when_idle: Test larger batches in branches of the job (``JobHandle.branch``), on idle slots that no other
            job can use. A test starts each time the job's number of steps has doubled, from step 400 on.
        keep_last_state: Keep the last automatic checkpoint of a finished job. It is ``Result.checkpoint`` if the job
            reported no checkpoint, and ``load_model_state`` reads it. False deletes it.
        checkpoint_interval_s: Time between automatic checkpoints. None chooses the interval from the cost of a
            checkpoint and the frequency of worker losses (Young 1974, Daly 2006), and keeps the cost below 0.5 %.
        stragglers: Response to a worker that needs at least 1.25 times as long as the others for the same work:
            ``ignore`` it, ``tell`` the user (through an event and in the status), ``share`` a step's samples so that it
            gets fewer, or ``replace``, which shares in the same way and then replaces the worker if it stays slow. With
            ``share``, each of the other workers gets more samples than in an equal split, within ``local_bsz_bounds``.
            Do not use it with a loop that assumes equal local batches.
        straggler_patience_s: How long a worker must be slow before ``replace`` requests a new one.
        private_files: On the nodes' file systems (including NFS mounts), make files readable only by the job's user:
            mode 0600, and 0700 for directories. A run directory that another user owns is refused. False leaves
            permissions to the umask and the directory's owner. Other storage applies its own rules.
        storage_timeout_s: Maximum wait for the run's storage to respond. A reported checkpoint that is not stored
            within this time, or within half of ``collective_timeout_s`` (because the other ranks are waiting), is
            dropped with an event, and training continues. A job that cannot read its earlier checkpoints in time fails
            instead of starting from scratch.
        verify_checkpoints: When a job continues from its stored run, read its reported checkpoints completely and
            compare their checksums with the checksums stored when they were written. A checkpoint that differs is
            skipped, with an event. Sizes, and the checksums of automatic checkpoints, are always compared.
        tensorboard: Write the run's metrics and status as TensorBoard files to ``tensorboard`` in its directory. None
            writes them for jobs, but not for trials of a sweep, because Ray Tune writes its own.
        metrics: Export the job's metrics to Prometheus through Ray's metrics, from its controller (docs/metrics.md).
        tracker_timeout_s: Time allowed for TensorBoard and the run's callbacks to finish after the job has ended.
        webhook: URL (``http://``, ``https://``) that receives a JSON object from the job when it has ended, and when it
            has waited too long for resources (docs/trackers.md). None disables it. The URL is never displayed.
        webhook_waits_s: How long the job must wait for resources before the webhook is called.
        faults: Faults to inject, for testing a setup (``elastic_ray.faults.Faults``); None injects nothing.

    Examples:
        >>> from elastic_ray import ElasticConfig
        >>> ElasticConfig(heartbeat_timeout_s=5.0).restart
        True
    """

    warm_workers_per_node: int = 1
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
        plain_numbers(self)
        if self.heartbeat_timeout_s >= self.collective_timeout_s:
            raise ValueError(
                f"collective_timeout_s must be above heartbeat_timeout_s ({self.heartbeat_timeout_s:g} s), "
                "so that a hung member is found before its peers time out, but got "
                f"{self.collective_timeout_s:g} s"
            )

    @property
    def straggler_config(self) -> StragglerConfig:
        """Configuration of how the job responds to stragglers (slow workers)."""
        return StragglerConfig(response=self.stragglers, patience_s=self.straggler_patience_s)

    def _check(self, name: str, value: object) -> None:
        """Raise TypeError or ValueError unless the value has the field's type and range."""
        if name == "faults":
            if value is not None and not isinstance(value, Faults):
                raise TypeError(f"{name} must be a Faults script or None, but got {value!r}")
        elif name == "webhook":
            if value is not None and not (isinstance(value, str) and value.startswith(("http://", "https://"))):
                kind = "an address of another kind" if isinstance(value, str) else type(value).__name__
                raise ValueError(f"{name} must be an address that begins with http:// or https://, but got {kind}")
        elif name == "stragglers":
            check_choice(name, value, RESPONSES)
        elif name in ("checkpoint_interval_s", "tensorboard") and value is None:
            return
        elif name in _SWITCHES:
            check_switch(name, value)
        elif name.endswith("_s"):
            check_number(name, value, above=0, unit="seconds", finite=True)
        else:
            check_whole(name, value, least=0 if name == "warm_workers_per_node" else None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingConfig(NamesArguments):
    """Options for scheduling a job in the allocator, beyond the fields of Ray Train's ``ScalingConfig``.

    Attributes:
        priority: Precedence of the job among its tenant's jobs. A job with a higher value gets its minimum number of
            workers first, and also grows first.
        tenant: Owner of the job. Tenants share the cluster by weight (``AllocatorConfig.tenants``). Capacity that a
            tenant does not use is lent to other tenants until its owner requests it.
        preemptible: If True, the running job may be stopped for a job that ranks above it. If False, the job keeps its
            minimum number of workers until it ends or its nodes are lost.
        deadline_s: Time by which the job should finish, in seconds after ``submit()``; None for no deadline. After the
            first epoch, when the job's length is known, the allocator reserves the workers needed to meet the deadline,
            if it can.
        whole_nodes: Prefer entire nodes that no other job uses, provided that no resources are left idle.
        spot: How the job uses spot nodes (label ``ray.io/market-type: spot``): ``avoid`` them, ``prefer`` them whenever
            they are available, or ``mixed``: the minimum number of workers on on-demand nodes, further workers
            anywhere.
        budget_usd: Limit on the cost of the job [USD]; None for no limit. The autoscaler plans with it and reports at
            once if it will be exceeded.
        utility: Value of completing the job as a function of the seconds after ``submit()``: pairs of time and value
            [USD], such as ``((3600, 50), (7200, 0))``. Values are interpolated linearly, held constant before the first
            pair, and extrapolated along the last segment. Once the job's length is known, the job gets no worker that
            costs more than the value it adds. None ignores costs.
        weight: Importance of the job's speed relative to other jobs with the same tenant and priority. When several
            jobs could grow, a job with weight 2 gets about twice as many workers as a job with weight 1. Minimums are
            always served first.
        tenant_weight: Weight of the job's tenant, if ``AllocatorConfig.tenants`` does not list it; None means 1. The
            largest value among the tenant's jobs applies.
        mixed_gpu_types: If True, workers may run on GPUs of several types: the job's own type, and other types that no
            other job can use. Each type gets a part of a step's samples in proportion to its speed, within
            ``local_bsz_bounds``, as with ``ElasticConfig(stragglers="share")``. Only the policy ``goodput`` mixes types
            deliberately; other policies follow their own rules.
        sizes: Numbers of workers that the job may train with, in ascending order; None allows every number within
            ``num_workers``. After losing a worker, the job continues with the remaining ones until the allocator has
            decided again, which takes a second or two.
        multiple_of: Restricts the number of workers to multiples of this number, like ``sizes``; None for no
            restriction.
        unit: Group of workers that start and end together, on a single node if one is large enough: a number of
            workers, or a mesh with named dimensions (``Unit(tp=2)``). A unit's workers form a fixed
            ``torch.distributed`` group, where a model is parallelised as under ``torchrun``. Sizes of the job then
            count units (``JobHandle.resize``, events, ``sizes``), and ``ScalingConfig(num_workers)`` must be a multiple
            of the unit's size; see docs/units.md.
        memory: Memory that each worker needs, depending on how many workers the model is divided among, and memory that
            each worker has, both from ``elastic_ray.sharded_memory(model, ...)``. The job never runs on too few workers
            for the model to fit, except after losing workers, which an event reports. None if any number of workers
            suffices.

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
        """Number of workers per unit (group of workers that start and end together); 1 without ``unit``."""
        return self.unit.size if isinstance(self.unit, Unit) else self.unit

    @property
    def completion_utility(self) -> Utility | None:
        """Value of completing the job as a function of time; None if ``utility`` is not set."""
        return None if self.utility is None else Utility(self.utility)  # type: ignore[arg-type]

    @property
    def allowed_sizes(self) -> AllowedSizes:
        """Numbers of workers that satisfy ``sizes``, ``multiple_of`` and ``memory``."""
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
            check_whole("unit", self.unit, least=1, unit="workers")
        if self.unit_size > 1 and (self.mixed_gpu_types or self.memory is not None):
            asked = "mixed_gpu_types" if self.mixed_gpu_types else "memory"
            raise ValueError(f"{asked} is not supported with unit={self.unit}: all units are alike; leave it out")
        check_whole("priority", self.priority, least=None)
        if not isinstance(self.tenant, str):
            raise TypeError(f"tenant must be text, but got {self.tenant!r}")
        for name in ("preemptible", "whole_nodes", "mixed_gpu_types"):
            check_switch(name, getattr(self, name))
        check_number("weight", self.weight, above=0, finite=True)
        for name, unit in (("tenant_weight", ""), ("deadline_s", "seconds after submit()"), ("budget_usd", "USD")):
            if (value := getattr(self, name)) is not None:
                check_number(name, value, above=0, unit=unit, finite=True)
        if self.tenant_weight is not None and not self.tenant:
            raise ValueError(f"tenant_weight needs a tenant to weigh, but got {self.tenant_weight} and tenant=''")
        check_choice("spot", self.spot, SPOT_USES)
        plain_numbers(self)
