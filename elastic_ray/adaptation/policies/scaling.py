"""Policies that add workers while they are worth their cost: rules and search from Or et al. (MLSys 2020; pure)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from elastic_ray.adaptation.policies.ready import ReadyPolicy
from elastic_ray.adaptation.policy import Answer
from elastic_ray.adaptation.requests import Resize
from elastic_ray.adaptation.view import PolicyView
from placement.cluster.utility import SCALING_THRESHOLD, Utility, scaling_efficiency


class _Scaling(ReadyPolicy):
    """Base of the scaling policies: measures each size in the search, and periodically requests the next size."""

    def __init__(self, *, every: int, stride: int, passes_to_stay: int, steps_to_stay: int) -> None:
        self.every = self._whole("every", every, least=1)
        self.stride = self._whole("stride", stride, least=1)
        self.passes_to_stay = self._whole("passes_to_stay", passes_to_stay, least=1)
        self.steps_to_stay = self._whole("steps_to_stay", steps_to_stay, least=1)
        self.rates: dict[int, float] = {}
        self.counts: dict[int, int] = {}
        self.generation, self.steps = -1, 0
        self.asked: int | None = None
        self.granted: int | None = None

    def passes(self, old: int, new: int, view: PolicyView) -> bool:
        """True if growing from ``old`` to ``new`` workers is worthwhile."""
        raise NotImplementedError

    def after_step(self, view: PolicyView) -> Answer:
        """Measure the step, and decide after every ``every`` steps of a group."""
        if view.min_workers is None or view.max_workers is None or not self._measure(view):
            return None
        if self._waits(view):
            return None
        most = view.max_workers if self.granted is None else min(view.max_workers, self.granted)
        search = SizeSearch(
            fewest=min(view.min_workers, most),
            most=most,
            stride=self.stride,
            passes_to_stay=self.passes_to_stay,
            steps_to_stay=self.steps_to_stay,
        )
        size = search.next_size(self.counts, lambda old, new: self.passes(old, new, view))
        if size == (self.asked or view.workers):
            return None
        self.asked = size
        return Resize(to=size)

    def _measure(self, view: PolicyView) -> bool:
        """Count a measured step (not a group's first); return True if a decision is due."""
        if view.generation != self.generation:
            self.generation, self.steps = view.generation, 0
        if view.step_s <= 0:
            return False
        size, self.steps = view.workers, self.steps + 1
        count = self.counts[size] = self.counts.get(size, 0) + 1
        rate = self.rates.get(size, 0.0)
        self.rates[size] = rate + (view.throughput - rate) / count
        return self.steps % self.every == 0

    def _waits(self, view: PolicyView) -> bool:
        """True if a requested size may still be granted; after ten periods, the group's size becomes the limit."""
        if self.asked is None or self.asked == view.workers:
            self.granted = None if self.granted is not None and view.workers > self.granted else self.granted
            return False
        if self.steps < 10 * self.every:
            return True
        self.granted = view.workers if view.workers < self.asked else self.granted
        return False


class ThroughputScaling(_Scaling):
    """Policy that requests more workers while each one adds enough throughput relative to the existing workers.

    With R_k the mean throughput of k workers, growing from k - d to k is worthwhile if ((R_k - R_{k-d}) / d) / (R_{k-d}
    / (k - d)) is above ``threshold``. The policy stays at the largest size reached through worthwhile growths only. The
    allocator may grant fewer workers; a size that it does not grant within ten periods counts as unavailable.

    Args:
        threshold: value that the ratio must exceed; the ratio is 1 if throughput grows linearly with workers.
        every: steps of a group between two decisions.
        stride: number of workers added or removed at a time.
        passes_to_stay: number of growths, from the smallest size on, that must be worthwhile to skip smaller sizes.
        steps_to_stay: number of measured steps needed to reject a size.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.

    Examples:
        >>> from elastic_ray.adaptation import ThroughputScaling
        >>> ThroughputScaling(stride=2).stride
        2
    """

    def __init__(
        self,
        *,
        threshold: float = SCALING_THRESHOLD,
        every: int = 100,
        stride: int = 4,
        passes_to_stay: int = 3,
        steps_to_stay: int = 100,
    ) -> None:
        super().__init__(
            every=every,
            stride=stride,
            passes_to_stay=passes_to_stay,
            steps_to_stay=steps_to_stay,
        )
        self.threshold = self._number("threshold", threshold)

    def passes(self, old: int, new: int, view: PolicyView) -> bool:
        return scaling_efficiency(old, self.rates[old], new, self.rates[new]) > self.threshold


class UtilityCost(_Scaling):
    """Policy that requests more workers while finishing sooner is worth more than they cost.

    With R_k the throughput of k workers [samples/s] and n samples left, the run ends after T_k = elapsed + n / R_k and
    costs C_k = n / R_k * k * price from now on. Growing from j to k workers is worthwhile if utility(T_k) -
    utility(T_j) > C_k - C_j, as in the allocator (``placement.cluster.utility``). The search is the same as in
    :class:`ThroughputScaling`. The number of epochs must be declared.

    Args:
        utility: value of finishing at a given time after the run's first step: pairs of seconds and USD as in
            ``SchedulingConfig(utility=)``, or the authors' text, ``"USD at time 0,seconds until 0 USD"`` for a line or
            ``"USD:seconds,USD:seconds"`` for points connected by lines; the last line continues below 0.
        price_per_worker_hour: price of one worker [USD per hour], 0 or more.
        every: steps of a group between two decisions.
        stride: number of workers added or removed at a time.
        passes_to_stay: number of growths, from the smallest size on, that must be worthwhile to skip smaller sizes.
        steps_to_stay: number of measured steps needed to reject a size.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.

    Examples:
        >>> from elastic_ray.adaptation import UtilityCost
        >>> UtilityCost("50:3600,0:7200", price_per_worker_hour=2.0).stride
        4
    """

    def __init__(
        self,
        utility: str | Sequence[tuple[float, float]],
        *,
        price_per_worker_hour: float = 1.0,
        every: int = 100,
        stride: int = 4,
        passes_to_stay: int = 3,
        steps_to_stay: int = 100,
    ) -> None:
        super().__init__(
            every=every,
            stride=stride,
            passes_to_stay=passes_to_stay,
            steps_to_stay=steps_to_stay,
        )
        told = parse_utility(utility) if isinstance(utility, str) else Utility(utility)  # type: ignore[arg-type]
        self.utility = told.points  # plain, as a policy's state must be
        self.price = self._number("price_per_worker_hour", price_per_worker_hour, least=0.0)

    def passes(self, old: int, new: int, view: PolicyView) -> bool:
        left = view.samples_left
        if left is None:
            return False
        left_s = left / np.array([self.rates[old], self.rates[new]])
        fewer, more = Utility(self.utility).surplus(view.elapsed_s, left_s, self.price * np.array([old, new]))
        return bool(more > fewer)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SizeSearch:
    """Search for the best number of workers, with its settings."""

    fewest: int  # smallest size [workers]
    most: int  # largest size [workers]
    stride: int  # workers added or removed at a time
    passes_to_stay: int  # so many smallest pairs of sizes must pass before smaller sizes are left untried
    steps_to_stay: int  # steps that a size needs to be rejected

    def next_size(self, measured: Mapping[int, int], passes: Callable[[int, int], bool]) -> int:
        """Return the number of workers to try next, or the number to keep.

        If only one size is measured, return the next larger size, or the next smaller one at the limit. If growing is
        worthwhile between all neighbouring measured sizes (they pass), return a larger size. Otherwise, unless the
        first ``passes_to_stay`` pairs all pass, return a smaller size. If no such size is available, find the first
        pair that does not pass. Return its larger size until that size was measured for ``steps_to_stay`` steps; then
        its smaller size.
        """
        sizes = sorted(measured)
        smallest, largest = sizes[0], sizes[-1]
        if len(sizes) == 1:
            return self._within(largest + self.stride if largest < self.most else largest - self.stride)
        results = [passes(old, new) for old, new in itertools.pairwise(sizes)]
        if all(results) and largest < self.most:
            return self._within(largest + self.stride)
        if results[: self.passes_to_stay] != [True] * self.passes_to_stay and smallest > self.fewest:
            return self._within(smallest - self.stride)
        if all(results):
            return largest
        first = results.index(False)
        enough = measured[sizes[first + 1]] >= self.steps_to_stay
        return sizes[first if enough else first + 1]

    def _within(self, size: int) -> int:
        return max(self.fewest, min(self.most, size))


def parse_utility(text: str) -> Utility:
    """Parse a text in one of Or et al.'s forms into a utility (the value of finishing, as a function of time).

    >>> parse_utility("10,3600").points
    ((0.0, 10.0), (3600.0, 0.0))
    >>> parse_utility("50:100,0:300").points
    ((100.0, 50.0), (300.0, 0.0))

    Args:
        text: ``"value at time 0,time of value 0"`` for a line, or ``"value:time,value:time"`` for points connected by
            lines.
    """
    try:
        if ":" in text:
            values = [[float(each) for each in part.split(":")] for part in text.split(",")]
            return Utility(tuple((time_s, value) for value, time_s in values))
        height, end_s = text.split(",")
        return Utility(((0.0, float(height)), (float(end_s), 0.0)))
    except ValueError as error:
        raise ValueError(
            "a utility must be 'USD at time 0,seconds until 0 USD' or 'USD:seconds,USD:seconds' with falling values "
            f"and rising times, such as '50:3600,0:7200', but got {text!r} ({error})"
        ) from error
