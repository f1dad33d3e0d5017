"""The batch of a job that runs at what its user asked for, and its true step times on every size."""

from __future__ import annotations

import functools
import math

from placement.simulator.workloads.profiles import Application

_EPS = 1e-8


def rigid_batch(batch: int, replicas: int, app: Application, most_local: int) -> tuple[int, int]:
    """(atomic batch, accumulation steps) that split a given global batch, by the Pollux artifact's rule."""
    local = math.ceil(batch / replicas - _EPS)
    accum = math.ceil(local / most_local - _EPS) - 1
    if replicas == 1 and batch > app.init_batch_size:
        accum = max(1, accum)
    atomic = math.ceil(local / (accum + 1) - _EPS)
    return max(1, min(atomic, app.max_batch_size // (replicas * (accum + 1)))), accum


@functools.lru_cache(maxsize=4096)
def true_step_s(app: Application, gpu: str, batch: int, most: int, per_node: int) -> tuple[float, ...]:
    """True seconds of a step at this batch on 1..most workers, packed onto full nodes."""
    times = []
    for replicas in range(1, most + 1):
        counts = (per_node,) * (replicas // per_node) + ((replicas % per_node,) if replicas % per_node else ())
        atomic, accum = rigid_batch(batch, replicas, app, app.local_bsz_range(gpu)[1])
        step_s, sync_s = app.step_times[gpu].times(counts, atomic)
        times.append(step_s + accum * (step_s - sync_s))
    return tuple(times)
