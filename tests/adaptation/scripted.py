"""A run by script: what a policy asks for is granted, and the next views show it. No process, no clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from elastic_ray.adaptation import (
    Policy,
    PolicyView,
    Request,
    Resize,
    ScaleRate,
    SetBatch,
    SetStrategy,
    Stop,
)
from elastic_ray.adaptation.policy import Answer
from elastic_ray.monitoring.measures import WorkerMeasures


@dataclasses.dataclass(kw_only=True)
class ScriptedRun:
    """A job whose step time is a function of what policies may change.

    Attributes:
        policy: who is asked.
        step_s: time of the step that this view begins with [s].
        view: what the policy sees next.
        grants: the workers that the allocator gives for a wish.
        pause_s: what a change of their number takes [s].
        asked: each request with the step after which it came.
        ends_s: time after each step [s].
    """

    policy: Policy
    step_s: Callable[[PolicyView], float]
    view: PolicyView
    grants: Callable[[int], int] = lambda wish: wish
    pause_s: float = 0.0
    asked: list[tuple[int, Request]] = dataclasses.field(default_factory=list)
    ends_s: list[float] = dataclasses.field(default_factory=list)
    stopped: bool = False
    _since_change: int = 0
    _wished: int | None = None
    _pending: list[Request] = dataclasses.field(default_factory=list)

    def step(self, **changes: Any) -> list[Request]:
        """Train one step, apply what was asked for before it, and ask; ``changes`` are put into the view."""
        view, took_s = self.view, self.step_s(self.view)
        self._since_change += 1
        shown_s = took_s if self._since_change > 2 else 0.0  # as the meter: a group's first step has no time
        measures = (WorkerMeasures(step_s=shown_s, passed_s=took_s),) * view.workers
        self.view = dataclasses.replace(
            view,
            step=view.step + 1,
            samples=view.samples + view.batch_size,
            step_s=shown_s,
            worker_measures=measures,
            elapsed_s=view.elapsed_s + took_s,
            worker_s=view.worker_s + took_s * view.workers,
            **changes,
        )
        self.ends_s.append(self.view.elapsed_s)
        self._apply()
        found = listed(self.policy.after_step(self.view))
        self._regroup()
        self._pending += found
        self.asked += [(self.view.step, request) for request in found]
        return found

    def steps(self, count: int, **changes: Any) -> list[Request]:
        """So many steps; what was asked for in them."""
        return [request for _ in range(count) for request in self.step(**changes)]

    def _apply(self) -> None:
        """What rode on this step's reduction counts from the next one on."""
        pending, self._pending = self._pending, []
        for request in pending:
            match request:
                case Resize():
                    self._wished = self.grants(request.bounds[1] or self.view.workers)
                case SetBatch(batch_size=int(size)):
                    self.view = dataclasses.replace(self.view, batch_size=size)
                case SetStrategy(strategy=str(name)):
                    self.view = dataclasses.replace(self.view, strategies=(name,))
                case ScaleRate():
                    self.view = dataclasses.replace(self.view, rate_factor=self.view.rate_factor * request.factor)
                case Stop():
                    self.stopped = True

    def _regroup(self) -> None:
        """Between two steps the group becomes as large as was granted."""
        workers, self._wished = self._wished, None
        if workers is None or workers == self.view.workers:
            return
        self._since_change = 0
        self.view = dataclasses.replace(
            self.view,
            workers=workers,
            generation=self.view.generation + 1,
            elapsed_s=self.view.elapsed_s + self.pause_s,
            worker_s=self.view.worker_s + self.pause_s * workers,
        )


def listed(answer: Answer) -> list[Request]:
    """What a hook returns, as a list."""
    if answer is None:
        return []
    return list(answer) if isinstance(answer, (list, tuple)) else [answer]
