"""Simulated steps of a job on GPUs of several types: its own choice of shares, and the true times of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from placement.goodput.mixed import MeasuredPart, MixedGroup, MixedObservation, TypePart
from placement.goodput.model import GoodputModel
from placement.simulator.workloads.profiles import Application
from placement.simulator.world.rules import Location


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixedSteps:
    """How a batch is shared out among types.

    Attributes:
        shares: samples of each worker in a micro-step, by type, from the largest on.
        accum_steps: micro-steps before the one that synchronises.
    """

    shares: Mapping[str, tuple[int, ...]]
    accum_steps: int

    @property
    def batch_size(self) -> int:
        """Samples of a step."""
        return sum(map(sum, self.shares.values())) * (self.accum_steps + 1)

    def measure(self, app: Application, counts: tuple[int, ...]) -> tuple[float, MixedObservation]:
        """True seconds of a step and what is seen of it: all wait for the slowest type, and for the slowest link."""
        grads, syncs = dict[str, float](), []
        for gpu, shares in self.shares.items():
            step_s, sync_s = app.step_times[gpu].times(counts, max(shares))
            grads[gpu] = max(step_s - sync_s, 1e-9)
            syncs.append(sync_s)
        grad_s = max(grads.values())
        step_s = grad_s * (self.accum_steps + 1) + max(syncs)
        parts = tuple(
            MeasuredPart(gpu=gpu, workers=len(shares), atomic_bsz=max(shares), grad_time=grads[gpu])
            for gpu, shares in self.shares.items()
        )
        return step_s, MixedObservation(parts=parts, nodes=len(counts), accum_steps=self.accum_steps, step_time=step_s)


def shared_out(
    app: Application, models: Mapping[str, GoodputModel], location: Location, batch_size: int | None
) -> MixedSteps:
    """The best batch by the job's models, or one of a fixed size; equal shares as long as a type is unknown."""
    workers = location.workers_by_type
    if all(gpu in models for gpu in workers):
        parts = [
            TypePart(gpu=gpu, workers=k, model=models[gpu].throughput_model, most=app.local_bsz_range(gpu)[1])
            for gpu, k in workers.items()
        ]
        best = MixedGroup(parts=tuple(parts), nodes=len(location.nodes)).best(
            next(iter(models.values())).noise,
            app.init_batch_size,
            max_batch_size=app.max_batch_size,
            held_batch=batch_size,
            accumulation=True,
        )
        if best.smallest_share:
            return MixedSteps(shares=dict(zip(workers, best.shares, strict=True)), accum_steps=best.accum_steps)
    most = min(app.local_bsz_range(gpu)[1] for gpu in workers)
    each = -(-(batch_size or app.init_batch_size) // location.workers)
    accum_steps = -(-each // most) - 1
    return MixedSteps(
        shares={gpu: (-(-each // (accum_steps + 1)),) * k for gpu, k in workers.items()}, accum_steps=accum_steps
    )
