"""Policy that turns a scheduler's learning-rate decay into batch growth (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_ray.adaptation.policies.ready import ReadyPolicy
from elastic_ray.adaptation.policy import Answer
from elastic_ray.adaptation.requests import SetBatch
from elastic_ray.adaptation.view import PolicyView

GROWTH = 1.25
"""Factor by which a batch changes at least: each change cuts the loader's batches anew."""

_SAME = 1e-6


class Seesaw(ReadyPolicy):
    """Policy that grows the batch when the user's scheduler decays the learning rate.

    With r the scheduled rate, r0 its highest value so far, and M0 the initial batch, the batch is::

        M = min(M0 r0 / r, cap)

    The rate at that batch is r sqrt(M / M0) for Adam and similar optimizers, and r M / M0 for others
    (``scaling_rules``). Below the cap, a scheduled decay of the rate by a factor a therefore multiplies the batch by 1
    / a, and the rate by only sqrt(a) (for SGD, the rate stays the same). The loss after the same number of samples is
    unchanged. Once the cap is reached, the user's decay applies. If the rate rises again, the batch shrinks again.
    Source: Seesaw, arXiv 2510.14717.

    The cap is the smallest of three limits: the loader's ``max_batch_size``, the critical batch measured by branches,
    and the measured noise scale (growth up to that size wastes few samples). A batch that has grown is kept if the
    noise scale falls. If the batch does not fit into memory, it is reduced, and the rate matches the actual batch.

    Args:
        growth: see ``GROWTH``; 1 or more.

    Raises TypeError or ValueError if an argument has the wrong type or is out of range.
    """

    starts_at_initial = True

    def __init__(self, *, growth: float = GROWTH) -> None:
        self.strict = True
        self.growth = self._number("growth", growth, least=1.0)
        self.peaks: list[float] = []
        self.asked = 0
        self.changes: list[tuple[int, int]] = []  # samples and batch of the last two requests

    def before_train(self, view: PolicyView) -> Answer:
        """Return a request for the initial batch, so that the job does not choose the batch itself."""
        if view.max_batch_size is None:
            raise ValueError(
                f"schedule='seesaw' grows the batch, but the loader's is fixed at {view.initial_batch_size}: call "
                "loader.autoscale_batch_size(max_batch_size=...) before the first epoch, or give it max_batch_tokens"
            )
        self._decay(view.learning_rates)  # the highest so far
        self.asked = view.initial_batch_size
        return SetBatch(self.asked)

    def after_step(self, view: PolicyView) -> Answer:
        """Return a request for the batch two steps ahead; None if the batch would change too little."""
        if not self.asked:
            return self.before_train(view)
        target = self.target(view)
        largest = target == self._most(view)
        grows = target >= self.asked * self.growth or (largest and target > self.asked)
        if not grows and target * self.growth > self.asked:
            return None
        self.asked = target
        self.changes = [*self.changes[-1:], (view.samples, target)]
        return SetBatch(target)

    def coming_batches(self, view: PolicyView) -> Sequence[tuple[float, int]]:
        """Return the next two batches as pairs (samples from now, batch size), extrapolated from the last two."""
        if len(self.changes) < 2 or self.changes[1][1] <= self.changes[0][1]:
            return ()
        (before, small), (last, large) = self.changes
        steps = [(last + n * (last - before) - view.samples, large * (large / small) ** n) for n in (1, 2)]
        most = self._most(view)
        return [(float(ahead), min(most, int(size))) for ahead, size in steps if ahead > 0 and large < most]

    def target(self, view: PolicyView) -> int:
        """Return the batch that matches the scheduled learning rate, limited by the cap [samples]."""
        first, most = view.initial_batch_size, self._most(view)
        part = self._decay(view.learning_rates)
        wanted = most if part * most <= first else int(first / part)
        if wanted <= self.asked or view.noise is None:
            return max(first, min(wanted, most))
        measured = view.noise_scale  # None for no signal, which is no endless noise
        cap = self.asked if measured is None else max(self.asked, int(measured))
        return max(first, min(wanted, most, cap))

    @staticmethod
    def _most(view: PolicyView) -> int:
        """Return the largest batch permitted by the loader and the branches."""
        most = view.max_batch_size or view.initial_batch_size
        return most if view.critical_batch is None else max(view.initial_batch_size, min(most, view.critical_batch))

    def _decay(self, rates: tuple[float, ...]) -> float:
        """Return the current rates as a fraction of their highest values."""
        if len(self.peaks) != len(rates):
            self.peaks = [0.0] * len(rates)
        self.peaks = [max(peak, rate) for peak, rate in zip(self.peaks, rates, strict=True)]
        parts = [rate / peak for rate, peak in zip(rates, self.peaks, strict=True) if peak > 0]
        if parts and max(parts) - min(parts) > _SAME * max(parts):
            raise ValueError(
                "schedule='seesaw' needs one scheduler factor for all parameter groups, for there is one batch, but "
                f"they are at {min(parts):.4g} to {max(parts):.4g} of their highest rates: give all groups (of all "
                "optimizers) the same schedule, or use schedule='progress'"
            )
        return parts[0] if parts else 1.0
