"""Views of a job for other processes: the allocator's view, and the status for the driver (pure)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from elastic_ray.batch.planner import BatchPlanner
from elastic_ray.batch.reports import StepReport
from elastic_ray.events import JobPhase, JobStatus, WorkerInfo
from elastic_ray.job_spec import JobSpec
from elastic_ray.membership.machine import JobMembership
from elastic_ray.record.fingerprint import fingerprint
from elastic_ray.record.losses import SizeHistory
from elastic_ray.record.outlook import (
    eta_range,
    last_pause,
    progress_ratio,
    reports_to_end,
    samples_to_end,
    seconds_of_reports,
    seconds_to_end,
    time_spent,
    waits_for,
    with_length,
)
from elastic_ray.record.record import JobRecord
from elastic_ray.sealed import Raised
from elastic_ray.state.progress import RunProgress
from elastic_ray.state.resume_point import ResumePoint
from elastic_ray.worker.setup import ProcessInfo
from placement.cluster.jobs import JobView, Progress
from placement.cluster.node_record import NodeFailure
from placement.goodput.forecast import HOLDS_S, BatchForecast
from placement.text import count

_NO_GPU = None, None


def max_workers(spec: JobSpec, planner: BatchPlanner) -> int:
    """Return the largest number of workers that the job's limits and loader allow, but at least the job's minimum."""
    most = spec.max_workers if planner.loader is None else min(spec.max_workers, planner.loader.max_workers)
    return max(spec.min_workers, spec.scheduling.allowed_sizes.at_most(most))


def check_size(workers: int, spec: JobSpec, planner: BatchPlanner) -> None:
    """Raise ValueError unless the job's range, allowed sizes and loader let it be held at this number of workers."""
    most = max_workers(spec, planner)
    allowed = spec.scheduling.allowed_sizes
    if spec.min_workers <= workers <= most and allowed.allow(workers):
        return
    limit = "" if allowed.allow(workers) else f"; SchedulingConfig({allowed}) allows others only"
    if not limit and planner.loader is not None and workers <= spec.max_workers:
        limit = f"; its loader has work for {planner.loader.max_workers} (batch size and dataset)"
    raise ValueError(
        f"workers must be between {spec.min_workers} and {most} for job {spec.job}, but got {workers}{limit}"
    )


def allocator_view(
    spec: JobSpec,
    planner: BatchPlanner,
    history: SizeHistory,
    *,
    resume_point: ResumePoint | None,
    submitted_s: float,
    held_at: int | None,
    allocation: Mapping[str, int],
    may_be_stopped: bool,
    weight: float,
    slow_nodes: Mapping[str, float],
    paused: str = "",
    node_failures: tuple[NodeFailure, ...] = (),
) -> JobView:
    """Return the job's view for the allocator; until workers report, ``resume_point`` provides its progress."""
    limits = planner.loader.limits if planner.loader is not None else None
    most, wished = _wished(spec, planner, held_at)
    return JobView(
        job=spec.job,
        bundle=spec.bundle,
        min_workers=spec.min_workers,
        max_workers=most,
        submitted_s=submitted_s,
        user=spec.user,
        held_at=held_at,
        paused=paused,
        wished=wished,
        allocation=allocation,
        most_workers=history.most_workers,
        # Trials come many at a time: a second worker of the first of them would be taken back before it is there.
        growth_limit=spec.min_workers if spec.trial is not None and not history.most_workers else None,
        goodput=planner.own_model,
        init_batch_size=limits.init_batch_size if limits else None,
        max_batch_size=limits.max_batch_size if limits else None,
        held_batch=planner.held_batch,
        forecast=_forecast(planner),
        noise_growth=planner.trend.growth(HOLDS_S),
        atomic_bsz_range=_atomic_bsz_range(planner),
        accumulation=limits.gradient_accumulation if limits else False,
        resize_cost_s=max(0.0, history.resize_cost_s),
        stop_cost_s=history.start_s if may_be_stopped else None,
        label_selector=spec.label_selector,
        priority=spec.scheduling.priority,
        tenant=spec.scheduling.tenant,
        preemptible=spec.scheduling.preemptible,
        deadline_s=None if spec.scheduling.deadline_s is None else submitted_s + spec.scheduling.deadline_s,
        whole_nodes=spec.scheduling.whole_nodes,
        spot=spec.scheduling.spot,
        budget_usd=spec.scheduling.budget_usd,
        utility=spec.scheduling.completion_utility,
        weight=weight,
        tenant_weight=spec.scheduling.tenant_weight,
        restarts=history.resizes,
        fingerprint=fingerprint(spec, planner.loader),
        progress=_progress(spec, planner, resume_point),
        models=planner.models,
        observations=planner.observations,
        atomic_bsz_ranges=planner.atomic_bsz_ranges,
        slow_nodes=slow_nodes,
        node_failures=node_failures,
        mixed_gpu_types=spec.scheduling.mixed_gpu_types,
        sizes=spec.scheduling.allowed_sizes,
        unit=spec.scheduling.unit_size,
        strategies=planner.latest.found if planner.latest is not None else {},
    )


def _forecast(planner: BatchPlanner) -> BatchForecast | None:
    """Return the batch sizes that the job will be held at, if its policies know them."""
    coming = planner.latest.coming if planner.latest is not None and planner.held_batch is not None else ()
    return BatchForecast(steps=coming) if coming else None


def _wished(spec: JobSpec, planner: BatchPlanner, held_at: int | None) -> tuple[int, int | None]:
    """Return the most workers, and the fewest that the user's policies request; a manual size takes precedence."""
    most = max_workers(spec, planner)
    if held_at is not None:
        return most, None
    least_wished, most_wished = planner.wish
    allowed = spec.scheduling.allowed_sizes
    most = most if most_wished is None else max(spec.min_workers, allowed.at_most(min(most, most_wished)))
    return most, None if least_wished is None else min(allowed.at_least(least_wished) or most, most)


def _atomic_bsz_range(planner: BatchPlanner) -> tuple[int, int] | None:
    """Return the bounds on a worker's batch for the current GPU type; None if unbounded."""
    bounds = planner.tuner.atomic_bsz_range if planner.tuner is not None else None
    return (bounds[0] or 1, bounds[1] or (1 << 30)) if bounds else None


def _progress(spec: JobSpec, planner: BatchPlanner, resume_point: ResumePoint | None) -> Progress | None:
    if spec.branch_of:  # it tells nothing of how long jobs of its model are
        return None
    progress = _run_progress(planner, resume_point)
    if spec.trial is not None and progress is not None:
        return dataclasses.replace(progress, epochs=None)  # a trial that is cut short has no length
    return progress


def _run_progress(planner: BatchPlanner, resume_point: ResumePoint | None) -> Progress | None:
    """Return the run's progress; before its first report, the progress it starts with."""
    if planner.latest is not None:
        return planner.latest.progress
    return RunProgress.from_resume_point(resume_point).summary() if resume_point is not None else None


def job_status(
    spec: JobSpec,
    planner: BatchPlanner,
    record: JobRecord,
    machine: JobMembership,
    submitted_s: float,
    now_s: float,
    started_for_s: float,
) -> JobStatus:
    """Return the job's status for its driver."""
    report, ended, waiting = planner.latest, record.phase.ended, record.phase is JobPhase.WAITING
    spent = time_spent(record.events, submitted_s, now_s, started_for_s)
    first_step_s = report.first_step_s if report is not None else None
    # A job that does not train has no speed, and one of another size not the speed that was measured before.
    trains = record.phase is JobPhase.RUNNING
    throughput, mfu = planner.speed(machine.world_size if trains else None) if trains or ended else (0.0, None)
    gpus = [record.gpu_memory[each.worker] for each in machine.members() if each.worker in record.gpu_memory]
    status = JobStatus(
        job=spec.job,
        phase=record.phase,
        workers=0 if ended else machine.world_size,
        target_workers=0 if ended else machine.target_workers,
        generation=machine.generation,
        epoch=report.epoch if report else 0,
        epochs=report.epochs if report else None,
        step=report.total_steps if report else 0,
        batch_size=report.batch_size if report else 0,
        throughput=throughput,
        tokens_per_s=_in_tokens(planner, throughput),
        goodput=planner.goodput() if trains or ended else None,
        efficiency=planner.efficiency,
        metrics=record.metrics,
        message=record.message,
        cost_usd=record.cost_usd,
        note="" if ended else _remarks(record, planner, report if trains else None),
        waits_for=_waits_for(spec, record, machine),
        start_s=record.start_s if waiting and not machine.target_workers else None,
        productive_share=spent.productive_share,
        last_pause=last_pause(record.events, report.generation if report is not None else 0, first_step_s),
        learning_rate_factor=report.learning_rate_factor if report is not None else None,
        gpu_memory_used_bytes=max((used for used, _ in gpus), default=None),
        gpu_memory_reserved_bytes=max((reserved for _, reserved in gpus), default=None),
        memory_bound=report.memory_bound if report is not None else None,
        backend=report.backend if report is not None and (trains or ended) else "",
        mfu=mfu,
        reports=record.reports.last,
        checkpoint=record.newest_checkpoint,
        trial=spec.trial_facts,
        metric=spec.metric,
        **dataclasses.asdict(spent),
    )
    return _with_outlook(status, spec, planner, record)


def _waits_for(spec: JobSpec, record: JobRecord, machine: JobMembership) -> str:
    """Return what the job is waiting for; empty if it is running."""
    return waits_for(
        spec,
        record.phase,
        workers=[each.phase for each in machine.workers.values()],
        target_workers=machine.target_workers,
        storage=record.waiting,
        needs_node=record.needs_node,
    )


def _with_outlook(status: JobStatus, spec: JobSpec, planner: BatchPlanner, record: JobRecord) -> JobStatus:
    """Return the status with progress and work left until the last epoch or, in a sweep, the last allowed report."""
    size = planner.loader.dataset_size if planner.loader is not None else None
    first = planner.loader.limits.init_batch_size if planner.loader is not None else None
    progress = with_length(_run_progress(planner, record.resume_point), size, first)
    most = spec.trial.most_reports if spec.trial is not None else None
    ratios = [progress_ratio(progress), reports_to_end(record.reports.last, most)]
    ratio = max((each for each in ratios if each is not None), default=None)
    if record.phase is JobPhase.FINISHED:
        return dataclasses.replace(status, progress=1.0)
    if record.phase is not JobPhase.RUNNING:
        return dataclasses.replace(status, progress=ratio)
    made = record.reports.last - record.reports.first + 1 if record.reports.first else 0
    ends = [
        seconds_to_end(progress, first, status.goodput),
        seconds_of_reports(status.training_s, made, most - record.reports.last) if most else None,
    ]
    eta_s = min((each for each in ends if each is not None), default=None)
    low_s, high_s = eta_range(eta_s, planner.rates, planner.efficiency)
    samples = samples_to_end(progress, size, first, planner.progress_per_sample)
    steps = math.ceil(samples / status.batch_size) if samples is not None and status.batch_size else None
    return dataclasses.replace(
        status,
        progress=ratio,
        samples_left=samples,
        steps_left=steps,
        tokens_left=None if (tokens := _in_tokens(planner, samples)) is None else round(tokens),
        eta_s=eta_s,
        eta_low_s=low_s,
        eta_high_s=high_s,
    )


def _in_tokens(planner: BatchPlanner, samples: float | None) -> float | None:
    """Return a number of samples in tokens; None if the loader's batch is not declared in tokens."""
    tokens = planner.loader.tokens if planner.loader is not None else None
    return None if tokens is None or samples is None else samples * tokens.per_sample


def _remarks(record: JobRecord, planner: BatchPlanner, report: StepReport | None) -> str:
    """Return the notes to show on a job that has not ended."""
    slow = map(str, report.stragglers) if report is not None else ()
    return "; ".join(filter(None, (record.note, record.waiting, wish_note(planner), record.told, *slow)))


def wish_note(planner: BatchPlanner) -> str:
    """Return a note on the number of workers that adaptation policies request; empty if they request none."""
    least, most = planner.wish
    if least is None:
        return "" if most is None else f"its policy asks for {count(most)} at most"
    if most is None:
        return f"its policy asks for {count(least)} or more"
    return f"its policy asks for {count(least) if least == most else f'{least} to {count(most)}'}"


def members(
    machine: JobMembership,
    record: JobRecord,
    processes: Mapping[str, ProcessInfo],
    silence_s: Mapping[str, float],
    ratios: Mapping[str, float],
) -> tuple[WorkerInfo, ...]:
    """Return the members of the current generation in rank order, without those whose process is unknown.

    Args:
        ratios: Each worker's time for equal work, divided by the group's median, keyed by worker.
    """
    spec = machine.current
    if spec is None or record.phase.ended:
        return ()
    return tuple(
        WorkerInfo(
            rank=rank,
            node=member.node,
            pid=processes[member.worker].pid,
            generation=spec.generation,
            worker=member.worker,
            silence_s=silence_s.get(member.worker),
            slowness=ratios.get(member.worker),
            gpu_memory_used_bytes=record.gpu_memory.get(member.worker, _NO_GPU)[0],
            gpu_memory_reserved_bytes=record.gpu_memory.get(member.worker, _NO_GPU)[1],
        )
        for rank, member in enumerate(spec.members)
        if member.worker in processes
    )


def explain(error: BaseException | Raised | None, phase: JobPhase, why_stopped: str = "") -> str:
    """Return one line that says why a job ended: ``error``, ``why_stopped``, or else its final ``phase``."""
    if error is None and phase is JobPhase.STOPPED and why_stopped:
        return f"{why_stopped}: the job has stopped"
    if error is None:
        return f"the job has {phase.value}"
    headline = str(error).strip().split("\n", 1)[0]
    raised = getattr(error, "traceback_text", "").strip().rsplit("\n", 1)[-1]
    return f"{headline} {raised}".strip()
