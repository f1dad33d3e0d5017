"""Batches that a job will have, and what its sizes are worth until then."""

from __future__ import annotations

import dataclasses
import itertools

from placement.checks import check_number


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchForecast:
    """Coming global batches of a job, as a function of the samples that it will have trained on.

    Raises ValueError: it is empty, its samples do not rise from above 0, or a batch is below 1.
    """

    steps: tuple[tuple[float, int], ...]  # (samples from now on, batch from there on), by samples

    def __post_init__(self) -> None:
        samples = [begin for begin, _ in self.steps]
        if not samples or not samples[0] > 0 or any(not b > a for a, b in itertools.pairwise(samples)):
            raise ValueError(
                f"steps must be pairs (samples, batch), the samples rising from above 0, but got {self.steps}"
            )
        for _, batch in self.steps:
            check_number("a batch of steps", batch, least=1, unit="sample")

    def after(self, samples: float) -> tuple[int | None, BatchForecast | None]:
        """Return the batch after so many more samples, None where it is still the present one; and what then comes."""
        batch = next((size for begin, size in reversed(self.steps) if begin <= samples), None)
        left = tuple((begin - samples, size) for begin, size in self.steps if begin > samples)
        return batch, BatchForecast(steps=left) if left else None
