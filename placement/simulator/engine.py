"""Replays a trace: time stands in a heap, nothing sleeps, and nothing reads a clock."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from placement.cluster import Cluster
from placement.core import AllocatorConfig
from placement.knowledge import Knowledge
from placement.policies import make_policy
from placement.policies.base import Policy
from placement.simulator.clusters import PRICES, gpu_types, parse_cluster
from placement.simulator.disturbances import Disturbances
from placement.simulator.errors import InputError
from placement.simulator.fairness import rho
from placement.simulator.job import SimulatedJob
from placement.simulator.live import LiveDriver
from placement.simulator.profiles import Application, load_profiles
from placement.simulator.report import JobReport, Report
from placement.simulator.rules import Rules, make_rules
from placement.simulator.threads import one_thread
from placement.simulator.traces import TraceJob, read_trace
from placement.simulator.world import World

_LOG_LENGTH = 10_000_000
_ROUNDS = AllocatorConfig(rounds=True, silence_s=math.inf, log_length=_LOG_LENGTH)
_LIVE = AllocatorConfig(min_interval_s=15.0, refresh_s=60.0, silence_s=math.inf, log_length=_LOG_LENGTH)
_LONGEST_S = 365 * 86400.0  # a job that is not done by then never will be

OnProgress = Callable[[int, int, float], None]
"""Called with jobs finished, jobs altogether and the simulated time [s]."""


def simulate(
    trace: str | Path | Sequence[TraceJob],
    profiles: str | Path,
    cluster: str,
    *,
    rules: str | Rules = "pollux",
    policy: str | Policy = "goodput",
    seed: int = 0,
    requested: bool | None = None,
    knowledge: bool = False,
    disturbances: Disturbances | None = None,
    on_progress: OnProgress | None = None,
) -> Report:
    """Replay one trace under one policy.

    Args:
        trace: a file, or jobs.
        profiles: folder with one folder per application.
        cluster: such as ``aws:16x4``.
        rules: ``pollux``, ``sia`` or rules of one's own.
        policy: a registered name or a policy object.
        seed: of everything random.
        requested: jobs run at the trace's batch and count; by default if the policy is for rigid jobs.
        knowledge: whether jobs of one application share what they measure.
        disturbances: what goes wrong; nothing by default.
        on_progress: called about every simulated hour.

    Raises:
        InputError: bad input, before anything was simulated.
        ValueError: unknown policy.
        RuntimeError: the trace does not come to an end, since the policy starves a job.
    """
    nodes = parse_cluster(cluster)
    applications = load_profiles(profiles, gpu_types(nodes))
    specs = read_trace(trace, applications) if isinstance(trace, (str, Path)) else tuple(trace)
    chosen_rules, chosen = make_rules(rules), make_policy(policy)
    rigid = bool(getattr(chosen, "rigid", False)) if requested is None else requested
    wrong = disturbances or Disturbances()
    if chosen_rules.round_s is not None and dataclasses.replace(wrong, noise=0.0) != Disturbances():
        raise InputError(f"rules must be 'live' for disturbances other than noise, but got {chosen_rules.name!r}")
    shared = Knowledge() if knowledge else None
    with one_thread():
        jobs = _jobs(specs, applications, chosen_rules, nodes, rigid, wrong.noise, seed)
        if chosen_rules.round_s is not None:
            world = World(jobs, nodes, chosen, _ROUNDS, shared)
            _run_rounds(world, jobs, chosen_rules.round_s, on_progress)
        else:
            world = World(jobs, nodes, chosen, _LIVE, shared)
            LiveDriver(world, nodes, wrong, seed, _LONGEST_S).run(jobs, on_progress)
        fairness = rho(jobs, nodes)
    return Report(
        trace=str(trace) if isinstance(trace, (str, Path)) else "jobs",
        policy=chosen.name,
        rules=chosen_rules.name,
        cluster=cluster,
        seed=seed,
        gpus=int(sum(node.total["GPU"] for node in nodes.nodes)),
        prices={gpu: PRICES.get(gpu, 0.0) for gpu in gpu_types(nodes)},
        jobs=tuple(_report(job, fairness[job.name]) for job in jobs),
        placed=tuple(world.placed),
        log=world.core.log,
        decision_s=tuple(world.decision_s),
    )


def _jobs(
    specs: Sequence[TraceJob],
    applications: dict[str, Application],
    rules: Rules,
    nodes: Cluster,
    requested: bool,
    sigma: float,
    seed: int,
) -> list[SimulatedJob]:
    per_node = {node.gpu_type: int(node.total["GPU"]) for node in nodes.nodes}
    return [
        SimulatedJob(
            spec,
            applications[spec.application],
            rules,
            requested=requested,
            gpus_per_node=per_node,
            sigma=sigma,
            seed=seed,
        )
        for spec in specs
    ]


def _run_rounds(world: World, jobs: Sequence[SimulatedJob], round_s: float, on_progress: OnProgress | None) -> None:
    """Jobs advance, time moves, the policy decides over all that are there, changed jobs are placed anew."""
    arriving = collections.deque(jobs)
    present: list[SimulatedJob] = []
    rounds = [round_s]
    while present or arriving:
        now_s = heapq.heappop(rounds)
        if now_s > _LONGEST_S:
            raise RuntimeError(f"{len(present)} jobs never end, the first is {present[0].name!r}; is it ever served?")
        while arriving and arriving[0].trace.time_s <= now_s:
            present.append(arriving.popleft())
            present[-1].now_s = now_s - round_s
        for job in present:
            job.advance(now_s - job.now_s)
            if job.finished_s is not None:
                world.end(job, now_s)
        present = [job for job in present if job.finished_s is None]
        for job in present:
            world.hear(job, now_s)
        world.tick(now_s)
        heapq.heappush(rounds, now_s + round_s)
        if on_progress is not None and now_s % 3600.0 < round_s:
            on_progress(len(jobs) - len(present) - len(arriving), len(jobs), now_s)


def _report(job: SimulatedJob, fairness: float) -> JobReport:
    assert job.started_s is not None and job.finished_s is not None
    return JobReport(
        job=job.name,
        application=job.app.name,
        arrival_s=job.trace.time_s,
        start_s=job.started_s,
        finish_s=job.finished_s,
        resizes=job.restarts,
        gpu_hours={gpu: held_s / 3600.0 for gpu, held_s in sorted(job.held_s.items())},
        paused_s=job.paused_s,
        rho=fairness,
    )
