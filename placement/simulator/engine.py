"""Replay of a trace: events are taken from a heap, nothing sleeps, and no clock is read."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from placement.allocator.config import AllocatorConfig
from placement.autoscaling.autoscaler import Autoscaler
from placement.autoscaling.objectives import make_objective
from placement.cluster.cluster import Cluster
from placement.cluster.jobs import SpotUse
from placement.cluster.price_table import PriceTable
from placement.cluster.sizes import ANY_SIZE, AllowedSizes
from placement.errors import InputError
from placement.knowledge.knowledge import Knowledge
from placement.policies import make_policy
from placement.policies.baselines.boa import JobClass
from placement.policies.shared.base import Policy
from placement.simulator.live import LiveDriver, ScalingDriver
from placement.simulator.nodes.clusters import gpu_types, parse_cluster
from placement.simulator.nodes.disturbances import Disturbances
from placement.simulator.nodes.provider import AutoscaledCluster, Provider
from placement.simulator.results.fairness import SIZES, alone_s, rho
from placement.simulator.results.report import JobReport, Rented, SimulationReport
from placement.simulator.threads import one_thread
from placement.simulator.workloads.profiles import Application, load_profiles
from placement.simulator.workloads.traces import Lengths, TraceJob, in_order, read_trace
from placement.simulator.world.job import SimulatedJob
from placement.simulator.world.rules import Rules, make_rules
from placement.simulator.world.state import World
from placement.text import count

_LOG_LENGTH = 10_000_000
# What is done about slow nodes and shared links is left to the policies, which are compared by it.
_ROUNDS = AllocatorConfig(
    rounds=True, silence_s=math.inf, log_length=_LOG_LENGTH, one_multi_node_job_per_node=False, avoid_slow_nodes=False
)
_LONGEST_S = 365 * 86400.0  # a job that is not done by then never will be

OnProgress = Callable[[int, int, float], None]
"""Called with jobs finished, jobs altogether and the simulated time [s]."""


def simulate(
    trace: str | Path | Sequence[TraceJob],
    profiles: str | Path | Mapping[str, Application],
    cluster: str,
    *,
    rules: str | Rules = "pollux",
    policy: str | Policy = "goodput",
    seed: int = 0,
    requested: bool | None = None,
    knowledge: bool = False,
    lengths: Lengths | None = None,
    disturbances: Disturbances | None = None,
    prices: PriceTable | None = None,
    autoscale: AutoscaledCluster | None = None,
    statistical: bool = True,
    spot_use: SpotUse = "prefer",
    mixed_gpu_types: bool = False,
    sizes: AllowedSizes = ANY_SIZE,
    apart: bool | None = False,
    foresight: bool = True,
    on_progress: OnProgress | None = None,
) -> SimulationReport:
    """Simulate a trace of jobs under one policy, and return a report.

    Args:
        trace: Path of a trace file, or a sequence of jobs.
        profiles: Folder with one folder per application, or the applications keyed by name.
        cluster: Nodes as a string, such as ``aws:16x4``: 16 nodes with 4 GPUs each of type ``aws``.
        rules: Rules for time and the cost of changes: ``pollux``, ``sia``, ``live``, or a custom ``Rules`` object.
        policy: A registered name or a policy object.
        seed: Seed for all randomness.
        requested: True to run jobs with the trace's batch size and GPU count. None does so only for rigid policies.
        knowledge: True if jobs of one application share their measurements. Ignored for a policy with
            ``shares_knowledge`` set to False, such as Sia as published.
        lengths: Actual and declared job lengths; None uses the profiled lengths for both.
        disturbances: Failures, slow nodes, spot markets and noise; None simulates none of these.
        prices: GPU prices; None uses built-in approximate prices.
        autoscale: How the cluster grows and shrinks, up to ``cluster``; None keeps it fixed.
        statistical: True if jobs know their statistical efficiency; otherwise they maximise throughput alone.
        spot_use: How jobs use spot nodes in an autoscaled cluster.
        mixed_gpu_types: True if jobs that are not rigid may run on several GPU types at once.
        sizes: Worker counts that non-rigid jobs can train with. Ignored for a job with a batch size that allows none of
            them.
        apart: Value of ``AllocatorConfig.one_multi_node_job_per_node``.
        foresight: True if jobs with a batch-size ramp (``TraceJob.ramp``) announce its later steps.
        on_progress: Callback for every simulated hour, with jobs done, number of jobs and time [s]; None for no
            callback.

    Raises:
        InputError: The input is invalid; raised before the simulation starts.
        ValueError: The policy is unknown.
        RuntimeError: The simulation does not end, because the policy starves a job.
    """
    task = Task(
        trace=trace,
        profiles=profiles,
        cluster=cluster,
        rules=rules,
        policy=policy,
        seed=seed,
        requested=requested,
        knowledge=knowledge,
        lengths=lengths or Lengths(),
        disturbances=disturbances or Disturbances(),
        prices=prices or PriceTable(),
        autoscale=autoscale,
        statistical=statistical,
        spot_use=spot_use,
        mixed_gpu_types=mixed_gpu_types,
        sizes=sizes,
        apart=apart,
        foresight=foresight,
    )
    return task.run(on_progress)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Checked:
    """Validated input of a simulation."""

    nodes: Cluster
    rules: Rules
    rates: Mapping[str, float]  # price of each GPU type [USD per GPU and hour]
    specs: tuple[TraceJob, ...]
    applications: Mapping[str, Application]
    policy: Policy
    rigid: bool  # whether jobs run as their users requested


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Arguments for one simulation, which runs a trace under one policy; see ``simulate``."""

    trace: str | Path | Sequence[TraceJob]
    profiles: str | Path | Mapping[str, Application]
    cluster: str
    rules: str | Rules
    policy: str | Policy
    seed: int = 0
    requested: bool | None = None
    knowledge: bool = False
    lengths: Lengths = dataclasses.field(default_factory=Lengths)
    disturbances: Disturbances = dataclasses.field(default_factory=Disturbances)
    prices: PriceTable = dataclasses.field(default_factory=PriceTable)
    autoscale: AutoscaledCluster | None = None
    statistical: bool = True
    spot_use: SpotUse = "prefer"
    mixed_gpu_types: bool = False
    sizes: AllowedSizes = ANY_SIZE
    apart: bool | None = False
    foresight: bool = True

    def check(self) -> _Checked:
        """Check all input without running the simulation."""
        nodes, rules, trace, profiles = parse_cluster(self.cluster), make_rules(self.rules), self.trace, self.profiles
        types = gpu_types(nodes)
        applications = load_profiles(profiles, types) if isinstance(profiles, (str, Path)) else profiles
        if isinstance(trace, (str, Path)):
            specs = read_trace(trace, applications)
        else:
            specs = in_order(trace, applications, "jobs")
        self.disturbances.check(rules, nodes)
        if self.autoscale is not None:
            self.autoscale.check(rules, self.disturbances)
            make_objective(self.autoscale.objective)
        # Of an autoscaled cluster nodes of both markets are paid for, each at its own price (``Provider``).
        rates = self.prices.rates(types, self.disturbances.spot_types(types) if self.autoscale is None else ())
        policy = make_policy(self.policy)
        if hasattr(policy, "priced"):
            policy = policy.priced(rates)
        policy = _told(policy, specs, applications, nodes, rules)
        rigid = bool(getattr(policy, "rigid", False)) if self.requested is None else self.requested
        return _Checked(
            nodes=nodes,
            rules=rules,
            rates=rates,
            specs=specs,
            applications=applications,
            policy=policy,
            rigid=rigid,
        )

    def run(self, on_progress: OnProgress | None = None) -> SimulationReport:
        """Run the simulation; arguments and errors are as in ``simulate``."""
        checked = self.check()
        shares = self.knowledge and bool(getattr(checked.policy, "shares_knowledge", True))
        with one_thread():
            jobs = self._jobs(checked)
            world, rented = self._drive(checked, jobs, Knowledge() if shares else None, on_progress)
            fairness = rho(jobs, checked.nodes)
        reports = tuple(_report(job, fairness[job.name]) for job in jobs)
        if rented is None:
            seconds = max(job.finish_s for job in reports) - min(job.arrival_s for job in reports)
            rented = _rent(checked.nodes, checked.rates, seconds)
        return SimulationReport(
            trace=str(self.trace) if isinstance(self.trace, (str, Path)) else "jobs",
            policy=checked.policy.name,
            rules=checked.rules.name,
            cluster=self.cluster,
            seed=self.seed,
            settings=self._settings(rigid=checked.rigid, shares=shares),
            gpus=int(sum(node.total["GPU"] for node in checked.nodes.nodes)),
            prices=checked.rates,
            rented=rented,
            jobs=reports,
            placed=tuple(world.placed),
            log=world.core.log,
            decision_s=tuple(world.decision_s),
            idle_s=world.idle.longest_s,
            idle_gpu_hours=world.idle.gpu_s / 3600.0,
        )

    def _jobs(self, checked: _Checked) -> list[SimulatedJob]:
        """Return the jobs in their initial state."""
        per_node = {node.gpu_type: int(node.total["GPU"]) for node in checked.nodes.nodes}
        jobs = []
        for spec in checked.specs:
            application = self.lengths.application(checked.applications[spec.application], spec.name, self.seed)
            own = ANY_SIZE if checked.rigid else self.sizes
            job = SimulatedJob(
                spec,
                application,
                checked.rules,
                requested=checked.rigid,
                gpus_per_node=per_node,
                sigma=self.disturbances.noise,
                seed=self.seed,
                declared=self.lengths.declaration(application.epochs, spec.name, self.seed),
                statistical=self.statistical,
                spot=self.spot_use,
                mixed_gpu_types=self.mixed_gpu_types and not checked.rigid,
                sizes=own if checked.rigid or spec.sizes.free else spec.sizes,
                foresight=self.foresight,
            )
            jobs.append(job)
        return jobs

    def _drive(
        self,
        checked: _Checked,
        jobs: Sequence[SimulatedJob],
        knowledge: Knowledge | None,
        on_progress: OnProgress | None,
    ) -> tuple[World, Rented | None]:
        """Simulate until all jobs are done; return the world and, for an autoscaled cluster, the rented nodes."""
        rules, wrong, scale = checked.rules, self.disturbances, self.autoscale
        config = dataclasses.replace(  # nothing to gather: all that comes at one moment of a trace is told at once
            _ROUNDS,
            one_multi_node_job_per_node=self.apart,
            gather_s=0.0,
            rounds=rules.round_s is not None,
            min_interval_s=rules.pace.min_interval_s,
            refresh_s=rules.pace.refresh_s,
        )
        world = World(jobs, checked.nodes if scale is None else Cluster(), checked.policy, config, knowledge)
        if scale is not None:
            types = scale.types(checked.nodes, self.prices, wrong.spot)
            provider = Provider(types, wrong.spot, 3600.0 * wrong.spot_offset_h, self.seed)
            autoscaler = Autoscaler(types, checked.policy, scale.objective, scale.config)
            ScalingDriver(
                world, autoscaler, provider, wrong, notice_s=scale.notice_s, seed=self.seed, longest_s=_LONGEST_S
            ).run(jobs, on_progress)
            provider.close(max(job.finished_s or 0.0 for job in jobs))
            return world, Rented(node_hours=provider.rented_h, usd=provider.usd)
        if rules.round_s is not None:
            _run_rounds(world, jobs, rules.round_s, on_progress)
        else:
            LiveDriver(world, checked.nodes, wrong, self.seed, _LONGEST_S, rules.pace).run(jobs, on_progress)
        return world, None

    def _settings(self, *, rigid: bool, shares: bool) -> dict[str, object]:
        """Return the simulation's settings as plain values."""
        wrong = {f.name: getattr(self.disturbances, f.name) for f in dataclasses.fields(self.disturbances)}
        spot = {gpu or "all": trace.source for gpu, trace in sorted(self.disturbances.spot.items())}
        return {
            "requested": rigid,
            "shared_knowledge": shares,
            "lengths": dataclasses.asdict(self.lengths),
            "statistical": self.statistical,
            "mixed_gpu_types": self.mixed_gpu_types and not rigid,
            "sizes": None if rigid or self.sizes.free else str(self.sizes),
            "apart": self.apart,
            "autoscale": None if self.autoscale is None else str(self.autoscale),
            "disturbances": {**{name: value for name, value in wrong.items() if name != "spot"}, "spot": spot},
        }


def _rent(nodes: Cluster, rates: Mapping[str, float], seconds: float) -> Rented:
    hours = seconds / 3600.0
    usd = sum(node.total["GPU"] * rates[node.gpu_type] * hours for node in nodes.nodes)
    counts = collections.Counter(node.gpu_type for node in nodes.nodes)
    return Rented(node_hours={gpu: count * hours for gpu, count in sorted(counts.items())}, usd=usd)


def _told(
    policy: Policy, specs: Sequence[TraceJob], applications: Mapping[str, Application], nodes: Cluster, rules: Rules
) -> Policy:
    """Return the policy, with the jobs' arrival rates and run times if it has a ``told`` method."""
    told: Callable[[Mapping[str, JobClass], float], Policy] | None = getattr(policy, "told", None)
    if told is None or not specs:
        return policy
    types = gpu_types(nodes)
    if len(types) > 1:
        raise InputError(
            f"policy {policy.name!r} rents GPUs of one type, but the cluster has {', '.join(sorted(types))}"
        )
    return told(job_classes(specs, applications, nodes, rules), float(sum(node.total["GPU"] for node in nodes.nodes)))


def job_classes(
    specs: Sequence[TraceJob], applications: Mapping[str, Application], nodes: Cluster, rules: Rules
) -> dict[str, JobClass]:
    """Return each application's arrivals per hour and run time on each number of workers, keyed by its name."""
    gpu, per_node = nodes.nodes[0].gpu_type, int(nodes.nodes[0].total["GPU"])
    arrivals = [spec.time_s for spec in specs]
    hours = max((max(arrivals) - min(arrivals)) / 3600.0, 1e-3)
    classes = {}
    for name, jobs in collections.Counter(spec.application for spec in specs).items():
        pause_s = rules.expected_restart_s(name) + 0.5 * (rules.round_s or 0.0)
        times = {k: alone_s(applications[name], gpu, per_node, k) for k in SIZES if k <= rules.most_workers}
        curve = {k: each * rules.divisor(name) + pause_s for k, each in times.items() if math.isfinite(each)}
        classes[name] = JobClass(per_h=jobs / hours, seconds=curve)
    return classes


def _run_rounds(world: World, jobs: Sequence[SimulatedJob], round_s: float, on_progress: OnProgress | None) -> None:
    """Run rounds: jobs advance, the policy decides over all current jobs, and changed jobs are placed again."""
    arriving = collections.deque(jobs)
    present: list[SimulatedJob] = []
    rounds = [round_s]
    while present or arriving:
        now_s = heapq.heappop(rounds)
        if now_s > _LONGEST_S:
            raise RuntimeError(
                f"{count(len(present), 'job')} without an end, the first is {present[0].name!r}; is it ever served?"
            )
        while arriving and arriving[0].trace.time_s <= now_s:
            present.append(arriving.popleft())
            present[-1].arrive(now_s - round_s)
        for job in present:
            job.advance(now_s - job.now_s)
            if job.finished_s is not None:
                world.end(job, now_s)
        present = [job for job in present if job.finished_s is None]
        for job in present:
            world.receive(job, now_s)
        world.tick(now_s)
        heapq.heappush(rounds, now_s + round_s)
        if on_progress is not None and now_s % 3600.0 < round_s:
            on_progress(len(jobs) - len(present) - len(arriving), len(jobs), now_s)


def _report(job: SimulatedJob, fairness: float) -> JobReport:
    """Return the report on a finished job; ``fairness`` is its rho."""
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
