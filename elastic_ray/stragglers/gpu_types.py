"""Shares by speed for a group with several GPU types, where a slower type is not a straggler (pure).

Only additions, multiplications, divisions and comparisons are used, which IEEE 754 specifies to the last bit, so that
ranks on different kinds of machines compute the same shares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elastic_ray.stragglers.detection import MIN_STEPS, lower_median
from placement.goodput.mixed import MeasuredPart

if TYPE_CHECKING:
    from elastic_ray.membership.messages import Member
    from elastic_ray.monitoring.measures import WorkerMeasures

_WARM_UP = 2  # steps that pay for caches
_WORTH = 1.1  # times a weight must move
_LEAST_WEIGHT = 1.0 / 64.0


@dataclasses.dataclass(slots=True, kw_only=True)
class _Sums:
    """Medians over the workers of one GPU type, summed over steps."""

    busy_s: float = 0.0  # until their gradients were complete [s]
    samples: float = 0.0  # of one worker
    steps: int = 0  # how many


class TypeShares:
    """Shares of a step's samples by GPU type, adjusted until all types take the same time.

    A type that takes r times as long as the fastest type then gets 1 / r of its current samples, until times are equal,
    based on averages over ten steps. Before anything is measured, shares depend on the model's predicted speeds. Ranks
    are compared with each other only within a type.

    Args:
        equal: Function that returns True if the current group must have equal shares, because unequal shares did not
            fit into memory.
    """

    def __init__(
        self,
        *,
        members: Callable[[], Sequence[Member]],
        measured: Callable[[], Sequence[WorkerMeasures]],
        equal: Callable[[], bool] = bool,
    ) -> None:
        self._members, self._equal, self._measured = members, equal, measured
        self._seen: tuple[str, ...] = ()
        self._weights: dict[str, float] = {}
        self._sums: dict[str, _Sums] = {}
        self._steps = -_WARM_UP
        self._reported: dict[str, _Sums] = {}
        self.changes = 0
        self._of: Sequence[Member] = ()
        self._mixed = False

    @property
    def mixed(self) -> bool:
        """True if the current group has several GPU types."""
        members = self._members()
        if members is not self._of:
            self._of, self._mixed = members, len({member.gpu_type for member in members}) > 1
        return self._mixed

    def weights(self, others: Sequence[float] | None) -> tuple[float, ...] | None:
        """Return each rank's weight in dividing a step's samples, times ``others`` if given; None for equal shares."""
        if not self.mixed:
            return tuple(others) if others is not None else None
        known = self._known()
        own = [known[member.gpu_type] for member in self._members()]
        if others is not None and len(others) == len(own):
            own = [a * b for a, b in zip(own, others, strict=True)]
        return None if min(own) == max(own) else tuple(own)

    def comparable(self, sizes: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
        """Return the samples of each rank and micro-batch, scaled as if all GPU types had equal shares."""
        if not self.mixed:
            return sizes
        known, members = self._known(), self._members()
        return [[n / known[m.gpu_type] for n in row] for m, row in zip(members, sizes, strict=True)]

    def comparable_measures(self) -> Sequence[WorkerMeasures]:
        """Return the ranks' measures, with times scaled as if all GPU types had been equally fast in this step."""
        measured, members = self._measured(), self._members()
        if not self.mixed or len(measured) != len(members):
            return measured
        busy = self._medians([each.compute_s + each.data_s for each in measured])
        usual = lower_median(list(busy.values()))
        scale = {gpu: usual / own if own > 0 else 1.0 for gpu, own in busy.items()}
        return tuple(
            dataclasses.replace(each, compute_s=each.compute_s * by, data_s=each.data_s * by)
            for each, by in ((each, scale[m.gpu_type]) for each, m in zip(measured, members, strict=True))
        )

    def after_step(self, sizes: Sequence[Sequence[float]]) -> None:
        """Record the measures of a committed training step."""
        members, measured = self._members(), self._measured()
        if not self.mixed or not len(members) == len(measured) == len(sizes):
            return
        seen = tuple(member.gpu_type for member in members)
        if seen != self._seen:
            self._seen = seen
            self._start()
        busy = self._medians([each.compute_s + each.data_s for each in measured])
        compute = self._medians([each.compute_s for each in measured])
        samples = self._medians([sum(row) for row in sizes])
        self._steps += 1
        if self._steps <= 0 or min(busy.values()) <= 0 or min(samples.values()) <= 0:
            return
        for gpu in busy:
            _add(self._sums, gpu, busy[gpu], samples[gpu])
            _add(self._reported, gpu, compute[gpu] / len(sizes[0]), samples[gpu] / len(sizes[0]))
        if self._steps >= MIN_STEPS and not self._equal():
            self._move_shares()

    def _start(self) -> None:
        self._sums, self._reported, self._steps = {}, {}, -_WARM_UP

    def _move_shares(self) -> None:
        """Move shares towards equal times, if the change is large enough."""
        known = self._known()
        wanted = {gpu: known[gpu] / sums.busy_s for gpu, sums in self._sums.items()}
        fastest = max(wanted.values())
        wanted = {gpu: max(_LEAST_WEIGHT, weight / fastest) for gpu, weight in wanted.items()}
        moves = any(new > _WORTH * known[gpu] or known[gpu] > _WORTH * new for gpu, new in wanted.items())
        if moves:
            self._weights |= wanted
            self.changes += 1
            self._start()
        else:
            self._sums, self._steps = {}, 0

    def _known(self) -> dict[str, float]:
        """Return the weight of each GPU type present, scaled to a maximum of 1: measured or, before that, predicted."""
        speeds: dict[str, float] = {}
        for member in self._members():
            speeds.setdefault(member.gpu_type, member.speed)
        if self._equal():
            return dict.fromkeys(speeds, 1.0)
        if all(gpu in self._weights for gpu in speeds):
            found = {gpu: self._weights[gpu] for gpu in speeds}
        elif min(speeds.values()) > 0:
            found = speeds
        else:
            return dict.fromkeys(speeds, 1.0)
        fastest = max(found.values())
        return {gpu: max(_LEAST_WEIGHT, weight / fastest) for gpu, weight in found.items()}

    def _medians(self, values: Sequence[float]) -> dict[str, float]:
        """Return the lower median of ``values`` over each GPU type's ranks, keyed by type."""
        by_type: dict[str, list[float]] = {}
        for member, value in zip(self._members(), values, strict=True):
            by_type.setdefault(member.gpu_type, []).append(value)
        return {gpu: lower_median(found) for gpu, found in sorted(by_type.items())}

    def take(self) -> tuple[MeasuredPart, ...]:
        """Return and clear the mean measures of each GPU type; empty without steps, or with a single type."""
        seen, self._reported = self._reported, {}
        members = [member.gpu_type for member in self._members()]
        if not self.mixed or any(sums.busy_s <= 0 for sums in seen.values()):
            return ()
        return tuple(
            MeasuredPart(
                gpu=gpu,
                workers=members.count(gpu),
                atomic_bsz=sums.samples / sums.steps,
                grad_time=sums.busy_s / sums.steps,
            )
            for gpu, sums in sorted(seen.items())
            if gpu in members
        )

    def capture(self) -> dict[str, Any]:
        """Return the state to send to joining workers and to save in checkpoints."""
        sums = {gpu: dataclasses.asdict(each) for gpu, each in self._sums.items()}
        return {"weights": dict(self._weights), "seen": list(self._seen), "steps": self._steps, "sums": sums}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore the state returned by :meth:`capture`."""
        self._weights, self._seen = dict(tree["weights"]), tuple(tree["seen"])
        self._steps, self._sums = tree["steps"], {gpu: _Sums(**each) for gpu, each in tree["sums"].items()}
        self._reported = {}
        self.changes += 1


def _add(sums: dict[str, _Sums], gpu: str, busy_s: float, samples: float) -> None:
    each = sums.setdefault(gpu, _Sums())
    each.busy_s += busy_s
    each.samples += samples
    each.steps += 1
