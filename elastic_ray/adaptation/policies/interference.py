"""Policy that switches strategies when other users' traffic slows down the network (pure)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from elastic_ray.adaptation.policies.ready import ReadyPolicy
from elastic_ray.adaptation.policy import Answer
from elastic_ray.adaptation.requests import SetStrategy
from elastic_ray.adaptation.view import PolicyView
from elastic_ray.sync.builders import NAMED

_STEPS_OF_SWITCH = 3  # until a switch counts, and the first steps after it


class Interference(ReadyPolicy):
    """Policy that tries other strategies when throughput drops, and keeps the fastest (KungFu's check).

    Each worker's step time is the median over its last ``window`` steps. The best time is recorded for each number of
    workers, batch and strategy. A worker votes for a change when best / time < ``threshold``. A trial starts if most
    workers vote for it, unless the slowest worker's computation and wait for data explain half of the slowdown. In a
    trial, each of ``strategies`` runs for some steps. The fastest strategy, possibly the current one, is kept.

    Args:
        strategies: names to try, in this order, as accepted by ``AdaptiveDataParallel(strategy=...)``.
        threshold: fraction of the best throughput, above 0 and below 1.
        window: number of steps for the median, 1 or more.
        rest: steps after a trial before the next one may start, 0 or more. A machine that is busy for other reasons
            looks like interference, and would otherwise cause one trial after another.
        model: index of the model whose strategy changes, in the order in which the loop wraps its models.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.

    Examples:
        >>> from elastic_ray.adaptation import Interference
        >>> Interference(threshold=0.7).threshold
        0.7
    """

    def __init__(
        self,
        strategies: Sequence[str] = ("all_reduce", "bf16"),
        *,
        threshold: float = 0.8,
        window: int = 5,
        rest: int = 50,
        model: int = 0,
    ) -> None:
        if isinstance(strategies, str) or not isinstance(strategies, Sequence) or not strategies:
            raise TypeError(f"Interference(strategies) must be a list of names, but got {strategies!r}")
        self.strategies = [self._one_of("strategies", name, tuple(NAMED)) for name in strategies]
        self.threshold = self._number("threshold", threshold, above=0.0, below=1.0)
        self.window = self._whole("window", window, least=1)
        self.rest = self._whole("rest", rest, least=0)
        self.model = self._whole("model", model, least=0)
        self.using: str | None = None
        self.case = ""
        self.steps: list[list[list[float]]] = []
        self.skip = self.resting = 0
        self.best: dict[str, list[float]] = {}
        self.tried: dict[str, list[float]] = {}

    def after_step(self, view: PolicyView) -> Answer:
        """Record this step's times; once ``window`` steps are recorded, return a change of strategy if needed."""
        steps_s = [each.step_s for each in view.worker_measures]
        if len(view.strategies) <= self.model or not steps_s or min(steps_s) <= 0:
            return None
        case = f"generation {view.generation}, {view.workers} workers, batch {view.batch_size}"
        if case != self.case:
            self.case, self.steps, self.tried = case, [], {}
        if self.skip:
            self.skip -= 1
            return None
        row = [[each.step_s, each.compute_s + each.data_s] for each in view.worker_measures]
        self.steps = [*self.steps, row][-self.window :]
        if len(self.steps) < self.window:
            return None
        times = [statistics.median(step[rank][0] for step in self.steps) for rank in range(view.workers)]
        busy_s = max(statistics.median(step[rank][1] for step in self.steps) for rank in range(view.workers))
        present = self.using or view.strategies[self.model]
        return self._judge(present, times, busy_s)

    def _judge(self, present: str, times: Sequence[float], busy_s: float) -> Answer:
        """Decide whether most workers are slow now or, during a trial, evaluate the tried strategy."""
        key, step_s = f"{present}, {self.case.partition(', ')[2]}", statistics.median(times)
        if self.tried:
            self.tried[present] = [step_s, busy_s]
            return self._next(present, key)
        best_s, best_busy_s = self.best.setdefault(key, [step_s, busy_s])
        if step_s < best_s:
            self.best[key] = [step_s, busy_s]
        self.resting = max(0, self.resting - 1)
        votes = sum(best_s < self.threshold * time for time in times)
        if self.resting or 2 * votes <= len(times) or busy_s - best_busy_s > (step_s - best_s) / 2:
            return None
        self.tried = {present: [step_s, busy_s]}
        return self._next(present, key)

    def _next(self, present: str, key: str) -> Answer:
        """Try the next strategy; after the last one, continue with the fastest."""
        untried = [name for name in self.strategies if name not in self.tried]
        if untried:
            return self._use(untried[0])
        known = {name: found for name, found in self.tried.items() if name in NAMED or name == present}
        fastest = min(known, key=lambda name: known[name][0])
        self.best.update({key.replace(present, name, 1): found for name, found in self.tried.items()})
        self.tried, self.resting = {}, self.rest
        return None if fastest == present else self._use(fastest)

    def _use(self, name: str) -> Answer:
        self.using, self.steps, self.skip = name, [], _STEPS_OF_SWITCH
        return SetStrategy(name, model=self.model)
