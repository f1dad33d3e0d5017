"""How fast every job would be in every shape, with measured step times trusted before the fitted model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from placement.goodput_table import Ints, Question, goodputs
from placement.jobs import JobView
from placement.throughput import Floats

if TYPE_CHECKING:
    from placement.fitting import Observation
    from placement.goodput import GoodputModel

_ROWS = 20_000  # rows of the table that are remembered: a decision asks again for all jobs, though few have changed
_LIMIT = 4.0  # a measured time counts as at most so many times faster or slower than the model says


class _Memory:
    """Answers by question; forgets everything when full, which costs one slow decision and needs no clock."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[object, tuple[object, object]] = {}

    def get(self, key: object) -> object | None:
        found = self._known.get(key)
        return None if found is None else found[1]

    def put(self, key: object, kept: object, answer: object) -> None:
        """``kept`` is held as long as the answer, so that a key made of its id stays its own."""
        if len(self._known) >= self._most:
            self._known.clear()
        self._known[key] = kept, answer


_rows = _Memory(_ROWS)
_ratios = _Memory(_ROWS)


def model_of(view: JobView, gpu: str) -> GoodputModel | None:
    """The job's model on this GPU type; that of the type it knows where it has not run on this one."""
    return view.models.get(gpu, view.goodput)


def question(view: JobView, gpu: str) -> Question | None:
    """What to ask about the job's goodput on this GPU type; None without a model."""
    model = model_of(view, gpu)
    if model is None:
        return None
    bounds = view.atomic_bsz_ranges.get(gpu, view.atomic_bsz_range)
    return Question(model, view.max_batch_size, bounds, view.accumulation)


def table(views: Sequence[JobView], gpu: str, nodes: Ints, workers: Ints) -> Floats:
    """Goodput [samples/s] of every job (rows) in every shape (columns); NaN in the rows of jobs without a model.

    Args:
        views: the jobs.
        gpu: GPU type.
        nodes: nodes of each shape, (J, C); 0 where the shape is impossible.
        workers: workers of each shape, (J, C).
    """
    result = np.full(workers.shape, np.nan)
    asked: dict[tuple[Question, bytes], list[int]] = {}
    shapes = np.ascontiguousarray(np.concatenate([nodes, workers], axis=1))
    for j, view in enumerate(views):
        ask = question(view, gpu)
        if ask is not None:
            key = ask, shapes[j].tobytes()
            known = _rows.get(key)
            if known is None:
                asked.setdefault(key, []).append(j)
            else:
                result[j] = known
    if asked:
        first = [rows[0] for rows in asked.values()]
        fresh = goodputs([ask for ask, _ in asked], np.maximum(nodes[first], 1), workers[first])
        for (key, rows), row in zip(asked.items(), fresh, strict=True):
            _rows.put(key, None, row)
            result[rows] = row
    for j, view in enumerate(views):
        measured = view.observations.get(gpu)
        if measured and view.goodput is not None:
            _correct(result[j], nodes[j], workers[j], ratios(measured, model_of(view, gpu)))
    return np.where(nodes > 0, result, np.where(np.isnan(result), np.nan, 0.0))


def _correct(row: Floats, nodes: Ints, workers: Ints, known: Mapping[tuple[int, int], float]) -> None:
    for (n, k), ratio in known.items():
        here = (workers == k) & (nodes == n)
        if here.any():
            row[here] /= ratio


def ratios(observations: tuple[Observation, ...], model: GoodputModel | None) -> Mapping[tuple[int, int], float]:
    """Measured over modelled step time by (nodes, workers): a curve that falls at the node boundary stays one.

    The mean over the batch sizes measured there, in logarithms, weighted by their counts.
    """
    if model is None:
        return {}
    key = id(observations), model.throughput_model
    found = _ratios.get(key)
    if found is None:
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
        found = {shape: float(np.exp(total / weight)) for shape, (total, weight) in sums.items()}
        _ratios.put(key, observations, found)
    assert isinstance(found, dict)
    return found
