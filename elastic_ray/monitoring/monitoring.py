"""What is asked for of one run's steps, and where what was measured of them is found (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elastic_ray.monitoring.gradient_measures import StepMeasures
from elastic_ray.monitoring.monitor import Monitor
from elastic_ray.monitoring.step_meter import StepMeter


class Monitoring:
    """See the module's text.

    Args:
        traffic: bytes that the present group's collectives were given, by operation; empty where there is no group.
        sending_s: time in which its connections were sending [s].

    Attributes:
        meter: times, memory and bytes of this rank's steps.
        loss: the latest metric of that name that the loop has reported on rank 0, after the report's number.
    """

    def __init__(self, traffic: Callable[[], Mapping[str, int]] = dict, sending_s: Callable[[], float] = float) -> None:
        self.meter = StepMeter(traffic=traffic, sending_s=sending_s)
        self._request = Monitor()
        self._models: list[Callable[[], StepMeasures]] = []
        self.loss: tuple[int, float] | None = None

    @property
    def request(self) -> Monitor:
        """All that was asked for."""
        return self._request

    def ask(self, monitor: Monitor) -> None:
        """Measure this as well, from the next group on that is entered; on all ranks alike.

        So what is asked for before the first epoch is measured from the first step on.
        """
        self._request = self._request.joined(monitor)
        if monitor.workers:
            self.meter.ask()

    def take_report(self, metrics: Mapping[str, object], number: int) -> None:
        """The loop has reported, for the ``number``-th time in the run."""
        loss = metrics.get("loss")
        if isinstance(loss, (int, float)) and not isinstance(loss, bool):
            self.loss = number, float(loss)

    def add_model(self, measures: Callable[[], StepMeasures]) -> None:
        """The loop has wrapped another model, which is measured so."""
        self._models.append(measures)

    def measures(self, model: int = 0) -> StepMeasures:
        """Of a model, in the order in which the loop wraps them; before there is one, of the workers alone."""
        if model < len(self._models):
            return self._models[model]()
        return StepMeasures(workers=self.meter.workers)
