"""Rank 0's account of its steps, as its controller hears it."""

from __future__ import annotations

from elastic_ray.batch.reports import StepReport
from elastic_ray.run.run import Run
from elastic_ray.session.adaptation import Adaptation


def step_report(run: Run, adaptation: Adaptation) -> StepReport | None:
    """Measurements since the last call; None before the first generation."""
    spec = run.group.generation_spec
    if spec is None:
        return None
    shape, steps, step_time, grad_time = run.clock.take()
    if run.clock.generation != spec.generation:  # a leaver's last steps, and those before a switch under way
        shape, steps, step_time, grad_time = None, 0, 0.0, 0.0
    progress, peak_s = run.states.progress, run.registry.peak_s
    return StepReport(
        generation=spec.generation,
        nodes=spec.nodes,
        replicas=spec.world_size,
        shape=shape,
        steps=steps,
        step_time=step_time,
        grad_time=grad_time,
        noise=run.registry.models.noise(),
        signal=run.registry.models.signal,
        epoch=progress.epoch,
        epochs=progress.epochs,
        total_steps=progress.steps,
        batch_size=run.clock.batch_size,
        progress=progress.summary(),
        strategy=run.clock.strategy,
        uneven=run.clock.uneven,
        stragglers=(*run.stragglers.slow, *run.stragglers.senders),
        ratios=run.stragglers.ratios,
        parts=run.gpu_types.take() if not run.stragglers.uneven else (),
        held_batch=adaptation.held_batch,
        wish=adaptation.wish,
        learning_rate_factor=run.registry.models.rate_factor,
        first_step_s=run.clock.first_step_s,
        loss=run.registry.monitoring.loss,
        memory_bound=progress.memory_bound,
        backend=run.group.communicator.backend if run.group.members else "",
        mfu=peak_s * run.clock.batch_size / spec.world_size / step_time if peak_s and step_time > 0 else None,
    )
