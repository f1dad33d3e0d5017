"""Control of batch growth: decides from the observed gradients when the batch may grow or must shrink (pure).

The goodput model finds the best batch if its noise scale is right. This module decides whether it is. A signal no
larger than its own scatter does not mean infinite noise. If gradients grow after the batch has grown, the growth went
too far, whatever the model says.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Collection
from typing import Any, TypeAlias

from elastic_ray.batch.reports import NoiseSignal
from placement.text import count

MAX_GROWTH = 2.0
"""Factor by which a batch grows in one decision."""

LARGE_GROWTH = 4.0
"""The same where much is to be gained."""

QUIET_STEPS = 40
"""Steps without a signal, at a batch above the initial one, after which it goes down."""

QUIET_UPDATES = 6
"""Estimates that must have come in these steps."""

RISE = 4.0
"""Factor of its former highest by which the squared gradient norm rises where a growth has gone too far."""

RISE_UPDATES = 3
"""Estimates after a growth before it is judged."""

LEAST_LOSSES = 3
"""Reports of a loss before a growth, without which there is no range that a later one could leave."""

HIGH_LOSSES = 2
"""Losses in a row, above the range of those before a growth, that take it back."""

PAUSE_STEPS = 100
"""Steps after a growth was taken back before the next."""

_SIZES = 16  # estimates that the former range is made of
_LOSSES = 8  # losses, likewise
_LEAST_SPREAD = 0.1  # of the highest loss: what a range has beside itself at least
_LEAST_GROWTH = 1.1  # smaller ones are no growth


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepBack:
    """Smaller batch that the job must return to, and the reason."""

    batch_size: int  # global batch to go back to [samples]
    reason: str  # a sentence


class GrowthWatch:
    """Monitor of one job's gradients and losses, which limits batch growth.

    Args:
        init_batch_size: Global batch M0 [samples]; the batch never shrinks below it.
    """

    def __init__(self, init_batch_size: int) -> None:
        self._least = init_batch_size
        self._batch_size = self._steps = 0
        self._signal: NoiseSignal | None = None
        self._quiet_since: tuple[int, int] | None = None  # steps and updates at the latest signal
        self._sizes: deque[float] = deque(maxlen=_SIZES)
        self._grown: tuple[int, float, int] | None = None  # batch before, highest size there, updates then
        self._losses: deque[float] = deque(maxlen=_LOSSES)
        self._reports = 0
        self._bound: tuple[int, float] | None = None  # batch before a growth, and the loss that is out of its range
        self._growth = LARGE_GROWTH
        self._paused_until = 0

    def observe(
        self, *, batch_size: int, steps: int, signal: NoiseSignal | None, loss: tuple[int, float] | None = None
    ) -> None:
        """Record the batch, the gradient's signal strength, and the loss after the latest steps.

        Args:
            signal: Strength of the mean gradient relative to its noise. If None (unknown), only ``steps`` is recorded.
            loss: Number of the latest report that had a loss, and that loss; None before the first such report.
        """
        self._steps = steps
        if signal is None:
            return
        if batch_size != self._batch_size:
            grows = 0 < self._batch_size < batch_size
            self._grown = (self._batch_size, max(self._sizes), signal.updates) if grows and self._sizes else None
            if not grows:
                self._bound = None
            elif len(self._losses) >= LEAST_LOSSES and all(map(math.isfinite, self._losses)):
                self._bound = self._batch_size, _bound(self._losses)
            self._batch_size, self._quiet_since = batch_size, None
            self._sizes.clear()
            self._losses.clear()
        elif self._signal is None or signal.updates > self._signal.updates:
            self._sizes.append(signal.size)
        if signal.present or self._quiet_since is None:
            self._quiet_since = steps, signal.updates
        self._signal = signal
        if loss is not None and loss[0] > self._reports:
            self._reports = loss[0]
            self._losses.append(loss[1])

    @property
    def growth(self) -> float:
        """Largest factor that the next decision may apply to the batch; 1 if the batch may not grow."""
        return 1.0 if self.hindrance else self._growth

    @property
    def hindrance(self) -> str:
        """Reason why the batch may not grow at present; empty if it may."""
        if self._signal is not None and not self._signal.present:
            return (
                f"no signal: after {self._signal.updates} estimates the squared norm of the mean gradient does not "
                "stand out of their scatter"
            )
        if self._steps < self._paused_until:
            return f"a growth was taken back, the next may come after step {self._paused_until}"
        return ""

    @property
    def is_settled(self) -> bool:
        """True once there are enough gradient estimates to report that a signal is missing."""
        return self._signal is not None and self._signal.updates >= _SIZES

    def step_back(self) -> StepBack | None:
        """Return a smaller batch if gradients or losses require it, only once per cause; otherwise None."""
        signal, now = self._signal, self._batch_size
        if signal is None or now <= self._least:
            return None
        if self._grown is not None:
            before, highest, updates = self._grown
            if signal.updates - updates >= RISE_UPDATES and signal.size > RISE * highest:
                rise = f"squared gradient norms rose to {signal.size:.3g}, from {highest:.3g} at most"
                return self._take_back(before, rise)
            if signal.updates - updates >= _SIZES:
                self._grown = None
                self._growth = min(self._growth**2, LARGE_GROWTH)
        if self._bound is not None:
            before, bound = self._bound
            latest = list(self._losses)[-HIGH_LOSSES:]
            if len(latest) == HIGH_LOSSES and not any(loss <= bound for loss in latest):  # NaN is out of every range
                return self._take_back(before, f"the loss rose to {latest[-1]:.3g}, out of its range up to {bound:.3g}")
            if len(self._losses) == _LOSSES:
                self._bound = None
        since = self._quiet_since
        if since is None or self._steps - since[0] < QUIET_STEPS or signal.updates - since[1] < QUIET_UPDATES:
            return None
        smaller = max(self._least, now // 2)
        quiet, self._quiet_since = self._steps - since[0], (self._steps, signal.updates)
        return StepBack(batch_size=smaller, reason=f"batch {now} -> {smaller}: no signal in {count(quiet, 'step')}")

    def _take_back(self, before: int, rise: str) -> StepBack:
        """Return the batch before the growth that caused the given rise, and pause further growth."""
        now = self._batch_size
        self._grown = self._bound = None
        self._growth = max(_LEAST_GROWTH, math.sqrt(min(self._growth, now / before)))
        self._paused_until = self._steps + PAUSE_STEPS
        return StepBack(batch_size=before, reason=f"batch {now} -> {before}: after the growth {rise}")


def _bound(losses: Collection[float]) -> float:
    """Return the largest loss that still counts as in the range of the given finite losses."""
    highest = max(losses)
    return highest + max(highest - min(losses), _LEAST_SPREAD * abs(highest))


Ramp: TypeAlias = "tuple[tuple[float, int], ...]"
"""(progress from which it counts, global batch), by progress; empty for one batch size throughout."""


def read_ramp(batch_size: Any) -> tuple[Any, Ramp]:
    """Return the initial batch and the schedule [(progress 0 to 1, batch), ...], which is empty for a plain number.

    Raises:
        TypeError: An entry is not a pair of numbers.
        ValueError: The schedule does not start at 0, is not ascending, or reaches 1; or a batch is below 1.
    """
    if not isinstance(batch_size, list | tuple):
        return batch_size, ()
    found = tuple(_entry(each) for each in batch_size)
    begins = [begin for begin, _ in found]
    if not begins or begins[0] != 0.0:
        raise ValueError(f"a batch ramp must begin at progress 0, as [(0, 64), (0.1, 256)], but got {batch_size!r}")
    if any(later <= sooner for sooner, later in itertools.pairwise(begins)) or begins[-1] >= 1.0:
        raise ValueError(f"a batch ramp's progress must rise, and stay below 1, but got {batch_size!r}")
    return found[0][1], found


def _entry(entry: Any) -> tuple[float, int]:
    """Check one (progress, batch) pair of a ramp and return it."""
    if not isinstance(entry, list | tuple) or len(entry) != 2:
        raise TypeError(f"a batch ramp must hold pairs (progress, global batch), but got {entry!r}")
    begin, size = entry
    if isinstance(begin, bool) or not isinstance(begin, int | float) or not math.isfinite(begin):
        raise TypeError(f"a batch ramp's progress must be a number from 0 to 1, but got {begin!r}")
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"a batch ramp's global batch must be a whole number, but got {size!r}")
    if size < 1:
        raise ValueError(f"a batch ramp's global batch must be 1 or more, but got {size}")
    return float(begin), size
