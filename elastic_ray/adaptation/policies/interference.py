"""Policy that switches strategies when other users' traffic slows down the network (pure)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from elastic_ray.adaptation.policies.ready import ReadyPolicy
from elastic_ray.adaptation.policy import Answer
from elastic_ray.adaptation.requests import SetStrategy
from elastic_ray.adaptation.view import PolicyView
from elastic_ray.sync.builders import NAMED

_STEPS_OF_SWITCH = 3  # until a switch counts, and the first steps after it
_STEPS_OF_LOSER = 2  # of a strategy on trial, all slower than the fastest one's, after which it is dropped
_EXPLAINED = 0.5  # part of a topology's expected gain that must be measured, for those that send more to be left out


class Interference(ReadyPolicy):
    """Policy that tries other strategies when throughput drops, and keeps the fastest (KungFu's check).

    Each worker's step time is the median over its last ``window`` steps. The best time is recorded for each number of
    workers, batch and strategy. A worker votes for a change when best / time < ``threshold``. A trial starts if most
    workers vote for it, unless the slowest worker's computation and wait for data explain half of the slowdown. In a
    trial, each of ``strategies`` runs for several steps, or for only two if it is slower than an earlier one.
    Topologies are tried first, starting with those that send the least between nodes. If a topology's gain is at least
    half of its reduction in traffic, topologies that send more are skipped. The fastest strategy, possibly the current
    one, is kept.

    Args:
        strategies: names to try, in this order after topologies, as accepted by ``AdaptiveDataParallel(strategy=...)``.
        threshold: fraction of the best throughput, above 0 and below 1.
        window: number of steps for the median, 1 or more.
        rest: steps after a trial before the next one may start, 0 or more. A machine that is busy for other reasons
            looks like interference, and would otherwise cause one trial after another.
        model: index of the model whose strategy changes, in the order the loop wraps its models.

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
        """Record this step's times; once ``window`` steps are recorded, return a strategy change if needed."""
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
        if len(self.steps) < self.window and not self._loses():
            return None
        times = [statistics.median(step[rank][0] for step in self.steps) for rank in range(view.workers)]
        busy_s = max(statistics.median(step[rank][1] for step in self.steps) for rank in range(view.workers))
        present = self.using or view.strategies[self.model]
        sent = {
            name: sent_between_nodes(name, view.workers, view.nodes)
            for name in (*self.strategies, *self.tried, present)
        }
        return self._judge(present, times, busy_s, sent)

    def _loses(self) -> bool:
        """True if the strategy on trial was slower than the fastest one in both of two steps."""
        if not self.tried or len(self.steps) < _STEPS_OF_LOSER:
            return False
        fastest_s = min(step_s for step_s, _ in self.tried.values())
        return all(statistics.median(step_s for step_s, _ in step) > fastest_s for step in self.steps)

    def _judge(self, present: str, times: Sequence[float], busy_s: float, sent: Mapping[str, float | None]) -> Answer:
        """Decide whether most workers are slow now; during a trial, evaluate the strategy being tried."""
        key, step_s = f"{present}, {self.case.partition(', ')[2]}", statistics.median(times)
        if self.tried:
            self.tried[present] = [step_s, busy_s]
            return self._next(present, key, sent)
        best_s, best_busy_s = self.best.setdefault(key, [step_s, busy_s])
        if step_s < best_s:
            self.best[key] = [step_s, busy_s]
        self.resting = max(0, self.resting - 1)
        votes = sum(best_s < self.threshold * time for time in times)
        if self.resting or 2 * votes <= len(times) or busy_s - best_busy_s > (step_s - best_s) / 2:
            return None
        self.tried = {present: [step_s, busy_s]}
        return self._next(present, key, sent)

    def _next(self, present: str, key: str, sent: Mapping[str, float | None]) -> Answer:
        """Try the next strategy; after the last one, continue with the fastest."""
        most = self._explained(sent)
        cost = {name: math.inf if (times := sent[name]) is None else times for name in self.strategies}
        untried = [name for name in self.strategies if name not in self.tried and not most <= cost[name] < math.inf]
        if untried:
            return self._use(min(untried, key=lambda name: cost[name]))
        known = {name: found for name, found in self.tried.items() if name in NAMED or name == present}
        fastest = min(known, key=lambda name: known[name][0])
        self.best.update({key.replace(present, name, 1): found for name, found in self.tried.items()})
        self.tried, self.resting = {}, self.rest
        return None if fastest == present else self._use(fastest)

    def _explained(self, sent: Mapping[str, float | None]) -> float:
        """Return the fastest topology's traffic if that explains its gain over the first one; otherwise infinity."""
        first, fastest = next(iter(self.tried)), min(self.tried, key=lambda name: self.tried[name][0])
        before, now = sent.get(first), sent.get(fastest)
        if before is None or now is None or now >= before:
            return math.inf
        step_s, busy_s = self.tried[first]
        expected_s = (step_s - busy_s) * (1 - now / before)
        return now if step_s - self.tried[fastest][0] >= _EXPLAINED * expected_s else math.inf

    def _use(self, name: str) -> Answer:
        self.using, self.steps, self.skip = name, [], _STEPS_OF_SWITCH
        return SetStrategy(name, model=self.model)


def sent_between_nodes(name: str, workers: int, nodes: int) -> float | None:
    """Return how often a link between nodes is busy for as long as it takes to send all gradients once.

    None for strategies that are not topologies, and on a single node.
    """
    if nodes < 2:
        return None
    ring = 2 * (workers - 1) / workers
    tree, star = 2.0 * math.ceil(math.log2(nodes)), 2.0 * (workers - workers // nodes)
    known = {"two_level": 2 * (nodes - 1) / nodes, "all_reduce": ring, "ring": ring, "tree": tree, "star": star}
    return known.get(name)
