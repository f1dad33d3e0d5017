"""Speed of each job in each shape; measured step times take precedence over the fitted model.

A decision about thousands of jobs would spend nearly all its time in one call of ``GoodputModel.best`` per job. This
module treats the batch as a real number instead of whole samples, so a row of the table is plain array arithmetic. The
results agree within a few per cent, and both methods rank a job's shapes alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from placement.cluster.jobs import JobView
from placement.goodput.fitting import Observation
from placement.goodput.forecast import HOLDS_S
from placement.goodput.model import GoodputModel
from placement.goodput.step_time import LARGEST, Floats

_HERE = 1.0  # a shape that was measured itself comes before one of as many workers on other nodes
_BEYOND = 100.0  # further than any shape on the same side of the node's edge
_LIMIT = 4.0  # a measured time counts as at most so many times faster or slower than the model says

Ratios = Mapping[tuple[int, int], float]
"""Measured over modelled step time by (nodes, workers)."""


@dataclasses.dataclass(slots=True)
class GoodputCache:
    """Cache of goodput computations between decisions, since few jobs change from one decision to the next.

    The cache never changes an answer, only how fast it is computed. A full cache is emptied entirely, which
    costs one slow decision and needs no clock.
    """

    most: int = 20_000  # rows, and sets of measured points, that it holds
    # goodput by model, limits of the batch and shapes, as bytes
    rows: dict[bytes, Floats] = dataclasses.field(default_factory=dict)
    # by id of the observations, which are kept so that the id stays their own, and model
    ratios: dict[object, tuple[object, Ratios]] = dataclasses.field(default_factory=dict)
    # dual price of a slot by GPU type, as the last decision found them; for those who look on
    prices: dict[str, float] = dataclasses.field(default_factory=dict)

    def record_prices(self, prices: Mapping[str, float]) -> None:
        """Record the latest decision's dual prices (price per slot, keyed by GPU type)."""
        self.prices.clear()
        self.prices.update(prices)

    def make_room(self, entries: int) -> None:
        """Clear each table in the cache that would exceed the limit ``most`` with this many more entries."""
        if len(self.rows) + entries > self.most:
            self.rows.clear()
        if len(self.ratios) + entries > self.most:
            self.ratios.clear()


def model_of(view: JobView, gpu: str) -> GoodputModel | None:
    """Return the job's model for this GPU type, or its current model if it has not run on this type."""
    return view.models.get(gpu, view.goodput)


def table(views: Sequence[JobView], gpu: str, nodes: Ints, workers: Ints, cache: GoodputCache) -> Floats:
    """Return the goodput [useful samples/s] of each job (row) in each shape (column); NaN without a model.

    A shape is a number of nodes and of workers. If a job's batch will change, or its noise grows, its goodput is the
    mean over the next twenty minutes in that shape.
    """
    cache.make_room(len(views))
    result = np.full(workers.shape, np.nan)
    known, numbers = [], []
    held, held_numbers, worths = [], [], []
    for j, view in enumerate(views):
        model = model_of(view, gpu)
        if model is not None:
            bounds = view.atomic_bsz_ranges.get(gpu, view.atomic_bsz_range)
            known.append(j)
            numbers.append(numbers_of(model, view.max_batch_size, bounds, view.accumulation))
            if view.held_batch is not None:
                at_held, worth = model.held_at(view.held_batch)
                held.append(j)
                held_numbers.append(numbers_of(at_held, None, bounds, view.accumulation))
                worths.append(worth)
    if known:
        result[known] = _rows(np.array(numbers, dtype=np.float64), nodes[known], workers[known], cache)
    if held:
        rows = _rows(np.array(held_numbers, dtype=np.float64), nodes[held], workers[held], cache)
        result[held] = np.where(rows > 0, rows * np.array(worths)[:, np.newaxis], result[held])
    factors: dict[tuple[int, bytes], Floats] = {}
    for j, view in enumerate(views):
        measured, model = view.observations.get(gpu), model_of(view, gpu)
        if measured and view.goodput is not None and model is not None:
            found = ratios(measured, model, cache)
            key = id(found), nodes[j].tobytes() + workers[j].tobytes()
            if key not in factors:
                factors[key] = _factors(found, nodes[j], workers[j])
            result[j] /= factors[key]
    for j, view in enumerate(views):
        if view.forecast is not None and (model := model_of(view, gpu)) is not None:
            result[j] = _mean_rate(view, model, gpu, result[j], (nodes[j : j + 1], workers[j : j + 1]), cache)
        elif view.noise_growth > 1.0 and view.held_batch is None and not np.isnan(result[j]).all():
            later = grown(view, view.noise_growth)
            result[j] = (result[j] + table([later], gpu, nodes[j : j + 1], workers[j : j + 1], cache)[0]) / 2
    return result


def grown(view: JobView, factor: float) -> JobView:
    """Return the job's view with its gradient noise scale multiplied by ``factor``."""

    def later(model: GoodputModel) -> GoodputModel:
        noise = dataclasses.replace(model.noise, var=model.noise.var * factor)
        return GoodputModel(model.throughput_model, noise, model.init_batch_size)

    own = None if view.goodput is None else later(view.goodput)
    models = {gpu: later(model) for gpu, model in view.models.items()}
    return dataclasses.replace(view, goodput=own, models=models, noise_growth=1.0)


def _mean_rate(
    view: JobView, model: GoodputModel, gpu: str, rate: Floats, shapes: tuple[Ints, Ints], cache: GoodputCache
) -> Floats:
    """Return the mean goodput of each shape over the next ``HOLDS_S``, with the batches of the job's forecast."""
    assert view.forecast is not None and view.held_batch is not None, "a forecast continues a held batch"
    gained, left_s, done, batch = np.zeros_like(rate), np.full_like(rate, HOLDS_S), 0.0, view.held_batch
    for begin, coming in view.forecast.steps:
        _, worth = model.held_at(batch)
        with np.errstate(divide="ignore"):
            seconds = np.minimum((begin - done) * worth / rate, left_s)
        gained, left_s, done, batch = gained + rate * seconds, left_s - seconds, begin, coming
        if not (left_s > 0).any():
            break
        rate = table([dataclasses.replace(view, held_batch=batch, forecast=None)], gpu, *shapes, cache)[0]
    mean: Floats = (gained + rate * left_s) / HOLDS_S
    return mean


def foreseen(view: JobView, gpu: str, seconds: float, cache: GoodputCache) -> JobView:
    """Return the job's view with the batch or noise expected after ``seconds`` more on its workers of this GPU type."""
    if view.noise_growth > 1.0 and view.held_batch is None:
        return grown(view, view.noise_growth ** min(1.0, seconds / HOLDS_S))
    while view.forecast is not None and view.workers and (model := model_of(view, gpu)) is not None:
        assert view.held_batch is not None, "a forecast continues a held batch"
        now = dataclasses.replace(view, forecast=None)
        shape = np.array([[len(view.allocation)]]), np.array([[view.workers]])
        rate, (_, worth) = float(table([now], gpu, *shape, cache)[0, 0]), model.held_at(view.held_batch)
        begin, batch = view.forecast.steps[0]
        if rate * seconds < begin * worth:
            break
        seconds -= begin * worth / rate
        view = dataclasses.replace(view, held_batch=batch, forecast=view.forecast.after(begin)[1])
    return view


def _rows(numbers: Floats, nodes: Ints, workers: Ints, cache: GoodputCache) -> Floats:
    """Return the goodput of jobs in shapes, computing only the values that are not cached."""
    texts = np.ascontiguousarray(np.concatenate([numbers.view(np.int64), nodes, workers], axis=1))
    keys = texts.view(np.dtype((np.void, texts.itemsize * texts.shape[1])))[:, 0].tolist()
    fresh = {key: row for row, key in enumerate(keys) if key not in cache.rows}
    if fresh:
        first = np.fromiter(fresh.values(), dtype=np.int64)
        cache.rows.update(zip(fresh, of_numbers(numbers[first], nodes[first], workers[first]), strict=True))
    return np.concatenate([cache.rows[key] for key in keys]).reshape(workers.shape)


def _factors(known: Ratios, nodes: Ints, workers: Ints) -> Floats:
    """Return the divisor of each shape's modelled goodput, (C,): the ratio of the nearest measured shape.

    The nearest shape has the smallest |log2(workers / measured workers)|, the smaller shape on ties, preferring shapes
    on the same side of the boundary between one node and several. A model that is wrong in one shape is about as wrong
    in neighbouring ones: if only the measured shape were corrected, a job that is faster than modelled would seem to
    lose by growing. A ratio from the other side of the boundary is used only if measured steps were faster than
    modelled, so that a drop in speed at the boundary is kept.
    """
    measured = sorted(known.items(), key=lambda item: (item[0][1], item[0][0]))
    m, k = np.array([shape for shape, _ in measured], dtype=np.float64).T
    of = np.array([ratio for _, ratio in measured])
    apart = np.abs(np.log2(np.maximum(workers, 1)[:, np.newaxis] / k))
    apart -= _HERE * ((nodes[:, np.newaxis] == m) & (workers[:, np.newaxis] == k))
    beyond = (nodes > 1)[:, np.newaxis] != (m > 1)
    nearest = np.argmin(apart + np.where(beyond, _BEYOND, 0.0), axis=1)
    factors: Floats = of[nearest]
    return np.where(beyond[np.arange(len(nearest)), nearest], np.minimum(factors, 1.0), factors)


def ratios(observations: tuple[Observation, ...], model: GoodputModel, cache: GoodputCache) -> Ratios:
    """Return measured / modelled step time by shape (nodes, workers), a mean over its batches; cached."""
    key = id(observations), model.throughput_model
    if key not in cache.ratios:
        cache.ratios[key] = observations, _ratios(observations, model)
    return cache.ratios[key][1]


def spread(view: JobView) -> float:
    """Return the standard deviation of the logarithm of step times: the mean over measurements, weighted by count."""
    seen = [each for measured in view.observations.values() for each in measured]
    return sum(each.count * each.spread for each in seen) / max(sum(each.count for each in seen), 1e-9)


def _ratios(observations: tuple[Observation, ...], model: GoodputModel) -> Ratios:
    """Return geometric means of measured over modelled step time by shape, each ratio limited by ``_LIMIT``."""
    columns = np.array(
        [[o.nodes, o.replicas, o.atomic_bsz, o.accum_steps, o.step_time, o.count] for o in observations],
        dtype=np.float64,
    ).T
    nodes, workers, atomic, accum, seconds, count = columns
    expected = model.throughput_model.step_time_unchecked(nodes, workers, atomic, accum)
    error = np.clip(np.log(seconds / np.maximum(expected, 1e-12)), -np.log(_LIMIT), np.log(_LIMIT))
    sums: dict[tuple[int, int], tuple[float, float]] = {}
    for n, k, e, c in zip(nodes.tolist(), workers.tolist(), error.tolist(), count.tolist(), strict=True):
        total, weight = sums.get((int(n), int(k)), (0.0, 0.0))
        sums[int(n), int(k)] = total + c * e, weight + c
    return {shape: float(np.exp(total / weight)) for shape, (total, weight) in sums.items()}


Ints = NDArray[np.int64]

_STEPS = 12  # batch sizes tried for each shape, in geometric steps; the peak is flat, a finer grid gains under 1 %
_BATCHES = _STEPS + 1  # and the largest micro-batch: where a larger one would need accumulation, the peak is a corner
_AT_ONCE = 1_000  # shapes computed at once: arrays of more leave the processor's cache


def of_numbers(numbers: Floats, nodes: Ints, workers: Ints) -> Floats:
    """Return the goodput [samples/s, weighted by progress relative to M0] at the best batch for each shape, (J, C).

    J is the number of jobs, and C the number of shapes (pairs of nodes and workers). A batch M = R b on R workers, with
    b samples per worker and step, is split into k = ceil(b / most) micro-steps of m = b / k samples. ``most`` is the
    job's largest micro-batch and M0 its initial batch::

        goodput = max over b of  M / (alpha_s + (k - 1) T_grad(m) + (T_grad(m)^g + T_sync^g)^(1/g)) x efficiency(M)

    with alpha_s, T_grad, T_sync and g = gamma as in ``ThroughputModel`` and efficiency as in ``NoiseScale``; 0 if no
    batch fits.
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
    """Return the goodput of shapes (columns of ``fields``) over batches (rows); large arrays are made in ``work``."""
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
    """Return a job's model and its batch limits [samples] as the row of numbers that ``of_numbers`` expects.

    ``max_batch_size`` is None if the job keeps its initial batch. ``bounds`` are a worker's smallest and largest
    micro-batch; None means no bounds.
    """
    low, high = bounds or (1, 2**53)
    t, noise = model.throughput_model, model.noise
    sqr, var = max(noise.sqr, 0.0), max(noise.var, 0.0)
    if sqr + var <= 0:
        sqr, var = 1.0, 0.0
    limit = 0 if max_batch_size is None else max(max_batch_size, model.init_batch_size)
    times = t.alpha_c, t.beta_c, t.alpha_n, t.beta_n, t.alpha_r, t.beta_r, t.gamma, t.alpha_s
    return (*times, sqr, var, model.init_batch_size, limit, low, high, accumulation)
