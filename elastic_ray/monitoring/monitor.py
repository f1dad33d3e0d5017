"""Settings of measurements: what is measured of the steps, and how often (pure)."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Monitor:
    """Request for measurements. What nobody asks for is not measured, and costs nothing.

    The requests of all models and policies of a run are joined (:meth:`joined`), so that each of them finds at least
    what it has asked for.

    Attributes:
        noise_every: steps from one measurement of the gradient noise scale to the next, 1 or more; None is what the
            job itself needs: the first 16 steps, then every fourth one. With one gradient per step (one worker without
            accumulation) layers are measured, or steps in two halves (``docs/batch.md``); None is as often as costs
            little where the batch adapts, else never.
        variance_every: the same of the gradient variance per parameter group; None for never. With one gradient per
            step it takes steps in two halves.
        norms_every: the same of gradient and update norms per parameter group; None for never.
        workers: whether each worker's times, memory and bytes on the wire are measured, in every step.

    Raises:
        ValueError: a number of steps is below 1. TypeError: it is no whole number.
    """

    noise_every: int | None = None
    variance_every: int | None = None
    norms_every: int | None = None
    workers: bool = False

    def __post_init__(self) -> None:
        for name in ("noise_every", "variance_every", "norms_every"):
            every = getattr(self, name)
            if every is None:
                continue
            if isinstance(every, bool) or not isinstance(every, int):
                raise TypeError(f"{name} must be a whole number of steps or None, but got {every!r}")
            if every < 1:
                raise ValueError(f"{name} must be 1 or more steps, or None for not at all, but got {every}")

    def joined(self, other: Monitor) -> Monitor:
        """Return a monitor with all that either asks for, at the higher frequency."""
        return Monitor(
            noise_every=_more_often(self.noise_every, other.noise_every),
            variance_every=_more_often(self.variance_every, other.variance_every),
            norms_every=_more_often(self.norms_every, other.norms_every),
            workers=self.workers or other.workers,
        )


def _more_often(first: int | None, second: int | None) -> int | None:
    known = [every for every in (first, second) if every is not None]
    return min(known, default=None)
