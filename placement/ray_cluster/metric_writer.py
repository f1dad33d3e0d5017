"""SHELL: hands samples to ``ray.util.metrics``, from which Ray's agent on this node serves them to Prometheus.

Ray sends a gauge once after it was set, and its agent drops one that was not sent again for two report intervals (Ray
2.60, measured). So gauges are written again and again while they hold, and go by themselves once they are not: nothing
has to delete them, whether a value is not known any more or its process is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from placement.instruments import Instrument, InstrumentKind, Sample

logger = logging.getLogger("placement.metrics")


class MetricWriter:
    """Writer of metrics whose errors never reach the caller: they are logged once."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}
        self._failed = False

    def __call__(self, samples: Iterable[Sample]) -> None:
        """Set gauges, add to counters, observe into histograms; microseconds each."""
        for each in samples:
            try:
                self._write(each)
            except Exception as error:
                if not self._failed:
                    logger.warning("metric %s was not written: %s", each.instrument.name, error)
                self._failed = True

    def _write(self, sample: Sample) -> None:
        instrument = sample.instrument
        made = self._made.get(instrument.name)
        if made is None:
            made = self._made[instrument.name] = _make(instrument)
        _WRITE[instrument.kind](made, sample.value, dict(zip(instrument.labels, sample.labels, strict=True)))


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
