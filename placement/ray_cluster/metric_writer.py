"""SHELL: hands samples to ``ray.util.metrics``, from which Ray's agent on this node serves them to Prometheus.

Ray sends a gauge's last value again and again while the process lives, and its agent drops one that it has not got for
two of its report intervals: those of a process that ends go by themselves. Ray has no call that withdraws one before
(2.60); a value that is not finite is left out by OpenTelemetry, and the gauge is gone until it has a value again.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from placement.instruments import Instrument, InstrumentKind, Sample

logger = logging.getLogger("placement.metrics")


class MetricWriter:
    """Nothing that goes wrong with metrics reaches its caller: it is logged once, and left."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}
        self._shown: dict[tuple[Instrument, tuple[str, ...]], float] = {}
        self._failed = False

    def show(self, gauges: Iterable[Sample]) -> None:
        """Set those that have changed, and withdraw those that are not among them any more."""
        now = {(each.instrument, each.labels): each.value for each in gauges}
        before, self._shown = self._shown, now
        for (instrument, labels), value in now.items():
            if before.get((instrument, labels)) != value:
                self._write(instrument, labels, value)
        for instrument, labels in before.keys() - now.keys():
            self._write(instrument, labels, math.nan)

    def add(self, samples: Iterable[Sample]) -> None:
        """Add to counters, observe into histograms."""
        for each in samples:
            self._write(each.instrument, each.labels, each.value)

    def _write(self, instrument: Instrument, labels: tuple[str, ...], value: float) -> None:
        """One value; microseconds."""
        try:
            made = self._made.get(instrument.name)
            if made is None:
                made = self._made[instrument.name] = _make(instrument)
            _WRITE[instrument.kind](made, value, dict(zip(instrument.labels, labels, strict=True)))
        except Exception as error:
            if not self._failed:
                logger.warning("metric %s was not written: %s", instrument.name, error)
            self._failed = True


@functools.cache
def process_writer() -> MetricWriter:
    """The only one of this process: a job of a controller withdraws what the one before it has shown."""
    return MetricWriter()


_WRITE: Mapping[InstrumentKind, Any] = {
    InstrumentKind.GAUGE: Gauge.set,
    InstrumentKind.COUNTER: Counter.inc,
    InstrumentKind.HISTOGRAM: Histogram.observe,
}


def _make(instrument: Instrument) -> Any:
    """Ray's object of a metric."""
    told: dict[str, Any] = {"description": instrument.description, "tag_keys": instrument.labels}
    if instrument.kind is InstrumentKind.GAUGE:
        return Gauge(instrument.name, **told)
    if instrument.kind is InstrumentKind.COUNTER:
        return Counter(instrument.name, **told)
    return Histogram(instrument.name, boundaries=list(instrument.buckets), **told)
