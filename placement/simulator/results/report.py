"""Report on a simulation, as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from placement.allocator.snapshot import DecisionRecord, Trigger
from placement.simulator.world.state import Placed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """Report on one simulated job.

    Attributes:
        job: Name of the job.
        application: Name of the job's profile.
        arrival_s: Time of submission [s].
        start_s: Time of the first placement [s].
        finish_s: Time of completion [s].
        resizes: Number of changes to the job's workers after the first start.
        gpu_hours: GPUs held x hours, keyed by GPU type.
        paused_s: Time that the job held GPUs without progress because of changes [s].
        rho: Finish-time fairness: completion time / completion time on an equal, isolated share of the cluster.

    Examples:
        >>> from placement.simulator import JobReport
        >>> times = {"arrival_s": 0.0, "start_s": 9.0, "finish_s": 60.0, "paused_s": 3.0}
        >>> job = JobReport(job="a", application="bert", resizes=2, gpu_hours={"t4": 0.1}, rho=1.1, **times)
        >>> job.start_s - job.arrival_s
        9.0
    """

    job: str
    application: str
    arrival_s: float
    start_s: float
    finish_s: float
    resizes: int
    gpu_hours: Mapping[str, float]
    paused_s: float
    rho: float

    @property
    def jct_s(self) -> float:
        """Job completion time, from submission to completion [s]."""
        return self.finish_s - self.arrival_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rented:
    """Total cost of all nodes that were rented, including idle time."""

    node_hours: Mapping[str, float]  # hours for which nodes were paid for, by node type
    usd: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """Report on one trace under one policy.

    Times are in seconds. Decision times are CPU time; all other values are identical in runs with the same seed.

    Attributes:
        trace: Path of the trace file.
        policy: Name of the policy.
        rules: Name of the rules.
        cluster: The cluster string.
        seed: Seed for all randomness.
        settings: Other arguments of ``simulate``: ``requested``, ``shared_knowledge``, ``lengths``, ``disturbances``
            and so on.
        gpus: Number of GPUs in the cluster.
        prices: Prices paid [USD per GPU and hour], keyed by GPU type.
        rented: Cost of all nodes. In a cluster of fixed size, it is counted from the first submission to the last
            completion; in an autoscaled one, from the time each node was requested.
        jobs: Reports on the jobs, in order of submission.
        placed: All changes to jobs' placements.
        log: The core's decision log.
        decision_s: CPU time of each decision [s].
        idle_s: Longest time that GPUs were idle while some job could have used them
            (``placement.simulator.world.state``); an empty round in the published simulators is 60 s.
        idle_gpu_hours: Idle GPUs x hours while any job could have used some of their type.
    """

    trace: str
    policy: str
    rules: str
    cluster: str
    seed: int
    settings: Mapping[str, Any]
    gpus: int
    prices: Mapping[str, float]
    rented: Rented
    jobs: tuple[JobReport, ...]
    placed: tuple[Placed, ...]
    log: tuple[DecisionRecord, ...]
    decision_s: tuple[float, ...]
    idle_s: float = 0.0
    idle_gpu_hours: float = 0.0

    @property
    def jct_s(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Completion time of each job, from submission to completion [s], in the order of the jobs."""
        return np.array([job.jct_s for job in self.jobs])

    @property
    def avg_jct_s(self) -> float:
        """Average job completion time [s]."""
        return float(self.jct_s.mean())

    @property
    def makespan_s(self) -> float:
        """Time from the first submission to the last completion [s]."""
        return max(job.finish_s for job in self.jobs) - min(job.arrival_s for job in self.jobs)

    @property
    def gpu_hours(self) -> float:
        """GPU-hours: number of GPUs held x hours, summed over all jobs."""
        return sum(sum(job.gpu_hours.values()) for job in self.jobs)

    @property
    def cost(self) -> float:
        """Cost of the GPU-hours held by jobs [USD]."""
        return sum(hours * self.prices[gpu] for job in self.jobs for gpu, hours in job.gpu_hours.items())

    @property
    def unfair(self) -> float:
        """Fraction of jobs that took more than twice as long as on an equal share of the cluster (rho above 2)."""
        return float(np.mean([job.rho > 2.0 for job in self.jobs]))

    def record(self) -> dict[str, Any]:
        """Return a summary of this report as a JSON record."""
        jct_s = self.jct_s
        decision_ms = 1e3 * np.array(self.decision_s or (0.0,))
        rho = np.array([job.rho for job in self.jobs])
        return {
            "trace": self.trace,
            "policy": self.policy,
            "rules": self.rules,
            "cluster": self.cluster,
            "seed": self.seed,
            "settings": dict(self.settings),
            "prices_usd": dict(self.prices),
            "jobs": len(self.jobs),
            "avg_jct_s": self.avg_jct_s,
            "median_jct_s": float(np.median(jct_s)),
            "p99_jct_s": float(np.percentile(jct_s, 99)),
            "makespan_s": self.makespan_s,
            "gpu_hours": self.gpu_hours,
            "utilisation": self.gpu_hours * 3600.0 / (self.gpus * self.makespan_s),
            "idle_s": self.idle_s,
            "idle_gpu_hours": self.idle_gpu_hours,
            "restarts_per_job": float(np.mean([job.resizes for job in self.jobs])),
            "paused_s_per_job": float(np.mean([job.paused_s for job in self.jobs])),
            "rho_mean": float(rho.mean()),
            "rho_max": float(rho.max()),
            "rho_above_2": self.unfair,
            "cost_usd": self.cost,
            "rented_usd": self.rented.usd,
            "node_hours": dict(self.rented.node_hours),
            "refused_decisions": sum(1 for record in self.log if record.trigger is Trigger.REFUSED),
            "decision_ms_mean": float(decision_ms.mean()),
            "decision_ms_p99": float(np.percentile(decision_ms, 99)),
            "decision_ms_max": float(decision_ms.max()),
            "per_job": [{**dataclasses.asdict(job), "jct_s": job.jct_s} for job in self.jobs],
        }

    def history(self) -> dict[str, Any]:
        """Return the placements and decisions in chronological order, for plotting: ``placed`` and ``decisions``."""
        return {
            "placed": [(placed.time_s, placed.job, dict(placed.nodes)) for placed in self.placed],
            "decisions": [
                (each.time_s, str(each.trigger), each.job, each.from_workers, each.to_workers, str(each.reason))
                for each in self.log
            ],
        }

    def log_lines(self) -> Sequence[str]:
        """Return the decision log as lines of text, which are byte-identical for the same seed."""
        return [f"{record.time_s!r} {record} {dict(record.nodes)!r}" for record in self.log]
