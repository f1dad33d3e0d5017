"""Comparison of a job's branches to find the largest batch that does not reduce the value of a sample (pure)."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Curve: TypeAlias = "Sequence[tuple[float, float]]"
"""(samples since the branch began, reported loss), in order."""

_BINS = 8  # parts of the compared samples, whose differences tell how sure the mean is
_FEWEST = 2


class BranchError(RuntimeError):
    """Error raised if a job's branches cannot be started or compared."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BranchPlan:
    """Settings of a job's branches: short runs from a checkpoint that compare larger batches with the current one.

    Raises TypeError or ValueError if a field has the wrong type or is out of range.
    """

    factors: tuple[int, ...] = (2, 4)  # times the present batch, rising
    steps: int = 400  # of the branch that keeps the present batch; the others train on as many samples
    metric: str = "loss"  # reported by the loop; smaller is better
    tolerance: float = 0.01  # part of the loss by which a larger batch may be worse

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", tuple(self.factors))
        whole = [each for each in self.factors if isinstance(each, int) and not isinstance(each, bool)]
        if not whole or len(whole) < len(self.factors) or sorted(set(whole)) != whole or whole[0] < 2:
            raise ValueError(f"factors must be rising whole numbers from 2, such as (2, 4), but got {self.factors!r}")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 4 * whole[-1]:
            raise ValueError(
                f"steps must be a whole number from {4 * whole[-1]}, so that the largest batch is trained for four, "
                f"but got {self.steps!r}"
            )
        if not isinstance(self.metric, str) or not self.metric:
            raise ValueError(f"metric must be the name of a reported metric, such as 'loss', but got {self.metric!r}")
        if not isinstance(self.tolerance, int | float) or not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance must be above 0 and below 1, such as 0.01, but got {self.tolerance!r}")

    def sizes(self, batch_size: int, largest: int) -> tuple[int, ...]:
        """Return the global batches to compare: ``batch_size``, then its multiples by ``factors`` up to ``largest``.

        Raises BranchError if all multiples exceed ``largest``, which leaves nothing to compare.
        """
        batch_size = min(batch_size, largest)  # a division among workers may be a little larger
        larger = [each * batch_size for each in self.factors if each * batch_size <= largest]
        if not larger:
            raise BranchError(
                f"no batch of {' or '.join(map(str, self.factors))} times the present {batch_size} is within the "
                f"loader's largest, {largest}: raise max_batch_size (max_batch_tokens)"
            )
        return batch_size, *larger


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BranchLoss:
    """Mean loss of one branch (short run at one batch size), and its excess over the loss at the current batch."""

    batch_size: int
    steps: int  # optimizer steps that it has made
    loss: float  # mean over the second half of the samples
    worse: float = 0.0  # part of the present batch's loss by which it is larger
    error: float = 0.0  # standard error of ``worse``


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BranchResult:
    """Losses of a job's branches (short runs at several batch sizes) after training on the same number of samples."""

    step: int  # of the job, where they began
    samples: int  # that each has trained on
    metric: str
    tolerance: float
    losses: tuple[BranchLoss, ...]  # the present batch's first, then rising

    @property
    def critical_batch(self) -> int | None:
        """Largest batch whose loss exceeds the current batch's by at most ``tolerance``; None if noise hides this."""
        found = self.losses[0].batch_size
        for each in self.losses[1:]:
            if each.worse > self.tolerance and each.worse - each.error > 0:
                break
            if each.error > self.tolerance:
                return None if found == self.losses[0].batch_size else found
            found = each.batch_size
        return found

    @property
    def plain(self) -> dict[str, Any]:
        """Result as plain values, for events and JSON."""
        return {"critical_batch": self.critical_batch, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        lines = [
            f"from step {self.step}, {self.samples} samples each, {self.metric} over the second half:",
            *(
                f"  batch {each.batch_size}: {each.loss:.5g}"
                + (f" ({each.worse:+.2%} +- {each.error:.2%})" if at else " (the present batch)")
                for at, each in enumerate(self.losses)
            ),
        ]
        found = self.critical_batch
        if found is None:
            lines.append(f"differences are within their error: compare more steps, for {self.tolerance:.1%} to be seen")
        elif found == self.losses[-1].batch_size:
            lines.append(f"samples are worth as much up to a batch of {found}, the largest that was tried")
        else:
            lines.append(f"samples are worth as much up to a batch of {found}")
        return "\n".join(lines)


def compare(plan: BranchPlan, step: int, samples: int, curves: Mapping[int, Curve]) -> BranchResult:
    """Compare the losses of a job's branches (short runs at several batches) over the second half of their samples.

    All branches train on the same samples in the same order. Let d_i be the difference between a branch's mean loss and
    the current batch's in the i-th of n parts of that half, and L the mean loss at the current batch. Then worse =
    mean(d) / |L|, and error = std(d) / sqrt(n) / |L|.

    ``curves`` holds the loss curve of each branch, keyed by batch, the current one first.

    Raises BranchError if a branch has too few reports in that half, or they are not spread over it.
    """
    halves = {size: [each for each in curve if samples / 2 <= each[0] <= samples] for size, curve in curves.items()}
    parts = min(_BINS, *(len(half) // 2 for half in halves.values()))
    for size, half in halves.items():
        if len(half) < 2 * _FEWEST:
            raise BranchError(
                f"the loop must report {plan.metric!r} {2 * _FEWEST} times or more within {samples // 2} samples, but "
                f"at batch {size} it did {len(half)} times: report it more often, or branch for more steps"
            )
    means = {size: _binned(half, samples, parts) for size, half in halves.items()}
    first = next(iter(means.values()))
    losses = []
    for size, values in means.items():
        pairs = [(a, b) for a, b in zip(values, first, strict=True) if a is not None and b is not None]
        if len(pairs) < _FEWEST:
            raise BranchError(
                f"the reports of {plan.metric!r} must be spread over the samples, but at batch {size} "
                "they are not: report it at equal distances"
            )
        base = abs(statistics.fmean(b for _, b in pairs)) or 1.0
        apart = [(a - b) / base for a, b in pairs]
        losses.append(
            BranchLoss(
                batch_size=size,
                steps=round(samples / size),
                loss=statistics.fmean(a for a, _ in pairs),
                worse=statistics.fmean(apart),
                error=statistics.stdev(apart) / math.sqrt(len(apart)),
            )
        )
    return BranchResult(step=step, samples=samples, metric=plan.metric, tolerance=plan.tolerance, losses=tuple(losses))


def _binned(half: Curve, samples: int, parts: int) -> list[float | None]:
    """Return the mean loss in each part of the second half; None for a part without reports."""
    bins: list[list[float]] = [[] for _ in range(parts)]
    for at, loss in half:
        bins[min(parts - 1, int((at / samples - 0.5) * 2 * parts))].append(loss)
    return [statistics.fmean(each) if each else None for each in bins]
