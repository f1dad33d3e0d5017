"""Statistics of one model's backward passes, for the noise tracker and the gradient meter (torch)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from elastic_ray.monitoring.gradient_measures import StepMeasures
from elastic_ray.monitoring.measures import WorkerMeasures
from elastic_ray.sync.device_numbers import Number, added, read
from elastic_ray.sync.operations.bucket_operation import MeasuredGradient
from elastic_ray.sync.statistics.example_norms import ExampleNorms
from elastic_ray.sync.statistics.gradient_meter import GradientMeter
from elastic_ray.sync.statistics.noise import NoiseTracker
from elastic_ray.sync.statistics.noise_scale import TINY

if TYPE_CHECKING:
    from elastic_ray.steps.step import LoaderStep

_AddUp = Callable[[Sequence[float]], list[float]]


class GradientStatistics:
    """Collector of statistics from one model's backward passes, for the noise tracker and the gradient meter.

    Each gradient's squared norm is weighted by its share of the step's samples, so that sums over ranks and micro-steps
    are weighted means. Norms for the noise scale are in the optimizer's units (multiplied by its preconditioner); norms
    for the variance are not. Without a preconditioner, the two are equal and computed only once.

    Attributes:
        noise, meter: Tracker and meter that receive the statistics.
        norms_size: Number of local norms sent with reductions.
        due: Whether anything is being measured in this step.
        added_up: Whether the unit's workers have added up their measurements for this step.
        examples: Meter for single samples' gradients, on a lone rank with one gradient per step; None if not used.
    """

    def __init__(self, noise: NoiseTracker, meter: GradientMeter) -> None:
        self.noise, self.meter = noise, meter
        self.examples: ExampleNorms | None = None
        self._groups = self.norms_size = 0
        self._replicas = 1
        self._initial_batch_size = 0
        self.due = self.added_up = self.in_units = self._variance_due = self.wants_norms = False
        self._carried: list[Number] = []  # of the micro-steps before
        self._local: list[list[Number]] = []  # of the pass, by bucket
        self._first = self._preconditioned = False
        self._mean: list[float] | None = None  # squared norms of the mean gradient, in the noise scale's units
        self._plain_mean: list[float] | None = None  # without preconditioning

    def rebuilt(self, groups: int) -> None:
        """Reset the statistics for new buckets with ``groups`` parameter groups."""
        self._groups = groups
        self.meter.rebuilt(groups)
        self.norms_size = groups * (1 if self.meter.monitor.variance_every is None else 2)
        self.noise.rebuilt(groups, self.meter.monitor.noise_every)

    def enter_group(self) -> None:
        """Enter a group, and discard the meter's results from the previous group."""
        self.meter.enter_group()

    def invalidate(self) -> None:
        """Discard uncommitted statistics, because the group or the batch is changing, or an update is skipped."""
        self.noise.invalidate()
        self.meter.invalidate()

    def measures(self, workers: Sequence[WorkerMeasures]) -> StepMeasures:
        """Return all known statistics of the model, including ``workers``, the measurements from each worker."""
        known = self.meter.known
        return StepMeasures(
            noise=self.noise.value,
            initial_batch_size=self._initial_batch_size,
            variance=known.variance,
            norms=known.norms,
            workers=tuple(workers),
        )

    # -- what travels with reductions ----------------------------------------------------------------------------------

    @property
    def mean_size(self) -> int:
        """Number of norms each rank sends for the mean gradient if ranks hold different parts of it."""
        monitor = self.meter.monitor
        return self._groups * (1 if monitor.variance_every is None and monitor.norms_every is None else 2)

    @property
    def shared_size(self) -> int:
        """Number of rank 0's values sent to all ranks."""
        return self.noise.shared_size + self.meter.shared_size(self._groups)

    def shared_values(self) -> list[float]:
        """Return rank 0's measurements to send with the reduction."""
        values = self.noise.shared_values()
        return [*values, *self.meter.shared_values()] if self.meter.on else values

    def set_shared(self, values: list[float], *, first: bool) -> None:
        """Store rank 0's measurements after all ranks have received them; ``first`` is True on rank 0."""
        noise = self.noise.shared_size
        self.noise.set_shared(values[:noise])
        if len(values) > noise:
            self.meter.set_shared(values[noise:])
            if not first:
                self.meter.own = self.meter.known

    # -- one step ------------------------------------------------------------------------------------------------------

    def start_step(self, step: LoaderStep, steps: int, *, replicas: int, exact: bool, spacing: int) -> None:
        """Start a step, and decide which statistics to measure in it.

        Args:
            steps: Number of committed steps.
            replicas: Number of ranks whose gradients are summed.
            exact: Whether gradients are sent in a format that allows computing statistics.
            spacing: Number of steps from one step with such a format to the next.
        """
        self._replicas, self._initial_batch_size = replicas, step.init_batch_size
        gradients = replicas * step.micro_steps
        self.in_units = self.noise.measures(steps, gradients, halved=step.halved) and exact
        self.added_up = self._variance_due = self.wants_norms = False
        if self.meter.on:
            self.meter.start_step(steps)
            again = self.noise.again
            self._variance_due = exact and self.meter.wants_variance(
                gradients, spacing, halved=step.halved, again=again
            )
            self.wants_norms = exact and self.meter.wants_norms(spacing, again=again)
        self.due = self.in_units or self._variance_due or self.wants_norms or self.in_layers
        self._carried = [0.0] * self.norms_size

    @property
    def in_layers(self) -> bool:
        """True if single samples' gradients are being measured in the model's layers in this step."""
        return self.examples is not None and self.examples.on

    def part(self) -> list[float]:
        """Return the measurements for this worker's part of the model, for :meth:`combine_parts`."""
        return [*self.noise.part(), *(self.meter.part() if self.meter.on else ())]

    def combine_parts(self, parts: Sequence[Sequence[float]]) -> None:
        """Combine ``parts``, the results of :meth:`part` from each worker, into measurements for the entire model."""
        size = self.noise.shared_size
        self.noise.combine_parts([part[:size] for part in parts])
        if self.meter.on:
            self.meter.combine_parts([part[size:] for part in parts])

    def drop_parts(self) -> None:
        """Drop the latest measurements, because workers that share a replica have measured different things."""
        self.noise.drop()
        self.meter.invalidate()

    def start_pass(self) -> None:
        """Start a backward pass."""
        self._local = [[] for _ in range(self.norms_size)]

    def carry(self) -> None:
        """Keep this micro-step's norms, so that later micro-steps add to them."""
        self._carried = self.local_norms()

    def scale_carried(self, factor: float) -> None:
        """Multiply earlier micro-steps' norms by ``factor``, because they were computed with different weights."""
        self._carried = [norm * factor for norm in self._carried]

    def add(self, bucket: MeasuredGradient, weight: float) -> None:
        """Add the norms for a bucket that holds this rank's gradient times ``weight``, its share of the samples."""
        if not weight:
            return
        norm = None
        if self.in_units:
            preconditioner = self.noise.preconditioner(bucket) if self.noise.adam_like else None
            norm = bucket.squared_norm(preconditioner) / weight
            self._local[bucket.group].append(norm)
            norm = norm if preconditioner is None else None
        if self._variance_due:
            norm = bucket.squared_norm(None) / weight if norm is None else norm
            self._local[self._groups + bucket.group].append(norm)

    def local_norms(self) -> list[Number]:
        """Return the squared norms of this rank's gradients, summed over all micro-steps so far."""
        return [added([carried, *local]) for carried, local in zip(self._carried, self._local, strict=True)]

    def mean_norms(self, buckets: Sequence[MeasuredGradient], *, first: bool, everywhere: bool) -> list[Number]:
        """Return the norms of the step's mean gradient, for :meth:`set_mean_norms`.

        Args:
            buckets: Buckets that hold the mean gradient.
            first: Whether this is rank 0, which normally measures on behalf of all ranks.
            everywhere: Whether some buckets hold only part of the mean, so that all ranks must measure.
        """
        self._first = first
        self._preconditioned = self.in_units and self.noise.preconditions(buckets)
        found = self._squared_norms(buckets, self._preconditioned) if self.in_units else []
        plain = (first or everywhere) and (self._variance_due or self.wants_norms)
        if plain and (self._preconditioned or not self.in_units):
            found += self._squared_norms(buckets, False)
        return found

    def set_mean_norms(self, numbers: Sequence[Number], add_up: _AddUp | None = None) -> None:
        """Store the results of :meth:`mean_norms`.

        Args:
            add_up: Sums numbers over all ranks; only needed if each rank measures its own part.
        """
        known, size = read(numbers), 2 * self._groups
        self._mean = self._whole(known[:size], add_up) if self.in_units else None
        if not known:
            self._plain_mean = None
        elif self.in_units and len(known) == size:
            self._plain_mean = self._mean
        else:
            self._plain_mean = self._whole(known[-size:], add_up)

    def own_part_of_mean(self, buckets: Sequence[MeasuredGradient]) -> list[float]:
        """Return the norms of this rank's part of the mean gradient, to be summed for :meth:`set_mean`.

        Returns :attr:`mean_size` numbers, with zeros for anything not measured.
        """
        self._preconditioned = self.in_units and self.noise.preconditions(buckets)
        found = [0.0] * self._groups
        if self.in_units:
            found = self._norms_of_mean(buckets, preconditioned=self._preconditioned)
        if self.mean_size == self._groups:
            return found
        if (self._variance_due or self.wants_norms) and (self._preconditioned or not self.in_units):
            return found + self._norms_of_mean(buckets, preconditioned=False)
        return found + found

    def set_mean(self, sums: Sequence[float], *, first: bool) -> None:
        """Store the mean gradient's norms, summed over all ranks; ``first`` is True on rank 0."""
        self._first, groups = first, self._groups
        self._mean = list(sums[:groups]) if self.in_units else None
        self._plain_mean = list(sums[-groups:]) if self._variance_due or self.wants_norms else None
        if self.wants_norms and self._plain_mean is not None:
            self.meter.set_norms(self._plain_mean)

    def collect(self, step: LoaderStep, norms: Sequence[float], *, grad_scale: float, goes_on: bool) -> None:
        """Record the results of a pass, after :meth:`set_mean_norms`.

        Args:
            norms: Results of :meth:`local_norms`, summed over all ranks.
            grad_scale: AMP's loss scale, which gradients are still multiplied by.
            goes_on: Whether this pass added another loss's gradient to the previous pass's reduced gradient.
        """
        groups, squared = self._groups, grad_scale * grad_scale
        gradients = sum(1 for row in step.sizes for size in row if size)
        if self.in_units and gradients > 1 and self._mean is not None:
            self.noise.collect(
                step,
                [norm / squared for norm in norms[:groups]],
                [norm / squared for norm in self._mean],
                gradients=gradients,
                replicas=self._replicas,
                preconditioned=self._preconditioned,
                goes_on=goes_on,
            )
        if not self._first or self._plain_mean is None:
            return
        plain = [norm / squared for norm in self._plain_mean]
        if self._variance_due:
            means = [norm / squared for norm in norms[groups:]]
            self.meter.set_variance(step, means, plain, gradients=gradients, goes_on=goes_on)
        if self.wants_norms:
            self.meter.set_norms(plain)

    def collect_alone(self, buckets: Sequence[MeasuredGradient], grad_scale: float) -> None:
        """Record a single replica's gradient norms, measured in its buckets; ``grad_scale`` is AMP's loss scale."""
        if self.wants_norms:
            squared = grad_scale * grad_scale
            self.meter.set_norms([norm / squared for norm in self._norms_of_mean(buckets, preconditioned=False)])

    def measure_in(self, examples: ExampleNorms | None) -> None:
        """Set the meter for single samples' gradients; None stops these measurements."""
        if self.examples is not None:
            self.examples.stop()
        self.examples = examples

    def collect_examples(self, step: LoaderStep, grad_scale: float) -> bool:
        """Record the norms measured in the layers during the backward pass; return False if they cover too few.

        Parameters in other layers are assumed to behave like the measured parameters in their group or, without any, in
        the entire model.
        """
        assert self.examples is not None, "it measures"
        preconditioned = self.examples.preconditioned
        norms = self.examples.end()
        if norms is None:
            return False
        squared, samples = grad_scale * grad_scale, step.count
        ratio = sum(each.seen_examples for each in norms) / max(sum(each.seen for each in norms), TINY)
        means, of_mean = [0.0] * self._groups, [0.0] * self._groups
        for group in range(self._groups):
            mine = [each for each in norms if each.group == group]
            seen = sum(each.seen for each in mine)
            of_mean[group] = sum(each.whole for each in mine) / squared
            own = sum(each.seen_examples for each in mine) / seen if seen else ratio
            means[group] = samples * own * of_mean[group]
        self.noise.collect(
            step, means, of_mean, gradients=samples, replicas=self._replicas, preconditioned=preconditioned
        )
        return True

    def drop_examples(self) -> None:
        """Drop the layers' measurements, because another backward pass is adding to the gradient."""
        assert self.examples is not None, "it measured"
        self.examples.stop()
        self.noise.drop()

    def _norms_of_mean(self, buckets: Sequence[MeasuredGradient], *, preconditioned: bool) -> list[float]:
        """Return the squared norms of the buckets' contents, by parameter group."""
        return self._whole(read(self._squared_norms(buckets, preconditioned)), None)

    def _squared_norms(self, buckets: Sequence[MeasuredGradient], preconditioned: bool) -> list[Number]:
        """Return the squared norms of buckets that hold the entire mean, then of buckets that hold part of it."""
        found: list[list[Number]] = [[] for _ in range(2 * self._groups)]
        for bucket in buckets:
            preconditioner = self.noise.preconditioner(bucket) if preconditioned else None
            place = bucket.group + (self._groups if bucket.sliced else 0)
            found[place].append(bucket.squared_norm(preconditioner))
        return [added(each) for each in found]

    def _whole(self, known: Sequence[float], add_up: _AddUp | None) -> list[float]:
        """Return the norms of the entire mean: full sums plus the parts that `add_up` sums over ranks."""
        groups = self._groups
        parts = add_up(known[groups:]) if add_up is not None else known[groups:]
        return [each + part for each, part in zip(known[:groups], parts, strict=True)]

    # -- the optimizer -------------------------------------------------------------------------------------------------

    def applied(self) -> None:
        """Commit the latest backward pass's statistics, because the optimizer is about to apply its gradients."""
        self.noise.applied()
        if self.meter.on:
            self.meter.applied(self._replicas)
