"""Gradient variance, gradient norms and update norms of one model, measured on request (torch)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from elastic_ray.monitoring.gradient_measures import GradientNorms, GradientVariance
from elastic_ray.monitoring.monitor import Monitor
from elastic_ray.sync.statistics.noise_scale import estimate_groups

if TYPE_CHECKING:
    from elastic_ray.steps.step import LoaderStep

_DIGIT = 2.0**20  # numbers of steps travel in two digits, exact in float32


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """Latest measurements known to a rank; each field is None before its first measurement."""

    variance: GradientVariance | None = None
    norms: GradientNorms | None = None


class GradientMeter:
    """Meter of one model's gradient variance, gradient norms and update norms.

    Rank 0 makes the requested measurements, and its results are sent with the next gradient reduction. After each
    committed step, all ranks therefore know exactly the same numbers, regardless of rounding on their hardware.
    Gradients not applied by the optimizer do not count.

    Attributes:
        monitor: Measurements requested when buckets were last laid out.
        known: Measurements known to all ranks.
        moved: Norms of the step's updates so far, keyed by optimizer index.
    """

    def __init__(self, request: Callable[[], Monitor]) -> None:
        self._request = request
        self.monitor, self.on = Monitor(), False
        self.known = self.own = Known()
        self.moved: dict[int, tuple[float, ...]] = {}
        self._alone = True
        self._groups = 0
        self._step = 0
        self._variance: GradientVariance | None = None  # of the latest pass, to count once it is applied
        self._gradients: tuple[float, ...] | None = None  # norms, likewise
        self._sent: tuple[Known, list[float]] | None = None
        self._received: list[float] = []

    @property
    def outdated(self) -> bool:
        """True if the requested measurements have changed since buckets were last laid out."""
        return self._request() != self.monitor

    def rebuilt(self, groups: int) -> None:
        """Reset the meter for new buckets with ``groups`` parameter groups."""
        self.monitor = self._request()
        self.on = self.monitor.variance_every is not None or self.monitor.norms_every is not None
        if groups != self._groups:
            self.known = self.own = Known()
        self._groups = groups
        self._sent, self._received = None, []
        self.invalidate()

    def enter_group(self) -> None:
        """Enter a group; in its first step, rank 0 sends its results to all ranks."""
        self.known, self._received = Known(), []
        self.invalidate()

    def invalidate(self) -> None:
        """Discard the latest pass's measurements, because the batch is changing or an update is skipped."""
        self._variance = self._gradients = None
        self.moved.clear()

    def start_step(self, step: int) -> None:
        """Start a step after ``step`` committed steps."""
        self._step = step
        self.invalidate()

    def wants_variance(self, gradients: int, spacing: int, *, halved: bool, again: bool = False) -> bool:
        """True if the variance should be measured in this step.

        Args:
            gradients: Number of gradients in the step; a single gradient has no variance.
            spacing: Number of steps between steps that can be measured.
            halved: Whether the step was split in half for the measurement.
            again: Whether this step must be measured because the previous step's measurement was invalid.
        """
        every = self.monitor.variance_every
        return every is not None and gradients > 1 and (halved or again or self._step % every < spacing)

    def wants_norms(self, spacing: int, *, again: bool = False) -> bool:
        """True if norms should be measured in this step; arguments are the same as for :meth:`wants_variance`."""
        every = self.monitor.norms_every
        return every is not None and (again or self._step % every < spacing)

    def set_variance(
        self,
        step: LoaderStep,
        mean_sq_norms: Sequence[float],
        sq_norms_of_mean: Sequence[float],
        *,
        gradients: int,
        goes_on: bool = False,
    ) -> None:
        """Store the variance estimated from several gradients of the step.

        The arguments are the same as for ``NoiseTracker.collect``, without a preconditioner. The noise in two losses is
        assumed to be independent, so with ``goes_on``, the variances are added.
        """
        before, self._variance = self._variance, None
        if gradients < 2 or (goes_on and before is None):
            return
        estimates = estimate_groups(
            mean_sq_norms=mean_sq_norms, sq_norms_of_mean=sq_norms_of_mean, samples=gradients, scale=step.count
        )
        if estimates is None:
            return
        found = [each.var for each in estimates]  # of a part of the model, perhaps: clipped once it is whole
        if goes_on and before is not None:
            found = [first + second for first, second in zip(before.groups, found, strict=True)]
        self._variance = GradientVariance(step=self._step, batch_size=step.count, groups=tuple(found))

    def set_norms(self, sq_norms_of_mean: Sequence[float]) -> None:
        """Store the norm of the step's gradient for each parameter group, given the squared norms."""
        self._gradients = tuple(max(0.0, norm) ** 0.5 for norm in sq_norms_of_mean)

    def part(self) -> list[float]:
        """Return the latest measurements for this worker's part of the model, for :meth:`combine_parts`."""
        none = (0.0,) * self._groups
        variance, norms = self._variance.groups if self._variance else none, self._gradients or none
        return [float(self._variance is not None), float(self._gradients is not None), *variance, *norms]

    def combine_parts(self, parts: Sequence[Sequence[float]]) -> None:
        """Combine ``parts``, the results of :meth:`part` from all workers in the unit; drop all if any is missing."""
        groups = self._groups
        if self._variance is not None:
            sums = tuple(math.fsum(part[2 + group] for part in parts) for group in range(groups))
            self._variance = dataclasses.replace(self._variance, groups=sums) if all(p[0] for p in parts) else None
        if self._gradients is not None:
            norms = tuple(math.hypot(*(part[2 + groups + group] for part in parts)) for group in range(groups))
            self._gradients = norms if all(part[1] for part in parts) else None

    @property
    def wants_update(self) -> bool:
        """True if the next update should be measured because its gradient was measured."""
        return self._gradients is not None

    def applied(self, replicas: int) -> None:
        """Accept the variance of the latest pass over ``replicas`` replicas, because its gradients are applied next."""
        self._alone = replicas == 1
        variance, self._variance = self._variance, None
        if variance is not None:
            groups = tuple(max(0.0, each) for each in variance.groups)
            self._found(dataclasses.replace(self.own, variance=dataclasses.replace(variance, groups=groups)))

    def pop_unmoved(self) -> GradientNorms | None:
        """Return and clear the applied gradient's norms, without the update's norms; None if they were not measured."""
        gradients, self._gradients = self._gradients, None
        return None if gradients is None else GradientNorms(step=self._step, gradients=gradients, updates=())

    def updated(self, norms: tuple[float, ...]) -> None:
        """Store the norm of the update for each parameter group."""
        found = self.pop_unmoved()
        if found is not None:
            self._found(dataclasses.replace(self.own, norms=dataclasses.replace(found, updates=norms)))

    def found_by_all(self, norms: GradientNorms) -> None:
        """Store norms measured by all ranks together, which therefore all know them immediately."""
        self.own = dataclasses.replace(self.own, norms=norms)
        self.known = dataclasses.replace(self.known, norms=norms)

    def _found(self, own: Known) -> None:
        self.own = own
        if self._alone:
            self.known = own  # nobody to agree with

    def shared_size(self, groups: int) -> int:
        """Return the number of values to send for ``groups`` parameter groups."""
        variance = 3 + groups if self.monitor.variance_every is not None else 0
        return variance + (2 + 2 * groups if self.monitor.norms_every is not None else 0)

    def shared_values(self) -> list[float]:
        """Return rank 0's measurements to send with the reduction; zeros if nothing has been measured yet."""
        if self._sent is None or self._sent[0] is not self.own:
            self._sent = self.own, self._packed()
        return self._sent[1]

    def _packed(self) -> list[float]:
        """Return the measurements as numbers; step counts start at 1 so that 0 can mean no measurement."""
        variance, norms, values = self.own.variance, self.own.norms, list[float]()
        if self.monitor.variance_every is not None:
            none = [0.0] * (3 + self._groups)
            values += none if variance is None else [*_digits(variance.step), variance.batch_size, *variance.groups]
        if self.monitor.norms_every is not None:
            none = [0.0] * (2 + 2 * self._groups)
            values += none if norms is None else [*_digits(norms.step), *norms.gradients, *norms.updates]
        return values

    def set_shared(self, values: list[float]) -> None:
        """Store rank 0's measurements, given as its :meth:`shared_values`, after all ranks have received them."""
        if values == self._received:
            return
        self._received, groups = values, self._groups
        variance = norms = None
        if self.monitor.variance_every is not None:
            if (step := _number(values)) is not None:
                found = tuple(values[3 : 3 + groups])
                variance = GradientVariance(step=step, batch_size=round(values[2]), groups=found)
            values = values[3 + groups :]
        if self.monitor.norms_every is not None and (step := _number(values)) is not None:
            norms = GradientNorms(
                step=step, gradients=tuple(values[2 : 2 + groups]), updates=tuple(values[2 + groups : 2 + 2 * groups])
            )
        self.known = Known(variance, norms)


def _digits(step: int) -> tuple[float, float]:
    high, low = divmod(step + 1, int(_DIGIT))
    return float(high), float(low)


def _number(values: Sequence[float]) -> int | None:
    """Return the number of steps encoded at the start of the values; None without a measurement."""
    step = round(values[0] * _DIGIT + values[1]) - 1
    return step if step >= 0 else None
