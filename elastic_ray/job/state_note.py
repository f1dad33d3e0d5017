"""SHELL: a job as the controller after this one has to know it, gathered from its parts."""

from __future__ import annotations

from collections.abc import Collection

from elastic_ray.job.context import JobContext
from elastic_ray.job.preemption import Preemption
from elastic_ray.record.controller_state import ControllerState, as_text, run_of
from elastic_ray.record.losses import Losses
from elastic_ray.sealed import Sealed


def controller_state(
    parts: JobContext,
    *,
    losses: Losses,
    preemption: Preemption,
    submitted_s: float,
    held_at: int | None,
    weight: float,
    saved: bool,
    stopping: bool,
    paused: str,
    revivals: tuple[float, ...],
    claimed: Collection[int],
    return_value: Sealed | None,
) -> ControllerState:
    """Gather it; the arguments are as the fields of ``ControllerState``."""
    spec, record, group = parts.spec, parts.record, parts.group
    machine, history, goal = group.machine, group.history, group.goal
    return ControllerState(
        job=spec.job,
        run=run_of(spec),
        phase=record.phase.value,
        message=record.message,
        submitted_s=submitted_s,
        issued=machine.issued,
        announced=machine.announced,
        trained=machine.trained,
        world_size=machine.world_size,
        named=machine.named,
        nodes=dict(goal.nodes),
        reason=goal.reason,
        held_at=held_at,
        weight=weight,
        failures=losses.failures,
        raised=losses.raised,
        lost=losses.lost,
        fruitless=losses.fruitless,
        saved_steps=losses.saved_steps,
        most_workers=history.most_workers,
        resizes=history.resizes,
        resize_cost_s=history.resize_cost_s,
        start_s=history.start_s,
        launched_at_s=history.launched_at_s,
        saved=saved,
        stopping=stopping,
        paused=paused,
        critical_batch=parts.planner.critical_batch,
        preempted=preemption.reason if preemption.active else None,
        processes=group.actors.processes(),
        homes=group.actors.homes(),
        pids={worker: process_info.pid for worker, process_info in group.actors.process_infos.items()},
        revivals=revivals,
        claimed=tuple(sorted(claimed)),
        first_report=record.first_report,
        return_value=as_text(return_value) if record.phase.ended else None,
        trackers=parts.trackers.notes,
    )
