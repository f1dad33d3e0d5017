"""Policy for a branch that trains on a given number of samples with a constant batch size (pure)."""

from __future__ import annotations

from elastic_ray.adaptation.policies.ready import ReadyPolicy
from elastic_ray.adaptation.policy import Answer
from elastic_ray.adaptation.requests import Pause, SetBatch
from elastic_ray.adaptation.view import PolicyView
from placement.text import count

_CLOSE = 0.1  # part of a batch by which a division among workers may miss it
_MOST_OFF = 5  # an epoch's last batch may be smaller


class BranchBatch(ReadyPolicy):
    """Policy for a branch (short run at one batch size) that keeps the batch and pauses after ``samples`` samples.

    A pause, unlike a stop, skips the code after the epoch loop, which only the original job should run.
    """

    owns_batch = True

    def __init__(self, batch_size: int, samples: int) -> None:
        self.strict = True
        self.batch_size = self._whole("batch_size", batch_size, least=1)
        self.samples = self._whole("samples", samples, least=1)
        self.end: int | None = None
        self.asked = False
        self.off = 0  # steps in a row at another batch

    def before_step(self, view: PolicyView) -> Answer:
        """Return requests for the constant batch size and, when the branch ends, for a pause."""
        if self.end is None:
            self.end = view.samples + self.samples
            return SetBatch(self.batch_size)
        self.off = self.off + 1 if abs(view.batch_size - self.batch_size) > _CLOSE * self.batch_size else 0
        if self.off >= _MOST_OFF:
            raise ValueError(
                f"a branch at batch {self.batch_size} trains at {view.batch_size} on {count(view.workers)}: raise "
                "local_bsz_bounds, allow gradient_accumulation, or leave this batch out of factors"
            )
        if view.samples < self.end or self.asked:
            return None
        self.asked = True
        return Pause("the branch has trained on its samples")
