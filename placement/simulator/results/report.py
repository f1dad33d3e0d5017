"""Report of a simulation, as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from placement.allocator.snapshot import DecisionRecord, Trigger
from placement.simulator.world.state import Placed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """Report of one job.

    Attributes:
        job: name.
        application: profile.
        arrival_s: submission [s].
        start_s: first placement [s].
        finish_s: completion [s].
        resizes: changes of its workers after the first start.
        gpu_hours: GPUs held x hours, by GPU type.
        paused_s: time that it held GPUs without progress because of changes [s].
        rho: finish-time fairness: completion time over that on an equal, isolated share of the cluster.

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
        """Completion time: completion less submission [s]."""
        return self.finish_s - self.arrival_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rented:
    """Cost of the nodes, whether or not jobs used them."""

    node_hours: Mapping[str, float]  # hours for which nodes were paid for, by node type
    usd: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """Report of one trace under one policy.

    Times in seconds; decision times are CPU time and the only part that differs between two runs with the same seed.

    Attributes:
        trace: the trace's file.
        policy: its name.
        rules: their name.
        cluster: the cluster string.
        seed: of everything random.
        settings: what else was asked for: ``requested``, ``shared_knowledge``, ``lengths``, ``disturbances``.
        gpus: GPUs of the cluster.
        prices: USD per GPU and hour that were paid, by GPU type.
        rented: what all nodes cost: those of a cluster of one size from the first submission to the last completion,
            those of an autoscaled one from their start.
        jobs: in the order of submission.
        placed: every change of a job's place.
        log: the core's decision log.
        decision_s: CPU time of each decision [s].
        idle_s: longest time for which GPUs were idle that one job could have used
            (``placement.simulator.world.state``); an empty round of the published simulators is 60 s.
        idle_gpu_hours: GPUs idle x hours while any job could have used some of their type.
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
        """Completion times of all jobs [s]."""
        return np.array([job.jct_s for job in self.jobs])

    @property
    def avg_jct_s(self) -> float:
        """Average completion time [s]."""
        return float(self.jct_s.mean())

    @property
    def makespan_s(self) -> float:
        """Time from the first submission to the last completion [s]."""
        return max(job.finish_s for job in self.jobs) - min(job.arrival_s for job in self.jobs)

    @property
    def gpu_hours(self) -> float:
        """GPUs held x hours, of all jobs."""
        return sum(sum(job.gpu_hours.values()) for job in self.jobs)

    @property
    def cost(self) -> float:
        """USD for the GPU-hours held."""
        return sum(hours * self.prices[gpu] for job in self.jobs for gpu, hours in job.gpu_hours.items())

    @property
    def unfair(self) -> float:
        """Share of jobs with rho above 2."""
        return float(np.mean([job.rho > 2.0 for job in self.jobs]))

    def record(self) -> dict[str, Any]:
        """Return one record of the JSON file."""
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
        """Return the placements and decisions in order of time, for pictures: ``placed`` and ``decisions``."""
        return {
            "placed": [(placed.time_s, placed.job, dict(placed.nodes)) for placed in self.placed],
            "decisions": [
                (each.time_s, str(each.trigger), each.job, each.from_workers, each.to_workers, str(each.reason))
                for each in self.log
            ],
        }

    def log_lines(self) -> Sequence[str]:
        """Return the decision log as text; the same seed gives the same lines, byte for byte."""
        return [f"{record.time_s!r} {record} {dict(record.nodes)!r}" for record in self.log]


Report = SimulationReport
"""The name that users import from ``placement.simulator``."""
