"""Goodput of many jobs in many shapes at once: what ``GoodputModel.best`` says of one, without its rounding.

A decision over thousands of jobs would spend nearly all its time in one call of ``best`` per job. Here the batch
is a real number instead of a whole one, so that a row of the table is plain array arithmetic; the two agree within
a few per cent, and both rank the shapes of a job alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from placement.throughput import LARGEST, Floats

if TYPE_CHECKING:
    from placement.goodput import GoodputModel

Ints = NDArray[np.int64]

_BATCHES = 12  # batch sizes tried for each shape, in geometric steps; the peak is flat, a finer grid gains under 1 %
_AT_ONCE = 400_000  # elements of one temporary array: larger ones leave the processor's cache


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """One job's model and the limits of its batch.

    Attributes:
        model: its goodput model.
        max_batch_size: largest global batch [samples]; None keeps it at the model's initial one.
        atomic_bsz_range: least and most samples per worker and micro-step; None for no bounds.
        accumulation: whether it may accumulate gradients.
    """

    model: GoodputModel
    max_batch_size: int | None
    atomic_bsz_range: tuple[int, int] | None
    accumulation: bool


def goodputs(questions: Sequence[Question], nodes: Ints, workers: Ints) -> Floats:
    """Goodput [samples/s, each counted by its worth at the initial batch] at the best batch of every shape.

    For batch M = R b with b samples per worker and step, split into k = ceil(b / most) micro-steps of m = b / k::

        goodput = max over b of  M / ((k - 1) T_grad(m) + (T_grad(m)^g + T_sync^g)^(1/g)) x efficiency(M)

    with T_grad, T_sync and g = gamma as in ``ThroughputModel`` and efficiency as in ``NoiseScale``.

    Args:
        questions: one a job.
        nodes: nodes of each shape, of shape (C,) or (J, C).
        workers: workers of each shape, likewise, 1 or more.

    Returns:
        Array (J, C), 0 where no batch fits.
    """
    shape = len(questions), np.shape(workers)[-1]
    table = np.zeros(shape)
    n, r = (np.broadcast_to(np.asarray(x, dtype=np.float64), shape) for x in (nodes, workers))
    rows = max(1, _AT_ONCE // max(shape[1] * _BATCHES, 1))
    for start in range(0, shape[0], rows):
        part = slice(start, start + rows)
        table[part] = _part(questions[part], n[part], r[part])
    return table


def _part(questions: Sequence[Question], nodes: Floats, workers: Floats) -> Floats:
    fields = np.array([_numbers(question) for question in questions], dtype=np.float64)
    (alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, gamma, sqr, var, initial, limit, low, high, accumulation) = (
        fields.T[:, :, np.newaxis]
    )
    sync = np.where(nodes > 1, alpha_n, alpha_r) + np.where(nodes > 1, beta_n, beta_r) * np.maximum(workers - 2, 0)
    sync = np.where(workers > 1, sync, 0.0)
    fixed = limit <= 0
    # Samples per worker and step, at least and at most.
    share = np.ceil(initial / workers)
    most = np.where(fixed, share, np.floor(limit / workers))
    least = np.maximum(np.minimum(share, most), low)
    most = np.where(accumulation > 0, most, np.minimum(most, high))
    possible = (least <= most) & (most >= 1)
    least, most = np.maximum(np.minimum(least, most), 1.0), np.maximum(most, 1.0)
    exponents = np.linspace(0.0, 1.0, _BATCHES)
    batch = least[:, :, np.newaxis] * (most / least)[:, :, np.newaxis] ** exponents
    micro = np.maximum(np.ceil(batch / high[:, :, np.newaxis] - 1e-9), 1.0)
    grad = alpha_c[:, :, np.newaxis] + beta_c[:, :, np.newaxis] * (batch / micro)
    sync3, gamma3 = sync[:, :, np.newaxis], gamma[:, :, np.newaxis]
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        larger = np.maximum(grad, sync3)
        ratio = np.minimum(grad, sync3) / larger
        seconds = (micro - 1) * grad + larger * (1.0 + ratio**gamma3) ** (1.0 / gamma3)
        total = np.where(fixed[:, :, np.newaxis], initial[:, :, np.newaxis], batch * workers[:, :, np.newaxis])
        scale = np.where(fixed[:, :, np.newaxis], 1.0, total / initial[:, :, np.newaxis])
        efficiency = (var + sqr)[:, :, np.newaxis] / (var[:, :, np.newaxis] + sqr[:, :, np.newaxis] * scale)
        best: Floats = np.nan_to_num(total / seconds * efficiency, posinf=LARGEST).max(axis=2)
    enough = possible & ~(fixed & (workers > initial))
    return np.where(enough, best, 0.0)


def _numbers(question: Question) -> tuple[float, ...]:
    model, (low, high) = question.model, question.atomic_bsz_range or (1, 2**53)
    t, noise = model.throughput_model, model.noise
    sqr, var = max(noise.sqr, 0.0), max(noise.var, 0.0)
    if sqr + var <= 0:
        sqr, var = 1.0, 0.0
    limit = 0 if question.max_batch_size is None else max(question.max_batch_size, model.init_batch_size)
    times = t.alpha_c, t.beta_c, t.alpha_n, t.beta_n, t.alpha_r, t.beta_r, t.gamma
    return (*times, sqr, var, model.init_batch_size, limit, low, high, question.accumulation)
