"""Shapes (nodes, workers) that a job may have, and its speed in each."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from placement.cluster.jobs import JobView

if TYPE_CHECKING:
    from placement.goodput.model import GoodputModel

Shape: TypeAlias = "tuple[int, int]"
Floats: TypeAlias = NDArray[np.float64]


def shapes(view: JobView, slots: Sequence[int], most: int) -> tuple[Shape, ...]:
    """Return all sizes up to one full node and whole multiples of it beyond, each on as few nodes as possible.

    Args:
        view: The job; its minimum is always among the sizes.
        slots: Number of the job's workers that each node can hold.
        most: Largest size to consider.
    """
    roomy = np.cumsum(sorted(slots, reverse=True))
    if not len(roomy) or roomy[-1] < view.min_workers:
        return ()
    node, most = max(slots), min(most, int(roomy[-1]))
    sizes = {*range(1, node + 1), *range(2 * node, most + 1, node), view.min_workers}
    return tuple(
        (int(np.searchsorted(roomy, size)) + 1, size) for size in sorted(sizes) if view.min_workers <= size <= most
    )


def speeds_of(view: JobView, wanted: tuple[Shape, ...]) -> Floats:
    """Return the goodput of each shape at its best batch, relative to the job's minimum size on one node.

    If the minimum size cannot run, speeds are relative to the lowest goodput among the shapes. A shape in which
    no batch fits has speed 0. Without a goodput model, the speed is the number of workers.
    """
    if view.goodput is None:
        return np.array([workers for _, workers in wanted], dtype=np.float64)
    values = goodputs(view, view.goodput, ((1, view.min_workers), *wanted), view.atomic_bsz_range)
    positive = values[values > 0]
    base = values[0] if values[0] > 0 else (positive.min() if positive.size else 1.0)
    return np.asarray(values[1:] / base)


def goodputs(
    view: JobView, model: GoodputModel, wanted: tuple[Shape, ...], atomic_bsz_range: tuple[int, int] | None
) -> Floats:
    """Return the useful samples per second of each shape, 0 if no batch fits; the array is read-only.

    Each shape uses the batch that the job is held at, or else the best batch within the limits.
    """
    limit = view.max_batch_size
    if limit is not None:
        limit = max(limit, model.init_batch_size)
    return _goodputs(model, wanted, limit, atomic_bsz_range, view.accumulation, view.held_batch)


@functools.lru_cache(maxsize=16384)  # a decision asks again for every job, though few models have changed
def _goodputs(
    model: GoodputModel,
    wanted: tuple[Shape, ...],
    max_batch_size: int | None,
    atomic_bsz_range: tuple[int, int] | None,
    accumulation: bool,
    held_batch: int | None,
) -> Floats:
    """Return the goodput [samples/s] of each shape at the held or best batch: finite, 0 if none fits, read-only."""
    nodes, workers = np.array(wanted).T
    best = model.best_held(
        nodes,
        workers,
        held_batch,
        max_batch_size=max_batch_size,
        atomic_bsz_range=atomic_bsz_range,
        accumulation=accumulation,
    )
    values: Floats = np.maximum(np.nan_to_num(np.asarray(best, dtype=np.float64), posinf=0.0), 0.0)
    values.setflags(write=False)
    return values
