"""A step of a loader pass, for tests of a session's parts."""

from __future__ import annotations

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.state.progress import PassProgress
from elastic_ray.steps.step import LoaderStep


def step_of(loader_pass: PassProgress, ordinal: int = 1, micro_steps: int = 1, *, whole: bool = False) -> LoaderStep:
    return LoaderStep(
        loader_pass=loader_pass,
        total=64,
        sizes=[[8] * micro_steps],
        scale=2.0,
        init_batch_size=4,
        shape=BatchChoice(atomic_bsz=8, accum_steps=micro_steps - 1),
        ordinal=ordinal,
        can_switch=lambda world_size: True,
        whole=whole,
    )
