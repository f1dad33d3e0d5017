"""Configuration for the allocator: timing, tenants, priorities and optional cluster services."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
from collections.abc import Mapping
from typing import Literal

from placement.arguments import NamesArguments
from placement.autoscaling.autoscaler import Autoscaling
from placement.checks import check_kind, check_number, check_switch, check_whole, plain_numbers
from placement.planning.constraints import Constraints
from placement.planning.tenants import Tenant, check_tenants
from placement.ray_cluster.notices import NoticeConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorConfig(NamesArguments):
    """Configuration for the allocator: its timing [s], tenants, priorities and optional cluster services.

    Attributes:
        gather_s: Delay between an event (a job arrives or ends, limits change, a node is lost) and the resulting
            decision. One decision covers all events within the delay.
        min_interval_s: Minimum time between two decisions if the second is not urgent (a changed model, more free
            resources).
        refresh_s: Maximum time between two decisions, even if nothing has happened.
        silence_s: Time without a heartbeat from a job's controller after which the job is dropped.
        orphan_timeout_s: Maximum time that workers keep their slots, in order to save the job, after its controller is
            permanently lost. A slot is freed at once when its process ends.
        log_length: Number of decision records to keep.
        rounds: True to decide only at fixed intervals (on ``TimePassed`` events), as the published schedulers do.
        tenants: Tenants, with their weights and quotas.
        priorities: Priority per job name or pattern (``prod-*``). It overrides the priority that the job requests;
            the first match wins.
        one_multi_node_job_per_node: True if no node may hold workers from two multi-node jobs. None enforces this rule
            only while two such jobs slow each other down over shared links (``placement.planning.multi_node.held_up``),
            and not if it would stop a job.
        avoid_slow_nodes: True to move a job off a node where it has measured slow steps, if all its workers fit
            elsewhere, and to move all jobs off a node that two jobs have measured as slow.
        notices: Configuration of the watch for spot nodes that the cloud is about to reclaim.
        autoscaling: Node types and prices that the allocator uses to size the cluster. ``"auto"`` requests nodes for
            waiting jobs from Ray's autoscaler, if one is running. None requests no nodes.
        dashboard: True to serve the web page that shows the cluster (``elastic-ray dashboard``) from the head node, on
            loopback and read-only. The allocator logs its address.
        metrics: True to export metrics to Prometheus through Ray, and to install the Grafana dashboard where Ray's own
            Grafana finds it (docs/metrics.md).
        record: File on the head node where the allocator appends all its events and decisions, for the simulator
            (docs/simulator.md). None records nothing.
        storage: Storage path with interrupted jobs (running when their head node died) to be resubmitted to this
            cluster, as by ``elastic-ray resume --all``. None resumes nothing.

    Examples:
        >>> from placement import AllocatorConfig
        >>> AllocatorConfig(refresh_s=10.0).min_interval_s
        2.0
    """

    gather_s: float = 0.1
    min_interval_s: float = 2.0
    refresh_s: float = 30.0
    silence_s: float = 10.0
    orphan_timeout_s: float = 600.0
    log_length: int = 10_000
    rounds: bool = False
    tenants: tuple[Tenant, ...] = ()
    priorities: Mapping[str, int] = dataclasses.field(default_factory=dict)
    one_multi_node_job_per_node: bool | None = None
    avoid_slow_nodes: bool = True
    notices: NoticeConfig = dataclasses.field(default_factory=NoticeConfig)
    autoscaling: Autoscaling | Literal["auto"] | None = "auto"
    dashboard: bool = False
    metrics: bool = True
    record: str | None = None
    storage: str | None = None

    def __post_init__(self) -> None:
        for name in ("gather_s", "min_interval_s", "refresh_s", "silence_s", "orphan_timeout_s"):
            check_number(name, getattr(self, name), least=0, finite=name == "gather_s")
        if self.one_multi_node_job_per_node not in (None, True, False):
            raise TypeError(
                f"one_multi_node_job_per_node must be None, True or False, but got {self.one_multi_node_job_per_node!r}"
            )
        check_whole("log_length", self.log_length, least=1)
        check_tenants(self.tenants)
        check_kind("notices", self.notices, NoticeConfig, "NoticeConfig(...)")
        check_kind("priorities", self.priorities, Mapping, "a mapping such as {'prod-*': 10}")
        for pattern, priority in self.priorities.items():
            check_kind("each pattern of priorities", pattern, str, "text")
            check_whole(f"priorities[{pattern!r}]", priority, least=None)
        plain_numbers(self)
        if self.autoscaling not in ("auto", None) and not isinstance(self.autoscaling, Autoscaling):
            raise ValueError(f'autoscaling must be "auto", None or Autoscaling(...), but got {self.autoscaling!r}')
        for name in ("rounds", "avoid_slow_nodes", "dashboard", "metrics"):
            check_switch(name, getattr(self, name))
        if self.record is not None and (not isinstance(self.record, str) or not os.path.isabs(self.record)):
            raise ValueError(f"record must be None or the absolute path of a file, but got {self.record!r}")

        if self.storage is not None and not (
            isinstance(self.storage, str) and ("://" in self.storage or os.path.isabs(self.storage))
        ):
            raise ValueError(f"storage must be None, a URI or an absolute path, but got {self.storage!r}")

    @property
    def scaling(self) -> Autoscaling | None:
        """Node types and objective for sizing the cluster; None if the allocator does not size the cluster."""
        return None if isinstance(self.autoscaling, str) else self.autoscaling

    def priority_of(self, job: str) -> int | None:
        """Return the configured priority that overrides a job's own; None if no pattern matches the job."""
        return next((each for pattern, each in self.priorities.items() if fnmatch.fnmatchcase(job, pattern)), None)

    @property
    def constraints(self) -> Constraints:
        """Tenants and placement rules, in the form that the planner uses."""
        return Constraints(
            tenants=self.tenants,
            one_multi_node_job_per_node=self.one_multi_node_job_per_node,
            avoid_slow_nodes=self.avoid_slow_nodes,
        )
