"""Times of ununeven steps on one rank, and pauses; no clock but the monotonic one is read here."""

from __future__ import annotations

import statistics
import time
from collections import deque

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.events import Pause

_KEPT = 64
# The first steps after a change pay for caches, allocations and data workers.
_WARM_UP = 2


class StepClock:
    """Collects step and micro-step times [s] of one batch shape and strategy; starts afresh at every change."""

    def __init__(self) -> None:
        self._last_edge_s: float | None = None
        self._change_s: float | None = None
        self._stands_s: float | None = None
        self._resumed_s: float | None = None
        self.generation = 0  # of the group that the steps were made in; 0 before the first
        # of the first step after the last change of group; None before it was committed
        self.first_step_s: float | None = None
        self._last_micro_s: float | None = None
        self._shape: BatchChoice | None = None
        self.strategy = ""
        self.uneven = False
        self.batch_size = 0
        self._skip = _WARM_UP
        self._steps: deque[float] = deque(maxlen=_KEPT)
        self._micros: deque[float] = deque(maxlen=_KEPT)

    def edge(
        self,
        shape: BatchChoice | None,
        micro_steps: int,
        samples: int,
        strategy: str | None,
        *,
        uneven: bool = False,
        steps: int = 1,
    ) -> None:
        """Record the end of a committed step, or of several.

        Args:
            shape: of the batch; None when it trained nothing (evaluation).
            strategy: tells ways of synchronising apart; None while one is being chosen, for such steps do not count.
            uneven: its ranks had unequal shares; such times are not mixed with others.
            steps: that were committed together; their mean time counts.
        """
        now_s = time.monotonic()
        self._change_s = self._stands_s = None  # a change that was put off
        if self._resumed_s is not None:
            self.first_step_s, self._resumed_s = now_s - self._resumed_s, None
        if strategy is None:
            shape = None
        elif shape is not None and strategy != self.strategy:
            self._restart(shape)
            self.strategy = strategy
        if (shape is not self._shape and shape != self._shape) or uneven != self.uneven:
            self._restart(shape)
            self.uneven = uneven
        elif shape is not None and self._last_edge_s is not None and micro_steps == shape.accum_steps + 1:
            if self._skip:
                self._skip -= 1
            else:
                self._steps.append((now_s - self._last_edge_s) / steps)
                self.batch_size = max(samples, self.batch_size)
        self._last_edge_s, self._last_micro_s = now_s, now_s

    def micro(self) -> None:
        """Record the end of a micro-step that does not synchronise."""
        now_s = time.monotonic()
        if self._last_micro_s is not None and not self._skip:
            self._micros.append(now_s - self._last_micro_s)
        self._last_micro_s = now_s

    def change_begins(self) -> None:
        """Record the start of a change of group, agreed or after a failure."""
        self._change_s = time.monotonic() if self._change_s is None else self._change_s

    def group_stands(self) -> None:
        """Record that a new group has been formed; if it breaks before its ranks are identical, another one follows."""
        self._stands_s = time.monotonic()

    def resume(self, generation: int) -> Pause:
        """Resume in a new generation.

        Return the time since the last committed step by its parts, 0 where there is none.

        The parts are differences of one clock's readings, so that they sum to the whole.
        """
        now_s, last_s = time.monotonic(), self._last_edge_s
        self._restart(self._shape)
        self.generation, self.first_step_s, self._resumed_s = generation, None, None
        pause = Pause()
        if last_s is not None:
            stands_s = self._stands_s if self._stands_s is not None else now_s
            change_s = self._change_s if self._change_s is not None else stands_s
            pause = Pause(vote_s=change_s - last_s, group_s=stands_s - change_s, state_s=now_s - stands_s)
            self._last_edge_s = self._resumed_s = now_s
        self._change_s = self._stands_s = None
        return pause

    def take(self) -> tuple[BatchChoice | None, int, float, float]:
        """Shape, number of steps, and median step and micro-step time since the last call."""
        steps, micros = self._steps, self._micros
        self._steps, self._micros = deque(maxlen=_KEPT), deque(maxlen=_KEPT)
        return (
            self._shape,
            len(steps),
            statistics.median(steps) if steps else 0.0,
            statistics.median(micros) if micros else 0.0,
        )

    def _restart(self, shape: BatchChoice | None) -> None:
        self._shape, self._skip, self.batch_size = shape, _WARM_UP, 0
        self._steps, self._micros = deque(maxlen=_KEPT), deque(maxlen=_KEPT)
