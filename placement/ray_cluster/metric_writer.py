"""SHELL: export of samples to ``ray.util.metrics``, which Ray's agent on this node exposes to Prometheus.

Ray sends a gauge once after it is set, and its agent drops a gauge that is not sent again within two report intervals
(Ray 2.60, measured). Gauges are therefore rewritten while they are valid and then disappear by themselves: nothing has
to delete them if a value becomes unknown or its process ends.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import ray
from ray.util.metrics import Counter, Gauge, Histogram

from placement.instruments import Instrument, InstrumentKind, Sample

logger = logging.getLogger("placement.metrics")


class MetricWriter:
    """Writer of metrics that never raises an error to its caller; the first error is logged."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}
        self._failed = False

    def __call__(self, samples: Iterable[Sample]) -> None:
        """Write samples: set gauges, add to counters, and observe into histograms; each takes microseconds."""
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
    """Return Ray's metric object for an instrument."""
    told: dict[str, Any] = {"description": instrument.description, "tag_keys": instrument.labels}
    if instrument.kind is InstrumentKind.GAUGE:
        return Gauge(instrument.name, **told)
    if instrument.kind is InstrumentKind.COUNTER:
        return Counter(instrument.name, **told)
    return Histogram(instrument.name, boundaries=list(instrument.buckets), **told)


_FOLDER = "RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"
_ROOT = "RAY_METRICS_OUTPUT_ROOT"
_ASSET = "elastic_ray.observe.metrics", "grafana.json"
FILE = "elastic_ray_grafana_dashboard.json"
"""Name of the placed file, beside Ray's."""


def cluster_writer(on: bool) -> MetricWriter | None:
    """Return a writer for the allocator's samples, and install the Grafana dashboard; None if metrics are off."""
    if not on:
        return None
    threading.Thread(target=place_dashboard, name="place dashboard", daemon=True).start()  # storage may hang
    return MetricWriter()


def place_dashboard() -> None:
    """Write this package's Grafana dashboard to the head node; errors are logged, not raised."""
    try:
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        package, name = _ASSET
        # Others may write in Ray's folders: a name that they cannot guess, and no link of theirs is followed.
        handle, unfinished = tempfile.mkstemp(dir=folder, prefix=f".{FILE}.")
        with os.fdopen(handle, "wb") as file:
            file.write((files(package) / name).read_bytes())
        Path(unfinished).chmod(0o644)
        Path(unfinished).replace(folder / FILE)
    except Exception as error:
        logger.debug("the Grafana dashboard was not placed: %s", error)


def _folder() -> Path:
    """Return Grafana's folder, as computed in ``ray.dashboard.modules.metrics.metrics_head`` of Ray 2.60."""
    if os.environ.get(_FOLDER):
        return Path(os.environ[_FOLDER])
    root = os.environ.get(_ROOT)
    private: Any = ray._private
    session = Path(private.worker._global_node.get_session_dir_path())
    return (Path(root) if root else session / "metrics") / "grafana" / "dashboards"
