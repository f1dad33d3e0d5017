"""Model of the page as frozen values, mostly table rows in ``GET /api/snapshot``.

Times are in seconds since the epoch (in a simulation, since its start), rates in samples per second, money in USD.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageSource:
    """Source of the data on the page: a cluster, stored runs or a simulation."""

    kind: str  # ``live``, ``files`` or ``simulation``
    name: str  # the cluster's address, the path, or the trace
    # whether jobs can be resized, released, paused, resumed and stopped from the page, with a token
    actions: bool = False
    problem: str = ""  # why there are no newer facts; empty while there are


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlotCount:
    """Number of slots with one GPU type (``CPU`` for nodes without GPUs) in each state; each slot counts once."""

    type: str
    used: int = 0  # a worker trains there
    starting: int = 0  # granted to a worker that does not train yet
    draining: int = 0  # on nodes that are about to go, and free
    idle: int = 0
    other: int = 0  # held by others than elastic jobs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """One-line summary of the cluster at the top of the page."""

    slots: tuple[SlotCount, ...] = ()  # by GPU type
    running: int = 0  # jobs that have workers; ``waiting``: jobs that have none; ``held``: at a size set by hand
    waiting: int = 0
    held: int = 0
    usd_per_h: float | None = None  # price of the nodes that are wanted; None where the allocator knows no prices
    # sum of the jobs' speeds, each relative to its smallest size; None while no job has a model
    speed: float | None = None
    speed_one_each: float | None = None  # the same if every job had its smallest size, as far as there are slots
    speed_equal: float | None = None  # the same if all jobs had equal shares of the slots
    decided_s: float | None = None  # time of the last decision; None before the first
    decision_cpu_s: float | None = None  # CPU time that it took [s]
    policy: str = ""  # its name; empty while there is no allocator
    settled: bool = True  # False while a new allocator still listens to jobs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageJob:
    """Row for one job, identified by ``job``.

    Attributes:
        phase: A value of ``JobPhase``; ``silent`` if the controller does not answer, ``ended`` if it is gone.
        target: Number of workers that the allocator plans for the job.
        held_at: Size that a user holds the job at; None leaves the size to the allocator.
        samples_per_s: Throughput; ``goodput`` is throughput times statistical efficiency.
        efficiency: Statistical efficiency of the current batch, at most 1.
        why: Reason for the job's size, what the job waits for, or why it ended.
        rungs: Report counts, ascending, after which the sweep may stop the trial; empty if unknown.
        score: Value of ``metric`` by which a sweep compares its trials; ``mode`` is "max" if larger is better.
        metric: Metric of the sweep; for other jobs, the metric by which checkpoints are ranked.
        colour: Colour of the job everywhere on the page, ``#rrggbb``.
    """

    job: str
    phase: str
    workers: int = 0
    target: int = 0
    min_workers: int | None = None
    max_workers: int | None = None
    held_at: int | None = None
    batch: int = 0
    samples_per_s: float = 0.0
    tokens_per_s: float | None = None
    tokens_left: int | None = None
    goodput: float | None = None
    efficiency: float | None = None
    epoch: int = 0
    epochs: int | None = None
    step: int = 0
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    progress: float | None = None
    eta_s: float | None = None
    productive: float | None = None
    deadline_s: float | None = None
    budget_usd: float | None = None
    cost_usd: float | None = None
    tenant: str = ""
    priority: int = 0
    resizes: int = 0
    submitted_s: float | None = None
    ended_s: float | None = None
    why: str = ""
    note: str = ""
    nodes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    reports: int = 0
    sweep: str = ""
    rungs: tuple[int, ...] = ()
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metric: str = ""
    mode: str = "min"
    score: float | None = None
    storage: str = ""
    colour: str = "#808080"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageNode:
    """Row for one node in the page's timeline, identified by ``node``."""

    node: str
    label: str  # its address, or what tells it from the others
    type: str = ""  # of its GPUs, or ``CPU``
    slots: int = 1  # GPUs, or CPUs where it has none; of a row that is a job, the most workers it had
    used: int = 0  # slots that are granted to workers of elastic jobs
    spot: bool = False  # whether it may be taken away
    draining: bool = False
    failures: str = ""  # what is known of workers that failed there; empty for nothing
    since_s: float | None = None  # when it was seen to come; None where it was there before the page
    gone_s: float | None = None  # when it was seen to be gone; None while it is there


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageDecision:
    """Row for one allocator decision in the page's log, identified by ``number``."""

    number: int
    time_s: float
    trigger: str
    job: str
    before: int
    after: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TenantShare:
    """Row for one tenant (such as a team), identified by ``tenant``; shares refer to its most used resource, 0 to 1."""

    tenant: str
    weight: float  # beside the others'
    owed: float  # its share by weight among the tenants that have jobs
    used: float  # what its jobs are to have
    lent: float  # what others use of its own, where it needs less than it is owed
    borrowed: float  # what it uses beyond that
    quota: Mapping[str, float] = dataclasses.field(default_factory=dict)  # the most that it may use, by resource
    jobs: int = 0
    waiting: int = 0  # its jobs without workers
    fairness: float | None = None  # longest finish-time fairness of its jobs; None where none is known


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WantedNodes:
    """Row for one node type that the allocator's autoscaling requests, identified by ``type``."""

    type: str
    market: str
    wanted: int  # how many there should be; ``missing``: how many of these are not there
    missing: int
    since_s: float | None  # since when they are missing; None if none is
    jobs: tuple[str, ...]
    reason: str  # why, or what was refused
    figures: str = ""  # behind it: cost, time, and when it is asked again


Bar = tuple[int, str, str, float, "float | None", int, int]
"""(number, node, job, from [s], to [s] or None, slots, number of the decision); key: the number."""

Mark = tuple[int, float, str, str, str]
"""(number, time [s], job, kind, text); key: the number. Of a node's mark the job is empty, and the text names it."""

Use = tuple[float, int, "int | None", "float | None"]
"""(time [s], slots in use, jobs waiting or None where not known, USD/h or None); key: the time."""


_Number: TypeAlias = "float | None"
Point: TypeAlias = tuple[_Number, _Number, _Number, _Number, _Number, _Number, _Number, Mapping[str, float]]
"""(time, samples, batch, samples/s, workers, noise scale, learning-rate factor, reported numbers by name)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageSnapshot:
    """Everything on the page except the details of individual jobs."""

    time_s: float
    source: PageSource
    strip: Strip
    jobs: tuple[PageJob, ...] = ()
    nodes: tuple[PageNode, ...] = ()
    decisions: tuple[PageDecision, ...] = ()
    tenants: tuple[TenantShare, ...] = ()
    wanted: tuple[WantedNodes, ...] = ()
    bars: tuple[Bar, ...] = ()
    marks: tuple[Mark, ...] = ()
    use: tuple[Use, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobDetail:
    """Details of one job, for ``GET /api/jobs/<name>``."""

    job: str
    # (workers, goodput) of the fitted model at each size on as few nodes as it fits
    curve: tuple[tuple[int, float], ...] = ()
    # (workers, goodput) of measured step times, at the batch that each was measured with
    measured: tuple[tuple[int, float], ...] = ()
    # what one more worker adds to the goodput; None where it may not grow or nothing is known
    gain: float | None = None
    explanation: str = ""  # the allocator's own words
    noise_scale: float | None = None  # of the present model [samples]
    series: tuple[Point, ...] = ()  # its numbers over time, oldest first
    # (time, kind, seconds, {part: seconds}), oldest first
    pauses: tuple[tuple[float, str, float, Mapping[str, float]], ...] = ()
    # seconds since its submission by what they went to
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # (rank, node, process, generation, seconds since it was heard of, time for equal work over the group's median,
    # bytes of its GPU in use, bytes reserved); None where unknown
    workers: tuple[tuple[Any, ...], ...] = ()
    mfu: float | None = None  # model FLOPs utilisation, 0 to 1; None where it is not known
    memory_bound: int | None = None  # samples that a worker takes at once at most; None while all fit into memory
    backend: str = ""  # what carries gradients between workers; empty for one worker
    events: tuple[tuple[float, str, int, int, str], ...] = ()  # (time, kind, from, to, reason), oldest first
    logs: str = ""  # where its results are
