"""Goodput of many jobs in many shapes at once: ``GoodputModel.best`` without rounding to whole samples.

A decision over thousands of jobs would spend nearly all its time in one call of ``best`` per job. Here the
batch is a real number, so a row of the table is plain array arithmetic. The results agree within a few per
cent, and both methods rank the shapes of a job alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from placement.goodput.step_time import LARGEST, Floats

if TYPE_CHECKING:
    from placement.goodput.model import GoodputModel

Ints = NDArray[np.int64]

_STEPS = 12  # batch sizes tried for each shape, in geometric steps; the peak is flat, a finer grid gains under 1 %
_BATCHES = _STEPS + 1  # and the largest micro-batch: where a larger one would need accumulation, the peak is a corner
_AT_ONCE = 1_000  # shapes computed at once: arrays of more leave the processor's cache


def of_numbers(numbers: Floats, nodes: Ints, workers: Ints) -> Floats:
    """Return the goodput [samples/s, weighted by progress relative to M0] at the best batch of every shape, (J, C).

    For batch M = R b with b samples per worker and step, split into k = ceil(b / most) micro-steps of m = b / k::

        goodput = max over b of  M / (alpha_s + (k - 1) T_grad(m) + (T_grad(m)^g + T_sync^g)^(1/g)) x efficiency(M)

    with T_grad, T_sync and g = gamma as in ``ThroughputModel`` and efficiency as in ``NoiseScale``; 0 if no batch fits.

    Args:
        numbers: Rows of ``numbers_of``, one per job.
        nodes: Nodes of each shape, (J, C); 0 if the shape is impossible.
        workers: Workers of each shape, 1 or more, (J, C).
    """
    jobs, shapes = workers.shape
    columns = np.ascontiguousarray(numbers.T)
    asked = np.flatnonzero(nodes)
    n, r = (x.ravel()[asked].astype(np.float64) for x in (nodes, workers))
    found = np.zeros(jobs * shapes)
    work = np.empty((5, _BATCHES, min(_AT_ONCE, len(asked))))
    for start in range(0, len(asked), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        found[asked[part]] = _best(columns[:, asked[part] // shapes], n[part], r[part], work)
    return found.reshape(jobs, shapes)


def _best(fields: Floats, nodes: Floats, workers: Floats, work: Floats) -> Floats:
    """Return the goodput of shapes, each with a column of numbers in ``fields``; rows are batch sizes.

    All large arrays are computed in place in ``work``, since allocating memory costs more than the arithmetic.
    """
    alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, gamma, alpha_s, sqr, var, initial, *bounds = fields
    limit, low, high, accumulation = bounds
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
    batch, micro, grad, larger, last = work[:, :, : len(workers)]
    np.power(most / least, np.linspace(0.0, 1.0, _STEPS)[:, np.newaxis], out=batch[:_STEPS])
    batch[:_STEPS] *= least
    np.minimum(np.maximum(high, least), most, out=batch[_STEPS])
    np.divide(batch, high, out=micro)
    micro -= 1e-9
    np.maximum(np.ceil(micro, out=micro), 1.0, out=micro)
    np.divide(batch, micro, out=grad)
    grad *= beta_c
    grad += alpha_c
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        np.maximum(grad, sync, out=larger)
        np.minimum(grad, sync, out=last)  # becomes the micro-step that synchronises
        last /= larger
        last **= gamma
        last += 1.0
        last **= 1.0 / gamma
        last *= larger
        micro -= 1.0
        micro *= grad
        micro += alpha_s
        seconds = np.add(micro, last, out=micro)
        total = np.multiply(batch, workers, out=batch)
        np.copyto(total, initial, where=fixed)
        loss = np.divide(total, initial, out=grad)
        loss *= sqr
        loss += var
        total /= seconds
        total *= np.divide(var + sqr, loss, out=loss)
        best = np.nan_to_num(np.fmax.reduce(total), posinf=LARGEST)
    return np.where(possible & ~(fixed & (workers > initial)), best, 0.0)


def numbers_of(
    model: GoodputModel, max_batch_size: int | None, bounds: tuple[int, int] | None, accumulation: bool
) -> tuple[float, ...]:
    """Return a job's model and the limits of its batch as plain numbers, in the order that ``_best`` reads them."""
    low, high = bounds or (1, 2**53)
    t, noise = model.throughput_model, model.noise
    sqr, var = max(noise.sqr, 0.0), max(noise.var, 0.0)
    if sqr + var <= 0:
        sqr, var = 1.0, 0.0
    limit = 0 if max_batch_size is None else max(max_batch_size, model.init_batch_size)
    times = t.alpha_c, t.beta_c, t.alpha_n, t.beta_n, t.alpha_r, t.beta_r, t.gamma, t.alpha_s
    return (*times, sqr, var, model.init_batch_size, limit, low, high, accumulation)
