"""Forecasts of a job's future batches and of the growth of its gradient noise."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import statistics

from placement.checks import check_number

HOLDS_S = 1200.0
"""Time that a decision about a job is for whose batch will change [s]."""

MOST_GROWTH = 2.0
"""Factor by which a noise scale is expected to grow at most while a decision holds."""

_WINDOW = 0.25  # latest part of the training whose trend counts
_PARTS, _FEWEST = 4, 3  # of the window, each with so many values at least
_APART = 1.01  # least ratio of the training times of two values


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchForecast:
    """Forecast of a job's global batch size as a function of the samples trained on from now on."""

    steps: tuple[tuple[float, int], ...]  # (samples from now on, batch from there on), by samples

    def __post_init__(self) -> None:
        samples = [begin for begin, _ in self.steps]
        if not samples or not samples[0] > 0 or any(not b > a for a, b in itertools.pairwise(samples)):
            raise ValueError(
                f"steps must be pairs (samples, batch), the samples rising from above 0, but got {self.steps}"
            )
        for _, batch in self.steps:
            check_number("a batch of steps", batch, least=1, unit="sample")

    def after(self, samples: float) -> tuple[int | None, BatchForecast | None]:
        """Return the batch after ``samples`` more samples (None: unchanged), and the rest of the forecast (or None)."""
        batch = next((size for begin, size in reversed(self.steps) if begin <= samples), None)
        left = tuple((begin - samples, size) for begin, size in self.steps if begin > samples)
        return batch, BatchForecast(steps=left) if left else None


class NoiseTrend:
    """History of a job's gradient noise scale over its training time, used to extrapolate its growth."""

    def __init__(self) -> None:
        self._seen = collections.deque[tuple[float, float]](maxlen=64)  # (training time [s], noise scale)

    def see(self, trained_s: float, noise: float) -> None:
        """Record the noise scale after ``trained_s`` [s] of training, if positive and not too soon after the last."""
        if 0 < noise < math.inf and trained_s > 0 and (not self._seen or trained_s >= _APART * self._seen[-1][0]):
            self._seen.append((trained_s, noise))

    def growth(self, ahead_s: float) -> float:
        """Return the expected growth factor of the noise scale over ``ahead_s`` seconds, from 1 to `MOST_GROWTH`.

        The last quarter of the training is divided into four parts. If the median of log(noise) rises from each part to
        the next, the slowest of the three rises is extrapolated, for at most the length of that quarter. Otherwise the
        factor is 1. It is rounded down to a quarter power of 2, so that small changes do not cause new decisions.
        """
        last_s = self._seen[-1][0] if self._seen else 0.0
        length_s = _WINDOW * last_s
        parts: list[list[tuple[float, float]]] = [[] for _ in range(_PARTS)]
        for at_s, noise in self._seen:
            if at_s > last_s - length_s:
                part = math.ceil(_PARTS * (at_s - last_s + length_s) / length_s) - 1
                parts[min(max(part, 0), _PARTS - 1)].append((at_s, math.log(noise)))
        if any(len(part) < _FEWEST for part in parts):
            return 1.0
        points = [tuple(statistics.median(column) for column in zip(*part, strict=True)) for part in parts]
        slope = min((b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(points))
        powers = min(max(slope * min(ahead_s, length_s) / math.log(2.0), 0.0), math.log2(MOST_GROWTH))
        return math.pow(2.0, math.floor(4.0 * powers + 1e-9) / 4.0)
