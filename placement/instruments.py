"""Metrics and their values as plain data; ``placement.ray_cluster.metric_writer`` passes them to Ray."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import logging
import math
import re
from collections.abc import Callable, Iterable
from typing import TypeAlias

from placement.text import printable

logger = logging.getLogger("placement.metrics")

_MOST = 128  # characters of a label's value
_NAME = re.compile(r"^elastic_[a-z0-9_]+$")


class InstrumentKind(str, enum.Enum):
    """Kind of a metric, as in Prometheus."""

    GAUGE = "gauge"
    """The present value."""
    COUNTER = "counter"
    """An amount that is added; the name ends with ``_total``."""
    HISTOGRAM = "histogram"
    """One observation."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instrument:
    """Metric with its name, kind and labels."""

    name: str  # as Ray is given it: Ray puts ``ray_`` in front
    kind: InstrumentKind  # what its values mean
    description: str  # one sentence, with the unit
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()  # of a histogram, upper bounds, rising, all above 0

    def __post_init__(self) -> None:
        if not _NAME.match(self.name):
            raise ValueError(f"name must be elastic_ and small letters, digits or _, but got {self.name!r}")
        if (self.kind is InstrumentKind.COUNTER) != self.name.endswith("_total"):
            raise ValueError(f"name must end with _total if, and only if, it is a counter's, but got {self.name!r}")
        if (self.kind is InstrumentKind.HISTOGRAM) != bool(self.buckets):
            raise ValueError(f"buckets must be given for a histogram, and for nothing else, but got {self.buckets}")

    def sample(self, value: float | None, *labels: str) -> tuple[Sample, ...]:
        """Return a sample of the value; empty if the value is unknown, infinite, or no increase (of a counter)."""
        if len(labels) != len(self.labels):
            raise ValueError(f"{self.name} must get values for {self.labels}, but got {labels}")
        if value is None or not math.isfinite(value) or (self.kind is InstrumentKind.COUNTER and value <= 0):
            return ()
        return (Sample(instrument=self, labels=labels, value=float(value)),)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One value of a metric, with the values of its labels."""

    instrument: Instrument
    labels: tuple[str, ...]  # values of its labels, in their order
    value: float  # finite; of a counter what is added, above 0


WriteSamples: TypeAlias = Callable[[Iterable[Sample]], None]
"""Takes samples; it returns at once, and raises nothing. A gauge holds for as long as it is written again."""


class Guarded:
    """Wrapper that suppresses errors in measuring code and logs the first, so that measured code is not affected."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._failed = False

    def __call__(self, measure: Callable[[], None]) -> None:
        """Call the measuring code and suppress its errors."""
        try:
            measure()
        except Exception as error:
            if not self._failed:
                logger.warning("metrics of %s are not complete: %s: %s", self._what, type(error).__name__, error)
            self._failed = True


def gauge(name: str, description: str, *labels: str) -> Instrument:
    """Return a metric that holds a current value, which may rise and fall."""
    return Instrument(name=name, kind=InstrumentKind.GAUGE, description=description, labels=labels)


def counter(name: str, description: str, *labels: str) -> Instrument:
    """Return a metric that can only increase."""
    return Instrument(name=name, kind=InstrumentKind.COUNTER, description=description, labels=labels)


def histogram(name: str, description: str, buckets: tuple[float, ...], *labels: str) -> Instrument:
    """Return a metric of individual observations, counted in buckets with these upper bounds."""
    return Instrument(name=name, kind=InstrumentKind.HISTOGRAM, description=description, labels=labels, buckets=buckets)


def label_value(text: str) -> str:
    """Return a name in a form that Ray accepts as a label value: printable ASCII of at most 128 characters.

    A changed name ends with ``~`` and eight characters of its digest, so that different names stay different.
    """
    shown = printable(text).encode("ascii", "backslashreplace").decode()
    if shown == text and len(text) <= _MOST:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{shown[: _MOST - 9]}~{digest}"
