"""Base of objectives, and their input: each job's speed and cost on each node type at every size."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from placement.cluster.jobs import Account, JobView
from placement.cluster.node_types import NodeType
from placement.goodput.model import GoodputModel
from placement.goodput.remaining import remaining
from placement.goodput.speeds import GoodputCache, Ints, model_of, table
from placement.goodput.step_time import Floats
from placement.policies.goodput.tables import useful
from placement.reasons import Reason

UNKNOWN_S = 3600.0
"""A job that does not say how long it is, is taken to continue for so long."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeTypeOption:
    """Speed and cost of one job on one node type, for each number of workers.

    Attributes:
        kind: The node type.
        rate: Useful samples per second on 1..n workers at the best batch, minus expected losses from preemption. Linear
            in the number of workers if the job's speed is unknown; 0 for sizes where the job cannot run.
        known: True if the job's speed is known.
        part_usd: Price of 1..n workers that share their nodes with other jobs [USD/h].
        whole_usd: Price of the whole nodes that 1..n workers need [USD/h].
        limit: Largest number of workers that exploration currently allows; rates beyond it are extrapolated.
    """

    kind: NodeType
    rate: Floats
    known: bool
    part_usd: Floats
    whole_usd: Floats
    limit: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WantedSize:
    """Number of workers that a job should have, provided that the nodes are available.

    Attributes:
        job: Name of the job.
        workers: Number of workers; 0 for none.
        gpu: GPU type for all the job's workers.
        reason: Reason for this size, with its cost.
        note: Message for the user, for example about a deadline or budget that cannot be met; None for no message.

    Raises:
        TypeError: The reason has the wrong type.
    """

    job: str
    workers: int
    gpu: str
    reason: Reason
    note: Reason | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.reason, Reason):
            raise TypeError(f"reason must be a placement.reasons.Reason, but got {self.reason!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Input of an objective: all jobs, with each job's speeds and costs on the available node types."""

    jobs: tuple[JobView, ...]  # in the order of arrival
    # by job: every node type that its workers fit onto, cheapest per worker first
    offers: Mapping[str, tuple[NodeTypeOption, ...]]
    spent_usd: Mapping[str, float]  # by job [USD]
    gpus: Mapping[str, str | None]  # by job: the GPU type that it runs on, None while it waits
    account: Account = dataclasses.field(default_factory=Account)  # what the cluster has cost lately

    @property
    def alone(self) -> bool:
        """True if there is only one job, which must then pay for whole nodes."""
        return len(self.jobs) == 1


class Objective(Protocol):
    """Objective that decides how many workers each job should have in an autoscaled cluster.

    ``placement.autoscaling.fleet`` then chooses the nodes. Like a policy, an objective is pure: it uses no clock and no
    randomness.
    """

    @property
    def name(self) -> str:
        """Name of the objective, as shown in reasons."""
        ...

    def decide(self, demand: Demand, now_s: float) -> Mapping[str, WantedSize]:
        """Return the wanted size of each job, keyed by job; jobs that fit no launchable node type are left out.

        ``now_s`` is the current time [s since the epoch].
        """
        ...


def offers(
    view: JobView, types: Sequence[NodeType], lasts_h: Mapping[str, float], cache: GoodputCache
) -> tuple[NodeTypeOption, ...]:
    """Return the job's options on all node types, ordered by cost per useful sample at its smallest size."""
    fitting = [kind for kind in types if kind.max_nodes and kind.slots(view)]
    on_demand = {kind.gpu_type: kind for kind in sorted(fitting, key=lambda each: -_usd(each, view)) if not kind.spot}
    found = []
    for kind in fitting:
        base = kind
        if view.spot == "mixed" and kind.spot:
            if kind.gpu_type not in on_demand:
                continue
            base = on_demand[kind.gpu_type]
        offer = _offer(view, kind, base, lasts_h[kind.name], cache)
        if offer is not None:
            found.append(offer)
    return tuple(sorted(found, key=_price))


def option_on(options: tuple[NodeTypeOption, ...], gpu: str | None) -> NodeTypeOption:
    """Return the cheapest option with this GPU type, or the cheapest option overall if none has it."""
    return next((offer for offer in options if offer.kind.gpu_type == gpu), options[0])


def within_utilities(demand: Demand, now_s: float) -> Demand:
    """Return the demand without sizes that cost more than the job's utility; jobs with a deadline are unchanged."""
    found = dict(demand.offers)
    for view in demand.jobs:
        work = work_left(view) if view.utility is not None and view.deadline_s is None else None
        if view.utility is None or work is None or view.held_at is not None:
            continue
        age_s, bounded = max(now_s - view.submitted_s, 0.0), []
        for each in demand.offers[view.job]:
            with np.errstate(divide="ignore"):
                left_s = work / each.rate
            best = view.utility.best_size(age_s, left_s, each.part_usd, view.min_workers, view.workers)
            bounded.append(dataclasses.replace(each, limit=min(each.limit, best)))
        found[view.job] = tuple(bounded)
    return dataclasses.replace(demand, offers=found)


def _usd(kind: NodeType, view: JobView) -> float:
    return kind.usd_per_h / kind.slots(view)


def _offer(view: JobView, kind: NodeType, base: NodeType, lasts_h: float, cache: GoodputCache) -> NodeTypeOption | None:
    """Return the job's option on nodes of one type, with its minimum on ``base`` if that is a different type."""
    per_node = kind.slots(view)
    on_demand = 0 if base is kind else view.min_workers
    free = dataclasses.replace(view, growth_limit=None)
    most = min(useful(free, kind.gpu_type), per_node * kind.max_nodes + on_demand)
    least = view.min_workers
    if view.held_at is not None:
        least = most = min(view.held_at, most)
    if not 1 <= least <= most:
        return None
    sizes = np.arange(1, most + 1)
    on_demand_nodes = np.ceil(np.minimum(sizes, on_demand) / base.slots(view))
    rest = np.maximum(sizes - on_demand_nodes * (base.slots(view) if on_demand else 0), 0)
    nodes = on_demand_nodes + np.ceil(rest / per_node)
    rate = _hopeful(free, kind.gpu_type, nodes.astype(np.int64), sizes, cache)
    if not free.sizes.free:
        rate = np.concatenate(([0.0], rate))[free.sizes.floors(most)[1:]]
    known = not np.isnan(rate).any()
    rate = np.where(
        sizes >= least, np.nan_to_num(rate) if known else free.sizes.floors(most)[1:].astype(np.float64), 0.0
    )
    part = np.minimum(sizes, on_demand) * _usd(base, view) + np.maximum(sizes - on_demand, 0) * _usd(kind, view)
    return NodeTypeOption(
        kind=kind,
        rate=rate * lasting(view, np.maximum(nodes - on_demand_nodes, 0), kind, lasts_h),
        known=known,
        part_usd=part,
        whole_usd=on_demand_nodes * base.usd_per_h + np.ceil(rest / per_node) * kind.usd_per_h,
        limit=max(useful(view, kind.gpu_type), least) if view.held_at is None else least,
    )


def _hopeful(view: JobView, gpu: str, nodes: Ints, sizes: Ints, cache: GoodputCache) -> Floats:
    """Return goodput [samples/s], assuming that synchronisation is no slower beyond the largest measured size.

    A ring moves the same number of bytes through every link whatever its length. The fitted model extrapolates the
    increase per replica between measured sizes, which would keep a job from trying larger sizes. A single resize, which
    costs a second, shows the actual speed.
    """
    rate: Floats = table([view], gpu, nodes[np.newaxis], sizes[np.newaxis], cache)[0]
    seen = max((each.replicas for each in view.observations.get(gpu, ())), default=0)
    model = model_of(view, gpu)
    if model is None or not 0 < seen < len(sizes) or not rate[seen - 1] > 0:
        return rate
    times = model.throughput_model
    flat = dataclasses.replace(
        times,
        alpha_n=times.alpha_n + times.beta_n * max(seen - 2, 0),
        alpha_r=times.alpha_r + times.beta_r * max(seen - 2, 0),
        beta_n=0.0,
        beta_r=0.0,
    )
    hope = GoodputModel(flat, model.noise, model.init_batch_size)
    twin = dataclasses.replace(view, goodput=hope, models={gpu: hope}, observations={})
    rest = slice(seen - 1, None)
    hoped = table([twin], gpu, nodes[np.newaxis, rest], sizes[np.newaxis, rest], cache)[0]
    if hoped[0] > 0:
        rate = rate.copy()
        rate[rest] = np.maximum(rate[rest], hoped * (rate[seen - 1] / hoped[0]))
    return rate


def lasting(view: JobView, nodes: Floats, kind: NodeType, lasts_h: float) -> Floats:
    """Return the fraction of a job's work that survives node reclaims, for each number of nodes.

        1 / (1 + (n x resize cost + start-up) / lasts)

    With n nodes, n / lasts nodes are reclaimed per hour. Each loss pauses the job for a resize, and the job runs with
    one n-th less until a replacement node has started.
    """
    lost_s = nodes * view.resize_cost_s + np.where(nodes > 0, kind.startup_s, 0.0)
    part: Floats = 1.0 / (1.0 + lost_s / (lasts_h * 3600.0))
    return part


def work_left(view: JobView) -> float | None:
    """Return the remaining work, in samples at the initial batch; None if it is unknown."""
    missing = remaining(view.progress)
    if missing is None or view.progress is None or not (view.progress.epoch_ends or view.progress.usual_epoch):
        return None
    return missing * float(view.init_batch_size or 1)


def _price(offer: NodeTypeOption) -> tuple[float, str]:
    """Return the cost per useful sample at the smallest size that runs [USD]."""
    runs = np.flatnonzero(offer.rate > 0)
    if not len(runs):
        return float("inf"), offer.kind.name
    return float(offer.part_usd[runs[0]] / offer.rate[runs[0]]), offer.kind.name
