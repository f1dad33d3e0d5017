"""Settings that select what to measure in training steps, and how often (pure)."""

from __future__ import annotations

import dataclasses

from placement.checks import check_whole


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Monitor:
    """Request for measurements; other measurements are not made, and cost nothing.

    Requests from all of a run's models and policies are combined (:meth:`joined`), so that each gets at least the
    measurements that it requested.

    Attributes:
        noise_every: Steps between measurements of the gradient noise scale, 1 or more. None measures as often as the
            job itself needs: in the first 16 steps, then in every fourth. With one gradient per step (one worker
            without accumulation), the measurement uses single layers, or steps split in two halves (``docs/batch.md``).
            In that case, None measures as often as is cheap if the batch adapts, and never otherwise.
        variance_every: Steps between measurements of the gradient variance per parameter group; None for never. With
            one gradient per step, the measured steps are split in two halves.
        norms_every: Steps between measurements of gradient and update norms per parameter group; None for never.
        workers: True to measure each worker's times, memory and bytes on the wire in every step.

    Raises:
        ValueError: A number of steps is below 1. TypeError: A number of steps is not an integer.
    """

    noise_every: int | None = None
    variance_every: int | None = None
    norms_every: int | None = None
    workers: bool = False

    def __post_init__(self) -> None:
        for name in ("noise_every", "variance_every", "norms_every"):
            if (every := getattr(self, name)) is not None:
                check_whole(name, every, least=1, unit="steps or None")

    def joined(self, other: Monitor) -> Monitor:
        """Return a monitor that requests all measurements of this one and ``other``, at the higher frequency."""
        return Monitor(
            noise_every=_more_often(self.noise_every, other.noise_every),
            variance_every=_more_often(self.variance_every, other.variance_every),
            norms_every=_more_often(self.norms_every, other.norms_every),
            workers=self.workers or other.workers,
        )


def _more_often(first: int | None, second: int | None) -> int | None:
    known = [every for every in (first, second) if every is not None]
    return min(known, default=None)
