"""SHELL: hands samples to ``ray.util.metrics``, from which Ray's agent on this node serves them to Prometheus.

Ray forgets a gauge's value with each export, and its agent drops one that two exports did not repeat. So gauges are
written again every second while they hold, and disappear by themselves when their writer ends or stops.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from placement.instruments import Instrument, InstrumentKind, Sample

logger = logging.getLogger("placement.metrics")


class MetricWriter:
    """Of one process. Nothing that goes wrong with metrics reaches its caller: it is logged once, and left."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}
        self._failed = False

    def __call__(self, samples: Iterable[Sample]) -> None:
        """Set gauges, add to counters, observe into histograms; returns in microseconds a sample."""
        for sample in samples:
            try:
                self._write(sample)
            except Exception as error:
                if not self._failed:
                    logger.warning("metric %s was not written: %s", sample.instrument.name, error)
                self._failed = True

    def _write(self, sample: Sample) -> None:
        instrument = sample.instrument
        made = self._made.get(instrument.name)
        if made is None:
            made = self._made[instrument.name] = _make(instrument)
        tags = dict(zip(instrument.labels, sample.labels, strict=True))
        if instrument.kind is InstrumentKind.GAUGE:
            made.set(sample.value, tags)
        elif instrument.kind is InstrumentKind.COUNTER:
            made.inc(sample.value, tags)
        else:
            made.observe(sample.value, tags)


def _make(instrument: Instrument) -> Any:
    """Ray's object of a metric."""
    told: dict[str, Any] = {"description": instrument.description, "tag_keys": instrument.labels}
    if instrument.kind is InstrumentKind.GAUGE:
        return Gauge(instrument.name, **told)
    if instrument.kind is InstrumentKind.COUNTER:
        return Counter(instrument.name, **told)
    return Histogram(instrument.name, boundaries=list(instrument.buckets), **told)
