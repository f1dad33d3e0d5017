"""What a job would do on GPU types where it has not run on several GPUs yet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from placement.cluster.jobs import JobView
from placement.policies.shared.shapes import Floats, Shape, goodputs, speeds_of

_ONE: Shape = (1, 1)


def estimates(view: JobView, wanted: Sequence[tuple[str, Shape]]) -> Floats:
    """Goodput of each (GPU type, shape), relative to the least of them.

    Where the job was measured on several GPUs of the type, its model of that type answers. Else (Jayaram Subramanya
    et al., SOSP 2023, section 3.2) another type A with such measurements, at the ratio of one GPU's goodput::

        goodput_B(n, k) = goodput_B(1, 1) / goodput_A(1, 1) x goodput_A(n, k)

    and without any, k GPUs do k times the work of one. A type that was never run on counts as a known one.
    """
    if not view.models:
        return _relative(speeds_of(view, tuple(shape for _, shape in wanted)))
    shapes = (_ONE, *(shape for _, shape in wanted))
    tables = {gpu: goodputs(view, model, shapes, _range(view, gpu)) for gpu, model in view.models.items()}
    several = [gpu for gpu in tables if any(each.replicas > 1 for each in view.observations.get(gpu, ()))]
    sources = [gpu for gpu in several if tables[gpu][0] > 0]
    default = max(float(table[0]) for table in tables.values()) or 1.0
    values = np.zeros(len(wanted))
    for i, (gpu, (_, workers)) in enumerate(wanted):
        one = float(tables[gpu][0]) if gpu in tables else default
        if gpu in several or (gpu in tables and len(tables) == 1):
            values[i] = tables[gpu][i + 1]
        elif sources:
            table = tables[sources[0]]
            values[i] = one / table[0] * table[i + 1]
        else:
            values[i] = one * workers
    return _relative(values)


def _range(view: JobView, gpu: str) -> tuple[int, int] | None:
    return view.atomic_bsz_ranges.get(gpu, view.atomic_bsz_range)


def _relative(values: Floats) -> Floats:
    positive = values[values > 0]
    return np.asarray(values / positive.min()) if positive.size else np.ones(len(values))
